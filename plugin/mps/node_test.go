package mps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// runFollower runs a Follower on a node with a stand-in of the control program, until stop is called.
func (n *node) runFollower(desired *health.Latest[Desired]) (f *Follower, stop func()) {
	n.t.Helper()
	f = NewFollower(Options{
		Desired: desired, Root: func() Root { return n.root }, Simulated: func() bool { return true },
		Facts: func() offer.Facts {
			return offer.Facts{Now: time.Now(), Holders: podresources.Holders{At: time.Now(), By: map[health.DeviceID][]podresources.Holder{}}}
		},
		Log: zaptest.NewLogger(n.t, zaptest.Level(zap.WarnLevel)).Named("follower"),
	})
	ctx, cancel := context.WithCancel(n.t.Context())
	ended := make(chan struct{})
	go func() { f.Run(ctx); close(ended) }()
	stop = func() { cancel(); <-ended }
	n.t.Cleanup(stop)
	return f, stop
}

// awaitState waits until the state of a daemon fulfils a condition.
func awaitState(t *testing.T, f *Follower, id health.DeviceID, what string, condition func(health.MPSDaemon) bool) (d health.MPSDaemon) {
	t.Helper()
	eventually(t, what, func() bool {
		s := f.State().Load()
		if s == nil || s.Daemons[id] == nil {
			return false
		}
		d = *s.Daemons[id]
		return condition(d)
	}, func() string { return d.Cause + " " + d.Reason })
	return d
}

func isReady(d health.MPSDaemon) bool { return d.Ready && d.Cause == "" }

// Another root is refused while a daemon runs below the former one.
func TestCheckFormer(t *testing.T) {
	n := newNode(t)
	stop := n.supervise()
	n.want(gpuA)
	next := Root(t.TempDir())
	refused := fmt.Sprintf("plugin.sharing.mps.root: expected %s, got %s: the MPS daemon of %s runs there; ", n.root, next, gpuA)
	var err error
	eventually(t, "refused", func() bool {
		_, _ = n.status()
		err = CheckFormer(next, n.root)
		return err != nil && strings.HasPrefix(err.Error(), refused)
	}, func() string { return fmt.Sprint(err) })
	if err := CheckFormer(n.root, n.root); err != nil {
		t.Errorf("the same root: %v", err)
	}
	stop()
	if err := CheckFormer(next, n.root); err != nil {
		t.Errorf("no daemon runs: %v", err)
	}
	if err := CheckFormer(n.root, Root(filepath.Join(string(next), "missing"))); err != nil {
		t.Errorf("no root: %v", err)
	}
}

// The follower, mps-daemon and the control program's stand-in together.
func TestFollowerOnNode(t *testing.T) {
	n := newNode(t)
	n.supervise()
	var desired health.Latest[Desired]
	desired.Store(&Desired{Root: n.root, Control: n.program.Path, Daemons: []Spec{spec(gpuA), spec(gpuB)}})
	f, stop := n.runFollower(&desired)
	pids := make(map[health.DeviceID]int)
	for _, id := range []health.DeviceID{gpuA, gpuB} {
		pids[id] = awaitState(t, f, id, "ready", isReady).PID
		for command, want := range map[string]string{
			"get_default_active_thread_percentage": "25.0", "get_default_device_pinned_mem_limit 0": "20G",
		} {
			if got, err := runControl(t.Context(), n.program.Path, environment(n.root, id), command); err != nil || got != want {
				t.Errorf("%s: got %q, %v, want %q", command, got, err, want)
			}
		}
	}

	client, err := mpstest.Connect(n.root.PipeDir(gpuA), mpstest.ClientRequest{UID: new(1000)})
	if err != nil {
		t.Fatal(err)
	}
	f.poke()
	d := awaitState(t, f, gpuA, "a client", func(d health.MPSDaemon) bool { return d.ClientCount() == 1 })
	if s := d.Servers[0]; s.PID != client.Server || s.Status != serverActive {
		t.Errorf("%+v, want server %d", s, client.Server)
	}

	// A restart of the agent changes nothing.
	stop()
	commands := len(n.program.Commands())
	f, stop = n.runFollower(&desired)
	for id, pid := range pids {
		if d := awaitState(t, f, id, "ready", isReady); d.PID != pid {
			t.Errorf("%s: daemon %d, was %d", id, d.PID, pid)
		}
	}
	for _, c := range n.program.Commands()[commands:] {
		if strings.HasPrefix(c.Text, "set_") || c.Text == "start" {
			t.Errorf("after the restart: %+v", c)
		}
	}

	n.program.Fault(n.root.PipeDir(gpuA))
	f.poke()
	awaitState(t, f, gpuA, "fault", func(d health.MPSDaemon) bool { return d.Cause == health.CauseMPSFault })
	client.Close()
	eventually(t, "active again", func() bool { f.poke(); return isReady(*f.State().Load().Daemons[gpuA]) }, func() string { return "" })

	client, err = mpstest.Connect(n.root.PipeDir(gpuA), mpstest.ClientRequest{UID: new(1000)})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	f.poke()
	d = awaitState(t, f, gpuA, "a client", func(d health.MPSDaemon) bool { return d.ClientCount() == 1 })
	if err := f.TerminateClient(t.Context(), gpuA, d.Servers[0].Clients[0]); err != nil {
		t.Error(err)
	}
	<-client.Done()

	// A detach stops all, and its end starts them.
	stop()
	f.Stop(t.Context())
	if left := n.program.Processes(); len(left) > 0 {
		t.Errorf("after the detach: %+v", left)
	}
	f, _ = n.runFollower(&desired)
	awaitState(t, f, gpuA, "ready after the detach", isReady)
	desired.Store(&Desired{Root: n.root, Control: n.program.Path})
	eventually(t, "left", func() bool { return len(n.program.Processes()) == 0 && len(f.State().Load().Daemons) == 0 },
		func() string { return "" })
}

