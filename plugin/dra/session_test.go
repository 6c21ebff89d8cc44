package dra

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// sessionRig runs a session without sockets, under synctest.
type sessionRig struct {
	*publishRig
	session   *session
	config    health.Latest[plugin.Config]
	snapshots health.Latest[health.Snapshot]
	write     func() error // replaces the write of the checkpoint, until it returns nil
	holders   health.Latest[podresources.Holders]
	runtime   health.Latest[cdi.Runtime]
	noPlugin  bool
}

func newSessionRig(t *testing.T) *sessionRig {
	g := prepareSession(t, apiservertest.New(t, publishNode))
	g.begin()
	return g
}

// prepareSession returns a session of a new process that does not run yet.
func prepareSession(t *testing.T, api *apiservertest.Server) *sessionRig {
	return prepareSessionIn(t, api, t.TempDir())
}

// prepareSessionIn is prepareSession for a kubelet's directory that may have a checkpoint.
func prepareSessionIn(t *testing.T, api *apiservertest.Server, kubeletDir string) *sessionRig {
	g := &sessionRig{publishRig: newPublishRig(t, api)}
	g.runtime.Store(&cdi.Runtime{Version: "containerd://2.1.4"})
	g.hold(podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}})
	cfg := plugin.DefaultConfig()
	cfg.API, cfg.KubeletDir, cfg.CDI.Dir = plugin.APIDRA, kubeletDir, filepath.Join(kubeletDir, "cdi")
	if err := os.MkdirAll(filepath.Join(cfg.KubeletDir, "plugins_registry"), 0o700); err != nil {
		t.Fatal(err)
	}
	g.config.Store(&cfg)
	d := New(Options{
		Config: &g.config, Runtime: &g.runtime, Snapshots: &g.snapshots, Node: publishNode, Connect: g.api.Client,
		PluginReleased: &health.Latest[plugin.Handover]{}, Holders: &g.holders, Ask: g.ask,
		NoPlugin: func() bool { return g.noPlugin }, Simulated: func() bool { return true },
		Properties: noProperties(), Log: zap.NewNop(),
	})
	write := d.preparer.disk.writeFile
	d.preparer.disk.writeFile = func(path string, text []byte) (durable.Written, error) {
		if g.write != nil {
			if err := g.write(); err != nil {
				return durable.Written{}, err
			}
		}
		return write(path, text)
	}
	i := configuredInstance(&cfg)
	if err := d.preparer.open(i.dataDir()); err != nil {
		t.Fatal(err)
	}
	s := &session{Driver: d, instance: i, sockets: newSockets(d, i, zap.NewNop()), publisher: g.publisher}
	g.session = s
	s.sockets.other.Store(new(""))
	return g
}

// begin runs the session until end.
func (g *sessionRig) begin() {
	ctx, cancel := context.WithCancel(g.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.session.run(ctx)
		g.session.stopPublishing()
	}()
	g.end = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	g.t.Cleanup(g.end)
}

// ask is the kubelet's answer.
func (g *sessionRig) ask(context.Context, time.Duration) podresources.Holders {
	h := *g.holders.Load()
	h.At = time.Now()
	g.holders.Store(&h)
	return h
}

// hold stores the answer of the kubelet.
func (g *sessionRig) hold(h podresources.Holders) { g.holders.Store(&h) }

// poll publishes a snapshot in which the devices are as test changes them.
func (g *sessionRig) poll(change func([]health.DeviceState) []health.DeviceState) {
	g.snapshots.Store(&health.Snapshot{
		At: time.Now(), Source: health.Source{Kind: "sim", Status: health.SourceUp}, Devices: change(healthtest.NodeDevices()[:3]), // without MIG
	})
	g.advance(5 * time.Second)
}

func breakGPU0(devices []health.DeviceState) []health.DeviceState {
	devices[0].Verdict = health.Verdict{State: health.Unhealthy, Findings: []health.Finding{{
		Cause: "xid-79", Since: time.Unix(1000, 0), State: health.Unhealthy,
	}}}
	return devices
}

