package health

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Basis is what a judgement rests on beside the devices of before and the reading.
type Basis struct {
	History  bool // the XIDs of this boot are known from before the start: those of Sample.Past that are not among them are new
	First    bool // it is the first reading of this process
	Reloaded bool // the driver was loaded anew since the reading before
}

// Judge folds a reading into what was known before and returns what is known now, without the decisions: see Decide. It
// is pure: the same arguments give the same result, and the only clock is the reading's.
//
// A GPU that was known and is not in the reading stays, Unhealthy and "missing"; a MIG device that is not
// in the reading is gone with its partition, unless its GPU is missing too.
func Judge(c Config, before []DeviceState, r *Reading, b Basis, now time.Time) []DeviceState {
	known := make(map[DeviceID]DeviceState, len(before))
	for _, d := range before {
		known[d.Device.ID] = d
	}
	samples := make(map[DeviceID]Sample, len(r.Devices))
	for _, s := range r.Samples {
		samples[s.Device] = s
	}
	for _, d := range r.Devices {
		s, ok := samples[d.ID]
		if !ok {
			s = Sample{Device: d.ID, At: now}
		}
		samples[d.ID] = b.withPast(known[d.ID], known[d.Parent].Verdict, d, s)
	}
	inheritFromParts(known, before, r, samples)
	common := newCommonLoss(before, samples, now)
	raised := raisedXIDs(r, samples)

	after := make([]DeviceState, 0, len(r.Devices))
	gpus := make(map[DeviceID]parent)
	add := func(d Device, s Sample) {
		next, reset := judgeDevice(c, known[d.ID], d, s, gpus[d.Parent], b, common, raised[d.ID])
		if d.Kind == KindGPU {
			gpus[d.ID] = parent{next.Verdict, reset, s.Presence}
		}
		after = append(after, next)
		delete(known, d.ID)
	}
	for _, d := range r.Devices {
		add(d, samples[d.ID])
	}
	// before is in order: a missing GPU comes ahead of the MIG devices that are missing with it, and
	// these inherit its finding.
	for _, d := range before {
		s := Sample{Device: d.Device.ID, At: now, Presence: Missing}
		if d.Device.Kind == KindMIG {
			// How a GPU that cannot be reached is partitioned is not known.
			gpu, listed := gpus[d.Device.Parent]
			if !listed || gpu.shown == Present && !gpu.verdict.Has(CauseMissing) {
				continue
			}
		}
		if _, left := known[d.Device.ID]; left {
			add(d.Device, s)
		}
	}
	slices.SortStableFunc(after, func(a, b DeviceState) int {
		return cmp.Or(cmp.Compare(a.Device.Kind, b.Device.Kind), cmp.Compare(a.Device.Index, b.Device.Index))
	})
	return after
}

// parent is what a MIG device needs to know of its GPU.
type parent struct {
	verdict Verdict
	reset   bool // the GPU was seen to be reset
	shown   Presence
}

// judgeDevice judges one device. The raised XIDs are those of its MIG devices that are its own.
func judgeDevice(
	c Config, was DeviceState, d Device, s Sample, p parent, b Basis, common commonLoss, raised []XID,
) (next DeviceState, reset bool) {
	v := was.Verdict
	unknown := was.Device.ID == "" && !b.History
	v.checkUntold = v.checkUntold || unknown
	v.actionUntold = v.actionUntold || unknown || b.First && !was.Verdict.Has(CauseRecoveryAction)
	v.judgeAction(c, s)
	reset = p.reset || b.Reloaded || wasReset(c, was.Verdict, d.Kind, s)
	own := carry(c, was.Verdict, s, reset)
	for _, f := range seen(c, s) {
		switch {
		case p.verdict.Has(f.Cause): // a MIG device that is lost with its GPU has the GPU's finding
			continue
		case f.presence():
			f.Common, f.alone = common.of(was.Verdict, f.Cause)
		case f.Cause == CauseRecoveryAction && v.unexplained:
			f.State, f.Reason = Unhealthy, f.Reason+"; the XID behind it came while no agent was there to see it"
		}
		own = merge(own, f)
	}
	sure, suspects := confirm(c, d, was.Verdict, s)
	for _, f := range sure {
		own = merge(own, f)
	}

	counts, last := was.XIDCounts, was.LastXID
	if len(s.XIDs) > 0 {
		counts = maps.Clone(counts)
		if counts == nil {
			counts = make(map[int]uint64)
		}
	}
	xids := raised
	for _, x := range s.XIDs {
		counts[x.Code]++
		last = XID{x.Code, reportedAt(x, s.At)}
		if d.Kind == KindGPU || !LookupXID(x.Code).WholeGPU {
			xids = append(xids, x)
		}
	}
	for _, x := range xids {
		if f, bad := xidFinding(c, x, s.At); bad {
			own = merge(own, f)
		}
	}
	if v.checkUntold && s.Checked {
		v.checkUntold = false
		if !slices.ContainsFunc(own, Finding.ofXID) {
			for _, f := range undelivered(c, s) {
				own = merge(own, f)
			}
		}
	}

	follow := followers(c, was.Verdict, xids, s.At, reset)
	for _, f := range escalated(follow, own, p.verdict) {
		own = merge(own, f)
	}

	trips := tripped(c, was.Verdict, own, s.At)
	flaps := slices.ContainsFunc(own, func(f Finding) bool { return f.Cause == CauseFlapping })
	if c.Flap.Trips > 0 && len(trips) >= c.Flap.Trips && !flaps { // said once: what stands is no news at every poll
		own = merge(own, flapping(c, own, trips, s.At))
	}
	v.seen = v.seen || s.Presence != PresenceUnknown
	v.find(inherit(own, d.Parent, p.verdict.Findings))
	v.Trips, v.suspect, v.Follow = trips, suspects, follow
	if was.Device.ID != "" && s.Presence != Present {
		d = was.Device // nobody can read it now: what was read when it was there is better
	}
	return DeviceState{Device: d, Sample: s, Verdict: v, XIDCounts: counts, LastXID: last, Seen: remembered(was.Seen, s)}, reset
}

