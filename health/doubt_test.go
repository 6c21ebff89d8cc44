package health

import (
	"slices"
	"testing"
	"time"
)

// shows is a sample of a device.
func shows(id DeviceID, s Sample) Sample {
	s.Device = id
	return s
}

func TestDoubt(t *testing.T) {
	known := fold(t, nil, 0, nil, gpu0, mig0, gpu1)
	unknown := func(id DeviceID) Sample { return shows(id, blank(PresenceUnknown)) }
	for name, c := range map[string]struct {
		devices []Device
		samples []Sample
		doubted bool
	}{
		"none is listed":                 {nil, nil, true},
		"all are detached":               {[]Device{gpu0, gpu1}, []Sample{shows("GPU-0", blank(Detached)), shows("GPU-1", blank(Detached))}, true},
		"one is hidden, one not listed":  {[]Device{gpu0}, []Sample{shows("GPU-0", blank(Inaccessible))}, true},
		"one is lost, one not listed":    {[]Device{gpu0}, []Sample{shows("GPU-0", blank(Lost))}, true},
		"one is listed and not read":     {[]Device{gpu0}, []Sample{unknown("GPU-0")}, true},
		"one is there":                   {[]Device{gpu0}, []Sample{shows("GPU-0", present())}, false},
		"all are lost":                   {[]Device{gpu0, gpu1}, []Sample{shows("GPU-0", blank(Lost)), shows("GPU-1", blank(Lost))}, false},
		"of none it is known if it went": {[]Device{gpu0, gpu1}, []Sample{unknown("GPU-0"), unknown("GPU-1")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var d Doubt
			r := &Reading{Devices: c.devices, Samples: c.samples}
			for _, after := range []time.Duration{0, DoubtDelay - time.Second} {
				judged, why := d.Check(known, r, at(1).Add(after))
				if (why != "") != c.doubted {
					t.Fatalf("after %v: why %q, want doubt: %v", after, why, c.doubted)
				}
				after := Judge(DefaultConfig(), known, judged, Basis{}, at(1).Add(after))
				for _, v := range after {
					if v.Device.Kind == KindMIG {
						continue // it goes by its GPU
					}
					if gone := slices.ContainsFunc(v.Verdict.Findings, func(f Finding) bool { return f.presence() && f.Cause != CauseLost }); c.doubted && gone {
						t.Fatalf("%s is %v", v.Device.ID, v.Verdict.Causes())
					}
				}
				if c.doubted && len(after) != 3 {
					t.Fatalf("%d devices", len(after))
				}
			}
			if judged, why := d.Check(known, r, at(1).Add(DoubtDelay)); why != "" || judged != r {
				t.Errorf("it is not believed: %q", why)
			}
		})
	}
}

// A GPU that is lost counts at once, also the only one. All that are lost together prove nothing by their return.
func TestLostTogether(t *testing.T) {
	lost := map[DeviceID]Sample{"GPU-0": blank(Lost), "GPU-1": blank(Lost)}
	ill := map[DeviceID]Sample{"GPU-0": present(xids(95))}
	known := fold(t, nil, 0, ill, gpu0, gpu1)
	for i := range 4 {
		known = fold(t, known, 10*i+1, lost, gpu0, gpu1)
		wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "GPU-1": Unhealthy})
		known = fold(t, known, 10*i+5, lost, gpu0, gpu1)
		known = fold(t, known, 10*i+6, nil, gpu0, gpu1)
		wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "GPU-1": Healthy})
	}
	if got := causes(known[0].Verdict); !slices.Equal(got, []string{"xid-95"}) {
		t.Errorf("got %v", got)
	}

	// One of two that comes back was reset.
	known = fold(t, known, 101, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0, gpu1)
	known = fold(t, known, 102, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0, gpu1)
	known = fold(t, known, 103, nil, gpu0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "GPU-1": Healthy})

	// And so was an only one.
	known = fold(t, nil, 0, ill, gpu0)
	known = fold(t, known, 1, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0)
	known = fold(t, known, 2, map[DeviceID]Sample{"GPU-0": blank(Lost)}, gpu0)
	known = fold(t, known, 3, nil, gpu0)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy})
}

// A driver that was loaded anew has reset every GPU. What is not known of it is no evidence.
func TestDriverReload(t *testing.T) {
	known := fold(t, nil, 0, map[DeviceID]Sample{"GPU-0": present(xids(95))}, gpu0, gpu1)
	r, now := reading(1, nil, gpu0, gpu1)
	known = Judge(DefaultConfig(), known, r, Basis{Reloaded: true}, now)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "GPU-1": Healthy})
}
