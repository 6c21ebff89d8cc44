package memlimits

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const (
	gib      = 1 << 30
	resource = "nvidia.com/gpu-memory"
	podUID   = "0f4b7c1e-2d3a-4b5c-8d9e-0a1b2c3d4e5f"
)

var errDriver = errors.New("driver error")

// fakeDriver keeps limits as NVIDIA's driver does: by device and control group, until the group is removed.
type fakeDriver struct {
	mu          sync.Mutex // guards all below
	limits      map[target]driver.MemoryLimits
	unsupported map[health.DeviceID]error
	openErr     error
	err         error         // of Limits and SetLimits
	setErr      error         // of SetLimits
	errAfterSet error         // err from the next SetLimits on
	ignoreSet   bool          // SetLimits has no effect
	hang        chan struct{} // not nil: Limits and Supported hang until it is closed

	open, opened, supported, gets int
	running                       int
	overlap                       bool
	sets                          []string
}

func (d *fakeDriver) Open() (driver.MemoryLimiter, func(), error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.opened++
	if d.openErr != nil {
		return nil, nil, d.openErr
	}
	d.open++
	return d, func() { d.mu.Lock(); defer d.mu.Unlock(); d.open-- }, nil
}

// enter waits while the driver hangs, and returns with the mutex.
func (d *fakeDriver) enter() {
	d.mu.Lock()
	d.running++
	d.overlap = d.overlap || d.running > 1
	for d.hang != nil {
		hang := d.hang
		d.mu.Unlock()
		<-hang
		d.mu.Lock()
	}
	d.running--
}

func (d *fakeDriver) Supported(id health.DeviceID) error {
	d.enter()
	defer d.mu.Unlock()
	d.supported++
	if err := d.unsupported[id]; err != nil {
		return fmt.Errorf("%s: %w", id, err)
	}
	return nil
}

func (d *fakeDriver) Limits(id health.DeviceID, cgroup string) (driver.MemoryLimits, error) {
	d.enter()
	defer d.mu.Unlock()
	d.gets++
	if _, err := os.Stat(cgroup); err != nil {
		return driver.MemoryLimits{}, err
	}
	if d.err != nil {
		return driver.MemoryLimits{}, d.err
	}
	l, exists := d.limits[target{id, cgroup}]
	if !exists {
		return driver.MemoryLimits{}, fmt.Errorf("nvmlDeviceGetMemoryLimits_v1: %w", driver.ErrNoMemoryLimits)
	}
	return l, nil
}

func (d *fakeDriver) SetLimits(id health.DeviceID, cgroup string, soft, hard uint64) error {
	d.enter()
	defer d.mu.Unlock()
	d.sets = append(d.sets, fmt.Sprintf("%s %s %d %d", id, filepath.Base(cgroup), soft/gib, hard/gib))
	if err := cmpErr(d.err, d.setErr); err != nil {
		return err
	}
	d.err = d.errAfterSet
	if !d.ignoreSet {
		d.limits[target{id, cgroup}] = driver.MemoryLimits{Soft: soft, Hard: hard, Used: 3 * gib}
	}
	return nil
}

func cmpErr(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// change changes the driver's behavior.
func (d *fakeDriver) change(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

// node is a node with GPU-a and GPU-b, and pods on it.
type node struct {
	*testing.T
	*Follower
	driver    *fakeDriver
	open      Open
	dir       string
	configs   health.Latest[Config]
	snapshots health.Latest[health.Snapshot]
	holders   health.Latest[podresources.Holders]
	hooks     map[health.DeviceID]bool
	claims    map[podresources.ClaimRef]uint64 // bytes
	logs      *observer.ObservedLogs
	cancel    context.CancelFunc
	done      chan struct{}
}

func newNode(t *testing.T) *node {
	core, logs := observer.New(zap.InfoLevel)
	n := &node{
		T: t, dir: t.TempDir(), logs: logs, hooks: map[health.DeviceID]bool{},
		driver: &fakeDriver{limits: map[target]driver.MemoryLimits{}, unsupported: map[health.DeviceID]error{}},
	}
	n.open = n.driver.Open
	n.configs.Store(&Config{Enforcement: Driver, PodLogs: filepath.Join(n.dir, "log/pods")})
	n.holders.Store(&podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}})
	n.setDevices("615.10", "GPU-a", "GPU-b")
	n.write("log/pods/x", "")
	n.write("log/containers/x", "")
	n.write("cgroup/cgroup.controllers", "")
	n.write("cgroup/kubepods/cgroup.procs", "")
	n.Follower = New(Options{
		Config: &n.configs, Snapshots: &n.snapshots, Holders: &n.holders, CgroupRoot: filepath.Join(n.dir, "cgroup"), Admin: true,
		Claimed: func(h podresources.Holder) (uint64, bool) { return n.claims[h.Claim], false },
		Hooks:   func() map[health.DeviceID]bool { return n.hooks }, Log: zap.New(core),
	})
	return n
}

func (n *node) setDevices(version string, ids ...health.DeviceID) {
	s := &health.Snapshot{Seq: 1, At: time.Now()}
	s.Source.Status, s.Source.Versions.Driver = health.SourceUp, version
	for _, id := range ids {
		d := health.DeviceState{Device: health.Device{ID: id}}
		if strings.HasPrefix(string(id), "MIG") {
			d.Device.Kind = health.KindMIG
		}
		s.Devices = append(s.Devices, d)
	}
	n.snapshots.Store(s)
}

func (n *node) write(name, text string) {
	n.Helper()
	path := filepath.Join(n.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		n.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		n.Fatal(err)
	}
}

