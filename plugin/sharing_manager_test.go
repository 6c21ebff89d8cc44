package plugin

import (
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// A resource is registered when the first of its daemons is ready. It continues while none is.
func TestMPSResourceIsRegisteredWhenReady(t *testing.T) {
	t.Parallel()
	h := newHarness(t, withReserved(2))
	h.setConfig(mpsShared(MPSResource{Name: gpu, Replicas: 4, Devices: []string{"0", "1"}, Rename: "nvidia.com/gpu.shared"}))
	k := h.kubelet()
	h.run()
	set := func(daemons ...*health.MPSDaemon) { h.snaps.Store(withMPS(h.snaps.Load(), daemons...)) }
	waitingFor := func(text string) func(Status) bool {
		return func(s Status) bool { return len(s.Resources) == 0 && strings.Contains(s.Err, text) }
	}
	h.waitPlugin(waitingFor("GPU 0 (GPU-0)"))
	set(&health.MPSDaemon{Reason: "limits are not set"}, &health.MPSDaemon{})
	h.waitPlugin(waitingFor("limits are not set"))
	if w := h.warnings(); len(w) != 0 {
		t.Errorf("while the daemons start: %v", w)
	}
	set(&health.MPSDaemon{Cause: health.CauseMPSDown, Reason: "exit status 1"}, &health.MPSDaemon{})
	h.waitPlugin(waitingFor("exit status 1"))
	h.waitLog(msgNothing, "exit status 1", 1)
	set(&health.MPSDaemon{}, readyDaemon())
	h.waitResource(k, "nvidia.com/gpu.shared", listed(8, 4))
	running := func(s Status) bool { return s.Err == "" && len(s.Resources) == 1 && s.Resources[0].Registered }
	h.waitPlugin(running)
	set(readyDaemon(), readyDaemon())
	h.waitResource(k, "nvidia.com/gpu.shared", listed(8, 8))
	set(&health.MPSDaemon{Cause: health.CauseMPSHung, Reason: "no answer"}, nil)
	h.waitResource(k, "nvidia.com/gpu.shared", listed(8, 0))
	h.waitLog(msgUnhealthy, "no answer", 1)
	h.waitPlugin(running)
}

// Memory is offered when what limits it is examined.
func TestMemoryResourceWaitsForCapabilities(t *testing.T) {
	t.Parallel()
	h := newHarness(t, withReserved(1))
	var caps health.Latest[memlimits.Capabilities]
	h.p.SetMemoryCapabilities(&caps)
	h.setConfig(func(c *Config) {
		memoryShared("1Gi")(c)
		c.Sharing.Memory.Reserve, c.Sharing.Memory.Enforcement, c.Sharing.Memory.RequireEnforcement = "512Mi", EnforceAuto, true
	})
	k := h.kubelet()
	h.run()
	set := func(reason string) {
		caps.Store(&memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": reason}})
	}
	unregistered := func(text string) func(Status) bool {
		return func(s Status) bool { return len(s.Resources) == 0 && strings.Contains(s.Err, text) }
	}
	h.waitPlugin(unregistered(memoryResource))
	if w := h.warnings(); len(w) != 0 {
		t.Errorf("before the node is examined: %v", w)
	}
	set("driver 570 is too old")
	h.waitPlugin(unregistered("driver 570 is too old"))
	set("")
	h.waitResource(k, memoryResource, listed(78, 78))
	set("cgroup v1")
	h.waitResource(k, memoryResource, listed(78, 0))
	set("")
	h.waitResource(k, memoryResource, listed(78, 78))
}

// What MPS must run is stored when it changes, and not before the devices are known.
func TestMPSDesired(t *testing.T) {
	var cfg health.Latest[Config]
	var snaps health.Latest[health.Snapshot]
	p := New(&cfg, &snaps, zap.NewNop())
	step := func() *mps.Desired {
		p.storeMPS(p.layouts.current())
		return p.MPS().Load()
	}
	set := func(changes ...func(*Config)) {
		c := configured(changes...)
		cfg.Store(&c)
	}
	if d := step(); d != nil {
		t.Errorf("no configuration: %+v", d)
	}
	set(mpsSharedBy(2))
	if d := step(); d != nil {
		t.Errorf("no devices: %+v", d)
	}
	snaps.Store(withReserved(2))
	if d := step(); d != nil {
		t.Errorf("holders not known yet: %+v", d)
	}
	unasked := p.layouts.current()
	asked := time.Now()
	p.pods.Holders.Store(&podresources.Holders{At: asked, By: holdersOf(withReserved(2), configured(), gpu+" GPU-0::1")})
	p.storeMPS(unasked)
	if d := p.MPS().Load(); d != nil {
		t.Errorf("a layout from before the kubelet answered: %+v", d)
	}
	held := step()
	if d := held; d == nil || len(d.Daemons) != 1 || d.Daemons[0].Device != "GPU-1" {
		t.Errorf("a device that a time-sliced container holds: %+v", d)
	}
	p.pods.Holders.Store(&podresources.Holders{At: asked, Err: "connection refused"})
	if d := step(); d != held {
		t.Errorf("the kubelet no longer answers: %+v", d)
	}
	p.pods.Holders.Store(&podresources.Holders{Err: "no such file"})
	first := step()
	if first == nil || first.Root != "/run/nvidia/mps" || first.Control != "nvidia-cuda-mps-control" || len(first.Daemons) != 2 {
		t.Fatalf("%+v", first)
	}
	snaps.Store(withMPS(withReserved(2), readyDaemon(), readyDaemon()))
	if step() != first {
		t.Error("stored again without a change")
	}
	set(mpsSharedBy(4))
	if d := step(); d == first || d.Daemons[0].ThreadPercentage != 25 {
		t.Errorf("other limits: %+v", d)
	}
	set(mpsSharedBy(4), func(c *Config) { c.Sharing.MPS.Root, c.Sharing.MPS.Control = "/mps", "/bin/control" })
	if d := step(); d.Root != "/mps" || d.Control != "/bin/control" {
		t.Errorf("other paths: %+v", d)
	}
	set(mpsSharedBy(4), func(c *Config) { c.Enabled = false })
	if d := step(); len(d.Daemons) != 0 {
		t.Errorf("disabled: %+v", d)
	}
	set(both(mpsShared(MPSResource{Name: migResource, Replicas: 2}), func(c *Config) { c.MIGStrategy = MIGMixed }))
	snaps.Store(partitioned("1g.10gb", whole))
	want := []mps.Spec{{Device: "MIG-0-0", Kind: health.KindMIG, GPU: "GPU-0", ThreadPercentage: 50, PinnedMemory: 4992 << 20}}
	if d := step(); !slices.Equal(d.Daemons, want) {
		t.Errorf("MIG device: %+v", d)
	}
	set()
	if d := step(); d == nil || len(d.Daemons) != 0 {
		t.Errorf("no MPS: %+v", d)
	}
}

// A layout follows what the node can enforce, without another change.
func TestLayoutFollowsCapabilities(t *testing.T) {
	var cfg health.Latest[Config]
	var snaps health.Latest[health.Snapshot]
	var caps health.Latest[memlimits.Capabilities]
	p := New(&cfg, &snaps, zap.NewNop())
	p.SetMemoryCapabilities(&caps)
	c := configured(memoryShared("1Gi"), func(c *Config) { c.Sharing.Memory.Enforcement = EnforceAuto })
	cfg.Store(&c)
	snaps.Store(withReserved(1))
	changed := p.layouts.wake(t.Context())
	for _, want := range []memlimits.Enforcement{memlimits.None, memlimits.Driver} {
		if s := p.Shares(); len(s) != 1 || s[0].Enforcement != want {
			t.Errorf("%+v, want %s", s, want)
		}
		caps.Store(&memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": ""}})
	}
	<-changed
}
