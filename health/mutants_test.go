package health

import (
	"slices"
	"testing"
)

// devicesByID finds a device among those that were judged.
func devicesByID(known []DeviceState) map[DeviceID]DeviceState {
	all := make(map[DeviceID]DeviceState)
	for _, d := range known {
		all[d.Device.ID] = d
	}
	return all
}

// TestMIGXIDFollowsTheGPUsRecoveryAction: the driver tells of the whole GPU how bad an instance's XID was.
func TestMIGXIDFollowsTheGPUsRecoveryAction(t *testing.T) {
	const followed = 109 // context switch timeout: the recovery action tells how bad it is
	fault := blank(Present)
	fault.XIDs = []XID{{Code: followed, At: at(1)}}
	known := fold(t, nil, 0, nil, gpu0, gpu1, mig0, mig1)
	known = fold(t, known, 1, map[DeviceID]Sample{mig0.ID: fault}, gpu0, gpu1, mig0, mig1)
	if d := devicesByID(known)[mig0.ID]; d.Verdict.State == Unhealthy || d.XIDCounts[followed] != 1 {
		t.Fatalf("before the driver asks for a reset: %v, XIDs %v", d.Verdict, d.XIDCounts)
	}
	known = fold(t, known, 2, map[DeviceID]Sample{gpu0.ID: present(value(FieldRecoveryAction, 1))}, gpu0, gpu1, mig0, mig1)
	all := devicesByID(known)
	if v := all[mig0.ID].Verdict; v.State != Unhealthy || !v.faulty(xidCause(followed)) {
		t.Errorf("the driver asks for a reset, and the instance that had the XID is %v with %v", v.State, causes(v))
	}
	for _, id := range []DeviceID{gpu0.ID, mig1.ID, gpu1.ID} {
		if v := all[id].Verdict; slices.Contains(causes(v), xidCause(followed)) {
			t.Errorf("%s had no XID and has %v", id, causes(v))
		}
	}
}

// TestTemperatureLimitIsHotEnough: a GPU is degraded from the limit on, not above it.
func TestTemperatureLimitIsHotEnough(t *testing.T) {
	limit := DefaultConfig().Temperature
	for temperature, want := range map[float64]State{limit - 1: Healthy, limit: Degraded, limit + 1: Degraded} {
		known := fold(t, nil, 0, map[DeviceID]Sample{gpu0.ID: present(value(FieldGPUTemp, temperature))}, gpu0, gpu1)
		if got := devicesByID(known)[gpu0.ID].Verdict.State; got != want {
			t.Errorf("at %v °C of %v the GPU is %v; want %v", temperature, limit, got, want)
		}
	}
}

// TestTripsAreTheDevicesOwn: a MIG device does not break with its GPU, and breaks by itself whatever its GPU does.
func TestTripsAreTheDevicesOwn(t *testing.T) {
	devices := []Device{gpu0, gpu1, mig0, mig1}
	broken := present(value(FieldRecoveryAction, 2)) // the driver takes that back at once
	var known []DeviceState
	for second := range 2 * DefaultConfig().Flap.Trips {
		samples := map[DeviceID]Sample{}
		if second%2 == 1 {
			samples[gpu0.ID] = broken
		}
		known = fold(t, known, second, samples, devices...)
	}
	all := devicesByID(known)
	if v := all[gpu0.ID].Verdict; len(v.Trips) != DefaultConfig().Flap.Trips || !v.faulty(CauseFlapping) {
		t.Fatalf("the GPU has broken %d times, and has %v", len(v.Trips), causes(v))
	}
	for _, id := range []DeviceID{mig0.ID, mig1.ID} {
		v := all[id].Verdict
		if own := v.faulty(CauseFlapping); len(v.Trips) != 0 || own || v.State != Unhealthy {
			t.Errorf("%s has tripped at %v, flapping by itself: %t; it is %v", id, v.Trips, own, v.State)
		}
	}

	own := blank(Present)
	own.XIDs = []XID{{Code: 48, At: at(10)}}
	known = fold(t, nil, 8, map[DeviceID]Sample{gpu0.ID: broken}, devices...)
	known = fold(t, known, 9, map[DeviceID]Sample{gpu0.ID: broken}, devices...)
	known = fold(t, known, 10, map[DeviceID]Sample{gpu0.ID: broken, mig0.ID: own}, devices...)
	all = devicesByID(known)
	if a, b := len(all[mig0.ID].Verdict.Trips), len(all[mig1.ID].Verdict.Trips); a != 1 || b != 0 {
		t.Errorf("one instance of a broken GPU breaks by itself: it has tripped %d times, its sibling %d times", a, b)
	}
}
