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
