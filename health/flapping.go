package health

import (
	"fmt"
	"slices"
	"time"
)

// trips returns the times within Config.Flap.Within at which the device became unhealthy by a fault of its own, this sample
// included.
func trips(c Config, old Memory, findings []Finding, now time.Time) []time.Time {
	all := slices.DeleteFunc(slices.Clone(old.Trips), func(t time.Time) bool { return now.Sub(t) >= c.Flap.Within })
	if !faulty(old.Findings) && faulty(findings) {
		all = append(all, now)
	}
	return all
}

// faulty reports whether a fault of the device itself makes it Unhealthy. An outage is not.
func faulty(own []Finding) bool {
	return slices.ContainsFunc(own, func(f Finding) bool { return f.State == Unhealthy && !f.InOutage })
}

// flapping returns the finding of a device that became unhealthy too often, unless it has that finding.
func flapping(c Config, findings []Finding, trips []time.Time, now time.Time) []Finding {
	if c.Flap.Trips == 0 || len(trips) < c.Flap.Trips || slices.ContainsFunc(findings, hasCause(CauseFlapping)) {
		return nil
	}
	last := ""
	for _, f := range findings {
		if f.State == Unhealthy && f.Cause != CauseFlapping {
			last = ", most recently by " + f.Cause
		}
	}
	return []Finding{{
		Cause: CauseFlapping, State: Unhealthy, Action: ActionFindCause, Since: now, Last: now, Clears: ClearsReboot,
		Reason: fmt.Sprintf("the GPU became unhealthy %d times within %v%s", len(trips), c.Flap.Within, last),
	}}
}
