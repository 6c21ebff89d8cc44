package mps

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

const (
	gpuA = health.DeviceID("GPU-aaaaaaaa-0000-0000-0000-000000000000")
	gpuB = health.DeviceID("GPU-bbbbbbbb-0000-0000-0000-000000000000")
	mig  = health.DeviceID("MIG-cccccccc-0000-0000-0000-000000000000")
)

// node is a node with a stand-in of MPS, and what the agent's part wants of a Supervisor.
type node struct {
	t       *testing.T
	program *mpstest.ControlProgram
	root    Root
	modes   string  // directory of fileModes
	follow  *Follow // what the agent's part sends with each status; nil: nothing
}

func newNode(t *testing.T) *node {
	t.Helper()
	p := mpstest.New(t)
	return &node{t: t, program: p, root: Root(p.Root()), modes: t.TempDir()}
}

// want sets what is to run.
func (n *node) want(devices ...health.DeviceID) {
	n.follow = &Follow{Version: followVersion, Daemons: []followDaemon{}}
	for _, id := range devices {
		n.follow.Daemons = append(n.follow.Daemons, newFollowDaemon(unknownSpec(id)))
	}
}

// detach has what is to run stopped.
func (n *node) detach() {
	n.follow = &Follow{Version: followVersion, Stopped: true, Daemons: n.follow.Daemons}
}

// supervise runs a Supervisor until the test ends or stop is called.
func (n *node) supervise() (stop func()) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.t.Context())
	s := &Supervisor{
		Root: n.root, Control: n.program.Path, ComputeModes: fileModes(n.modes), Log: zaptest.NewLogger(n.t, zaptest.Level(zap.InfoLevel)),
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	stop = func() {
		cancel()
		if err := <-ended; err != nil {
			n.t.Errorf("Run: %v", err)
		}
		ended <- nil
	}
	n.t.Cleanup(stop)
	return stop
}

// call sends a request.
func (n *node) call(route string, body any) error {
	_, err := callSupervisor(n.t.Context(), n.root, route, body)
	return err
}

// status tells what to run, as the agent does each second, and returns the status.
func (n *node) status() (Status, error) {
	if n.follow == nil {
		return QueryStatus(n.t.Context(), n.root)
	}
	n.follow.Sent = sinceBoot()
	return callSupervisor(n.t.Context(), n.root, followRoute, n.follow)
}

// await waits until the status fulfils a condition.
func (n *node) await(what string, condition func(Status) bool) Status {
	n.t.Helper()
	var last Status
	eventually(n.t, what, func() bool {
		s, err := n.status()
		last = s
		return err == nil && condition(s)
	}, func() string { return fmt.Sprintf("%+v", last) })
	return last
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, condition func() bool, describe func() string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(time.Minute)
	for !condition() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("not within a minute: %s; last: %s", what, describe())
		}
	}
}

// awaitServing waits until the daemons of the devices serve their sockets, and returns their status.
func (n *node) awaitServing(devices ...health.DeviceID) map[health.DeviceID]DaemonStatus {
	n.t.Helper()
	var found map[health.DeviceID]DaemonStatus
	s := n.await("daemons run", func(s Status) bool {
		found = make(map[health.DeviceID]DaemonStatus)
		for _, d := range s.Daemons {
			if d.PID != 0 && !d.Stopping {
				found[d.Device] = d
			}
		}
		return len(found) == len(devices)
	})
	if got := slices.Sorted(maps.Keys(found)); !slices.Equal(got, slices.Sorted(slices.Values(devices))) {
		n.t.Fatalf("daemons of %v: %+v", devices, s)
	}
	for _, id := range devices {
		var answer string
		eventually(n.t, "daemon serves", func() bool {
			out, err := n.program.Control(n.root.PipeDir(id), "get_server_list")
			answer = out
			return err == nil
		}, func() string { return answer })
	}
	return found
}

// mode returns a GPU's compute mode.
func (n *node) mode(gpu health.DeviceID) driver.ComputeMode {
	n.t.Helper()
	mode, err := fileModes(n.modes).Get(gpu)
	if err != nil {
		n.t.Fatal(err)
	}
	return mode
}

