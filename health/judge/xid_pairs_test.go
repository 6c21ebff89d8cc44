package judge

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// report is one judging of GPU-0: a reading of the source, or of the event sources.
type report struct {
	at      int // seconds
	events  bool
	witness health.Witness // of the XIDs of events
	xids    []int
	past    []int // of a reading of the source
	action  int   // FieldRecoveryAction; in events only if hasAct
	hasAct  bool
	blind   bool // the source measures nothing
	lacks   bool // the source has no recovery action
	counts  int  // XIDs in total since the start
	state   health.State
}

func (s report) judge(c Config, before []health.DeviceState, rc ReadingContext) []health.DeviceState {
	sample := present(value(health.FieldRecoveryAction, float64(s.action)))
	if s.lacks {
		delete(sample.Values, health.FieldRecoveryAction)
	}
	if s.blind {
		sample = blank(health.PresenceUnknown)
	}
	judge := judgeReading
	if s.events {
		judge = observe
		sample = blank(health.PresenceUnknown)
		if s.hasAct {
			sample.Values = map[health.Field]float64{health.FieldRecoveryAction: float64(s.action)}
		}
	}
	for _, code := range s.xids {
		x := health.XID{Code: code, At: at(s.at), Witness: s.witness}
		sample.XIDs = append(sample.XIDs, x)
	}
	for i, code := range s.past {
		sample.Rows = append(sample.Rows, health.XIDRow{Code: code, At: at(-i - 1).UnixMicro()})
	}
	r, now := reading(s.at, samples{gpu0.ID: sample}, gpu0)
	return judge(c, before, r, rc, now)
}

func total(d health.DeviceState) (n int) {
	for _, t := range d.XIDs.Codes {
		n += int(t.Total)
	}
	return n
}

func times(n, code int) []int { return slices.Repeat([]int{code}, n) }

func TestXIDsOfTwoWitnesses(t *testing.T) {
	const nvml, log = health.WitnessNVML, health.WitnessKernelLog
	source := func(at, counts int, xids ...int) report { return report{at: at, xids: xids, counts: counts} }
	event := func(at, counts int, xids ...int) report {
		return report{at: at, events: true, witness: nvml, xids: xids, counts: counts}
	}
	kernel := func(at, counts int, xids ...int) report {
		return report{at: at, events: true, witness: log, xids: xids, counts: counts}
	}
	blind := func(at, counts int) report { return report{at: at, blind: true, counts: counts} }
	for name, c := range map[string]struct {
		witnesses []health.Witness
		steps     []report
	}{
		"event first":  {[]health.Witness{nvml}, []report{source(0, 0), event(1, 1, 31), source(2, 1, 31), source(3, 2, 31)}},
		"source first": {[]health.Witness{nvml}, []report{source(0, 0), source(1, 1, 31), event(2, 1, 31), event(3, 2, 31)}},
		"events off":   {nil, []report{source(0, 0, []int{}...), source(1, 2, 31, 31), source(2, 3, 31)}},
		"other numbers are no twins": {[]health.Witness{nvml}, []report{
			source(0, 0), event(1, 1, 31), source(2, 2, 13), event(3, 2, 13),
			source(4, 2, 31),
		}},
		"storm of one number": {[]health.Witness{nvml}, []report{
			source(0, 0), event(1, 1000, times(1000, 31)...),
			source(2, 1000, times(999, 31)...), source(3, 1001, 31, 31),
		}},
		"three witnesses, each order": {[]health.Witness{nvml, log}, []report{
			source(0, 0), event(1, 1, 31), kernel(1, 1, 31), source(2, 1, 31),
			kernel(3, 2, 31), source(3, 2, 31), event(4, 2, 31),
		}},
		"three witnesses, one behind": {[]health.Witness{nvml, log}, []report{
			source(0, 0), event(1, 2, 31, 31), kernel(1, 2, 31), source(2, 2, 31),
			kernel(3, 3, 31, 31), source(4, 3, 31, 31), event(4, 3, 31),
		}},
		"source loses one": {[]health.Witness{nvml}, []report{
			source(0, 0), event(1, 1, 31), source(2, 1), source(4, 1), source(6, 1),
			source(8, 1), source(10, 1), source(12, 1), source(14, 1), source(16, 1), source(18, 2, 31),
		}},
		"a stalled source loses none": {[]health.Witness{nvml}, []report{source(0, 0), event(1, 1, 31), source(7200, 1), source(7201, 1, 31)}},
		"a blind source loses none": {[]health.Witness{nvml}, []report{
			source(0, 0), event(1, 1, 31), blind(20, 1), blind(40, 1), blind(60, 1),
			blind(80, 1), blind(81, 1), blind(83, 1), blind(85, 1), blind(87, 1), blind(89, 1), source(90, 1, 31),
		}},
		"event source loses one":     {[]health.Witness{nvml}, []report{source(0, 0), source(1, 1, 31), event(11, 2, 31), source(12, 2, 31)}},
		"event source is turned off": {[]health.Witness{nvml}, []report{source(0, 0), source(1, 1, 31), source(2, 2, 31)}},
		"source reads one per second": {[]health.Witness{nvml}, append([]report{source(0, 0), event(1, 100, times(100, 31)...)},
			drain(100, 31)...)},
	} {
		t.Run(name, func(t *testing.T) {
			var devices []health.DeviceState
			for _, s := range c.steps {
				devices = s.judge(DefaultConfig(), devices, ReadingContext{XIDHistory: true, Witnesses: c.witnesses})
				if got := total(devices[0]); got != s.counts {
					t.Fatalf("at %d s: %d XIDs count, want %d; owed %+v", s.at, got, s.counts, devices[0].XIDs.Owed)
				}
				if got := len(devices[0].Sample.XIDs); got > len(s.xids) {
					t.Fatalf("at %d s: the sample has %d XIDs of %d", s.at, got, len(s.xids))
				}
			}
		})
	}
}

