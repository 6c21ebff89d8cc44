package mpstest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }

const device = "GPU-11111111-2222-3333-4444-555555555555"

// daemon is a daemon of a test.
type daemon struct {
	*ControlProgram
	t    *testing.T
	pipe string
	cmd  *exec.Cmd
}

func newDaemon(t *testing.T, faults Faults) *daemon {
	t.Helper()
	c := New(t)
	c.SetFaults(AllDevices, faults)
	d := &daemon{ControlProgram: c, t: t, pipe: filepath.Join(c.Root(), "pipe")}
	for _, dir := range []string{d.pipe, filepath.Join(c.Root(), "log")} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func (d *daemon) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(d.t.Context(), d.Path, args...)
	cmd.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+d.pipe, "CUDA_MPS_LOG_DIRECTORY="+filepath.Join(d.Root(), "log"),
		"CUDA_VISIBLE_DEVICES="+device)
	return cmd
}

// start starts the daemon and waits until it serves.
func (d *daemon) start(args ...string) {
	d.t.Helper()
	before := len(d.Commands())
	d.cmd = d.command(append([]string{"-f"}, args...)...)
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	await(d.t, func() bool { return len(d.Commands()) > before })
}

func (d *daemon) kill() {
	_ = d.cmd.Process.Kill()
	_ = d.cmd.Wait() // it was killed
}

func await(t *testing.T, done func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(20 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("timeout")
		}
	}
}

// expect runs commands, each with its answer.
func (d *daemon) expect(commandsAndAnswers ...string) {
	d.t.Helper()
	for i := 0; i < len(commandsAndAnswers); i += 2 {
		if out, err := d.Control(d.pipe, commandsAndAnswers[i]); err != nil || out != commandsAndAnswers[i+1] {
			d.t.Errorf("%s: expected %q, got %q, %v", commandsAndAnswers[i], commandsAndAnswers[i+1], out, err)
		}
	}
}

func (d *daemon) connect(uid int, env ...string) *Client {
	d.t.Helper()
	c, err := Connect(d.pipe, request(uid, env...))
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(c.Close)
	return c
}

func request(uid int, env ...string) ClientRequest {
	req := ClientRequest{UID: &uid, PID: 1000 + uid, Env: make(map[string]string)}
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		req.Env[name] = value
	}
	return req
}

func TestDefaultsReachServersStartedLater(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, Faults{})
	d.start()
	d.expect("get_default_active_thread_percentage", "100.0",
		"set_default_active_thread_percentage 25", "25.0",
		"set_default_device_pinned_mem_limit 0 10240M", "",
		"get_default_device_pinned_mem_limit "+device, "10G",
		"set_default_device_pinned_mem_limit 1 1G", invalidAnswer,
		"set_default_active_thread_percentage 101", invalidAnswer)
	c := d.connect(0)
	if c.Limits.ThreadPercentage != 25 || c.Limits.PinnedMemory[device] != 10<<30 {
		t.Error(c)
	}
	server := strconv.Itoa(c.Server)
	d.expect("set_default_active_thread_percentage 50", "50.0", "get_server_list", server,
		"get_active_thread_percentage "+server, "25.0", "get_server_status "+server, "ACTIVE", "get_client_list "+server, "1000")
	if c := d.connect(0, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G"); c.Limits.ThreadPercentage != 25 ||
		c.Limits.PinnedMemory[device] != 2<<30 {
		t.Error("only tighter limits count:", c)
	}
	d.expect("set_active_thread_percentage "+server+" 50", "50.0", "set_device_pinned_mem_limit "+server+" 0 1G", "")
	if c := d.connect(0); c.Limits.ThreadPercentage != 50 || c.Limits.PinnedMemory[device] != 1<<30 {
		t.Error("a new client:", c)
	}
}

const invalidAnswer = "Invalid arguments"

