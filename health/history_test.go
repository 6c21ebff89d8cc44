package health

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// past gives a sample XIDs of before the start.
func past(list ...XID) func(*Sample) { return func(s *Sample) { s.Past = list } }

// judgeBasis judges one sample of one GPU.
func judgeBasis(known []DeviceState, seconds int, s Sample, b Basis) DeviceState {
	s.Device, s.At = gpu0.ID, at(seconds)
	return Judge(DefaultConfig(), known, &Reading{Devices: []Device{gpu0}, Samples: []Sample{s}}, b, s.At)[0]
}

// XIDs of before the start are new if the memory of this boot lacks them, and history without such a memory.
func TestXIDsWhileTheAgentWasAway(t *testing.T) {
	old, away := XID{95, at(-60)}, XID{95, at(-10)}
	remembered := []DeviceState{{Device: gpu0, Seen: []XID{old}}}
	for name, c := range map[string]struct {
		known []DeviceState
		b     Basis
		past  []XID
		count uint64
	}{
		"a row that was seen is not new":      {remembered, Basis{History: true, First: true}, []XID{old}, 0},
		"another row is":                      {remembered, Basis{History: true, First: true}, []XID{old, away}, 1},
		"so is a row of a device without any": {nil, Basis{History: true, First: true}, []XID{away}, 1},
		"without a memory all are history":    {nil, Basis{First: true}, []XID{old, away}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			d := judgeBasis(c.known, 0, present(past(c.past...)), c.b)
			want := Healthy
			if c.count > 0 {
				want = Unhealthy
			}
			if d.XIDCounts[95] != c.count || d.Verdict.State != want {
				t.Errorf("counted %d, %v; want %d, %v", d.XIDCounts[95], d.Verdict.State, c.count, want)
			}
			for _, x := range c.past {
				if !slices.Contains(d.Seen, x) {
					t.Errorf("%+v is not remembered: %+v", x, d.Seen)
				}
			}
			// After another restart it is known.
			again := judgeBasis([]DeviceState{{Device: gpu0, Seen: d.Seen}}, 1, present(past(c.past...)), Basis{History: true, First: true})
			if len(again.XIDCounts) != 0 || len(again.Seen) != len(d.Seen) {
				t.Errorf("a second time it counts %v, seen %+v", again.XIDCounts, again.Seen)
			}
		})
	}

	// The kernel's log and the driver tell of one event with different times.
	d := judgeBasis([]DeviceState{{Device: gpu0, Seen: []XID{{79, at(-60)}}}}, 0, present(past(XID{79, at(-58)})), Basis{History: true, First: true})
	if len(d.XIDCounts) != 0 {
		t.Errorf("one event counts twice: %v", d.XIDCounts)
	}
}

// What DCGM holds of a MIG device that was made since the start may be of another one that had its number.
func TestPastOfANewPartition(t *testing.T) {
	r, now := reading(1, map[DeviceID]Sample{"MIG-0": {Presence: Present, Past: []XID{{48, at(0)}}}}, gpu0, mig0)
	for _, c := range []struct {
		known []DeviceState
		count uint64
	}{{nil, 1}, {fold(t, nil, 0, nil, gpu1), 1}, {fold(t, nil, 0, nil, gpu0), 0}} { // the last: its GPU was there before it
		known := Judge(DefaultConfig(), c.known, r, Basis{History: true}, now)
		for _, d := range known {
			if got := d.XIDCounts[48]; d.Device.ID == mig0.ID && got != c.count {
				t.Errorf("after %d devices: counted %d, want %d", len(c.known), got, c.count)
			}
		}
	}
}

