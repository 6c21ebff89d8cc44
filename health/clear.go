package health

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
)

// Clear is an operator's word that a device is well again: it drops the device's finding of that cause, or
// all of them if cause is empty, and returns the causes that it has dropped. What a source that is up shows to stand is
// not dropped, not even until the next poll: the kubelet would give the device out meanwhile. To ask for such a cause is an
// error, and so is a cause that does not stand; the error names what there is to clear. A decision is not the device's
// fault and ends with its reason only.
func (m *Monitor) Clear(id DeviceID, cause string) ([]string, error) {
	m.mu.Lock()
	defer m.unlock()
	i := slices.IndexFunc(m.now.Devices, func(d DeviceState) bool { return d.Device.ID == id })
	if i < 0 {
		var known []string
		for _, d := range m.now.Devices {
			known = append(known, string(d.Device.ID))
		}
		return nil, fmt.Errorf("device %q is not known; use one of %s", id, orNone(known))
	}
	d := m.now.Devices[i]
	c := m.config.Load()
	stands := func(f Finding) bool { return c != nil && m.now.Source.Status == SourceUp && d.shows(*c, f) }
	var dropped, own, inherited []string
	for _, f := range d.Verdict.Findings {
		switch {
		case f.From != "":
			inherited = append(inherited, f.Cause)
		case f.decision():
			if f.Cause == cause {
				return nil, fmt.Errorf("cause %q of %s is no fault that can be cleared: %s; %s", cause, id, f.Reason, f.Action)
			}
		case f.Cause == cause && stands(f):
			return nil, fmt.Errorf("cause %q of %s stands as it was just measured, and cannot be cleared: %s; %s", cause, id, f.Reason, f.Action)
		case f.Cause == cause, cause == "" && !stands(f):
			dropped = append(dropped, f.Cause)
		default:
			own = append(own, f.Cause)
		}
	}
	if len(dropped) == 0 && cause != "" {
		if slices.Contains(inherited, cause) {
			return nil, fmt.Errorf("cause %q of %s is its GPU's; clear it on %s", cause, id, d.Device.Parent)
		}
		return nil, fmt.Errorf("cause %q does not stand on %s; there stand %s", cause, id, orNone(own))
	}

	now := time.Now()
	v := d.Verdict.without(now, func(f Finding) bool { return f.From == "" && slices.Contains(dropped, f.Cause) })
	v.suspect, v.follow = nil, nil
	if cause == "" || cause == CauseFlapping {
		v.Trips = nil
	}
	d.Verdict = v
	before := m.now.Devices
	m.now.Devices = slices.Clone(before)
	m.now.Devices[i] = d
	for j, child := range before {
		if child.Device.Parent == id {
			m.now.Devices[j].Verdict = child.Verdict.without(now, func(f Finding) bool {
				return f.From == id && slices.Contains(dropped, f.Cause)
			})
		}
	}
	if c != nil { // what was decided for its sake ends too, though no poll may come
		m.now.Devices = decide(*c, before, m.now.Devices, m.held, m.release, now)
	}
	m.logLater(func() {
		m.log.Warn("cleared by an operator", zap.String("device", string(id)), zap.Strings("causes", dropped))
	})
	m.logChangesLater(before, m.now.Devices)
	m.store()
	return dropped, nil
}

// shows tells whether a finding of the device is of what its newest sample shows.
func (d DeviceState) shows(c Config, f Finding) bool {
	return slices.ContainsFunc(seen(c, d.Sample), func(g Finding) bool { return g.Cause == f.Cause }) ||
		slices.ContainsFunc(d.Sample.Incidents, func(i Incident) bool {
			g, bad := incidentFinding(c, d.Device, i, d.Sample.At)
			return bad && g.Cause == f.Cause
		})
}

// without returns the verdict without some of its findings.
func (v Verdict) without(now time.Time, drop func(Finding) bool) Verdict {
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
