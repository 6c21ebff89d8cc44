// Package judge derives the findings and verdicts of devices from readings and events. It is pure: the walk of one XID is in the comment of
// package health.
package judge

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// ReadingContext describes how a reading or event relates to the process, the saved state and the driver.
type ReadingContext struct {
	NewInventory   bool // the source has another set of devices than before: those that the reading lacks are not missing
	XIDHistory     bool // the saved state holds all rows of XIDs of this boot, so a row that the ledger lacks is new
	FirstReading   bool // it is the first reading of this process
	DriverReloaded bool // the driver was reloaded after the previous reading or event that was judged in full
	// Witnesses are the event sources that are on. An XID that one witness reports waits for its twins from the others.
	Witnesses []health.Witness
}

// Measure derives the devices' memories and XIDs from a reading and the devices before it; View then derives the verdicts. It is
// pure: the same arguments give the same result, and the only clock is the reading's. OutageFilter.Measure judges alike, and leaves out
// what it delays.
//
// An XID that another witness has reported before does not count again: see Ledger. DeviceState.Sample has the XIDs that count.
//
// A GPU that the reading lacks stays, Unhealthy and "missing". A MIG device that the reading lacks was destroyed, unless its
// GPU is missing too, or the reading has an instance without a name in its place.
func Measure(c Config, before []health.DeviceState, r *health.Reading, rc ReadingContext, now time.Time) []health.DeviceState {
	if rc.NewInventory {
		before = slices.DeleteFunc(slices.Clone(before), func(d health.DeviceState) bool {
			return !slices.ContainsFunc(r.Devices, func(e health.Device) bool { return e.ID == d.Device.ID }) && !r.MayHave(&d.Device)
		})
	}
	return measure(c, before, r, rc, newNodeOutage(before, r, samplesByDevice(r, now), now, now))
}

// measure is Measure with what the reading shows of all GPUs, before OutageFilter changed it.
func measure(c Config, before []health.DeviceState, r *health.Reading, rc ReadingContext, outage nodeOutage) []health.DeviceState {
	now := outage.now
	previous := make(map[health.DeviceID]health.DeviceState, len(before))
	for _, d := range before {
		if r.Checks.Status == health.ChecksDown {
			d.Memory = keepIncidents(d.Memory, now)
		}
		previous[d.Device.ID] = d
	}
	samples := samplesByDevice(r, now)
	for _, d := range r.Devices {
		s := samples[d.ID]
		if d.Kind == health.KindGPU && r.Checks.Status != health.ChecksDown {
			s.Incidents = slices.Concat(s.Incidents, c.Incidents.OfEveryGPU(r.Incidents))
		}
		samples[d.ID] = s
	}
	reports := rc.takeReports(previous, before, r, samples, now)
	keepFindingsOfDestroyed(previous, before, r, samples)

	judge := readingJudge{c, rc, outage}
	after := make([]health.DeviceState, 0, len(r.Devices))
	gpus := make(map[health.DeviceID]parent)
	add := func(d health.Device, s health.Sample) {
		next, reset := judge.measure(previous[d.ID], d, s, gpus[d.Parent], reports[d.ID])
		if d.Kind == health.KindGPU {
			gpus[d.ID] = parent{previous[d.ID].Memory, next.Memory, reset, s.Presence}
		}
		after = append(after, next)
		delete(previous, d.ID)
	}
	for _, d := range r.Devices {
		add(d, samples[d.ID])
	}
	// In before, a missing GPU precedes its missing MIG devices, which inherit its finding.
	for _, d := range before {
		if _, left := previous[d.Device.ID]; !left {
			continue
		}
		if s, exists := lacking(r, d.Device, gpus, now); exists {
			add(d.Device, s)
		}
	}
	arrange(after)
	return after
}

// arrange sorts devices, GPUs first, and lets an index name one GPU.
func arrange(devices []health.DeviceState) {
	withdrawTakenIndexes(devices)
	slices.SortStableFunc(devices, func(a, b health.DeviceState) int {
		return cmp.Or(cmp.Compare(a.Device.Kind, b.Device.Kind), health.CompareIndex(&a.Device, &b.Device))
	})
}

