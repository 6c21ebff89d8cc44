package health

import (
	"slices"
	"time"
)

// NeedsSaving reports whether the device has anything that must outlive a restart.
func (d DeviceState) NeedsSaving() bool {
	return len(d.Memory.Findings) > 0 || len(d.Verdict.Decisions()) > 0 || len(d.Memory.Trips) > 0 || len(d.Memory.PendingXIDs) > 0 ||
		len(d.XIDs.Rows) > 0 || d.XIDs.owesSource()
}

// SavedState returns a device as a saved state has it. decided are the decisions that continue.
func SavedState(d Device, m Memory, decided []Finding, since time.Time) DeviceState {
	v := Verdict{Since: since, Findings: slices.Concat(m.Findings, decided)}
	for _, f := range v.Findings {
		v.State = max(v.State, f.State)
	}
	return DeviceState{Device: d, Memory: m, Verdict: v}
}

// Stable returns findings without what a poll changes while nothing happens, for comparison.
func Stable(findings []Finding) []Finding {
	findings = slices.Clone(findings)
	for i := range findings {
		if findings[i].condition() {
			findings[i].Last, findings[i].Reason = time.Time{}, ""
		}
	}
	return findings
}

// AfterReboot returns what is left of a saved device after a reboot of the node.
func (d DeviceState) AfterReboot(now time.Time) DeviceState {
	d.Memory.Trips, d.Memory.PendingXIDs, d.XIDs = nil, nil, Ledger{}
	d.Memory = d.Memory.without(func(f Finding) bool { return !f.OutlivesBoot() })
	d.Verdict = newVerdict(slices.Clone(d.Memory.Findings), d.Verdict.State > Unknown, d.Verdict, now)
	return d
}

// Restored returns a device that another process saved, with its times converted by Rebase.
func (d DeviceState) Restored(now time.Time) DeviceState {
	d.Memory = d.Memory.restored(now)
	decisions := d.Verdict.Decisions()
	for i := range decisions {
		decisions[i].Since, decisions[i].Last = Rebase(decisions[i].Since, now), Rebase(decisions[i].Last, now)
	}
	d.Verdict.Since, d.Verdict.Findings = Rebase(d.Verdict.Since, now), slices.Concat(d.Memory.Findings, decisions)
	sortFindings(d.Verdict.Findings)
	return d
}

// restored leaves out what View adds: somebody may have written it among the device's own findings, and nothing would end it there.
func (m Memory) restored(now time.Time) Memory {
	m = m.without(Finding.addedByView)
	m.Trips, m.PendingXIDs = slices.Clone(m.Trips), slices.Clone(m.PendingXIDs)
	for i := range m.PendingXIDs {
		m.PendingXIDs[i].At = Rebase(m.PendingXIDs[i].At, now)
	}
	for i := range m.Trips {
		m.Trips[i] = Rebase(m.Trips[i], now)
	}
	for i := range m.Findings {
		f := &m.Findings[i]
		f.Since, f.Last, f.Reset = Rebase(f.Since, now), Rebase(f.Last, now), Rebase(f.Reset, now)
		f.restartCondition(now)
	}
	m.unexplainedReset = m.unhealthyBy(CauseRecoveryAction) // unless the driver asks for something else
	return m
}

// LateState is the state that another process saved, read after this one has measured.
type LateState struct {
	Devices        []DeviceState
	DriverReloaded bool // the driver was loaded after the state was saved, which reset all devices
	XIDHistory     bool // Devices hold all rows of XIDs of this boot that the source listed before this process started
}

// RestoreLate returns the devices as if the saved ones had been restored before the first reading. A saved device that is not in devices is
// added. A saved finding does not count if the device was reset after it, or if what this process has measured shows its end. With
// LateState.XIDHistory, the XIDs that this process has skipped and that were not saved are returned as not judged. Observe an empty
// Observation before them: what follows from the findings of both states together is not judged, either.
func RestoreLate(c Config, devices []DeviceState, late LateState, now time.Time) (after []DeviceState, unjudged []Observation) {
	after = slices.Clone(devices)
	resets := make(map[DeviceID]reset) // of GPUs
	for i := range after {
		d := &after[i]
		j := slices.IndexFunc(late.Devices, func(s DeviceState) bool { return s.Device.ID == d.Device.ID })
		var from DeviceState
		if j >= 0 {
			from = late.Devices[j]
		}
		var skipped []XID
		d.XIDs, skipped = d.XIDs.restoreLate(from.XIDs, late.XIDHistory)
		for _, x := range skipped {
			unjudged = append(unjudged, Observation{GPU: d.Device.GPU(), Devices: []DeviceID{d.Device.ID}, XID: x})
		}
		if late.XIDHistory {
			// These incidents stood for the XIDs before the start, which are known now.
			d.Memory = d.Memory.without(func(f Finding) bool {
				return f.ofIncident() && f.Clears == ClearsGPUReset && f.State == Degraded
			})
			d.Memory.awaitsCheck = false
			d.Verdict = d.reviewed(nil, now)
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
			d := DeviceState{
				Device: s.Device, Sample: s.Sample, XIDs: s.XIDs, Verdict: Verdict{State: s.Verdict.State, Since: s.Verdict.Since},
			}
			d, _ = d.restoreLate(c, s, reset{}, late.DriverReloaded, now)
			after = append(after, d)
		}
	}
	arrange(after)
	return after, unjudged
}