// hold has a container hold units of a device, as of an answer of the kubelet.
func (n *node) hold(device health.DeviceID, pod string, units int) {
	next := podresources.Holders{At: time.Now(), By: map[health.DeviceID][]podresources.Holder{}}
	for id, list := range n.holders.Load().By {
		for _, h := range list {
			if id != device || h.Pod != pod {
				next.By[id] = append(next.By[id], h)
			}
		}
	}
	for i := range units {
		next.By[device] = append(next.By[device], podresources.Holder{
			Namespace: "team", Pod: pod, Container: "main", Resource: resource, DeviceID: fmt.Sprintf("%s::1024Mi::%d", device, i),
		})
	}
	n.holders.Store(&next)
}

func containerID(start int) string { return fmt.Sprintf("%064d", start) }

// group returns the name of the directory of a container's control group.
func group(start int) string { return "crio-" + containerID(start) }

// run starts a container of a pod, and returns its control group.
func (n *node) run(pod string, start int) (dir string) {
	dir = "cgroup/kubepods/pod" + podUID + "/" + group(start)
	n.write(dir+"/cgroup.procs", "42\n")
	n.write("log/containers/"+pod+"_team_main-"+containerID(start)+".log", "")
	return filepath.Join(n.dir, dir)
}

// end ends a container. Its log stays.
func (n *node) end(dir string) {
	if err := os.RemoveAll(dir); err != nil {
		n.Fatal(err)
	}
	n.driver.change(func() {
		for t := range n.driver.limits {
			if t.group == dir {
				delete(n.driver.limits, t)
			}
		}
	})
}

// start runs the follower, and waits until its first pass has ended.
func (n *node) start() {
	n.launch()
	synctest.Wait()
}

func (n *node) launch() {
	ctx, cancel := context.WithCancel(n.Context())
	n.cancel, n.done = cancel, make(chan struct{})
	go func() { defer close(n.done); n.Follower.Run(ctx, n.open) }()
}

// stop ends the follower and checks what must hold in each test.
func (n *node) stop() {
	n.Helper()
	n.cancel()
	<-n.done
	n.driver.change(func() {
		if n.driver.open != 0 || n.driver.overlap {
			n.Errorf("%d releases are missing; overlapping calls: %v", n.driver.open, n.driver.overlap)
		}
	})
	if n.Latest().Load() != nil {
		n.Error("a snapshot remains after the end")
	}
}

func (n *node) wait(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// expect checks the containers: pod, units, enforcement, used GiB, and whether there is a reason.
func (n *node) expect(want ...string) {
	n.Helper()
	synctest.Wait()
	var got []string
	if s := n.Latest().Load(); s != nil {
		for _, c := range s.Containers {
			text := fmt.Sprintf("%s %s %d/%dGi %s", c.Device, c.Pod, c.Units, c.Limit/gib, c.Enforcement)
			if c.HasUsed || c.Used > 0 {
				text += fmt.Sprintf(" used %d", c.Used/gib)
			}
			if c.Reason != "" {
				text += " reason"
			}
			got = append(got, text)
		}
	}
	if !reflect.DeepEqual(got, want) {
		n.Errorf("got  %q\nwant %q\n%+v", got, want, n.Latest().Load())
	}
}

// expectDriver checks for which devices the driver's limits can be used.
func (n *node) expectDriver(hook bool, want map[health.DeviceID]bool) {
	n.Helper()
	synctest.Wait()
	c := n.Capabilities().Load()
	if c == nil {
		n.Fatal("not examined")
	}
	got := map[health.DeviceID]bool{}
	for id, reason := range c.Driver {
		got[id] = reason == ""
	}
	if !reflect.DeepEqual(got, want) || c.Hook != hook {
		n.Errorf("%+v", *c)
	}
}

func (n *node) takeSets() (sets []string) {
	n.driver.change(func() { sets, n.driver.sets = n.driver.sets, nil })
	return sets
}

func (n *node) expectSets(want ...string) {
	n.Helper()
	if got := n.takeSets(); !reflect.DeepEqual(got, want) {
		n.Errorf("limits set: %q, want %q", got, want)
	}
}

// await waits for a snapshot.
func (n *node) await(ready func(*Snapshot) bool) {
	n.Helper()
	for timeout := time.After(10 * time.Second); ; {
		s, changed := n.Latest().Watch()
		if s != nil && ready(s) {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			n.Fatalf("%+v, %+v", s, n.Capabilities().Load())
		}
	}
}

func onNode(t *testing.T, f func(n *node)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(newNode(t)) })
}

func TestFollowerSetsLimits(t *testing.T) {
	onNode(t, func(n *node) {
		n.start()
		defer n.stop()
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
		n.expect()

		n.hold("GPU-a", "one", 10) // allocated, while its image is pulled
		n.expect("GPU-a one 10/10Gi none reason")
		first := n.run("one", 1)
		n.hold("GPU-b", "two", 3)
		n.run("two", 2)
		n.wait(refresh)
		n.expect("GPU-a one 10/10Gi driver used 3", "GPU-b two 3/3Gi driver used 3")
		sets := n.takeSets()
		if len(sets) != 2 || !strings.Contains(strings.Join(sets, "\n"), "GPU-a "+group(1)+" 0 10") {
			t.Errorf("%q", sets)
		}

		// It starts again with another ID.
		n.end(first)
		n.wait(refresh)
		n.expect("GPU-a one 10/10Gi none reason", "GPU-b two 3/3Gi driver used 3")
		n.run("one", 3)
		n.hold("GPU-c", "other", 1) // of another node's device: not listed
		n.expect("GPU-a one 10/10Gi driver used 3", "GPU-b two 3/3Gi driver used 3")
		n.expectSets("GPU-a " + group(3) + " 0 10")

		n.hold("GPU-a", "one", 0)
		n.expect("GPU-b two 3/3Gi driver used 3")
	})
}