// drain returns readings of a source that delivers n XIDs one per second, as DCGM does.
func drain(n, code int) (all []report) {
	for i := range n {
		all = append(all, report{at: 2 + i, xids: []int{code}, counts: n})
	}
	return append(all, report{at: 2 + n, xids: []int{code}, counts: n + 1})
}

// A storm takes no more memory than a few XIDs.
func TestOwedXIDsAreBounded(t *testing.T) {
	devices := report{}.judge(DefaultConfig(), nil, ReadingContext{})
	rc := ReadingContext{Witnesses: []health.Witness{health.WitnessNVML, health.WitnessKernelLog}}
	for i := range 300 { // more codes than entries
		devices = report{at: i, events: true, witness: health.WitnessNVML, xids: append(times(25, 31), i)}.judge(DefaultConfig(), devices, rc)
		storm := slices.DeleteFunc(slices.Clone(devices[0].XIDs.Owed), func(a health.OwedXIDs) bool { return a.Code != 31 })
		if n := len(devices[0].XIDs.Owed); n > 256 || len(storm) > 20 {
			t.Fatalf("%d entries, %d of the storm", n, len(storm))
		}
	}
	for _, code := range []int{31, 299} {
		if !slices.ContainsFunc(
			devices[0].XIDs.Owed, func(a health.OwedXIDs) bool { return a.Code == code && a.Witness == health.WitnessSource },
		) {
			t.Errorf("XID %d is not owed: %+v", code, devices[0].XIDs.Owed)
		}
	}
}