// connect connects a client, so that the daemon has a server.
func (n *node) connect(id health.DeviceID) *mpstest.Client {
	n.t.Helper()
	c, err := mpstest.Connect(n.root.PipeDir(id), mpstest.ClientRequest{})
	if err != nil {
		n.t.Fatalf("client of %s: %v", id, err)
	}
	n.t.Cleanup(c.Close)
	return c
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// alive reports whether a process runs; one that has ended and waits for its parent does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestSupervisorRunsADaemonPerDevice(t *testing.T) {
	n := newNode(t)
	t.Setenv("CUDA_MPS_PROTOCOL_VERSION", "3")
	n.want(gpuA, mig)
	stop := n.supervise()
	running := n.awaitServing(gpuA, mig)
	for id, d := range running {
		if n.program.Daemons()[string(id)] != d.PID {
			t.Errorf("%s: PID %d, processes %+v", id, d.PID, n.program.Processes())
		}
		if d.Restarts != 0 || !d.MultiUser || d.Error != "" || time.Since(d.Started) > time.Hour {
			t.Errorf("%s: %+v", id, d)
		}
		if pgid, err := syscall.Getpgid(d.PID); pgid != d.PID {
			t.Errorf("%s: process group %d of process %d, %v", id, pgid, d.PID, err)
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", d.PID))
		if err != nil || strings.Contains(string(env), "CUDA_MPS_PROTOCOL_VERSION") {
			t.Errorf("%s: environment %q, %v", id, env, err)
		}
		files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", d.PID))
		for _, name := range files {
			if to, _ := os.Readlink(name); strings.HasSuffix(to, ".lock") {
				t.Errorf("%s: the daemon has %s open, %v", id, to, err)
			}
		}
	}
	if got := n.mode(gpuA); got != driver.ComputeModeExclusiveProcess {
		t.Errorf("compute mode of a GPU: %v", got)
	}
	if got := n.mode(mig); got != driver.ComputeModeDefault {
		t.Errorf("compute mode in MIG mode: %v", got)
	}
	stop()
	if left := n.program.Processes(); len(left) != 0 {
		t.Errorf("processes after the end: %+v", left)
	}
	if got := n.mode(gpuA); got != driver.ComputeModeDefault {
		t.Errorf("compute mode after the end: %v", got)
	}
	if _, err := os.Stat(n.root.PipeDir(gpuA)); err != nil {
		t.Errorf("containers have the pipe directory mounted: %v", err)
	}
}

func TestSupervisorRestartsADeadDaemon(t *testing.T) {
	for name, faults := range map[string]mpstest.Faults{"servers in its group": {}, "servers with sessions of their own": {OwnSession: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.program.SetFaults(mpstest.AllDevices, faults)
			n.want(gpuA, gpuB)
			n.startProcess() // has no children but daemons
			before := n.awaitServing(gpuA, gpuB)
			orphan, other := n.connect(gpuA).Server, n.connect(gpuB).Server
			kill(t, before[gpuA].PID)
			n.await("restart", func(s Status) bool { return s.Daemons[0].Restarts == 1 && s.Daemons[0].PID != 0 })
			after := n.awaitServing(gpuA, gpuB)
			if after[gpuA].PID == before[gpuA].PID || after[gpuB].PID != before[gpuB].PID || after[gpuB].Restarts != 0 {
				t.Errorf("before %+v, after %+v", before, after)
			}
			if alive(orphan) || !alive(other) {
				t.Errorf("server %d of the dead daemon runs: %t; server %d of the other: %t", orphan, alive(orphan), other, alive(other))
			}
			if c := n.connect(gpuA); c.Server == orphan {
				t.Errorf("client of the old server %d", orphan)
			}
		})
	}
}