func TestUsersWaitForEachOther(t *testing.T) {
	t.Parallel()
	for _, multiUser := range []bool{false, true} {
		t.Run(strconv.FormatBool(multiUser), func(t *testing.T) {
			t.Parallel()
			d := newDaemon(t, Faults{})
			if multiUser {
				d.start("-multiuser-server")
			} else {
				d.start()
			}
			first := d.connect(1)
			connected := make(chan *Client)
			go func() {
				c, err := Connect(d.pipe, request(2))
				if err != nil {
					t.Error(err)
				}
				connected <- c
			}()
			if multiUser {
				c := <-connected
				if c.Server != first.Server {
					t.Error("a server of its own")
				}
				c.Close()
				return
			}
			await(t, func() bool {
				log, err := os.ReadFile(filepath.Join(d.Root(), "log", "control.log"))
				return err == nil && strings.Contains(string(log), "NEW CLIENT 0 from user 2: Server is not ready, push client to pending list")
			})
			select {
			case <-connected:
				t.Error("two users at once")
			default:
			}
			first.Close()
			c := <-connected
			if c.Server == first.Server {
				t.Error("the server of another user")
			}
			c.Close()
		})
	}
}

func TestFault(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, Faults{})
	d.start()
	a, b := d.connect(0), d.connect(0)
	d.Fault(d.pipe)
	if a.Err() == nil || b.Err() == nil {
		t.Error("a client survived")
	}
	status := "get_server_status " + strconv.Itoa(a.Server)
	d.expect(status, "FAULT")
	a.Close()
	if _, err := Connect(d.pipe, request(0)); !errors.Is(err, Error(ServerNotReady)) {
		t.Error("before all clients have left:", err)
	}
	b.Close()
	await(t, func() bool { out, err := d.Control(d.pipe, status); return err == nil && out == "ACTIVE" })
	d.connect(0)
}

func TestMaxClientsAndTerminate(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, Faults{})
	d.start()
	var last *Client
	for range 48 {
		last = d.connect(0)
	}
	if _, err := Connect(d.pipe, request(0)); !errors.Is(err, Error(MaxClients)) {
		t.Error(err)
	}
	d.expect("terminate_client "+strconv.Itoa(last.Server)+" 1", "Client 1 not found", "terminate_client "+strconv.Itoa(last.Server)+" 1000",
		"")
}

func TestQuit(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, Faults{})
	d.start()
	c := d.connect(0)
	quit := make(chan error, 1)
	go func() { _, err := d.Control(d.pipe, "quit"); quit <- err }()
	await(t, func() bool {
		c, err := Connect(d.pipe, request(0))
		if err == nil {
			c.Close() // before the daemon got the command
		}
		return errors.Is(err, Error(ServerNotReady))
	})
	if len(quit) > 0 {
		t.Fatal("quit with a client")
	}
	c.Close()
	if err := errors.Join(<-quit, d.cmd.Wait()); err != nil {
		t.Fatal(err)
	}
	if left := d.Processes(); len(left) > 0 {
		t.Error(left)
	}
	d.start()
	c = d.connect(0)
	d.expect("quit -t 0", "")
	if c.Err() == nil {
		t.Error("the client survived")
	}
}

