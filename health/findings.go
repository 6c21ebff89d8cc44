package health

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// reportedAt is when an XID was reported, by our clock. The driver's may be another one, or may have been set since: DCGM
// keeps ten minutes of XIDs, so that one of another time than those is taken to be of now.
func reportedAt(x XID, now time.Time) time.Time {
	if age := now.Sub(x.At); age < 0 || age > 10*time.Minute {
		return now
	}
	return x.At
}

// xidFinding says what an XID means for the device that it is of, if anything.
func xidFinding(c Config, x XID, now time.Time) (Finding, bool) {
	info := c.XID.Lookup(x.Code)
	if info.Clears == ClearsRestart {
		info.Clears = ClearsItself // nobody sees an application start anew; a while without the XID stands for it
	}
	f := Finding{
		Cause: xidCause(x.Code), Reason: fmt.Sprintf("XID %d: %s", x.Code, info.Name), Action: info.Action,
		Since: reportedAt(x, now), Last: now, Clears: info.Clears,
	}
	switch info.Effect {
	case EffectIgnore:
		return Finding{}, false
	case EffectWarn:
		f.State = Degraded
	case EffectUnhealthy:
		f.State = Unhealthy
	}
	return f, true
}

// followFor is how long after an XID the driver may say, by its recovery action, how bad it was. It does so
// at once; the polls and the engine between us and it take some seconds.
const followFor = time.Minute

// followers returns the XIDs of the last while that the recovery action is to tell more of. A reset is their
// end.
func followers(c Config, was Verdict, xids []XID, now time.Time, reset bool) []XID {
	var all []XID
	for _, x := range was.Follow {
		if !reset && now.Sub(x.At) < followFor && c.XID.follows(x.Code) {
			all = append(all, x)
		}
	}
	for _, x := range xids {
		if c.XID.follows(x.Code) {
			all = slices.DeleteFunc(all, func(y XID) bool { return y.Code == x.Code })
			all = append(all, XID{x.Code, now})
		}
	}
	return all
}

// escalated returns what those XIDs are if the driver wants a reset, of the device or of its GPU: then the GPU
// does not work as it should, whatever else it shows. Other recovery actions are Unhealthy by themselves.
func escalated(follow []XID, own []Finding, gpu Verdict) []Finding {
	wanted := func(f Finding) bool { return f.Cause == CauseRecoveryAction && f.Action == ActionResetGPU }
	if len(follow) == 0 || !slices.ContainsFunc(own, wanted) && !slices.ContainsFunc(gpu.Findings, wanted) {
		return nil
	}
	var all []Finding
	for _, x := range follow {
		all = append(all, Finding{
			Cause: xidCause(x.Code), State: Unhealthy, Action: ActionResetGPU, Since: x.At, Last: x.At, Clears: ClearsGPUReset,
			Reason: fmt.Sprintf("XID %d: %s; the driver asks for a reset", x.Code, LookupXID(x.Code).Name),
		})
	}
	return all
}

// incidentPrefix begins the cause of every finding that is an incident of DCGM's.
const incidentPrefix = "dcgm-"

func (f Finding) incident() bool { return strings.HasPrefix(f.Cause, incidentPrefix) }

// tripped returns when the device became unhealthy by itself, lately, this sample included.
func tripped(c Config, was Verdict, own []Finding, now time.Time) []time.Time {
	trips := slices.Clone(was.Trips)
	trips = slices.DeleteFunc(trips, func(t time.Time) bool { return now.Sub(t) >= c.Flap.Within })
	if !was.unhealthyByItself() && (Verdict{Findings: own}).unhealthyByItself() {
		trips = append(trips, now)
	}
	return trips
}

func (v Verdict) unhealthyByItself() bool {
	return slices.ContainsFunc(v.Findings, func(f Finding) bool {
		return f.From == "" && f.State == Unhealthy && !f.decision() && !f.Common
	})
}

// flapping is the finding of a device that has come back too often to be believed.
func flapping(c Config, own []Finding, trips []time.Time, now time.Time) Finding {
	cause := ""
	for _, f := range own {
		if f.State == Unhealthy && f.Cause != CauseFlapping {
			cause = ", the last time by " + f.Cause
		}
	}
	return Finding{
		Cause: CauseFlapping, State: Unhealthy,
		Reason: fmt.Sprintf("the GPU became unhealthy %d times within %v%s", len(trips), c.Flap.Within, cause),
		Action: ActionFindCause,
		Since:  now, Last: now, Clears: ClearsReboot,
	}
}

// incidentFinding says what an incident means for the device that it is of, if anything.
func incidentFinding(c Config, d Device, i Incident, now time.Time) (Finding, bool) {
	info := LookupIncident(i.Code)
	f := Finding{
		Cause: incidentCause(info), Reason: i.Message, Action: info.Action, Since: now, Last: now, Clears: ClearsItself,
	}
	switch c.Incidents.Effect(d, i) {
	case EffectIgnore:
		return Finding{}, false
	case EffectWarn:
		f.State = Degraded
	case EffectUnhealthy:
		f.State = Unhealthy
	}
	return f, true
}

// incidentCause is DCGM's name of the code in the style of the other causes: "dcgm-nvlink-down".
func incidentCause(i IncidentInfo) string {
	name, known := strings.CutPrefix(i.Name, incidentNamePrefix)
	if !known {
		name = strconv.Itoa(i.Code)
	}
	return incidentPrefix + strings.ToLower(strings.ReplaceAll(name, "_", "-"))
}

// confirm returns the findings of DCGM's incidents that are to be believed, and what is still to be
// confirmed. A warning is believed at once. A fault must have been seen by Config.Confirm checks in a row:
// polls that an event has brought close together are one check.
func confirm(c Config, d Device, was Verdict, s Sample) ([]Finding, map[string]suspect) {
	if !s.Checked {
		return nil, was.suspect // nobody looked: that breaks no row
	}
	var found []Finding
	for _, i := range s.Incidents {
		f, bad := incidentFinding(c, d, i, s.At)
		j := slices.IndexFunc(found, func(g Finding) bool { return g.Cause == f.Cause })
		switch {
		case !bad:
		case j < 0:
			found = append(found, f)
		case f.State > found[j].State: // a WARN never hides a FAIL
			found[j] = f
		}
	}
	var suspects map[string]suspect
	sure := slices.DeleteFunc(found, func(f Finding) bool {
		if f.State != Unhealthy {
			return false
		}
		x := was.suspect[f.Cause]
		if x.seen == 0 || s.At.Sub(x.last) >= c.Interval/2 {
			x = suspect{x.seen + 1, s.At}
		}
		if suspects == nil {
			suspects = make(map[string]suspect)
		}
		suspects[f.Cause] = x
		return x.seen < c.Confirm && !was.faulty(f.Cause) // what stands needs no second proof
	})
	return sure, suspects
}

// faulty tells whether the device is Unhealthy by itself for that cause.
func (v Verdict) faulty(cause string) bool {
	return slices.ContainsFunc(v.Findings, func(f Finding) bool { return f.From == "" && f.Cause == cause && f.State == Unhealthy })
}
