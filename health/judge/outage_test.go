package judge

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// outageStep is a reading of a source, and the causes of GPU-0 and GPU-1 after it.
type outageStep struct {
	at      int // seconds
	devices []health.Device
	samples samples
	delayed bool
	want    [2]string // "" if the GPU is healthy
}

// filterReading judges a reading but for what the filter delays, and derives the verdicts.
func filterReading(
	o *OutageFilter, c Config, before []health.DeviceState, r *health.Reading, now time.Time,
) (after []health.DeviceState, warning string) {
	after, warning = o.Measure(c, before, r, ReadingContext{XIDHistory: true}, now)
	return View(c, after, ViewContext{}, now), warning
}

// Readings in which no GPU is present are the source's fault for OutageDelay, if at least two were present shortly before or
// the driver lists none. XID 79 confirms a loss at once.
func TestOutageFilter(t *testing.T) {
	both, one := []health.Device{gpu0, mig0, gpu1}, []health.Device{gpu0, mig0}
	states := func(p0, p1 health.Presence) samples {
		all := samples{"GPU-0": blank(p0), "MIG-0": blank(p0), "GPU-1": blank(p1)}
		for id, s := range all {
			if s.Presence == health.Present {
				delete(all, id)
			}
		}
		return all
	}
	with := func(all samples, id health.DeviceID, edit func(*health.Sample)) samples {
		s, ok := all[id]
		if !ok {
			s = present()
		}
		edit(&s)
		all[id] = s
		return all
	}
	healthy, lost, missing := [2]string{}, [2]string{"lost", "lost"}, [2]string{"missing", "missing"}
	back := func(seconds int) outageStep { return outageStep{seconds, both, nil, false, healthy} }
	for name, steps := range map[string][]outageStep{
		"no GPU is listed": {
			{1, nil, nil, true, healthy}, {10, nil, nil, true, healthy}, {11, nil, nil, false, missing}, back(12),
		},
		"all are detached": {
			{1, both, states(health.Detached, health.Detached), true, healthy},
			{11, both, states(health.Detached, health.Detached), false, [2]string{"detached", "detached"}},
		},
		"all are lost for a moment": {
			{1, both, states(health.Lost, health.Lost), true, healthy},
			back(2),
			{9, both, states(health.Lost, health.Lost), true, healthy},
			{18, both, states(health.Lost, health.Lost), true, healthy},
			back(20),
		},
		"all are lost": {
			{1, both, states(health.Lost, health.Lost), true, healthy},
			{10, both, states(health.Lost, health.Lost), true, healthy},
			{11, both, states(health.Lost, health.Lost), false, lost},
			{12, both, states(health.Lost, health.Lost), false, lost},
			back(13),
		},
		"one returns before the other": {
			{1, both, states(health.Lost, health.Lost), true, healthy},
			{3, both, states(health.Present, health.Lost), false, healthy},
			{10, both, states(health.Present, health.Lost), false, healthy},
			{11, both, states(health.Present, health.Lost), false, [2]string{"", "lost"}},
			back(12),
		},
		"one is listed before the other": {
			{1, nil, nil, true, healthy},
			{3, one, nil, false, healthy},
			{10, one, nil, false, healthy},
			{11, one, nil, false, [2]string{"", "missing"}},
		},
		"one returns and is lost again": {
			{1, both, states(health.Lost, health.Lost), true, healthy},
			{3, both, states(health.Present, health.Lost), false, healthy},
			{4, both, states(health.Lost, health.Lost), true, healthy},
			{11, both, states(health.Lost, health.Lost), false, lost},
		},
		"all return, one is lost again": {
			{1, both, states(health.Lost, health.Lost), true, healthy},
			back(2),
			{3, both, states(health.Lost, health.Present), false, [2]string{"lost", ""}},
		},
		"one lost, one inaccessible": {
			{1, both, states(health.Lost, health.Inaccessible), true, healthy},
			{11, both, states(health.Lost, health.Inaccessible), false, [2]string{"lost", "inaccessible"}},
		},
		"one lost, one unlisted": {
			{1, one, states(health.Lost, health.Present), true, healthy},
			{11, one, states(health.Lost, health.Present), false, [2]string{"lost", "missing"}},
		},
		"one inaccessible, one unlisted": {
			{1, one, states(health.Inaccessible, health.Present), true, healthy},
			{11, one, states(health.Inaccessible, health.Present), false, [2]string{"inaccessible", "missing"}},
		},
		"one unread, one unlisted":  {{1, one, states(health.PresenceUnknown, health.Present), true, healthy}},
		"one lost, one unread":      {{1, both, states(health.Lost, health.PresenceUnknown), false, [2]string{"lost", ""}}},
		"one lost, one present":     {{1, both, states(health.Lost, health.Present), false, [2]string{"lost", ""}}},
		"one unlisted, one present": {{1, one, nil, false, [2]string{"", "missing"}}},
		"all are unread":            {{1, both, states(health.PresenceUnknown, health.PresenceUnknown), false, healthy}},
		"both lost, a new GPU present": {{
			1, append([]health.Device{{ID: "GPU-2", Index: 2}}, both...), states(health.Lost, health.Lost), false,
			lost,
		}},
		"one after another": {
			{1, both, states(health.Lost, health.Present), false, [2]string{"lost", ""}},
			{10, both, states(health.Lost, health.Lost), true, [2]string{"lost", ""}},
			{19, both, states(health.Lost, health.Lost), true, [2]string{"lost", ""}},
			{20, both, states(health.Lost, health.Lost), false, lost},
		},
		"one long after another": {
			{1, both, states(health.Lost, health.Present), false, [2]string{"lost", ""}}, {11, both, states(health.Lost, health.Lost), false, lost},
		},
		"XID 79 with the loss": {
			{1, both, with(states(health.Lost, health.Lost), "GPU-0", xids(79)), true, [2]string{"lost,xid-79", ""}},
			{11, both, states(health.Lost, health.Lost), false, [2]string{"lost,xid-79", "lost"}},
		},
		"XID 79 of a MIG device": {{1, both, with(states(health.Lost, health.Lost), "MIG-0", xids(79)), true, [2]string{"lost,xid-79", ""}}},
		"XID 79 ten seconds before": {
			{1, both, with(states(health.Present, health.Present), "GPU-1", xids(79)), false, [2]string{"", "xid-79"}},
			{11, both, states(health.Lost, health.Lost), true, [2]string{"", "xid-79,lost"}},
		},
		"XID 79 long before": {
			{1, both, with(states(health.Present, health.Present), "GPU-1", xids(79)), false, [2]string{"", "xid-79"}},
			{12, both, states(health.Lost, health.Lost), true, [2]string{"", "xid-79"}},
		},
		"XID 79 after the loss": {
			{1, both, states(health.Lost, health.Lost), true, healthy},
			{9, both, with(states(health.Lost, health.Lost), "GPU-1", xids(79)), true, [2]string{"", "lost,xid-79"}},
		},
		"XID 79 of all": {
			{
				1, both, with(with(states(health.Lost, health.Lost), "GPU-1", xids(79)), "GPU-0", xids(79)), false,
				[2]string{"lost,xid-79", "lost,xid-79"},
			},
		},
		"XID 79, no GPU is listed": {
			{1, both, with(states(health.Present, health.Present), "GPU-1", xids(79)), false, [2]string{"", "xid-79"}},
			{2, nil, nil, true, [2]string{"", "xid-79,missing"}},
		},
		"another XID": {{1, both, with(states(health.Lost, health.Lost), "GPU-1", xids(119)), true, [2]string{"", "xid-119"}}},
		"other evidence": {
			{
				1, both, with(states(health.Lost, health.Lost), "GPU-0",
					func(s *health.Sample) { s.Values = map[health.Field]float64{health.FieldRemapFailed: 1} }), true,
				[2]string{"row-remap-failed", ""},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var filter OutageFilter
			devices := judge(nil, 0, nil, both...)
			for _, s := range steps {
				r, now := reading(s.at, s.samples, s.devices...)
				var warning string
				devices, warning = filterReading(&filter, DefaultConfig(), devices, r, now)
				got := [2]string{strings.Join(devices[0].Verdict.Causes(), ","), strings.Join(devices[1].Verdict.Causes(), ",")}
				if got != s.want || (warning != "") != s.delayed {
					t.Fatalf("at %d s: %q, warning %q; want %q, delayed: %v", s.at, got, warning, s.want, s.delayed)
				}
				if len(devices) != max(3, len(s.devices)) {
					t.Fatalf("at %d s: %d devices", s.at, len(devices))
				}
			}
		})
	}
}