// Devices with the same reason are logged together.
func TestFollowerLogsReasonOnce(t *testing.T) {
	onNode(t, func(n *node) {
		ids := []health.DeviceID{"GPU-f", "GPU-b", "GPU-d", "GPU-a", "GPU-e", "GPU-c"}
		for _, id := range ids {
			n.driver.unsupported[id] = errDriver
		}
		n.setDevices("615.10", ids...)
		n.start()
		defer n.stop()
		n.wait(time.Hour)
		if entries := n.logs.All(); len(entries) != 1 || !reflect.DeepEqual(entries[0].ContextMap()["devices"],
			[]any{"GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e", "GPU-f"}) {
			t.Errorf("%v", entries)
		}
		n.driver.change(func() { n.driver.unsupported = map[health.DeviceID]error{"GPU-a": errDriver} })
		n.wait(time.Hour)
		n.setDevices("616.1", "GPU-a", "GPU-b", "GPU-g")
		n.wait(time.Hour)
		var got []any
		for _, e := range n.logs.All()[1:] {
			got = append(got, e.Message, e.ContextMap()["devices"])
		}
		const limits = "the driver limits the memory of containers"
		if want := []any{limits, []any{"GPU-b", "GPU-c", "GPU-d", "GPU-e", "GPU-f"}, limits, []any{"GPU-g"}}; !reflect.DeepEqual(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	})
}

// The limits of a container are read again from time to time, not at each answer of the kubelet.
func TestFollowerReadsAtIntervals(t *testing.T) {
	onNode(t, func(n *node) {
		n.hold("GPU-a", "one", 10)
		dir := n.run("one", 1)
		n.start()
		defer n.stop()
		n.driver.change(func() { n.driver.gets = 0 })
		for range 30 {
			n.hold("GPU-a", "one", 10)
			n.wait(2 * time.Second)
		}
		n.driver.change(func() {
			if n.driver.gets < 5 || n.driver.gets > 7 || n.driver.supported != 2 || n.driver.opened != 1 {
				t.Errorf("%d reads, %d examinations, %d opened in a minute", n.driver.gets, n.driver.supported, n.driver.opened)
			}
			delete(n.driver.limits, target{"GPU-a", dir}) // as after a reset of the GPU
		})
		n.takeSets()
		n.wait(2 * refresh)
		n.expect("GPU-a one 10/10Gi driver used 3")
		n.expectSets("GPU-a " + group(1) + " 0 10")
	})
}

func TestFollowerJudgesFoundLimits(t *testing.T) {
	for name, test := range map[string]struct {
		change func(n *node, t target)
		want   string
		sets   int
		reason string
	}{
		"set by the hook": {
			change: func(n *node, t target) { n.driver.limits[t] = driver.MemoryLimits{Hard: 10 * gib, Used: gib} },
			want:   "driver used 1",
		},
		"tighter, by the container's environment": {
			change: func(n *node, t target) { n.driver.limits[t] = driver.MemoryLimits{Hard: 4 * gib} }, want: "driver used 0",
		},
		"too high, by the container's environment": {
			change: func(n *node, t target) { n.driver.limits[t] = driver.MemoryLimits{Hard: 80 * gib} }, want: "driver used 3", sets: 1,
		},
		"none": {change: func(*node, target) {}, want: "driver used 3", sets: 1},
		"set refused": {
			change: func(n *node, _ target) { n.driver.setErr = errDriver }, want: "none reason", sets: 1,
			reason: "expected a limit of 10240 MiB, found none: driver error",
		},
		"set without effect": {
			change: func(n *node, _ target) { n.driver.ignoreSet = true }, want: "none reason", sets: 1,
			reason: "expected a limit of 10240 MiB, found none",
		},
		"set without effect, was too high": {change: func(n *node, t target) {
			n.driver.ignoreSet = true
			n.driver.limits[t] = driver.MemoryLimits{Hard: 80 * gib, Used: gib}
		}, want: "none used 1 reason", sets: 1, reason: "expected a limit of 10240 MiB, found 81920 MiB"},
		"read fails": {
			change: func(n *node, _ target) { n.driver.err = errDriver }, want: "none reason",
			reason: "its limits cannot be read: driver error",
		},
		"read back fails": {
			change: func(n *node, _ target) { n.driver.errAfterSet = errDriver }, want: "none reason", sets: 1,
			reason: "its limits cannot be read: driver error",
		},
	} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(n *node) {
				n.hold("GPU-a", "one", 10)
				dir := n.run("one", 1)
				test.change(n, target{"GPU-a", dir})
				n.start()
				defer n.stop()
				n.expect("GPU-a one 10/10Gi " + test.want)
				if c := n.Latest().Load().Containers[0]; c.Reason != test.reason {
					t.Errorf("reason %q", c.Reason)
				}
				if sets := n.takeSets(); len(sets) != test.sets {
					n.Errorf("%q", sets)
				}
				inForce := test.sets > 0 && strings.HasPrefix(test.want, "driver")
				if logged := n.logs.FilterMessage("memory limit set").Len() > 0; logged != inForce {
					n.Errorf("logged %v", n.logs.All())
				}
			})
		})
	}
}

// An error of the driver does not change the verdict on a limit that was read back.
func TestFollowerKeepsVerdictDuringErrors(t *testing.T) {
	onNode(t, func(n *node) {
		n.hold("GPU-a", "one", 10)
		n.run("one", 1)
		n.start()
		defer n.stop()
		n.driver.change(func() { n.driver.err = errDriver })
		n.wait(2 * refresh)
		n.expect("GPU-a one 10/10Gi driver")
		if s := n.Latest().Load(); s.Err == "" {
			t.Error("no error")
		}
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
		n.driver.change(func() { n.driver.err = nil })
		n.wait(4 * refresh)
		n.expect("GPU-a one 10/10Gi driver used 3")
		if s := n.Latest().Load(); s.Err != "" || n.logs.FilterField(zap.String("error", errDriver.Error())).Len() != 1 {
			t.Errorf("%q, %v", s.Err, n.logs.All())
		}
	})
}

