package plugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestMain(m *testing.M) { healthtest.Main(m) }

const gpu = "nvidia.com/gpu"

func id(i int) string { return fmt.Sprintf("GPU-%d", i) }

// snapshot returns n healthy GPUs as in an H100 machine: all connected over NVLink, half of them near each NUMA
// node.
func snapshot(n int) *health.Snapshot {
	s := &health.Snapshot{Seq: 1, At: time.Unix(1, 0), Source: health.Source{Status: health.SourceUp}}
	for i := range n {
		d := health.Device{ID: health.DeviceID(id(i)), Index: i, Minor: i, NUMA: []int{i * 2 / n}, GI: -1, CI: -1, MIGIndex: -1}
		for j := range n {
			if i != j {
				d.Links = append(d.Links, health.Link{Peer: health.DeviceID(id(j)), NVLinks: 18, Path: health.PathSystem})
			}
		}
		s.Devices = append(s.Devices, health.DeviceState{Device: d, Verdict: health.Verdict{State: health.Healthy}})
	}
	return s
}

// with returns a later snapshot with GPU i in another state.
func with(s *health.Snapshot, i int, state health.State) *health.Snapshot {
	next := *s
	next.Seq, next.At = s.Seq+1, s.At.Add(time.Second)
	next.Devices = slices.Clone(s.Devices)
	next.Devices[i].Verdict = health.Verdict{State: state}
	if state > health.Healthy {
		next.Devices[i].Verdict.Findings = []health.Finding{{Cause: "xid-79", State: state, Reason: "the GPU has fallen off the bus"}}
	}
	return &next
}

// configured returns the default configuration with changes.
func configured(changes ...func(*Config)) Config {
	c := DefaultConfig()
	for _, change := range changes {
		change(&c)
	}
	return c
}

// sharedBy shares every GPU by n replicas.
func sharedBy(n int) func(*Config) {
	return func(c *Config) { c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: n}} }
}

// all returns the IDs of a resource.
func all(r Resource) (ids []string) {
	for _, u := range unitsOf(r) {
		ids = append(ids, u.text())
	}
	return ids
}

// unitsOf returns the units of a resource.
func unitsOf(r Resource) (units []unit) {
	for _, d := range r.Devices {
		for n := range d.units() {
			units = append(units, unit{d, n})
		}
	}
	return units
}

// id returns the ID of a unit.
func (d *Device) id(unit int) string { return d.form().ID(d.State.Device.ID, unit).String() }

func (u unit) text() string { return u.id(u.number) }

func (u unit) isHealthy() bool { return u.healthy(u.number) }

// newServerOf returns a server without holders.
func newServerOf(name string, cfg *Config, snap *health.Snapshot) *server {
	l := newLayoutCache(&health.Latest[Config]{}, &health.Latest[health.Snapshot]{}, &health.Latest[podresources.Holders]{})
	if cfg != nil {
		l.cfg.Store(cfg)
	}
	l.snapshots.Store(snap)
	return newServer(name, l, zap.NewNop())
}

func newTestServer(snap *health.Snapshot) *server {
	cfg := DefaultConfig()
	return newServerOf(gpu, &cfg, snap)
}

// shortTiming makes every delay short enough for a test, and the settle time long enough to be observed. The timeouts are too long for a
// machine that is only busy: a test of one sets it to shortTimeout.
func shortTiming() timing {
	return timing{
		poll: 5 * time.Millisecond, settle: 40 * time.Millisecond, registerTimeout: 5 * time.Second, streamTimeout: 3 * time.Second,
		endTimeout: 3 * time.Second,
		retryMin:   20 * time.Millisecond, retryMax: 80 * time.Millisecond, withdrawTimeout: 3 * time.Second, handshake: 3 * time.Second,
		pods: podresources.Timing{
			Poll: 5 * time.Millisecond, Refresh: 40 * time.Millisecond, QuickRefresh: 10 * time.Millisecond,
			Settle: 50 * time.Millisecond, Call: 5 * time.Second, MaxAge: 400 * time.Millisecond,
			LogAfter: 200 * time.Millisecond, // enough to notice that a kubelet stopped, which is logged instead; less than MaxAge
		},
		auditRetryMin: 50 * time.Millisecond, auditRetryMax: 200 * time.Millisecond,
	}
}

const shortTimeout = 300 * time.Millisecond

