package sim

import (
	"time"

	"go.uber.org/zap"
)

// due returns when something of the scenario happens next, since the start.
func (s *Source) due() (at time.Duration, ok bool) {
	switch {
	case s.start.IsZero() || len(s.events) == 0:
		return 0, false
	case s.next < len(s.events):
		return s.lap + s.events[s.next].At, true
	case s.cfg.Loop > 0:
		return s.lap + s.cfg.Loop, true
	}
	return 0, false
}

// advance makes everything happen that was due until now. Called with mu held.
func (s *Source) advance(now time.Time) {
	var moved bool
	for {
		at, ok := s.due()
		if !ok || now.Before(s.start.Add(at)) {
			break
		}
		moved = true
		if s.next < len(s.events) {
			e := s.events[s.next]
			s.next++
			s.apply(e, &s.scenario, "scenario", s.start.Add(at))
			continue
		}
		s.log.Info("scenario starts anew", zap.Duration("after", s.cfg.Loop))
		s.lap, s.next = at, 0
		s.scenario.source = ""
		clear(s.scenario.gpus)
		s.partition(s.start.Add(at))
		s.settle()
	}
	if moved {
		s.wakeAll()
		s.arm()
	}
}

// arm sets the timer for the next event, if anybody is there to be woken by it. Called with mu held.
func (s *Source) arm() {
	if s.timer != nil {
		s.timer.Stop()
	}
	at, ok := s.due()
	if !ok || s.users == 0 {
		return
	}
	wait := time.Until(s.start.Add(at))
	if s.timer != nil {
		s.timer.Reset(wait)
		return
	}
	s.timer = time.AfterFunc(wait, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.users > 0 {
			s.advance(time.Now())
			s.arm()
		}
	})
}