// A node's only GPU is lost at once; that its driver lists none is the source's fault for OutageDelay.
func TestOutageFilterOnlyGPU(t *testing.T) {
	before := judge(nil, 0, nil, gpu0)
	for p, delayed := range map[health.Presence]bool{
		health.Lost: false, health.Detached: true, health.Inaccessible: true,
		health.Missing: true,
	} {
		var filter OutageFilter
		devices := []health.Device{gpu0}
		if p == health.Missing {
			devices = nil
		}
		r, now := reading(1, samples{"GPU-0": blank(p)}, devices...)
		after, warning := filterReading(&filter, DefaultConfig(), before, r, now)
		v := after[0].Verdict
		if (warning != "") != delayed || (v.State == health.Healthy) != delayed {
			t.Errorf("%v: %v, warning %q", p, v.Causes(), warning)
		}
		want := "1 GPUs as unreachable"
		if p == health.Missing {
			want = "lists no GPU"
		}
		if delayed && !strings.Contains(warning, want) {
			t.Errorf("%v: warning %q, want %q", p, warning, want)
		}
	}
}

// A GPU whose presence was unknown, without an outage, is lost at once.
func TestOutageFilterAfterUnknownPresence(t *testing.T) {
	before := judge(nil, 0, nil, gpu0, gpu1)
	before[1].Sample = blank(health.PresenceUnknown)
	var filter OutageFilter
	r, now := reading(1, samples{"GPU-1": blank(health.Lost)}, gpu0, gpu1)
	after, warning := filterReading(&filter, DefaultConfig(), before, r, now)
	if v := after[1].Verdict; v.State != health.Unhealthy || warning != "" {
		t.Errorf("%v: %v, warning %q", v.State, v.Causes(), warning)
	}
}

