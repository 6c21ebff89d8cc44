package judge

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// incidentFinding returns the finding of an incident. It returns false if the incident is ignored.
func incidentFinding(c Config, d health.Device, i health.Incident, now time.Time) (health.Finding, bool) {
	info := catalog.LookupIncident(i.Code)
	f := health.Finding{
		Cause: info.Cause(), State: c.Incidents.Effect(d, i).State(), Reason: i.Message, Action: info.Action,
		Since: now, Last: now, Clears: health.ClearsItself,
	}
	return f, f.State > health.Healthy
}

// confirm returns findings for the sample's incidents that count, and the state of incidents that are not confirmed yet. A WARN counts at
// once. A FAIL counts after Config.Confirm consecutive checks. Polls less than half an interval apart, which an event triggered, are one
// check. A sample without a check does not end the sequence.
func confirm(c Config, d health.Device, old health.Memory, s health.Sample) ([]health.Finding, map[string]health.Confirmation) {
	if !s.Checked {
		return nil, old.Unconfirmed
	}
	var found []health.Finding
	for _, i := range s.Incidents {
		f, bad := incidentFinding(c, d, i, s.At)
		j := slices.IndexFunc(found, health.HasCause(f.Cause))
		switch {
		case !bad:
		case j < 0:
			found = append(found, f)
		case f.State > found[j].State: // a WARN never hides a FAIL
			found[j] = f
		}
	}
	var unconfirmed map[string]health.Confirmation
	confirmed := slices.DeleteFunc(found, func(f health.Finding) bool {
		if f.State != health.Unhealthy {
			return false
		}
		x := old.Unconfirmed[f.Cause]
		if x.Checks == 0 || s.At.Sub(x.Last) >= c.Interval/2 {
			x = health.Confirmation{Checks: x.Checks + 1, Last: s.At}
		}
		if unconfirmed == nil {
			unconfirmed = make(map[string]health.Confirmation)
		}
		unconfirmed[f.Cause] = x
		return x.Checks < c.Confirm && !old.UnhealthyBy(f.Cause) // an existing finding needs no second confirmation
	})
	return confirmed, unconfirmed
}

// incidentsOfPastXIDs returns findings of the XIDs before the agent's start that only DCGM's checks still show. DCGM keeps
// such an incident until its engine restarts, so the fault may be cured: the device is at most Degraded.
func incidentsOfPastXIDs(c Config, s health.Sample) []health.Finding {
	var all []health.Finding
	for _, i := range s.Incidents {
		if i.Severity != health.SeverityFail || !catalog.RepeatsXID(i) || c.Incidents.Overrides(i.Code) {
			continue
		}
		info := catalog.LookupIncident(i.Code)
		all = append(all, health.Finding{
			Cause: info.Cause(), State: health.Degraded, Reason: i.Message + " (before the agent's start, without a reset since)",
			Action: info.Action, Since: s.At, Last: s.At, Clears: health.ClearsGPUReset,
		})
	}
	return all
}

// keepIncidents returns the memory with its incidents observed until now: while the checks do not work, an incident may
// last, and its end has to be observed for Config.RecoverAfter once they work again.
func keepIncidents(m health.Memory, now time.Time) health.Memory {
	if !slices.ContainsFunc(m.Findings, health.Finding.OfIncident) {
		return m
	}
	m.Findings = slices.Clone(m.Findings)
	for i := range m.Findings {
		if m.Findings[i].OfIncident() {
			restartCondition(&m.Findings[i], now)
		}
	}
	return m
}
