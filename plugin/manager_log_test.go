package plugin

import (
	"fmt"
	"slices"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

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
			c.Sharing.TimeSlicing.Resources = []SharedResource{
				{Name: migResource, Replicas: replicas},
				{Name: "nvidia.com/mig-3g.40gb", Replicas: replicas},
			}
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

// A line has the reason, the resources, and one device, its GPU or all GPUs.
func TestHealthChangeLines(t *testing.T) {
	fail := func(s *health.Snapshot, reason string, devices ...int) *health.Snapshot {
		for _, i := range devices {
			s = with(s, i, health.Unhealthy)
			s.Devices[i].Verdict.Findings[0].Reason = reason
		}
		return s
	}
	healthy := snapshot(4)
	mixed := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
	parts := partitioned("1g.10gb 3g.40gb", whole)
	shared := configured(mpsSharedBy(2))
	starting, ready := withReserved(1), withMPS(withReserved(1), readyDaemon())
	faulty := withMPS(withReserved(1), &health.MPSDaemon{Cause: health.CauseMPSHung, Reason: "hangs"})
	for name, c := range map[string]struct {
		cfg           Config
		before, after *health.Snapshot
		want          []string // message and fields; empty: no line
	}{
		"nothing": {DefaultConfig(), healthy, healthy, nil},
		"start":   {DefaultConfig(), nil, healthy, nil},
		"one":     {DefaultConfig(), healthy, fail(healthy, "r", 2), []string{msgUnhealthy + " map[device:GPU-2 gpu:2 ids:1 reason:r (xid-79)]"}},
		"unhealthy at start": {
			DefaultConfig(), nil, fail(healthy, "r", 2),
			[]string{msgUnhealthy + " map[device:GPU-2 gpu:2 ids:1 reason:r (xid-79)]"},
		},
		"two reasons": {
			DefaultConfig(), healthy, fail(fail(healthy, "late", 3, 1), "early", 2, 0), []string{
				msgUnhealthy + " map[gpus:[0 2] ids:2 reason:early (xid-79)]", msgUnhealthy + " map[gpus:[1 3] ids:2 reason:late (xid-79)]",
			},
		},
		"again healthy": {DefaultConfig(), fail(healthy, "r", 1), healthy, []string{msgHealthy + " map[device:GPU-1 gpu:1 ids:1]"}},
		"removed":       {DefaultConfig(), healthy, snapshot(2), []string{msgRemoved + " map[gpus:[2 3] ids:2]"}},
		"MIG devices of a GPU": {
			mixed, parts, fail(parts, "r", 2, 3),
			[]string{msgUnhealthy + " map[device:GPU-0 gpu:0 ids:2 reason:r (xid-79)]"},
		},
		"starting":          {shared, nil, starting, nil},
		"ready":             {shared, starting, ready, []string{msgHealthy + " map[device:GPU-0 gpu:0 ids:2]"}},
		"fault at start":    {shared, starting, faulty, []string{msgUnhealthy + " map[device:GPU-0 gpu:0 ids:2 reason:hangs]"}},
		"fault":             {shared, ready, faulty, []string{msgUnhealthy + " map[device:GPU-0 gpu:0 ids:2 reason:hangs]"}},
		"fault from before": {shared, faulty, faulty, nil},
	} {
		t.Run(name, func(t *testing.T) {
			core, logs := observer.New(zap.InfoLevel)
			p := &Plugin{log: zap.New(core)}
			p.logHealthChanges(Layout(c.cfg, c.before), Layout(c.cfg, c.after))
			var got []string
			for _, e := range logs.All() {
				fields := e.ContextMap()
				if r, _ := fields["resources"].([]any); len(r) == 0 {
					t.Errorf("no resources: %v", fields)
				}
				delete(fields, "resources")
				got = append(got, e.Message+" "+fmt.Sprint(fields))
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got  %q\nwant %q", got, c.want)
			}
		})
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
