package mps

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

// testImpostor is the variable of a process that pretends to be a control daemon: the pipe directory.
const testImpostor = "MPS_TEST_IMPOSTOR"

// impersonate is a process that has all of a control daemon's that a process can choose: name, arguments and environment from its start,
// and the socket and the process ID in the pipe directory, but not the lock. It ends with its standard input.
func impersonate(pipe string) int {
	fail := func(err error) int {
		fmt.Println(err)
		return 1
	}
	_ = os.Remove(filepath.Join(pipe, "control"))
	l, err := net.Listen("unix", filepath.Join(pipe, "control"))
	if err != nil {
		return fail(err)
	}
	if err := os.WriteFile(filepath.Join(pipe, "nvidia-cuda-mps-control.pid"), fmt.Append(nil, os.Getpid()), 0o600); err != nil {
		return fail(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	fmt.Println("ready")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return 0
}

// startImpostor starts an impostor; as root in a mount namespace of its own, as in a container that has the pipe directory.
func (n *node) startImpostor(pipe string) *exec.Cmd {
	n.t.Helper()
	name := filepath.Join(n.t.TempDir(), controlName)                                           // the kernel's name of the process
	if err := errors.Join(os.Symlink(os.Args[0], name), os.MkdirAll(pipe, 0o755)); err != nil { //nolint:gosec // as in production
		n.t.Fatal(err)
	}
	cmd := exec.Command(name, foregroundOption, multiUserOption)
	cmd.Env = append(os.Environ(), pipeVariable+"="+pipe, testImpostor+"="+pipe)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Getuid() == 0 {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNS
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		n.t.Fatalf("impostor: %s", line)
	}
	return cmd
}

// What a process chooses makes it no control daemon: the real one starts, and the process is left alone.
func TestSupervisorIgnoresImpostor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	impostor := n.startImpostor(n.root.PipeDir(gpuA))
	n.want(gpuA)
	stop := n.supervise()
	d := n.awaitServing(gpuA)[gpuA]
	if n.program.Daemons()[string(gpuA)] != d.PID || d.Error != "" {
		t.Errorf("%+v, impostor %d", d, impostor.Process.Pid)
	}
	stop()
	if !alive(impostor.Process.Pid) {
		t.Error("the impostor was killed")
	}
}

// A daemon that an earlier Supervisor has left is somebody else's: it is reported, keeps its clients, and is replaced when it has ended.
func TestSupervisorReportsForeignDaemon(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.want(gpuA, gpuB)
	first := n.startProcess()
	before := n.awaitServing(gpuA, gpuB)
	client := n.connect(gpuA)
	killProcess(first)
	kill(t, before[gpuB].PID)
	eventually(t, "end of the killed daemon", func() bool { return !alive(before[gpuB].PID) }, func() string { return "" })

	commands := len(n.program.Commands())
	stop := n.supervise()
	foreign := func(s Status) bool {
		return len(s.Daemons) == 2 && s.Daemons[0].Foreign && s.Daemons[0].PID == 0 && s.Daemons[1].PID != 0
	}
	old := before[gpuA].PID
	text := n.await("foreign daemon", foreign).Daemons[0].Error
	for _, want := range []string{
		fmt.Sprintf("process %d, started at ", old), n.root.PipeDir(gpuA),
		fmt.Sprintf("pkill -KILL -P %d; kill -KILL %[1]d", old),
	} {
		if !strings.Contains(text, want) {
			t.Errorf("got %q, want %q", text, want)
		}
	}
	_, started, _ := strings.Cut(text, "started at ")
	started, _, _ = strings.Cut(started, ",")
	if at, err := time.Parse(time.RFC3339, started); err != nil || at.Sub(before[gpuA].Started).Abs() > 5*time.Second {
		t.Errorf("started at %s, want %s; %v", started, before[gpuA].Started, err)
	}
	if err := n.call(restartRoute, Restart{Device: gpuA}); err != nil {
		t.Fatal(err)
	}
	n.want()
	n.await("no daemon", func(s Status) bool { return len(s.Daemons) == 0 })
	stop()
	if !alive(old) || !alive(client.Server) {
		t.Error("the daemon of somebody else was ended")
	}
	for _, c := range n.program.Commands()[commands:] {
		if c.Daemon == old {
			t.Errorf("sent to the daemon of somebody else: %+v", c)
		}
	}
}

func TestSupervisorReplacesForeignDaemonAfterItsEnd(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string]mpstest.Faults{"serves": {}, "does not listen yet": {HangAtStart: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			if err := n.root.prepareDirectories(gpuA, false, zap.NewNop()); err != nil {
				t.Fatal(err)
			}
			n.program.SetFaults(mpstest.AllDevices, faults)
			other := exec.Command(n.program.Path, foregroundOption)
			other.Env = append(environment(n.root, gpuA), "CUDA_VISIBLE_DEVICES="+string(gpuA))
			if err := other.Start(); err != nil {
				t.Fatal(err)
			}
			end := func() { _ = other.Process.Kill(); _ = other.Wait() }
			t.Cleanup(end)
			eventually(t, "lock", func() bool {
				_, err := os.Stat(filepath.Join(n.root.LogDir(gpuA), "control.log")) // made after the lock
				_, listens := listener(n.root.PipeDir(gpuA))
				return err == nil && listens != faults.HangAtStart
			}, func() string { return "" })
			n.program.SetFaults(mpstest.AllDevices, mpstest.Faults{})
			n.want(gpuA)
			n.supervise()
			s := n.await("foreign daemon", func(s Status) bool { return len(s.Daemons) == 1 && s.Daemons[0].Foreign })
			want := fmt.Sprintf("process %d,", other.Process.Pid)
			if faults.HangAtStart {
				want = "fuser -k " + filepath.Join(n.root.PipeDir(gpuA), controlLock)
			}
			if text := s.Daemons[0].Error; !strings.Contains(text, want) {
				t.Errorf("got %q, want %q", text, want)
			}
			end()
			if d := n.awaitServing(gpuA)[gpuA]; d.Foreign || d.Error != "" || d.Restarts != 0 {
				t.Errorf("%+v", d)
			}
		})
	}
}
