package judge

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(seconds int) time.Time { return epoch.Add(time.Duration(seconds) * time.Second) }

var (
	gpu0 = health.Device{ID: "GPU-0", Kind: health.KindGPU, Index: 0}
	gpu1 = health.Device{ID: "GPU-1", Kind: health.KindGPU, Index: 1}
	mig0 = health.Device{ID: "MIG-0", Kind: health.KindMIG, Parent: "GPU-0", Index: 0, GI: 1}
	mig1 = health.Device{ID: "MIG-1", Kind: health.KindMIG, Parent: "GPU-0", Index: 0, GI: 2, MIGIndex: 1}
)

// present returns a sample of a healthy GPU, changed by edit.
func present(edit ...func(*health.Sample)) health.Sample {
	s := health.Sample{Presence: health.Present, Values: map[health.Field]float64{
		health.FieldRecoveryAction: 0, health.FieldGPUTemp: 40, health.FieldRemapFailed: 0, health.FieldRemapPending: 0,
		health.FieldUnrepairable: 0,
	}}
	for _, e := range edit {
		e(&s)
	}
	return s
}

func value(f health.Field, v float64) func(*health.Sample) {
	return func(s *health.Sample) { s.Values[f] = v }
}

func without(f health.Field) func(*health.Sample) {
	return func(s *health.Sample) { delete(s.Values, f) }
}

// xids adds XIDs, which get the time of the sample.
func xids(codes ...int) func(*health.Sample) {
	return func(s *health.Sample) {
		for _, c := range codes {
			s.XIDs = append(s.XIDs, health.XID{Code: c})
		}
	}
}

// blank returns a sample without values.
func blank(p health.Presence) health.Sample { return health.Sample{Presence: p} }

// migXIDs returns a sample of a MIG device that reports XIDs.
func migXIDs(codes ...int) health.Sample {
	s := blank(health.Present)
	xids(codes...)(&s)
	return s
}

type samples = map[health.DeviceID]health.Sample

// reading returns a reading of devices, each with its sample in samples; the default is a healthy one.
func reading(seconds int, samples samples, devices ...health.Device) (*health.Reading, time.Time) {
	r := &health.Reading{Devices: devices}
	for _, d := range devices {
		s, ok := samples[d.ID]
		if !ok {
			s = present()
			if d.Kind == health.KindMIG {
				s = blank(health.Present)
			}
		}
		s.Device, s.At, s.XIDs = d.ID, at(seconds), slices.Clone(s.XIDs)
		for i := range s.XIDs {
			if s.XIDs[i].At.IsZero() {
				s.XIDs[i].At = s.At
			}
		}
		r.Samples = append(r.Samples, s)
	}
	return r, at(seconds)
}

// judgeReading judges a reading and derives the verdicts.
func judgeReading(c Config, before []health.DeviceState, r *health.Reading, rc ReadingContext, now time.Time) []health.DeviceState {
	return View(c, Measure(c, before, r, rc, now), ViewContext{}, now)
}

// observe judges what the samples of a reading have as events, and derives the verdicts.
func observe(c Config, before []health.DeviceState, r *health.Reading, rc ReadingContext, now time.Time) []health.DeviceState {
	return View(c, Observe(c, before, eventsOf(before, r), rc, now), ViewContext{}, now)
}

// eventsOf returns the recovery actions and the XIDs in the samples of known devices.
func eventsOf(devices []health.DeviceState, r *health.Reading) (events []Observation) {
	for _, s := range r.Samples {
		i := slices.IndexFunc(devices, func(d health.DeviceState) bool { return d.Device.ID == s.Device })
		if i < 0 {
			continue
		}
		e := Observation{GPU: devices[i].Device.GPU(), Devices: []health.DeviceID{s.Device}}
		if v, ok := s.Values[health.FieldRecoveryAction]; ok {
			action := e
			action.Action = new(health.RecoveryAction(v))
			events = append(events, action)
		}
		for _, e.XID = range s.XIDs {
			events = append(events, e)
		}
	}
	return events
}

// judgeAndView judges a reading with the XIDs of this boot known, and derives the verdicts.
func judgeAndView(c Config, before []health.DeviceState, r *health.Reading, held health.Held, now time.Time) []health.DeviceState {
	return View(c, Measure(c, before, r, ReadingContext{XIDHistory: true}, now), ViewContext{Held: held}, now)
}

func judgeAll(
	c Config, before []health.DeviceState, seconds int, held health.Held, samples samples, devices ...health.Device,
) []health.DeviceState {
	r, now := reading(seconds, samples, devices...)
	return judgeAndView(c, before, r, held, now)
}

// judge judges a reading with the default configuration.
func judge(before []health.DeviceState, seconds int, samples samples, devices ...health.Device) []health.DeviceState {
	return judgeAll(DefaultConfig(), before, seconds, nil, samples, devices...)
}

// judgeGPU judges one sample of GPU-0 without decisions.
func judgeGPU(before []health.DeviceState, seconds int, s health.Sample, rc ReadingContext) health.DeviceState {
	r, now := reading(seconds, samples{gpu0.ID: s}, gpu0)
	return judgeReading(DefaultConfig(), before, r, rc, now)[0]
}