// harness is a plugin with a kubelet directory of its own.
type harness struct {
	*testing.T
	root    string              // the kubelet's directory
	version kubelettest.Version // of the kubelets that it starts
	cfg     health.Latest[Config]
	snaps   health.Latest[health.Snapshot]
	p       *Plugin
	logs    *observer.ObservedLogs
	stop    func()          // ends the plugin and waits for it
	ctx     context.Context //nolint:containedctx // the test's own, with its deadline
}

// shortDir returns a directory whose path is short enough for a socket.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// onEachKubelet runs a test with each version of the kubelet.
func onEachKubelet(t *testing.T, test func(t *testing.T, v kubelettest.Version)) {
	for _, v := range kubelettest.Versions() {
		t.Run(string(v), func(t *testing.T) {
			t.Parallel()
			test(t, v)
		})
	}
}

// newHarness returns a plugin that does not run yet. The snapshot may be nil.
func newHarness(t *testing.T, snap *health.Snapshot) *harness {
	t.Helper()
	root := shortDir(t)
	if err := os.Mkdir(filepath.Join(root, "device-plugins"), 0o750); err != nil {
		t.Fatal(err)
	}
	return newHarnessIn(t, root, snap)
}

// newHarnessIn is newHarness with a kubelet directory that exists.
func newHarnessIn(t *testing.T, root string, snap *health.Snapshot) *harness {
	t.Helper()
	h := &harness{T: t, root: root, version: kubelettest.V137}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	h.ctx = ctx
	h.cfg.Store(&Config{Enabled: true, Resource: gpu, KubeletDir: h.root})
	if snap != nil {
		h.snaps.Store(snap)
	}
	core, logs := observer.New(zapcore.DebugLevel)
	h.logs = logs
	h.p = newPlugin(&h.cfg, &h.snaps, shortTiming(), zap.New(core))
	return h
}

// startHarness returns a plugin that has registered these devices with a kubelet of the newest version.
func startHarness(t *testing.T, snap *health.Snapshot, changes ...func(*Config)) (*harness, *kubelettest.Kubelet) {
	t.Helper()
	return startHarnessOn(t, kubelettest.V137, snap, changes...)
}

// startHarnessOn is startHarness with a version of the kubelet.
func startHarnessOn(t *testing.T, v kubelettest.Version, snap *health.Snapshot, changes ...func(*Config)) (*harness, *kubelettest.Kubelet) {
	t.Helper()
	h := newHarness(t, snap)
	h.version = v
	return h, h.register(changes...)
}

// register starts a kubelet and the plugin, and waits until the devices are registered.
func (h *harness) register(changes ...func(*Config)) *kubelettest.Kubelet {
	h.Helper()
	for _, change := range changes {
		h.setConfig(change)
	}
	k := h.kubelet()
	h.run()
	h.waitStatus(isRegistered)
	s := h.p.Status().Resources[0]
	h.waitResource(k, gpu, listed(s.Devices, s.Healthy))
	return k
}

func (h *harness) run() {
	ctx, cancel := context.WithCancel(h.ctx)
	done := make(chan error, 1)
	go func() { done <- h.p.Run(ctx) }()
	h.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				h.Errorf("Run: %v", err)
			}
		case <-time.After(time.Minute): // the deadline of every other wait
			h.Error("the plugin does not end")
		}
	})
	h.Cleanup(h.stop)
}

func (h *harness) kubelet() *kubelettest.Kubelet {
	h.Helper()
	k, err := kubelettest.StartVersion(h.root, h.version)
	if err != nil {
		h.Fatal(err)
	}
	h.Cleanup(k.Stop)
	return k
}

func (h *harness) restart(k *kubelettest.Kubelet) {
	h.Helper()
	if err := k.Restart(); err != nil {
		h.Fatal(err)
	}
}

// allocate lets a new pod hold a device of nvidia.com/gpu.
func (h *harness) allocate(k *kubelettest.Kubelet, id string) {
	h.Helper()
	if _, err := k.AllocateIDs(h.ctx, gpu, id); err != nil {
		h.Fatal(err)
	}
}

// setConfig stores a changed copy of the configuration.
func (h *harness) setConfig(change func(*Config)) {
	cfg := *h.cfg.Load()
	change(&cfg)
	h.cfg.Store(&cfg)
}

// setHealth stores a snapshot with GPU i in another state.
func (h *harness) setHealth(i int, state health.State) { h.snaps.Store(with(h.snaps.Load(), i, state)) }

func (h *harness) pluginDir() string { return filepath.Join(h.root, "device-plugins") }