// lacking returns the sample of a device that the reading lacks, and false if that means that it was destroyed. gpus are those that were
// judged.
func lacking(r *health.Reading, d health.Device, gpus map[health.DeviceID]parent, now time.Time) (s health.Sample, exists bool) {
	s = health.Sample{Device: d.ID, At: now, Presence: health.Missing}
	if d.Kind != health.KindMIG {
		return s, true
	}
	gpu, judged := gpus[d.Parent]
	if judged && r.MayHave(&d) && gpu.presence <= health.Present {
		s.Presence = health.PresenceUnknown
		return s, true
	}
	// The MIG devices of an unreachable GPU stay, because its partitioning is unknown.
	return s, judged && (gpu.presence != health.Present || gpu.memory.Has(health.CauseMissing))
}

// lackedByReading reports whether the latest reading lacked a device, by the sample that lacking returned.
func lackedByReading(d *health.DeviceState) bool {
	s := &d.Sample
	return s.Presence == health.Missing || d.Device.Kind == health.KindMIG && s.Presence == health.PresenceUnknown && len(s.Values) == 0
}

// withdrawTakenIndexes takes the index from GPUs whose index another one has, so that an index names one GPU. A present GPU keeps its own,
// then one that the driver lists.
func withdrawTakenIndexes(devices []health.DeviceState) {
	taken, withdrawn := make(map[int]bool), make(map[health.DeviceID]bool)
	for _, rank := range []func(health.Presence) bool{
		func(p health.Presence) bool { return p == health.Present },
		func(p health.Presence) bool { return p != health.Present && p != health.Missing },
		func(p health.Presence) bool { return p == health.Missing },
	} {
		for i := range devices {
			d := &devices[i].Device
			if d.Kind != health.KindGPU || d.Index < 0 || !rank(devices[i].Sample.Presence) {
				continue
			}
			if taken[d.Index] {
				withdrawn[d.ID], d.Index = true, -1
			}
			taken[d.Index] = true
		}
	}
	for i := range devices {
		if withdrawn[devices[i].Device.Parent] {
			devices[i].Device.Index = -1
		}
	}
}

// parent is the result of judging a GPU, which its MIG devices depend on.
type parent struct {
	before   health.Memory
	memory   health.Memory
	reset    reset // of the GPU
	presence health.Presence
}

// readingJudge judges the devices of one reading, or of events.
type readingJudge struct {
	c      Config
	rc     ReadingContext
	outage nodeOutage // none in events
}

// measure judges what a reading has of one device. s has the XIDs that count.
//
// What is over ends first, so that it cannot end what the sample shows. Then come the conditions and DCGM's incidents, the XIDs, and last
// what follows from all findings.
func (judge readingJudge) measure(
	old health.DeviceState, d health.Device, s health.Sample, p parent, w reports,
) (next health.DeviceState, r reset) {
	c, rc := judge.c, judge.rc
	m := old.Memory
	firstSeen := old.Device.ID == "" && !rc.XIDHistory
	m.AwaitsCheck = m.AwaitsCheck || firstSeen
	m.AwaitsAction = m.AwaitsAction || firstSeen || rc.FirstReading && !m.Has(health.CauseRecoveryAction)
	sample := s
	if m.EventAction.Left > 0 {
		s.Values = maps.Clone(s.Values)
		delete(s.Values, health.FieldRecoveryAction)
	}
	m.EventAction = w.action
	explainRecoveryAction(&m, c, old.XIDs.Codes, s)
	r = latestReset(p.reset, rc.reloaded(s.At), wasReset(c, old.Memory, d.Kind, s))
	r.unreported = w.unreported

	findings := lasting(c, &old.Memory, s, r, s.At)
	findings = mergeAll(findings, judge.conditions(old, &m, s, p))
	var confirmed []health.Finding
	confirmed, m.Unconfirmed = confirm(c, d, old.Memory, s)
	findings = mergeAll(findings, confirmed)
	m.Measured = m.Measured || s.Presence != health.PresenceUnknown
	next = old
	m.Findings = findings
	next.Memory, next.Sample, next.Unread = m, sample, old.Unread && s.Presence == health.PresenceUnknown
	if old.Device.ID == "" || s.Presence == health.Present { // otherwise the source cannot read the properties now
		next.Device = d
	}
	return judge.conclude(old.Memory, next, s, p, w, r), r
}