type step struct {
	at     int // seconds
	sample health.Sample
	want   health.State
	causes []string // worst first
}

// runSteps judges the samples of GPU-0 in turn and checks each verdict.
func runSteps(t *testing.T, c Config, steps []step) []health.DeviceState {
	t.Helper()
	var devices []health.DeviceState
	for _, st := range steps {
		devices = judgeAll(c, devices, st.at, nil, samples{gpu0.ID: st.sample}, gpu0)
		v := devices[0].Verdict
		if got := v.Causes(); v.State != st.want || !slices.Equal(got, st.causes) {
			t.Fatalf("at %d s: got %v %v, want %v %v", st.at, v.State, got, st.want, st.causes)
		}
		for _, f := range v.Findings {
			if f.Reason == "" && !f.OfIncident() || !f.Action.Valid() || f.Since.IsZero() {
				t.Errorf("at %d s: a finding needs a reason, an action and a time: %+v", st.at, f)
			}
		}
	}
	return devices
}

func wantStates(t *testing.T, devices []health.DeviceState, want map[health.DeviceID]health.State) {
	t.Helper()
	got := make(map[health.DeviceID]health.State)
	for _, d := range devices {
		got[d.Device.ID] = d.Verdict.State
	}
	if !maps.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
}

// nodeStep is a reading of several devices and the states that follow.
type nodeStep struct {
	at      int
	samples samples
	devices []health.Device
	want    map[health.DeviceID]health.State
}

func runNode(t *testing.T, steps []nodeStep) []health.DeviceState {
	t.Helper()
	var devices []health.DeviceState
	for _, st := range steps {
		devices = judge(devices, st.at, st.samples, st.devices...)
		t.Logf("at %d s", st.at)
		wantStates(t, devices, st.want)
	}
	return devices
}

