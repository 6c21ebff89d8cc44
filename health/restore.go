package health

import (
	"slices"
	"time"
)

// NeedsSaving reports whether the device has anything that must outlive a restart.
func (d DeviceState) NeedsSaving() bool {
	return len(d.Verdict.Findings) > 0 || len(d.Verdict.Trips) > 0 || len(d.Verdict.PendingXIDs) > 0 || len(d.XIDHistory) > 0 ||
		slices.ContainsFunc(d.Awaited, func(a AwaitedXIDs) bool { return a.Witness == WitnessSource })
}

// Stable returns the verdict without everything that a poll changes while nothing happens, for comparison.
func (v Verdict) Stable() Verdict {
	v.unconfirmed, v.measured = nil, false
	v.Findings = slices.Clone(v.Findings)
	for i := range v.Findings {
		if v.Findings[i].condition() {
			v.Findings[i].Last, v.Findings[i].Reason = time.Time{}, ""
		}
	}
	return v
}

// Restored returns a verdict that another process saved, with its times converted by Rebase.
func (v Verdict) Restored(now time.Time) Verdict {
	v.Findings, v.Trips, v.PendingXIDs = slices.Clone(v.Findings), slices.Clone(v.Trips), slices.Clone(v.PendingXIDs)
	v.Since = Rebase(v.Since, now)
	for i := range v.PendingXIDs {
		v.PendingXIDs[i].At = Rebase(v.PendingXIDs[i].At, now)
	}
	for i := range v.Trips {
		v.Trips[i] = Rebase(v.Trips[i], now)
	}
	for i := range v.Findings {
		f := &v.Findings[i]
		f.Since, f.Last, f.Reset = Rebase(f.Since, now), Rebase(f.Last, now), Rebase(f.Reset, now)
		f.restartCondition(now)
	}
	v.unexplainedReset = v.unhealthyBy(CauseRecoveryAction) // unless the driver asks for something else
	return v
}

// Rebase converts a time that another process saved to an age on this process's monotonic clock. A time in the future
// becomes now; the zero time stays zero.
func Rebase(t, now time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return now.Add(-max(0, now.Sub(t)))
}

// DiscardMeasurements returns the devices without the effects of earlier measurements: how long a condition has been over,
// how often a check showed a fault, whether a device is present, and the recovery action of an event.
func DiscardMeasurements(devices []DeviceState, now time.Time) []DeviceState {
	devices = slices.Clone(devices)
	for i := range devices {
		devices[i].Sample.Presence = PresenceUnknown
		devices[i].EventAction, devices[i].Awaited = EventAction{}, slices.Clone(devices[i].Awaited)
		for j := range devices[i].Awaited {
			if a := &devices[i].Awaited[j]; a.Witness == WitnessSource {
				a.Since, a.Newest = time.Time{}, time.Time{}
			}
		}
		v := &devices[i].Verdict
		v.unconfirmed, v.Findings = nil, slices.Clone(v.Findings)
		for j := range v.Findings {
			v.Findings[j].restartCondition(now)
		}
	}
	return devices
}

// restartCondition makes now the last observation of a condition: without samples since then, the condition may have lasted
// until now.
func (f *Finding) restartCondition(now time.Time) {
	if f.condition() {
		if f.Last.Before(f.Reset) {
			f.Reset = now // the reset counted already and must not count again
		}
		f.Last = now
	}
}
