package health

import (
	"slices"
	"testing"
	"time"
)

func TestPastXIDs(t *testing.T) {
	old, away := XID{Code: 95, At: at(-60)}, XID{Code: 95, At: at(-10)}
	saved := []DeviceState{{Device: gpu0, XIDHistory: []XID{old}}}
	restart := ReadingContext{XIDHistory: true, FirstReading: true}
	for name, c := range map[string]struct {
		before []DeviceState
		rc     ReadingContext
		past   []XID
		count  uint64
	}{
		"an XID in the history is not new": {saved, restart, []XID{old}, 0},
		"another one is":                   {saved, restart, []XID{old, away}, 1},
		"and so is one of a new device":    {nil, restart, []XID{away}, 1},
		"without saved state all are old":  {nil, ReadingContext{FirstReading: true}, []XID{old, away}, 0},
		"the kernel log repeats with its time": {
			[]DeviceState{{Device: gpu0, XIDHistory: []XID{{Code: 79, At: at(-60)}}}},
			restart,
			[]XID{{Code: 79, At: at(-58)}},
			0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := judgeGPU(c.before, 0, present(past(c.past...)), c.rc)
			want := Healthy
			if c.count > 0 {
				want = Unhealthy
			}
			if d.XIDs.Codes[95].Total != c.count || len(d.XIDs.Codes) != int(c.count) || d.Verdict.State != want {
				t.Errorf("counted %v, %v; want %d, %v", d.XIDs.Codes, d.Verdict.State, c.count, want)
			}
			for _, x := range c.past {
				if !slices.ContainsFunc(d.XIDHistory, x.SameEvent) {
					t.Errorf("%+v is not in the history: %+v", x, d.XIDHistory)
				}
			}
			again := judgeGPU([]DeviceState{{Device: gpu0, XIDHistory: d.XIDHistory}}, 1, present(past(c.past...)), restart)
			if len(again.XIDs.Codes) != 0 || len(again.XIDHistory) != len(d.XIDHistory) {
				t.Errorf("after another restart it counts %v, history %+v", again.XIDs.Codes, again.XIDHistory)
			}
		})
	}
}

// The XIDs that DCGM lists for a new MIG device may be from an earlier one with the same number.
func TestPastXIDsOfNewMIGDevice(t *testing.T) {
	r, now := reading(1, samples{"MIG-0": {Presence: Present, Past: []XID{{Code: 48, At: at(0)}}}}, gpu0, mig0)
	for name, c := range map[string]struct {
		before []DeviceState
		count  uint64
	}{
		"first reading":                 {nil, 1},
		"listed late, with its GPU":     {judge(nil, 0, nil, gpu1), 1},
		"created later than its GPU":    {judge(nil, 0, nil, gpu0), 0},
		"created while others remained": {judge(nil, 0, nil, gpu0, mig1), 0},
	} {
		for _, d := range judgeReading(DefaultConfig(), c.before, r, ReadingContext{XIDHistory: true}, now) {
			if got := d.XIDs.Codes[48].Total; d.Device.ID == mig0.ID && got != c.count {
				t.Errorf("%s: counted %d, want %d", name, got, c.count)
			}
		}
	}
}

func TestXIDHistoryLimit(t *testing.T) {
	var d DeviceState
	for i := range 3 {
		s := present()
		for j := range maxXIDHistory - 1 {
			s.XIDs = append(s.XIDs, XID{Code: 13, At: at(0).Add(time.Duration(i*maxXIDHistory+j) * time.Millisecond)})
		}
		d = judgeGPU([]DeviceState{d}, i, s, ReadingContext{XIDHistory: true})
	}
	newest := at(0).Add(time.Duration(2*maxXIDHistory+maxXIDHistory-2) * time.Millisecond)
	if n := len(d.XIDHistory); n != maxXIDHistory || !d.XIDHistory[n-1].At.Equal(newest) {
		t.Errorf("%d XIDs up to %v, want %d up to %v", n, d.XIDHistory[n-1].At, maxXIDHistory, newest)
	}
}