func TestJudgeGPU(t *testing.T) {
	c := DefaultConfig()
	c.Flap.Trips = 0
	for name, steps := range map[string][]step{
		"unknown before the first sample": {
			{0, blank(health.PresenceUnknown), health.Unknown, nil},
			{1, present(), health.Healthy, nil},
			{2, blank(health.PresenceUnknown), health.Healthy, nil},
		},
		"fallen off the bus, lost, then present": {
			{0, present(xids(79)), health.Unhealthy, []string{"xid-79"}},
			{1, present(), health.Unhealthy, []string{"xid-79"}},
			{2, blank(health.Lost), health.Unhealthy, []string{"xid-79", health.CauseLost}},
			{3, present(), health.Healthy, nil},
		},
		"one reading as lost does not prove a reset": {
			{0, present(xids(95)), health.Unhealthy, []string{"xid-95"}},
			{1, blank(health.Lost), health.Unhealthy, []string{health.CauseLost, "xid-95"}},
			{2, present(), health.Unhealthy, []string{"xid-95"}},
			{3, blank(health.Detached), health.Unhealthy, []string{"xid-95", health.CauseDetached}},
			{4, present(), health.Unhealthy, []string{"xid-95"}},
		},
		"an XID stays without evidence of a cure": {
			{0, present(xids(48)), health.Unhealthy, []string{"xid-48"}},
			{3600, present(), health.Unhealthy, []string{"xid-48"}},
			{7200, blank(health.PresenceUnknown), health.Unhealthy, []string{"xid-48"}},
		},
		"a reset request alone is degraded": {
			{0, present(value(health.FieldRecoveryAction, 1)), health.Degraded, []string{health.CauseRecoveryAction}},
			{1, present(value(health.FieldRecoveryAction, 4)), health.Degraded, []string{health.CauseRecoveryAction}},
			{2, present(without(health.FieldRecoveryAction)), health.Degraded, []string{health.CauseRecoveryAction}},
			{3, present(), health.Healthy, nil},
		},
		"a cleared error count proves a reset": {
			{0, present(xids(48), value(health.FieldDBEVolatile, 2)), health.Unhealthy, []string{health.CauseDBE, "xid-48"}},
			{1, present(), health.Unhealthy, []string{health.CauseDBE, "xid-48"}},
			{2, blank(health.PresenceUnknown), health.Unhealthy, []string{health.CauseDBE, "xid-48"}},
			{3, present(value(health.FieldDBEVolatile, 0)), health.Unhealthy, []string{health.CauseDBE}},
			{4, present(value(health.FieldDBEVolatile, 0), xids(48)), health.Unhealthy, []string{health.CauseDBE, "xid-48"}}, // the XID recurs
			{70, present(value(health.FieldDBEVolatile, 0)), health.Unhealthy, []string{"xid-48"}},
		},
		"a completed row remap proves a reset": {
			{0, present(xids(95), value(health.FieldRemapPending, 1)), health.Unhealthy, []string{"xid-95", health.CauseRemapPending}},
			{1, present(without(health.FieldRemapPending)), health.Unhealthy, []string{"xid-95", health.CauseRemapPending}},
			{2, present(value(health.FieldRemapPending, 0)), health.Degraded, []string{health.CauseRemapPending}},
		},
		"a failed row remap proves no reset": {
			{0, present(xids(95), value(health.FieldRemapPending, 1)), health.Unhealthy, []string{"xid-95", health.CauseRemapPending}},
			{1, present(value(health.FieldRemapFailed, 1)), health.Unhealthy, []string{health.CauseRemapFailed, "xid-95", health.CauseRemapPending}},
		},
		"a lesser recovery action does not hide a greater one": {
			{0, present(value(health.FieldRecoveryAction, 2)), health.Unhealthy, []string{health.CauseRecoveryAction}},
			{1, present(value(health.FieldRecoveryAction, 1)), health.Unhealthy, []string{health.CauseRecoveryAction}},
			{60, present(value(health.FieldRecoveryAction, 1)), health.Degraded, []string{health.CauseRecoveryAction}},
			{61, present(value(health.FieldRecoveryAction, 2)), health.Unhealthy, []string{health.CauseRecoveryAction}},
			{62, present(), health.Healthy, nil},
		},
		"a context switch timeout alone is ignored": {
			{0, present(xids(109)), health.Healthy, nil},
			{70, present(value(health.FieldRecoveryAction, 1)), health.Degraded, []string{health.CauseRecoveryAction}},
			{71, present(), health.Healthy, nil},
		},
		"a context switch timeout with a reset request is unhealthy": {
			{0, present(xids(109)), health.Healthy, nil},
			{1, present(value(health.FieldRecoveryAction, 1)), health.Unhealthy, []string{"xid-109", health.CauseRecoveryAction}},
			{900, present(value(health.FieldRecoveryAction, 1)), health.Unhealthy, []string{"xid-109", health.CauseRecoveryAction}},
			{901, present(), health.Healthy, nil},
			{902, present(value(health.FieldRecoveryAction, 1)), health.Degraded, []string{health.CauseRecoveryAction}},
		},
		"the recovery action decides the severity of an NVLink 5 error": {
			{0, present(xids(149)), health.Degraded, []string{"xid-149"}},
			{2, present(value(health.FieldRecoveryAction, 4)), health.Unhealthy, []string{"xid-149", health.CauseRecoveryAction}},
			{3, present(), health.Healthy, nil},
			{10, present(xids(145)), health.Degraded, []string{"xid-145"}},
			{70, present(), health.Healthy, nil},
		},
		"the recovery action decides the severity of XIDs that the sources dispute": {
			{0, present(xids(38, 44, 121, 166, 175)), health.Degraded, []string{"xid-121", "xid-166", "xid-175", "xid-38", "xid-44"}},
			{1, present(value(health.FieldRecoveryAction, 1)), health.Unhealthy, []string{
				"xid-121", "xid-166", "xid-175", "xid-38", "xid-44",
				health.CauseRecoveryAction,
			}},
			{2, present(), health.Healthy, nil},
		},
		"an application error with a reset request for another reason": {
			{0, present(xids(32, 60, 69, 80, 94, 174)), health.Degraded, []string{"xid-94", "xid-174", "xid-32", "xid-60", "xid-69", "xid-80"}},
			{
				1, present(value(health.FieldRecoveryAction, 1), xids(31)), health.Degraded,
				[]string{health.CauseRecoveryAction, "xid-94", "xid-174", "xid-32", "xid-60", "xid-69", "xid-80"},
			},
		},
		"the driver decides after peer-to-peer work has ended": {
			{0, present(xids(149)), health.Degraded, []string{"xid-149"}},
			{2, present(value(health.FieldRecoveryAction, 3)), health.Unhealthy, []string{health.CauseRecoveryAction, "xid-149"}},
			{900, present(value(health.FieldRecoveryAction, 3)), health.Unhealthy, []string{health.CauseRecoveryAction}},
			{901, present(value(health.FieldRecoveryAction, 1)), health.Unhealthy, []string{"xid-149", health.CauseRecoveryAction}},
			{990, present(value(health.FieldRecoveryAction, 1)), health.Unhealthy, []string{"xid-149", health.CauseRecoveryAction}},
			{991, present(), health.Healthy, nil},
		},
		"the driver decides that no reset is needed": {
			{0, present(xids(149)), health.Degraded, []string{"xid-149"}},
			{2, present(value(health.FieldRecoveryAction, 3)), health.Unhealthy, []string{health.CauseRecoveryAction, "xid-149"}},
			{900, present(), health.Healthy, nil},
			{901, present(value(health.FieldRecoveryAction, 1)), health.Degraded, []string{health.CauseRecoveryAction}},
		},
		"an XID during a reset request": {
			{0, present(value(health.FieldRecoveryAction, 1)), health.Degraded, []string{health.CauseRecoveryAction}},
			{1, present(xids(144), value(health.FieldRecoveryAction, 1)), health.Unhealthy, []string{"xid-144", health.CauseRecoveryAction}},
			{2, blank(health.Lost), health.Unhealthy, []string{health.CauseLost, "xid-144", health.CauseRecoveryAction}},
			{3, blank(health.Lost), health.Unhealthy, []string{health.CauseLost, "xid-144", health.CauseRecoveryAction}},
			{4, present(value(health.FieldRecoveryAction, 1)), health.Degraded, []string{health.CauseRecoveryAction}},
		},
		"XID 154 only announces the recovery action": {
			{0, present(xids(154), value(health.FieldRecoveryAction, 1)), health.Degraded, []string{health.CauseRecoveryAction}},
			{1, present(xids(154)), health.Healthy, nil}, // the end of the recovery action
		},
		"application errors are ignored": {
			{0, present(xids(13, 31, 43, 45, 68, 109)), health.Healthy, nil},
		},
		"an unknown XID warns until recoverAfter": {
			{0, present(xids(999)), health.Degraded, []string{"xid-999"}},
			{30, present(xids(999)), health.Degraded, []string{"xid-999"}},
			{89, present(), health.Degraded, []string{"xid-999"}},
			{90, present(), health.Healthy, nil},
		},
		"a warning does not hide a fault": {
			{0, present(xids(999, 48, 998)), health.Unhealthy, []string{"xid-48", "xid-998", "xid-999"}},
			{100, present(), health.Unhealthy, []string{"xid-48"}},
		},
		"the temperature limit is inclusive": {
			{0, present(value(health.FieldGPUTemp, 97)), health.Degraded, []string{health.CauseTemperature}},
			{100, present(without(health.FieldGPUTemp)), health.Degraded, []string{health.CauseTemperature}},
			{101, present(value(health.FieldGPUTemp, 90)), health.Degraded, []string{health.CauseTemperature}},
			{160, present(value(health.FieldGPUTemp, 89)), health.Degraded, []string{health.CauseTemperature}},
			{161, present(value(health.FieldGPUTemp, 89)), health.Healthy, nil},
		},
		"a pending row remap that fails": {
			{0, present(value(health.FieldRemapPending, 1)), health.Degraded, []string{health.CauseRemapPending}},
			{
				1, present(value(health.FieldRemapFailed, 1), value(health.FieldRemapPending, 1)), health.Unhealthy,
				[]string{health.CauseRemapFailed, health.CauseRemapPending},
			},
			{60, present(), health.Unhealthy, []string{health.CauseRemapFailed, health.CauseRemapPending}},
			{61, present(), health.Healthy, nil},
		},
		"unrepairable memory": {
			{0, present(value(health.FieldUnrepairable, 1)), health.Unhealthy, []string{health.CauseUnrepairable}},
		},
		"double-bit errors until a reset clears the count": {
			{0, present(value(health.FieldDBEVolatile, 2)), health.Unhealthy, []string{health.CauseDBE}},
			{100, present(), health.Unhealthy, []string{health.CauseDBE}},
			{101, present(value(health.FieldDBEVolatile, 0)), health.Healthy, nil},
		},
		"retired pages": {
			{0, present(value(health.FieldRetiredSBE, 40), value(health.FieldRetiredDBE, 22)), health.Healthy, nil},
			{1, present(value(health.FieldRetiredSBE, 40)), health.Healthy, nil},
			{2, present(value(health.FieldRetiredSBE, 40), value(health.FieldRetiredDBE, 23)), health.Unhealthy, []string{health.CauseRetiredPages}},
			{3, present(value(health.FieldRetiredPending, 1)), health.Unhealthy, []string{health.CauseRetiredPages, health.CauseRetiredPending}},
		},
		"a power cap is ignored, a power brake is not": {
			{0, present(value(health.FieldClocksEvents, 0x4)), health.Healthy, nil},
			{1, present(value(health.FieldClocksEvents, 0x84)), health.Degraded, []string{health.CauseClocks}},
		},
		"each of the bits by which the hardware slows down": {
			{0, present(value(health.FieldClocksEvents, 0x8)), health.Degraded, []string{health.CauseClocks}},
			{100, present(value(health.FieldClocksEvents, 0x37)), health.Healthy, nil},
			{200, present(value(health.FieldClocksEvents, 0x40)), health.Degraded, []string{health.CauseClocks}},
			{300, present(value(health.FieldClocksEvents, 0x100)), health.Healthy, nil},
			{400, present(value(health.FieldClocksEvents, 0x80)), health.Degraded, []string{health.CauseClocks}},
			{500, present(value(health.FieldClocksEvents, 0)), health.Healthy, nil},
		},
		"the limit of retired pages is 63": {
			{0, present(value(health.FieldRetiredSBE, 31), value(health.FieldRetiredDBE, 31)), health.Healthy, nil},
			{1, present(value(health.FieldRetiredSBE, 32), value(health.FieldRetiredDBE, 31)), health.Unhealthy, []string{health.CauseRetiredPages}},
		},
		"a reset does not clear a condition that persists": {
			{
				0, present(value(health.FieldRemapFailed, 1), value(health.FieldRecoveryAction, 1)), health.Unhealthy,
				[]string{health.CauseRemapFailed, health.CauseRecoveryAction},
			},
			{1, present(value(health.FieldRemapFailed, 1)), health.Unhealthy, []string{health.CauseRemapFailed}},
		},
		"an XID that recurs after a reset": {
			{0, present(xids(95)), health.Unhealthy, []string{"xid-95"}},
			{1, blank(health.Lost), health.Unhealthy, []string{health.CauseLost, "xid-95"}},
			{2, present(xids(95)), health.Unhealthy, []string{"xid-95"}},
			{3, present(), health.Unhealthy, []string{"xid-95"}},
		},
		"each recurrence needs evidence of another reset": {
			{0, present(value(health.FieldDBEVolatile, 1), xids(48)), health.Unhealthy, []string{health.CauseDBE, "xid-48"}},
			{10, present(value(health.FieldDBEVolatile, 0)), health.Unhealthy, []string{health.CauseDBE}},
			{30, present(value(health.FieldDBEVolatile, 1), xids(48)), health.Unhealthy, []string{health.CauseDBE, "xid-48"}},
			{40, present(value(health.FieldDBEVolatile, 0)), health.Unhealthy, []string{health.CauseDBE}},
			{200, present(value(health.FieldDBEVolatile, 0)), health.Healthy, nil},
		},
		"the presence changes": {
			{0, blank(health.Missing), health.Unhealthy, []string{health.CauseMissing}},
			{1, blank(health.Missing), health.Unhealthy, []string{health.CauseMissing}},
			{2, blank(health.Lost), health.Unhealthy, []string{health.CauseLost}},
			{3, blank(health.PresenceUnknown), health.Unhealthy, []string{health.CauseLost}},
			{4, blank(health.Detached), health.Unhealthy, []string{health.CauseDetached}},
			{5, blank(health.Inaccessible), health.Unhealthy, []string{health.CauseInaccessible}},
			{6, present(), health.Healthy, nil},
		},
		"a stale GPU keeps its findings": {
			{0, present(value(health.FieldGPUTemp, 99)), health.Degraded, []string{health.CauseTemperature}},
			{300, health.Sample{Presence: health.Present, Stale: true}, health.Degraded, []string{health.CauseNotMeasured, health.CauseTemperature}},
		},
	} {
		t.Run(name, func(t *testing.T) { runSteps(t, c, steps) })
	}
}