// A disk that is full or that blocks keeps a new device from being published: its name could change. The taints of the others do not wait.
func TestSessionPublishesTaintsWithoutDisk(t *testing.T) {
	for name, disk := range map[string]func(end <-chan struct{}) error{
		"full":   func(<-chan struct{}) error { return errors.New("no space left on device") },
		"blocks": func(end <-chan struct{}) error { <-end; return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newSessionRig(t)
				g.poll(func(d []health.DeviceState) []health.DeviceState { return d[:2] })
				g.wantDevices("gpu-0", "gpu-1")
				end := make(chan struct{})
				g.write = func() error { return disk(end) }
				g.poll(func(d []health.DeviceState) []health.DeviceState { return breakGPU0(d) })
				g.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1")
				var s Status
				g.session.report(&s)
				if !strings.Contains(s.Err, "checkpoint") {
					t.Errorf("error %q, want one that names the checkpoint", s.Err)
				}
				g.poll(func(d []health.DeviceState) []health.DeviceState { return d[:2] }) // as before the write failed
				g.wantDevices("gpu-0", "gpu-1")
				g.poll(func(d []health.DeviceState) []health.DeviceState { return breakGPU0(d) })
				g.poll(func(d []health.DeviceState) []health.DeviceState { return d })
				g.wantDevices("gpu-0", "gpu-1")
				g.write = nil
				close(end)
				g.poll(breakGPU0)
				g.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1", "gpu-2")
				if g.session.report(&s); strings.Contains(s.Err, "checkpoint") {
					t.Errorf("error %q after the disk's recovery", s.Err)
				}
			})
		})
	}
}

// A device that a container holds by a device plugin is tainted, and a warning says why, until the container has ended.
func TestSessionWithholdsDevicesOfPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newSessionRig(t)
		g.hold(podresources.Holders{By: map[health.DeviceID][]podresources.Holder{"GPU-1": {pluginHolder("GPU-1::0")}}})
		same := func(d []health.DeviceState) []health.DeviceState { return d }
		g.poll(same)
		g.wantDevices("gpu-0", "gpu-1!gpu-node-agent/withheld", "gpu-2")
		var s Status
		if g.session.report(&s); !strings.Contains(s.Warning, "ml/train (main) holds it as GPU-1::0 of nvidia.com/gpu") {
			t.Errorf("warning %q, error %q", s.Warning, s.Err)
		}
		g.hold(podresources.Holders{By: map[health.DeviceID][]podresources.Holder{"GPU-1": {claimHolder(claim("a"), "gpu-1")}}})
		g.advance(5 * time.Second)
		g.wantDevices("gpu-0", "gpu-1", "gpu-2")
		if g.session.report(&s); s.Warning != "" {
			t.Errorf("warning %q", s.Warning)
		}
	})
}

// Until the kubelet has said which containers hold devices, a session adds no device and clears no taint, but it adds taints. What was
// answered before its start does not count.
func TestSessionBeforeHoldersAreKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := apiservertest.New(t, publishNode)
		first := prepareSession(t, api)
		first.begin()
		first.poll(func(d []health.DeviceState) []health.DeviceState { return breakGPU0(d)[:2] })
		first.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1")
		first.end()

		g := prepareSession(t, api)
		g.hold(podresources.Holders{At: time.Now(), Settling: true, By: map[health.DeviceID][]podresources.Holder{}})
		g.writes()
		g.begin()
		g.poll(func(d []health.DeviceState) []health.DeviceState { return d }) // with gpu-2, and GPU 0 is healthy
		g.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1")
		g.wantWrites("update resourceslices 200") // the attribute state
		var s Status
		if g.session.report(&s); !strings.Contains(s.Err, "may not have read all its pods") {
			t.Errorf("error %q", s.Err)
		}
		g.poll(func(d []health.DeviceState) []health.DeviceState {
			d[1].Verdict = breakGPU0(healthtest.NodeDevices())[0].Verdict
			return d
		})
		g.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1!gpu-node-agent/xid=79")
		g.hold(podresources.Holders{By: map[health.DeviceID][]podresources.Holder{"GPU-2": {pluginHolder("GPU-2")}}})
		g.poll(func(d []health.DeviceState) []health.DeviceState { return d })
		g.wantDevices("gpu-0", "gpu-1", "gpu-2!gpu-node-agent/withheld")
		if g.session.report(&s); strings.Contains(s.Err, "unknown") {
			t.Errorf("error %q", s.Err)
		}

		g.hold(podresources.Holders{At: time.Now().Add(-10 * time.Minute), Err: "denied"}) // for so long that the answer is forgotten
		g.advance(5 * time.Second)
		g.wantDevices("gpu-0", "gpu-1", "gpu-2!gpu-node-agent/withheld")
		if g.session.report(&s); !strings.Contains(s.Err, "new claims are refused") || !strings.Contains(s.Err, "denied") {
			t.Errorf("error %q", s.Err)
		}
		g.hold(podresources.Holders{At: time.Now(), By: map[health.DeviceID][]podresources.Holder{}})
		g.advance(5 * time.Second)
		g.wantDevices("gpu-0", "gpu-1", "gpu-2")
		if g.session.report(&s); strings.Contains(s.Err, "refused") {
			t.Errorf("error %q", s.Err)
		}
	})
}