func TestSupervisorRestartsOnRequest(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.want(gpuA)
	n.supervise()
	before := n.awaitServing(gpuA)[gpuA]
	server := n.connect(gpuA).Server
	if err := syscall.Kill(before.PID, syscall.SIGSTOP); err != nil { // it hangs
		t.Fatal(err)
	}
	if err := n.call(restartRoute, Restart{Device: gpuB}); err == nil {
		t.Error("restart of a device without a daemon succeeded")
	}
	if err := n.call(restartRoute, Restart{Device: gpuA}); err != nil {
		t.Fatal(err)
	}
	after := n.await("restart", func(s Status) bool { return s.Daemons[0].Restarts == 1 && s.Daemons[0].PID != 0 }).Daemons[0]
	if after.PID == before.PID || alive(before.PID) || alive(server) {
		t.Errorf("before %+v, after %+v, server %d", before, after, server)
	}
}

func TestSupervisorReportsWhyADaemonDoesNotStart(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.program.SetFaults(mpstest.AllDevices, mpstest.Faults{ExitAtStart: true})
	n.want(gpuA)
	n.supervise()
	s := n.await("reason", func(s Status) bool {
		return len(s.Daemons) == 1 && strings.Contains(s.Daemons[0].Error, "exit status 1: ")
	}).Daemons[0]
	if s.PID != 0 {
		t.Errorf("%+v", s)
	}
	n.program.SetFaults(mpstest.AllDevices, mpstest.Faults{})
	if s := n.awaitServing(gpuA)[gpuA]; s.Error != "" {
		t.Errorf("after recovery: %+v", s)
	}
}

func TestSupervisorWithoutControlProgram(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	program := n.program.Path
	if err := os.Rename(program, program+".absent"); err != nil {
		t.Fatal(err)
	}
	n.want(gpuA)
	n.supervise()
	s := n.await("reason", func(s Status) bool { return len(s.Daemons) == 1 && s.Daemons[0].Error != "" })
	if !strings.HasPrefix(s.Daemons[0].Error, "plugin.sharing.mps.control: ") || n.mode(gpuA) != driver.ComputeModeDefault {
		t.Errorf("%+v, compute mode %v", s, n.mode(gpuA))
	}
	if err := os.Rename(program+".absent", program); err != nil { // the driver is installed
		t.Fatal(err)
	}
	n.awaitServing(gpuA)
}

// The agent has fewer rights than mps-daemon. So mps-daemon runs no other program than its own.
func TestSupervisorRunsNoProgramOfTheAgent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ran := filepath.Join(t.TempDir(), "ran")
	other := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(other, []byte("#!/bin/sh\necho ran >"+ran+"\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	text := fmt.Sprintf(`{"version": 1, "sent": %d, "control": %q, "daemons": [{"device": %q, "gpu": %[3]q, "control": %[2]q}]}`,
		sinceBoot(), other, gpuA)
	stop := n.supervise()
	n.await("socket", func(Status) bool { return true })
	if err := n.call(followRoute, json.RawMessage(text)); err != nil {
		t.Fatal(err)
	}
	n.awaitServing(gpuA)
	stop()
	if _, err := os.Stat(ran); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the program that was named ran (%v)", err)
	}
}

func TestSupervisorOfAnOlderDriverIsSingleUser(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.program.SetFaults(mpstest.AllDevices, mpstest.Faults{NoMultiUser: true})
	n.want(gpuA)
	n.supervise()
	n.await("single-user", func(s Status) bool { return len(s.Daemons) == 1 && s.Daemons[0].PID != 0 && !s.Daemons[0].MultiUser })
	n.awaitServing(gpuA)
}

