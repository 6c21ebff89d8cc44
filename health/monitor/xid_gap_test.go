package monitor

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// Time in which neither the source nor an event source reports XIDs is known by its seconds.
func TestXIDGap(t *testing.T) {
	const polled = 2 * time.Second // runTestWithEvents has polled until then
	kill := func(h *harness) {
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = errors.New("dead"), errors.New("refused") })
	}
	restart := func(h *harness) {
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = nil, nil })
		advance(maxBackoff)
	}
	for name, c := range map[string]struct {
		sequence func(t *testing.T, h *harness, f *fakeEvents)
		min, max time.Duration
	}{
		"events": {func(_ *testing.T, h *harness, _ *fakeEvents) {
			kill(h)
			advance(time.Hour)
			restart(h)
		}, 0, 0},
		"no events": {func(_ *testing.T, h *harness, f *fakeEvents) {
			f.to.SetEvents(errors.New("no driver"))
			kill(h)
			advance(time.Hour)
			restart(h)
		}, time.Hour, time.Hour + maxBackoff + polled},
		"events of another host": {func(_ *testing.T, h *harness, f *fakeEvents) {
			f.to.SetEvents(health.UnusedEvents{Err: errors.New("other GPUs")})
			kill(h)
			advance(time.Hour)
			restart(h)
		}, time.Hour, time.Hour + maxBackoff + polled},
		"no GPU is listed": {func(_ *testing.T, h *harness, f *fakeEvents) { // as by an engine that was started without the driver
			f.to.SetEvents(errors.New("no driver"))
			h.report()
			advance(time.Hour)
			h.report(of(healthtest.GPU0, healthtest.Present()))
			advance(time.Minute)
		}, time.Hour, time.Hour + 2*polled},
		"events for a part": {func(_ *testing.T, h *harness, f *fakeEvents) {
			kill(h)
			advance(time.Hour)
			f.to.SetEvents(errors.New("no driver"))
			advance(time.Minute)
			f.to.SetEvents(nil)
			advance(time.Hour)
			restart(h)
		}, time.Minute, time.Minute},
		"twice": {func(_ *testing.T, h *harness, f *fakeEvents) {
			f.to.SetEvents(errors.New("no driver"))
			for range 2 {
				kill(h)
				advance(time.Hour)
				restart(h)
			}
		}, 2 * time.Hour, 2 * (time.Hour + maxBackoff + polled)},
		"stalled": {func(_ *testing.T, h *harness, f *fakeEvents) { // the session goes on, and so does its stream of XIDs
			f.to.SetEvents(errors.New("no driver"))
			resume := h.hangPolls()
			advance(time.Hour)
			resume()
			advance(time.Minute)
		}, 0, 0},
		"stalled, then dead": {func(_ *testing.T, h *harness, f *fakeEvents) {
			f.to.SetEvents(errors.New("no driver"))
			resume := h.hangPolls()
			advance(time.Hour)
			kill(h)
			resume()
			advance(time.Second)
			restart(h)
		}, time.Hour, time.Hour + maxBackoff + polled},
		"detach": {func(t *testing.T, h *harness, f *fakeEvents) {
			f.to.SetEvents(errors.New("no driver"))
			kill(h)
			advance(time.Hour)
			h.detach(t, 10*time.Hour)
			advance(5 * time.Hour)
			h.set(func(s *fakeSource) { s.pollErr, s.openErr = nil, nil })
			h.attach(t)
		}, time.Hour, time.Hour + maxBackoff + polled},
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				c.sequence(t, h, f)
				synctest.Wait()
				g := h.status().XIDGap
				if g.Total < c.min || g.Total > c.max || (g.Total > 0) == g.Since.IsZero() || g.Since.IsZero() != g.Until.IsZero() {
					t.Errorf("%+v, want %v to %v, ended", g, c.min, c.max)
				}
				var logged time.Duration
				for _, e := range h.logs.FilterLevelExact(zapcore.WarnLevel).FilterField(zap.String("cause", xidsMayBeLost)).All() {
					logged += e.ContextMap()["lasted"].(time.Duration)
				}
				if (logged - g.Total).Abs() > 2*time.Second {
					t.Errorf("logged %v of %v: %v", logged, g.Total, h.logs.All())
				}
			})
		})
	}
}

// A gap is shown while it lasts, from the last reading on, also if the host engine is away at the start.
func TestXIDGapLasts(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		advance(10 * time.Second)
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = errors.New("dead"), errors.New("refused") })
		advance(time.Minute)
		if g := h.status().XIDGap; !g.Lasts() || g.Of(time.Now()) < time.Minute || g.Of(time.Now()) > time.Minute+2*time.Second {
			t.Errorf("%+v, of %v", g, g.Of(time.Now()))
		}
	})
	runTest(t, func(t *testing.T, h *harness) {
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = errors.New("dead"), errors.New("refused") })
		h.source.Store(h.fakeSource.source(health.SourceID{Kind: "another"}))
		advance(time.Minute)
		if g := h.status().XIDGap; !g.Lasts() || g.Of(time.Now()) < time.Minute-time.Second {
			t.Errorf("at the start: %+v", g)
		}
	})
}
