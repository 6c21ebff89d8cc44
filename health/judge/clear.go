package judge

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The errors of Clear.
var (
	ErrUnknownDevice = errors.New("unknown device")
	ErrNoFinding     = errors.New("no such finding")
	ErrInherited     = errors.New("the device inherits it from its GPU")
	ErrDecision      = errors.New("it is not a fault")
	ErrMPSDaemon     = errors.New("it ends when the MPS daemon recovers")
	ErrStillPresent  = errors.New("the last poll still found it")
)

// Clear removes a device's finding with the given cause, or all of its findings if cause is empty, on an operator's request. It also drops
// what may still become a finding of the cause: a FAIL that is not confirmed yet, and an XID whose severity the recovery action decides.
// Clear returns the devices afterwards, for View, and the cleared causes. If the source is up, findings that the newest sample still shows
// stay: removing them until the next poll would let the kubelet allocate the device. Decisions stay too, because they end only with their
// reason.
//
// With a cause, Clear fails if the device has no such finding or if the finding stays; the error names the causes that can be cleared.
func Clear(
	c Config, devices []health.DeviceState, up bool, id health.DeviceID, cause string,
) (after []health.DeviceState, cleared []string, err error) {
	i := slices.IndexFunc(devices, func(d health.DeviceState) bool { return d.Device.ID == id })
	if i < 0 {
		var known []string
		for _, d := range devices {
			known = append(known, string(d.Device.ID))
		}
		return nil, nil, fmt.Errorf("%w %q; the devices are %s", ErrUnknownDevice, id, cmp.Or(strings.Join(known, ", "), "none"))
	}
	d := devices[i]
	current := func(f health.Finding) bool { return up && shows(c, d, f) }
	var others, inherited []string
	for _, f := range d.Verdict.Findings {
		switch {
		case f.From != "":
			inherited = append(inherited, f.Cause)
		case f.IsDecision():
			if f.Cause == cause {
				return nil, nil, fmt.Errorf("cannot clear %q of %s: %w: %s; %s", cause, id, ErrDecision, f.Reason, f.Advice())
			}
		case f.Cause == cause && f.OfMPS():
			return nil, nil, fmt.Errorf("cannot clear %q of %s: %w: %s; %s", cause, id, ErrMPSDaemon, f.Reason, f.Advice())
		case f.Cause == cause && current(f):
			return nil, nil, fmt.Errorf("cannot clear %q of %s: %w: %s; %s", cause, id, ErrStillPresent, f.Reason, f.Advice())
		case f.Cause == cause, cause == "" && !f.OfMPS() && !current(f):
			cleared = append(cleared, f.Cause)
		default:
			others = append(others, f.Cause)
		}
	}
	if len(cleared) == 0 && cause != "" {
		if slices.Contains(inherited, cause) {
			return nil, nil, fmt.Errorf("cannot clear %q of %s: %w; clear it on %s", cause, id, ErrInherited, d.Device.Parent)
		}
		return nil, nil, fmt.Errorf("cannot clear %q of %s: %w; its findings are %s", cause, id, ErrNoFinding,
			cmp.Or(strings.Join(others, ", "), "none"))
	}

	m := d.Memory.Without(func(f health.Finding) bool { return slices.Contains(cleared, f.Cause) })
	forgets := func(c string) bool { return cause == "" || c == cause }
	m.Unconfirmed = maps.Clone(m.Unconfirmed)
	maps.DeleteFunc(m.Unconfirmed, func(c string, _ health.Confirmation) bool { return forgets(c) })
	m.PendingXIDs = slices.DeleteFunc(slices.Clone(m.PendingXIDs), func(x health.XID) bool { return forgets(health.XIDCause(x.Code)) })
	if cause == "" || cause == health.CauseFlapping {
		m.Trips = nil
	}
	after = slices.Clone(devices)
	after[i].Memory = m
	return after, cleared, nil
}

// shows reports whether a device's newest sample shows the finding.
func shows(c Config, d health.DeviceState, f health.Finding) bool {
	return slices.ContainsFunc(conditionFindings(c, d.Sample), health.HasCause(f.Cause)) ||
		slices.ContainsFunc(d.Sample.Incidents, func(i health.Incident) bool {
			g, bad := incidentFinding(c, d.Device, i, d.Sample.At)
			return bad && g.Cause == f.Cause
		})
}