// After a first start, the XID behind a reset request is unknown unless the source delivers it.
func TestRecoveryActionFromBeforeStart(t *testing.T) {
	reset, none := present(value(FieldRecoveryAction, 1)), present()
	first, restart := ReadingContext{}, ReadingContext{XIDHistory: true, FirstReading: true}
	type poll struct {
		at     int
		sample Sample
		want   State
	}
	for name, c := range map[string]struct {
		rc    ReadingContext // of the first poll
		polls []poll
	}{
		"set at the first start": {first, []poll{
			{0, reset, Unhealthy},
			{1, reset, Unhealthy},
			{100, present(without(FieldRecoveryAction)), Unhealthy},
			{200, reset, Unhealthy},
			{201, none, Healthy},
			{202, reset, Degraded},
		}},
		"measured late": {first, []poll{
			{0, blank(PresenceUnknown), Unknown},
			{1, present(without(FieldRecoveryAction)), Healthy},
			{2, reset, Unhealthy},
		}},
		"set after the start":           {first, []poll{{0, none, Healthy}, {1, reset, Degraded}}},
		"with its XID":                  {first, []poll{{0, present(value(FieldRecoveryAction, 1), xids(63)), Degraded}, {1, reset, Degraded}}},
		"with the report of the action": {first, []poll{{0, present(value(FieldRecoveryAction, 1), xids(154)), Unhealthy}}},
		"with an XID of an application": {
			first,
			[]poll{{0, present(value(FieldRecoveryAction, 1), xids(13), past(XID{Code: 95, At: at(-10)})), Unhealthy}},
		},
		"with another application's XID": {
			first,
			[]poll{{0, present(value(FieldRecoveryAction, 1), xids(43), past(XID{Code: 95, At: at(-10)})), Unhealthy}},
		},
		"drain and reset": {first, []poll{
			{0, present(value(FieldRecoveryAction, 4)), Unhealthy},
			{1, reset, Unhealthy},
			{2, none, Healthy},
		}},
		"set while the agent was down": {restart, []poll{{0, reset, Unhealthy}, {1, reset, Unhealthy}, {2, none, Healthy}}},
		"with its XID, while it was down": {
			restart,
			[]poll{{0, present(value(FieldRecoveryAction, 1), past(XID{Code: 63, At: at(-9)})), Degraded}, {1, reset, Degraded}},
		},
		"set before the agent's restart": {ReadingContext{XIDHistory: true}, []poll{{0, reset, Degraded}, {1, reset, Degraded}}},
	} {
		t.Run(name, func(t *testing.T) {
			var before []DeviceState
			for _, p := range c.polls {
				d := judgeGPU(before, p.at, p.sample, c.rc)
				if d.Verdict.State != p.want {
					t.Fatalf("at %d s: %v %v, want %v", p.at, d.Verdict.State, d.Verdict.Causes(), p.want)
				}
				before, c.rc.FirstReading = []DeviceState{d}, name == "set before the agent's restart"
			}
		})
	}
}

// The driver's clock may differ from the agent's: recoverAfter counts from the XID's arrival.
func TestXIDWithOtherClock(t *testing.T) {
	rc := ReadingContext{XIDHistory: true}
	for _, offset := range []time.Duration{0, time.Second, 5 * time.Hour, -time.Second, -5 * time.Hour} {
		s := present()
		s.XIDs = []XID{{Code: 999, At: at(0).Add(offset)}}
		d := judgeGPU(nil, 0, s, rc)
		if d.Verdict.State != Degraded || d.XIDs.Newest().At.After(at(0)) || d.Verdict.Findings[0].Since.After(at(0)) ||
			d.Verdict.Findings[0].Since.Before(at(-600)) {
			t.Errorf("%v: %+v, last XID %+v", offset, d.Verdict.Findings, d.XIDs.Newest())
		}
		for seconds, want := range []State{59: Degraded, 60: Healthy} {
			if want == Unknown {
				continue
			}
			d = judgeGPU([]DeviceState{d}, seconds, present(), rc)
			if d.Verdict.State != want {
				t.Errorf("%v: %v after %d s, want %v", offset, d.Verdict.State, seconds, want)
			}
		}
		if !slices.Equal(d.XIDHistory, []XID{{Code: 999, At: at(0).Add(offset)}}) {
			t.Errorf("the history lost the stream's own time: %+v", d.XIDHistory)
		}
	}

	s := present()
	s.XIDs = []XID{{Code: 144, At: at(0).Add(-5 * time.Hour)}}
	d := judgeGPU([]DeviceState{judgeGPU(nil, 0, s, rc)}, 2, present(value(FieldRecoveryAction, 1)), rc)
	if d.Verdict.State != Unhealthy {
		t.Errorf("the recovery action does not decide the severity: %v", d.Verdict.Causes())
	}
}

// The last XID of a verdict is the XID of its newest own finding.
func TestLastXID(t *testing.T) {
	devices := judge(nil, 0, samples{gpu0.ID: present(value(FieldGPUTemp, 99))}, gpu0, mig0)
	if got := devices[0].Verdict.LastXID(); got != 0 {
		t.Errorf("without an XID: %d", got)
	}
	for i, code := range []int{95, 48} {
		devices = judge(devices, 1+i, samples{gpu0.ID: present(xids(code))}, gpu0, mig0)
		if got := devices[0].Verdict.LastXID(); got != code {
			t.Errorf("%d, want %d", got, code)
		}
	}
	if got := devices[1].Verdict.LastXID(); got != 0 {
		t.Errorf("the MIG device inherits XID %d", got)
	}
}

// Past XIDs were never judged if the history lacks them, and if the device did not appear after its GPU.
func TestUnjudgedPast(t *testing.T) {
	known, missed := XID{Code: 48, At: at(1)}, XID{Code: 95, At: at(2)}
	before := judge(nil, 0, samples{gpu0.ID: present(past(known))}, gpu0)
	r, _ := reading(3, samples{gpu0.ID: present(past(known, missed)), mig0.ID: {Past: []XID{missed}}, gpu1.ID: present(past(known))}, gpu0,
		mig0, gpu1)
	got := r.UnjudgedPast(before)
	if len(got) != 2 || !slices.Equal(got[gpu0.ID], []XID{missed}) || !slices.Equal(got[gpu1.ID], []XID{known}) {
		t.Errorf("%+v", got)
	}
	if got := r.UnjudgedPast(nil); len(got) != 3 || !slices.Equal(got[mig0.ID], []XID{missed}) {
		t.Errorf("of the first reading: %+v", got)
	}
}
