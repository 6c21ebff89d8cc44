package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// Err says why the daemons cannot be followed, and nothing when they can.
func TestFollowerErr(t *testing.T) {
	for name, c := range map[string]struct {
		fail, mend func(h *followerTest)
		err        string // a part
		ready      bool   // the daemon meanwhile
	}{
		"mps-daemon refuses": {
			func(h *followerTest) { h.change(func() { h.refusal = "version" }) }, func(h *followerTest) { h.change(func() { h.refusal = "" }) },
			"mps-daemon does not follow the agent: version", true,
		},
		"no control program": {
			func(h *followerTest) { h.change(func() { h.noProgram = true }) }, func(h *followerTest) { h.change(func() { h.noProgram = false }) },
			errProgram.Error(), true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			runFollower(t, func(h *followerTest) {
				h.ready(gpuA)
				c.fail(h)
				advance(20 * time.Second)
				if err := h.f.Err(); !strings.Contains(err, c.err) {
					t.Errorf("%q, want %q", err, c.err)
				}
				h.wantState(name, gpuA, c.ready, "")
				c.mend(h)
				advance(20 * time.Second)
				if err := h.f.Err(); err != "" {
					t.Errorf("mended: %q", err)
				}
				h.wantState("mended", gpuA, true, "")
				if len(h.told.Daemons) != 1 {
					t.Errorf("%+v", h.told)
				}
			})
		})
	}
}

// The log says once for each daemon, and for each change of its limits, that it has them, and each trouble once.
func TestFollowerLogs(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		const limits = "MPS daemon has its limits"
		want := func(when string, message string, n int) {
			t.Helper()
			if got := h.logs.FilterMessage(message).Len(); got != n {
				t.Errorf("%s: %q is logged %d times, want %d", when, message, got, n)
			}
		}
		h.ready(gpuA, gpuB)
		advance(3 * time.Minute)
		want("started", limits, 2)
		other := spec(gpuA)
		other.ThreadPercentage = 50
		h.desired.Store(&Desired{Root: h.root, Control: "control", Daemons: []Spec{other, spec(gpuB)}})
		advance(3 * time.Minute)
		want("changed", limits, 3)
		h.change(func() { h.kill(gpuB) })
		advance(3 * time.Minute)
		want("restarted", limits, 4)
		h.change(func() { h.down = true })
		advance(3 * time.Minute)
		want("mps-daemon down", "MPS daemons cannot be followed", 1)
		h.change(func() { h.down = false })
		advance(3 * time.Minute)
		want("mps-daemon up", "MPS daemons are followed again", 1)
		h.newAgent()
		advance(3 * time.Minute)
		want("adopted", limits, 2)
		for _, e := range h.logs.FilterMessage(limits).All() {
			if e.ContextMap()["adopted"] != true {
				t.Errorf("%v", e.ContextMap())
			}
		}
		want("adopted", "MPS daemons are followed again", 0)
		h.want(gpuA)
		advance(3 * time.Minute)
		want("left", "stopping the MPS daemon of a device that is no longer shared: nobody uses it", 1)
	})
}

// mps-daemon is told at once what has changed.
func TestFollowerTellsAtOnce(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		advance(1700 * time.Millisecond)
		h.want(gpuA, gpuB)
		advance(100 * time.Millisecond)
		if h.daemon(gpuB).pid == 0 {
			t.Error("the new daemon does not run")
		}
		h.change(func() { h.refusal, h.follows = "version", 0 })
		h.want(gpuA)
		advance(time.Minute)
		h.change(func() {
			if h.follows < 55 || h.follows > 65 {
				t.Errorf("told %d times in a minute in which mps-daemon refused", h.follows)
			}
		})
	})
}

