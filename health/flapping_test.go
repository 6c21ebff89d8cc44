package health

import "testing"

func TestFlapping(t *testing.T) {
	lost := []string{CauseLost}
	var warnings []step
	for i := range 10 {
		warnings = append(warnings,
			step{200 * i, present(value(FieldGPUTemp, 99)), Degraded, []string{CauseTemperature}}, step{200*i + 100, present(), Healthy, nil})
	}
	for name, steps := range map[string][]step{
		"three trips within an hour, until a reboot": {
			{0, blank(Lost), Unhealthy, lost},
			{1, present(), Healthy, nil},
			{2, blank(Lost), Unhealthy, lost},
			{3, blank(Lost), Unhealthy, lost}, // the same trip
			{4, present(), Healthy, nil},
			{5, blank(Lost), Unhealthy, []string{CauseFlapping, CauseLost}},
			{6, present(), Unhealthy, []string{CauseFlapping}},
			{99999, present(), Unhealthy, []string{CauseFlapping}},
		},
		"trips over an hour ago do not count": {
			{0, blank(Lost), Unhealthy, lost},
			{1, present(), Healthy, nil},
			{10, blank(Lost), Unhealthy, lost},
			{11, present(), Healthy, nil},
			{3600, blank(Lost), Unhealthy, lost},
			{3601, present(), Healthy, nil},
			{3602, blank(Lost), Unhealthy, []string{CauseFlapping, CauseLost}},
		},
		"warnings are not trips": warnings,
	} {
		t.Run(name, func(t *testing.T) {
			for _, f := range runSteps(t, DefaultConfig(), steps)[0].Verdict.Findings {
				if f.Cause == CauseFlapping && f.Clears != ClearsReboot {
					t.Errorf("flapping clears by %v", f.Clears)
				}
			}
		})
	}
}

// A MIG device that is lost with its GPU inherits the finding and does not trip.
func TestFlappingOfGPUWithMIGDevice(t *testing.T) {
	var devices []DeviceState
	for i := range 3 {
		devices = judge(devices, 2*i, samples{"GPU-0": blank(Lost), "MIG-0": blank(Lost)}, gpu0, mig0)
		devices = judge(devices, 2*i+1, nil, gpu0, mig0)
	}
	wantStates(t, devices, map[DeviceID]State{"GPU-0": Unhealthy, "MIG-0": Unhealthy})
	if v := devices[1].Verdict; v.Findings[0].Cause != CauseFlapping || v.Findings[0].From != "GPU-0" || len(v.Trips) != 0 {
		t.Errorf("the MIG device has %+v and trips %v", v.Findings[0], v.Trips)
	}
}