// A recovery action of an event makes the GPU as bad as one of the source does. Its end in the source's values, which may be older than the
// event at first, is evidence of a reset after the event. Its end in an event is none.
func TestRecoveryActionOfEvent(t *testing.T) {
	rc := ReadingContext{XIDHistory: true, Witnesses: []health.Witness{health.WitnessNVML}}
	event := func(at, action int, state health.State, xids ...int) report {
		return report{at: at, events: true, witness: health.WitnessNVML, hasAct: true, action: action, xids: xids, state: state, counts: 1}
	}
	xid := func(at, code, counts int) report {
		return report{at: at, events: true, witness: health.WitnessNVML, xids: []int{code}, state: health.Unhealthy, counts: counts}
	}
	source := func(at, action int, state health.State, xids ...int) report {
		return report{at: at, action: action, state: state, counts: 1, xids: xids}
	}
	lacks := func(at int, state health.State, xids ...int) report {
		return report{at: at, lacks: true, state: state, counts: 1, xids: xids}
	}
	counted := func(n int, r report) report { r.counts = n; return r }
	start := report{at: 0, state: health.Healthy}
	for name, steps := range map[string][]report{
		"a reset while the source is stalled": {
			start, event(10, 1, health.Unhealthy, 95), source(600, 0, health.Unhealthy, 95), source(601, 0, health.Unhealthy),
			source(602, 0, health.Unhealthy),
			source(603, 0, health.Unhealthy), source(604, 0, health.Healthy),
		},
		"a reset before the source has reported the XID": {
			start, event(10, 1, health.Unhealthy, 95), source(600, 0, health.Unhealthy), source(602, 0, health.Unhealthy),
			source(604, 0, health.Unhealthy),
			source(606, 0, health.Healthy), source(607, 0, health.Healthy, 95),
		},
		"an older none ends nothing": {
			start, counted(0, event(10, 2, health.Unhealthy)), counted(0, source(10, 0, health.Unhealthy)),
			counted(0, source(11, 0, health.Unhealthy)),
			counted(0, source(12, 2, health.Unhealthy)), counted(0, source(60, 2, health.Unhealthy)), counted(0, source(61, 0, health.Healthy)),
		},
		"an XID after the action may be of after the reset": {
			start, event(10, 1, health.Unhealthy, 95), xid(20, 95, 2), counted(2, source(600, 0, health.Unhealthy, 95, 95)),
			counted(2, source(602, 0, health.Unhealthy)),
			counted(2, source(604, 0, health.Unhealthy)), counted(2, source(606, 0, health.Unhealthy)), counted(2, source(608, 0, health.Unhealthy)),
		},
		"an XID before the action was read again": {
			start, event(10, 1, health.Unhealthy, 95), xid(20, 95, 2), counted(2, event(20, 1, health.Unhealthy)),
			counted(2, source(600, 0, health.Unhealthy, 95, 95)),
			counted(2, source(602, 0, health.Unhealthy)), counted(2, source(604, 0, health.Unhealthy)), counted(2, source(606, 0, health.Healthy)),
		},
		"the source lacks the field": {
			counted(0, lacks(0, health.Healthy)), event(10, 2, health.Unhealthy, 31), lacks(20, health.Unhealthy, 31), lacks(30, health.Unhealthy),
			event(40, 0, health.Healthy),
			lacks(41, health.Healthy),
		},
		"the source lacks the field, and an XID needs a reset": {
			counted(0, lacks(0, health.Healthy)), event(10, 1, health.Unhealthy, 95), lacks(20, health.Unhealthy, 95),
			event(40, 0, health.Unhealthy), lacks(41, health.Unhealthy),
		},
		"an event has no value that others lack": {
			start, xid(10, 95, 1), source(11, 0, health.Unhealthy), source(12, 0, health.Unhealthy, 95),
		},
	} {
		t.Run(name, func(t *testing.T) {
			var devices []health.DeviceState
			for _, s := range steps {
				devices = s.judge(DefaultConfig(), devices, rc)
				if v := devices[0].Verdict; v.State != s.state || total(devices[0]) != s.counts {
					t.Fatalf("at %d s: %v %v, want %v; %d XIDs, want %d", s.at, v.State, v.Causes(), s.state, total(devices[0]), s.counts)
				}
			}
		})
	}
}

