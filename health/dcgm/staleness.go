//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-dcgm/pkg/dcgm"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// How long DCGM may return blanks, or no new samples, for GPUs whose status is OK. It samples the health fields once a second; for metrics
// three of their intervals are added.
const (
	blindAfter = 3 * time.Second
	staleAfter = 30 * time.Second
)

// readCount counts the values of one poll of GPUs whose status is OK, without XIDs and unsupported fields.
type readCount struct {
	requested, measured int
	timeSum             int64 // sum of the samples' times in µs, which any new sample changes
	newest              int64 // time of the newest sample in µs
}

func (r *readCount) add(o readCount) {
	r.requested, r.measured, r.timeSum = r.requested+o.requested, r.measured+o.measured, r.timeSum+o.timeSum
	r.newest = max(r.newest, o.newest)
}

// allBlank reports whether values were requested and all were blank.
func (r readCount) allBlank() bool { return r.requested > 0 && r.measured == 0 }

// valueAge tracks how long a set of fields has been blank or unchanged.
type valueAge struct {
	measured   bool      // a value was measured in this session
	blankSince time.Time // zero if the latest values were not blank
	timeSum    int64
	changedAt  time.Time // when timeSum last changed, by our clock: the engine's may differ
}

func (a *valueAge) update(r readCount, now time.Time) {
	switch {
	case r.requested == 0:
		*a = valueAge{measured: a.measured}
	case r.measured == 0:
		if a.blankSince.IsZero() {
			a.blankSince = now
		}
	default:
		a.measured, a.blankSince = true, time.Time{}
		if r.timeSum != a.timeSum || a.changedAt.IsZero() {
			a.timeSum, a.changedAt = r.timeSum, now
		}
	}
}

// gap describes missing measurements. The zero gap means that there are none.
type gap struct {
	blank bool          // no values
	idle  time.Duration // for how long there was no new sample
}

// gap returns a gap that has exceeded its limit.
func (a *valueAge) gap(now time.Time, blankLimit, idleLimit time.Duration) (g gap) {
	switch {
	case !a.blankSince.IsZero():
		g.blank = now.Sub(a.blankSince) >= blankLimit
	case !a.changedAt.IsZero() && now.Sub(a.changedAt) >= idleLimit:
		g.idle = now.Sub(a.changedAt)
	}
	return g
}

// staleness tracks whether DCGM still measures one GPU, or all of them together. After an XID 119 all values are blank
// while the status stays OK (OBSERVED.md#blind-engine). If DCGM's thread hangs in the driver, the values in the cache
// stay the same. The health fields decide; for a GPU without any, all fields of a full poll do.
type staleness struct {
	healthCount, allCount readCount // of this poll

	health, all valueAge // of the health fields, and of all fields
	gap         gap      // as of the last update
}

func (s *staleness) update(now time.Time, full bool, interval time.Duration) {
	s.health.update(s.healthCount, now)
	if full {
		s.all.update(s.allCount, now)
	}
	switch limit := staleAfter + 3*interval; {
	case s.health.measured:
		s.gap = s.health.gap(now, blindAfter, staleAfter)
	case !full: // unchanged
	case s.all.measured:
		s.gap = s.all.gap(now, blindAfter, limit)
	default: // never measured: the first values may take as long as any
		s.gap = s.all.gap(now, limit, limit)
	}
}

// everMeasured reports whether a value was measured in this session.
func (s *staleness) everMeasured() bool { return s.health.measured || s.all.measured }

// fresh reports whether there was a new sample lately.
func (s *staleness) fresh(now time.Time) bool {
	return s.healthCount.measured > 0 && now.Sub(s.health.changedAt) < blindAfter
}

// unmeasured reports whether values that exist are missing in this poll.
func (s *staleness) unmeasured() bool {
	return s.allCount.allBlank() || s.healthCount.allBlank() && s.health.measured
}

var (
	errBlind = errors.New("DCGM is blind: the GPUs' status is OK, but no GPU has values (an XID 119 causes this); " +
		"restart the engine")
	errFrozen = errors.New("DCGM takes no new samples")
)