// A detach ends what runs, also if mps-daemon refused the agent before. One that still refuses is not waited for.
func TestFollowerStopsAfterRefusal(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.change(func() { h.refusal = "version" })
		advance(2 * time.Second)
		h.stop()
		if h.f.Err() == "" {
			t.Error("no error before")
		}
		start := time.Now()
		h.f.Stop(h.Context())
		if h.daemon(gpuA).pid == 0 || time.Since(start) > 2*stopUnreachable {
			t.Errorf("daemon %d, after %v", h.daemon(gpuA).pid, time.Since(start))
		}
		h.change(func() { h.refusal = "" })
		h.f.Stop(h.Context())
		if h.f.Err() != "" || h.daemon(gpuA).pid != 0 || !h.told.Stopped {
			t.Errorf("%q, daemon %d, told %+v", h.f.Err(), h.daemon(gpuA).pid, h.told)
		}
		if s := h.state(gpuA); s.Ready || !strings.Contains(s.Reason, "while the driver is detached") || s.PID != 0 {
			t.Errorf("%+v", s)
		}
	})
	// What is stopped keeps what does not depend on the driver.
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.hold(gpuA, string(gpuA)+"::0")
		h.want()
		advance(2 * time.Second)
		h.stop()
		h.f.Stop(h.Context())
		if s := h.state(gpuA); !s.Leaving || s.Ready {
			t.Errorf("%+v", s)
		}
	})
}

func TestFollowerClients(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.serve(gpuA, 7, fakeServer{status: serverActive, clients: []int{8}})
		h.serve(gpuA, 9, fakeServer{status: serverActive})
		clients, err := h.f.Clients(h.Context(), gpuA)
		if err != nil || len(clients) != 2 || len(clients[7]) != 1 || clients[7][0] != 8 || len(clients[9]) != 0 {
			t.Errorf("%v, %v", clients, err)
		}
		for _, refuse := range []string{"get_server_list", "get_client_list", "terminate_client"} {
			h.change(func() { h.daemons[gpuA].refuse = refuse })
			err := h.f.TerminateClient(h.Context(), gpuA, 8)
			if !errors.Is(err, errRefused) || !strings.HasPrefix(err.Error(), string(gpuA)+": ") {
				t.Errorf("%s refused: %v", refuse, err)
			}
		}
	})
}

// A directory that containers mount must be one.
func TestFollowerFileInPlaceOfDirectory(t *testing.T) {
	runFollower(t, func(h *followerTest) {
		h.ready(gpuA)
		h.hold(gpuA, string(gpuA)+"::0") // so that it is not restarted
		for _, dir := range []string{h.root.LogDir(gpuA), h.root.ShmDir()} {
			if err := errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
			advance(6 * time.Second)
			h.wantState("a file", gpuA, false, health.CauseMPSNotReady)
			if s := h.state(gpuA); !strings.Contains(s.Reason, dir+": expected a directory") {
				t.Errorf("%+v", s)
			}
			if err := errors.Join(os.Remove(dir), os.Mkdir(dir, 0o700)); err != nil {
				t.Fatal(err)
			}
			advance(6 * time.Second)
			h.wantState("a directory", gpuA, true, "")
		}
	})
}

// The daemon's socket is looked for often at first, then as often as anything else.
func TestFollowerAwaitsSocket(t *testing.T) {
	for wait, within := range map[time.Duration]time.Duration{5 * time.Second: 1100 * time.Millisecond, time.Minute: 5100 * time.Millisecond} {
		runFollower(t, func(h *followerTest) {
			h.change(func() {
				d := &fakeDaemon{}
				h.daemons[gpuA] = d
				h.start(gpuA, d)
				d.missing = true
			})
			h.hold(gpuA, string(gpuA)+"::0") // so that it is not restarted
			h.want(gpuA)
			advance(wait)
			if h.state(gpuA).Ready {
				t.Error("ready without a socket")
			}
			h.change(func() { h.daemons[gpuA].missing = false })
			advance(within)
			h.wantState(fmt.Sprintf("socket after %v", wait), gpuA, true, "")
		})
	}
}

