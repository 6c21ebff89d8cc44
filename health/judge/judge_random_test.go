package judge

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// random generates samples and configurations.
type random struct{ *rand.Rand }

func (r random) sample(d health.Device, seconds int) health.Sample {
	s := present()
	if d.Kind == health.KindMIG {
		s = blank(health.Present)
	}
	s.Device, s.At = d.ID, at(seconds)
	for r.IntN(3) == 0 {
		code := []int{13, 31, 48, 74, 79, 95, 109, 144, 149, 154, 999, 1 + r.IntN(200)}[r.IntN(12)]
		s.XIDs = append(s.XIDs, health.XID{Code: code, At: s.At})
	}
	if r.IntN(4) == 0 {
		s.Presence = []health.Presence{health.PresenceUnknown, health.Present, health.Lost, health.Inaccessible, health.Detached}[r.IntN(5)]
	}
	if s.Presence != health.Present {
		s.Values = nil
	} else if d.Kind == health.KindGPU {
		for _, f := range []struct {
			field  health.Field
			values []float64
		}{
			{health.FieldRecoveryAction, []float64{0, 0, 1, 2, 3, 4, 5, 6, 7, 9, 1 << 40, -1}},
			{health.FieldRemapFailed, []float64{0, 0, 1}},
			{health.FieldRemapPending, []float64{0, 1}},
			{health.FieldUnrepairable, []float64{0, 0, 0, 1}},
			{health.FieldDBEVolatile, []float64{0, 0, 2}},
			{health.FieldGPUTemp, []float64{40, 50, 95}},
			{health.FieldRetiredPending, []float64{0, 1}},
			{health.FieldClocksEvents, []float64{0, 4, 8}},
		} {
			if r.IntN(3) == 0 {
				s.Values[f.field] = f.values[r.IntN(len(f.values))]
			}
			if r.IntN(6) == 0 {
				delete(s.Values, f.field)
			}
		}
	}
	if s.Stale = s.Presence == health.Present && r.IntN(8) == 0; s.Stale {
		s.Values = nil
	}
	if r.IntN(8) == 0 {
		s.Rows, s.RowsWhole = []health.XIDRow{{Code: 95, At: at(-seconds).UnixMicro()}, {Code: 48, At: at(0).UnixMicro()}}, r.IntN(2) == 0
	}
	s.Checked = r.IntN(2) == 0
	if s.Checked && r.IntN(3) == 0 {
		s.Incidents = append(s.Incidents, health.Incident{Code: []int{3, 4, 14, 80, 101, 500}[r.IntN(6)], Severity: health.Severity(r.IntN(2))})
	}
	return s
}

func (r random) config() Config {
	c := DefaultConfig()
	c.Recovery = []string{RecoverAuto, RecoverAfterReset, RecoverNever}[r.IntN(3)]
	c.Confirm, c.Flap.Trips, c.IsolatePending = 1+r.IntN(2), r.IntN(4), r.IntN(2) == 0
	c.Cordon = [][]string{nil, {"0"}, {"MIG-1"}, {"0:0", "1"}, {"GPU-1", "unmatched"}}[r.IntN(5)]
	return c
}

// leastState returns the least severe state that a device may have after a sample, regardless of its state before.
func leastState(c Config, s health.Sample, gpu bool) health.State {
	worst := health.Unknown
	for _, f := range conditionFindings(c, s) {
		worst = max(worst, f.State)
	}
	for _, x := range s.XIDs {
		if catalog.LookupXID(x.Code).WholeGPU && !gpu {
			continue // the MIG device inherits the finding of its GPU
		}
		if f, bad := xidFinding(c, x, s.At); bad {
			worst = max(worst, f.State)
		}
	}
	for _, i := range s.Incidents {
		if f, bad := incidentFinding(c, health.Device{}, i, s.At); bad && s.Checked && (f.State == health.Degraded || c.Confirm == 1) {
			worst = max(worst, f.State)
		}
	}
	return worst
}