// What an event does not report stays as it is.
func TestEventsKeepMeasurements(t *testing.T) {
	c := DefaultConfig()
	full := present(value(health.FieldGPUTemp, 95), value(health.FieldDBEVolatile, 1))
	full.Checked, full.Incidents = true, []health.Incident{{Code: 3, Severity: health.SeverityFail}, {Code: 4, Severity: health.SeverityWarn}}
	r, now := reading(0, samples{gpu0.ID: full, gpu1.ID: blank(health.Lost), mig0.ID: migXIDs(13)}, gpu0, mig0, gpu1)
	before := judgeReading(c, nil, r, ReadingContext{XIDHistory: true}, now)
	events := &health.Reading{
		Samples: []health.Sample{{Device: gpu0.ID, At: at(3600), XIDs: []health.XID{{Code: 79, At: at(3600), Witness: health.WitnessNVML}}}},
	}
	after := observe(c, before, events, ReadingContext{XIDHistory: true, Witnesses: []health.Witness{health.WitnessNVML}}, at(3600))
	if len(after) != len(before) {
		t.Fatalf("%d devices, want %d", len(after), len(before))
	}
	for i, d := range after {
		s, want := d.Sample, before[i].Sample
		if s.Presence != want.Presence || !s.At.Equal(want.At) || s.Checked != want.Checked || len(s.Incidents) != len(want.Incidents) ||
			len(s.Values) != len(want.Values) {
			t.Errorf("%s: sample %+v, want %+v", d.Device.ID, s, want)
		}
		for _, f := range before[i].Verdict.Findings {
			if !slices.Contains(d.Verdict.Causes(), f.Cause) {
				t.Errorf("%s: %s ended", d.Device.ID, f.Cause)
			}
		}
		if xids, want := len(s.XIDs), map[health.DeviceID]int{gpu0.ID: 1}[d.Device.ID]; xids != want {
			t.Errorf("%s: %d XIDs, want %d", d.Device.ID, xids, want)
		}
	}
	if !after[0].Verdict.Has("xid-79") || after[0].Memory.Unconfirmed["x"] != before[0].Memory.Unconfirmed["x"] {
		t.Errorf("%+v", after[0].Verdict)
	}
	if again := judgeAndView(c, before, r, nil, now); again[0].Verdict.State != health.Unhealthy {
		t.Error("the devices before were modified")
	}
}

// The evidence of a reset that may be older than an XID does not cure it.
func TestXIDNewerThanMeasurement(t *testing.T) {
	rc := ReadingContext{XIDHistory: true, Witnesses: []health.Witness{health.WitnessNVML}}
	dbe := func(n float64, x ...int) health.Sample { return present(value(health.FieldDBEVolatile, n), xids(x...)) }
	for name, c := range map[string]struct {
		after []health.Sample // one per second after the XID at 10.5 s
		cured bool
	}{
		"measured before the XID":            {[]health.Sample{dbe(0), dbe(0)}, false},
		"the fault still shows, then ends":   {[]health.Sample{dbe(2), dbe(2), dbe(2), dbe(2), dbe(0)}, true},
		"the source has reported it as well": {[]health.Sample{dbe(2, 48), dbe(0)}, true},
		"reported and ended at once":         {[]health.Sample{dbe(0, 48), dbe(0)}, false},
		"not measured since the XID": {
			[]health.Sample{present(without(health.FieldDBEVolatile), xids(48)), present(without(health.FieldDBEVolatile)), dbe(0), dbe(0)}, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := judgeGPU(nil, 9, dbe(2), rc)
			d = judgeGPU([]health.DeviceState{d}, 10, dbe(2), rc)
			x := health.Sample{Device: gpu0.ID, At: at(10).Add(time.Second / 2), XIDs: []health.XID{{Code: 48, Witness: health.WitnessNVML}}}
			d = observe(DefaultConfig(), []health.DeviceState{d}, &health.Reading{Samples: []health.Sample{x}}, rc, x.At)[0]
			for i, s := range c.after {
				d = judgeGPU([]health.DeviceState{d}, 11+i, s, rc)
			}
			if cured := !d.Verdict.Has("xid-48"); cured != c.cured {
				t.Errorf("cured: %v; %v", cured, d.Verdict.Causes())
			}
		})
	}
}

