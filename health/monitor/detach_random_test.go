package monitor

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// In any sequence of requests, failures, hangs and reloads: while detached no session is open and no event source runs, no GPU
// is offered before a reading after the detach, one call and one event source run at a time, no fault is invented, and attach
// ends the detach.
func TestDetachInAnyOrder(t *testing.T) {
	for seed := range uint64(60) {
		runTest(t, func(t *testing.T, h *harness) {
			r := rand.New(rand.NewPCG(seed, 5))
			f := new(fakeEvents)
			resumeEvents := func() {}
			reload := func() {
				src := h.withEvents(f)
				src.Attach, src.StallAfter = h.Attach, 3*time.Second
				h.source.Store(src)
			}
			reload()
			advance(5 * time.Second)
			var hang chan struct{}
			resume := func() {
				if hang != nil {
					h.set(func(s *fakeSource) { s.hang, s.detachHang = nil, nil })
					close(hang)
					hang = nil
				}
			}
			steps, pollsAtDetach := "", -1
			check := func() {
				t.Helper()
				synctest.Wait()
				s := h.out.Load()
				v := s.Devices[0].Verdict
				open, polls := h.count(&h.openSessions), h.count(&h.polls)
				if s.Source.Status == health.SourceDetached {
					if n := f.get(&f.running) + f.get(&f.besidesRunning); n != 0 {
						t.Errorf("seed %d,%s: detached while %d companions run", seed, steps, n)
					}
					if open != 0 || h.count(&h.calls) != 0 || v.State != health.Unhealthy {
						t.Errorf("seed %d,%s: detached with %d open sessions, GPU %+v", seed, steps, open, v)
					}
					pollsAtDetach = polls
				}
				if polls == pollsAtDetach && !v.Has(health.CauseReleased) {
					t.Errorf("seed %d,%s: offered before a reading: %+v", seed, steps, v)
				}
				if len(s.Devices) != 1 || len(v.Findings) > 1 || len(v.Findings) == 1 && v.Cause() != health.CauseReleased || len(v.Trips) > 0 {
					t.Errorf("seed %d,%s: %+v", seed, steps, s.Devices)
				}
				if n := f.get(&f.mostRunning); n > 1 {
					t.Errorf("seed %d,%s: %d event sources run at once", seed, steps, n)
				}
				if n := h.count(&h.mostCalls); n > 1 || open > 1 {
					t.Errorf("seed %d,%s: %d calls at once, %d open sessions", seed, steps, n, open)
				}
			}
			maybe := func(text string) error { return []error{nil, errors.New(text)}[r.IntN(2)] }
			for range 40 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(10))*time.Second)
				switch r.IntN(11) {
				case 0, 1:
					steps += " detach"
					limit := time.Duration(1+r.IntN(60)) * time.Second
					w, err := h.m.Withhold(limit)
					if err == nil {
						check()
						advance(time.Duration(r.IntN(3)) * time.Second)
						if r.IntN(3) > 0 {
							_, _ = h.m.Detach(ctx, limit)
						}
						w.End()
					}
				case 2, 3:
					steps += " attach"
					_, _ = h.m.Attach(ctx)
				case 4:
					steps += " open"
					err := maybe("broken")
					h.set(func(s *fakeSource) { s.openErr = err })
				case 5:
					steps += " poll"
					err := maybe("dead")
					h.set(func(s *fakeSource) { s.pollErr = err })
				case 6:
					steps += " refuse"
					err := maybe("refused")
					h.set(func(s *fakeSource) { s.detachErr = err })
				case 7:
					steps += " hang"
					if resume(); r.IntN(2) == 0 {
						hang = make(chan struct{})
						h.set(func(s *fakeSource) { s.hang, s.detachHang = hang, hang })
					}
				case 8:
					steps += " reload"
					reload()
				case 9:
					steps += " config"
					h.configure(func(*health.Config) {})
				case 10:
					steps += " events"
					resumeEvents()
					if resumeEvents = func() {}; r.IntN(2) == 0 {
						resumeEvents = f.hangEnd()
					}
				}
				cancel()
				check()
				advance(time.Duration(r.IntN(20)) * time.Second)
				check()
			}
			resume()
			resumeEvents()
			h.set(func(s *fakeSource) { s.openErr, s.pollErr, s.detachErr = nil, nil, nil })
			synctest.Wait()
			if _, err := h.m.Attach(t.Context()); err != nil {
				t.Errorf("seed %d,%s: %v", seed, steps, err)
			}
			advance(2 * time.Minute)
			if h.status().Status != health.SourceUp || h.verdict().State != health.Healthy {
				t.Errorf("seed %d,%s: source %+v, %+v", seed, steps, h.status(), h.verdict())
			}
			if f.get(&f.running) != 1 || f.get(&f.besidesRunning) != 1 {
				t.Errorf("seed %d,%s: %d event sources and %d other functions run", seed, steps, f.running, f.besidesRunning)
			}
		})
	}
}