// GPUs that an outage takes one after another return together, or within OutageDelay, which proves no reset, also after it counted.
func TestReturnAfterDelayedOutage(t *testing.T) {
	both := []health.Device{gpu0, gpu1}
	first, all, second := samples{
		"GPU-0": blank(health.Lost),
	}, samples{
		"GPU-0": blank(health.Lost), "GPU-1": blank(health.Lost),
	}, samples{
		"GPU-1": blank(health.Lost),
	}
	for name, end := range map[string]struct{ first, second int }{
		"while it is delayed":         {20, 20},
		"when it counts":              {40, 40},
		"the second when it counts":   {20, 28},
		"the second a second earlier": {24, 25},
	} {
		var filter OutageFilter
		devices := judge(nil, 0, samples{"GPU-0": present(xids(95)), "GPU-1": present(xids(79))}, both...)
		for seconds := 12; seconds <= 40; seconds++ { // GPU-0 is lost at 12 s, GPU-1 at 14 s, and counts at 24 s
			var s samples
			switch {
			case seconds < 14:
				s = first
			case seconds < end.first:
				s = all
			case seconds < end.second:
				s = second
			}
			r, now := reading(seconds, s, both...)
			devices, _ = filterReading(&filter, DefaultConfig(), devices, r, now)
		}
		if v0, v1 := devices[0].Verdict, devices[1].Verdict; !slices.Equal(v0.Causes(), []string{"xid-95"}) ||
			!slices.Equal(v1.Causes(), []string{"xid-79"}) {
			t.Errorf("%s: %v, %v", name, v0.Causes(), v1.Causes())
		}
	}
}

// While a GPU that only the saved state knows is missing, the incidents without a device still count for the others.
func TestOutageFilterKeepsIncidents(t *testing.T) {
	c := DefaultConfig()
	c.Confirm, c.RecoverAfter, c.Incidents.Unhealthy = 1, 0, []string{"DCGM_FR_IMEX_UNHEALTHY"}
	saved := health.DeviceState{Device: gpu1}
	r, now := reading(0, samples{"GPU-0": checked()}, gpu0)
	r.Checks, r.Incidents = health.Checks{
		Status: health.ChecksUp,
	}, []health.Incident{
		{System: "imex", Code: 122, Severity: health.SeverityFail},
	}
	var filter OutageFilter
	for _, before := range [][]health.DeviceState{nil, judgeReading(c, []health.DeviceState{saved}, r, ReadingContext{}, now)[:1]} {
		devices, _ := filterReading(&filter, c, append(before, saved), r, now)
		if v := devices[0].Verdict; v.State != health.Unhealthy || len(devices) != 2 || devices[1].Sample.Presence != health.PresenceUnknown {
			t.Errorf("%v, %v", v.State, v.Causes())
		}
	}
}