func TestFlapping(t *testing.T) {
	lost := []string{health.CauseLost}
	var warnings []step
	for i := range 10 {
		warnings = append(
			warnings,
			step{
				200 * i, present(value(health.FieldGPUTemp, 99)), health.Degraded, []string{health.CauseTemperature},
			},
			step{200*i + 100, present(), health.Healthy, nil},
		)
	}
	for name, steps := range map[string][]step{
		"three trips within an hour, until a reboot": {
			{0, blank(health.Lost), health.Unhealthy, lost},
			{1, present(), health.Healthy, nil},
			{2, blank(health.Lost), health.Unhealthy, lost},
			{3, blank(health.Lost), health.Unhealthy, lost}, // the same trip
			{4, present(), health.Healthy, nil},
			{5, blank(health.Lost), health.Unhealthy, []string{health.CauseFlapping, health.CauseLost}},
			{6, present(), health.Unhealthy, []string{health.CauseFlapping}},
			{99999, present(), health.Unhealthy, []string{health.CauseFlapping}},
		},
		"trips over an hour ago do not count": {
			{0, blank(health.Lost), health.Unhealthy, lost},
			{1, present(), health.Healthy, nil},
			{10, blank(health.Lost), health.Unhealthy, lost},
			{11, present(), health.Healthy, nil},
			{3600, blank(health.Lost), health.Unhealthy, lost},
			{3601, present(), health.Healthy, nil},
			{3602, blank(health.Lost), health.Unhealthy, []string{health.CauseFlapping, health.CauseLost}},
		},
		"warnings are not trips": warnings,
	} {
		t.Run(name, func(t *testing.T) {
			for _, f := range runSteps(t, DefaultConfig(), steps)[0].Verdict.Findings {
				if f.Cause == health.CauseFlapping && (f.Clears != health.ClearsReboot ||
					!strings.HasSuffix(f.Reason, "3 times within 1h0m0s, most recently by lost")) {
					t.Errorf("flapping clears by %v: %s", f.Clears, f.Reason)
				}
			}
		})
	}
}