// seen returns what the sample itself shows to be wrong.
func seen(c Config, s Sample) []Finding {
	var fs []Finding
	if f, bad := presenceFinding(s); bad {
		fs = append(fs, f)
	}
	if s.Stale {
		fs = append(fs, staleFinding(s))
	}
	for _, cond := range conditions {
		v, told := cond.values(s)
		if !told {
			continue
		}
		if reason, action := cond.says(c, v); reason != "" {
			state := cond.state
			if cond.grade != nil {
				state = cond.grade(v)
			}
			fs = append(fs, Finding{
				Cause: cond.cause, State: state, Reason: reason, Action: action,
				Since: s.At, Last: s.At, Clears: ClearsItself,
			})
		}
	}
	return fs
}

// carry returns the device's own findings of before, without those that the sample ends.
func carry(c Config, was Verdict, s Sample, reset bool) []Finding {
	var kept []Finding
	for _, f := range was.Findings {
		if f.From != "" || f.decision() {
			continue
		}
		if reset || back(was, f, s) && f.Last.After(f.Reset) {
			f.Reset = s.At
		}
		if !ended(c, f, s) {
			kept = append(kept, f)
		}
	}
	return kept
}

// ended tells whether the sample is positive evidence that a finding is over. What it does not tell, stays.
func ended(c Config, f Finding, s Sample) bool {
	if f.State == Unhealthy && c.Recovery == RecoverNever {
		return false
	}
	switch f.Clears {
	case ClearsGPUReset:
		return !f.Reset.IsZero()
	case ClearsItself, ClearsRestart:
		// The return of a GPU is a reset; one that was only hidden needs none.
		needsReset := f.State == Unhealthy && c.Recovery == RecoverAfterReset && f.Cause != CauseInaccessible
		return gone(c, f, s) && (!needsReset || !f.Reset.IsZero())
	case ClearsReboot, ClearsOperator:
	}
	return false
}

// gone tells whether a finding that clears by itself is shown by the sample to stand no more.
func gone(c Config, f Finding, s Sample) bool {
	longAgo := s.At.Sub(f.Last) >= c.RecoverAfter
	switch f.Cause {
	case CauseLost, CauseInaccessible, CauseDetached, CauseMissing:
		now, bad := presenceFinding(s)
		return s.Presence != PresenceUnknown && (!bad || now.Cause != f.Cause)
	case CauseNotMeasured:
		return s.Presence == Present && !s.Stale // the source has told them apart for long enough
	}
	for _, cond := range conditions {
		if cond.cause == f.Cause {
			v, told := cond.values(s)
			// The driver takes its recovery action back when it is done: there is nothing to wait for.
			return told && (longAgo || cond.cause == CauseRecoveryAction && RecoveryAction(v[0]) == RecoveryNone)
		}
	}
	if f.incident() {
		return s.Checked && longAgo
	}
	return longAgo // a warning XID
}

// merge adds a finding, or renews the one of the same cause: that one began earlier.
func merge(fs []Finding, f Finding) []Finding {
	i := slices.IndexFunc(fs, func(g Finding) bool { return g.Cause == f.Cause })
	if i < 0 {
		return append(fs, f)
	}
	if f.State < fs[i].State {
		return fs // a WARN is no evidence that the FAIL is over: that ages by its own clock
	}
	f.Since, f.Reset = fs[i].Since, fs[i].Reset
	if f.Clears == ClearsGPUReset {
		f.Reset = time.Time{} // it happened again: the reset has not cured it
	}
	fs[i] = f
	return fs
}