// countValues adds up the values of all GPUs, and takes the engine's time of them.
func (s *session) countValues() {
	s.allGPUs.healthCount, s.allGPUs.allCount = readCount{}, readCount{}
	for _, g := range s.gpuStaleness {
		s.allGPUs.healthCount.add(g.healthCount)
		s.allGPUs.allCount.add(g.allCount)
	}
	s.history.updateClock(s.allGPUs.allCount.newest)
}

// checkStaleness fails if DCGM measures no GPU. It marks GPUs as stale that DCGM does not measure while it measures
// others: the fault is then the GPU's and not DCGM's (OBSERVED.md#stale-gpu).
func (s *session) checkStaleness(now time.Time, full bool) error {
	s.allGPUs.update(now, full, s.cfg.Interval)
	switch g := s.allGPUs.gap; {
	case g.blank:
		return errBlind
	case g.idle > 0:
		if s.cfg.Address != "" && elapsed(s.rewatchedAt, now, 2*staleAfter) {
			// A host engine whose clock was set back returns the samples from before until its clock has caught up. It drops
			// them with the last watch (OBSERVED.md#sample-order). rebuild reads the XIDs first, and this poll lists them.
			s.rewatchedAt, s.allGPUs = now, staleness{}
			s.gpuStaleness = nil
			return s.rebuild(s.hierarchy)
		}
		return fmt.Errorf("%w for %v: its thread hangs in the driver, or its clock was set back", errFrozen, g.idle.Round(time.Second))
	}
	anyFresh := false
	for _, g := range s.gpuStaleness {
		g.update(now, full, s.cfg.Interval)
		anyFresh = anyFresh || g.gap == (gap{}) && g.fresh(now)
	}
	for id, g := range s.gpuStaleness {
		switch stale := g.gap != (gap{}) && (anyFresh || s.stale[id]); {
		case stale == s.stale[id]:
		case stale:
			s.stale[id] = true
			s.log.Warn("GPU is stale: DCGM measures other GPUs only", zap.Uint("dcgm_id", id), zap.Bool("blank", g.gap.blank))
		default:
			delete(s.stale, id)
			s.fullAt = time.Time{} // read its metrics again soon
			s.log.Info("GPU is measured again", zap.Uint("dcgm_id", id))
		}
	}
	return nil
}

// detachedDelay is how long a GPU must be without its driver before it counts as detached: while one GPU is bound or
// unbound, DCGM calls all of them detached (OBSERVED.md#short-detach).
const detachedDelay = 2 * time.Second

// presence tracks whether the driver reaches a GPU.
type presence struct {
	status        dcgm.EntityStatus // as of the last call
	detachedSince time.Time         // zero if the status is not detached
	current       health.Presence
}

// update takes the GPU's status. It reports whether the presence has changed, and whether the GPU has returned: DCGM may
// then have forgotten its watches.
func (p *presence) update(status dcgm.EntityStatus, now time.Time) (changed, returned bool) {
	oldPresence, oldStatus := p.current, p.status
	p.status = status
	if status != dcgm.EntityStatusDetached {
		p.detachedSince = time.Time{}
	}
	switch status {
	case dcgm.EntityStatusUnknown: // go-dcgm returns it for a failed call
		p.current = health.PresenceUnknown
	case dcgm.EntityStatusLost:
		p.current = health.Lost
	case dcgm.EntityStatusInaccessible:
		p.current = health.Inaccessible
	case dcgm.EntityStatusDetached:
		if p.detachedSince.IsZero() {
			p.detachedSince = now
		}
		if now.Sub(p.detachedSince) >= detachedDelay {
			p.current = health.Detached
		}
	default: // OK; unsupported, fake and disabled concern DCGM's support, not the GPU
		p.current = health.Present
	}
	return p.current != oldPresence, reachable(status) && unreachable(oldStatus)
}

// reaches reports whether the driver reached a GPU when its status was read.
func (s *session) reaches(gpu uint) bool { return reachable(s.presence[gpu].status) }

func reachable(s dcgm.EntityStatus) bool {
	return s == dcgm.EntityStatusOk || s == dcgm.EntityStatusFake
}

func unreachable(s dcgm.EntityStatus) bool {
	return s == dcgm.EntityStatusLost || s == dcgm.EntityStatusInaccessible || s == dcgm.EntityStatusDetached
}
