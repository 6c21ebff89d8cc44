package judge

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// NeedsSaving reports whether a device has anything that must outlive a restart.
func NeedsSaving(d health.DeviceState) bool {
	return len(d.Memory.Findings) > 0 || len(d.Verdict.Decisions()) > 0 || len(d.Memory.Trips) > 0 || len(d.Memory.PendingXIDs) > 0 ||
		len(d.XIDs.Rows) > 0 || d.XIDs.OwesSource()
}

// SavedState returns a device as a saved state has it. decided are the decisions that continue.
func SavedState(d health.Device, m health.Memory, decided []health.Finding, since time.Time) health.DeviceState {
	v := health.Verdict{Since: since, Findings: slices.Concat(m.Findings, decided)}
	for _, f := range v.Findings {
		v.State = max(v.State, f.State)
	}
	return health.DeviceState{Device: d, Memory: m, Verdict: v}
}

// Stable returns findings without what a poll changes while nothing happens, for comparison.
func Stable(findings []health.Finding) []health.Finding {
	findings = slices.Clone(findings)
	for i := range findings {
		if findings[i].IsCondition() {
			findings[i].Last, findings[i].Reason = time.Time{}, ""
		}
	}
	return findings
}

// AfterReboot returns what is left of a saved device after a reboot of the node.
func AfterReboot(d health.DeviceState, now time.Time) health.DeviceState {
	d.Memory.Trips, d.Memory.PendingXIDs, d.XIDs = nil, nil, health.Ledger{}
	d.Memory = d.Memory.Without(func(f health.Finding) bool { return !f.OutlivesBoot() })
	d.Verdict = newVerdict(slices.Clone(d.Memory.Findings), d.Verdict.State > health.Unknown, d.Verdict, now)
	return d
}

// Restored returns a device that another process saved, with its times converted by Rebase.
func Restored(d health.DeviceState, now time.Time) health.DeviceState {
	d.Memory = restored(d.Memory, now)
	decisions := d.Verdict.Decisions()
	for i := range decisions {
		decisions[i].Since, decisions[i].Last = Rebase(decisions[i].Since, now), Rebase(decisions[i].Last, now)
	}
	d.Verdict.Since, d.Verdict.Findings = Rebase(d.Verdict.Since, now), slices.Concat(d.Memory.Findings, decisions)
	sortFindings(d.Verdict.Findings)
	return d
}

// restored leaves out what View adds: somebody may have written it among the device's own findings, and nothing would end it there.
func restored(m health.Memory, now time.Time) health.Memory {
	m = m.Without(health.Finding.AddedByView)
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
		restartCondition(f, now)
	}
	m.UnexplainedReset = m.UnhealthyBy(health.CauseRecoveryAction) // unless the driver asks for something else
	return m
}

// LateState is the state that another process saved, read after this one has measured.
type LateState struct {
	Devices        []health.DeviceState
	DriverReloaded bool // the driver was loaded after the state was saved, which reset all devices
	XIDHistory     bool // Devices hold all rows of XIDs of this boot that the source listed before this process started
}

// RestoreLate returns the devices as if the saved ones had been restored before the first reading. A saved device that is not in devices is
// added. A saved finding does not count if the device was reset after it, or if what this process has measured shows its end. With
// LateState.XIDHistory, the XIDs that this process has skipped and that were not saved are returned as not judged. Observe an empty
// Observation before them: what follows from the findings of both states together is not judged, either.
func RestoreLate(
	c Config, devices []health.DeviceState, late LateState, now time.Time,
) (after []health.DeviceState, unjudged []Observation) {
	after = slices.Clone(devices)
	resets := make(map[health.DeviceID]reset) // of GPUs
	for i := range after {
		d := &after[i]
		j := slices.IndexFunc(late.Devices, func(s health.DeviceState) bool { return s.Device.ID == d.Device.ID })
		var from health.DeviceState
		if j >= 0 {
			from = late.Devices[j]
		}
		var skipped []health.XID
		d.XIDs, skipped = d.XIDs.RestoreLate(from.XIDs, late.XIDHistory)
		for _, x := range skipped {
			unjudged = append(unjudged, Observation{GPU: d.Device.GPU(), Devices: []health.DeviceID{d.Device.ID}, XID: x})
		}
		if late.XIDHistory {
			// These incidents stood for the XIDs before the start, which are known now.
			d.Memory = d.Memory.Without(func(f health.Finding) bool {
				return f.OfIncident() && f.Clears == health.ClearsGPUReset && f.State == health.Degraded
			})
			d.Memory.AwaitsCheck = false
			d.Verdict = reviewed(*d, nil, now)
		}
		if j >= 0 {
			r := resets[d.Device.Parent]
			if *d, r = restoreDeviceLate(c, *d, from, r, late.DriverReloaded, now); d.Device.Kind == health.KindGPU {
				resets[d.Device.ID] = r
			}
		}
	}
	for _, s := range late.Devices {
		if !slices.ContainsFunc(devices, func(d health.DeviceState) bool { return d.Device.ID == s.Device.ID }) {
			d := health.DeviceState{
				Device: s.Device, Sample: s.Sample, XIDs: s.XIDs, Verdict: health.Verdict{State: s.Verdict.State, Since: s.Verdict.Since},
			}
			d, _ = restoreDeviceLate(c, d, s, reset{}, late.DriverReloaded, now)
			after = append(after, d)
		}
	}
	arrange(after)
	return after, unjudged
}