// With one trip the first fault stays; 0 turns the check off.
func TestFlappingLimits(t *testing.T) {
	for trips, want := range map[int][]string{0: nil, 1: {health.CauseFlapping}} {
		c := DefaultConfig()
		c.Flap.Trips = trips
		devices := judgeAll(c, nil, 0, nil, samples{gpu0.ID: blank(health.Lost)}, gpu0)
		devices = judgeAll(c, devices, 1, nil, nil, gpu0)
		if got := devices[0].Verdict.Causes(); !slices.Equal(got, want) {
			t.Errorf("%d trips: %v, want %v", trips, got, want)
		}
	}
}

func TestJudgeRecoveryMode(t *testing.T) {
	for name, c := range map[string]struct {
		mode  string
		steps []step
	}{
		"a condition that is over is not enough": {RecoverAfterReset, []step{
			{0, present(value(health.FieldRemapFailed, 1)), health.Unhealthy, []string{health.CauseRemapFailed}},
			{100, present(), health.Unhealthy, []string{health.CauseRemapFailed}},
			{101, blank(health.Lost), health.Unhealthy, []string{health.CauseRemapFailed, health.CauseLost}},
			{102, blank(health.Lost), health.Unhealthy, []string{health.CauseRemapFailed, health.CauseLost}},
			{103, present(), health.Healthy, nil},
		}},
		"the reset may precede recoverAfter": {RecoverAfterReset, []step{
			{0, present(value(health.FieldRemapFailed, 1)), health.Unhealthy, []string{health.CauseRemapFailed}},
			{1, blank(health.Lost), health.Unhealthy, []string{health.CauseRemapFailed, health.CauseLost}},
			{2, blank(health.Lost), health.Unhealthy, []string{health.CauseRemapFailed, health.CauseLost}},
			{3, present(), health.Unhealthy, []string{health.CauseRemapFailed}},
			{60, present(), health.Healthy, nil},
		}},
		"the reset may precede the end of the condition": {RecoverAfterReset, []step{
			{0, present(value(health.FieldRemapFailed, 1)), health.Unhealthy, []string{health.CauseRemapFailed}},
			{1, blank(health.Lost), health.Unhealthy, []string{health.CauseRemapFailed, health.CauseLost}},
			{2, blank(health.Lost), health.Unhealthy, []string{health.CauseRemapFailed, health.CauseLost}},
			{3, present(value(health.FieldRemapFailed, 1)), health.Unhealthy, []string{health.CauseRemapFailed}},
			{63, present(), health.Healthy, nil},
		}},
		"an inaccessible GPU needs no reset": {RecoverAfterReset, []step{
			{0, blank(health.Inaccessible), health.Unhealthy, []string{health.CauseInaccessible}},
			{1, present(), health.Healthy, nil},
		}},
		"the driver withdraws its recovery action": {RecoverAfterReset, []step{
			{0, present(value(health.FieldRecoveryAction, 2)), health.Unhealthy, []string{health.CauseRecoveryAction}},
			{1, present(), health.Healthy, nil},
		}},
		"a degraded finding clears itself": {RecoverAfterReset, []step{
			{0, present(value(health.FieldGPUTemp, 99)), health.Degraded, []string{health.CauseTemperature}},
			{60, present(), health.Healthy, nil},
		}},
		"only an operator or a reboot clears": {RecoverNever, []step{
			{0, blank(health.Lost), health.Unhealthy, []string{health.CauseLost}},
			{1, present(), health.Unhealthy, []string{health.CauseLost}},
			{9999, present(value(health.FieldRecoveryAction, 2)), health.Unhealthy, []string{health.CauseLost, health.CauseRecoveryAction}},
			{99999, present(), health.Unhealthy, []string{health.CauseLost, health.CauseRecoveryAction}},
		}},
	} {
		t.Run(c.mode+": "+name, func(t *testing.T) {
			config := DefaultConfig()
			config.Flap.Trips, config.Recovery = 0, c.mode
			runSteps(t, config, c.steps)
		})
	}
}

