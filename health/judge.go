package health

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// ReadingContext describes how a reading or event relates to the process, the saved state and the driver.
type ReadingContext struct {
	NewInventory   bool // the source has another set of devices than before: those that the reading lacks are not missing
	XIDHistory     bool // the saved state holds all rows of XIDs of this boot, so a row that the ledger lacks is new
	FirstReading   bool // it is the first reading of this process
	DriverReloaded bool // the driver was reloaded after the previous reading or event
	// Witnesses are the event sources that are on. An XID that one witness reports waits for its twins from the others.
	Witnesses []Witness
}

// Measure derives the devices' memories and XIDs from a reading and the devices before it; View then derives the verdicts. It is
// pure: the same arguments give the same result, and the only clock is the reading's. OutageFilter.Measure does the same, but for what it
// delays.
//
// An XID that another witness has reported before does not count again: see Ledger. DeviceState.Sample has the XIDs that count.
//
// A GPU that the reading lacks stays, Unhealthy and "missing". A MIG device that the reading lacks was destroyed, unless its
// GPU is missing too, or the reading has an instance without a name in its place.
func Measure(c Config, before []DeviceState, r *Reading, rc ReadingContext, now time.Time) []DeviceState {
	if rc.NewInventory {
		before = slices.DeleteFunc(slices.Clone(before), func(d DeviceState) bool {
			return !slices.ContainsFunc(r.Devices, func(e Device) bool { return e.ID == d.Device.ID }) && !r.MayHave(&d.Device)
		})
	}
	return measure(c, before, r, rc, newNodeOutage(before, r, r.samplesByDevice(now), now, now))
}