// For random sequences of readings and configurations:
//   - no GPU disappears, and a MIG device only when it is destroyed;
//   - a state is the worst of the findings, and no less than its sample or its GPU requires;
//   - a device is cordoned if and only if Config.Cordon matches it;
//   - a finding that nothing clears stays;
//   - the order of the samples is irrelevant, and older snapshots are not modified.
func TestJudgeRandomSequences(t *testing.T) {
	for seed := range uint64(60) {
		r := random{rand.New(rand.NewPCG(seed, 1))}
		var devices []health.DeviceState
		gpus := make(map[health.DeviceID]bool)
		seconds := 0
		for i := range 40 {
			seconds += []int{1, 1, 10, 70}[r.IntN(4)]
			where := fmt.Sprintf("seed %d step %d", seed, i)
			c := r.config()
			reading, samples := r.reading(seconds)
			for _, d := range reading.Devices {
				if d.Kind == health.KindGPU {
					gpus[d.ID] = true
				}
			}
			held := r.held()

			before, kept := devices, deepCopy(devices)
			devices = judgeAndView(c, before, &reading, held, at(seconds))
			if !reflect.DeepEqual(before, kept) {
				t.Fatalf("%s: an older snapshot was modified", where)
			}
			shuffled := health.Reading{Devices: slices.Clone(reading.Devices), Samples: slices.Clone(reading.Samples)}
			r.Shuffle(len(shuffled.Samples), func(i, j int) {
				shuffled.Samples[i], shuffled.Samples[j] = shuffled.Samples[j], shuffled.Samples[i]
			})
			if again := judgeAndView(c, before, &shuffled, held, at(seconds)); !reflect.DeepEqual(again, devices) {
				t.Fatalf("%s: another order gives\n%+v\nnot\n%+v", where, again, devices)
			}
			checkNoneDisappears(t, where, &reading, gpus, before, devices)
			was, verdicts := verdictsOf(before), verdictsOf(devices)
			for _, d := range devices {
				where, id, parent := fmt.Sprintf("%s: %s", where, d.Device.ID), d.Device.ID, d.Device.Parent
				checkState(t, where, c, d, samples[id], verdicts[parent])
				checkChange(t, where, c, d, was[id], at(seconds))
			}
		}
	}
}

// reading returns a reading of some of the devices, and its samples by device.
func (r random) reading(seconds int) (reading health.Reading, samples map[health.DeviceID]health.Sample) {
	for _, gpu := range []health.Device{gpu0, gpu1} {
		if r.IntN(8) == 0 {
			continue
		}
		reading.Devices = append(reading.Devices, gpu)
		for _, mig := range []health.Device{mig0, mig1} {
			if mig.Parent == gpu.ID && r.IntN(4) > 0 {
				reading.Devices = append(reading.Devices, mig)
			}
		}
	}
	samples = make(map[health.DeviceID]health.Sample)
	for _, d := range reading.Devices {
		if r.IntN(10) > 0 {
			samples[d.ID] = r.sample(d, seconds)
			reading.Samples = append(reading.Samples, samples[d.ID])
		}
	}
	return reading, samples
}

func (r random) held() health.Held {
	holds := map[health.DeviceID]bool{"GPU-0": r.IntN(2) == 0, "MIG-1": r.IntN(2) == 0, "GPU-1": r.IntN(2) == 0}
	if r.IntN(3) == 0 {
		return nil
	}
	return func(id health.DeviceID) bool { return holds[id] }
}

func verdictsOf(devices []health.DeviceState) map[health.DeviceID]health.Verdict {
	verdicts := make(map[health.DeviceID]health.Verdict)
	for _, d := range devices {
		verdicts[d.Device.ID] = d.Verdict
	}
	return verdicts
}

// checkNoneDisappears checks that no GPU disappears, no device of the reading, and no MIG device with its missing GPU.
func checkNoneDisappears(
	t *testing.T, where string, reading *health.Reading, gpus map[health.DeviceID]bool, before, devices []health.DeviceState,
) {
	t.Helper()
	verdicts := make(map[health.DeviceID]health.Verdict)
	for _, d := range devices {
		if _, twice := verdicts[d.Device.ID]; twice {
			t.Fatalf("%s: duplicate %s", where, d.Device.ID)
		}
		verdicts[d.Device.ID] = d.Verdict
	}
	for id := range gpus {
		if _, there := verdicts[id]; !there {
			t.Fatalf("%s: %s disappeared", where, id)
		}
	}
	for _, d := range reading.Devices {
		if _, there := verdicts[d.ID]; !there {
			t.Fatalf("%s: %s is missing from the result", where, d.ID)
		}
	}
	for _, d := range before {
		if _, there := verdicts[d.Device.ID]; d.Device.Kind == health.KindMIG && verdicts[d.Device.Parent].Has(health.CauseMissing) && !there {
			t.Fatalf("%s: %s disappeared with its missing GPU", where, d.Device.ID)
		}
	}
}

