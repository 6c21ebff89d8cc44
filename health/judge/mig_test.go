package judge

import (
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func stateOf(devices []health.DeviceState, id health.DeviceID) health.DeviceState {
	i := slices.IndexFunc(devices, func(d health.DeviceState) bool { return d.Device.ID == id })
	return devices[i]
}

func verdictOf(devices []health.DeviceState, id health.DeviceID) health.Verdict {
	return stateOf(devices, id).Verdict
}

func TestMIGNodes(t *testing.T) {
	const u, d, h = health.Unhealthy, health.Degraded, health.Healthy
	all := []health.Device{gpu0, mig0, mig1, gpu1}
	states := func(gpu0, mig0, mig1, gpu1 health.State) map[health.DeviceID]health.State {
		return map[health.DeviceID]health.State{"GPU-0": gpu0, "MIG-0": mig0, "MIG-1": mig1, "GPU-1": gpu1}
	}
	withoutMIG0 := func(gpu0, mig1, gpu1 health.State) map[health.DeviceID]health.State {
		return map[health.DeviceID]health.State{"GPU-0": gpu0, "MIG-1": mig1, "GPU-1": gpu1}
	}
	gpus := func(gpu0, gpu1 health.State) map[health.DeviceID]health.State {
		return map[health.DeviceID]health.State{"GPU-0": gpu0, "GPU-1": gpu1}
	}
	lost := samples{"GPU-0": blank(health.Lost)}
	allLost := samples{"GPU-0": blank(health.Lost), "MIG-0": blank(health.Lost), "GPU-1": blank(health.Lost)}
	stale := samples{"GPU-0": {Presence: health.Present, Stale: true}}
	for name, steps := range map[string][]nodeStep{
		"a reset of the GPU clears XIDs of its MIG devices": {
			{0, nil, all, states(h, h, h, h)},
			{1, samples{"GPU-0": present(xids(48))}, all, states(u, u, u, h)},
			{2, samples{"GPU-0": present(value(health.FieldRecoveryAction, 1)), "MIG-0": migXIDs(95)}, all, states(u, u, u, h)},
			{3, nil, all, states(h, h, h, h)},
		},
		"an XID of a MIG device concerns no other device": {
			{0, samples{"MIG-0": migXIDs(48)}, all, states(h, u, h, h)},
			{1, samples{"GPU-0": present(value(health.FieldGPUTemp, 99))}, all, states(d, u, d, h)},
			{61, nil, all, states(h, u, h, h)},
		},
		"destroyed MIG devices, missing GPUs": {
			{0, nil, all, states(h, h, h, h)},
			{1, nil, []health.Device{gpu0, mig1, gpu1}, withoutMIG0(h, h, h)},
			{2, nil, []health.Device{gpu1}, withoutMIG0(u, u, h)},
			{3, nil, nil, withoutMIG0(u, u, u)},
			{4, nil, []health.Device{gpu0, gpu1}, gpus(h, h)},
		},
		"the MIG devices of a lost GPU stay until it returns": {
			{0, nil, all, states(h, h, h, h)},
			{1, lost, []health.Device{gpu0, gpu1}, states(u, u, u, h)},
			{2, nil, []health.Device{gpu0, gpu1}, gpus(h, h)},
		},
		"a destroyed MIG device leaves its XID 48 to the GPU": {
			{0, samples{"MIG-0": migXIDs(48)}, all, states(h, u, h, h)},
			{1, nil, []health.Device{gpu0, mig1, gpu1}, withoutMIG0(u, u, h)},
			{2, nil, all, states(u, u, u, h)},
			{3, lost, all, states(u, u, u, h)},
			{4, lost, all, states(u, u, u, h)},
			{5, nil, all, states(h, h, h, h)},
		},
		"a warning ends with its MIG device": {
			{
				0,
				samples{"MIG-0": migXIDs(94)},
				[]health.Device{gpu0, mig0, gpu1},
				map[health.DeviceID]health.State{"GPU-0": h, "MIG-0": d, "GPU-1": h},
			},
			{1, nil, []health.Device{gpu0, gpu1}, gpus(h, h)},
		},
		"a reset that destroys a MIG device clears its XID": {
			{
				0,
				samples{"GPU-0": present(value(health.FieldRecoveryAction, 1)), "MIG-0": migXIDs(48)},
				[]health.Device{gpu0, mig0, gpu1},
				map[health.DeviceID]health.State{"GPU-0": d, "MIG-0": u, "GPU-1": h},
			},
			{1, nil, []health.Device{gpu0, gpu1}, gpus(h, h)},
		},
		// The MIG devices of lost GPUs leave the list one reading later than the GPUs are lost.
		"the return of a MIG device proves no reset": {
			{
				0,
				samples{"MIG-0": migXIDs(48)},
				[]health.Device{gpu0, mig0, gpu1},
				map[health.DeviceID]health.State{"GPU-0": h, "MIG-0": u, "GPU-1": h},
			},
			{1, allLost, []health.Device{gpu0, mig0, gpu1}, map[health.DeviceID]health.State{"GPU-0": u, "MIG-0": u, "GPU-1": u}},
			{2, allLost, []health.Device{gpu0, mig0, gpu1}, map[health.DeviceID]health.State{"GPU-0": u, "MIG-0": u, "GPU-1": u}},
			{3, allLost, []health.Device{gpu0, gpu1}, map[health.DeviceID]health.State{"GPU-0": u, "MIG-0": u, "GPU-1": u}},
			{4, allLost, []health.Device{gpu0, gpu1}, map[health.DeviceID]health.State{"GPU-0": u, "MIG-0": u, "GPU-1": u}},
			{5, nil, []health.Device{gpu0, mig0, gpu1}, map[health.DeviceID]health.State{"GPU-0": h, "MIG-0": u, "GPU-1": h}},
		},
		"a stale GPU is degraded until it is measured": {
			{0, nil, all, states(h, h, h, h)},
			{1, stale, all, states(d, d, d, h)},
			{101, stale, all, states(d, d, d, h)},
			{102, nil, all, states(h, h, h, h)},
		},
	} {
		t.Run(name, func(t *testing.T) { runNode(t, steps) })
	}
}

func TestDestroyedMIGFindingKeepsBeginning(t *testing.T) {
	for _, code := range []int{48, 95, 151} {
		devices := judge(nil, 0, samples{"MIG-0": migXIDs(code)}, gpu0, mig0, mig1)
		devices = judge(devices, 1, nil, gpu0, mig1)
		m := devices[0].Memory
		if f := m.Findings[0]; f.Cause != health.XIDCause(code) || !f.Since.Equal(at(0)) || len(m.Trips) > 1 {
			t.Errorf("XID %d: %+v, trips %v", code, f, m.Trips)
		}
	}
}

func TestXIDOfWholeGPU(t *testing.T) {
	for code, whole := range map[int]bool{
		48: false, 94: false, 13: false, 171: false, 999: false, 95: true, 79: true, 119: true, 64: true,
		149: true,
	} {
		devices := judge(nil, 0, samples{"MIG-0": migXIDs(code), "MIG-1": migXIDs(code)}, gpu0, mig0, mig1, gpu1)
		cause, gpu := health.XIDCause(code), devices[0]
		if gpu.Verdict.Has(cause) != whole || len(gpu.XIDs.Codes) != 0 {
			t.Errorf("XID %d: the GPU has %v and counts %v; want whole GPU: %v", code, gpu.Verdict.Causes(), gpu.XIDs.Codes, whole)
		}
		if devices[1].Verdict.State > health.Healthy {
			t.Errorf("XID %d: the other GPU is %v", code, devices[1].Verdict.State)
		}
		for _, d := range devices[2:] {
			if d.XIDs.Codes[code].Total != 1 || whole && (d.Verdict.Has(cause) || d.Verdict.State != gpu.Verdict.State) {
				t.Errorf("XID %d: %s has %v and counts %v", code, d.Device.ID, d.Verdict.Causes(), d.XIDs.Codes)
			}
		}
	}
}

// The recovery action is a field of the GPU, also for the XIDs of its MIG devices.
func TestMIGXIDFollowsRecoveryActionOfGPU(t *testing.T) {
	const code = 109
	all := []health.Device{gpu0, mig0, mig1, gpu1}
	devices := judge(nil, 1, samples{"MIG-0": migXIDs(code)}, all...)
	if v := verdictOf(devices, mig0.ID); v.State == health.Unhealthy {
		t.Fatalf("before the driver asks for a reset: %v", v)
	}
	devices = judge(devices, 2, samples{"GPU-0": present(value(health.FieldRecoveryAction, 1))}, all...)
	for _, d := range devices {
		if got, want := d.Memory.UnhealthyBy(health.XIDCause(code)), d.Device.ID == mig0.ID; got != want {
			t.Errorf("%s has %v", d.Device.ID, d.Verdict.Causes())
		}
	}
}

// A MIG device inherits its GPU's findings and flapping, and does not trip itself.
func TestTripsOfMIGDevices(t *testing.T) {
	all := []health.Device{gpu0, mig0, mig1, gpu1}
	reboot := present(value(health.FieldRecoveryAction, 2)) // which the driver withdraws at once
	for name, fault := range map[string]samples{
		"recovery action": {"GPU-0": reboot},
		"lost":            {"GPU-0": blank(health.Lost), "MIG-0": blank(health.Lost)},
	} {
		var devices []health.DeviceState
		for i := range DefaultConfig().Flap.Trips {
			devices = judge(devices, 2*i, nil, all...)
			devices = judge(devices, 2*i+1, fault, all...)
		}
		if d := stateOf(devices, gpu0.ID); len(d.Memory.Trips) != DefaultConfig().Flap.Trips || !d.Memory.UnhealthyBy(health.CauseFlapping) {
			t.Errorf("%s: GPU-0: trips %v, causes %v", name, d.Memory.Trips, d.Verdict.Causes())
		}
		for _, id := range []health.DeviceID{mig0.ID, mig1.ID} {
			d := stateOf(devices, id)
			if v := d.Verdict; len(d.Memory.Trips) != 0 || v.Cause() != health.CauseFlapping || v.Findings[0].From != gpu0.ID ||
				v.State != health.Unhealthy {
				t.Errorf("%s: %s: %v, trips %v, causes %v", name, id, v.State, d.Memory.Trips, v.Causes())
			}
		}
	}

	// A fault of a MIG device is a trip also while its GPU is unhealthy.
	devices := judge(nil, 8, samples{gpu0.ID: reboot}, all...)
	devices = judge(devices, 9, samples{gpu0.ID: reboot}, all...)
	devices = judge(devices, 10, samples{gpu0.ID: reboot, mig0.ID: migXIDs(48)}, all...)
	if a, b := len(stateOf(devices, mig0.ID).Memory.Trips), len(stateOf(devices, mig1.ID).Memory.Trips); a != 1 || b != 0 {
		t.Errorf("%d trips of the faulty MIG device, %d of its sibling; want 1 and 0", a, b)
	}
}

// The flapping of a MIG device concerns its partition only, so it ends with the device.
func TestFlappingEndsWithMIGDevice(t *testing.T) {
	c := DefaultConfig()
	c.Flap.Trips = 1
	devices := judgeAll(c, nil, 0, nil, samples{"MIG-0": migXIDs(48)}, gpu0, mig0, mig1)
	if v := stateOf(devices, mig0.ID); !v.Memory.UnhealthyBy(health.CauseFlapping) {
		t.Fatalf("the MIG device has %v", v.Verdict.Causes())
	}
	devices = judgeAll(c, devices, 1, nil, nil, gpu0, mig1)
	if v := verdictOf(devices, gpu0.ID); v.Has(health.CauseFlapping) || !v.Has(health.XIDCause(48)) {
		t.Errorf("the GPU has %v, want the XID alone", v.Causes())
	}
}
