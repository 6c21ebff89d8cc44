package judge

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// summaryOf writes the findings of a device, each with the seconds since when it lasts.
func summaryOf(v health.Verdict) string {
	var all []string
	for _, f := range v.Findings {
		all = append(all, fmt.Sprintf("%s@%v", f.Cause, f.Since.Sub(epoch).Seconds()))
	}
	return fmt.Sprintf("%v@%v %s", v.State, v.Since.Sub(epoch).Seconds(), strings.Join(all, " "))
}

// What an earlier process saved counts as if it had been restored before the start, unless this process has seen its end. The earlier
// process ran from 0 s on; this one has run since 100 s; at 200 s the saved state is read.
func TestRestoreLate(t *testing.T) {
	steps := func(start int, all ...health.Sample) (devices []health.DeviceState) {
		for i, s := range all {
			devices = judge(devices, start+10*i, samples{gpu0.ID: s}, gpu0)
		}
		return devices
	}
	saved := func(all ...health.Sample) []health.DeviceState { return steps(0, all...) }
	restored := func(devices []health.DeviceState) []health.DeviceState {
		devices = slices.Clone(devices)
		for i := range devices {
			devices[i] = Restored(devices[i], at(200))
		}
		return devices
	}
	live := func(all ...health.Sample) []health.DeviceState { return steps(100, all...) }
	action := func(v float64, codes ...int) health.Sample {
		return present(value(health.FieldRecoveryAction, v), xids(codes...))
	}
	cordoned := judgeAll(cordoning("0"), nil, 0, nil, nil, gpu0)
	unread := blank(health.PresenceUnknown)
	hot := present(value(health.FieldGPUTemp, 99))
	for name, c := range map[string]struct {
		live, saved []health.DeviceState
		reloaded    bool
		want        string
	}{
		"nothing":                          {live(present()), saved(present()), false, "healthy@0 "},
		"a saved finding":                  {live(present()), saved(present(xids(48))), false, "unhealthy@0 xid-48@0"},
		"a new finding":                    {live(present(xids(95))), saved(present()), false, "unhealthy@100 xid-95@100"},
		"two causes":                       {live(present(xids(95))), saved(present(xids(48))), false, "unhealthy@0 xid-48@0 xid-95@100"},
		"one cause, since it began":        {live(present(xids(95))), saved(present(xids(95))), false, "unhealthy@0 xid-95@0"},
		"worse than saved":                 {live(present(xids(95))), saved(hot), false, "unhealthy@100 xid-95@100 temperature@0"},
		"better than saved":                {live(hot), saved(present(xids(48))), false, "unhealthy@0 xid-48@0 temperature@100"},
		"a condition that is over":         {live(present()), saved(hot), false, "degraded@0 temperature@0"},
		"a condition that is not measured": {live(present(without(health.FieldGPUTemp))), saved(hot), false, "degraded@0 temperature@0"},
		"a warning XID of long ago":        {live(present()), saved(present(xids(999))), false, "healthy@100 "},
		"driver reloaded":                  {live(present()), saved(present(xids(48))), true, "healthy@100 "},
		"driver reloaded, newer XID":       {live(present(xids(95))), saved(present(xids(48, 95))), true, "unhealthy@0 xid-95@100"},
		"part of the findings has ended": {
			live(present(without(health.FieldGPUTemp))), saved(present(xids(48), value(health.FieldGPUTemp, 99))), true,
			"degraded@200 temperature@0",
		},
		"reset since the start":  {live(action(1), action(0)), saved(present(xids(48))), false, "healthy@110 "},
		"reset before the start": {live(action(0)), saved(action(1), action(1, 48)), false, "healthy@100 "},
		"reset before the start, then an XID": {
			live(action(0), present(xids(95))), saved(action(1), action(1, 48)), false, "unhealthy@10 xid-95@110",
		},
		"the driver still asks for a reset": {
			live(action(1)), saved(action(1), action(1, 48)), false,
			"unhealthy@10 xid-48@10 recovery-action@0",
		},
		"lost, and back at the start": {live(present()), saved(blank(health.Lost), blank(health.Lost)), false, "healthy@100 "},
		"lost with an XID": {
			live(present()), saved(present(xids(95)), blank(health.Lost), blank(health.Lost)), false,
			"healthy@100 ",
		},
		"lost for one reading, by an XID 79": {live(present()), saved(present(xids(79)), blank(health.Lost)), false, "healthy@100 "},
		"lost, and still": {
			live(blank(health.Lost)), saved(blank(health.Lost), blank(health.Lost)), false,
			"unhealthy@0 lost@0",
		},
		"lost, and back, then not read": {live(present(), unread), saved(blank(health.Lost), blank(health.Lost)), false, "healthy@100 "},
		"lost, and not read yet":        {live(unread), saved(blank(health.Lost), blank(health.Lost)), false, "unhealthy@0 lost@0"},
		"lost again": {
			live(present(), blank(health.Lost)), saved(blank(health.Detached), blank(health.Detached)), false,
			"unhealthy@0 lost@110",
		},
		"cordoned":                    {live(present()), cordoned, true, "unhealthy@0 cordoned@0"},
		"not listed":                  {nil, saved(present(xids(48))), false, "unhealthy@0 xid-48@0"},
		"not listed, driver reloaded": {nil, saved(present(xids(48))), true, "unknown@200 "},
	} {
		t.Run(name, func(t *testing.T) {
			before := slices.Clone(c.live)
			config := DefaultConfig()
			if name == "cordoned" {
				config = cordoning("0")
			}
			after, unjudged := RestoreLate(config, c.live, LateState{Devices: restored(c.saved), DriverReloaded: c.reloaded}, at(200))
			if len(after) != 1 || len(unjudged) != 0 {
				t.Fatalf("%+v, %+v", after, unjudged)
			}
			if got := summaryOf(after[0].Verdict); got != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			if !reflect.DeepEqual(c.live, before) {
				t.Error("RestoreLate modified the devices")
			}
		})
	}
}