// restoreDeviceLate adds what another process saved of a device. It also returns the reset that the device's sample proves together with
// the saved findings. Such a reset was before all that this process has seen, so it clears only saved findings. gpu is the reset of a MIG
// device's GPU.
func restoreDeviceLate(c Config, d, saved health.DeviceState, gpu reset, reloaded bool, now time.Time) (health.DeviceState, reset) {
	m, from, s := d.Memory, saved.Memory, d.Sample
	if m.Measured && m.Find(health.Finding.OfPresence) == nil {
		s.Presence = health.Present // also while the newest reading does not say so
	}
	r := latestReset(gpu, wasReset(c, from, d.Device.Kind, s))
	wasBeforeReset := func(f health.Finding) bool {
		return reloaded || !d.ResetAt.IsZero() && !f.Last.After(d.ResetAt) || r.follows(f)
	}
	var left []health.Finding
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
		if !wasBeforeReset(health.Finding{Cause: health.XIDCause(x.Code), Last: x.At}) &&
			!slices.ContainsFunc(pending, func(y health.XID) bool { return y.Code == x.Code }) {
			pending = append(pending, x)
		}
	}
	m.PendingXIDs = pending
	m.UnexplainedReset = m.UnexplainedReset || from.UnexplainedReset && m.Has(health.CauseRecoveryAction)
	d.Memory = m
	d.Verdict = reviewed(d, saved.Verdict.Decisions(), now)
	if d.Verdict.State == saved.Verdict.State && saved.Verdict.Since.Before(d.Verdict.Since) {
		d.Verdict.Since = saved.Verdict.Since // it has lasted
	}
	return d, r
}

// reviewed returns the verdict of a device's memory with what the latest View added to it, and with restored decisions.
func reviewed(d health.DeviceState, decisions []health.Finding, now time.Time) health.Verdict {
	added := slices.DeleteFunc(slices.Clone(d.Verdict.Findings), func(f health.Finding) bool { return f.From == "" && !f.AddedByView() })
	return newVerdict(slices.Concat(d.Memory.Findings, restoreFindings(added, decisions)), d.Memory.Measured, d.Verdict, now)
}

// restoreFindings adds saved findings of the device itself. Of two with one cause, the newer counts, and lasts since the older began.
func restoreFindings(findings, saved []health.Finding) []health.Finding {
	findings = slices.Clone(findings)
	for _, f := range saved {
		i := slices.IndexFunc(findings, func(g health.Finding) bool { return g.From == "" && g.Cause == f.Cause })
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
func DiscardMeasurements(devices []health.DeviceState, now time.Time) []health.DeviceState {
	devices = slices.Clone(devices)
	for i := range devices {
		devices[i].Sample.Presence, devices[i].Unread = health.PresenceUnknown, devices[i].Device.Kind == health.KindGPU
		devices[i].XIDs = devices[i].XIDs.Unmeasured()
		m := &devices[i].Memory
		m.Unconfirmed, m.EventAction, m.Findings = nil, health.EventAction{}, slices.Clone(m.Findings)
		for j := range m.Findings {
			restartCondition(&m.Findings[j], now)
		}
	}
	return devices
}

// restartCondition makes now the last observation of a condition: without samples since then, the condition may have lasted
// until now.
func restartCondition(f *health.Finding, now time.Time) {
	if f.IsCondition() {
		if f.Last.Before(f.Reset) {
			f.Reset = now // the reset counted already and must not count again
		}
		f.Last = now
	}
}
