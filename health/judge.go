package health

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Judge folds a reading into what was known before and returns what is known now. It is pure: the same
// arguments give the same result, and the only clock is the reading's.
//
// A GPU that was known and is not in the reading stays, Unhealthy and "missing"; a MIG device that is not
// in the reading is gone with its partition, unless its GPU is missing too.
func Judge(c Config, before []DeviceState, r *Reading, now time.Time) []DeviceState {
	known := make(map[DeviceID]DeviceState, len(before))
	for _, d := range before {
		known[d.Device.ID] = d
	}
	samples := make(map[DeviceID]Sample, len(r.Samples))
	for _, s := range r.Samples {
		samples[s.Device] = s
	}

	after := make([]DeviceState, 0, len(r.Devices))
	gpus := make(map[DeviceID]parent)
	add := func(d Device, s Sample) {
		next, reset := judgeDevice(c, known[d.ID], d, s, gpus[d.Parent])
		if d.Kind == KindGPU {
			gpus[d.ID] = parent{next.Verdict, reset}
		}
		after = append(after, next)
		delete(known, d.ID)
	}
	for _, d := range r.Devices {
		s, ok := samples[d.ID]
		if !ok {
			s = Sample{Device: d.ID, At: now}
		}
		add(d, s)
	}
	// before is in order: a missing GPU comes ahead of the MIG devices that are missing with it, and
	// these inherit its finding.
	for _, d := range before {
		s := Sample{Device: d.Device.ID, At: now}
		if d.Device.Kind == KindGPU {
			s.Presence = Missing
		} else if !gpus[d.Device.Parent].verdict.has(CauseMissing) {
			continue
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
}

func judgeDevice(c Config, was DeviceState, d Device, s Sample, p parent) (next DeviceState, reset bool) {
	reset = p.reset || wasReset(was.Verdict, s)
	own := carry(c, was.Verdict, s, reset)
	if f, bad := presenceFinding(s); bad {
		own = merge(own, f)
	}
	for _, cond := range conditions {
		v, told := s.Values[cond.field]
		if !told {
			continue
		}
		if f, bad := cond.check(c, v); bad {
			f.Cause, f.Since, f.Last, f.Clears = cond.cause, s.At, s.At, ClearsItself
			own = merge(own, f)
		}
	}
	counts, last := was.XIDCounts, was.LastXID
	if len(s.XIDs) > 0 {
		counts = maps.Clone(counts)
		if counts == nil {
			counts = make(map[int]uint64)
		}
	}
	for _, x := range s.XIDs {
		counts[x.Code]++
		last = x
		if f, bad := xidFinding(x); bad {
			own = merge(own, f)
		}
	}
	return DeviceState{
		Device: d, Sample: s, Verdict: conclude(was.Verdict, own, d.Parent, p.verdict.Findings, s),
		XIDCounts: counts, LastXID: last,
	}, reset
}

// wasReset tells whether the sample is evidence of a reset: the device came back to the bus, or the
// driver took its recovery action back.
func wasReset(was Verdict, s Sample) bool {
	if s.Presence == Present && (was.has(CauseLost) || was.has(CauseDetached) || was.has(CauseMissing)) {
		return true
	}
	action, told := s.Values[FieldRecoveryAction]
	return told && RecoveryAction(action) == RecoveryNone && was.has(CauseRecoveryAction)
}

// carry returns the device's own findings of before, without those that the sample ends. Each needs
// positive evidence to go: what the sample does not tell, stays.
func carry(c Config, was Verdict, s Sample, reset bool) []Finding {
	var kept []Finding
	for _, f := range was.Findings {
		ended := f.Clears == ClearsGPUReset && reset || f.Clears == ClearsItself && gone(c, f, s)
		if f.From == "" && !ended {
			kept = append(kept, f)
		}
	}
	return kept
}

// gone tells whether a finding that clears by itself is shown by the sample to stand no more.
func gone(c Config, f Finding, s Sample) bool {
	switch f.Cause {
	case CauseLost, CauseInaccessible, CauseDetached, CauseMissing:
		return s.Presence != PresenceUnknown // if it still stands, the sample says so
	}
	for _, cond := range conditions {
		if cond.cause == f.Cause {
			_, told := s.Values[cond.field]
			return told
		}
	}
	return s.At.Sub(f.Last) >= c.RecoverAfter // a warning XID
}

// merge adds a finding, or renews the one of the same cause: that one began earlier.
func merge(fs []Finding, f Finding) []Finding {
	i := slices.IndexFunc(fs, func(g Finding) bool { return g.Cause == f.Cause })
	if i < 0 {
		return append(fs, f)
	}
	f.Since = fs[i].Since
	fs[i] = f
	return fs
}

// conclude makes the verdict. A MIG device has its GPU's findings beside its own.
func conclude(was Verdict, own []Finding, parent DeviceID, inherited []Finding, s Sample) Verdict {
	all := own
	for _, f := range inherited {
		f.From = parent
		i := slices.IndexFunc(all, func(g Finding) bool { return g.Cause == f.Cause })
		if i < 0 {
			all = append(all, f)
		} else if f.State > all[i].State {
			all[i] = f
		}
	}
	slices.SortStableFunc(all, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(b.State, a.State), a.Since.Compare(b.Since), cmp.Compare(a.Cause, b.Cause))
	})
	v := Verdict{State: Healthy, Findings: all, Since: was.Since}
	switch {
	case len(all) > 0:
		v.State = all[0].State
	case s.Presence == PresenceUnknown && was.State == Unknown:
		v.State = Unknown // never seen yet
	}
	if v.State != was.State || v.Since.IsZero() {
		v.Since = s.At
	}
	return v
}

// has tells whether the device's own findings hold a cause.
func (v Verdict) has(cause string) bool {
	return slices.ContainsFunc(v.Findings, func(f Finding) bool { return f.From == "" && f.Cause == cause })
}

// Cause returns the cause of the worst finding, "" if there is none.
func (v Verdict) Cause() string {
	if len(v.Findings) == 0 {
		return ""
	}
	return v.Findings[0].Cause
}
