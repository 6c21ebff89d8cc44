package judge

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// trips returns the times within Config.Flap.Within at which the device became unhealthy by a fault of its own, this sample
// included.
func trips(c Config, old health.Memory, findings []health.Finding, now time.Time) []time.Time {
	all := slices.DeleteFunc(slices.Clone(old.Trips), func(t time.Time) bool { return now.Sub(t) >= c.Flap.Within })
	if !faulty(old.Findings) && faulty(findings) {
		all = append(all, now)
	}
	return all
}

// faulty reports whether a fault of the device itself makes it Unhealthy. An outage is not.
func faulty(own []health.Finding) bool {
	return slices.ContainsFunc(own, func(f health.Finding) bool { return f.State == health.Unhealthy && !f.InOutage })
}

// flapping returns the finding of a device that became unhealthy too often, unless it has that finding.
func flapping(c Config, findings []health.Finding, trips []time.Time, now time.Time) []health.Finding {
	if c.Flap.Trips == 0 || len(trips) < c.Flap.Trips || slices.ContainsFunc(findings, health.HasCause(health.CauseFlapping)) {
		return nil
	}
	last := ""
	for _, f := range findings {
		if f.State == health.Unhealthy && f.Cause != health.CauseFlapping {
			last = ", most recently by " + f.Cause
		}
	}
	return []health.Finding{{
		Cause: health.CauseFlapping, State: health.Unhealthy, Action: health.ActionFindCause, Since: now, Last: now, Clears: health.ClearsReboot,
		Reason: fmt.Sprintf("the GPU became unhealthy %d times within %v%s", len(trips), c.Flap.Within, last),
	}}
}