// observe judges an event of one device. s has what the event reports, and the XIDs that count.
func (judge readingJudge) observe(old health.DeviceState, s health.Sample, p parent, w reports) (next health.DeviceState, r reset) {
	c, m := judge.c, old.Memory
	if _, ok := s.Values[health.FieldRecoveryAction]; ok {
		m.EventAction, m.AwaitsAction = health.EventAction{At: s.At, Left: awaitAction}, false // it is new, so it is not from before the start
		explainRecoveryAction(&m, c, old.XIDs.Codes, s)
	}
	r = latestReset(p.reset, judge.rc.reloaded(s.At))
	r.unreported = w.unreported
	// Time ends nothing, because nothing was measured.
	findings := lasting(c, &old.Memory, health.Sample{Values: s.Values}, r, s.At)
	m.Findings = mergeAll(findings, judge.conditions(old, &m, s, p))
	next = old
	next.Memory, next.Sample.XIDs = m, slices.Concat(old.Sample.XIDs, s.XIDs)
	return judge.conclude(old.Memory, next, s, p, w, r), r
}

// conclude adds the XIDs to the findings of next, and what follows from all of these. s has the XIDs that count. next.Sample is what was
// measured.
func (judge readingJudge) conclude(
	old health.Memory, next health.DeviceState, s health.Sample, p parent, w reports, r reset,
) health.DeviceState {
	c, m := judge.c, &next.Memory
	xids := w.of(next.Device, s)
	findings := mergeAll(m.Findings, xidFindings(c, xids, s.At))
	for _, x := range w.details {
		findings = enrich(c, findings, x)
		w.xids = w.xids.AddDetail(x)
	}
	if m.AwaitsCheck && s.Checked {
		m.AwaitsCheck = false
		if !slices.ContainsFunc(findings, health.Finding.OfXID) {
			findings = mergeAll(findings, incidentsOfPastXIDs(c, s))
		}
	}
	m.PendingXIDs = addDetails(pendingXIDs(c, old, p.before, xids, s.At, r), w.details)
	findings = mergeAll(findings, escalate(m.PendingXIDs, findings, &p.memory))
	m.Trips = trips(c, old, findings, s.At)
	findings = mergeAll(findings, flapping(c, findings, m.Trips, s.At))

	m.Findings = slices.DeleteFunc(findings, func(f health.Finding) bool { // the GPU's finding says more
		of := p.memory.Find(health.HasCause(f.Cause))
		return of != nil && of.State > f.State
	})
	sortFindings(m.Findings)
	measurable := next.Sample.Presence == health.Present && (next.Device.Kind == health.KindGPU || p.presence == health.Present)
	if !measurable && (m.Find(health.Finding.OfPresence) != nil || p.memory.Find(health.Finding.OfPresence) != nil) {
		next.Sample.Values = nil // from before: a source reads most fields less often than the presence
	}
	next.XIDs, next.ResetAt = w.xids, r.latest(next.ResetAt)
	return next
}

// conditions returns the findings of what the sample measures. A MIG device that is lost with its GPU inherits the GPU's finding.
func (judge readingJudge) conditions(old health.DeviceState, m *health.Memory, s health.Sample, p parent) []health.Finding {
	findings := slices.DeleteFunc(conditionFindings(judge.c, s), func(f health.Finding) bool { return p.memory.Has(f.Cause) })
	for i := range findings {
		switch f := &findings[i]; {
		case f.OfPresence():
			f.InOutage, f.OthersBackSince = judge.outage.includes(old, f.Cause)
		case f.Cause == health.CauseRecoveryAction && m.UnexplainedReset:
			f.State, f.Reason = health.Unhealthy, f.Reason+", for an XID from before the agent's start"
		}
	}
	return findings
}

// of returns the XIDs that concern a device: those of its sample, of which one that affects the whole GPU concerns the GPU instead, and
// such XIDs of its MIG devices.
func (w *reports) of(d health.Device, s health.Sample) []health.XID {
	xids := w.raised
	for _, x := range s.XIDs {
		if d.Kind == health.KindGPU || !catalog.LookupXID(x.Code).WholeGPU {
			xids = append(xids, x)
		}
	}
	return xids
}

