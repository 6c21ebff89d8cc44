package health

import (
	"slices"
	"time"
)

// Evidence of a reset is of one device and positive: its own return after it alone was gone, something that only a reset
// sets back, the driver taking its recovery action back, or a driver that was loaded anew. What befalls all GPUs at
// once is the source's, the driver's or a switch's, and tells nothing of any of them.

// wasReset tells whether the sample is evidence of a reset.
func wasReset(c Config, was Verdict, kind Kind, s Sample) bool {
	action, told := s.Values[FieldRecoveryAction]
	return slices.ContainsFunc(was.Findings, func(f Finding) bool {
		switch {
		case f.From != "" || !f.Last.After(f.Reset):
			return false // it is evidence once: with recovery never the finding stands for long after
		case f.presence():
			// One reading may err, a GPU that was hidden was not reset, and a MIG device goes by its GPU.
			away := f.Last.Sub(f.Since) >= c.Interval/2 && f.Cause != CauseInaccessible && kind == KindGPU
			return s.Presence == Present && away && !f.Common
		case f.Cause == CauseRecoveryAction:
			return told && RecoveryAction(action) == RecoveryNone && f.asksForReset()
		}
		return setBack(c, f.Cause, s)
	})
}

// back tells whether a finding says that the GPU is gone and the sample that it is there: its own return is all that it
// takes. One that has fallen off the bus, XID 79, and was lost alone is back on it, however short that was.
func back(was Verdict, f Finding, s Sample) bool {
	if s.Presence != Present {
		return false
	}
	gone := was.ownPresence()
	return f.presence() || f.Cause == xidCause(79) && gone != nil && gone.Cause == CauseLost && !gone.Common
}

// asksForReset tells whether what the driver asks for, as its recovery action, resets the GPU. Of an action that is not in the
// table nobody knows.
func (f Finding) asksForReset() bool {
	for _, r := range recoveries {
		if r.resets && r.action == f.Action {
			return true
		}
	}
	return false
}

// setBack tells whether the sample says that a condition is over that nothing but a reset or a reload of the driver
// ends (DCGM 4.6 health, what a GPU reset clears). A row that could not be remapped waits no more either.
func setBack(c Config, cause string, s Sample) bool {
	switch {
	case cause != CauseDBE && cause != CauseRemapPending && cause != CauseRetiredPending:
		return false
	case s.Values[FieldRemapFailed] != 0:
		return false
	}
	i := slices.IndexFunc(conditions, func(cond condition) bool { return cond.cause == cause })
	v, told := conditions[i].values(s)
	if !told {
		return false
	}
	reason, _ := conditions[i].says(c, v)
	return reason == ""
}

// commonLoss tells whether all GPUs of the node that could be reached are gone together: in one reading, or one after the
// other, as their states are asked for.
type commonLoss struct {
	now     time.Time
	all     bool // none is there, and one went in this reading
	many    bool // several went, in this reading or shortly before
	others  bool // the node has several
	present bool // one is there
}

func newCommonLoss(before []DeviceState, samples map[DeviceID]Sample, now time.Time) commonLoss {
	went, lately, gpus, stayed := 0, 0, 0, 0
	for _, d := range before {
		if d.Device.Kind != KindGPU {
			continue
		}
		gpus++
		s, listed := samples[d.Device.ID]
		switch {
		case !listed || s.Presence > Present:
			if d.Sample.Presence <= Present {
				went++
			} else if f := d.Verdict.ownPresence(); f != nil && now.Sub(f.Since) < DoubtDelay {
				lately++
			}
		case s.Presence == Present:
			stayed++
		}
	}
	return commonLoss{now, went > 0 && stayed == 0, went+lately > 1, gpus > 1, stayed > 0}
}

// of tells whether a device is gone in common with all others, and if it is, since when others are back without it. A GPU
// that the driver calls lost is so by itself where no other was there to be lost with it, and if it stays so for long
// after the others have come back.
func (l commonLoss) of(was Verdict, cause string) (common bool, alone time.Time) {
	f := was.ownPresence()
	switch {
	case f == nil:
		return l.all && (l.many || cause != CauseLost), time.Time{}
	case f.Common && l.present:
		alone = f.alone
		if alone.IsZero() {
			alone = l.now
		}
		return l.now.Sub(alone) < DoubtDelay, alone
	case f.Common:
		return true, time.Time{}
	}
	// The others have gone shortly after it.
	return l.all && l.others && l.now.Sub(f.Since) < DoubtDelay, time.Time{}
}

// ownPresence returns the device's own finding that it cannot be reached, nil if there is none.
func (v Verdict) ownPresence() *Finding {
	i := slices.IndexFunc(v.Findings, func(f Finding) bool { return f.From == "" && f.presence() })
	if i < 0 {
		return nil
	}
	return &v.Findings[i]
}