// A poll that began before an XID 79 does not show the return of the GPU, although it found the GPU lost before.
func TestLostGPUReportedDuringPoll(t *testing.T) {
	for _, began := range []time.Duration{time.Second, 2 * time.Second} {
		rc := ReadingContext{Witnesses: []health.Witness{health.WitnessNVML}}
		d := judgeGPU(nil, 8, present(), rc)
		d = judgeGPU([]health.DeviceState{d}, 9, blank(health.Lost), rc)
		x := health.Sample{Device: gpu0.ID, At: at(9).Add(3 * time.Second / 2), XIDs: []health.XID{{Code: 79, Witness: health.WitnessNVML}}}
		d = observe(DefaultConfig(), []health.DeviceState{d}, &health.Reading{Samples: []health.Sample{x}}, ReadingContext{}, x.At)[0]
		s := present()
		s.Device, s.At = gpu0.ID, at(9).Add(began)
		d = judgeReading(DefaultConfig(), []health.DeviceState{d}, &health.Reading{Devices: []health.Device{gpu0}, Samples: []health.Sample{s}},
			rc, at(11))[0]
		if got, want := d.Verdict.Has("xid-79"), began < 2*time.Second; got != want {
			t.Errorf("%v: xid-79 %v, want %v", began, got, want)
		}
	}
}

// The evidence of a reset does not cure an XID of a MIG device that affects the whole GPU and that the source has not reported.
func TestMIGXIDNewerThanMeasurement(t *testing.T) {
	rc := ReadingContext{Witnesses: []health.Witness{health.WitnessNVML}}
	dbe := func(seconds int, n float64, devices []health.DeviceState) []health.DeviceState {
		r, now := reading(seconds, samples{gpu0.ID: present(value(health.FieldDBEVolatile, n))}, gpu0, mig0)
		return judgeReading(DefaultConfig(), devices, r, rc, now)
	}
	devices := dbe(10, 2, dbe(9, 2, nil))
	x := health.Sample{Device: mig0.ID, At: at(11), XIDs: []health.XID{{Code: 95, Witness: health.WitnessNVML}}}
	devices = observe(DefaultConfig(), devices, &health.Reading{Samples: []health.Sample{x}}, ReadingContext{}, x.At)
	for i, n := range []float64{0, 0} {
		if devices = dbe(12+i, n, devices); !devices[0].Verdict.Has("xid-95") {
			t.Errorf("cured by the reading at %d s: %v", 12+i, devices[0].Verdict.Causes())
		}
	}
}

// A recovery action that an event reports counts as explained, also before the source's first value. So is the source's first one by an XID
// of an event.
func TestEventsExplainRecoveryAction(t *testing.T) {
	first := []health.DeviceState{judgeGPU(nil, 0, present(without(health.FieldRecoveryAction)), ReadingContext{FirstReading: true})}
	rc := ReadingContext{XIDHistory: true, FirstReading: true}
	wants := present(value(health.FieldRecoveryAction, float64(health.RecoveryReset)))
	for name, c := range map[string]struct {
		event health.Sample
		state health.State
	}{
		"no event": {health.Sample{}, health.Unhealthy},
		"action":   {health.Sample{Values: map[health.Field]float64{health.FieldRecoveryAction: float64(health.RecoveryReset)}}, health.Degraded},
		"XID":      {health.Sample{XIDs: []health.XID{{Code: 63, Witness: health.WitnessNVML}}}, health.Degraded},
	} {
		c.event.Device, c.event.At = gpu0.ID, at(0)
		cfg := DefaultConfig()
		devices := observe(cfg, first, &health.Reading{Samples: []health.Sample{c.event}}, ReadingContext{XIDHistory: true}, at(0))
		if d := judgeGPU(devices, 100, wants, rc); d.Verdict.State != c.state {
			t.Errorf("%s: %v %+v, want %v", name, d.Verdict.State, d.Verdict.Findings, c.state)
		}
	}
}

