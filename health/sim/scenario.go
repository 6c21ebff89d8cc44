package sim

import (
	"context"
	"time"

	"go.uber.org/zap"
)

// nextEvent returns when the scenario's next event or restart is due, since the start.
func (s *Source) nextEvent() (at time.Duration, ok bool) {
	switch {
	case s.start.IsZero() || len(s.events) == 0:
		return 0, false
	case s.next < len(s.events):
		return s.loopStart + s.events[s.next].At, true
	case s.cfg.Loop > 0:
		return s.loopStart + s.cfg.Loop, true
	}
	return 0, false
}

// advance applies all events that are due. Called with mu held.
func (s *Source) advance(now time.Time) {
	var changed bool
	for {
		at, ok := s.nextEvent()
		if !ok || now.Before(s.start.Add(at)) {
			break
		}
		changed = true
		if s.next < len(s.events) {
			e := s.events[s.next]
			s.next++
			s.apply(e, &s.scenario, "scenario", s.start.Add(at))
			continue
		}
		s.log.Info("scenario restarts", zap.Duration("after", s.cfg.Loop))
		s.loopStart, s.next = at, 0
		s.scenario.source, s.scenario.events = "", ""
		clear(s.scenario.gpus)
		s.updateGPUs(s.start.Add(at))
		s.updateState()
	}
	if changed {
		s.wakeAll()
	}
}

// play applies the scenario's events on time until ctx ends, so that Wake and the driver's events are on time too.
func (s *Source) play(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.awaitChange(ctx, nil) == nil {
		s.advance(time.Now())
	}
}
