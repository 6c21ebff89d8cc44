package health

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
)

func lines(err error) []string { return strings.Split(err.Error(), "\n") }

// monitorOf is a monitor that has published these devices and does not run.
func monitorOf(c Config, known []DeviceState) *Monitor {
	config, out := new(Latest[Config]), new(Latest[Snapshot])
	config.Store(&c)
	m := NewMonitor(config, new(Latest[MonitorSource]), out, zap.NewNop())
	m.Restore(Recalled{Devices: known, Missed: true})
	return m
}

// bad is a node on which every sort of finding stands.
func bad(t *testing.T) []DeviceState {
	t.Helper()
	known := fold(t, nil, 0, map[DeviceID]Sample{"GPU-1": blank(Lost)}, gpu0, mig0, gpu1)
	known = fold(t, known, 1, map[DeviceID]Sample{
		"GPU-0": present(xids(48, 999), value(FieldRemapFailed, 1), value(FieldGPUTemp, 99)),
		"MIG-0": {Presence: Present, XIDs: []XID{{Code: 171, At: at(1)}}},
	}, gpu0, mig0, gpu1)
	return known
}

func restart(t *testing.T, s *Snapshot, bootBefore, bootNow, sourceNow string) ([]DeviceState, bool) {
	t.Helper()
	text, err := json.Marshal(Remember(s, bootBefore))
	if err != nil {
		t.Fatal(err)
	}
	var m Memory
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	r := m.Recall(bootNow, MonitorSource{Kind: sourceNow}, at(100))
	return r.Devices, r.Missed
}

func TestRestartForgetsNothingAndInventsNothing(t *testing.T) {
	s := &Snapshot{Source: Source{Kind: "dcgm"}, Devices: bad(t)}
	devices, missed := restart(t, s, "boot-1", "boot-1", "dcgm")
	if !missed {
		t.Error("a GPU that goes while the agent restarts would not be missed")
	}
	// GPU-1 has tripped, and is well as far as was known.
	wantStates(t, devices, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "GPU-1": Unknown})
	for _, d := range devices {
		i := slices.IndexFunc(s.Devices, func(e DeviceState) bool { return e.Device.ID == d.Device.ID })
		want := s.Devices[i].Verdict
		if d.Device.ID != "MIG-0" && !slices.Equal(causes(d.Verdict), causes(want)) {
			t.Errorf("%s: %v, want %v", d.Device.ID, causes(d.Verdict), causes(want))
		}
		if !d.Verdict.Since.Equal(want.Since) || len(d.Verdict.Trips) != len(want.Trips) {
			t.Errorf("%s: since %v trips %v, want %v %v", d.Device.ID, d.Verdict.Since, d.Verdict.Trips, want.Since, want.Trips)
		}
	}
	if got := causes(devices[1].Verdict); devices[1].Device.ID == "MIG-0" && !slices.Equal(got, []string{"xid-95"}) {
		t.Errorf("MIG-0 keeps %v, want its own only", got)
	}

	// The first good sample after the restart ends what had to be seen again, not what needs a cure.
	known := fold(t, devices, 101, nil, gpu0, mig0, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "GPU-1": Healthy})
	known = fold(t, known, 160, nil, gpu0, mig0, gpu1)
	if got := causes(known[0].Verdict); !slices.Equal(got, []string{"xid-48"}) {
		t.Errorf("GPU-0 has %v, want what only a reset cures", got)
	}

	// A bad GPU that is not even listed after the restart is missed.
	known = fold(t, devices, 101, nil, gpu1)
	wantStates(t, known, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy, "GPU-1": Healthy})
	if !known[0].Verdict.has(CauseMissing) || known[0].Device.Index != 0 {
		t.Errorf("GPU-0 is %+v", known[0])
	}
}

func TestRebootClearsAllButWhatItCannot(t *testing.T) {
	s := &Snapshot{Source: Source{Kind: "dcgm"}, Devices: bad(t)}
	devices, missed := restart(t, s, "boot-1", "boot-2", "dcgm")
	if missed {
		t.Error("a GPU that was taken out while the node was off would be missed for ever")
	}
	if len(devices) != 1 || !slices.Equal(causes(devices[0].Verdict), []string{CauseRemapFailed}) || len(devices[0].Verdict.Trips) != 0 {
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
	known := fold(t, nil, 1_000_000, map[DeviceID]Sample{"GPU-0": present(func(s *Sample) {
		s.XIDs = []XID{{Code: 999, At: at(1_000_000)}}
	}, value(FieldRemapFailed, 1))}, gpu0)
	devices, _ := restart(t, &Snapshot{Source: Source{Kind: "dcgm"}, Devices: known}, "boot", "boot", "dcgm") // at 100 s
	wantStates(t, devices, map[DeviceID]State{"GPU-0": Unhealthy})
	if v := devices[0].Verdict; v.Since.After(at(100)) || len(v.Trips) != 1 || v.Trips[0].After(at(100)) {
		t.Errorf("%+v", v)
	}
	devices = fold(t, devices, 100+int(DefaultConfig().RecoverAfter/time.Second), nil, gpu0)
	wantStates(t, devices, map[DeviceID]State{"GPU-0": Healthy})
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
		m := Memory{BootID: "untouched"}
		if err := json.Unmarshal([]byte(text), &m); err == nil && text != "null" {
			t.Errorf("%s: no error", text)
		}
		if m.BootID != "untouched" {
			t.Errorf("%s: half read", text)
		}
	}
}

func FuzzMemory(f *testing.F) {
	text, err := json.Marshal(Remember(&Snapshot{Source: Source{Kind: "dcgm"}, Devices: []DeviceState{{
		Device: gpu0,
		Verdict: Verdict{State: Unhealthy, Since: epoch, Trips: []time.Time{epoch}, Findings: []Finding{
			{Cause: "xid-48", State: Unhealthy, Reason: "r", Action: "a", Since: epoch, Last: epoch, Reset: epoch, Clears: ClearsGPUReset},
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
		var m, again Memory
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
		r := m.Recall("boot", MonitorSource{Kind: "dcgm"}, epoch)
		restored := monitorOf(DefaultConfig(), nil)
		restored.Restore(r)
		restored.takeBack(nil, "test") // ends its timer
		known := r.Devices
		Judge(DefaultConfig(), known, &Reading{Devices: []Device{gpu0}, Samples: []Sample{{Device: gpu0.ID, At: epoch, Presence: Present}}}, nil, epoch)
	})
}
