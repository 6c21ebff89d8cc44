package health

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// lists has the source list these GPUs from now on, each with its sample.
func (b *bench) lists(samples ...Sample) {
	b.set(func(s *script) {
		s.reading.Devices, s.reading.Samples = nil, nil
		for _, sample := range samples {
			for _, d := range []Device{gpu0, gpu1} {
				if d.ID == sample.Device {
					s.reading.Devices = append(s.reading.Devices, d)
				}
			}
			s.reading.Samples = append(s.reading.Samples, sample)
		}
	})
}

// shows is a sample of a device.
func shows(id DeviceID, s Sample) Sample {
	s.Device = id
	return s
}

// twoGPUs is a monitor of two GPUs, of which the first has had an XID 95.
func twoGPUs(t *testing.T) *bench {
	t.Helper()
	b := monitor(t)
	pass(2 * time.Second)
	b.lists(shows("GPU-0", present()), shows("GPU-1", present()))
	pass(time.Second)
	b.lists(shows("GPU-0", present()))
	b.set(func(s *script) { s.xids = []XID{{Code: 95, At: time.Now()}} })
	pass(time.Second)
	b.lists(shows("GPU-0", present()), shows("GPU-1", present()))
	pass(2 * time.Second)
	b.want(t, "at first", SourceUp, "xid-95", "")
	return b
}

// want checks the source and the causes of GPU-0 and GPU-1, each by commas.
func (b *bench) want(t *testing.T, when string, source SourceStatus, causes ...string) {
	t.Helper()
	s := b.out.Load()
	if s.Source.Status != source || source == SourceUp && s.Source.Err != "" || source == SourceDown && s.Source.Err == "" {
		t.Errorf("%s: the source is %v, %q; want %v", when, s.Source.Status, s.Source.Err, source)
	}
	if len(s.Devices) != len(causes) {
		t.Fatalf("%s: %d devices, want %d", when, len(s.Devices), len(causes))
	}
	for i, d := range s.Devices {
		if got := strings.Join(d.Verdict.causes(), ","); got != causes[i] {
			t.Errorf("%s: %s has %q, want %q", when, d.Device.ID, got, causes[i])
		}
	}
}

// An engine that was started without a driver lists no GPU, and says nothing of those that there are.
func TestEmptyListIsDoubted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists()
		for range 8 {
			pass(time.Second)
			b.want(t, "while no GPU is listed", SourceDown, "xid-95", "")
		}
		b.lists(shows("GPU-0", present()), shows("GPU-1", present()))
		pass(2 * time.Second)
		b.want(t, "after it", SourceUp, "xid-95", "")
	})
}

// A GPU that was lost before is lost all the while.
func TestEmptyListAndALostGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists(shows("GPU-0", present()), shows("GPU-1", blank(Lost)))
		pass(3 * time.Second)
		for range 3 {
			b.lists()
			pass(5 * time.Second)
			b.want(t, "while no GPU is listed", SourceDown, "xid-95", "lost")
			b.lists(shows("GPU-0", present()), shows("GPU-1", blank(Lost)))
			pass(2 * time.Second)
			b.want(t, "after it", SourceUp, "xid-95", "lost")
		}
		b.lists(shows("GPU-0", blank(Lost)), shows("GPU-1", blank(Lost)))
		pass(3 * time.Second)
		b.lists()
		pass(5 * time.Second)
		b.want(t, "when all were lost", SourceDown, "xid-95,lost", "lost")
	})
}

// Believed, it is no fault of any GPU: the return of all cures none of them and is no trip.
func TestEmptyListIsBelievedInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		for range 4 {
			b.lists()
			pass(doubtFor + 3*time.Second)
			b.want(t, "when it is believed", SourceUp, "xid-95,missing", "missing")
			b.lists(shows("GPU-0", present()), shows("GPU-1", present()))
			pass(2 * time.Second)
			b.want(t, "when all are back", SourceUp, "xid-95", "")
		}
	})
}

// Another word for why all are gone makes it nobody's own fault either.
func TestCommonLossStaysCommon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists()
		pass(doubtFor + 3*time.Second)
		for range 4 {
			b.lists(shows("GPU-0", blank(Detached)), shows("GPU-1", blank(Detached)))
			pass(3 * time.Second)
			b.want(t, "detached", SourceUp, "xid-95,detached", "detached")
			b.lists()
			pass(3 * time.Second)
			b.want(t, "missing again", SourceUp, "xid-95,missing", "missing")
		}
		b.lists(shows("GPU-0", present()), shows("GPU-1", present()))
		pass(2 * time.Second)
		b.want(t, "back", SourceUp, "xid-95", "")
	})
}

func TestDoubtIsForgottenWithTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists()
		pass(2 * time.Second)
		b.set(func(s *script) { s.dieAfter = 1; s.lived = 1 })
		pass(time.Minute)
		b.set(func(s *script) { s.dieAfter = 0 })
		pass(5 * time.Second)
		b.want(t, "one reading of a new session", SourceDown, "xid-95", "")
	})
}

// What a reading in doubt says of XIDs and of lost GPUs counts at once.
func TestDoubtHidesNoFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		b.lists(shows("GPU-0", blank(Lost)), shows("GPU-1", blank(Detached)))
		b.set(func(s *script) { s.xids = []XID{{Code: 119, At: time.Now()}} })
		pass(2 * time.Second)
		b.want(t, "in doubt", SourceDown, "xid-95,xid-119,lost", "xid-119")
	})
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
			var d doubt
			r := &Reading{Devices: c.devices, Samples: c.samples}
			for _, after := range []time.Duration{0, doubtFor - time.Second} {
				judged, why := d.check(known, r, at(1).Add(after))
				if (why != "") != c.doubted {
					t.Fatalf("after %v: why %q, want doubt: %v", after, why, c.doubted)
				}
				after := judgeDevices(DefaultConfig(), known, judged, basis{}, at(1).Add(after))
				for _, v := range after {
					if v.Device.Kind == KindMIG {
						continue // it goes by its GPU
					}
					if gone := slices.ContainsFunc(v.Verdict.Findings, func(f Finding) bool { return f.presence() && f.Cause != CauseLost }); c.doubted && gone {
						t.Fatalf("%s is %v", v.Device.ID, v.Verdict.causes())
					}
				}
				if c.doubted && len(after) != 3 {
					t.Fatalf("%d devices", len(after))
				}
			}
			if judged, why := d.check(known, r, at(1).Add(doubtFor)); why != "" || judged != r {
				t.Errorf("it is not believed: %q", why)
			}
		})
	}
}

// DCGM may name a GPU some seconds late: one that only the state file knows is not missed at once, and not cured by coming.
func TestRestoredGPUThatIsListedLate(t *testing.T) {
	ill := fold(t, nil, 0, map[DeviceID]Sample{"GPU-0": present(xids(95))}, gpu0, gpu1)
	m := saved(t, ill)
	for _, comes := range []bool{true, false} {
		var d doubt
		known := m.Recall("boot", MonitorSource{Kind: "dcgm"}, at(10)).Devices
		for seconds := 10; seconds < 30; seconds++ {
			r, now := reading(seconds, nil, gpu1)
			if comes && seconds >= 15 {
				r, now = reading(seconds, nil, gpu0, gpu1)
			}
			r, why := d.check(known, r, now)
			known = judgeDevices(DefaultConfig(), known, r, basis{history: true}, now)
			want := []string{"xid-95"}
			if !comes && seconds >= 20 {
				want = append(want, CauseMissing)
			}
			if got := known[0].Verdict.causes(); why != "" || !slices.Equal(got, want) {
				t.Fatalf("it comes: %v, at %d s: %v, %q, want %v", comes, seconds, got, why, want)
			}
		}
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
	known = judgeDevices(DefaultConfig(), known, r, basis{reloaded: true}, now)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Healthy, "GPU-1": Healthy})

	synctest.Test(t, func(t *testing.T) {
		b := twoGPUs(t)
		defer b.stop()
		load := ""
		src := *b.source.Load()
		src.DriverLoad = func() string {
			b.mu.Lock()
			defer b.mu.Unlock()
			return load
		}
		b.source.Store(&src)
		for _, c := range []struct {
			driver, load string
			xids         []XID
			want         string
		}{
			{"580.95.05", "7", nil, "xid-95"},
			{"", "", nil, "xid-95"},
			{"580.95.05", "7", nil, "xid-95"},
			{"", "7", nil, "xid-95"},
			{"590.10.01", "7", nil, ""},
			{"590.10.01", "7", []XID{{Code: 119}}, "xid-119"},
			{"590.10.01", "", nil, "xid-119"},
			{"590.10.01", "9", nil, ""},
		} {
			b.set(func(s *script) {
				s.reading.Versions.Driver, s.xids = c.driver, nil
				load = c.load
			})
			if c.xids != nil {
				b.lists(shows("GPU-0", present()))
				b.set(func(s *script) { s.xids = c.xids })
				pass(time.Second)
				b.lists(shows("GPU-0", present()), shows("GPU-1", present()))
			}
			pass(3 * time.Second)
			b.want(t, "with driver "+c.driver+" and load "+c.load, SourceUp, c.want, "")
		}
	})
}