// goneInCommon tells whether the device is gone since all of the node went at once.
func (v Verdict) goneInCommon() bool {
	f := v.ownPresence()
	return f != nil && f.Common
}

// withPast returns the sample with those XIDs of before the start that nobody has judged yet among its XIDs. What a MIG
// device holds that comes later than its GPU may be another's, which had its number before.
func (b Basis) withPast(was DeviceState, gpu Verdict, d Device, s Sample) Sample {
	if len(s.Past) == 0 || !b.History || d.Kind == KindMIG && gpu.seen {
		return s
	}
	var unjudged []XID
	for _, x := range s.Past {
		if !slices.ContainsFunc(was.Seen, x.Same) {
			unjudged = append(unjudged, x)
		}
	}
	s.XIDs = slices.Concat(unjudged, s.XIDs)
	return s
}

// maxSeen bounds DeviceState.Seen. DCGM reads at most one XID per second and keeps ten minutes of them.
const maxSeen = 1024

// remembered adds a sample's XIDs to those that were seen before.
func remembered(seen []XID, s Sample) []XID {
	if len(s.Past) == 0 && len(s.XIDs) == 0 {
		return seen
	}
	all := slices.Clone(seen)
	for _, x := range slices.Concat(s.Past, s.XIDs) {
		if !slices.ContainsFunc(all, x.Same) {
			all = append(all, x)
		}
	}
	return all[max(0, len(all)-maxSeen):]
}

// judgeAction notes whether the driver has wanted a reset since before this process, for an XID that nobody delivered: an
// engine inside the agent is away with it. Then nobody knows what is broken, so the GPU does not pass for one that
// works. It ends with the recovery action.
func (v *Verdict) judgeAction(c Config, s Sample) {
	value, told := s.Values[FieldRecoveryAction]
	if !told {
		return
	}
	wanted := recoveries[RecoveryAction(value)].action == ActionResetGPU
	explained := slices.ContainsFunc(s.XIDs, func(x XID) bool { return c.XID.Effect(x.Code) != EffectIgnore }) // not an application's error
	v.unexplained = wanted && (v.unexplained || v.actionUntold && !explained)
	v.actionUntold = false
}

// undelivered returns the findings of XIDs that only DCGM's checks tell of, from before the start. DCGM keeps such an
// incident until its engine restarts, so it may be cured: the device is no more than degraded.
func undelivered(c Config, s Sample) []Finding {
	var all []Finding
	for _, i := range s.Incidents {
		if i.Severity != SeverityFail || !i.ofXID() || c.Incidents.overrides(i.Code) {
			continue
		}
		info := LookupIncident(i.Code)
		all = append(all, Finding{
			Cause: incidentCause(info), State: Degraded, Reason: i.Message + "; it is of before the agent's start, and no reset was seen since",
			Action: info.Action, Since: s.At, Last: s.At, Clears: ClearsGPUReset,
		})
	}
	return all
}

// raisedXIDs returns, by GPU, the XIDs that its MIG devices report and that are of the whole GPU. All compute instances of
// a GPU instance report the same one.
func raisedXIDs(r *Reading, samples map[DeviceID]Sample) map[DeviceID][]XID {
	var raised map[DeviceID][]XID
	for _, d := range r.Devices {
		if d.Kind != KindMIG {
			continue
		}
		for _, x := range samples[d.ID].XIDs {
			if !LookupXID(x.Code).WholeGPU || slices.Contains(raised[d.Parent], x) {
				continue
			}
			if raised == nil {
				raised = make(map[DeviceID][]XID)
			}
			raised[d.Parent] = append(raised[d.Parent], x)
		}
	}
	return raised
}

// inheritFromParts gives each GPU the findings of the MIG devices that were destroyed and that nothing less than a
// reset of the GPU clears: a partition that is made anew is on the same memory and engines.
func inheritFromParts(known map[DeviceID]DeviceState, before []DeviceState, r *Reading, samples map[DeviceID]Sample) {
	listed := make(map[DeviceID]bool, len(r.Devices))
	for _, d := range r.Devices {
		listed[d.ID] = true
	}
	for _, d := range before {
		gpu := known[d.Device.Parent]
		if d.Device.Kind != KindMIG || listed[d.Device.ID] || samples[d.Device.Parent].Presence != Present {
			continue
		}
		findings := slices.Clone(gpu.Verdict.Findings)
		for _, f := range d.Verdict.Findings {
			stays := f.Clears == ClearsGPUReset || f.Clears == ClearsReboot && f.Cause != CauseFlapping // which is of the partition alone
			if f.From == "" && f.State == Unhealthy && stays {
				findings = merge(findings, f)
			}
		}
		gpu.Verdict.Findings = findings
		known[d.Device.Parent] = gpu
	}
}