// lasting returns the device's findings that neither the sample nor a reset ends.
func lasting(c Config, old *health.Memory, s health.Sample, r reset, now time.Time) []health.Finding {
	var left []health.Finding
	for _, f := range old.Findings {
		if r.follows(f) || clearedByReturn(old, f, s) && f.Last.After(f.Reset) {
			f.Reset = now
		}
		if !ended(c, f, s) {
			left = append(left, f)
		}
	}
	return left
}

// ended reports whether the sample is positive evidence that a finding is over. A value that the sample lacks ends nothing. Without its
// time, nothing ends because it was long ago.
func ended(c Config, f health.Finding, s health.Sample) bool {
	if f.State == health.Unhealthy && c.Recovery == RecoverNever {
		return false
	}
	switch f.Clears {
	case health.ClearsGPUReset:
		return !f.Reset.IsZero()
	case health.ClearsItself, health.ClearsRestart:
		// The return of a GPU counts as a reset. A GPU that was only inaccessible needs none.
		needsReset := f.State == health.Unhealthy && c.Recovery == RecoverAfterReset && f.Cause != health.CauseInaccessible
		return conditionOver(c, f, s) && (!needsReset || !f.Reset.IsZero())
	case health.ClearsReboot, health.ClearsOperator:
	}
	return false
}

// conditionOver reports whether the sample proves the end of the condition behind a finding that clears itself.
func conditionOver(c Config, f health.Finding, s health.Sample) bool {
	longAgo := s.At.Sub(f.Last) >= c.RecoverAfter
	switch f.Family() {
	case health.FamilyPresence:
		now, bad := presenceFinding(s)
		return s.Presence != health.PresenceUnknown && (!bad || now.Cause != f.Cause)
	case health.FamilyStaleness:
		return s.Presence == health.Present && !s.Stale // the source itself waits before it changes Stale
	case health.FamilyCondition:
		v, ok := conditionOf(f.Cause).values(s)
		// The driver withdraws its recovery action when the recovery is complete, so there is nothing to wait for.
		return ok && (longAgo || f.Cause == health.CauseRecoveryAction && health.RecoveryAction(v[0]) == health.RecoveryNone)
	case health.FamilyIncident:
		return s.Checked && longAgo
	}
	return longAgo // a warning XID
}

// keepFindingsOfDestroyed moves the findings of destroyed MIG devices that only a reset or a reboot clears to their GPU: a
// new partition uses the same memory and engines.
func keepFindingsOfDestroyed(
	previous map[health.DeviceID]health.DeviceState, before []health.DeviceState, r *health.Reading, samples map[health.DeviceID]health.Sample,
) {
	listed := make(map[health.DeviceID]bool, len(r.Devices))
	for _, d := range r.Devices {
		listed[d.ID] = true
	}
	for _, d := range before {
		gpu := previous[d.Device.Parent]
		if d.Device.Kind != health.KindMIG || listed[d.Device.ID] || r.MayHave(&d.Device) || samples[d.Device.Parent].Presence != health.Present {
			continue
		}
		findings := slices.Clone(gpu.Memory.Findings)
		for _, f := range d.Memory.Findings {
			stays := f.Clears == health.ClearsGPUReset ||
				f.Clears == health.ClearsReboot && f.Cause != health.CauseFlapping // flapping concerns the partition only
			if f.State == health.Unhealthy && stays {
				findings = merge(findings, f)
			}
		}
		gpu.Memory.Findings = findings
		previous[d.Device.Parent] = gpu
	}
}

// samplesByDevice returns the sample of each device of a reading, an empty one if the reading has none.
func samplesByDevice(r *health.Reading, now time.Time) map[health.DeviceID]health.Sample {
	all := make(map[health.DeviceID]health.Sample, len(r.Devices))
	for i := range r.Devices {
		all[r.Devices[i].ID] = health.Sample{Device: r.Devices[i].ID, At: now}
	}
	for _, s := range r.Samples {
		all[s.Device] = s
	}
	return all
}