func TestSeenIsBounded(t *testing.T) {
	var known []DeviceState
	for i := range 3 {
		var list []XID
		for j := range maxSeen - 1 {
			list = append(list, XID{13, at(0).Add(time.Duration(i*maxSeen+j) * time.Millisecond)})
		}
		s := present()
		s.XIDs = list
		known = []DeviceState{judgeBasis(known, i, s, Basis{History: true})}
	}
	if n := len(known[0].Seen); n != maxSeen {
		t.Errorf("%d are kept, want %d", n, maxSeen)
	}
	if last := known[0].Seen[maxSeen-1].At; !last.Equal(at(0).Add(time.Duration(2*maxSeen+maxSeen-2) * time.Millisecond)) {
		t.Errorf("the newest is of %v", last)
	}
}

// A first start does not know which XID the driver wants a reset for.
func TestRecoveryActionOfBeforeTheStart(t *testing.T) {
	wants, none := present(value(FieldRecoveryAction, 1)), present()
	type look struct {
		at     int
		sample Sample
		want   State
	}
	for name, c := range map[string]struct {
		b     Basis // of the first look
		looks []look
	}{
		"it stood at the start": {Basis{}, []look{
			{0, wants, Unhealthy},
			{1, wants, Unhealthy},
			{100, present(without(FieldRecoveryAction)), Unhealthy},
			{200, wants, Unhealthy},
			{201, none, Healthy},
			{202, wants, Degraded},
		}},
		"nothing was told at first":        {Basis{}, []look{{0, blank(PresenceUnknown), Unknown}, {1, present(without(FieldRecoveryAction)), Healthy}, {2, wants, Unhealthy}}},
		"it came later":                    {Basis{}, []look{{0, none, Healthy}, {1, wants, Degraded}}},
		"its XID came with it":             {Basis{}, []look{{0, present(value(FieldRecoveryAction, 1), xids(63)), Degraded}, {1, wants, Degraded}}},
		"drain and reset":                  {Basis{}, []look{{0, present(value(FieldRecoveryAction, 4)), Unhealthy}, {1, wants, Unhealthy}, {2, none, Healthy}}},
		"it came while the agent was away": {Basis{History: true, First: true}, []look{{0, wants, Unhealthy}, {1, wants, Unhealthy}, {2, none, Healthy}}},
		"and its XID is delivered": {Basis{History: true, First: true}, []look{
			{0, present(value(FieldRecoveryAction, 1), past(XID{63, at(-9)})), Degraded}, {1, wants, Degraded},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var known []DeviceState
			for _, l := range c.looks {
				d := judgeBasis(known, l.at, l.sample, c.b)
				if d.Verdict.State != l.want {
					t.Fatalf("at %d s: %v %v, want %v", l.at, d.Verdict.State, d.Verdict.Causes(), l.want)
				}
				known, c.b.First = []DeviceState{d}, false
			}
		})
	}

	// One that stood before the restart is known.
	d := judgeBasis([]DeviceState{judgeBasis(nil, 0, wants, Basis{History: true})}, 1, wants, Basis{History: true, First: true})
	if d.Verdict.State != Degraded {
		t.Errorf("%v %v", d.Verdict.State, d.Verdict.Causes())
	}
}

// DCGM never takes an XID's incident back: at a first start it is all that tells of the XID.
func TestIncidentOfBeforeTheStart(t *testing.T) {
	incident := func(code int, severity Severity, message string) Sample {
		return checked(Incident{System: "xid", Code: code, Severity: severity, Message: message})
	}
	uncontained := incident(81, SeverityFail, "XID 95 was seen")
	for name, c := range map[string]struct {
		sample  Sample
		history bool
		want    string
	}{
		"a failure":                         {uncontained, false, "dcgm-uncontained-error"},
		"a check that an XID has triggered": {incident(80, SeverityFail, "Row remap failure (triggered by XID 64: x)"), false, "dcgm-row-remap-failure"},
		"a warning":                         {incident(101, SeverityWarn, "XID 31"), false, ""},
		"what DCGM found by itself":         {incident(14, SeverityFail, "NVLink down"), false, ""},
		"the boot is remembered":            {uncontained, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := Basis{History: c.history}
			d := judgeBasis(nil, 0, c.sample, b)
			for i, seconds := range []int{1, 1000} {
				if got := strings.Join(d.Verdict.Causes(), ","); got != c.want || c.want != "" && d.Verdict.State != Degraded {
					t.Fatalf("look %d: %q, %v; want %q", i, got, d.Verdict.State, c.want)
				}
				d = judgeBasis([]DeviceState{d}, seconds, c.sample, b)
			}
			// A reset ends it, and it is not found again.
			for i, s := range []Sample{blank(Lost), blank(Lost), c.sample, c.sample} {
				d = judgeBasis([]DeviceState{d}, 1001+i, s, b)
			}
			if d.Verdict.State != Healthy {
				t.Errorf("after a reset: %v", d.Verdict.Causes())
			}
		})
	}

	// The check came before any sample told the XID; at run time the XID is judged and not the incident.
	d := judgeBasis(nil, 0, present(xids(94)), Basis{})
	d = judgeBasis([]DeviceState{d}, 1, incident(131, SeverityFail, "XID 94"), Basis{})
	if got := d.Verdict.Causes(); !slices.Equal(got, []string{"xid-94"}) {
		t.Errorf("got %v", got)
	}
}