// A driver that does not limit a device any more keeps no container within its memory.
func TestFollowerLosesLimits(t *testing.T) {
	onNode(t, func(n *node) {
		n.hold("GPU-a", "one", 10)
		n.run("one", 1)
		n.start()
		defer n.stop()
		n.expect("GPU-a one 10/10Gi driver used 3")
		n.driver.change(func() { n.driver.err, n.driver.unsupported["GPU-a"] = errDriver, errDriver })
		n.wait(3 * refresh)
		n.expect("GPU-a one 10/10Gi none reason")
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": false, "GPU-b": true})
		n.driver.change(func() { n.driver.err, n.driver.unsupported = nil, nil })
		n.wait(6 * refresh)
		n.expect("GPU-a one 10/10Gi driver used 3")
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
	})
}

// expectReasons checks that the driver limits the containers of GPU-a if it is able to, and why not else: the reason is a part of the
// devices' without limits or, if the limits are hidden, of the containers'.
func (n *node) expectReasons(able, hidden bool, reason string) {
	n.Helper()
	s, driver := n.Latest().Load(), n.Capabilities().Load().Driver
	if (s.Err != "") != hidden {
		n.Errorf("error %q", s.Err)
	}
	for _, c := range s.Containers {
		if (c.Enforcement == Driver) != able || (c.Reason == "") != able || driver[c.Device] != "" && c.Reason != driver[c.Device] ||
			hidden && !strings.Contains(c.Reason, reason) {
			n.Errorf("%+v", c)
		}
	}
	for id, text := range driver {
		if !strings.Contains(text, reason) && text != "" || strings.HasPrefix(text, string(id)) {
			n.Errorf("%s: %q", id, text)
		}
	}
}

func TestFollowerExaminesNode(t *testing.T) {
	both := func(a, b bool) map[health.DeviceID]bool { return map[health.DeviceID]bool{"GPU-a": a, "GPU-b": b} }
	hooked := func(change func(n *node)) func(n *node) {
		return func(n *node) { n.hooks = both(true, true); change(n) }
	}
	unknown := func(n *node) { n.holders.Store(&podresources.Holders{Err: "error"}) }
	withoutLogs := func(n *node) { n.remove("log/pods") }
	for name, test := range map[string]struct {
		change func(n *node)
		hook   bool
		want   map[health.DeviceID]bool
		reason string // a part, of the devices without limits, else of the containers
	}{
		"agent":      {func(*node) {}, false, both(true, true), ""},
		"hooks":      {hooked(func(*node) {}), true, both(true, true), ""},
		"hooks only": {hooked((*node).withoutAdmin), true, both(true, true), ""},
		"one hook":   {func(n *node) { n.hooks = both(true, false); n.withoutAdmin() }, true, both(true, false), "CAP_SYS_ADMIN"},
		"nobody":     {(*node).withoutAdmin, false, both(false, false), "the agent cannot set them: it lacks CAP_SYS_ADMIN"},
		"old driver": {func(n *node) { n.driver.unsupported["GPU-b"] = errDriver }, false, both(true, false), "driver error"},
		"no driver":  {func(n *node) { n.driver.openErr = errDriver }, false, both(false, false), "driver error"},
		"cgroup v1": {
			hooked(func(n *node) { n.remove("cgroup/cgroup.controllers") }), false, both(false, false),
			"no control groups at",
		},
		"own cgroups":        {func(n *node) { n.remove("cgroup/kubepods") }, false, both(false, false), "no control groups of pods"},
		"no pod logs":        {withoutLogs, false, both(false, false), "metrics.processes.podLogs: "},
		"no pod logs, hooks": {hooked(withoutLogs), true, both(true, true), "its limits cannot be read: metrics.processes.podLogs: "},
		"no log links":       {func(n *node) { n.remove("log/containers") }, false, both(false, false), "metrics.processes.podLogs: "},
		"MIG": {
			func(n *node) { n.setDevices("615.10", "MIG-1") }, false,
			map[health.DeviceID]bool{"MIG-1": false},
			"MIG devices",
		},
		"holders unknown":        {unknown, false, both(false, false), "unknown: error"},
		"holders unknown, hooks": {hooked(unknown), true, both(true, true), ""},
		"holders not asked for": {
			func(n *node) { n.holders.Store(&podresources.Holders{Err: "error", Pending: true}) }, false, both(true, true),
			"",
		},
		"podLogs off": {func(n *node) {
			c := *n.configs.Load()
			c.PodLogs = ""
			n.configs.Store(&c)
		}, false, both(false, false), "metrics.processes.podLogs: empty"},
	} {
		t.Run(name, func(t *testing.T) {
			onNode(t, func(n *node) {
				n.hold("GPU-a", "one", 1)
				n.run("one", 1)
				test.change(n)
				n.start()
				defer n.stop()
				n.expectDriver(test.hook, test.want)
				hidden := strings.HasSuffix(name, ", hooks") // nobody sees whether the hook works
				n.expectReasons(test.want["GPU-a"] && n.Admin && !hidden, hidden, test.reason)
				if name == "cgroup v1" && n.driver.opened != 0 {
					t.Error("the driver was examined in vain")
				}
			})
		})
	}
}

// A container is found as soon as the control groups of pods are visible.
func TestFollowerLooksForControlGroups(t *testing.T) {
	onNode(t, func(n *node) {
		n.hold("GPU-a", "one", 1)
		n.remove("cgroup/kubepods")
		n.start()
		defer n.stop()
		n.run("one", 1)
		n.hold("GPU-a", "one", 1)
		n.expect("GPU-a one 1/1Gi none reason") // it was just looked for
		n.wait(refresh)
		n.expect("GPU-a one 1/1Gi driver used 3")
		n.remove("cgroup/kubepods")
		n.wait(refresh)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": false, "GPU-b": false})
	})
}

