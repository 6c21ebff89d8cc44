package statefile

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// A reset that was seen before a restart of the agent is no evidence against an XID after it.
func TestResetIsNotSeenTwice(t *testing.T) {
	x := func(code, s int, dbe float64) health.Sample {
		return healthtest.Present(healthtest.Value(health.FieldDBEVolatile, dbe), func(y *health.Sample) { y.XIDs = []health.XID{{Code: code, At: healthtest.At(s)}} })
	}
	good := healthtest.Present(healthtest.Value(health.FieldDBEVolatile, 0))
	var known []health.DeviceState
	for s, sample := range []health.Sample{x(48, 0, 1), good, x(95, 2, 0)} {
		known = healthtest.Judge(health.DefaultConfig(), known, s, nil, map[health.DeviceID]health.Sample{"GPU-0": sample}, healthtest.GPU0)
	}
	devices, _ := restart(t, &health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: known}, "b", "b", "dcgm")
	known = healthtest.Judge(health.DefaultConfig(), devices, 101, nil, map[health.DeviceID]health.Sample{"GPU-0": good}, healthtest.GPU0)
	if !known[0].Verdict.Has("xid-95") {
		t.Errorf("%v", known[0].Verdict.Causes())
	}
}

// The driver says how bad an XID was, though the agent has begun anew between the two.
func TestEscalationAfterRestart(t *testing.T) {
	hit := healthtest.Present(func(s *health.Sample) { s.XIDs = []health.XID{{Code: 109, At: healthtest.At(99)}} })
	known := healthtest.Judge(health.DefaultConfig(), nil, 99, nil, map[health.DeviceID]health.Sample{"GPU-0": hit}, healthtest.GPU0)
	devices, _ := restart(t, &health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: known}, "b", "b", "dcgm")
	wants := healthtest.Present(healthtest.Value(health.FieldRecoveryAction, float64(health.RecoveryReset)))
	known = healthtest.Judge(health.DefaultConfig(), devices, 101, nil, map[health.DeviceID]health.Sample{"GPU-0": wants}, healthtest.GPU0)
	if known[0].Verdict.State != health.Unhealthy || !known[0].Verdict.Has("xid-109") {
		t.Errorf("%v", known[0].Verdict.Causes())
	}
}

// What is kept of a device does not change while nothing happens to it: the state file is written for news only.
func TestNoNewsIsNotKept(t *testing.T) {
	never := health.DefaultConfig()
	never.Recovery = health.RecoverNever
	for name, c := range map[string]struct {
		config health.Config
		story  []health.Sample
	}{
		"back, and never to recover":              {never, []health.Sample{healthtest.Blank(health.Lost)}},
		"action taken back, and never to recover": {never, []health.Sample{healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 2))}},
		"flapping": {health.DefaultConfig(), []health.Sample{healthtest.Blank(health.Lost), healthtest.Present(), healthtest.Blank(health.Lost), healthtest.Present(), healthtest.Blank(health.Lost)}},
	} {
		var known []health.DeviceState
		poll := func(s int, sample health.Sample) string {
			known = healthtest.Judge(c.config, known, s, nil, map[health.DeviceID]health.Sample{"GPU-0": sample}, healthtest.GPU0)
			text, err := json.Marshal(FromSnapshot(&health.Snapshot{Devices: known}, "b").gist())
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		for s, sample := range c.story {
			poll(s, sample)
		}
		was := poll(10, healthtest.Present())
		if known[0].Verdict.State != health.Unhealthy {
			t.Errorf("%s: %v", name, known[0].Verdict.Causes())
		}
		for s := 11; s < 40; s++ {
			if now := poll(s, healthtest.Present()); now != was {
				t.Errorf("%s: at %d s it changed from\n%s to\n%s", name, s, was, now)
				break
			}
		}
	}
}

// DCGM may name a GPU some seconds late: one that only the state file knows is not missed at once, and not cured by coming.
func TestRestoredGPUThatIsListedLate(t *testing.T) {
	ill := healthtest.Judge(health.DefaultConfig(), nil, 0, nil, map[health.DeviceID]health.Sample{"GPU-0": healthtest.Present(healthtest.XIDs(95))}, healthtest.GPU0, healthtest.GPU1)
	m := saved(t, ill)
	for _, comes := range []bool{true, false} {
		var d health.OutageFilter
		known := m.Restore("boot", health.SourceID{Kind: "dcgm"}, healthtest.At(10)).Devices
		for seconds := 10; seconds < 30; seconds++ {
			r, now := healthtest.Reading(seconds, nil, healthtest.GPU1)
			if comes && seconds >= 15 {
				r, now = healthtest.Reading(seconds, nil, healthtest.GPU0, healthtest.GPU1)
			}
			r, why := d.Filter(known, r, now)
			known = health.Judge(health.DefaultConfig(), known, r, health.ReadingContext{XIDHistory: true}, now)
			want := []string{"xid-95"}
			if !comes && seconds >= 20 {
				want = append(want, health.CauseMissing)
			}
			if got := known[0].Verdict.Causes(); why != "" || !slices.Equal(got, want) {
				t.Fatalf("it comes: %v, at %d s: %v, %q, want %v", comes, seconds, got, why, want)
			}
		}
	}
}