// The rest of the state is put together: trips and rows of XIDs in the order of their times, owed XIDs, and XIDs that the recovery action
// decides.
func TestRestoreLateMerges(t *testing.T) {
	lost := func(start int) (devices []health.DeviceState) { // a trip, then a pending and a counted XID
		devices = judge(nil, start, samples{gpu0.ID: blank(health.Lost)}, gpu0)
		return judge(devices, start+10, samples{gpu0.ID: present(rows([2]int{109, start + 10}, [2]int{31, start + 10}))}, gpu0)
	}
	saved, live := lost(0), lost(100)
	saved[0].XIDs.Owed = []health.OwedXIDs{{Code: 31, Count: 2}}
	live[0].XIDs.Owed = []health.OwedXIDs{{Code: 43, Count: 1}}
	after, _ := RestoreLate(DefaultConfig(), live, LateState{Devices: saved}, at(200))
	d := after[0]
	if want := []time.Time{at(0), at(100)}; !slices.EqualFunc(d.Memory.Trips, want, time.Time.Equal) {
		t.Errorf("trips %v", d.Memory.Trips)
	}
	var known []string
	for _, r := range d.XIDs.Rows {
		known = append(known, fmt.Sprintf("%d@%v", r.Code, r.XID().At.Sub(epoch).Seconds()))
	}
	if want := []string{"109@10", "31@10", "109@110", "31@110"}; !slices.Equal(known, want) {
		t.Errorf("rows %q", known)
	}
	if len(d.XIDs.Owed) != 2 || d.XIDs.Owed[0].Code != 31 || d.XIDs.Owed[1].Code != 43 {
		t.Errorf("owed %+v", d.XIDs.Owed)
	}
	if p := d.Memory.PendingXIDs; len(p) != 1 || !p[0].At.Equal(at(110)) {
		t.Errorf("pending %+v", p)
	}
	// The pending XID from before the start stays, unless the GPU was reset since.
	for reloaded, want := range map[bool]int{false: 1, true: 0} {
		after, _ := RestoreLate(DefaultConfig(), judge(nil, 100, nil, gpu0), LateState{Devices: saved, DriverReloaded: reloaded}, at(200))
		if p := after[0].Memory.PendingXIDs; len(p) != want {
			t.Errorf("reloaded %v: pending %+v", reloaded, p)
		}
	}
	// A reset of the GPU is one of its MIG devices.
	r, now := reading(0, samples{gpu0.ID: blank(health.Lost), mig0.ID: migXIDs(13, 48)}, gpu0, mig0)
	partitioned := judgeAndView(DefaultConfig(), nil, r, nil, now)
	partitioned = judge(partitioned, 10, samples{gpu0.ID: blank(health.Lost), mig0.ID: blank(health.Lost)}, gpu0, mig0)
	after, _ = RestoreLate(DefaultConfig(), judge(nil, 100, nil, gpu0, mig0), LateState{Devices: partitioned}, at(200))
	if m := after[1].Memory; m.Has("xid-48") {
		t.Errorf("MIG device: %+v", m)
	}
	// What the driver asks for now decides a saved XID at once.
	action := judge(nil, 199, samples{gpu0.ID: present(value(health.FieldRecoveryAction, 1))}, gpu0)
	after, unjudged := RestoreLate(DefaultConfig(), action, LateState{
		Devices: judge(nil, 190, samples{gpu0.ID: present(xids(149))}, gpu0),
	}, at(200))
	after = Observe(DefaultConfig(), after, append([]Observation{{}}, unjudged...), ReadingContext{}, at(200))
	if m := after[0].Memory; !m.UnhealthyBy("xid-149") {
		t.Errorf("XID and recovery action: %+v", m)
	}
	// An index names one GPU. MIG devices come after the GPUs.
	renumbered := gpu1
	renumbered.Index = 0
	after, _ = RestoreLate(DefaultConfig(), judge(nil, 100, nil, gpu0, mig0), LateState{
		Devices: judge(nil, 0, samples{gpu1.ID: blank(health.Lost)}, renumbered),
	}, at(200))
	if len(after) != 3 || after[0].Device.Index != 0 || after[1].Device.ID != gpu1.ID || after[1].Device.Index != -1 {
		t.Errorf("%+v", after)
	}
	// A saved device that is not listed comes last, with what was saved of it.
	gone := judge(nil, 0, samples{gpu1.ID: present(rows([2]int{48, 0}))}, gpu1)
	after, _ = RestoreLate(DefaultConfig(), live, LateState{Devices: gone}, at(200))
	if len(after) != 2 || after[1].Device.ID != gpu1.ID || len(after[1].XIDs.Rows) != 1 ||
		after[1].Sample.Device != gpu1.ID {
		t.Errorf("%+v", after)
	}
}

