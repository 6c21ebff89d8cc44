package statefile

import (
	"encoding/json"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// bad is a node on which every sort of finding stands.
func bad(t *testing.T) []health.DeviceState {
	t.Helper()
	known := healthtest.Judge(health.DefaultConfig(), nil, 0, nil, map[health.DeviceID]health.Sample{"GPU-1": healthtest.Blank(health.Lost)}, healthtest.GPU0, healthtest.MIG0, healthtest.GPU1)
	known = healthtest.Judge(health.DefaultConfig(), known, 1, nil, map[health.DeviceID]health.Sample{
		"GPU-0": healthtest.Present(healthtest.XIDs(48, 999), healthtest.Value(health.FieldRemapFailed, 1), healthtest.Value(health.FieldGPUTemp, 99)),
		"MIG-0": {Presence: health.Present, XIDs: []health.XID{{Code: 171, At: healthtest.At(1)}}},
	}, healthtest.GPU0, healthtest.MIG0, healthtest.GPU1)
	return known
}

func restart(t *testing.T, s *health.Snapshot, bootBefore, bootNow, sourceNow string) ([]health.DeviceState, bool) {
	t.Helper()
	text, err := json.Marshal(FromSnapshot(s, bootBefore))
	if err != nil {
		t.Fatal(err)
	}
	var m Saved
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	r := m.Restore(bootNow, health.SourceID{Kind: sourceNow}, healthtest.At(100))
	return r.Devices, r.Missed
}

func TestRestartForgetsNothingAndInventsNothing(t *testing.T) {
	s := &health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: bad(t)}
	devices, missed := restart(t, s, "boot-1", "boot-1", "dcgm")
	if !missed {
		t.Error("a GPU that goes while the agent restarts would not be missed")
	}
	// GPU-1 has tripped, and is well as far as was known.
	healthtest.WantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "MIG-0": health.Unhealthy, "GPU-1": health.Unknown})
	for _, d := range devices {
		i := slices.IndexFunc(s.Devices, func(e health.DeviceState) bool { return e.Device.ID == d.Device.ID })
		want := s.Devices[i].Verdict
		if d.Device.ID != "MIG-0" && !slices.Equal(d.Verdict.Causes(), want.Causes()) {
			t.Errorf("%s: %v, want %v", d.Device.ID, d.Verdict.Causes(), want.Causes())
		}
		if !d.Verdict.Since.Equal(want.Since) || len(d.Verdict.Trips) != len(want.Trips) {
			t.Errorf("%s: since %v trips %v, want %v %v", d.Device.ID, d.Verdict.Since, d.Verdict.Trips, want.Since, want.Trips)
		}
	}
	if got := devices[1].Verdict.Causes(); devices[1].Device.ID == "MIG-0" && !slices.Equal(got, []string{"xid-95"}) {
		t.Errorf("MIG-0 keeps %v, want its own only", got)
	}

	// The first good sample after the restart ends what had to be seen again, not what needs a cure.
	known := healthtest.Judge(health.DefaultConfig(), devices, 101, nil, nil, healthtest.GPU0, healthtest.MIG0, healthtest.GPU1)
	healthtest.WantStates(t, known, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "MIG-0": health.Unhealthy, "GPU-1": health.Healthy})
	known = healthtest.Judge(health.DefaultConfig(), known, 160, nil, nil, healthtest.GPU0, healthtest.MIG0, healthtest.GPU1)
	if got := known[0].Verdict.Causes(); !slices.Equal(got, []string{"xid-48"}) {
		t.Errorf("GPU-0 has %v, want what only a reset cures", got)
	}

	// A bad GPU that is not even listed after the restart is missed.
	known = healthtest.Judge(health.DefaultConfig(), devices, 101, nil, nil, healthtest.GPU1)
	healthtest.WantStates(t, known, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy, "MIG-0": health.Unhealthy, "GPU-1": health.Healthy})
	if !known[0].Verdict.Has(health.CauseMissing) || known[0].Device.Index != 0 {
		t.Errorf("GPU-0 is %+v", known[0])
	}
}

func TestRebootClearsAllButWhatItCannot(t *testing.T) {
	s := &health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: bad(t)}
	devices, missed := restart(t, s, "boot-1", "boot-2", "dcgm")
	if missed {
		t.Error("a GPU that was taken out while the node was off would be missed for ever")
	}
	if len(devices) != 1 || !slices.Equal(devices[0].Verdict.Causes(), []string{health.CauseRemapFailed}) || len(devices[0].Verdict.Trips) != 0 {
		t.Errorf("after a reboot there is %+v", devices)
	}
	if devices, missed := restart(t, s, "boot-1", "boot-1", "sim"); missed || len(devices) > 0 {
		t.Error("another source's GPUs would be shown or missed")
	}
	if devices, _ := restart(t, s, "", "boot-2", "dcgm"); len(devices) != 3 {
		t.Error("an unknown boot was taken for another one")
	}
}

