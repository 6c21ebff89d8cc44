package health

import (
	"testing"
	"time"
)

func TestOutageFilter(t *testing.T) {
	before := judge(nil, 0, nil, gpu0, mig0, gpu1)
	for name, c := range map[string]struct {
		devices []Device
		samples samples
		delayed bool
	}{
		"no GPU is listed":               {nil, nil, true},
		"all are detached":               {[]Device{gpu0, gpu1}, samples{"GPU-0": blank(Detached), "GPU-1": blank(Detached)}, true},
		"one inaccessible, one unlisted": {[]Device{gpu0}, samples{"GPU-0": blank(Inaccessible)}, true},
		"one lost, one unlisted":         {[]Device{gpu0}, samples{"GPU-0": blank(Lost)}, true},
		"one unread, one unlisted":       {[]Device{gpu0}, samples{"GPU-0": blank(PresenceUnknown)}, true},
		"one present":                    {[]Device{gpu0}, samples{"GPU-0": present()}, false},
		"all are lost":                   {[]Device{gpu0, gpu1}, samples{"GPU-0": blank(Lost), "GPU-1": blank(Lost)}, false},
		"all are unread":                 {[]Device{gpu0, gpu1}, samples{"GPU-0": blank(PresenceUnknown), "GPU-1": blank(PresenceUnknown)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var l OutageFilter
			r, _ := reading(1, c.samples, c.devices...)
			for _, after := range []time.Duration{0, OutageDelay - time.Second} {
				judged, warning := l.Filter(before, r, at(1).Add(after))
				if (warning != "") != c.delayed {
					t.Fatalf("after %v: warning %q, want delayed: %v", after, warning, c.delayed)
				}
				devices := Judge(DefaultConfig(), before, judged, ReadingContext{}, at(1).Add(after))
				if c.delayed && len(devices) != 3 {
					t.Fatalf("%d devices", len(devices))
				}
				for _, d := range devices {
					v := d.Verdict
					if c.delayed && d.Device.Kind == KindGPU && (v.Has(CauseInaccessible) || v.Has(CauseDetached) || v.Has(CauseMissing)) {
						t.Fatalf("%s has %v", d.Device.ID, v.Causes())
					}
				}
			}
			if judged, warning := l.Filter(before, r, at(1).Add(OutageDelay)); warning != "" || judged != r {
				t.Errorf("still delayed after OutageDelay: %q", warning)
			}
		})
	}
}

// While a GPU that only the saved state knows is missing, the incidents without a device still count for the others.
func TestOutageFilterKeepsIncidents(t *testing.T) {
	c := DefaultConfig()
	c.Confirm, c.RecoverAfter, c.Incidents.Unhealthy = 1, 0, []string{"DCGM_FR_IMEX_UNHEALTHY"}
	saved := DeviceState{Device: gpu1}
	r, now := reading(0, samples{"GPU-0": checked()}, gpu0)
	r.Checks, r.Incidents = Checks{Status: ChecksUp}, []Incident{{System: "imex", Code: 122, Severity: SeverityFail}}
	var l OutageFilter
	for _, before := range [][]DeviceState{nil, Judge(c, []DeviceState{saved}, r, ReadingContext{}, now)[:1]} {
		judged, _ := l.Filter(append(before, saved), r, now)
		devices := Judge(c, before, judged, ReadingContext{}, now)
		if v := devices[0].Verdict; v.State != Unhealthy || judged == r {
			t.Errorf("%v, %v", v.State, v.Causes())
		}
	}
}

// The return of a GPU clears its XID 95 only if the GPU was lost alone.
func TestReturnAfterLoss(t *testing.T) {
	both := []Device{gpu0, gpu1}
	one, all := samples{"GPU-0": blank(Lost)}, samples{"GPU-0": blank(Lost), "GPU-1": blank(Lost)}
	faulty := nodeStep{0, samples{"GPU-0": present(xids(95))}, both, map[DeviceID]State{"GPU-0": Unhealthy, "GPU-1": Healthy}}
	lostOne := func(seconds int) nodeStep {
		return nodeStep{seconds, one, both, map[DeviceID]State{"GPU-0": Unhealthy, "GPU-1": Healthy}}
	}
	lostAll := func(seconds int) nodeStep {
		return nodeStep{seconds, all, both, map[DeviceID]State{"GPU-0": Unhealthy, "GPU-1": Unhealthy}}
	}
	back := func(seconds int, state State) nodeStep {
		return nodeStep{seconds, nil, both, map[DeviceID]State{"GPU-0": state, "GPU-1": Healthy}}
	}
	hidden := nodeStep{1, samples{"GPU-0": blank(Inaccessible)}, both, map[DeviceID]State{"GPU-0": Unhealthy, "GPU-1": Healthy}}
	hiddenLater := hidden
	hiddenLater.at = 5
	outages := []nodeStep{faulty}
	for i := range 4 { // more than flap.trips: an outage is not a trip
		outages = append(outages, lostAll(10*i+1), lostAll(10*i+5), back(10*i+6, Unhealthy))
	}
	off := faulty
	off.samples = samples{"GPU-0": present(xids(79))}
	longer := []nodeStep{faulty, lostAll(1), lostAll(2)}
	for i := range 100 {
		longer = append(longer, lostOne(10+10*i))
	}
	only := func(seconds int, s Sample, state State) nodeStep {
		return nodeStep{seconds, samples{"GPU-0": s}, []Device{gpu0}, map[DeviceID]State{"GPU-0": state}}
	}
	for name, steps := range map[string][]nodeStep{
		"lost alone":                {faulty, lostOne(1), lostOne(2), back(3, Healthy)},
		"the only GPU":              {only(0, present(xids(95)), Unhealthy), only(1, blank(Lost), Unhealthy), only(2, blank(Lost), Unhealthy), only(3, present(), Healthy)},
		"inaccessible, not lost":    {faulty, hidden, hiddenLater, back(7, Unhealthy)},
		"all lost at once":          outages,
		"off the bus, then lost":    {off, lostOne(1), back(2, Healthy)},
		"off the bus, all lost":     {off, lostAll(1), back(2, Unhealthy)},
		"lost long before others":   {faulty, lostOne(1), lostOne(2), lostAll(20), lostAll(21), back(30, Healthy)},
		"then lost alone":           {faulty, lostAll(1), lostAll(5), back(6, Unhealthy), lostOne(101), lostOne(102), back(103, Healthy)},
		"all lost, one after other": {faulty, lostOne(1), lostAll(2), lostAll(3), lostAll(4), back(6, Unhealthy)},
		"lost longer than others":   append(longer, back(2000, Healthy)),
	} {
		t.Run(name, func(t *testing.T) { runNode(t, steps) })
	}
}