// DCGM files XIDs 63 and 64 under checks of its own and never takes them back.
func TestIncidentsThatAnXIDTriggered(t *testing.T) {
	c := DefaultConfig()
	c.Confirm = 1
	for _, i := range []Incident{
		{Code: 80, Severity: SeverityFail, Message: "GPU 3 had uncorrectable memory errors (triggered by XID 64: row remapper)"},
		{Code: 6, Severity: SeverityWarn, Message: "Page retirements are pending (triggered by XID 63: x)"},
	} {
		runSteps(t, c, []step{{0, checked(i), Healthy, nil}})
		i.Message = "A check of DCGM's own"
		if d := judgeWith(c, nil, gpu0, step{at: 0, sample: checked(i)}); d[0].Verdict.State == Healthy {
			t.Errorf("%d by itself is ignored", i.Code)
		}
		c.Incidents.Unhealthy = []string{fmt.Sprint(i.Code)}
		i.Message = "x (triggered by XID 64: x)"
		runSteps(t, c, []step{{0, checked(i), Healthy, nil}})
		c.Incidents.Unhealthy = nil
	}
}

// The driver's clock is not ours: a warning ends RecoverAfter after it came, whenever the driver says that was.
func TestXIDOfAnotherTime(t *testing.T) {
	for _, off := range []time.Duration{0, time.Second, 5 * time.Hour, -time.Second, -5 * time.Hour} {
		s := present()
		s.XIDs = []XID{{999, at(0).Add(off)}}
		d := judgeBasis(nil, 0, s, Basis{History: true})
		if d.Verdict.State != Degraded || d.LastXID.At.After(at(0)) || d.Verdict.Findings[0].Since.After(at(0)) || d.Verdict.Findings[0].Since.Before(at(-600)) {
			t.Errorf("%v: %+v, last XID %+v", off, d.Verdict.Findings, d.LastXID)
		}
		for _, l := range []struct {
			at   int
			want State
		}{{59, Degraded}, {60, Healthy}} {
			d = judgeBasis([]DeviceState{d}, l.at, present(), Basis{History: true})
			if d.Verdict.State != l.want {
				t.Errorf("%v: %v after %d s, want %v", off, d.Verdict.State, l.at, l.want)
			}
		}
		if !slices.Equal(d.Seen, []XID{{999, at(0).Add(off)}}) {
			t.Errorf("the stream's own time is not kept: %+v", d.Seen)
		}
	}

	// And the recovery action has a minute to tell more of one.
	s := present()
	s.XIDs = []XID{{144, at(0).Add(-5 * time.Hour)}}
	d := judgeBasis(nil, 0, s, Basis{History: true})
	d = judgeBasis([]DeviceState{d}, 2, present(value(FieldRecoveryAction, 1)), Basis{History: true})
	if d.Verdict.State != Unhealthy {
		t.Errorf("it is not followed: %v", d.Verdict.Causes())
	}
}