func TestKill(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, Faults{})
	d.start()
	c := d.connect(0)
	if out, err := d.command("-f").CombinedOutput(); err == nil {
		t.Errorf("a second daemon: %s", out)
	}
	d.kill()
	if left := d.Processes(); len(left) != 1 || !left[0].Server || left[0].PID != c.Server || left[0].Device != device ||
		left[0].Pipe != d.pipe {
		t.Fatal("a server without its daemon:", left)
	}
	for _, stale := range []string{"control", "nvidia-cuda-mps-control.pid"} {
		if _, err := os.Lstat(filepath.Join(d.pipe, stale)); err != nil {
			t.Error(err)
		}
	}
	if out, err := d.Control(d.pipe, "get_server_list"); err == nil {
		t.Errorf("no daemon: %s", out)
	}
	if _, err := Connect(d.pipe, request(0)); !errors.Is(err, Error(ConnectionFailed)) {
		t.Error(err)
	}
	d.start()
	if _, err := Connect(d.pipe, request(0)); !errors.Is(err, Error(ServerNotReady)) {
		t.Error("the old server has the device:", err)
	}
	if err := syscall.Kill(c.Server, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := c.Err(); !errors.Is(err, Error(RPCFailure)) {
		t.Error(err)
	}
	// The kernel drops the lock of the killed server a moment later.
	await(t, func() bool {
		c, err := Connect(d.pipe, request(0))
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

func TestFaultsOfCommands(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, Faults{})
	d.start()
	const set, get = "set_default_active_thread_percentage", "get_default_active_thread_percentage"
	d.SetFaults(device, Faults{Refuse: []string{set}, NoMemoryLimit: true})
	if out, err := d.Control(d.pipe, set+" 10"); err != nil || out == "10.0" {
		t.Error(out, err)
	}
	d.expect(get, "100.0", "get_default_device_pinned_mem_limit 0", "Unknown command: get_default_device_pinned_mem_limit")
	d.SetFaults(device, Faults{Ignore: []string{set}})
	d.expect(set+" 10", "10.0", get, "100.0")
	d.SetFaults(device, Faults{
		Answer: map[string]string{get: "7.0"},
		Delay:  map[string]Duration{AllCommands: Duration(50 * time.Millisecond)},
	})
	begin := time.Now()
	d.expect(get, "7.0")
	if time.Since(begin) < 50*time.Millisecond {
		t.Error("no delay")
	}
	d.SetFaults(device, Faults{Die: []string{set}})
	if out, err := d.Control(d.pipe, set+" 10"); err == nil {
		t.Error("the daemon survived:", out)
	}
	if err := d.cmd.Wait(); err == nil {
		t.Error("the daemon exited")
	}
	var commands []string
	for _, c := range d.Commands() {
		commands = append(commands, c.Text)
	}
	if want := "start," + set + " 10," + get + ",get_default_device_pinned_mem_limit 0," + set + " 10," + get + "," + get + "," + set +
		" 10"; strings.Join(commands, ",") != want {
		t.Error(commands)
	}
}

// A line that a daemon is writing is not a command yet.
func TestCommandsWhileWritten(t *testing.T) {
	t.Parallel()
	c := New(t)
	if err := os.WriteFile(CommandsFile(c.Path), []byte("GPU-1\t7\tstart\nGPU-1\t7"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := c.Commands(); len(got) != 1 || got[0] != (Command{Device: "GPU-1", Daemon: 7, Text: "start"}) {
		t.Errorf("%+v", got)
	}
}

func TestFaultsAtStart(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, Faults{ExitAtStart: true})
	if err := d.command("-f").Run(); err == nil {
		t.Error("no exit")
	}
	d.SetFaults(device, Faults{NoMultiUser: true})
	if err := d.command("-f", "-multiuser-server").Run(); err == nil {
		t.Error("multi-user mode")
	}
	if out, err := d.command("-d").CombinedOutput(); err != nil || len(d.Daemons()) != 1 || d.Daemons()[device] == 0 {
		t.Errorf("in the background: %s, %v", out, err)
	}
	d.expect("quit", "")
	await(t, func() bool { return len(d.Processes()) == 0 })
	d.pipe += "/missing"
	if err := d.command("-f").Run(); err == nil {
		t.Error("without the pipe directory")
	}
}

// The program as a client, whose PID the server reports.
func TestClientProgram(t *testing.T) {
	t.Parallel()
	d := newDaemon(t, Faults{})
	d.start()
	cmd := d.command("standin-client", "-uid", "7")
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	var servers string
	await(t, func() bool {
		servers, err = d.Control(d.pipe, "get_server_list")
		if err != nil || servers == "" {
			return false
		}
		out, err := d.Control(d.pipe, "get_client_list "+servers)
		return err == nil && out == strconv.Itoa(cmd.Process.Pid)
	})
	if out, err := d.Control(d.pipe, "ps"); err != nil || !strings.Contains(out, strconv.Itoa(cmd.Process.Pid)) ||
		!strings.Contains(out, "standin-client") {
		t.Error(out, err)
	}
	_ = in.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	await(t, func() bool { // the server notices the end a moment later
		out, err := d.Control(d.pipe, "get_client_list "+servers)
		return err == nil && out == ""
	})
}