// A clock that is ahead when something breaks, and right after the restart, makes nothing last for ever.
func TestAClockThatWasAhead(t *testing.T) {
	known := healthtest.Judge(health.DefaultConfig(), nil, 1_000_000, nil, map[health.DeviceID]health.Sample{"GPU-0": healthtest.Present(func(s *health.Sample) {
		s.XIDs = []health.XID{{Code: 999, At: healthtest.At(1_000_000)}}
	}, healthtest.Value(health.FieldRemapFailed, 1))}, healthtest.GPU0)
	devices, _ := restart(t, &health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: known}, "boot", "boot", "dcgm") // at 100 s
	healthtest.WantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Unhealthy})
	if v := devices[0].Verdict; v.Since.After(healthtest.At(100)) || len(v.Trips) != 1 || v.Trips[0].After(healthtest.At(100)) {
		t.Errorf("%+v", v)
	}
	devices = healthtest.Judge(health.DefaultConfig(), devices, 100+int(health.DefaultConfig().RecoverAfter/time.Second), nil, nil, healthtest.GPU0)
	healthtest.WantStates(t, devices, map[health.DeviceID]health.State{"GPU-0": health.Healthy})
}

func TestMemoryRefusesWhatItCannotHaveWritten(t *testing.T) {
	const head = `"format":"gpu-node-agent findings","version":1,"bootID":"","source":"dcgm"`
	for _, text := range []string{
		``, `[]`, `{}`, `null`, `{"format":"x","version":1}`,
		`{"format":"gpu-node-agent findings","version":0}`,
		`{` + head + `,"devices":[{"id":""}]}`,
		`{` + head + `,"devices":[{"id":"a"},{"id":"a"}]}`,
		`{` + head + `,"devices":[{"id":"a","findings":[{"cause":"","state":"unhealthy","clears":"reboot"}]}]}`,
		`{` + head + `,"devices":[{"id":"a","findings":[{"cause":"x","state":"healthy","clears":"reboot"}]}]}`,
		`{` + head + `,"devices":[{"id":"gpu-node-agent:extension","model":"{"}]}`,
	} {
		m := Saved{BootID: "untouched"}
		if err := json.Unmarshal([]byte(text), &m); err == nil && text != "null" {
			t.Errorf("%s: no error", text)
		}
		if m.BootID != "untouched" {
			t.Errorf("%s: half read", text)
		}
	}
}

func FuzzSaved(f *testing.F) {
	text, err := json.Marshal(FromSnapshot(&health.Snapshot{Source: health.Source{Kind: "dcgm"}, Devices: []health.DeviceState{{
		Device: healthtest.GPU0,
		Verdict: health.Verdict{State: health.Unhealthy, Since: healthtest.Epoch, Trips: []time.Time{healthtest.Epoch}, Findings: []health.Finding{
			{Cause: "xid-48", State: health.Unhealthy, Reason: "r", Action: "a", Since: healthtest.Epoch, Last: healthtest.Epoch, Reset: healthtest.Epoch, Clears: health.ClearsGPUReset},
		}},
	}}}, "boot"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"format":"gpu-node-agent findings","version":1,"devices":[]}`))
	f.Add([]byte(oldFile))
	f.Add([]byte(`{"format":"gpu-node-agent findings","version":1,"source":"sim","devices":[{"id":"gpu-node-agent:extension","model":` +
		`"{\"minor\":2,\"history\":true,\"detach\":{\"until\":\"2000-01-01T00:00:01Z\",\"forNanoseconds\":9},\"devices\":{\"a\":{\"seen\":[{\"code\":1}]}},\"others\":{\"dcgm\":{\"x\":[ \"<\"]}}}"},{"id":"a"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var m, again Saved
		if json.Unmarshal(text, &m) != nil {
			return
		}
		m.newer = 0
		out, err := json.Marshal(m)
		if err != nil {
			t.Fatalf("read and not to be written: %v", err)
		}
		if err := json.Unmarshal(out, &again); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if !reflect.DeepEqual(m, again) {
			t.Fatalf("%+v became %+v", m, again)
		}
		r := m.Restore("boot", health.SourceID{Kind: "dcgm"}, healthtest.Epoch)
		known := r.Devices
		health.Judge(health.DefaultConfig(), known, &health.Reading{Devices: []health.Device{healthtest.GPU0}, Samples: []health.Sample{{Device: healthtest.GPU0.ID, At: healthtest.Epoch, Presence: health.Present}}}, health.Basis{}, healthtest.Epoch)
	})
}