func TestRunControl(t *testing.T) {
	dir := t.TempDir()
	script := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
		return path
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ctx     context.Context //nolint:containedctx // of a test case
		program string
		want    string
		err     error
	}{
		"answer":              {t.Context(), script("answer", `read c; echo " $c "; echo warning: deprecated >&2`), "get_server_list", nil},
		"no answer":           {t.Context(), script("none", "cat"), "get_server_list", nil},
		"no daemon":           {t.Context(), script("nodaemon", "echo Cannot find MPS control daemon process; exit 1"), "", errNoDaemon},
		"no daemon, no error": {t.Context(), script("nodaemon0", "echo Cannot find MPS control daemon process >&2"), "", errNoDaemon},
		"exit code":           {t.Context(), script("exit", "exit 3"), "", errRefused},
		"unknown command":     {t.Context(), script("unknown", "echo Unrecognized command"), "", errRefused},
		"missing":             {t.Context(), filepath.Join(dir, "absent"), "", errProgram},
		"not in PATH":         {t.Context(), "gpu-node-agent-absent", "", errProgram},
		"no program":          {t.Context(), script("text", "") + ".txt", "", errProgram},
		"killed":              {t.Context(), script("killed", "kill -9 $$"), "", errProgram},
		"canceled":            {canceled, script("sleep", "sleep 600"), "", context.Canceled},
		"much output":         {t.Context(), script("much", "exec head -c 1000000 /dev/zero"), strings.Repeat("\x00", maxAnswer), nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := runControl(test.ctx, test.program, os.Environ(), "get_server_list")
			if got != test.want || !errors.Is(err, test.err) {
				t.Errorf("got %.50q, %v, want %.50q, %v", got, err, test.want, test.err)
			}
		})
	}
}

// A run that is ended ends what the program has started, too, and does not wait for it.
func TestRunControlEndsGroup(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	text := "#!/bin/sh\nsleep 600 &\necho $! >" + dir + "/pid.new\nmv " + dir + "/pid.new " + dir + "/pid\nwait\n"
	if err := os.WriteFile(program, []byte(text), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		eventually(t, "started", func() bool { _, err := os.Stat(filepath.Join(dir, "pid")); return err == nil }, func() string { return "" })
		cancel(errNoAnswer)
	}()
	if _, err := runControl(ctx, program, os.Environ(), "quit"); !errors.Is(err, errNoAnswer) {
		t.Error(err)
	}
	pid, err := os.ReadFile(filepath.Join(dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "sleep has ended", func() bool {
		state, err := os.ReadFile(filepath.Join("/proc", strings.TrimSpace(string(pid)), "stat"))
		return err != nil || strings.Contains(string(state), ") Z ")
	}, func() string { return "" })
}