// checkState checks that the state is the worst of the findings, and no less than the sample or the GPU requires.
func checkState(t *testing.T, where string, c Config, d health.DeviceState, s health.Sample, gpu health.Verdict) {
	t.Helper()
	v, worst, isGPU := d.Verdict, health.Unknown, d.Device.Kind == health.KindGPU
	for _, f := range v.Findings {
		worst = max(worst, f.State)
	}
	if worst != health.Unknown && v.State != worst || worst == health.Unknown && v.State > health.Healthy {
		t.Fatalf("%s is %v, its worst finding %v", where, v.State, worst)
	}
	if s.Device != "" && v.State < leastState(c, s, isGPU) {
		t.Fatalf("%s is %v, its sample requires %v: %+v", where, v.State, leastState(c, s, isGPU), s)
	}
	if !isGPU && gpu.State > health.Healthy && v.State < gpu.State {
		t.Fatalf("%s is %v, its GPU %v", where, v.State, gpu.State)
	}
	_, cordoned := c.cordonOf(&d.Device)
	if slices.Contains(v.Causes(), health.CauseCordoned) != cordoned {
		t.Fatalf("%s is cordoned: %v, wanted %v", where, !cordoned, cordoned)
	}
	if isolated := slices.Contains(v.Causes(), health.CauseIsolated); isolated && !c.IsolatePending {
		t.Fatalf("%s is isolated although isolatePending is off", where)
	}
}

// checkChange checks what became of a device's earlier findings, and the times of all.
func checkChange(t *testing.T, where string, c Config, d health.DeviceState, old health.Verdict, now time.Time) {
	t.Helper()
	v := d.Verdict
	for _, f := range v.Findings {
		if f.Reason == "" && !f.OfIncident() || !f.Action.Valid() || f.Action == health.ActionNone || f.Since.IsZero() || f.Since.After(now) {
			t.Fatalf("%s: %+v", where, f)
		}
	}
	for _, f := range old.Findings {
		stays := f.From == "" && f.State == health.Unhealthy && !f.IsDecision() && (c.Recovery == RecoverNever || f.Clears == health.ClearsReboot)
		if stays && !d.Memory.UnhealthyBy(f.Cause) {
			t.Fatalf("%s: %s cleared without evidence: %+v", where, f.Cause, v.Findings)
		}
	}
	since := now
	if v.State == old.State && !old.Since.IsZero() {
		since = old.Since
	}
	if !v.Since.Equal(since) {
		t.Fatalf("%s is %v since %v, was %v since %v", where, v.State, v.Since, old.State, old.Since)
	}
}

// deepCopy copies everything that Measure could modify.
func deepCopy(devices []health.DeviceState) []health.DeviceState {
	devices = slices.Clone(devices)
	for i := range devices {
		d := &devices[i]
		m := &d.Memory
		m.Findings, m.Trips, m.PendingXIDs = slices.Clone(m.Findings), slices.Clone(m.Trips), slices.Clone(m.PendingXIDs)
		d.Verdict.Findings = slices.Clone(d.Verdict.Findings)
		d.XIDs.Owed, d.XIDs.Codes = slices.Clone(d.XIDs.Owed), maps.Clone(d.XIDs.Codes)
		d.Sample.XIDs = slices.Clone(d.Sample.XIDs)
	}
	return devices
}