// Requests that are none are refused, and the next one is answered.
func TestSupervisorRefusesRequests(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise()
	n.await("socket", func(Status) bool { return true })
	for name, c := range map[string]struct {
		route string
		body  any
		code  int
		err   string
	}{
		"unknown":       {"POST /stop", nil, 404, `expected GET /status, POST /follow, POST /restart, got "POST /stop"`},
		"unknown field": {restartRoute, map[string]any{"gpu": 0}, 400, `unknown field "gpu"`},
		"no device":     {restartRoute, nil, 404, `device "": mps-daemon runs no daemon for it`},
		"restart":       {restartRoute, Restart{gpuA}, 404, `device "` + string(gpuA) + `": mps-daemon runs no daemon for it`},
	} {
		err := n.call(c.route, c.body)
		if refusal, ok := errors.AsType[*unixsock.StatusError](err); !ok || refusal.Code != c.code || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %#v, want %d %q", name, err, c.code, c.err)
		}
	}
	s, err := QueryStatus(t.Context(), n.root)
	if err != nil || s.Version != "" || s.Error != "" || len(s.Daemons) != 0 || !strings.Contains(s.Shm, "is not the file system at") {
		t.Errorf("%+v, %v", s, err)
	}
}

// The supervisor of a root that it cannot use ends with an error.
func TestSupervisorWithoutRoot(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	locked := Root(t.TempDir())
	if err := os.Mkdir(locked.lockFile(), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, root := range []Root{Root(file), locked} {
		s := &Supervisor{Root: root, Log: zap.NewNop()}
		if err := s.Run(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "plugin.sharing.mps.root: ") {
			t.Errorf("%s: %v", root, err)
		}
	}
}

// An answer that is no status is an error.
func TestQueryStatusOfAnotherServer(t *testing.T) {
	root := Root(t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() {
		served <- unixsock.Serve(ctx, root.Socket(), zap.NewNop(), unixsock.Routes{
			statusRoute: func(context.Context, []byte) (any, error) { return "hello", nil },
		})
	}()
	eventually(t, "socket", func() bool { _, err := os.Stat(root.Socket()); return err == nil }, func() string { return "" })
	if _, err := QueryStatus(ctx, root); !errors.Is(err, unixsock.ErrNoResponse) {
		t.Error(err)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	if _, err := QueryStatus(t.Context(), root); err == nil {
		t.Error("no server")
	}
}

// What an earlier daemon failed at does not count against its successor.
func TestFollowerCountsFailuresByDaemon(t *testing.T) {
	for name, c := range map[string]struct {
		fail         func(d *fakeDaemon)
		once, repeat time.Duration // until one examination has failed, and until several have
		reason       string
	}{
		"no answer": {func(d *fakeDaemon) { d.hang = true }, 12 * time.Second, 30 * time.Second, "does not answer within"},
		"no socket": {func(d *fakeDaemon) { d.missing = true }, 1100 * time.Millisecond, 5 * time.Second, errNoDaemon.Error()},
		"refusal":   {func(d *fakeDaemon) { d.refuse = "get_server_list" }, 3 * time.Second, 12 * time.Second, errRefused.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			runFollower(t, func(h *followerTest) {
				h.ready(gpuA)
				h.hold(gpuA, string(gpuA)+"::0") // so that it is not restarted
				for range 2 {
					h.change(func() {
						d := h.daemons[gpuA]
						h.start(gpuA, d)
						d.refuse = ""
						c.fail(d)
					})
					advance(c.once)
					if s := h.state(gpuA); s.Ready || !strings.Contains(s.Reason, "was restarted") {
						t.Errorf("after one failure: %+v", s)
					}
				}
				advance(c.repeat)
				if s := h.state(gpuA); s.Ready || !strings.Contains(s.Reason, c.reason) {
					t.Errorf("after several: %+v", s)
				}
			})
		})
	}
}

// Without the mount that was asked for, containers could not use a daemon, so none is started.
func TestSupervisorWithoutMount(t *testing.T) {
	t.Parallel()
	if same, err := isSameFile("/proc/self/ns/mnt", "/proc/1/ns/mnt"); err != nil || !same {
		t.Skip("it would be mounted here")
	}
	n := newNode(t)
	n.want(gpuA)
	n.startProcess(func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, testMount+"=1") })
	s := n.await("reason", func(s Status) bool { return len(s.Daemons) == 1 && s.Daemons[0].Error != "" })
	const refused = "--mount-shm: would hide the /dev/shm of the node"
	if !strings.HasPrefix(s.Shm, refused) || !strings.HasPrefix(s.Daemons[0].Error, refused) || s.Daemons[0].PID != 0 ||
		len(n.program.Processes()) > 0 {
		t.Errorf("%+v", s)
	}
	if n.mode(gpuA) != driver.ComputeModeDefault {
		t.Errorf("compute mode %v", n.mode(gpuA))
	}
}

