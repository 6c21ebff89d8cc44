package plugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const gpu = "nvidia.com/gpu"

func id(i int) string { return fmt.Sprintf("GPU-%d", i) }

// snapshot returns n healthy GPUs like those of an H100 machine: all connected over NVLink, half of them
// near each NUMA node.
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

// with returns a later snapshot in which GPU i is in that state.
func with(s *health.Snapshot, i int, state health.State) *health.Snapshot {
	next := *s
	next.Seq, next.At = s.Seq+1, s.At.Add(time.Second)
	next.Devices = append([]health.DeviceState(nil), s.Devices...)
	next.Devices[i].Verdict = health.Verdict{State: state}
	if state > health.Healthy {
		next.Devices[i].Verdict.Findings = []health.Finding{{Cause: "xid-79", State: state, Reason: "the GPU has fallen off the bus"}}
	}
	return &next
}

// serverOf returns a server that knows no holders.
func serverOf(name string, cfg *health.Latest[Config], snaps *health.Latest[health.Snapshot]) *server {
	return newServer(name, newLayouts(cfg, snaps, &health.Latest[Holders]{}))
}

// quick makes every wait short enough for a test, and the settle time long enough to be seen.
func quick() timing {
	return timing{
		poll: 5 * time.Millisecond, settle: 60 * time.Millisecond, answer: 5 * time.Second,
		stream: 500 * time.Millisecond, retryMin: 20 * time.Millisecond, retryMax: 80 * time.Millisecond,
		goodbye: 500 * time.Millisecond,
		refresh: 50 * time.Millisecond, hurry: 10 * time.Millisecond, call: 5 * time.Second, stale: 300 * time.Millisecond, doubt: 50 * time.Millisecond, audits: 200 * time.Millisecond,
	}
}

// rig is a plugin in a kubelet directory of its own.
type rig struct {
	*testing.T
	root  string // the kubelet's directory
	cfg   health.Latest[Config]
	snaps health.Latest[health.Snapshot]
	p     *Plugin
	logs  *observer.ObservedLogs
	stop  func()          // ends the plugin and waits for it
	ctx   context.Context //nolint:containedctx // the test's own, with its deadline
}

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

// newRig makes a plugin for a snapshot, which may be nil, and does not run it yet.
func newRig(t *testing.T, snap *health.Snapshot) *rig {
	t.Helper()
	r := &rig{T: t, root: shortDir(t)}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	r.ctx = ctx
	if err := os.Mkdir(filepath.Join(r.root, "device-plugins"), 0o750); err != nil {
		t.Fatal(err)
	}
	r.cfg.Store(&Config{Enabled: true, Resource: gpu, KubeletDir: r.root})
	if snap != nil {
		r.snaps.Store(snap)
	}
	core, logs := observer.New(zapcore.DebugLevel)
	r.logs = logs
	r.p = newPlugin(&r.cfg, &r.snaps, quick(), zap.New(core))
	return r
}

func (r *rig) run() *rig {
	ctx, cancel := context.WithCancel(r.ctx)
	done := make(chan error, 1)
	go func() { done <- r.p.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				r.Errorf("Run: %v", err)
			}
		case <-time.After(20 * time.Second): // as long as all else is waited for
			r.Error("the plugin does not end")
		}
	})
	r.Cleanup(r.stop)
	return r
}

func (r *rig) kubelet() *kubelettest.Kubelet {
	r.Helper()
	k, err := kubelettest.Start(r.root)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(k.Stop)
	return k
}

// wait waits for the kubelet to know a resource as asked for.
func (r *rig) wait(k *kubelettest.Kubelet, resource string, ok func(kubelettest.Resource) bool) kubelettest.Resource {
	r.Helper()
	s, err := k.WaitFor(r.ctx, func(s kubelettest.State) bool { return ok(s.Resources[resource]) })
	if err != nil {
		r.Fatalf("%v\nplugin: %+v\nlog: %v", err, r.p.Status(), r.lines())
	}
	return s.Resources[resource]
}

// listed is a kubelet that has n devices, m of them healthy.
func listed(n, m int) func(kubelettest.Resource) bool {
	return func(r kubelettest.Resource) bool { return r.Connected && r.Capacity() == n && r.Allocatable() == m }
}

// status waits for the plugin to say of its only resource what is asked for.
func (r *rig) status(ok func(ResourceStatus) bool) ResourceStatus {
	r.Helper()
	s := r.whole(func(s Status) bool { return len(s.Resources) == 1 && ok(s.Resources[0]) })
	return s.Resources[0]
}

func (r *rig) whole(ok func(Status) bool) Status {
	r.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		s := r.p.Status()
		if ok(s) {
			return s
		}
		select {
		case <-r.ctx.Done():
			r.Fatalf("the status is still %+v\nlog: %v", s, r.lines())
		case <-tick.C:
		}
	}
}

func isRegistered(s ResourceStatus) bool { return s.Registered }

func (r *rig) socket() string { return r.cfg.Load().socketPath(r.cfg.Load().Resource) }

func (r *rig) lines() (lines []string) {
	for _, e := range r.logs.All() {
		lines = append(lines, fmt.Sprintf("\n%s %s %v", e.Level, e.Message, e.ContextMap()))
	}
	return lines
}
