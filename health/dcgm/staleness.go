//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
)

// How long DCGM may give no value, or no new one, of GPUs that it calls OK. It samples the fields of
// health once a second; a poll that reads metrics is given the time of three of their intervals more.
const (
	blindAfter = 3 * time.Second
	staleAfter = 30 * time.Second
)

// readCount is what one poll got of GPUs that DCGM calls OK, without XIDs and the fields that a GPU does not support.
type readCount struct {
	asked, answered int
	times           int64 // the sum of the samples' times, µs: it changes if any is a new sample
	newest          int64 // the newest sample's time
}

func (r *readCount) add(o readCount) {
	r.asked, r.answered, r.times = r.asked+o.asked, r.answered+o.answered, r.times+o.times
	r.newest = max(r.newest, o.newest)
}

// none reports whether values were asked for and none came.
func (r readCount) none() bool { return r.asked > 0 && r.answered == 0 }

// eyesight follows whether DCGM has new values of some fields.
type eyesight struct {
	saw        bool      // a value was read in this session
	blindSince time.Time // zero if it is not blind
	times      int64
	movedAt    time.Time // when times last changed, by our clock: the engine's may be another
}

func (e *eyesight) look(r readCount, now time.Time) {
	switch {
	case r.asked == 0:
		*e = eyesight{saw: e.saw}
	case r.answered == 0:
		if e.blindSince.IsZero() {
			e.blindSince = now
		}
	default:
		e.saw, e.blindSince = true, time.Time{}
		if r.times != e.times || e.movedAt.IsZero() {
			e.times, e.movedAt = r.times, now
		}
	}
}

// fault is how DCGM does not see: the zero fault is none.
type fault struct {
	blind bool          // it has no value
	idle  time.Duration // for how long it has had no new one
}

// fault returns what is wrong for long enough to be sure.
func (e *eyesight) fault(now time.Time, blind, stale time.Duration) (f fault) {
	switch {
	case !e.blindSince.IsZero():
		f.blind = now.Sub(e.blindSince) >= blind
	case !e.movedAt.IsZero() && now.Sub(e.movedAt) >= stale:
		f.idle = now.Sub(e.movedAt)
	}
	return f
}

// sight tells whether DCGM still sees one GPU, or all of them. After an XID 119 it stops calling the driver, all values go
// blank, and the status stays OK (12); if its thread hangs in the driver, the cache stays as it was for ever. The fields of
// health tell; for a GPU that has none of them, all fields that a full poll reads.
type sight struct {
	judged, all readCount // of this poll

	light, full eyesight // of the fields of health, and of all
	fault       fault    // as of the last look
}

func (g *sight) look(now time.Time, full bool, interval time.Duration) {
	g.light.look(g.judged, now)
	if full {
		g.full.look(g.all, now)
	}
	switch later := staleAfter + 3*interval; {
	case g.light.saw:
		g.fault = g.light.fault(now, blindAfter, staleAfter)
	case !full: // it stays what it was
	case g.full.saw:
		g.fault = g.full.fault(now, blindAfter, later)
	default: // nothing was ever seen: this may be as fast as it is
		g.fault = g.full.fault(now, later, later)
	}
}

// current reports whether there was a new value lately.
func (g *sight) current(now time.Time) bool {
	return g.judged.answered > 0 && now.Sub(g.light.movedAt) < blindAfter
}

// unseen reports whether this poll tells nothing of the GPU although it should.
func (g *sight) unseen() bool { return g.all.none() || g.judged.none() && g.light.saw }

// checkSight fails if DCGM sees no GPU. It marks the GPUs that it does not see while it sees others: that is those GPUs'
// fault and not DCGM's.
func (s *session) checkSight(now time.Time, full bool) error {
	s.node.judged, s.node.all = readCount{}, readCount{}
	for _, g := range s.sights {
		s.node.judged.add(g.judged)
		s.node.all.add(g.all)
	}
	s.node.look(now, full, s.cfg.Interval)
	switch f := s.node.fault; {
	case f.blind:
		return errBlind()
	case f.idle > 0:
		if s.cfg.Address != "" && passed(s.rewatchedAt, now, 2*staleAfter) {
			// A host engine whose clock was set back shows the samples from before as the latest, until its clock has caught
			// up. It drops them with the last watch. The XIDs are read before, and delivered with this poll.
			s.rewatchedAt, s.node = now, sight{}
			s.sights = nil
			return s.rebuild(s.topology)
		}
		return fmt.Errorf("DCGM has not measured any GPU for %v: its thread hangs in the driver, or its clock was set back", f.idle.Round(time.Second))
	}
	seen := false
	for _, g := range s.sights {
		g.look(now, full, s.cfg.Interval)
		seen = seen || g.fault == (fault{}) && g.current(now)
	}
	for id, g := range s.sights {
		switch stale := g.fault != (fault{}) && (seen || s.stale[id]); {
		case stale == s.stale[id]:
		case stale:
			s.stale[id] = true
			s.log.Warn("a GPU cannot be measured while others can", zap.Uint("dcgm_id", id), zap.Bool("blank", g.fault.blind))
		default:
			delete(s.stale, id)
			s.fullAt = time.Time{} // its metrics are to be back soon
			s.log.Info("a GPU can be measured again", zap.Uint("dcgm_id", id))
		}
	}
	return nil
}

func errBlind() error {
	return errors.New("DCGM is blind: it calls the GPUs OK and has no value of any of them (an XID 119 does this); " +
		"the engine must be started again")
}