func TestSupervisorOfNoProgram(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.program.Path = filepath.Join(t.TempDir(), "control")
	if err := os.WriteFile(n.program.Path, []byte("\x7fELF"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	n.want(gpuA)
	n.supervise()
	s := n.await("reason", func(s Status) bool {
		return len(s.Daemons) == 1 && strings.HasPrefix(s.Daemons[0].Error, "cannot start the MPS control daemon: ")
	})
	if s.Daemons[0].PID != 0 || s.Daemons[0].Restarts != 0 {
		t.Errorf("%+v", s)
	}
}

// A restart that is requested already, or of a daemon that is being stopped, is no other one.
func TestSupervisorRestartIsRequestedOnce(t *testing.T) {
	d := &daemon{restart: make(chan struct{}, 1), status: DaemonStatus{Device: gpuA}}
	s := &Supervisor{daemons: map[health.DeviceID]*daemon{gpuA: d}}
	for range 2 {
		if err := s.restart(gpuA); err != nil || len(d.restart) != 1 {
			t.Errorf("%v, %d requested", err, len(d.restart))
		}
	}
	<-d.restart
	d.status.Stopping = true
	if err := s.restart(gpuA); err == nil || len(d.restart) != 0 {
		t.Errorf("%v, %d requested", err, len(d.restart))
	}
}

// The status says all that the supervisor does, by device.
func TestSupervisorStatus(t *testing.T) {
	s := &Supervisor{
		Version: "1.2", follows: &Follow{Version: 1}, shmErr: errors.New("not mounted"),
		daemons: map[health.DeviceID]*daemon{
			gpuB: {status: DaemonStatus{Device: gpuB, PID: 3}},
			gpuA: {status: DaemonStatus{Device: gpuA, Stopping: true}}, mig: {status: DaemonStatus{Device: mig}},
		},
	}
	status := s.status()
	if status.Version != "1.2" || status.Error != "" ||
		status.Follows.Version != 1 || status.Shm != "not mounted" || len(status.Daemons) != 3 {
		t.Fatalf("%+v", status)
	}
	if d := status.Daemons; d[0].Device != gpuA || !d[0].Stopping || d[1].Device != gpuB || d[1].PID != 3 || d[2].Device != mig {
		t.Errorf("%+v", d)
	}
	s = &Supervisor{}
	const empty = "{Version: Shm: Error: Follows:<nil> Pending:false Daemons:[]}"
	if status := s.status(); fmt.Sprintf("%+v", status) != empty || status.Daemons == nil {
		t.Errorf("%+v", status)
	}
}

// A stop does not wait for ever.
func TestSupervisorStopIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var causes []error
		stuck := func() *daemon {
			return &daemon{stopped: make(chan struct{}), stop: func(cause error) { causes = append(causes, cause) }}
		}
		s := &Supervisor{daemons: map[health.DeviceID]*daemon{gpuA: stuck(), gpuB: stuck()}}
		start := time.Now()
		if err := s.stopAll(); err == nil || time.Since(start) > 30*time.Second { // of a pod
			t.Errorf("%v after %v", err, time.Since(start))
		}
		if len(causes) != 2 || !errors.Is(causes[0], errShutdown) || !errors.Is(causes[1], errShutdown) {
			t.Errorf("%v", causes)
		}
		close(s.daemons[gpuA].stopped)
		time.AfterFunc(10*time.Second, func() { close(s.daemons[gpuB].stopped) })
		start = time.Now()
		if err := s.stopAll(); err != nil || time.Since(start) != 10*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
	})
}