// For random readings with random events between them:
//   - an event adds and removes no device, changes of a sample only the XIDs, and modifies no older snapshot;
//   - it ends only the finding of a recovery action, and only if it withdraws the recovery action of the GPU;
//   - an XID that counts makes its device as bad as it requires;
//   - the source's reports of these XIDs do not count.
func TestEventsRandomSequences(t *testing.T) {
	for seed := range uint64(60) {
		r := random{rand.New(rand.NewPCG(seed, 2))}
		var devices []health.DeviceState
		var unreported []health.XID // of GPU-0, by the source
		counted := uint64(0)
		for i := range 40 {
			where := fmt.Sprintf("seed %d step %d", seed, i)
			c, seconds := r.config(), 2*i
			rc := ReadingContext{XIDHistory: true, Witnesses: []health.Witness{health.WitnessNVML, health.WitnessKernelLog}[:r.IntN(2)+1]}
			reading := r.fullReading(seconds, unreported)
			devices = judgeReading(c, devices, &reading, rc, at(seconds))

			events, samples := r.events(reading.Devices, seconds+1)
			unreported = nil
			for _, x := range samples[gpu0.ID].XIDs {
				unreported = append(unreported, health.XID{Code: x.Code, At: x.At})
			}
			counted += uint64(len(unreported))
			before, kept := devices, deepCopy(devices)
			devices = observe(c, before, &events, rc, at(seconds+1))
			if !reflect.DeepEqual(before, kept) {
				t.Fatalf("%s: an older snapshot was modified", where)
			}
			if len(devices) != len(before) {
				t.Fatalf("%s: other devices", where)
			}
			for k, d := range devices {
				checkEvents(t, where, c, before[k], d, samples)
			}
			if got := total(devices[0]); uint64(got) != counted {
				t.Fatalf("%s: %d XIDs count, want %d", where, got, counted)
			}
		}
	}
}

// fullReading returns a reading of all devices in which only GPU-0 has XIDs.
func (r random) fullReading(seconds int, xids []health.XID) health.Reading {
	reading := health.Reading{Devices: []health.Device{gpu0, mig0, mig1, gpu1}}
	for _, d := range reading.Devices {
		s := r.sample(d, seconds)
		s.XIDs, s.Rows = nil, nil
		if d.ID == gpu0.ID {
			s.XIDs = xids
		}
		reading.Samples = append(reading.Samples, s)
	}
	return reading
}

// events returns samples, of which XIDs and recovery actions are events, and the samples by device.
func (r random) events(devices []health.Device, seconds int) (events health.Reading, samples map[health.DeviceID]health.Sample) {
	samples = make(map[health.DeviceID]health.Sample)
	for _, d := range devices {
		s := r.sample(d, seconds)
		for j := range s.XIDs {
			s.XIDs[j].Witness, s.XIDs[j].At = health.WitnessNVML, s.XIDs[j].At.Add(time.Duration(j))
		}
		events.Samples, samples[d.ID] = append(events.Samples, s), s
	}
	return events, samples
}

// checkEvents checks what events did to a device.
func checkEvents(t *testing.T, where string, c Config, old, d health.DeviceState, samples map[health.DeviceID]health.Sample) {
	t.Helper()
	s := samples[d.Device.ID]
	if d.Device.ID != old.Device.ID {
		t.Fatalf("%s: other devices", where)
	}
	got, want := d.Sample, old.Sample
	got.XIDs, want.XIDs = nil, nil
	if !reflect.DeepEqual(got, want) || !slices.Equal(d.Sample.XIDs, s.XIDs) {
		t.Fatalf("%s: sample %+v became %+v by %+v", where, old.Sample, d.Sample, s)
	}
	if code := leastState(c, health.Sample{At: s.At, XIDs: s.XIDs}, d.Device.Kind == health.KindGPU); d.Verdict.State < code {
		t.Fatalf("%s: %s is %v, its XIDs require %v", where, d.Device.ID, d.Verdict.State, code)
	}
	action, changed := samples[d.Device.GPU()].Values[health.FieldRecoveryAction]
	withdrawn := changed && health.RecoveryAction(action) == health.RecoveryNone
	for _, f := range old.Verdict.Findings {
		if !slices.Contains(d.Verdict.Causes(), f.Cause) && (!withdrawn || f.Cause != health.CauseRecoveryAction) {
			t.Fatalf("%s: %s of %s ended", where, f.Cause, d.Device.ID)
		}
	}
}
