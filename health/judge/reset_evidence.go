package judge

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Evidence of a reset is positive and concerns one device. There are four kinds: a device that was lost alone returns, a condition ends
// that only a reset ends, the driver withdraws its recovery action, or the driver is reloaded. What happens to all GPUs of the node at once
// comes from the source, the driver or a switch, and proves nothing about a single GPU.

// reset is a reset of a device that a sample proves. The zero reset is none.
type reset struct {
	proven bool
	after  time.Time // observations until then precede the reset
	seen   time.Time // so do the XIDs until then that the source has reported: what ended was last seen then
	// unreported are the XIDs that the source has not reported yet. They may be newer than the reset, because event sources
	// report XIDs before the source measures their effects.
	unreported []int
}

// sourceLag is how much older than its sample a value may be: DCGM's cache is filled every second.
const sourceLag = 3 * time.Second

// follows reports whether the reset came after the newest observation of a finding. An XID from after r.seen may be of a fault after the
// reset, as when the source had no value of what ended for a while.
func (r reset) follows(f health.Finding) bool {
	reported := !slices.ContainsFunc(r.unreported, func(code int) bool { return f.Cause == health.XIDCause(code) })
	return r.proven && (!r.after.Before(f.Last) || reported && !r.seen.Before(f.Last))
}

// latest returns the later of this reset's time and an earlier reset's.
func (r reset) latest(before time.Time) time.Time {
	if r.proven && r.after.After(before) {
		return r.after
	}
	return before
}

// latestReset returns the proven reset that is the latest.
func latestReset(all ...reset) (latest reset) {
	for _, r := range all {
		if r.proven && (!latest.proven || r.after.After(latest.after)) {
			latest = r
		}
	}
	return latest
}

// reloaded returns the reset by a reload of the driver. An event source that reported an XID before the reload ended for it.
func (rc ReadingContext) reloaded(now time.Time) reset {
	return reset{proven: rc.DriverReloaded, after: now, seen: now}
}

// wasReset returns the reset that the source's sample proves.
func wasReset(c Config, old health.Memory, kind health.Kind, s health.Sample) (latest reset) {
	for _, f := range old.Findings {
		if !showsReset(c, f, kind, s) {
			continue
		}
		r := reset{proven: true, after: f.Last.Add(-sourceLag), seen: f.Last}
		if f.Cause == health.CauseRecoveryAction && f.Last.Equal(old.EventAction.At) {
			r.after = f.Last // the driver's value is not older than its event
		}
		latest = latestReset(latest, r)
	}
	return latest
}

// showsReset reports whether the sample shows the end of a finding that proves a reset.
func showsReset(c Config, f health.Finding, kind health.Kind, s health.Sample) bool {
	switch {
	case !f.Last.After(f.Reset):
		return false // evidence counts once, although with recovery "never" the finding outlasts the reset
	case f.OfPresence():
		// A single reading may be wrong, an inaccessible GPU was not reset, and a MIG device is reset only with its GPU.
		confirmed := f.Last.Sub(f.Since) >= c.Interval/2
		return s.Presence == health.Present && confirmed && f.Cause != health.CauseInaccessible && kind == health.KindGPU && !f.InOutage
	case f.Cause == health.CauseRecoveryAction:
		action, ok := s.Values[health.FieldRecoveryAction]
		return ok && health.RecoveryAction(action) == health.RecoveryNone && asksForReset(f)
	}
	return resetEnded(c, f.Cause, s)
}

// clearedByReturn reports whether the return of the device, in one reading, counts as the reset that clears a finding. It clears presence
// findings. It also clears XID 79, fallen off the bus, of a GPU that was seen lost, alone, and read again after the XID.
func clearedByReturn(old *health.Memory, f health.Finding, s health.Sample) bool {
	if s.Presence != health.Present {
		return false
	}
	if f.OfPresence() {
		return true
	}
	presence := old.Find(health.Finding.OfPresence)
	lostAlone := presence != nil && presence.Cause == health.CauseLost && !presence.InOutage
	readAfter := !s.At.Before(f.Last) // an event source may report the XID during the poll
	return f.Cause == health.XIDCause(79) && lostAlone && readAfter
}

// resetEnded reports whether the sample shows the end of a condition that only a reset ends. A pending remap that failed also ends, so it
// proves nothing.
func resetEnded(c Config, cause string, s health.Sample) bool {
	if !health.EndProvesReset(cause) || s.Values[health.FieldRemapFailed] != 0 {
		return false
	}
	cond := conditionOf(cause)
	v, ok := cond.values(s)
	return ok && cond.reason(c, v) == ""
}
