package monitor

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// newSourceOf returns a source with one GPU.
func newSourceOf(id health.DeviceID) *fakeSource {
	s := newFakeSource()
	s.reading.Devices = []health.Device{{ID: id, GI: -1, CI: -1}}
	s.reading.Samples[0].Device = id
	return s
}

func sourceID(inventory string, simulated bool) health.SourceID {
	return health.SourceID{Kind: inventory, Inventory: inventory, Simulated: simulated}
}

// A GPU that disappears during a reload of the same source is missing.
func TestMonitorMissesGPUAfterReload(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.report()
		h.source.Store(h.fakeSource.source(health.SourceID{}))
		advance(judge.OutageDelay + time.Second)
		h.wantCauses(t, "after the reload", health.SourceUp, health.CauseMissing)
	})
}

// Devices are removed with their source if one of the two sources is a simulation. Otherwise both may measure the same
// devices, which pods hold, so the devices stay while the new source is down.
func TestMonitorExchangesDevices(t *testing.T) {
	for name, c := range map[string]struct {
		from, to health.SourceID
		removed  bool
	}{
		"simulation to DCGM":             {sourceID("sim a", true), sourceID("dcgm ", false), true},
		"DCGM to simulation":             {sourceID("dcgm ", false), sourceID("sim a", true), true},
		"simulation to another":          {sourceID("sim a", true), sourceID("sim b", true), true},
		"same simulation":                {sourceID("sim a", true), sourceID("sim a", true), false},
		"embedded engine to host engine": {sourceID("dcgm ", false), sourceID("dcgm localhost:5555", false), false},
		"same engine":                    {sourceID("dcgm x", false), sourceID("dcgm x", false), false},
		"host engine at another address": {sourceID("dcgm localhost:5555", false), sourceID("dcgm unix:///run/e", false), false},
	} {
		t.Run(name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				first := newSourceOf("GPU-a")
				h.source.Store(first.source(c.from))
				advance(2 * time.Second)
				next := newSourceOf("GPU-a")
				if c.removed {
					next = newSourceOf("GPU-b")
				}
				next.set(func(s *fakeSource) { s.openErr = errors.New("no libdcgm.so.4") })
				h.source.Store(next.source(c.to))
				synctest.Wait()
				h.checkSourceDown(t, c.to.Kind, c.removed)
				advance(time.Hour)
				h.checkSourceDown(t, c.to.Kind, c.removed)
				next.set(func(s *fakeSource) { s.openErr = nil })
				advance(time.Minute)
				h.wantCauses(t, "up", health.SourceUp, "")
				if s := h.out.Load(); s.Devices[0].Device.ID != next.reading.Devices[0].ID || !s.Polled() {
					t.Errorf("up: %+v", s)
				}
				if opens, closes := first.count(&first.opens), first.count(&first.closes); opens != 1 || closes != 1 {
					t.Errorf("first source: %d opens, %d closes", opens, closes)
				}
			})
		})
	}
}

// checkSourceDown checks what is known while a new source is down: the devices of the one before, or nothing if they were removed.
func (h *harness) checkSourceDown(t *testing.T, kind string, removed bool) {
	t.Helper()
	s := h.out.Load()
	if (len(s.Devices) == 0) != removed || s.Polled() == removed || s.Source.Status != health.SourceDown || s.Source.Kind != kind {
		t.Errorf("%+v", s)
	}
	if removed && s.Source.Versions != (health.Versions{}) {
		t.Errorf("versions %+v", s.Source.Versions)
	}
}

// The first reading of another engine replaces the devices. One that a later reading lacks is missing.
func TestNewInventoryReplacesDevicesOnce(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		gpu0, gpu1 := of(healthtest.GPU0, healthtest.Present()), of(healthtest.GPU1, healthtest.Present())
		h.report(gpu0, gpu1)
		advance(2 * time.Second)
		h.report(gpu0)
		h.source.Store(h.fakeSource.source(sourceID("dcgm x", false)))
		advance(2 * time.Second)
		h.wantCauses(t, "another engine", health.SourceUp, "")
		h.report(gpu0, gpu1)
		advance(2 * time.Second)
		h.report(gpu0)
		advance(2 * time.Second)
		h.wantCauses(t, "later", health.SourceUp, "", health.CauseMissing)
	})
}