// A wrapper of the program ends without an error if it is given an option that it lacks. What it has started ends with it.
func TestSupervisorOfAScript(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	script := filepath.Join(t.TempDir(), "control")
	text := "#!/usr/bin/env sh\n[ $# = 0 ] && echo Cannot find MPS control daemon process && exit 1\n[ \"$*\" = -f ] || exit 0\n" +
		"sleep 600 &\necho $! >\"$CUDA_MPS_LOG_DIRECTORY/child\"\nwait\n"
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	n.program.Path = script
	n.want(gpuA)
	n.supervise()
	var children []int
	for restarts := range uint64(2) {
		d := n.await("daemon without the option", func(s Status) bool {
			return len(s.Daemons) == 1 && s.Daemons[0].PID != 0 && !s.Daemons[0].MultiUser && s.Daemons[0].Restarts >= restarts
		}).Daemons[0]
		eventually(t, "child", func() bool {
			text, _ := os.ReadFile(filepath.Join(n.root.LogDir(gpuA), "child"))
			pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
			if err != nil || slices.Contains(children, pid) {
				return false
			}
			children = append(children, pid)
			return true
		}, func() string { return "" })
		if restarts == 0 {
			kill(t, d.PID)
		} else if alive(children[0]) {
			t.Errorf("process %d of the dead script still runs", children[0])
		}
	}
	n.want()
	n.await("no daemon", func(s Status) bool { return len(s.Daemons) == 0 })
	if alive(children[1]) {
		t.Errorf("process %d of the stopped script still runs", children[1])
	}
}

// After everything was killed, the compute mode is set back once MPS no longer serves the GPU.
func TestSupervisorSetsModesBackAfterAKillOfEverything(t *testing.T) {
	for _, before := range []driver.ComputeMode{
		driver.ComputeModeDefault, driver.ComputeModeExclusiveThread,
		driver.ComputeModeExclusiveProcess,
	} {
		t.Run(before.String(), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			if err := fileModes(n.modes).Set(gpuA, before); err != nil {
				t.Fatal(err)
			}
			n.want(gpuA)
			for range 2 { // the second finds the mode of the first
				process := n.startProcess()
				daemon := n.awaitServing(gpuA)[gpuA]
				killProcess(process)
				kill(t, daemon.PID)
				eventually(t, "end of the killed daemon", func() bool { return !alive(daemon.PID) }, func() string { return "" })
				if got := n.mode(gpuA); got != driver.ComputeModeExclusiveProcess {
					t.Fatalf("mode while MPS serves the GPU: %v", got)
				}
			}
			n.want()
			n.supervise()
			n.await("the mode from before", func(Status) bool {
				_, err := os.Stat(filepath.Dir(n.root.PipeDir(gpuA)))
				return n.mode(gpuA) == before && errors.Is(err, fs.ErrNotExist)
			})
		})
	}
}

