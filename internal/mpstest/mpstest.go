// Package mpstest has a stand-in for nvidia-cuda-mps-control. Tests script it, and play its clients.
package mpstest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// ControlProgram is a stand-in of a test, with faults and daemons of its own.
type ControlProgram struct {
	Path string // for plugin.sharing.mps.control

	t      testing.TB
	mu     sync.Mutex // guards faults
	faults map[string]Faults
}

// build builds the stand-in once per test binary, into a directory that Main removes.
var build struct { //nolint:gochecknoglobals // nothing else leads from TestMain to a test
	dir  string
	once sync.Once
	err  error
}

// Main runs the tests of a package that calls New; its result is for os.Exit in TestMain.
func Main(m *testing.M) int {
	var err error
	if build.dir, err = os.MkdirTemp("", "standin"); err != nil {
		panic(err)
	}
	defer os.RemoveAll(build.dir) //nolint:errcheck // the tests count
	return m.Run()
}

const programName = "nvidia-cuda-mps-control"

// New returns a stand-in. All processes that still run of it end with the test.
func New(t testing.TB) *ControlProgram {
	t.Helper()
	if build.dir == "" {
		t.Fatal("mpstest.New needs a TestMain that calls mpstest.Main")
	}
	program := filepath.Join(build.dir, programName)
	build.once.Do(func() {
		// Not with the race detector, which costs each run of the control program half a second.
		out, err := exec.Command("go", "build", "-race=false", "-ldflags", "-s -w", "-o", program, //nolint:noctx // it exits
			"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest/"+programName).CombinedOutput()
		if err != nil {
			build.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	if build.err != nil {
		t.Fatal(build.err)
	}
	dir, err := os.MkdirTemp(build.dir, "") // short, for paths of sockets
	if err != nil {
		t.Fatal(err)
	}
	c := &ControlProgram{Path: filepath.Join(dir, programName), t: t, faults: make(map[string]Faults)}
	t.Cleanup(c.KillAll)
	if err := os.Link(program, c.Path); err != nil {
		t.Fatal(err)
	}
	return c
}

// Root returns a directory for plugin.sharing.mps.root whose sockets' paths are short enough.
func (c *ControlProgram) Root() string { return filepath.Dir(c.Path) + "/r" }

// SetFaults replaces the faults of a device, or of AllDevices, from the next command on. Empty faults end them.
func (c *ControlProgram) SetFaults(device string, f Faults) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults[device] = f
	data, err := json.Marshal(c.faults)
	next := FaultsFile(c.Path) + ".next"
	if err == nil {
		err = os.WriteFile(next, data, 0o600)
	}
	if err == nil {
		err = os.Rename(next, FaultsFile(c.Path))
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

// Command is a command that reached a daemon.
type Command struct {
	Device string
	Daemon int // PID
	Text   string
}

// Commands returns all commands that reached a daemon, in their order. A daemon that starts to serve is a command "start".
func (c *ControlProgram) Commands() (commands []Command) {
	c.t.Helper()
	data, err := os.ReadFile(CommandsFile(c.Path))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		c.t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		line, complete := strings.CutSuffix(line, "\n")
		if !complete {
			break // a daemon is writing it
		}
		device, rest, _ := strings.Cut(line, "\t")
		daemon, text, ok := strings.Cut(rest, "\t")
		pid, err := strconv.Atoi(daemon)
		if err != nil || !ok {
			c.t.Fatalf("%s: %q", CommandsFile(c.Path), line)
		}
		commands = append(commands, Command{Device: device, Daemon: pid, Text: text})
	}
	return commands
}

// Process is a daemon or a server.
type Process struct {
	PID    int
	Parent int
	Server bool   // else a daemon
	Device string // CUDA_VISIBLE_DEVICES
	Pipe   string // CUDA_MPS_PIPE_DIRECTORY
}

// Processes returns the daemons and servers that run, also hanging ones.
func (c *ControlProgram) Processes() (found []Process) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		panic(err) // a constant pattern
	}
	daemons := make(map[int]string) // their arguments by PID
	for _, dir := range dirs {
		if exe, err := os.Readlink(dir + "/exe"); err != nil || strings.TrimSuffix(exe, " (deleted)") != c.Path {
			continue
		}
		args, argsErr := os.ReadFile(dir + "/cmdline")
		_, parent, statErr := stat(dir)
		env, envErr := os.ReadFile(dir + "/environ")
		pid, pidErr := strconv.Atoi(filepath.Base(dir))
		if errors.Join(argsErr, envErr, statErr, pidErr) != nil || len(args) == 0 {
			continue // it exited
		}
		p := Process{PID: pid, Parent: parent, Server: bytes.HasPrefix(args, []byte("nvidia-cuda-mps-server\x00"))}
		if !p.Server && !bytes.Contains(args, []byte("\x00-f\x00")) && !bytes.Contains(args, []byte("\x00-d\x00")) {
			continue // the control program or a client
		}
		if !p.Server {
			daemons[pid] = string(args)
		}
		for v := range strings.SplitSeq(string(env), "\x00") {
			switch name, value, _ := strings.Cut(v, "="); name {
			case "CUDA_VISIBLE_DEVICES":
				p.Device = value
			case "CUDA_MPS_PIPE_DIRECTORY":
				p.Pipe = value
			}
		}
		found = append(found, p)
	}
	// The child that becomes a server looks like its daemon for a moment.
	return slices.DeleteFunc(found, func(p Process) bool { return !p.Server && daemons[p.Parent] == daemons[p.PID] })
}

// KillAll kills the daemons and servers that run, as the end of their container does.
func (c *ControlProgram) KillAll() {
	for _, p := range c.Processes() {
		_ = syscall.Kill(p.PID, syscall.SIGKILL) // it may have ended
	}
}

// stat returns the state and the parent of a process.
func stat(dir string) (state string, parent int, err error) {
	text, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return "", 0, err
	}
	_, rest, _ := strings.Cut(string(text), ") ") // after the name of the program, which has no parenthesis
	_, err = fmt.Sscan(rest, &state, &parent)
	return state, parent, err
}

// Stopped reports whether a process was stopped by a signal.
func Stopped(pid int) bool {
	state, _, err := stat("/proc/" + strconv.Itoa(pid))
	return err == nil && state == "T"
}

// Daemons returns the PIDs of the daemons that run, by device.
func (c *ControlProgram) Daemons() map[string]int {
	daemons := make(map[string]int)
	for _, p := range c.Processes() {
		if !p.Server {
			daemons[p.Device] = p.PID
		}
	}
	return daemons
}

// Control runs the control program with a command.
func (c *ControlProgram) Control(pipeDir, command string) (string, error) {
	cmd := exec.CommandContext(c.t.Context(), c.Path)
	cmd.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+pipeDir)
	cmd.Stdin = strings.NewReader(command + "\n")
	out, err := cmd.CombinedOutput()
	return strings.TrimSuffix(string(out), "\n"), err
}

// Fault has all servers of a pipe directory meet a fatal fault of a client, and fails the test if there is none.
func (c *ControlProgram) Fault(pipeDir string) {
	c.t.Helper()
	if out, err := c.Control(pipeDir, "standin_fault"); err != nil || out == "" {
		c.t.Fatalf("fault of the servers of %s: %q, %v", pipeDir, out, err)
	}
}