// The node is examined at the first poll.
func TestFollowerAwaitsFirstPoll(t *testing.T) {
	onNode(t, func(n *node) {
		polled := n.snapshots.Load()
		n.snapshots.Store(&health.Snapshot{})
		n.start()
		defer n.stop()
		if c := n.Capabilities().Load(); c != nil {
			t.Errorf("%+v", c)
		}
		n.snapshots.Store(polled)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
		_, capabilities := n.Capabilities().Watch()
		_, latest := n.Latest().Watch()
		n.wait(3 * refresh)
		select {
		case <-capabilities:
			t.Error("the same capabilities were stored again")
		case <-latest:
			t.Error("the same containers were stored again")
		default:
		}
	})
}

// withoutAdmin takes the privilege for which the driver sets limits.
func (n *node) withoutAdmin() { n.Admin, n.driver.setErr = false, errDriver }

func (n *node) remove(name string) {
	if err := os.RemoveAll(filepath.Join(n.dir, name)); err != nil {
		n.Fatal(err)
	}
}

// Without the privilege to set limits, the agent reads the hook's limits back.
func TestFollowerConfirmsHook(t *testing.T) {
	onNode(t, func(n *node) {
		n.withoutAdmin()
		n.hooks = map[health.DeviceID]bool{"GPU-a": true}
		n.hold("GPU-a", "one", 10)
		n.driver.limits[target{"GPU-a", n.run("one", 1)}] = driver.MemoryLimits{Hard: 10 * gib}
		n.hold("GPU-a", "two", 2)
		n.run("two", 2) // its hook was an old one
		n.start()
		defer n.stop()
		n.expect("GPU-a one 10/10Gi driver used 0", "GPU-a two 2/2Gi none reason")
	})
}

// A failed examination is repeated less and less often, and at once if the driver or the device changes.
func TestFollowerRepeatsExamination(t *testing.T) {
	onNode(t, func(n *node) {
		n.driver.unsupported["GPU-a"] = errDriver
		n.start()
		defer n.stop()
		n.wait(time.Hour + time.Minute)
		n.driver.change(func() {
			if n.driver.supported < 10 || n.driver.supported > 35 {
				t.Errorf("%d examinations in an hour", n.driver.supported)
			}
			n.driver.unsupported = nil
		})
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": false, "GPU-b": true})
		n.setDevices("616.1", "GPU-a", "GPU-b")
		n.wait(refresh)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})

		n.driver.change(func() { n.driver.unsupported = map[health.DeviceID]error{"GPU-a": errDriver} })
		n.setDevices("617.1", "GPU-a")
		n.wait(time.Hour + time.Minute)
		n.driver.change(func() { n.driver.unsupported = nil })
		s := *n.snapshots.Load()
		s.Devices = []health.DeviceState{s.Devices[0]}
		s.Devices[0].Sample.Presence = health.Lost
		n.snapshots.Store(&s)
		n.wait(refresh)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true})
	})
}

// A device that has returned is not examined as seldom as one that fails for long.
func TestFollowerExaminesReturnedDevice(t *testing.T) {
	onNode(t, func(n *node) {
		n.driver.unsupported["GPU-a"] = errDriver
		n.start()
		defer n.stop()
		n.wait(time.Hour)
		setPresence := func(p health.Presence) {
			s := *n.snapshots.Load()
			s.Devices = slices.Clone(s.Devices)
			s.Devices[0].Sample.Presence = p
			n.snapshots.Store(&s)
			n.wait(refresh)
		}
		setPresence(health.Lost)
		n.driver.change(func() { n.driver.supported = 0 })
		n.wait(time.Hour)
		n.driver.change(func() {
			if n.driver.supported < 10 || n.driver.supported > 35 {
				t.Errorf("%d examinations in an hour without the device", n.driver.supported)
			}
		})
		setPresence(health.Present)
		n.driver.change(func() { n.driver.unsupported = nil }) // it was not ready for a moment
		n.wait(refresh)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
	})
}

// After a detach the driver can be an older one.
func TestFollowerAfterDetach(t *testing.T) {
	onNode(t, func(n *node) {
		n.start()
		n.stop()
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
		hang := make(chan struct{})
		n.driver.change(func() { n.driver.hang, n.driver.unsupported["GPU-b"] = hang, errDriver })
		n.start()
		defer n.stop()
		n.expectDriver(false, map[health.DeviceID]bool{})
		n.driver.change(func() { n.driver.hang = nil })
		close(hang)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": false})
	})
}

// While the driver hangs, what was read stays, devices that were not examined have a reason, and no second call is made.
func TestFollowerWithHangingDriver(t *testing.T) {
	onNode(t, func(n *node) {
		hang := make(chan struct{})
		n.driver.hang = hang
		n.hold("GPU-a", "one", 10)
		n.run("one", 1)
		n.start()
		defer n.stop()
		if n.Capabilities().Load() != nil {
			t.Error("capabilities before the driver has answered")
		}
		n.wait(callLimit)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": false, "GPU-b": false})
		n.wait(time.Minute)
		n.driver.change(func() { n.driver.hang = nil })
		close(hang)
		n.wait(refresh)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
		n.expect("GPU-a one 10/10Gi driver used 3")

		n.hold("GPU-b", "two", 1)
		n.run("two", 2)
		n.wait(refresh)
		again := make(chan struct{})
		n.driver.change(func() { n.driver.hang, n.driver.gets = again, 0 })
		n.run("three", 3)
		n.hold("GPU-b", "two", 0)
		n.hold("GPU-b", "three", 2)
		n.wait(callLimit)
		n.expect("GPU-a one 10/10Gi driver", "GPU-b three 2/2Gi none reason")
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
		n.cancel() // the call is still in the driver
		synctest.Wait()
		select {
		case <-n.done:
			t.Error("ended during a call")
		default:
		}
		n.driver.change(func() { n.driver.hang = nil })
		close(again)
		<-n.done
		n.driver.change(func() {
			if n.driver.gets != 1 {
				t.Errorf("%d calls after the end", n.driver.gets-1)
			}
		})
	})
}