// measure is Measure with what the reading shows of all GPUs, before OutageFilter changed it.
func measure(c Config, before []DeviceState, r *Reading, rc ReadingContext, outage nodeOutage) []DeviceState {
	now := outage.now
	previous := make(map[DeviceID]DeviceState, len(before))
	for _, d := range before {
		if r.Checks.Status == ChecksDown {
			d.Memory = d.Memory.keepIncidents(now)
		}
		previous[d.Device.ID] = d
	}
	samples := r.samplesByDevice(now)
	for _, d := range r.Devices {
		s := samples[d.ID]
		if d.Kind == KindGPU && r.Checks.Status != ChecksDown {
			s.Incidents = slices.Concat(s.Incidents, c.Incidents.ofEveryGPU(r.Incidents))
		}
		samples[d.ID] = s
	}
	reports := rc.takeReports(previous, before, r, samples, now)
	keepFindingsOfDestroyed(previous, before, r, samples)

	judge := readingJudge{c, rc, outage}
	after := make([]DeviceState, 0, len(r.Devices))
	gpus := make(map[DeviceID]parent)
	add := func(d Device, s Sample) {
		next, reset := judge.measure(previous[d.ID], d, s, gpus[d.Parent], reports[d.ID])
		if d.Kind == KindGPU {
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
		if s, exists := r.lacking(d.Device, gpus, now); exists {
			add(d.Device, s)
		}
	}
	arrange(after)
	return after
}

// arrange sorts devices, GPUs first, and lets an index name one GPU.
func arrange(devices []DeviceState) {
	withdrawTakenIndexes(devices)
	slices.SortStableFunc(devices, func(a, b DeviceState) int {
		return cmp.Or(cmp.Compare(a.Device.Kind, b.Device.Kind), CompareIndex(&a.Device, &b.Device))
	})
}

// lacking returns the sample of a device that the reading lacks, and false if that means that it was destroyed. gpus are those that were
// judged.
func (r *Reading) lacking(d Device, gpus map[DeviceID]parent, now time.Time) (s Sample, exists bool) {
	s = Sample{Device: d.ID, At: now, Presence: Missing}
	if d.Kind != KindMIG {
		return s, true
	}
	gpu, judged := gpus[d.Parent]
	if judged && r.MayHave(&d) && gpu.presence <= Present {
		s.Presence = PresenceUnknown
		return s, true
	}
	// The MIG devices of an unreachable GPU stay, because its partitioning is unknown.
	return s, judged && (gpu.presence != Present || gpu.memory.has(CauseMissing))
}

// lackedByReading reports whether the latest reading lacked the device, by the sample that Reading.lacking returned.
func (d *DeviceState) lackedByReading() bool {
	s := &d.Sample
	return s.Presence == Missing || d.Device.Kind == KindMIG && s.Presence == PresenceUnknown && len(s.Values) == 0
}

// withdrawTakenIndexes takes the index from GPUs whose index another one has, so that an index names one GPU. A present GPU keeps its own,
// then one that the driver lists.
func withdrawTakenIndexes(devices []DeviceState) {
	taken, withdrawn := make(map[int]bool), make(map[DeviceID]bool)
	for _, rank := range []func(Presence) bool{
		func(p Presence) bool { return p == Present },
		func(p Presence) bool { return p != Present && p != Missing },
		func(p Presence) bool { return p == Missing },
	} {
		for i := range devices {
			d := &devices[i].Device
			if d.Kind != KindGPU || d.Index < 0 || !rank(devices[i].Sample.Presence) {
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
	before   Memory
	memory   Memory
	reset    reset // of the GPU
	presence Presence
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
func (judge readingJudge) measure(old DeviceState, d Device, s Sample, p parent, w reports) (next DeviceState, r reset) {
	c, rc := judge.c, judge.rc
	m := old.Memory
	firstSeen := old.Device.ID == "" && !rc.XIDHistory
	m.awaitsCheck = m.awaitsCheck || firstSeen
	m.awaitsAction = m.awaitsAction || firstSeen || rc.FirstReading && !m.has(CauseRecoveryAction)
	sample := s
	if m.eventAction.left > 0 {
		s.Values = maps.Clone(s.Values)
		delete(s.Values, FieldRecoveryAction)
	}
	m.eventAction = w.action
	m.explainRecoveryAction(c, old.XIDs.Codes, s)
	r = latestReset(p.reset, rc.reloaded(s.At), wasReset(c, old.Memory, d.Kind, s))
	r.unreported = w.unreported

	findings := lasting(c, &old.Memory, s, r, s.At)
	findings = mergeAll(findings, judge.conditions(old, &m, s, p))
	var confirmed []Finding
	confirmed, m.unconfirmed = confirm(c, d, old.Memory, s)
	findings = mergeAll(findings, confirmed)
	m.measured = m.measured || s.Presence != PresenceUnknown
	next = old
	m.Findings = findings
	next.Memory, next.Sample, next.Unread = m, sample, old.Unread && s.Presence == PresenceUnknown
	if old.Device.ID == "" || s.Presence == Present { // otherwise the source cannot read the properties now
		next.Device = d
	}
	return judge.conclude(old.Memory, next, s, p, w, r), r
}

// observe judges an event of one device. s has what the event reports, and the XIDs that count.
func (judge readingJudge) observe(old DeviceState, s Sample, p parent, w reports) (next DeviceState, r reset) {
	c, m := judge.c, old.Memory
	if _, ok := s.Values[FieldRecoveryAction]; ok {
		m.eventAction, m.awaitsAction = eventAction{s.At, awaitAction}, false // it is new, so it is not from before the start
		m.explainRecoveryAction(c, old.XIDs.Codes, s)
	}
	r = latestReset(p.reset, judge.rc.reloaded(s.At))
	r.unreported = w.unreported
	// Time ends nothing, because nothing was measured.
	findings := lasting(c, &old.Memory, Sample{Values: s.Values}, r, s.At)
	m.Findings = mergeAll(findings, judge.conditions(old, &m, s, p))
	next = old
	next.Memory, next.Sample.XIDs = m, slices.Concat(old.Sample.XIDs, s.XIDs)
	return judge.conclude(old.Memory, next, s, p, w, r), r
}

// conclude adds the XIDs to the findings of next, and what follows from all of these. s has the XIDs that count. next.Sample is what was
// measured.
func (judge readingJudge) conclude(old Memory, next DeviceState, s Sample, p parent, w reports, r reset) DeviceState {
	c, m := judge.c, &next.Memory
	xids := w.of(next.Device, s)
	findings := mergeAll(m.Findings, xidFindings(c, xids, s.At))
	for _, x := range w.details {
		findings = enrich(c, findings, x)
		w.xids = w.xids.detail(x)
	}
	if m.awaitsCheck && s.Checked {
		m.awaitsCheck = false
		if !slices.ContainsFunc(findings, Finding.ofXID) {
			findings = mergeAll(findings, incidentsOfPastXIDs(c, s))
		}
	}
	m.PendingXIDs = addDetails(pendingXIDs(c, old, p.before, xids, s.At, r), w.details)
	findings = mergeAll(findings, escalate(m.PendingXIDs, findings, &p.memory))
	m.Trips = trips(c, old, findings, s.At)
	findings = mergeAll(findings, flapping(c, findings, m.Trips, s.At))

	m.Findings = slices.DeleteFunc(findings, func(f Finding) bool { // the GPU's finding says more
		of := p.memory.find(hasCause(f.Cause))
		return of != nil && of.State > f.State
	})
	sortFindings(m.Findings)
	measurable := next.Sample.Presence == Present && (next.Device.Kind == KindGPU || p.presence == Present)
	if !measurable && (m.find(Finding.ofPresence) != nil || p.memory.find(Finding.ofPresence) != nil) {
		next.Sample.Values = nil // from before: a source reads most fields less often than the presence
	}
	next.XIDs, next.ResetAt = w.xids, r.latest(next.ResetAt)
	return next
}

// conditions returns the findings of what the sample measures. A MIG device that is lost with its GPU inherits the GPU's finding.
func (judge readingJudge) conditions(old DeviceState, m *Memory, s Sample, p parent) []Finding {
	findings := slices.DeleteFunc(conditionFindings(judge.c, s), func(f Finding) bool { return p.memory.has(f.Cause) })
	for i := range findings {
		switch f := &findings[i]; {
		case f.ofPresence():
			f.InOutage, f.othersBackSince = judge.outage.includes(old, f.Cause)
		case f.Cause == CauseRecoveryAction && m.unexplainedReset:
			f.State, f.Reason = Unhealthy, f.Reason+", for an XID from before the agent's start"
		}
	}
	return findings
}

// of returns the XIDs that concern a device: those of its sample, of which one that affects the whole GPU concerns the GPU instead, and
// such XIDs of its MIG devices.
func (w *reports) of(d Device, s Sample) []XID {
	xids := w.raised
	for _, x := range s.XIDs {
		if d.Kind == KindGPU || !LookupXID(x.Code).WholeGPU {
			xids = append(xids, x)
		}
	}
	return xids
}

// lasting returns the device's findings that neither the sample nor a reset ends.
func lasting(c Config, old *Memory, s Sample, r reset, now time.Time) []Finding {
	var left []Finding
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
func ended(c Config, f Finding, s Sample) bool {
	if f.State == Unhealthy && c.Recovery == RecoverNever {
		return false
	}
	switch f.Clears {
	case ClearsGPUReset:
		return !f.Reset.IsZero()
	case ClearsItself, ClearsRestart:
		// The return of a GPU counts as a reset. A GPU that was only inaccessible needs none.
		needsReset := f.State == Unhealthy && c.Recovery == RecoverAfterReset && f.Cause != CauseInaccessible
		return conditionOver(c, f, s) && (!needsReset || !f.Reset.IsZero())
	case ClearsReboot, ClearsOperator:
	}
	return false
}

// conditionOver reports whether the sample proves the end of the condition behind a finding that clears itself.
func conditionOver(c Config, f Finding, s Sample) bool {
	longAgo := s.At.Sub(f.Last) >= c.RecoverAfter
	switch f.family() {
	case familyPresence:
		now, bad := presenceFinding(s)
		return s.Presence != PresenceUnknown && (!bad || now.Cause != f.Cause)
	case familyStaleness:
		return s.Presence == Present && !s.Stale // the source itself waits before it changes Stale
	case familyCondition:
		v, ok := conditionOf(f.Cause).values(s)
		// The driver withdraws its recovery action when the recovery is complete, so there is nothing to wait for.
		return ok && (longAgo || f.Cause == CauseRecoveryAction && RecoveryAction(v[0]) == RecoveryNone)
	case familyIncident:
		return s.Checked && longAgo
	}
	return longAgo // a warning XID
}

// keepFindingsOfDestroyed moves the findings of destroyed MIG devices that only a reset or a reboot clears to their GPU: a
// new partition uses the same memory and engines.
func keepFindingsOfDestroyed(previous map[DeviceID]DeviceState, before []DeviceState, r *Reading, samples map[DeviceID]Sample) {
	listed := make(map[DeviceID]bool, len(r.Devices))
	for _, d := range r.Devices {
		listed[d.ID] = true
	}
	for _, d := range before {
		gpu := previous[d.Device.Parent]
		if d.Device.Kind != KindMIG || listed[d.Device.ID] || r.MayHave(&d.Device) || samples[d.Device.Parent].Presence != Present {
			continue
		}
		findings := slices.Clone(gpu.Memory.Findings)
		for _, f := range d.Memory.Findings {
			stays := f.Clears == ClearsGPUReset || f.Clears == ClearsReboot && f.Cause != CauseFlapping // flapping concerns the partition only
			if f.State == Unhealthy && stays {
				findings = merge(findings, f)
			}
		}
		gpu.Memory.Findings = findings
		previous[d.Device.Parent] = gpu
	}
}