// sockets returns the paths of the plugin's sockets.
func (h *harness) sockets() []string {
	h.Helper()
	paths, err := filepath.Glob(filepath.Join(h.pluginDir(), SocketPattern))
	if err != nil {
		h.Fatal(err)
	}
	return paths
}

// socket waits for the plugin's only socket, and returns its path.
func (h *harness) socket() string {
	h.Helper()
	return poll(h, "sockets", h.sockets, func(paths []string) bool { return len(paths) == 1 })[0]
}

// remove removes a file or a directory. It renames it first: the plugin may create a socket while a directory is removed.
func (h *harness) remove(path string) {
	h.Helper()
	removed := path + ".removed"
	if err := os.Rename(path, removed); err != nil {
		h.Fatal(err)
	}
	if err := os.RemoveAll(removed); err != nil {
		h.Fatal(err)
	}
}

// waitResource waits until the kubelet's resource satisfies ok.
func (h *harness) waitResource(k *kubelettest.Kubelet, resource string, ok func(kubelettest.Resource) bool) kubelettest.Resource {
	h.Helper()
	s, err := k.WaitFor(h.ctx, func(s kubelettest.State) bool { return ok(s.Resources[resource]) })
	if err != nil {
		h.Fatalf("%v\nplugin: %+v\nlog: %v", err, h.p.Status(), h.logLines())
	}
	return s.Resources[resource]
}

// listed accepts a resource with n devices, healthy of them healthy.
func listed(n, healthy int) func(kubelettest.Resource) bool {
	return func(r kubelettest.Resource) bool {
		return r.Connected && r.Capacity() == n && r.Allocatable() == healthy
	}
}

func disconnected(r kubelettest.Resource) bool { return r.Name != "" && !r.Connected }

// waitStatus waits until the plugin's only resource satisfies ok.
func (h *harness) waitStatus(ok func(ResourceStatus) bool) ResourceStatus {
	h.Helper()
	s := h.waitPlugin(func(s Status) bool { return len(s.Resources) == 1 && ok(s.Resources[0]) })
	return s.Resources[0]
}

func isRegistered(s ResourceStatus) bool { return s.Registered }

// unregisteredFor accepts an unregistered resource whose error contains data, such as a key or a path.
func unregisteredFor(data string) func(ResourceStatus) bool {
	return func(s ResourceStatus) bool { return !s.Registered && strings.Contains(s.Err, data) }
}

// waitPlugin waits until the plugin's status satisfies ok.
func (h *harness) waitPlugin(ok func(Status) bool) Status {
	h.Helper()
	return poll(h, "status", h.p.Status, ok)
}

// waitHolders waits until the holders satisfy ok.
func (h *harness) waitHolders(ok func(podresources.Holders) bool) podresources.Holders {
	h.Helper()
	return poll(h, "holders", h.p.Holders, ok)
}

func poll[T any](h *harness, what string, get func() T, ok func(T) bool) T {
	h.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		v := get()
		if ok(v) {
			return v
		}
		select {
		case <-h.ctx.Done():
			h.Fatalf("%s: still %+v\nlog: %v", what, v, h.logLines())
		case <-tick.C:
		}
	}
}

func holdersKnown(h podresources.Holders) bool { return h.Err == "" }

// heldBy accepts holders in which these pods hold the device.
func heldBy(device string, pods ...string) func(podresources.Holders) bool {
	return func(h podresources.Holders) bool {
		var names []string
		for _, holder := range h.By[health.DeviceID(device)] {
			names = append(names, holder.Pod)
		}
		return slices.Equal(names, pods)
	}
}

// waitLog waits until a message is logged n times, with data in its fields.
func (h *harness) waitLog(message, data string, n int) {
	h.Helper()
	poll(h, message, func() int {
		return h.logs.FilterMessage(message).Filter(func(e observer.LoggedEntry) bool {
			return strings.Contains(fmt.Sprint(e.ContextMap()), data)
		}).Len()
	}, func(count int) bool { return count == n })
}

// warnings returns the logged warnings.
func (h *harness) warnings() []observer.LoggedEntry {
	return h.logs.FilterLevelExact(zapcore.WarnLevel).All()
}

func (h *harness) logLines() (lines []string) {
	for _, e := range h.logs.All() {
		lines = append(lines, fmt.Sprintf("\n%s %s %v", e.Level, e.Message, e.ContextMap()))
	}
	return lines
}