// The end waits for one call only.
func TestFollowerEndsDuringExamination(t *testing.T) {
	onNode(t, func(n *node) {
		hang := make(chan struct{})
		n.driver.hang = hang
		n.start()
		n.cancel()
		synctest.Wait()
		n.driver.change(func() { n.driver.hang = nil })
		close(hang)
		n.stop()
		if n.driver.supported != 1 {
			t.Errorf("%d devices were examined after the end", n.driver.supported-1)
		}
	})
}

// While the driver hangs, what does not depend on it stays as it is.
func TestFollowerHangLeavesOthers(t *testing.T) {
	onNode(t, func(n *node) {
		n.hooks = map[health.DeviceID]bool{"GPU-a": true}
		n.serveMPS("GPU-b", &health.MPSDaemon{Ready: true})
		n.start()
		defer n.stop()
		n.expect("GPU-b mps 1/1Gi mps")
		n.expectDriver(true, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
		hang := make(chan struct{})
		n.driver.change(func() { n.driver.hang = hang })
		n.hold("GPU-a", "one", 1)
		n.run("one", 1)
		n.setDevices("616.1", "GPU-a", "GPU-b") // so that the devices are examined again
		n.serveMPS("GPU-b", &health.MPSDaemon{Ready: true})
		n.wait(refresh + callLimit)
		n.expect("GPU-a one 1/1Gi none reason", "GPU-b mps 1/1Gi mps")
		n.expectDriver(true, map[health.DeviceID]bool{"GPU-a": true, "GPU-b": true})
		n.driver.change(func() { n.driver.hang = nil })
		close(hang)
	})
}

// serveMPS has MPS serve a device that a container holds.
func (n *node) serveMPS(id health.DeviceID, d *health.MPSDaemon) {
	s := *n.snapshots.Load()
	s.Devices = slices.Clone(s.Devices)
	i := slices.IndexFunc(s.Devices, func(s health.DeviceState) bool { return s.Device.ID == id })
	s.Devices[i].MPS = d
	n.snapshots.Store(&s)
	next := *n.holders.Load()
	next.By = maps.Clone(next.By)
	next.By[id] = []podresources.Holder{{
		Namespace: "team", Pod: "mps", Container: "main", Resource: resource,
		DeviceID: string(id) + "::1024Mi-mps::0",
	}}
	n.holders.Store(&next)
}

func TestFollowerJudgesMPS(t *testing.T) {
	for reason, d := range map[string]*health.MPSDaemon{
		"": {Ready: true}, "not been examined": nil, "not ready: it does not start": {Reason: "it does not start"},
	} {
		onNode(t, func(n *node) {
			n.serveMPS("GPU-a", d)
			n.start()
			defer n.stop()
			c := n.Latest().Load().Containers[0]
			if (c.Enforcement == MPS) != (reason == "") || !strings.Contains(c.Reason, reason) || (c.Reason == "") != (reason == "") {
				t.Errorf("%+v: %+v", d, c)
			}
		})
	}
}

// A limit that is not in force is logged once for each reason. That a container has ended, or that the driver has no limits, is none.
func TestFollowerLogsLimitsNotInForce(t *testing.T) {
	onNode(t, func(n *node) {
		const message = "the memory limit of a container is not in force"
		n.driver.ignoreSet = true
		n.driver.unsupported["GPU-b"] = errDriver
		n.hold("GPU-a", "one", 1)
		n.hold("GPU-b", "two", 1)
		n.hold("GPU-a", "three", 1)
		dir := n.run("one", 1)
		n.run("two", 2)
		n.end(n.run("three", 3))
		n.start()
		defer n.stop()
		n.wait(3 * refresh)
		n.driver.change(func() { n.driver.limits[target{"GPU-a", dir}] = driver.MemoryLimits{Hard: 2 * gib} })
		n.wait(3 * refresh)
		entries := n.logs.FilterMessage(message).All()
		if len(entries) != 2 || entries[0].ContextMap()["container"] != "team/one/main" || entries[0].ContextMap()["device"] != "GPU-a" {
			t.Errorf("%v", entries)
		}
	})
}

// The limit of a claim can change while its container runs.
func TestFollowerChangesLimit(t *testing.T) {
	onNode(t, func(n *node) {
		claim := podresources.ClaimRef{Name: "share", Driver: "gpu.nvidia.com", ShareID: "1"}
		hold := func(bytes uint64) {
			n.claims = map[podresources.ClaimRef]uint64{claim: bytes}
			n.holders.Store(&podresources.Holders{At: time.Now(), By: map[health.DeviceID][]podresources.Holder{
				"GPU-a": {{Namespace: "team", Pod: "one", Container: "main", DeviceID: "gpu-0", Claim: claim}},
			}})
		}
		hold(30 * gib)
		n.run("one", 1)
		n.start()
		defer n.stop()
		n.expect("GPU-a one 0/30Gi driver used 3")
		hold(20 * gib)
		n.expect("GPU-a one 0/20Gi driver used 3")
		n.driver.change(func() { n.driver.err = errDriver })
		hold(10 * gib)
		n.expect("GPU-a one 0/10Gi none reason") // what was read is of another limit
	})
}

func TestFollowerWithoutDriver(t *testing.T) {
	onNode(t, func(n *node) {
		holder := func(resource, pod, id string) podresources.Holder {
			return podresources.Holder{Namespace: "team", Pod: pod, Container: "main", Resource: resource, DeviceID: id}
		}
		n.holders.Store(&podresources.Holders{By: map[health.DeviceID][]podresources.Holder{
			"GPU-a": {
				holder(resource, "one", "GPU-a::1024Mi-mps::3"), holder(resource, "one", "GPU-a::1024Mi-mps::4"),
				holder(resource, "old", "GPU-a::1024Mi::1"),
			},
			"GPU-b": {holder(resource, "two", "GPU-b::1024Mi-mps::0"), holder("nvidia.com/gpu.shared", "share", "GPU-b::mps1024Mi::1")},
		}})
		s := *n.snapshots.Load()
		s.Devices[0].MPS = &health.MPSDaemon{Ready: true}
		n.snapshots.Store(&s)
		n.configs.Store(&Config{Enforcement: MPS})
		n.start()
		defer n.stop()
		n.expect("GPU-a one 2/2Gi mps", "GPU-a old 1/1Gi none reason", "GPU-b two 1/1Gi none reason")
		n.configs.Store(&Config{Enforcement: None})
		n.expect("GPU-a one 2/2Gi mps", "GPU-a old 1/1Gi none", "GPU-b two 1/1Gi none reason")
		n.run("one", 1)
		n.run("old", 2)
		n.configs.Store(&Config{Enforcement: Driver, PodLogs: filepath.Join(n.dir, "log/pods")})
		n.expect("GPU-a one 2/2Gi mps", "GPU-a old 1/1Gi driver used 3", "GPU-b two 1/1Gi none reason")
		n.expectSets("GPU-a " + group(2) + " 0 1")
		n.configs.Store(&Config{})
		n.wait(time.Hour)
		if c := n.Capabilities().Load(); n.Latest().Load() != nil || n.driver.open != 0 || len(c.Driver) != 0 {
			t.Errorf("%+v, %+v, %d open", n.Latest().Load(), c, n.driver.open)
		}
	})
}

// Without memory sharing nothing runs and nothing is published.
func TestFollowerWithoutMemorySharing(t *testing.T) {
	onNode(t, func(n *node) {
		n.configs.Store(&Config{})
		n.start()
		n.wait(time.Hour)
		n.stop()
		if n.Capabilities().Load() != nil || n.driver.opened != 0 {
			t.Errorf("%+v", n.Capabilities().Load())
		}
	})
}

// A container that starts again while its last start still ends uses the memory of both.
func TestFollowerAddsGroupsOfContainer(t *testing.T) {
	onNode(t, func(n *node) {
		n.hold("GPU-a", "one", 4)
		n.end(n.run("one", 1)) // it only has a log yet
		n.start()
		defer n.stop()
		n.expect("GPU-a one 4/4Gi none reason")
		n.run("one", 1)
		n.wait(refresh)
		n.expect("GPU-a one 4/4Gi driver used 3")
		last := n.run("one", 2)
		n.hold("GPU-a", "one", 4)
		n.expect("GPU-a one 4/4Gi driver used 6")
		n.wait(3 * refresh)
		n.expect("GPU-a one 4/4Gi driver used 6")
		n.driver.change(func() { // one without a limit is enough
			n.driver.ignoreSet = true
			delete(n.driver.limits, target{"GPU-a", last})
		})
		n.wait(refresh)
		n.expect("GPU-a one 4/4Gi none used 3 reason")
	})
}

// The control group of a container that has ended is not searched at each answer of the kubelet.
func TestFollowerSearchesAtIntervals(t *testing.T) {
	onNode(t, func(n *node) {
		n.hold("GPU-a", "one", 1)
		n.end(n.run("one", 1))
		n.start()
		defer n.stop()
		n.run("one", 1)
		for range 4 {
			n.hold("GPU-a", "one", 1)
			n.expect("GPU-a one 1/1Gi none reason")
			n.wait(2 * time.Second)
		}
		second := n.run("one", 2) // another start is found at once
		n.hold("GPU-a", "one", 1)
		n.expect("GPU-a one 1/1Gi driver used 3")
		n.wait(2 * refresh)
		n.expectSets("GPU-a " + group(2) + " 0 1") // the first is not searched while the second runs
		n.end(second)
		n.wait(2 * refresh)
		n.expectSets("GPU-a " + group(1) + " 0 1")
	})
}

// A container keeps the limit of the units that it was given, after a change of their size.
func TestFollowerKeepsSizeOfUnits(t *testing.T) {
	onNode(t, func(n *node) {
		by := map[health.DeviceID][]podresources.Holder{}
		for i, id := range []string{"GPU-a::2048Mi::0", "GPU-a::2048Mi::1", "GPU-a::1024Mi::0"} {
			by["GPU-a"] = append(by["GPU-a"], podresources.Holder{
				Namespace: "team", Pod: fmt.Sprintf("pod-%d", i/2), Container: "main",
				Resource: resource, DeviceID: id,
			})
		}
		n.holders.Store(&podresources.Holders{By: by})
		n.start()
		defer n.stop()
		n.expect("GPU-a pod-0 2/4Gi none reason", "GPU-a pod-1 1/1Gi none reason")
	})
}

// crun keeps the processes of a container in a group below the container's.
func TestFollowerLimitsGroupOfProcesses(t *testing.T) {
	onNode(t, func(n *node) {
		n.hold("GPU-a", "one", 2)
		dir := strings.TrimPrefix(n.run("one", 1), n.dir)
		n.write(dir+"/cgroup.procs", "")
		n.write(dir+"/container/cgroup.procs", "42\n")
		n.start()
		defer n.stop()
		n.expect("GPU-a one 2/2Gi driver used 3")
		n.expectSets("GPU-a container 0 2")
	})
}

// A container that ends while its limits are read is no error.
func TestFollowerContainerEndsDuringRead(t *testing.T) {
	onNode(t, func(n *node) {
		n.hold("GPU-a", "one", 1)
		dir := n.run("one", 1)
		n.start()
		defer n.stop()
		hang := make(chan struct{})
		n.driver.change(func() { n.driver.hang = hang })
		n.wait(refresh) // it is being read
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		n.driver.change(func() { n.driver.hang = nil })
		close(hang)
		n.expect("GPU-a one 1/1Gi none reason")
		if s := n.Latest().Load(); s.Err != "" || n.logs.FilterMessage("cannot read memory limits").Len() != 0 {
			t.Errorf("%q, %v", s.Err, n.logs.All())
		}
	})
}

// A failed open is repeated less and less often.
func TestFollowerRepeatsOpen(t *testing.T) {
	onNode(t, func(n *node) {
		n.driver.openErr = errDriver
		n.hold("GPU-a", "one", 1)
		n.run("one", 1)
		n.start()
		defer n.stop()
		n.wait(time.Hour)
		n.expect("GPU-a one 1/1Gi none reason")
		n.driver.change(func() {
			if n.driver.opened < 10 || n.driver.opened > 35 {
				t.Errorf("opened %d times in an hour", n.driver.opened)
			}
			n.driver.openErr = nil
		})
		n.wait(maxRetry + refresh)
		n.expect("GPU-a one 1/1Gi driver used 3")
	})
	onNode(t, func(n *node) { // another driver is tried at once
		n.driver.openErr = errDriver
		n.start()
		defer n.stop()
		n.wait(time.Hour)
		n.driver.change(func() { n.driver.openErr = nil })
		n.setDevices("616.1", "GPU-a")
		n.wait(refresh)
		n.expectDriver(false, map[health.DeviceID]bool{"GPU-a": true})
	})
}

// The containers are listed by device, whatever the order of the snapshot is.
func TestFollowerSortsContainers(t *testing.T) {
	onNode(t, func(n *node) {
		n.setDevices("615.10", "GPU-c", "GPU-a", "GPU-b")
		for _, id := range []health.DeviceID{"GPU-a", "GPU-b", "GPU-c"} {
			n.hold(id, "two", 1)
			n.hold(id, "one", 1)
		}
		n.start()
		defer n.stop()
		n.expect("GPU-a two 1/1Gi none reason", "GPU-a one 1/1Gi none reason", "GPU-b two 1/1Gi none reason", "GPU-b one 1/1Gi none reason",
			"GPU-c two 1/1Gi none reason", "GPU-c one 1/1Gi none reason")
	})
}

// The node is examined at intervals, not at each poll of the devices.
func TestFollowerIgnoresPolls(t *testing.T) {
	onNode(t, func(n *node) {
		passes := 0
		n.Hooks = func() map[health.DeviceID]bool { passes++; return nil }
		n.start()
		for range 60 {
			n.setDevices("615.10", "GPU-a", "GPU-b")
			n.wait(time.Second)
		}
		n.stop()
		if passes < 5 || passes > 8 {
			t.Errorf("%d passes in a minute", passes)
		}
	})
}

// Units of other resources, and whole GPUs that were held before the resource had units, are not limited.
func TestFollowerLeavesOtherHolders(t *testing.T) {
	onNode(t, func(n *node) {
		by := map[health.DeviceID][]podresources.Holder{}
		for i, id := range []string{
			"GPU-a", "GPU-a::0", "GPU-a::mps4::0", "GPU-a::1024Mi", "GPU-a::0Mi::0", "GPU-a::99999999999999999999Mi::0",
			"GPU-a::x1024Mi::0", "GPU-a::1024Mi-x::0", "GPU-a::mps1024Mi::0", "GPU-a::1024Mi::",
		} {
			pod := fmt.Sprintf("pod-%d", i)
			by["GPU-a"] = append(by["GPU-a"], podresources.Holder{Namespace: "team", Pod: pod, Container: "main", Resource: resource, DeviceID: id})
			n.run(pod, i)
		}
		n.holders.Store(&podresources.Holders{By: by})
		n.start()
		defer n.stop()
		n.wait(refresh)
		n.expect()
		n.expectSets()
	})
}

// The share of a claim is limited like units, once it is prepared. Whole devices have no limit.
func TestClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t)
		share, whole := podresources.ClaimRef{Name: "share", Driver: "gpu.nvidia.com", ShareID: "1"},
			podresources.ClaimRef{Name: "whole", Driver: "gpu.nvidia.com"}
		held := func(pod string, c podresources.ClaimRef) podresources.Holder {
			return podresources.Holder{Namespace: "team", Pod: pod, Container: "main", DeviceID: "gpu-0", Claim: c}
		}
		n.holders.Store(&podresources.Holders{At: time.Now(), By: map[health.DeviceID][]podresources.Holder{
			"GPU-a": {held("chat", share)}, "GPU-b": {held("train", whole)},
		}})
		n.claims = map[podresources.ClaimRef]uint64{share: 30 * gib}
		n.start()
		n.expect("GPU-a chat 0/30Gi none reason")
		dir := n.run("chat", 1)
		n.run("train", 2)
		n.wait(refresh)
		n.expect("GPU-a chat 0/30Gi driver used 3")
		n.expectSets("GPU-a " + group(1) + " 0 30")
		n.driver.change(func() {
			n.driver.limits[target{"GPU-a", dir}] = driver.MemoryLimits{Hard: 40 * gib}
			n.driver.ignoreSet = true
		})
		n.wait(refresh)
		n.expect("GPU-a chat 0/30Gi none used 0 reason")
		n.stop()
	})
}

// A directory of pods that hangs leaves the limits of the containers that were found before.
func TestFollowerWhileDirectoryHangs(t *testing.T) {
	n := newNode(t)
	pods := n.configs.Load().PodLogs
	n.hold("GPU-a", "one", 10)
	n.run("one", 1)
	n.launch()
	n.await(func(s *Snapshot) bool {
		return len(s.Containers) == 1 && s.Containers[0].Enforcement == Driver && s.Err == ""
	})
	if err := errors.Join(os.Rename(pods, pods+".away"), syscall.Mkfifo(pods, 0o600)); err != nil { // nobody writes to it
		t.Fatal(err)
	}
	n.run("two", 2)
	n.hold("GPU-a", "two", 1)
	n.await(func(s *Snapshot) bool {
		const key = "metrics.processes.podLogs"
		return len(s.Containers) == 2 && s.Containers[0].Enforcement == Driver && s.Containers[0].Used == 3*gib &&
			s.Containers[1].Enforcement == None && strings.Contains(s.Containers[1].Reason, key) && strings.Contains(s.Err, key)
	})
	n.stop() // although the directory still hangs
	f, err := os.OpenFile(pods, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
}
