package monitor

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	// maxXIDGap is the longest time between two checks for XIDs; a poll is one. One check per second costs about a tenth of
	// a percent of a core, mostly for the wake-up.
	maxXIDGap = 500 * time.Millisecond

	// maxReads limits the reads in a second, apart from reads that a shorter interval or events cause.
	maxReads = 3

	// xidPhaseLasts is how long XIDs are expected at the phase of the latest one. DCGM records them in a thread of its own
	// (health/dcgm/OBSERVED.md#xid-thread). Only XIDs tell the thread's phase, which differs from the measurements' and drifts.
	xidPhaseLasts = 5 * time.Minute

	// minReadGap is the least time from a read to a check.
	minReadGap = 50 * time.Millisecond

	// guardEvery is how often a check makes sure that the engine does not measure earlier than before. A later measurement needs no check: the
	// poll sees none.
	guardEvery = 8 * time.Second
)

// reads are the polls and checks of a session. They determine when the next ones are due: a poll once per interval, right after the
// engine has measured, and checks between them.
type reads struct {
	phase    phase
	guarded  time.Time // when a read last saw that the engine had not measured yet
	interval time.Duration
	polledAt time.Time // the end of the latest poll
	nominal  time.Time // when the next poll is due if the phase is unknown

	xidDelay time.Duration // from a measurement to the record of an XID
	xidAt    time.Time     // when it was learned; zero if it is unknown

	began, ended time.Time           // the latest read
	measured     time.Time           // the engine's time of its latest measurement, as of that read; zero if unknown
	changed      time.Time           // the latest read that saw a new measurement
	recent       [maxReads]time.Time // when the latest reads began, oldest first
}

// add records a read, which saw that the engine has measured at a time of its own.
func (r *reads) add(began, ended, measured time.Time) {
	switch {
	case measured.IsZero() || r.measured.IsZero():
	case measured.Equal(r.measured):
		r.phase.observe(r.ended, began, false)
		if r.phase.narrow() && r.phase.untilAfter(began) <= measureJitter+2*readMargin {
			r.guarded = began
		}
	default:
		r.phase.observe(r.began, ended, true)
		r.changed = ended
	}
	r.began, r.ended, r.measured = began, ended, measured
	copy(r.recent[:], r.recent[1:])
	r.recent[maxReads-1] = began
}

// learnXIDs learns when the engine records XIDs from the newest XIDs of the latest read, which was a poll. It compares two times of the
// engine's clock.
func (r *reads) learnXIDs(samples []health.Sample) {
	for i := range samples {
		for _, row := range samples[i].Rows {
			delay := row.XID().At.Sub(r.measured)
			isNew := !r.measured.IsZero() && delay.Abs() < 2*measurePeriod
			if isNew && !health.InKernelLog(row.Code) { // the time of one in the kernel log is the driver's
				r.xidDelay, r.xidAt = inPeriod(delay), r.ended
			}
		}
	}
}

// polled records that a reading was judged; the latest read was its poll. The next poll is due after the interval.
func (r *reads) polled(now time.Time, interval time.Duration) {
	from := now
	// An interval that does not fit the engine's period is kept on average. A poll that came early for another reason, as a new XID,
	// begins an interval of its own.
	fits := interval%measurePeriod == 0 || measurePeriod%interval == 0
	reach := min(interval, measurePeriod)
	if early := r.nominal.Sub(now); r.phase.known() && !fits && early <= reach/4 && early >= -reach {
		from = r.nominal
	}
	r.polledAt, r.nominal, r.interval = now, from.Add(interval), interval
}

// pollDue returns when the next poll is due: after the measurement, or the record of an XID, that is closest to the interval's end, or
// rather a bit later.
func (r *reads) pollDue() time.Time {
	at := r.nominal
	if !r.phase.known() {
		return at
	}
	reach := min(r.interval, measurePeriod)
	delay := r.awaitedDelay()
	if follow := r.phase.next(at.Add(-reach/4 - delay)).Add(delay); follow.Sub(at) < reach*3/4 {
		at = follow
	}
	if r.interval >= time.Second/maxReads {
		at = latest(at, r.allowed())
	}
	return latest(at, r.polledAt.Add(r.interval/2)) // what counts polls expects them apart
}

// allowed returns when the next read is within maxReads.
func (r *reads) allowed() time.Time { return r.recent[0].Add(time.Second) }

// checkDue returns when the next check is due if the next poll is due at poll. The poll is the check if that is not earlier.
func (r *reads) checkDue(poll time.Time) time.Time {
	at := poll
	if left := poll.Sub(r.ended); left > maxXIDGap+minReadGap { // a gap that is a bit longer is no reason for another check
		gaps := (left - minReadGap + maxXIDGap - 1) / maxXIDGap
		at = r.ended.Add(left / gaps)
	}
	allowed := r.allowed()
	probe := r.probeDue(poll)
	instead := !r.phase.narrow() && probe.Sub(r.ended) <= maxXIDGap+minReadGap // of another check, which can come later
	if !probe.Before(allowed) && probe.Before(poll.Add(-minReadGap)) && (instead || probe.Before(at)) {
		return probe
	}
	return latest(at, allowed)
}

// awaitedDelay returns how long after a measurement polls come: xidDelay while XIDs are expected at the phase of the latest one. Checks
// keep the time between two polls: the next XID may have another phase.
func (r *reads) awaitedDelay() time.Duration {
	if !r.phase.narrow() || r.xidAt.IsZero() || r.ended.Sub(r.xidAt) > xidPhaseLasts {
		return 0
	}
	return r.xidDelay
}

// probeDue returns when a check is due that tells something about the phase; the poll if none does.
func (r *reads) probeDue(poll time.Time) time.Time {
	switch from := r.ended.Add(minReadGap); {
	case !r.phase.known() || from.Sub(r.changed) > 2*measurePeriod: // a stalled engine is not read more often
	case !r.phase.narrow():
		return r.phase.middle(from)
	case r.ended.Sub(r.guarded) >= guardEvery:
		return r.phase.before(latest(from, poll.Add(-measurePeriod)))
	}
	return poll
}