// A restart forgets neither that all GPUs went together, nor that nobody knows why the driver wants a reset.
func TestRestartKeepsWhatIsNoEvidence(t *testing.T) {
	ill := healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 1))
	known := healthtest.Judge(health.DefaultConfig(), nil, 0, nil, map[health.DeviceID]health.Sample{"GPU-0": healthtest.Present(healthtest.XIDs(95))}, healthtest.GPU0, healthtest.GPU1)
	r, now := healthtest.Reading(1, map[health.DeviceID]health.Sample{"GPU-1": ill}, healthtest.GPU0, healthtest.GPU1)
	known = health.Judge(health.DefaultConfig(), known, r, health.ReadingContext{FirstReading: true}, now)
	healthtest.WantStates(t, known, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "GPU-1": health.Unhealthy})
	for i := range 3 {
		known = healthtest.Judge(health.DefaultConfig(), known, 2+i, nil, nil)
	}

	text, err := json.Marshal(FromSnapshot(&health.Snapshot{Source: health.Source{Kind: "dcgm", DriverLoad: "7"}, Devices: known}, "boot"))
	if err != nil {
		t.Fatal(err)
	}
	var m Saved
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	recalled := m.Restore("boot", health.SourceID{Kind: "dcgm"}, healthtest.At(10))
	if recalled.DriverLoad != "7" || m.Restore("another", health.SourceID{Kind: "dcgm"}, healthtest.At(10)).DriverLoad != "" {
		t.Errorf("the driver's load is not that of the boot: %+v", recalled)
	}
	known = healthtest.Judge(health.DefaultConfig(), recalled.Devices, 11, nil, map[health.DeviceID]health.Sample{"GPU-1": ill}, healthtest.GPU0, healthtest.GPU1)
	healthtest.WantStates(t, known, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "GPU-1": health.Unhealthy})
	if got := known[0].Verdict.Causes(); !slices.Equal(got, []string{"xid-95"}) {
		t.Errorf("GPU-0 has %v", got)
	}
}

// saved is the devices after they were written to the state file and read.
func saved(t *testing.T, devices []health.DeviceState) Saved {
	t.Helper()
	text, err := json.Marshal(FromSnapshot(&health.Snapshot{At: healthtest.At(0), Source: health.Source{Kind: "dcgm"}, Devices: devices}, "boot"))
	if err != nil {
		t.Fatal(err)
	}
	var m Saved
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

// A partition may be destroyed while the agent is away: its GPU is saved with it.
func TestPartitionDestroyedWhileTheAgentIsAway(t *testing.T) {
	known := healthtest.Judge(health.DefaultConfig(), nil, 0, nil, map[health.DeviceID]health.Sample{"MIG-0": {Presence: health.Present, XIDs: []health.XID{{Code: 48, At: healthtest.At(0)}}}}, healthtest.GPU0, healthtest.MIG0, healthtest.MIG1, healthtest.GPU1)
	rec := saved(t, known).Restore("boot", health.SourceID{Kind: "dcgm"}, healthtest.At(10))
	r, now := healthtest.Reading(11, nil, healthtest.GPU0, healthtest.MIG1, healthtest.GPU1)
	known = health.Judge(health.DefaultConfig(), rec.Devices, r, health.ReadingContext{XIDHistory: true, FirstReading: true}, now)
	healthtest.WantStates(t, known, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "MIG-1": health.Unhealthy, "GPU-1": health.Healthy})
}

// DCGM may name a GPU and its partition late.
func TestRestoredPartitionThatIsListedLate(t *testing.T) {
	known := healthtest.Judge(health.DefaultConfig(), nil, 0, nil, map[health.DeviceID]health.Sample{"MIG-0": {Presence: health.Present, XIDs: []health.XID{{Code: 48, At: healthtest.At(0)}}}}, healthtest.GPU0, healthtest.MIG0, healthtest.GPU1)
	rec := saved(t, known).Restore("boot", health.SourceID{Kind: "dcgm"}, healthtest.At(10))
	var d health.OutageFilter
	known = rec.Devices
	r, now := healthtest.Reading(11, nil, healthtest.GPU1)
	r, _ = d.Filter(known, r, now)
	known = health.Judge(health.DefaultConfig(), known, r, health.ReadingContext{XIDHistory: true, FirstReading: true}, now)
	r, now = healthtest.Reading(13, nil, healthtest.GPU0, healthtest.MIG0, healthtest.GPU1)
	r, _ = d.Filter(known, r, now)
	known = health.Judge(health.DefaultConfig(), known, r, health.ReadingContext{XIDHistory: true}, now)
	healthtest.WantStates(t, known, map[health.DeviceID]health.State{"GPU-0": health.Healthy, "MIG-0": health.Unhealthy, "GPU-1": health.Healthy})
}

// An isolated GPU is isolated after a restart of the agent too, before anybody knows who holds what.
func TestIsolationOutlivesARestart(t *testing.T) {
	c := health.DefaultConfig()
	c.IsolatePending = true
	pending := map[health.DeviceID]health.Sample{"GPU-0": healthtest.Present(healthtest.Value(health.FieldRemapPending, 1))}
	known := healthtest.Judge(c, nil, 0, func(health.DeviceID) bool { return false }, pending, healthtest.GPU0)
	devices, _ := restart(t, &health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: known}, "boot", "boot", "dcgm")
	known = healthtest.Judge(c, devices, 101, nil, pending, healthtest.GPU0)
	if v := known[0].Verdict; v.State != health.Unhealthy || !v.Has(health.CauseIsolated) || !v.Since.Equal(healthtest.At(0)) || !v.Findings[0].Since.Equal(healthtest.At(0)) {
		t.Errorf("%+v", v)
	}
	// If it was reset meanwhile, it is free again.
	known = healthtest.Judge(c, devices, 101, nil, nil, healthtest.GPU0)
	known = healthtest.Judge(c, known, 101+int(c.RecoverAfter/time.Second), nil, nil, healthtest.GPU0)
	healthtest.WantStates(t, known, map[health.DeviceID]health.State{"GPU-0": health.Healthy})
}
