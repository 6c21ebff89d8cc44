package formerhealth

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
	v.unconfirmed, v.measured, v.eventAction = nil, false, eventAction{}
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

// LateState is the state that another process saved, read after this one has measured.
type LateState struct {
	Devices        []DeviceState
	DriverReloaded bool // the driver was loaded after the state was saved, which reset all devices
	XIDHistory     bool // Devices hold every XID that the source delivered before this process started: see DeviceState.XIDHistory

	// Past are the XIDs from before the start that the source delivered to this process, by device.
	Past map[DeviceID][]XID
}

// RestoreLate returns the devices as if the saved ones had been restored before the first reading. A saved device that is not in devices is
// added. A saved finding does not count if the device was reset after it, or if what this process has measured shows its end. With
// LateState.XIDHistory, the XIDs of LateState.Past that were not saved are returned as not judged.
func RestoreLate(c Config, devices []DeviceState, late LateState, now time.Time) (after []DeviceState, unjudged []Sample) {
	after = slices.Clone(devices)
	resets := make(map[DeviceID]reset) // of GPUs
	for i := range after {
		d := &after[i]
		j := slices.IndexFunc(late.Devices, func(s DeviceState) bool { return s.Device.ID == d.Device.ID })
		var from DeviceState
		if j >= 0 {
			from = late.Devices[j]
		}
		if late.XIDHistory {
			xids := slices.DeleteFunc(slices.Clone(late.Past[d.Device.ID]), func(x XID) bool {
				return slices.ContainsFunc(from.XIDHistory, x.SameEvent)
			})
			if len(xids) > 0 {
				unjudged = append(unjudged, Sample{Device: d.Device.ID, At: now, XIDs: xids})
			}
			// These incidents stood for the XIDs before the start, which are known now.
			d.Verdict = d.Verdict.Without(now, func(f Finding) bool {
				return f.From == "" && f.ofIncident() && f.Clears == ClearsGPUReset && f.State == Degraded
			})
			d.Verdict.awaitsCheck = false
		}
		if j >= 0 {
			r := resets[d.Device.Parent]
			if *d, r = d.restoreLate(c, from, r, late.DriverReloaded, now); d.Device.Kind == KindGPU {
				resets[d.Device.ID] = r
			}
		}
	}
	for _, s := range late.Devices {
		if !slices.ContainsFunc(devices, func(d DeviceState) bool { return d.Device.ID == s.Device.ID }) {
			d := DeviceState{Device: s.Device, Sample: s.Sample, Verdict: Verdict{State: s.Verdict.State, Since: s.Verdict.Since}}
			d, _ = d.restoreLate(c, s, reset{}, late.DriverReloaded, now)
			after = append(after, d)
		}
	}
	return after, unjudged
}

// restoreLate adds what another process saved of a device. It also returns the reset that the device's sample proves together with the
// saved findings. Such a reset was before all that this process has seen, so it clears only saved findings. gpu is the reset of a MIG
// device's GPU.
func (d DeviceState) restoreLate(c Config, saved DeviceState, gpu reset, reloaded bool, now time.Time) (DeviceState, reset) {
	v, from, s := d.Verdict, saved.Verdict, d.Sample
	if v.measured && v.ownFinding(Finding.ofPresence) == nil {
		s.Presence = Present // also while the newest reading does not say so
	}
	r := latestReset(gpu, wasReset(c, from, d.Device.Kind, s))
	wasBeforeReset := func(f Finding) bool {
		return reloaded || !d.ResetAt.IsZero() && !f.Last.After(d.ResetAt) || r.follows(f)
	}
	findings := slices.Clone(v.Findings)
	for _, f := range from.Findings {
		if f.From == "" && !f.addedByDecide() {
			if wasBeforeReset(f) || clearedByReturn(from, f, s) && f.Last.After(f.Reset) {
				f.Reset = now
			}
			if ended(c, f, s, false) {
				continue
			}
		}
		if i := slices.IndexFunc(findings, func(g Finding) bool { return g.From == "" && g.Cause == f.Cause }); i < 0 {
			findings = append(findings, f)
		} else if f.Since.Before(findings[i].Since) { // the newer one counts, and lasts since then
			findings[i].Since = f.Since
		}
	}
	state, since := v.State, v.Since
	v.setFindings(findings)
	switch {
	case v.State == from.State && (v.State != state || from.Since.Before(since)):
		v.Since = from.Since
	case v.State != state:
		v.Since = now
	}
	v.Trips = slices.Concat(from.Trips, v.Trips)
	pending := slices.Clone(v.PendingXIDs)
	for _, x := range from.PendingXIDs {
		if !wasBeforeReset(Finding{Cause: xidCause(x.Code), Last: x.At}) &&
			!slices.ContainsFunc(pending, func(y XID) bool { return y.Code == x.Code }) {
			pending = append(pending, x)
		}
	}
	v.PendingXIDs = pending
	v.unexplainedReset = v.unexplainedReset || from.unexplainedReset && v.Has(CauseRecoveryAction)
	d.Verdict = v
	d.XIDHistory = appendHistory(saved.XIDHistory, Sample{XIDs: d.XIDHistory})
	d.Awaited = slices.Concat(saved.Awaited, d.Awaited)
	return d, r
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
		devices[i].Awaited = slices.Clone(devices[i].Awaited)
		for j := range devices[i].Awaited {
			if a := &devices[i].Awaited[j]; a.Witness == WitnessSource {
				a.Since, a.Newest = time.Time{}, time.Time{}
			}
		}
		v := &devices[i].Verdict
		v.unconfirmed, v.eventAction, v.Findings = nil, eventAction{}, slices.Clone(v.Findings)
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