func TestSupervisorWithoutComputeMode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	failure := filepath.Join(n.modes, "failure")
	if err := os.WriteFile(failure, []byte("GPU is lost"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.want(gpuA)
	n.supervise()
	s := n.await("failure", func(s Status) bool { return len(s.Daemons) == 1 && strings.Contains(s.Daemons[0].Error, "GPU is lost") })
	if s.Daemons[0].PID != 0 || len(n.program.Processes()) != 0 {
		t.Errorf("started without the compute mode: %+v", s)
	}
	if err := os.Remove(failure); err != nil {
		t.Fatal(err)
	}
	n.awaitServing(gpuA)

	// The mode that cannot be set back stays recorded, and is set back later.
	if err := os.WriteFile(failure, []byte("GPU is lost"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.want()
	n.await("failure", func(s Status) bool {
		return len(s.Daemons) == 1 && s.Daemons[0].PID == 0 && !s.Daemons[0].Stopping && strings.Contains(s.Daemons[0].Error, "GPU is lost")
	})
	if err := os.Remove(failure); err != nil {
		t.Fatal(err)
	}
	n.want(gpuA)
	n.awaitServing(gpuA)
	n.want()
	n.await("no daemon", func(s Status) bool { return len(s.Daemons) == 0 })
	if got := n.mode(gpuA); got != driver.ComputeModeDefault {
		t.Errorf("compute mode: %v", got)
	}
}

func TestSupervisorKilledWhileItSetsAMode(t *testing.T) {
	for _, point := range []string{"kill-before", "kill-after"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.want(gpuA)
			trap := filepath.Join(n.modes, point)
			killed := func() { // the Supervisor ends at the next change of a mode
				t.Helper()
				if err := os.WriteFile(trap, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				process := n.startProcess()
				ended := make(chan struct{})
				go func() { defer close(ended); _, _ = process.Process.Wait() }()
				eventually(t, "killed", func() bool {
					_, _ = n.status()
					select {
					case <-ended:
						return true
					default:
						return false
					}
				}, func() string { return "" })
				if state := process.ProcessState; state != nil && state.Exited() {
					t.Fatal(state)
				}
				if err := os.Remove(trap); err != nil {
					t.Fatal(err)
				}
			}
			killed() // while it sets the mode
			if got := len(n.program.Commands()); got != 0 {
				t.Errorf("a daemon was started before the compute mode was set: %v", n.program.Commands())
			}
			n.want()
			if n.mode(gpuA) != driver.ComputeModeDefault {
				killed() // while it sets the mode back
			}
			n.supervise()
			n.await("the mode from before", func(Status) bool {
				_, err := os.Stat(filepath.Dir(n.root.PipeDir(gpuA)))
				return n.mode(gpuA) == driver.ComputeModeDefault && errors.Is(err, fs.ErrNotExist)
			})
		})
	}
}

// An operator prohibited that processes use the GPU.
func TestSupervisorRespectsProhibitedMode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	if err := fileModes(n.modes).Set(gpuA, driver.ComputeModeProhibited); err != nil {
		t.Fatal(err)
	}
	n.want(gpuA)
	n.supervise()
	n.await("refusal", func(s Status) bool {
		return len(s.Daemons) == 1 && strings.Contains(s.Daemons[0].Error, "-i "+string(gpuA)+" -c DEFAULT")
	})
	n.want()
	n.await("no daemon", func(s Status) bool { return len(s.Daemons) == 0 })
	if got := n.mode(gpuA); got != driver.ComputeModeProhibited || len(n.program.Commands()) != 0 {
		t.Errorf("compute mode %v, commands %v", got, n.program.Commands())
	}
}

func TestSupervisorStopsDevicesThatLeave(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.want(gpuA, gpuB)
	n.supervise()
	before := n.awaitServing(gpuA, gpuB)
	n.want(gpuB)
	n.await("one daemon", func(s Status) bool { return len(s.Daemons) == 1 })
	if alive(before[gpuA].PID) || !alive(before[gpuB].PID) {
		t.Errorf("processes %+v, before %+v", n.program.Processes(), before)
	}
	if a, b := n.mode(gpuA), n.mode(gpuB); a != driver.ComputeModeDefault || b != driver.ComputeModeExclusiveProcess {
		t.Errorf("compute modes %v, %v", a, b)
	}
	if !slices.ContainsFunc(n.program.Commands(), func(c mpstest.Command) bool { return strings.HasPrefix(c.Text, "quit -t ") }) {
		t.Errorf("commands %+v", n.program.Commands())
	}
	n.want(gpuA, gpuB)
	if after := n.awaitServing(gpuA, gpuB); after[gpuB].PID != before[gpuB].PID {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

// A detach stops the daemons, also sets back the modes of a Supervisor that was killed with them, and leaves what containers have mounted.
func TestSupervisorStopsAllForADetach(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.want(gpuA)
	process := n.startProcess()
	before := n.awaitServing(gpuA)[gpuA]
	killProcess(process)
	kill(t, before.PID)
	n.detach()
	n.supervise()
	n.await("no daemon", func(s Status) bool {
		return len(s.Daemons) == 0 && !alive(before.PID) && n.mode(gpuA) == driver.ComputeModeDefault
	})
	check := func() {
		t.Helper()
		if _, err := os.Stat(n.root.PipeDir(gpuA)); err != nil {
			t.Error(err)
		}
	}
	check()
	n.want(gpuA)
	n.awaitServing(gpuA)
	n.detach()
	n.await("no daemon", func(s Status) bool { return len(s.Daemons) == 0 })
	check()
}

func TestSupervisorKillsADaemonThatDoesNotStop(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.want(gpuA)
	stop := n.supervise()
	before := n.awaitServing(gpuA)[gpuA]
	server := n.connect(gpuA).Server
	for _, pid := range []int{before.PID, server} {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if alive(before.PID) || alive(server) || n.mode(gpuA) != driver.ComputeModeDefault {
		t.Errorf("processes %+v, compute mode %v", n.program.Processes(), n.mode(gpuA))
	}
}

// What cannot be followed changes nothing, and the answer says why.
func TestSupervisorRefusesToFollow(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.supervise()
	n.await("nothing to run", func(s Status) bool { return len(s.Daemons) == 0 && s.Follows == nil })
	n.want(gpuA)
	before := n.awaitServing(gpuA)[gpuA]
	daemon := func(device, gpu string) string {
		return fmt.Sprintf(`{"version":1,"daemons":[{"device":%q,"gpu":%q}]}`, device, gpu)
	}
	const a = string(gpuA)
	for name, text := range map[string]string{
		"no object": `[]`, "newer": `{"version":1000}`, "older": `{"version":0}`,
		"no device": daemon("", a), "device above": daemon("..", a), "device below": daemon("GPU-a/b", a),
		"device elsewhere":    daemon("../GPU-a", a),
		"device with a space": daemon("GPU-a b", a), "long device": daemon("GPU-"+strings.Repeat("a", 97), a),
		"no GPU": daemon(a, ""), "GPU above": daemon(a, ".."), "GPU elsewhere": daemon(a, "/etc"),
		"twice": fmt.Sprintf(`{"version":1,"daemons":[{"device":%q,"gpu":%[1]q},{"device":%[1]q,"gpu":%[1]q}]}`, a),
	} {
		s, err := callSupervisor(t.Context(), n.root, followRoute, json.RawMessage(text))
		if err != nil || s.Error == "" || len(s.Daemons) != 1 || s.Daemons[0].PID != before.PID || !s.Follows.same(n.follow) {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
		if strings.HasSuffix(name, "er") && !strings.Contains(s.Error, "version: expected 1 to 1, found ") {
			t.Errorf("%s: %s", name, s.Error)
		}
	}
	if s, err := n.status(); err != nil || s.Error != "" || len(s.Daemons) != 1 || s.Daemons[0].PID != before.PID {
		t.Errorf("then: %+v, %v", s, err)
	}
	// As large as the largest node needs, and no larger.
	many := &Follow{Version: followVersion, Sent: sinceBoot()}
	for i := range 112 {
		many.Daemons = append(many.Daemons, newFollowDaemon(Spec{
			Device: health.DeviceID(fmt.Sprintf("MIG-cccccccc-0000-0000-0000-%012d", i)), GPU: gpuA, Kind: health.KindMIG, Index: 15,
			ThreadPercentage: 100, PinnedMemory: 192 << 30,
		}))
	}
	many.Stopped = true
	if s, err := callSupervisor(t.Context(), n.root, followRoute, many); err != nil || s.Error != "" || len(s.Follows.Daemons) != 112 {
		t.Errorf("112 daemons: %+v, %v", s.Error, err)
	}
	large := json.RawMessage(`"` + strings.Repeat("x", maxFollow) + `"`)
	_, err := callSupervisor(t.Context(), n.root, followRoute, large)
	if err == nil || !strings.Contains(err.Error(), "limit is 65536 bytes") {
		t.Errorf("too large: %v", err)
	}
}

// Another process may tell what to run only when the first has ended. The kernel does not name one in another PID namespace.
func TestSupervisorFollowsOneProcess(t *testing.T) {
	t.Parallel()
	first := exec.Command("sleep", "600")
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	end := sync.OnceFunc(func() { _ = first.Process.Kill(); _ = first.Wait() })
	t.Cleanup(end)
	core, logs := observer.New(zap.ErrorLevel)
	s := &Supervisor{Log: zap.New(core), changed: make(chan struct{}, 1), refused: make(map[string]bool)}
	follow := func(pid int, id health.DeviceID) string {
		t.Helper()
		text, err := json.Marshal(Follow{Version: followVersion, Sent: sinceBoot(), Daemons: []followDaemon{newFollowDaemon(unknownSpec(id))}})
		if err != nil {
			t.Fatal(err)
		}
		status := s.accept(pid, text)
		if got := status.Follows.has(id); got != (status.Error == "") {
			t.Errorf("process %d: %+v", pid, status)
		}
		return status.Error
	}
	for i, c := range []struct {
		pid int
		id  health.DeviceID
		err string
	}{
		{0, gpuA, ""},
		{first.Process.Pid, gpuB, ""},
		{first.Process.Pid, gpuA, ""},
		{os.Getpid(), gpuB, fmt.Sprintf("process %d tells mps-daemon what to run, and process %d may not", first.Process.Pid, os.Getpid())},
		{0, gpuB, ""},
		{os.Getpid(), gpuA, "may not until that has ended"},
		{os.Getpid(), gpuA, "may not until that has ended"},
	} {
		if err := follow(c.pid, c.id); !strings.Contains(err, c.err) || (err == "") != (c.err == "") {
			t.Errorf("%d: process %d: %q, want %q", i, c.pid, err, c.err)
		}
	}
	stop, err := json.Marshal(Follow{Version: followVersion, Sent: sinceBoot(), Stopped: true})
	if err != nil {
		t.Fatal(err)
	}
	if s := s.accept(os.Getpid(), stop); s.Error == "" {
		t.Error("another process has stopped the daemons")
	}
	if n := logs.Len(); n != 1 {
		t.Errorf("%d refusals logged: %v", n, logs.All())
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// It is a zombie: nobody has waited for it.
	eventually(t, "stop by another process", func() bool {
		stop, err := json.Marshal(Follow{Version: followVersion, Sent: sinceBoot(), Stopped: true})
		return err == nil && s.accept(os.Getpid(), stop).Error == ""
	}, func() string { return "" })
	third := exec.Command("sleep", "600") // the next agent, while the process that has sent the stop lives
	if err := third.Start(); err != nil {
		t.Fatal(err)
	}
	if err := follow(third.Process.Pid, gpuA); err != "" {
		t.Errorf("after the stop of another process: %s", err)
	}
	_, _ = third.Process.Kill(), third.Wait()
	end()
	if err := follow(os.Getpid(), gpuB); err != "" {
		t.Error(err)
	}
}

// A request that waited while mps-daemon hung does not undo a newer one, and is not followed late: its sender has decided again. A stop is.
func TestSupervisorRefusesOldRequests(t *testing.T) {
	t.Parallel()
	s := &Supervisor{Log: zap.NewNop(), changed: make(chan struct{}, 1), refused: make(map[string]bool)}
	now := sinceBoot()
	send := func(f Follow) string {
		t.Helper()
		f.Version = followVersion
		text, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		return s.accept(os.Getpid(), text).Error
	}
	a, b := []followDaemon{newFollowDaemon(unknownSpec(gpuA))}, []followDaemon{newFollowDaemon(unknownSpec(gpuB))}
	for i, c := range []struct {
		f       Follow
		refused bool
	}{
		{Follow{Sent: now - time.Minute, Daemons: a}, true},
		{Follow{Sent: now - time.Minute, Daemons: a, Stopped: true}, false},
		{Follow{Sent: now - 2*time.Minute, Daemons: a, Stopped: true}, true},
		{Follow{Sent: now, Daemons: a}, false},
		{Follow{Sent: now, Daemons: b}, true},
		{Follow{Sent: now - time.Second/2, Daemons: b}, true},
		{Follow{Sent: now + 1, Daemons: b}, false},
		{Follow{Sent: now + 3, Daemons: b}, false},
		{Follow{Sent: now + 2, Daemons: a}, true},
		{Follow{Sent: now + time.Hour, Daemons: a}, true}, // of no process of this node
	} {
		before := s.follows
		if err := send(c.f); (err != "") != c.refused || c.refused && s.follows != before || !c.refused && !c.f.same(s.follows) {
			t.Errorf("%d: %q, follows %+v", i, err, s.follows)
		}
	}
}

// Stop returns when mps-daemon has done what it was told, also if that has just started and has only a compute mode to set back.
func TestStopAwaitsNewSupervisor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.want(gpuA)
	process := n.startProcess()
	before := n.awaitServing(gpuA)[gpuA]
	killProcess(process)
	kill(t, before.PID)
	eventually(t, "end of the killed daemon", func() bool { return !alive(before.PID) }, func() string { return "" })
	n.follow = nil
	n.supervise()
	n.await("nothing to run", func(s Status) bool { return s.Follows == nil })
	f := NewFollower(Options{Root: func() Root { return n.root }, Log: zaptest.NewLogger(t)})
	f.Stop(t.Context())
	if got := n.mode(gpuA); got != driver.ComputeModeDefault {
		t.Errorf("compute mode %v after the stop", got)
	}
	if s, err := n.status(); err != nil || !s.Follows.Stopped || s.Pending || len(n.program.Processes()) > 0 {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := os.Stat(n.root.PipeDir(gpuA)); err != nil {
		t.Errorf("containers have the pipe directory mounted: %v", err)
	}
}

func TestSecondSupervisorWaits(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.want(gpuA)
	stopFirst := n.supervise()
	before := n.awaitServing(gpuA)[gpuA]
	startWaiting := func() *exec.Cmd {
		process := n.startProcess()
		eventually(t, "lock file opened", func() bool {
			links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", process.Process.Pid))
			return slices.ContainsFunc(links, func(l string) bool { to, _ := os.Readlink(l); return to == n.root.lockFile() })
		}, func() string { return "" })
		return process
	}
	startWaiting()
	if s, err := n.status(); err != nil || s.Daemons[0].PID != before.PID {
		t.Errorf("%+v, %v", s, err)
	}
	stopFirst()
	if after := n.awaitServing(gpuA)[gpuA]; after.PID == before.PID || after.Restarts != 0 { // it did nothing while it waited
		t.Errorf("before %+v, after %+v", before, after)
	}
	// One that waits can be stopped. Before it waits, the signal would end it in any case.
	third := startWaiting()
	if err := third.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if state, err := third.Process.Wait(); err != nil || !state.Success() {
		t.Fatalf("%v, %v", state, err)
	}
}

// Mounts are tested in namespaces of their own, which need no privilege on the node except to make them.
func TestSupervisorMountsShm(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.want(gpuA)
	inNamespaces := func(cmd *exec.Cmd) {
		cmd.Env = append(cmd.Env, testMount+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}, GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		}
	}
	probe := exec.Command("true")
	if inNamespaces(probe); probe.Run() != nil {
		t.Skip("cannot make namespaces here")
	}
	process := n.startProcess(inNamespaces)
	s := n.await("status", func(s Status) bool { return len(s.Daemons) == 1 })
	if s.Shm != "" {
		t.Fatalf("%+v", s)
	}
	n.awaitServing(gpuA)
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mounts", process.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{n.root.ShmDir(), devShm} {
		if !strings.Contains(string(mounts), " "+dir+" tmpfs rw,nosuid,nodev,noexec,relatime") {
			t.Errorf("%s is not mounted as expected:\n%s", dir, mounts)
		}
		var fs syscall.Statfs_t // the kernel does not show a size that is its default
		if err := syscall.Statfs(fmt.Sprintf("/proc/%d/root%s", process.Process.Pid, dir), &fs); err != nil {
			t.Error(err)
		}
		if size, want := fs.Blocks*uint64(fs.Bsize)>>10, shmSize("/proc"); size < want || size > want+64 { //nolint:gosec // positive
			t.Errorf("%s has %d KiB, want %d", dir, size, want)
		}
	}
	info, err := os.Stat(fmt.Sprintf("/proc/%d/root%s", process.Process.Pid, devShm))
	if err != nil || info.Mode() != os.ModeDir|os.ModeSticky|0o777 {
		t.Errorf("%s: %v, %v", devShm, info, err)
	}
}

func TestMountShmOfTheNodeIsRefused(t *testing.T) {
	if same, err := isSameFile("/proc/self/ns/mnt", "/proc/1/ns/mnt"); err != nil || !same {
		t.Skip("the tests run in a container")
	}
	if err := mountShm(t.TempDir()); err == nil || !strings.HasPrefix(err.Error(), "--mount-shm: ") {
		t.Errorf("got %v", err)
	}
}