// If neither the kubelet nor the API server answers, the status says both.
func TestSessionKnowsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := prepareSession(t, apiservertest.New(t, publishNode))
		g.hold(podresources.Holders{Err: "denied"})
		g.api.Answer(func(r apiservertest.Request) error {
			if r.Verb == "list" {
				return errors.New("overloaded")
			}
			return nil
		})
		g.begin()
		g.poll(breakGPU0)
		var s Status
		if g.session.report(&s); !strings.Contains(s.Err, "denied") || !strings.Contains(s.Err, "overloaded") {
			t.Errorf("error %q", s.Err)
		}
		g.api.Answer(nil)
		g.hold(podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}})
		g.poll(breakGPU0)
		g.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1", "gpu-2")
		if g.session.report(&s); strings.Contains(s.Err, "unknown") {
			t.Errorf("error %q", s.Err)
		}
	})
}

// A restart with settled holders changes nothing on the API server. A device plugin that has not served since the boot holds nothing, so
// then nothing waits for the kubelet.
func TestSessionRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := apiservertest.New(t, publishNode)
		first := prepareSession(t, api)
		first.hold(podresources.Holders{Err: "denied", Silent: true})
		first.noPlugin = true
		first.begin()
		first.poll(breakGPU0)
		first.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1", "gpu-2")
		first.end()
		second := prepareSession(t, api)
		second.writes()
		second.begin()
		second.poll(breakGPU0)
		second.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1", "gpu-2")
		second.wantWrites()
	})
}

// The devices are not released while the checkpoint may still say that there are slices, or before it says that there are none.
func TestSessionReleasesAfterDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := prepareSession(t, apiservertest.New(t, publishNode))
		blocked := make(chan struct{})
		var writes atomic.Int32
		var full atomic.Bool
		full.Store(true)
		g.write = func() error {
			switch writes.Add(1) {
			case 1:
				<-blocked
				return nil
			case 2: // of the same
				return nil
			}
			if full.Load() {
				return errors.New("no space left on device")
			}
			return nil
		}
		g.begin()
		g.poll(unchanged)
		cfg := *g.config.Load()
		cfg.API = plugin.APIDevicePlugin
		g.config.Store(&cfg)
		reason := func() string {
			g.advance(5 * time.Second)
			return g.session.DRAReleased().Load().Reason
		}
		if r := reason(); !strings.Contains(r, "the checkpoint is being written") {
			t.Errorf("reason %q", r)
		}
		close(blocked)
		if r := reason(); !strings.Contains(r, "cannot write the checkpoint") || !strings.Contains(r, "no space left") {
			t.Errorf("reason %q", r)
		}
		if !g.session.preparer.needed() {
			t.Error("released, but a later process would have slices")
		}
		full.Store(false)
		g.advance(5 * time.Second)
		if g.session.preparer.needed() {
			t.Errorf("not released: %+v", g.session.DRAReleased().Load())
		}
		g.wantDevices()
	})
}

// Until the kubelet has said which containers hold devices, a taint keeps the stronger of its effects before and now.
func TestSessionKeepsStrongerTaints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := apiservertest.New(t, publishNode)
		evicts := func(g *sessionRig, on ...string) {
			cfg := *g.config.Load()
			cfg.DRA.EvictOn = on
			g.config.Store(&cfg)
		}
		broken := func(d []health.DeviceState) []health.DeviceState {
			breakGPU0(d)[1].Verdict = health.Verdict{State: health.Unhealthy, Findings: []health.Finding{{Cause: "lost", State: health.Unhealthy}}}
			return d
		}
		effects := func() (all []string) {
			for _, d := range api.Slices()[0].Spec.Devices {
				for _, taint := range d.Taints {
					all = append(all, taintName(taint)+":"+string(taint.Effect))
				}
			}
			return all
		}
		want := func(want ...string) {
			t.Helper()
			if got := effects(); !slices.Equal(got, want) {
				t.Errorf("taints %q, want %q", got, want)
			}
		}
		first := prepareSession(t, api)
		evicts(first, "xid=79")
		first.begin()
		first.poll(broken)
		want("gpu-node-agent/xid=79:NoExecute", "gpu-node-agent/lost:NoSchedule")
		first.end()
		g := prepareSession(t, api)
		evicts(g, "lost")
		g.hold(podresources.Holders{At: time.Now(), Settling: true, By: map[health.DeviceID][]podresources.Holder{}})
		g.begin()
		g.poll(broken)
		want("gpu-node-agent/xid=79:NoExecute", "gpu-node-agent/lost:NoExecute")
		g.hold(podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}})
		g.advance(5 * time.Second)
		want("gpu-node-agent/xid=79:NoSchedule", "gpu-node-agent/lost:NoExecute")
	})
}
