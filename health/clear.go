package health

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Clear is an operator's word that a device is well again: it drops the device's finding of that cause, or
// all of them if cause is empty, and returns the devices and the causes that it has dropped. What a source that is up shows to
// stand is not dropped, not even until the next poll: the kubelet would give the device out meanwhile. To ask for such a cause is an
// error, and so is a cause that does not stand; the error names what there is to clear. A decision is not the device's
// fault and ends with its reason only.
func Clear(c Config, devices []DeviceState, up bool, id DeviceID, cause string, now time.Time) (after []DeviceState, dropped []string, err error) {
	i := slices.IndexFunc(devices, func(d DeviceState) bool { return d.Device.ID == id })
	if i < 0 {
		var known []string
		for _, d := range devices {
			known = append(known, string(d.Device.ID))
		}
		return nil, nil, fmt.Errorf("device %q is not known; use one of %s", id, orNone(known))
	}
	d := devices[i]
	stands := func(f Finding) bool { return up && d.shows(c, f) }
	var own, inherited []string
	for _, f := range d.Verdict.Findings {
		switch {
		case f.From != "":
			inherited = append(inherited, f.Cause)
		case f.decision():
			if f.Cause == cause {
				return nil, nil, fmt.Errorf("cause %q of %s is no fault that can be cleared: %s; %s", cause, id, f.Reason, f.Action.Advice())
			}
		case f.Cause == cause && stands(f):
			return nil, nil, fmt.Errorf("cause %q of %s stands as it was just measured, and cannot be cleared: %s; %s", cause, id, f.Reason, f.Action.Advice())
		case f.Cause == cause, cause == "" && !stands(f):
			dropped = append(dropped, f.Cause)
		default:
			own = append(own, f.Cause)
		}
	}
	if len(dropped) == 0 && cause != "" {
		if slices.Contains(inherited, cause) {
			return nil, nil, fmt.Errorf("cause %q of %s is its GPU's; clear it on %s", cause, id, d.Device.Parent)
		}
		return nil, nil, fmt.Errorf("cause %q does not stand on %s; there stand %s", cause, id, orNone(own))
	}

	v := d.Verdict.Without(now, func(f Finding) bool { return f.From == "" && slices.Contains(dropped, f.Cause) })
	v.suspect, v.Follow = nil, nil
	if cause == "" || cause == CauseFlapping {
		v.Trips = nil
	}
	after = slices.Clone(devices)
	after[i].Verdict = v
	for j, child := range devices {
		if child.Device.Parent == id {
			after[j].Verdict = child.Verdict.Without(now, func(f Finding) bool {
				return f.From == id && slices.Contains(dropped, f.Cause)
			})
		}
	}
	return after, dropped, nil
}

// shows tells whether a finding of the device is of what its newest sample shows.
func (d DeviceState) shows(c Config, f Finding) bool {
	return slices.ContainsFunc(seen(c, d.Sample), func(g Finding) bool { return g.Cause == f.Cause }) ||
		slices.ContainsFunc(d.Sample.Incidents, func(i Incident) bool {
			g, bad := incidentFinding(c, d.Device, i, d.Sample.At)
			return bad && g.Cause == f.Cause
		})
}

// Without returns the verdict without some of its findings.
func (v Verdict) Without(now time.Time, drop func(Finding) bool) Verdict {
	was := v.State
	v.Findings = slices.DeleteFunc(slices.Clone(v.Findings), drop)
	if was > Healthy {
		v.State = Healthy
	}
	for _, f := range v.Findings {
		v.State = max(v.State, f.State)
	}
	if v.State != was {
		v.Since = now
	}
	return v
}

func orNone(s []string) string {
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, ", ")
}