// The first reading of another engine may list an instance without its name.
func TestNewInventoryKeepsUnnamed(t *testing.T) {
	mig := healthtest.MIG0
	for name, c := range map[string]struct {
		unnamed []health.UnnamedInstance
		want    []health.DeviceID
	}{
		"unnamed":   {[]health.UnnamedInstance{{Parent: mig.Parent, GI: mig.GI, CI: mig.CI}}, []health.DeviceID{mig.Parent, mig.ID}},
		"destroyed": {nil, []health.DeviceID{mig.Parent}},
	} {
		t.Run(name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				gpu := of(healthtest.GPU0, healthtest.Present())
				h.report(gpu, of(mig, healthtest.Present()))
				advance(2 * time.Second)
				h.set(func(s *fakeSource) { s.reading.Unnamed = c.unnamed })
				h.report(gpu)
				h.source.Store(h.fakeSource.source(sourceID("dcgm x", false)))
				advance(2 * time.Second)
				if ids := h.out.Load().DeviceIDs(); !slices.Equal(ids, c.want) {
					t.Errorf("devices %v, want %v", ids, c.want)
				}
			})
		})
	}
}

// A source that another replaces finds what an earlier process saved of it.
func TestExchangeRestoresOtherSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		simulated := sourceID("sim a", true)
		devices := healthtest.Judge(judge.DefaultConfig(), nil, 0, nil,
			map[health.DeviceID]health.Sample{"GPU-0": healthtest.Present(healthtest.XIDs(79))}, healthtest.GPU0)
		saved := statefile.FromSnapshot(&health.Snapshot{
			At: time.Now(), Source: health.Source{Kind: simulated.Kind, Inventory: simulated.Inventory}, Devices: devices,
		}, "boot")
		h := newHarness(zap.NewNop())
		real := sourceID("dcgm x", false)
		h.source.Store(h.fakeSource.source(real))
		h.m.Restore(statefile.Contents{States: map[string]statefile.Saved{simulated.Kind: saved}}.Restore("boot", real, time.Now()))
		h.start(t)
		defer h.stop()
		advance(2 * time.Second)
		h.wantCauses(t, "the source of now", health.SourceUp, "")
		next := newFakeSource()
		h.source.Store(next.source(simulated))
		advance(2 * time.Second)
		h.wantCauses(t, "the source of before", health.SourceUp, "xid-79")
	})
}

// In any sequence of sources, failures and detaches, only devices that the current source can have are published.
func TestSourcesInAnyOrder(t *testing.T) {
	for seed := range uint64(40) {
		runTest(t, func(t *testing.T, h *harness) {
			r := rand.New(rand.NewPCG(seed, 33))
			sources := []struct {
				health.SourceID
				gpu health.DeviceID
			}{
				{sourceID("dcgm ", false), "GPU-real"},
				{sourceID("dcgm localhost:5555", false), "GPU-real"},
				{sourceID("sim a", true), "GPU-a"},
				{sourceID("sim b", true), "GPU-b"},
			}
			h.source.Store(newSourceOf("GPU-a").source(sources[2].SourceID)) // removes the harness's GPU
			advance(time.Second)
			steps, simulated, read := "", true, false // whether the real GPU was read since a simulation
			for range 30 {
				next := sources[r.IntN(len(sources))]
				steps += " " + next.Inventory
				fails := r.IntN(2) == 0
				s := newSourceOf(next.gpu)
				if fails {
					steps += " (down)"
					s.openErr = errors.New("down")
				}
				read = read && !next.Simulated && !simulated || !fails
				simulated = next.Simulated
				h.source.Store(s.source(next.SourceID))
				if r.IntN(4) == 0 {
					steps += " detach attach"
					advance(time.Second)
					_, _ = h.m.Detach(t.Context(), time.Hour)
					_, _ = h.m.Attach(t.Context())
				}
				advance(time.Duration(r.IntN(5)) * time.Second)
				devices := h.out.Load().Devices
				if slices.ContainsFunc(devices, func(d health.DeviceState) bool { return d.Device.ID != next.gpu }) {
					t.Fatalf("seed %d,%s: %+v", seed, steps, devices)
				}
				if !fails && len(devices) != 1 || read && len(devices) == 0 && !next.Simulated {
					t.Fatalf("seed %d,%s: %d devices, GPU read: %v", seed, steps, len(devices), read)
				}
				if !fails && devices[0].Verdict.State != health.Healthy {
					t.Fatalf("seed %d,%s: %+v", seed, steps, devices[0].Verdict)
				}
			}
		})
	}
}