// A detail that a later witness has reaches the last XID.
func TestDetailOfLaterWitness(t *testing.T) {
	rc := ReadingContext{XIDHistory: true, Witnesses: []health.Witness{health.WitnessNVML, health.WitnessKernelLog}}
	d := judgeGPU(nil, 0, present(), ReadingContext{})
	x := health.XID{Code: 31, At: at(1), Witness: health.WitnessNVML}
	event := func(before []health.DeviceState, id health.DeviceID, x health.XID) []health.DeviceState {
		return observe(DefaultConfig(), before, &health.Reading{Samples: []health.Sample{{Device: id, XIDs: []health.XID{x}}}}, rc, x.At)
	}
	d = event([]health.DeviceState{d}, gpu0.ID, x)[0]
	x.Witness, x.Detail = health.WitnessKernelLog, health.XIDDetail{Process: "python3", PID: 7194}
	d = event([]health.DeviceState{d}, gpu0.ID, x)[0]
	mig := judge(nil, 0, nil, gpu0, mig0)
	for _, w := range []health.XID{
		{Code: 95, At: at(1), Witness: health.WitnessNVML},
		{Code: 95, At: at(2), Witness: health.WitnessKernelLog, Detail: x.Detail},
	} {
		mig = event(mig, mig0.ID, w)
	}
	if mig[1].XIDs.Newest().Detail != x.Detail || total(mig[0]) != 0 || total(mig[1]) != 1 {
		t.Errorf("%+v", mig)
	}
	if d.XIDs.Newest().Witness != health.WitnessNVML || d.XIDs.Newest().Detail != x.Detail || d.XIDs.Codes[31].Total != 1 ||
		d.XIDs.Codes[31].Newest.Witness != health.WitnessNVML {
		t.Errorf("%+v", d)
	}
}

// An XID that the source never reports is not owed for long, although the source goes on to report XIDs of other GPUs that
// are newer, or that no other witness reports. The next one with its number then counts.
func TestLostXIDExpiresAmongOthers(t *testing.T) {
	for name, c := range map[string]struct {
		events  bool // the event source reports the XIDs of the other GPU, too
		backlog int  // older XIDs of the other GPU that the source still reports
		lost    int  // older XIDs of the other GPU that it never reports
		every   int  // seconds between later XIDs of the other GPU
		within  int  // seconds
	}{
		"newer ones":                 {events: true, every: 10, within: 330},
		"older, then newer ones":     {events: true, backlog: 600, every: 10, within: 930},
		"newer ones, one behind":     {events: true, lost: 1, every: 1, within: 400},
		"of unknown age":             {every: 10, within: 330},
		"older, then of unknown age": {backlog: 600, every: 10, within: 930},
	} {
		t.Run(name, func(t *testing.T) {
			rc := ReadingContext{XIDHistory: true, Witnesses: []health.Witness{health.WitnessNVML}}
			sample := func(d health.Device, second int, w health.Witness, codes ...int) health.Sample {
				s := present()
				s.Device, s.At = d.ID, at(second)
				for _, code := range codes {
					s.XIDs = append(s.XIDs, health.XID{Code: code, At: at(second), Witness: w})
				}
				return s
			}
			var devices []health.DeviceState
			judge := func(second int, events bool, of0, of1 []int) {
				t.Helper()
				w, judge := health.WitnessSource, judgeReading
				if events {
					w, judge = health.WitnessNVML, observe
				}
				r := &health.Reading{
					Devices: []health.Device{gpu0, gpu1}, Samples: []health.Sample{sample(gpu0, second, w, of0...), sample(gpu1, second, w, of1...)},
				}
				devices = judge(DefaultConfig(), devices, r, rc, at(second))
			}
			judge(0, false, nil, nil)
			judge(0, true, nil, times(c.backlog+c.lost, 31))
			judge(1, true, []int{79}, nil)
			for second := 2; second < c.within; second++ {
				var of1 []int
				switch left := c.backlog - (second - 2); {
				case left > 0:
					of1 = []int{31}
				case second%c.every == 0:
					of1 = []int{31}
					if c.events {
						judge(second, true, nil, of1)
					}
				}
				judge(second, false, nil, of1)
				if second == c.backlog+2 && len(devices[0].XIDs.Owed) == 0 {
					t.Fatal("not owed while the source may still report it")
				}
			}
			judge(c.within, false, []int{79}, nil)
			if n := devices[0].XIDs.Codes[79].Total; n != 2 {
				t.Errorf("%d XIDs, want 2: the second one was taken for the lost one: %+v", n, devices[0].XIDs.Owed)
			}
		})
	}
}