// With the history, XIDs from before the start that were never judged are returned, and the incidents that stood for them end.
func TestRestoreLateHistory(t *testing.T) {
	known, missed := [2]int{48, 10}, [2]int{95, 50}
	sticky := checked(health.Incident{Code: 81, Severity: health.SeverityFail, Message: "uncontained"})
	var live []health.DeviceState
	for i := range 2 {
		listed := samples{gpu0.ID: sticky, gpu1.ID: checked()}
		for id, list := range map[health.DeviceID][][2]int{gpu0.ID: {known, missed}, gpu1.ID: {known}} {
			s := listed[id]
			rows(list...)(&s)
			listed[id] = s
		}
		r, now := reading(100+i, listed, gpu0, gpu1)
		live = judgeReading(DefaultConfig(), live, r, ReadingContext{FirstReading: i == 0}, now)
	}
	if !live[0].Verdict.Has("dcgm-uncontained-error") {
		t.Fatalf("%s", summaryOf(live[0].Verdict))
	}
	saved := judge(nil, 10, samples{gpu0.ID: present(rows(known))}, gpu0)
	for history, want := range map[bool]string{true: "GPU-0 95, GPU-1 48", false: ""} {
		after, unjudged := RestoreLate(DefaultConfig(), live, LateState{Devices: saved, XIDHistory: history}, at(200))
		var got []string
		for _, e := range unjudged {
			got = append(got, fmt.Sprintf("%s %d", e.Devices[0], e.XID.Code))
		}
		if text := strings.Join(got, ", "); text != want || after[0].Verdict.Has("dcgm-uncontained-error") == history ||
			!after[0].Verdict.Has("xid-48") {
			t.Errorf("history %v: unjudged %q, want %q; %s", history, text, want, summaryOf(after[0].Verdict))
		}
	}
	// The check of after that raises the incident no more.
	fresh, now := reading(100, nil, gpu0)
	first := judgeReading(DefaultConfig(), nil, fresh, ReadingContext{FirstReading: true}, now)
	for history, want := range map[bool]bool{true: false, false: true} {
		after, _ := RestoreLate(DefaultConfig(), first, LateState{XIDHistory: history}, at(200))
		r, now := reading(210, samples{gpu0.ID: sticky}, gpu0)
		if v := judgeReading(DefaultConfig(), after, r, ReadingContext{}, now)[0].Verdict; v.Has("dcgm-uncontained-error") != want {
			t.Errorf("history %v: %s", history, summaryOf(v))
		}
	}
}