// A reset that did not cure a fault clears nothing, whenever the configuration lets resets clear findings.
func TestResetBeforeRecurrence(t *testing.T) {
	for recurs, want := range map[bool]health.State{false: health.Healthy, true: health.Unhealthy} {
		c := DefaultConfig()
		c.Recovery = RecoverNever
		devices := judgeAll(c, nil, 0, nil, samples{gpu0.ID: present(xids(48), value(health.FieldRecoveryAction, 1))}, gpu0)
		devices = judgeAll(c, devices, 10, nil, nil, gpu0) // the reset
		if recurs {
			devices = judgeAll(c, devices, 20, nil, samples{gpu0.ID: present(xids(48))}, gpu0)
		}
		wantStates(t, devices, map[health.DeviceID]health.State{gpu0.ID: health.Unhealthy})
		devices = judge(devices, 30, nil, gpu0)
		wantStates(t, devices, map[health.DeviceID]health.State{gpu0.ID: want})
	}
}

// The end of a condition clears an XID that needs a reset if only a reset ends the condition.
func TestEndsThatProveReset(t *testing.T) {
	for name, c := range map[string]struct {
		field    health.Field
		from, to float64
		proves   bool
	}{
		"double-bit errors":             {health.FieldDBEVolatile, 1, 0, true},
		"remap pending":                 {health.FieldRemapPending, 1, 0, true},
		"page retirement pending":       {health.FieldRetiredPending, 1, 0, true},
		"recovery action: reset":        {health.FieldRecoveryAction, float64(health.RecoveryReset), float64(health.RecoveryNone), true},
		"recovery action: drain":        {health.FieldRecoveryAction, float64(health.RecoveryDrainP2P), float64(health.RecoveryNone), false},
		"remap failed":                  {health.FieldRemapFailed, 1, 0, false},
		"unrepairable":                  {health.FieldUnrepairable, 1, 0, false},
		"retired pages":                 {health.FieldRetiredDBE, 63, 0, false},
		"temperature":                   {health.FieldGPUTemp, 99, 40, false},
		"clocks":                        {health.FieldClocksEvents, 8, 0, false},
		"double-bit errors that remain": {health.FieldDBEVolatile, 2, 1, false},
	} {
		s := present(xids(48), value(c.field, c.from), value(health.FieldRetiredSBE, 0))
		devices := judgeAll(DefaultConfig(), nil, 0, nil, samples{gpu0.ID: s}, gpu0)
		for _, seconds := range []int{10, 20} {
			s = present(value(c.field, c.to), value(health.FieldRetiredSBE, 0))
			devices = judgeAll(DefaultConfig(), devices, seconds, nil, samples{gpu0.ID: s}, gpu0)
		}
		if left := devices[0].Verdict.Has("xid-48"); left == c.proves {
			t.Errorf("%s: XID 48 is left: %v", name, left)
		}
	}
}