// The return of a GPU clears its XID 95 only if the GPU was lost alone.
func TestReturnAfterLoss(t *testing.T) {
	both := []health.Device{gpu0, gpu1}
	one, all := samples{"GPU-0": blank(health.Lost)}, samples{"GPU-0": blank(health.Lost), "GPU-1": blank(health.Lost)}
	faulty := nodeStep{
		0, samples{"GPU-0": present(xids(95))}, both, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "GPU-1": health.Healthy},
	}
	lostOne := func(seconds int) nodeStep {
		return nodeStep{seconds, one, both, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "GPU-1": health.Healthy}}
	}
	lostAll := func(seconds int) nodeStep {
		return nodeStep{seconds, all, both, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "GPU-1": health.Unhealthy}}
	}
	back := func(seconds int, state health.State) nodeStep {
		return nodeStep{seconds, nil, both, map[health.DeviceID]health.State{"GPU-0": state, "GPU-1": health.Healthy}}
	}
	hidden := nodeStep{
		1,
		samples{"GPU-0": blank(health.Inaccessible)},
		both,
		map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "GPU-1": health.Healthy},
	}
	hiddenLater := hidden
	hiddenLater.at = 5
	outages := []nodeStep{faulty}
	for i := range 4 { // more than flap.trips: an outage is not a trip
		outages = append(outages, lostAll(10*i+1), lostAll(10*i+5), back(10*i+6, health.Unhealthy))
	}
	off := faulty
	off.samples = samples{"GPU-0": present(xids(79))}
	longer := []nodeStep{faulty, lostAll(1), lostAll(2)}
	for i := range 100 {
		longer = append(longer, lostOne(10+10*i))
	}
	only := func(seconds int, s health.Sample, state health.State) nodeStep {
		return nodeStep{seconds, samples{"GPU-0": s}, []health.Device{gpu0}, map[health.DeviceID]health.State{"GPU-0": state}}
	}
	for name, steps := range map[string][]nodeStep{
		"lost alone": {faulty, lostOne(1), lostOne(2), back(3, health.Healthy)},
		"the only GPU": {
			only(0, present(xids(95)), health.Unhealthy), only(1, blank(health.Lost), health.Unhealthy),
			only(2, blank(health.Lost), health.Unhealthy),
			only(3, present(), health.Healthy),
		},
		"inaccessible, not lost":  {faulty, hidden, hiddenLater, back(7, health.Unhealthy)},
		"all lost at once":        outages,
		"off the bus, then lost":  {off, lostOne(1), back(2, health.Healthy)},
		"off the bus, all lost":   {off, lostAll(1), back(2, health.Unhealthy)},
		"lost long before others": {faulty, lostOne(1), lostOne(2), lostAll(20), lostAll(21), back(30, health.Healthy)},
		"then lost alone": {
			faulty, lostAll(1), lostAll(5), back(6, health.Unhealthy), lostOne(101), lostOne(102),
			back(103, health.Healthy),
		},
		"all lost, one after other": {faulty, lostOne(1), lostAll(2), lostAll(3), lostAll(4), back(6, health.Unhealthy)},
		"lost longer than others":   append(longer, back(2000, health.Healthy)),
	} {
		t.Run(name, func(t *testing.T) { runNode(t, steps) })
	}
}

// The devices of another inventory are forgotten at once, and its readings are not delayed. An instance without a name may be one of them.
func TestNewInventory(t *testing.T) {
	before := judge(nil, 0, nil, gpu0, mig0, gpu1)
	for name, c := range map[string]struct {
		presence health.Presence
		unnamed  []health.UnnamedInstance
		want     []health.DeviceID
		causes   string
	}{
		"other devices":      {health.Present, nil, []health.DeviceID{gpu0.ID}, ""},
		"an unreachable GPU": {health.Detached, nil, []health.DeviceID{gpu0.ID}, health.CauseDetached},
		"an instance without a name": {
			health.Present, []health.UnnamedInstance{{Parent: gpu0.ID, GI: mig0.GI}}, []health.DeviceID{gpu0.ID, mig0.ID}, "",
		},
	} {
		var filter OutageFilter
		if _, warning := filter.Measure(DefaultConfig(), before, &health.Reading{}, ReadingContext{}, at(1)); warning == "" {
			t.Fatal("a reading without GPUs is not delayed")
		}
		r, now := reading(2, samples{gpu0.ID: blank(c.presence)}, gpu0)
		r.Unnamed = c.unnamed
		after, warning := filter.Measure(DefaultConfig(), before, r, ReadingContext{NewInventory: true}, now)
		after = View(DefaultConfig(), after, ViewContext{}, now)
		var got []health.DeviceID
		for _, d := range after {
			got = append(got, d.Device.ID)
		}
		if causes := strings.Join(after[0].Verdict.Causes(), ","); !slices.Equal(got, c.want) || causes != c.causes || warning != "" {
			t.Errorf("%s: %v with %q, warning %q; want %v with %q", name, got, causes, warning, c.want, c.causes)
		}
	}
}