// A restart continues conditions, because nothing was measured meanwhile.
func TestRestoredVerdict(t *testing.T) {
	devices := judge(
		nil, 0, samples{gpu0.ID: present(xids(48, 109), value(health.FieldGPUTemp, 99), value(health.FieldRecoveryAction, 1))}, gpu0,
	)
	devices = judge(devices, 10, samples{gpu0.ID: present(value(health.FieldGPUTemp, 99), value(health.FieldRecoveryAction, 1))}, gpu0)
	d := devices[0]
	original := fmt.Sprintf("%+v", d)
	for _, now := range []time.Time{at(100), at(-100)} { // the clock may have been set back
		restored := Restored(d, now)
		r := restored.Memory
		wantTime := func(what string, got, saved time.Time) {
			t.Helper()
			if want := earlier(saved, now); !got.Equal(want) {
				t.Errorf("restored at %v: %s %v, saved %v", now, what, got, saved)
			}
		}
		for i, f := range r.Findings {
			was := d.Memory.Findings[i]
			if f.IsCondition() {
				was.Last = now
			}
			wantTime(f.Cause+" last", f.Last, was.Last)
			wantTime(f.Cause+" since", f.Since, was.Since)
			if !f.Reset.IsZero() {
				t.Errorf("restored at %v: %+v", now, f)
			}
		}
		wantTime("since", restored.Verdict.Since, d.Verdict.Since)
		wantTime("trip", r.Trips[0], d.Memory.Trips[0])
		wantTime("pending XID", r.PendingXIDs[0].At, d.Memory.PendingXIDs[0].At)
		if len(r.Trips) != 1 || len(r.PendingXIDs) != 1 || len(r.Findings) != 4 {
			t.Errorf("restored at %v: %+v", now, r)
		}
	}
	if now := fmt.Sprintf("%+v", d); now != original {
		t.Errorf("Restored modified the device: %s, was %s", now, original)
	}
	if got := Rebase(time.Time{}, at(5)); !got.IsZero() {
		t.Errorf("the zero time became %v", got)
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// A reset that counted already does not count again: a condition that lasts longer than its reset with recovery "never".
func TestRestoredResetCountsOnce(t *testing.T) {
	c := DefaultConfig()
	c.Recovery = RecoverNever
	lost := judgeAll(c, nil, 0, nil, samples{gpu0.ID: blank(health.Lost)}, gpu0)
	lost = judgeAll(c, lost, 10, nil, samples{gpu0.ID: blank(health.Lost)}, gpu0)
	lost = judgeAll(c, lost, 20, nil, nil, gpu0)
	for name, again := range map[string][]health.DeviceState{
		"restored":  {Restored(lost[0], at(30))},
		"discarded": DiscardMeasurements(lost, at(30)),
	} {
		again = judgeAll(c, again, 40, nil, samples{gpu0.ID: present(xids(48))}, gpu0)
		c := c
		c.Recovery = RecoverAuto
		again = judgeAll(c, again, 50, nil, nil, gpu0)
		if got := again[0].Verdict.Causes(); !slices.Equal(got, []string{"xid-48"}) {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A reset request that no XID explains ends with an event that reports no action.
func TestUnexplainedResetEndsWithEvent(t *testing.T) {
	r, now := reading(0, samples{gpu0.ID: present(value(health.FieldRecoveryAction, 1))}, gpu0)
	devices := judgeReading(DefaultConfig(), nil, r, ReadingContext{FirstReading: true}, now)
	for _, action := range []health.RecoveryAction{health.RecoveryReset, health.RecoveryNone} {
		event := health.Sample{Device: gpu0.ID, At: at(1), Values: map[health.Field]float64{health.FieldRecoveryAction: float64(action)}}
		devices = observe(DefaultConfig(), devices, &health.Reading{Samples: []health.Sample{event}}, ReadingContext{}, at(1))
		if got := devices[0].Memory.UnexplainedReset; got != (action == health.RecoveryReset) {
			t.Errorf("after the action %v: %t", action, got)
		}
	}
}

// The GPU whose reset request no XID explains does not count as working after the restart either.
func TestRestoredUnexplainedReset(t *testing.T) {
	r, now := reading(0, samples{gpu0.ID: present(value(health.FieldRecoveryAction, 1))}, gpu0)
	unexplained := judgeReading(DefaultConfig(), nil, r, ReadingContext{FirstReading: true}, now)
	if got := unexplained[0].Verdict.State; got != health.Unhealthy {
		t.Fatalf("unexplained: %v", got)
	}
	for name, devices := range map[string][]health.DeviceState{
		"restored": {Restored(unexplained[0], at(30))},
		"late": func() []health.DeviceState {
			first := judge(nil, 20, nil, gpu0)
			first[0].Memory.AwaitsAction = false
			saved := Restored(unexplained[0], at(30))
			saved.Sample = blank(health.Present)
			after, _ := RestoreLate(DefaultConfig(), first, LateState{Devices: []health.DeviceState{saved}}, at(30))
			return after
		}(),
	} {
		again := judge(devices, 40, samples{gpu0.ID: present(value(health.FieldRecoveryAction, 1))}, gpu0)
		if got, want := again[0].Verdict.State, map[string]health.State{
			"restored": health.Unhealthy,
			"late":     health.Degraded,
		}[name]; got != want {
			t.Errorf("%s: %v, want %v: %s", name, got, want, summaryOf(again[0].Verdict))
		}
	}
}

// Stable findings have everything except what a poll changes while nothing happens.
func TestStable(t *testing.T) {
	first := judge(nil, 0, samples{gpu0.ID: present(value(health.FieldGPUTemp, 99), xids(48))}, gpu0)
	again := judge(first, 10, samples{gpu0.ID: present(value(health.FieldGPUTemp, 98))}, gpu0)
	unconfirmed := checked(health.Incident{Code: 70, Severity: health.SeverityFail})
	unconfirmed.Values[health.FieldGPUTemp] = 98
	for name, c := range map[string]struct {
		devices []health.DeviceState
		same    bool
	}{
		"another value":      {again, true},
		"a FAIL of one poll": {judge(again, 20, samples{gpu0.ID: unconfirmed}, gpu0), true},
		"another XID":        {judge(again, 20, samples{gpu0.ID: present(value(health.FieldGPUTemp, 98), xids(48))}, gpu0), false},
		"another finding": {judge(again, 20, samples{gpu0.ID: present(value(health.FieldGPUTemp, 98), value(health.FieldRemapPending, 1))},
			gpu0), false},
	} {
		if same := reflect.DeepEqual(Stable(first[0].Memory.Findings), Stable(c.devices[0].Memory.Findings)); same != c.same {
			t.Errorf("%s: the same: %v", name, same)
		}
	}
	if f := again[0].Verdict.OwnFinding(health.HasCause(health.CauseTemperature)); f.Reason == "" || !f.Last.Equal(at(10)) {
		t.Errorf("Stable modified %+v", f)
	}
}

func TestNeedsSaving(t *testing.T) {
	for name, c := range map[string]struct {
		d    health.DeviceState
		want bool
	}{
		"nothing":       {judge(nil, 0, nil, gpu0)[0], false},
		"a finding":     {health.DeviceState{Memory: health.Memory{Findings: []health.Finding{{Cause: health.CauseLost}}}}, true},
		"a trip":        {health.DeviceState{Memory: health.Memory{Trips: []time.Time{at(0)}}}, true},
		"a decision":    {health.DeviceState{Verdict: health.Verdict{Findings: []health.Finding{{Cause: health.CauseCordoned}}}}, true},
		"a detach":      {health.DeviceState{Verdict: health.Verdict{Findings: []health.Finding{{Cause: health.CauseReleased}}}}, false},
		"a pending XID": {health.DeviceState{Memory: health.Memory{PendingXIDs: []health.XID{{Code: 109}}}}, true},
		"a row":         {health.DeviceState{XIDs: health.Ledger{Rows: []health.LedgerRow{{XIDRow: health.XIDRow{Code: 31}}}}}, true},
		"owed by the source": {health.DeviceState{XIDs: health.Ledger{Owed: []health.OwedXIDs{
			{Code: 31, Witness: health.WitnessNVML},
			{Code: 31, Witness: health.WitnessSource},
		}}}, true},
		"owed by an event source": {
			health.DeviceState{XIDs: health.Ledger{Owed: []health.OwedXIDs{{Code: 31, Witness: health.WitnessNVML}}}},
			false,
		},
	} {
		if got := NeedsSaving(c.d); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// What was measured before a detach does not count after it.
func TestDiscardMeasurements(t *testing.T) {
	fail := samples{gpu0.ID: checked(health.Incident{Code: 70, Severity: health.SeverityFail})}
	fail[gpu0.ID].Values[health.FieldGPUTemp] = 99
	before := judge(nil, 0, fail, gpu0)
	before[0].XIDs.Owed = []health.OwedXIDs{
		{Code: 31, Witness: health.WitnessSource, Count: 2, Since: at(0), Newest: at(1), Seen: time.Second},
		{Code: 31, Witness: health.WitnessNVML, Since: at(0), Newest: at(1)},
	}
	original := fmt.Sprintf("%+v", before)
	after := DiscardMeasurements(before, at(30))
	if now := fmt.Sprintf("%+v", before); now != original {
		t.Errorf("modified: %s, was %s", now, original)
	}
	d := after[0]
	source, nvml := d.XIDs.Owed[0], d.XIDs.Owed[1]
	if d.Sample.Presence != health.PresenceUnknown || !source.Since.IsZero() || !source.Newest.IsZero() ||
		source.Count != 2 || source.Seen != time.Second || !nvml.Since.Equal(at(0)) || !nvml.Newest.Equal(at(1)) {
		t.Errorf("%+v", d)
	}
	after = judge(after, 60, fail, gpu0) // the first check since
	if got := after[0].Verdict.State; got != health.Degraded {
		t.Errorf("%s after the first check", summaryOf(after[0].Verdict))
	}
	after = judge(DiscardMeasurements(before, at(30)), 89, nil, gpu0) // less than recoverAfter after the restart
	if !after[0].Verdict.Has(health.CauseTemperature) {
		t.Errorf("%s", summaryOf(after[0].Verdict))
	}
	after = judge(after, 90, nil, gpu0)
	if after[0].Verdict.Has(health.CauseTemperature) {
		t.Errorf("%s", summaryOf(after[0].Verdict))
	}
}