func TestJudgeSince(t *testing.T) {
	devices := runSteps(t, DefaultConfig(), []step{
		{0, present(), health.Healthy, nil},
		{5, present(xids(79)), health.Unhealthy, []string{"xid-79"}},
		{9, blank(health.Lost), health.Unhealthy, []string{"xid-79", health.CauseLost}},
		{10, blank(health.Lost), health.Unhealthy, []string{"xid-79", health.CauseLost}},
	})
	v := devices[0].Verdict
	if !v.Since.Equal(at(5)) || !v.Findings[0].Since.Equal(at(5)) || !v.Findings[1].Since.Equal(at(9)) {
		t.Fatalf("unhealthy since %v, findings %+v", v.Since, v.Findings)
	}
	if v := judge(devices, 20, nil, gpu0)[0].Verdict; !v.Since.Equal(at(20)) {
		t.Fatalf("healthy since %v", v.Since)
	}

	for _, p := range []health.Presence{health.Lost, health.Inaccessible, health.Detached, health.Missing} {
		var devices []health.DeviceState
		for seconds := range 5 {
			devices = judge(devices, seconds, samples{gpu0.ID: blank(p)}, gpu0)
		}
		if f := devices[0].Verdict.Findings; len(f) != 1 || !f[0].Since.Equal(at(0)) || !f[0].Last.Equal(at(4)) {
			t.Errorf("%v: %+v, want one finding from %v to %v", p, f, at(0), at(4))
		}
	}
}

func TestJudgeCountsXIDs(t *testing.T) {
	devices := judge(nil, 0, samples{gpu0.ID: present(xids(13, 13, 48))}, gpu0)
	first := devices[0].XIDs.Codes
	devices = judge(devices, 1, nil, gpu0)
	got := judge(devices, 2, samples{gpu0.ID: present(xids(13))}, gpu0)[0]
	if got.XIDs.Codes[13].Total != 3 || got.XIDs.Codes[48].Total != 1 || got.XIDs.Last != 13 || !got.XIDs.Newest().At.Equal(at(2)) {
		t.Fatalf("counts %v, last %+v", got.XIDs.Codes, got.XIDs.Newest())
	}
	if first[13].Total != 2 {
		t.Fatal("Measure modified the counts of an older snapshot")
	}
}

// A source that reconnects may not read the properties of a lost GPU.
func TestJudgeKeepsPropertiesOfLostGPU(t *testing.T) {
	whole := health.Device{ID: "GPU-0", Index: 0, Minor: 3, Model: "H100", MIGMode: true, NUMA: []int{1}}
	devices := judge(nil, 0, nil, whole)
	devices = judge(devices, 1, samples{"GPU-0": blank(health.Lost)}, health.Device{ID: "GPU-0", Minor: -1})
	if d := devices[0].Device; !d.MIGMode || d.Minor != 3 || d.Model != "H100" {
		t.Errorf("the lost GPU has the properties %+v", d)
	}
	if d := judge(devices, 2, nil, health.Device{ID: "GPU-0", Minor: 4})[0].Device; d.Minor != 4 {
		t.Errorf("the returned GPU still has the properties %+v", d)
	}
}

func TestRecoveryActions(t *testing.T) {
	for value0, want := range map[float64]struct {
		state  health.State
		action health.Action
		resets bool
	}{
		1:   {health.Degraded, health.ActionResetGPU, true},
		2:   {health.Unhealthy, health.ActionRebootNode, true},
		3:   {health.Unhealthy, health.ActionDrainP2P, false},
		4:   {health.Degraded, health.ActionResetGPU, true},
		5:   {health.Unhealthy, health.ActionRecoverIMEX, false},
		6:   {health.Unhealthy, health.ActionResetPCIeBus, true},
		7:   {health.Unhealthy, health.ActionRebootNode, true},
		8:   {health.Unhealthy, health.ActionCheckRecoveryAction, false},
		256: {health.Unhealthy, health.ActionCheckRecoveryAction, false},
		512: {health.Unhealthy, health.ActionCheckRecoveryAction, false},
	} {
		devices := judge(nil, 0, samples{gpu0.ID: present(value(health.FieldRecoveryAction, value0))}, gpu0)
		v := devices[0].Verdict
		if v.State != want.state || len(v.Findings) != 1 || v.Findings[0].Action != want.action {
			t.Errorf("%v: %v %+v", value0, v.State, v.Findings)
		}
		devices = judge(devices, 1, samples{gpu0.ID: present(value(health.FieldRecoveryAction, value0), xids(95))}, gpu0)
		devices = judge(devices, 2, nil, gpu0)
		if cleared := devices[0].Verdict.State == health.Healthy; cleared != want.resets {
			t.Errorf("the end of %v clears XID 95: %v, want %v", value0, cleared, want.resets)
		}
	}
}