// restoreLate adds what another process saved of a device. It also returns the reset that the device's sample proves together with the
// saved findings. Such a reset was before all that this process has seen, so it clears only saved findings. gpu is the reset of a MIG
// device's GPU.
func (d DeviceState) restoreLate(c Config, saved DeviceState, gpu reset, reloaded bool, now time.Time) (DeviceState, reset) {
	m, from, s := d.Memory, saved.Memory, d.Sample
	if m.measured && m.find(Finding.ofPresence) == nil {
		s.Presence = Present // also while the newest reading does not say so
	}
	r := latestReset(gpu, wasReset(c, from, d.Device.Kind, s))
	wasBeforeReset := func(f Finding) bool {
		return reloaded || !d.ResetAt.IsZero() && !f.Last.After(d.ResetAt) || r.follows(f)
	}
	var left []Finding
	for _, f := range from.Findings {
		if wasBeforeReset(f) || clearedByReturn(&from, f, s) && f.Last.After(f.Reset) {
			f.Reset = now
		}
		if ended(c, f, s) {
			continue
		}
		left = append(left, f)
	}
	m.Findings = restoreFindings(m.Findings, left)
	sortFindings(m.Findings)
	m.Trips = slices.Concat(from.Trips, m.Trips)
	pending := slices.Clone(m.PendingXIDs)
	for _, x := range from.PendingXIDs {
		if !wasBeforeReset(Finding{Cause: xidCause(x.Code), Last: x.At}) &&
			!slices.ContainsFunc(pending, func(y XID) bool { return y.Code == x.Code }) {
			pending = append(pending, x)
		}
	}
	m.PendingXIDs = pending
	m.unexplainedReset = m.unexplainedReset || from.unexplainedReset && m.has(CauseRecoveryAction)
	d.Memory = m
	d.Verdict = d.reviewed(saved.Verdict.Decisions(), now)
	if d.Verdict.State == saved.Verdict.State && saved.Verdict.Since.Before(d.Verdict.Since) {
		d.Verdict.Since = saved.Verdict.Since // it has lasted
	}
	return d, r
}

// reviewed returns the verdict of the device's memory with what the latest View added to it, and with restored decisions.
func (d DeviceState) reviewed(decisions []Finding, now time.Time) Verdict {
	added := slices.DeleteFunc(slices.Clone(d.Verdict.Findings), func(f Finding) bool { return f.From == "" && !f.addedByView() })
	return newVerdict(slices.Concat(d.Memory.Findings, restoreFindings(added, decisions)), d.Memory.measured, d.Verdict, now)
}

// restoreFindings adds saved findings of the device itself. Of two with one cause, the newer counts, and lasts since the older began.
func restoreFindings(findings, saved []Finding) []Finding {
	findings = slices.Clone(findings)
	for _, f := range saved {
		i := slices.IndexFunc(findings, func(g Finding) bool { return g.From == "" && g.Cause == f.Cause })
		if i < 0 {
			findings = append(findings, f)
		} else if f.Since.Before(findings[i].Since) {
			findings[i].Since = f.Since
		}
	}
	return findings
}

// Rebase converts a time that another process saved to an age on this process's monotonic clock. A time in the future
// becomes now; the zero time stays zero.
func Rebase(t, now time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return now.Add(-max(0, now.Sub(t)))
}

// DiscardMeasurements returns the devices without the effects of measurements from before the driver was released: how long a condition has
// been over, how often a check showed a fault, whether a device is present, and the recovery action of an event. View withholds each GPU
// until it is measured again.
func DiscardMeasurements(devices []DeviceState, now time.Time) []DeviceState {
	devices = slices.Clone(devices)
	for i := range devices {
		devices[i].Sample.Presence, devices[i].Unread = PresenceUnknown, devices[i].Device.Kind == KindGPU
		devices[i].XIDs = devices[i].XIDs.unmeasured()
		m := &devices[i].Memory
		m.unconfirmed, m.eventAction, m.Findings = nil, eventAction{}, slices.Clone(m.Findings)
		for j := range m.Findings {
			m.Findings[j].restartCondition(now)
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
