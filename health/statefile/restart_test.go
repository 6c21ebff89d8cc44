package statefile

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// These tests judge readings before and after a restart.

// A reset from before the restart clears no XID after it.
func TestRestartCountsResetOnce(t *testing.T) {
	dbe := func(n float64) func(*health.Sample) { return healthtest.Value(health.FieldDBEVolatile, n) }
	var devices []health.DeviceState
	for s, sample := range []samples{gpu0(xidAt(48, 0), dbe(1)), gpu0(dbe(0)), gpu0(xidAt(95, 2), dbe(0))} {
		devices = judged(devices, s, sample, healthtest.GPU0)
	}
	r := restart(t, devices, "boot")
	devices = judged(r.Devices, 101, gpu0(dbe(0)), healthtest.GPU0)
	if !devices[0].Verdict.Has("xid-95") {
		t.Errorf("causes %v", devices[0].Verdict.Causes())
	}
}

// A recovery action after the restart escalates an XID from before.
func TestRestartKeepsEscalation(t *testing.T) {
	devices := judged(nil, 99, gpu0(xidAt(109, 99)), healthtest.GPU0)
	r := restart(t, devices, "boot")
	devices = judged(r.Devices, 101, gpu0(healthtest.Value(health.FieldRecoveryAction, float64(health.RecoveryReset))), healthtest.GPU0)
	if devices[0].Verdict.State != health.Unhealthy || !devices[0].Verdict.Has("xid-109") {
		t.Errorf("causes %v", devices[0].Verdict.Causes())
	}
}

// DCGM may list a GPU some seconds late. A restored GPU is not missing at once, and its late listing is not a return. Its MIG
// device keeps its finding.
func TestRestoredGPUIsListedLate(t *testing.T) {
	faults := mig0()
	faults["GPU-0"] = healthtest.Present(healthtest.XIDs(95))
	r := restart(t, judged(nil, 0, faults, healthtest.GPU0, healthtest.MIG0, healthtest.GPU1), "boot")
	for name, listed := range map[string]bool{"listed late": true, "never listed": false} {
		var filter judge.OutageFilter
		devices := r.Devices
		for seconds := 100; seconds < 120; seconds++ {
			reading, now := healthtest.Reading(seconds, nil, healthtest.GPU1)
			if listed && seconds >= 105 {
				reading, now = healthtest.Reading(seconds, nil, healthtest.GPU0, healthtest.MIG0, healthtest.GPU1)
			}
			var reason string
			devices, reason = filter.Measure(judge.DefaultConfig(), devices, reading, judge.ReadingContext{XIDHistory: true}, now)
			devices = judge.View(judge.DefaultConfig(), devices, judge.ViewContext{}, now)
			want := []string{"xid-95"}
			if !listed && seconds >= 110 {
				want = []string{health.CauseMissing, "xid-95"}
			}
			if got := devices[0].Verdict.Causes(); reason != "" || !slices.Equal(got, want) {
				t.Fatalf("%s, at %d s: %v, filter %q, want %v", name, seconds, got, reason, want)
			}
			if mig := devices[len(devices)-1]; mig.Device.ID != "MIG-0" || !mig.Verdict.Has("xid-48") {
				t.Fatalf("%s, at %d s: %s has %v", name, seconds, mig.Device.ID, mig.Verdict.Causes())
			}
		}
	}
}

// After a restart, the end of an outage still proves no reset, and the XID behind a recovery action is still unknown.
func TestRestartKeepsMissingEvidence(t *testing.T) {
	wantsReset := samples{"GPU-1": healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 1))}
	unhealthy := map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "GPU-1": health.Unhealthy}
	devices := judged(nil, 0, gpu0(healthtest.XIDs(95)), healthtest.GPU0, healthtest.GPU1)
	r, now := healthtest.Reading(1, wantsReset, healthtest.GPU0, healthtest.GPU1)
	devices = healthtest.JudgeReading(judge.DefaultConfig(), devices, r, judge.ReadingContext{FirstReading: true}, now)
	healthtest.WantStates(t, devices, unhealthy)
	for i := range 3 {
		devices = judged(devices, 2+i, nil)
	}
	devices = restart(t, devices, "boot").Devices
	devices = judged(devices, 101, wantsReset, healthtest.GPU0, healthtest.GPU1)
	healthtest.WantStates(t, devices, unhealthy)
	if got := devices[0].Verdict.Causes(); !slices.Equal(got, []string{"xid-95"}) {
		t.Errorf("GPU-0 has %v", got)
	}
}

// A GPU is saved with its MIG device, so that it inherits the finding of one that is destroyed during the restart.
func TestMIGDeviceDestroyedDuringRestart(t *testing.T) {
	devices := judged(nil, 0, mig0(), healthtest.GPU0, healthtest.MIG0, healthtest.MIG1, healthtest.GPU1)
	restored := restart(t, devices, "boot")
	devices = judged(restored.Devices, 101, nil, healthtest.GPU0, healthtest.MIG1, healthtest.GPU1)
	healthtest.WantStates(t, devices, map[health.DeviceID]health.State{
		"GPU-0": health.Unhealthy, "MIG-1": health.Unhealthy,
		"GPU-1": health.Healthy,
	})
}