// A single reading may be wrong: the return of a GPU proves a reset if the GPU was lost for half an interval at least.
func TestLossProvesReset(t *testing.T) {
	c := DefaultConfig()
	c.Interval = 4 * time.Second
	for seconds, proves := range []bool{0: false, 1: false, 2: true, 3: true} {
		devices := judgeAll(c, nil, 0, nil, samples{gpu0.ID: present(xids(95))}, gpu0)
		for lost := range seconds + 1 {
			devices = judgeAll(c, devices, 4+lost, nil, samples{gpu0.ID: blank(health.Lost)}, gpu0)
		}
		devices = judgeAll(c, devices, 8, nil, nil, gpu0)
		if reset := devices[0].Verdict.State == health.Healthy; reset != proves {
			t.Errorf("lost for %d s: %v", seconds, devices[0].Verdict.Causes())
		}
	}
}

// The driver has one recovery action at a time, so the newest is to be carried out, and its end counts.
func TestRecoveryActionChanges(t *testing.T) {
	for _, c := range []struct {
		values []float64
		action health.Action // of the last value
		state  health.State
		resets bool // none, after the last value, proves a reset
	}{
		{[]float64{5, 1}, health.ActionResetGPU, health.Unhealthy, true},
		{[]float64{3, 4}, health.ActionResetGPU, health.Unhealthy, true},
		{[]float64{2, 1}, health.ActionResetGPU, health.Unhealthy, true},
		{[]float64{1, 5}, health.ActionRecoverIMEX, health.Unhealthy, false},
		{[]float64{2, 5}, health.ActionRecoverIMEX, health.Unhealthy, false},
		{[]float64{9, 6}, health.ActionResetPCIeBus, health.Unhealthy, true},
		{[]float64{4, 1}, health.ActionResetGPU, health.Degraded, true},
	} {
		devices := judge(nil, 0, samples{gpu0.ID: present(xids(95))}, gpu0)
		for i, v := range c.values {
			devices = judge(devices, 1+i, samples{gpu0.ID: present(value(health.FieldRecoveryAction, v))}, gpu0)
		}
		f := devices[0].Verdict.OwnFinding(health.HasCause(health.CauseRecoveryAction))
		if last := recoveryOf(health.RecoveryAction(c.values[1])); f == nil || f.Action != c.action || f.State != c.state ||
			f.Reason != last.reason {
			t.Errorf("%v: %+v", c.values, f)
		}
		devices = judge(devices, 5, samples{gpu0.ID: present()}, gpu0)
		if got := devices[0].Verdict.State == health.Healthy; got != c.resets {
			t.Errorf("the end of %v clears XID 95: %v, want %v", c.values, got, c.resets)
		}
	}
}

// A source may still have the values from before a GPU was lost: it reads most fields less often than the presence.
func TestUnreachableGPUHasNoValues(t *testing.T) {
	full := func(p health.Presence) health.Sample {
		s := present(value(health.FieldPower, 613), value(health.FieldXID, 79))
		s.Presence = p
		return s
	}
	never := DefaultConfig()
	never.Recovery = RecoverNever
	for name, c := range map[string]struct {
		config   Config
		gpu, mig []health.Sample // in turn
		want     bool
	}{
		"present":                  {DefaultConfig(), []health.Sample{full(health.Present)}, []health.Sample{full(health.Present)}, true},
		"lost":                     {DefaultConfig(), []health.Sample{full(health.Lost)}, []health.Sample{full(health.Lost)}, false},
		"MIG device of a lost GPU": {DefaultConfig(), []health.Sample{full(health.Lost)}, []health.Sample{full(health.Present)}, false},
		"inaccessible": {
			DefaultConfig(),
			[]health.Sample{full(health.Inaccessible)},
			[]health.Sample{full(health.Inaccessible)},
			false,
		},
		"detached": {DefaultConfig(), []health.Sample{full(health.Detached)}, []health.Sample{full(health.Detached)}, false},
		"unknown": {
			DefaultConfig(),
			[]health.Sample{full(health.PresenceUnknown)},
			[]health.Sample{full(health.PresenceUnknown)},
			true,
		},
		"lost, then unknown": {
			DefaultConfig(),
			[]health.Sample{full(health.Lost), full(health.PresenceUnknown)},
			[]health.Sample{full(health.Lost), full(health.PresenceUnknown)},
			false,
		},
		"lost, then measured": {
			DefaultConfig(),
			[]health.Sample{full(health.Lost), full(health.Present)},
			[]health.Sample{full(health.Lost), full(health.Present)},
			true,
		},
		"measured, and still a finding": {
			never,
			[]health.Sample{full(health.Lost), full(health.Present)},
			[]health.Sample{full(health.Lost), full(health.Present)},
			true,
		},
	} {
		var devices []health.DeviceState
		for i := range c.gpu {
			devices = judgeAll(c.config, devices, i, nil, samples{gpu0.ID: c.gpu[i], mig0.ID: c.mig[i]}, gpu0, mig0)
		}
		for _, d := range devices {
			if got := d.Sample.Values != nil; got != c.want {
				t.Errorf("%s: %s has values: %v, want %v", name, d.Device.ID, got, c.want)
			}
		}
	}
}
