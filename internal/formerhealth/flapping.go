package formerhealth

import (
	"fmt"
	"slices"
	"time"
)

// trips returns the times within Config.Flap.Within at which the device became unhealthy by a fault of its own, this sample
// included.
func trips(c Config, old Verdict, findings []Finding, now time.Time) []time.Time {
	all := slices.DeleteFunc(slices.Clone(old.Trips), func(t time.Time) bool { return now.Sub(t) >= c.Flap.Within })
	if !old.faulty() && (Verdict{Findings: findings}).faulty() {
		all = append(all, now)
	}
	return all
}

// faulty reports whether a fault of the device itself makes it Unhealthy. Decisions, outages and faults of an MPS daemon are not.
func (v Verdict) faulty() bool {
	return v.ownFinding(func(f Finding) bool { return f.State == Unhealthy && !f.addedByDecide() && !f.InOutage }) != nil
}

// flappingFinding returns the finding of a device that became unhealthy too often.
func flappingFinding(c Config, findings []Finding, trips int, now time.Time) Finding {
	last := ""
	for _, f := range findings {
		if f.State == Unhealthy && f.Cause != CauseFlapping {
			last = ", most recently by " + f.Cause
		}
	}
	return Finding{
		Cause: CauseFlapping, State: Unhealthy, Action: ActionFindCause, Since: now, Last: now, Clears: ClearsReboot,
		Reason: fmt.Sprintf("the GPU became unhealthy %d times within %v%s", trips, c.Flap.Within, last),
	}
}
