package health

import "slices"

// Evidence of a reset is positive and concerns one device: a device that was lost alone returns, a condition ends that only a
// reset ends, the driver withdraws its recovery action, or the driver is reloaded. An event of all GPUs of the node at once
// comes from the source, the driver or a switch, and proves nothing about a single GPU.

// wasReset reports whether the sample is evidence of a reset.
func wasReset(c Config, old Verdict, kind Kind, s Sample) bool {
	action, hasAction := s.Values[FieldRecoveryAction]
	return slices.ContainsFunc(old.Findings, func(f Finding) bool {
		switch {
		case f.From != "" || !f.Last.After(f.Reset):
			return false // evidence counts once, although with recovery "never" the finding outlasts the reset
		case f.ofPresence():
			// A single reading may be wrong, an inaccessible GPU was not reset, and a MIG device is reset only with its GPU.
			unreachable := f.Last.Sub(f.Since) >= c.Interval/2 && f.Cause != CauseInaccessible && kind == KindGPU
			return s.Presence == Present && unreachable && !f.InOutage
		case f.Cause == CauseRecoveryAction:
			return hasAction && RecoveryAction(action) == RecoveryNone && f.asksForReset()
		}
		return resetEnded(c, f.Cause, s)
	})
}

// provesReturn reports whether the presence of the device proves the reset that clears a finding. It does so for the findings
// of an unreachable device, and for XID 79, fallen off the bus, of a GPU that was lost alone, even for a single reading.
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
