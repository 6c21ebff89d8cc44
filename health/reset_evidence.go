package health

import "slices"

// Evidence of a reset is positive and concerns one device: the return of a device that was lost alone, a condition that only
// a reset ends, the driver withdrawing its recovery action, or a reloaded driver. What happens to all GPUs of the node at
// once is a matter of the source, the driver or a switch, and proves nothing about a single GPU.

// wasReset reports whether the sample is evidence of a reset.
func wasReset(c Config, old Verdict, kind Kind, s Sample) bool {
	action, hasAction := s.Values[FieldRecoveryAction]
	return slices.ContainsFunc(old.Findings, func(f Finding) bool {
		switch {
		case f.From != "" || !f.Last.After(f.Reset):
			return false // evidence counts once; with recovery "never" the finding itself lasts for long after
		case f.ofPresence():
			// A single reading may err, an inaccessible GPU was not reset, and a MIG device depends on its GPU.
			away := f.Last.Sub(f.Since) >= c.Interval/2 && f.Cause != CauseInaccessible && kind == KindGPU
			return s.Presence == Present && away && !f.InOutage
		case f.Cause == CauseRecoveryAction:
			return hasAction && RecoveryAction(action) == RecoveryNone && f.asksForReset()
		}
		return resetEnded(c, f.Cause, s)
	})
}

// provesReturn reports whether the device's presence is the reset that a finding waits for. This holds for the finding that
// the device was unreachable, and for XID 79, fallen off the bus, of a GPU that was lost alone, for however short a time.
func provesReturn(old Verdict, f Finding, s Sample) bool {
	if s.Presence != Present {
		return false
	}
	unreachable := old.ownFinding(Finding.ofPresence)
	return f.ofPresence() || f.Cause == xidCause(79) && unreachable != nil && unreachable.Cause == CauseLost && !unreachable.InOutage
}

// resetEnded reports whether the sample shows the end of a condition that only a reset or a driver reload ends (DCGM 4.6
// health, what a GPU reset clears). A pending remap that failed also ends, so it proves nothing.
func resetEnded(c Config, cause string, s Sample) bool {
	if cause != CauseDBE && cause != CauseRemapPending && cause != CauseRetiredPending || s.Values[FieldRemapFailed] != 0 {
		return false
	}
	cond := conditionOf(cause)
	v, ok := cond.values(s)
	return ok && cond.reason(c, v) == ""
}