// An isolated GPU stays isolated after a restart, before the holders are known.
func TestRestartKeepsIsolation(t *testing.T) {
	c := judge.DefaultConfig()
	c.IsolatePending = true
	pending := gpu0(healthtest.Value(health.FieldRemapPending, 1))
	devices := healthtest.Judge(c, nil, 0, func(health.DeviceID) bool { return false }, pending, healthtest.GPU0)
	restored := restart(t, devices, "boot").Devices
	devices = healthtest.Judge(c, restored, 101, nil, pending, healthtest.GPU0)
	if v := devices[0].Verdict; v.State != health.Unhealthy || v.Cause() != health.CauseIsolated || !v.Since.Equal(healthtest.At(0)) ||
		!v.Findings[0].Since.Equal(healthtest.At(0)) {
		t.Errorf("%+v", v)
	}
	// A GPU that was reset meanwhile is not.
	devices = healthtest.Judge(c, restored, 101, nil, nil, healthtest.GPU0)
	devices = healthtest.Judge(c, devices, 101+int(c.RecoverAfter/time.Second), nil, nil, healthtest.GPU0)
	healthtest.WantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Healthy})
}

// judgeEvent judges an XID that NVML reports for GPU-0.
func judgeEvent(before []health.DeviceState, seconds, code int) []health.DeviceState {
	at := healthtest.At(seconds)
	x := health.XID{Code: code, At: at, Witness: health.WitnessNVML}
	event := judge.Observation{GPU: "GPU-0", Devices: []health.DeviceID{"GPU-0"}, XID: x}
	rc := judge.ReadingContext{Witnesses: []health.Witness{health.WitnessNVML}}
	c := judge.DefaultConfig()
	return judge.View(c, judge.Observe(c, before, []judge.Observation{event}, rc, at), judge.ViewContext{}, at)
}

// An XID of an event source from before the restart counts no more when the source reports it after the restart, also after a
// reset.
func TestRestartKeepsOwedXIDs(t *testing.T) {
	for boot, counts := range map[string]int{"boot": 0, "next boot": 1} {
		devices := judged(nil, 0, nil, healthtest.GPU0)
		devices = judgeEvent(judgeEvent(devices, 1, 95), 1, 31)
		devices[0].XIDs.Owed = append(devices[0].XIDs.Owed, health.OwedXIDs{
			Code: 13, Witness: health.WitnessNVML, Count: 1,
			Since: healthtest.At(1),
		})
		if !devices[0].Verdict.Has("xid-95") {
			t.Fatal("no finding")
		}
		s := &health.Snapshot{At: healthtest.At(0), Source: health.Source{Kind: "dcgm"}, Devices: devices}
		saved := FromSnapshot(s, "boot")
		if owed := saved.Devices[0].XIDs.Owed; len(owed) != 2 {
			t.Errorf("saved %+v", owed)
		}
		r := roundTrip(t, saved).Restore(boot, health.SourceID{Kind: "dcgm"}, healthtest.At(100))
		for _, d := range r.Devices {
			if boot != "boot" || len(d.XIDs.Owed) != 2 {
				t.Errorf("%s: restored %+v", boot, d)
			}
		}
		late := samples{"GPU-0": healthtest.Present(func(s *health.Sample) {
			s.Rows = []health.XIDRow{{Code: 95, At: healthtest.At(1).UnixMicro()}}
			s.XIDs = []health.XID{{Code: 31, At: healthtest.At(2)}}
		})}
		reading, now := healthtest.Reading(101, late, healthtest.GPU0)
		devices = healthtest.JudgeReading(judge.DefaultConfig(), r.Devices, reading,
			judge.ReadingContext{XIDHistory: r.History, DriverReloaded: true},
			now)
		if got := devices[0].Verdict.State; got != health.Healthy || len(devices[0].XIDs.Codes) != counts {
			t.Errorf("%s: %v, XIDs %v", boot, got, devices[0].XIDs.Codes)
		}
	}
}

// A source lists more rows of a GPU than a ledger keeps otherwise. None counts twice, also after a restart: all are saved. An XID that the
// source lists then for the first time counts.
func TestRestartKeepsListedRows(t *testing.T) {
	gpu := healthtest.Present(func(s *health.Sample) { s.RowsWhole = true })
	for i := range 1500 {
		gpu.Rows = append(gpu.Rows, health.XIDRow{Code: 31, At: healthtest.At(i).UnixMicro()})
	}
	var devices []health.DeviceState
	for i := range 3 {
		devices = judged(devices, i, samples{"GPU-0": gpu}, healthtest.GPU0)
	}
	if n := devices[0].XIDs.Codes[31].Total; n != 1500 {
		t.Errorf("%d XIDs count", n)
	}
	for i := range 3 {
		r := restart(t, devices, "boot")
		gpu.Rows = append(gpu.Rows, health.XIDRow{Code: 31, At: healthtest.At(1500 + i).UnixMicro()})
		for j := range 3 {
			r.Devices = judged(r.Devices, 101+j, samples{"GPU-0": gpu}, healthtest.GPU0)
		}
		if n := r.Devices[0].XIDs.Codes[31].Total; n != 1 || len(r.Devices[0].XIDs.Rows) != 1501+i {
			t.Errorf("after restart %d, %d XIDs count, and %d rows are known", i, n, len(r.Devices[0].XIDs.Rows))
		}
		devices = r.Devices
	}
}
