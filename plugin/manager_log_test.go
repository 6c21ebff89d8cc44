package plugin

import (
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// A change is one line, whatever the number of GPUs, MIG devices and replicas.
func TestManagerLogsOneLine(t *testing.T) {
	t.Parallel()
	h := newHarness(t, partitioned(slices.Repeat([]string{"3g.40gb 1g.10gb 1g.10gb 1g.10gb"}, 8)...))
	h.kubelet()
	share := func(replicas int) {
		h.setConfig(func(c *Config) {
			c.MIGStrategy = MIGMixed
			c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: migResource, Replicas: replicas}, {Name: "nvidia.com/mig-3g.40gb", Replicas: replicas}}
		})
	}
	share(10)
	h.run()
	h.waitPlugin(func(s Status) bool {
		return len(s.Resources) == 2 && s.Resources[0].Registered && s.Resources[1].Registered
	})
	if w := h.warnings(); len(w) != 0 {
		t.Errorf("at the start: %v", w)
	}
	set := func(state health.State, gpus ...int) {
		next := *h.snaps.Load()
		next.Devices = slices.Clone(next.Devices)
		for i := range next.Devices {
			if d := &next.Devices[i]; slices.Contains(gpus, d.Device.Index) {
				d.Verdict = health.Verdict{State: state}
				if state == health.Unhealthy {
					d.Verdict.Findings = []health.Finding{{Cause: "lost", State: state, Reason: "the driver has lost the GPU"}}
				}
			}
		}
		h.snaps.Store(&next)
	}
	set(health.Unhealthy, 3)
	h.waitLog(msgUnhealthy, "GPU-3", 1)
	set(health.Healthy, 3)
	h.waitLog(msgHealthy, "GPU-3", 1)
	all := []int{0, 1, 2, 3, 4, 5, 6, 7}
	set(health.Unhealthy, all...) // a detached driver
	h.waitLog(msgUnhealthy, "gpus:[0 1 2 3 4 5 6 7] ids:320", 1)
	set(health.Healthy, all...)
	h.waitLog(msgHealthy, "ids:320", 1)
	share(4) // a reload
	h.waitLog(msgRemoved, "ids:192", 1)
	if n := len(h.warnings()); n != 3 {
		t.Errorf("%d warnings", n)
	}
}

// BenchmarkLogHealthChanges compares two layouts of 16,000 replicas, as for every poll.
func BenchmarkLogHealthChanges(b *testing.B) {
	cfg, snap := configured(sharedBy(1000)), snapshot(16)
	before, after := Layout(cfg, snap), Layout(cfg, with(snap, 1, health.Degraded))
	p := &Plugin{log: zap.NewNop()}
	for b.Loop() {
		p.logHealthChanges(before, after)
	}
}
