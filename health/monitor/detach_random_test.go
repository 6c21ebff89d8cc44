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

// Whatever is said, fails, hangs and is reloaded meanwhile: while the driver is let go of no session is open and no GPU
// is given out before it was seen again, there is one call at a time, no fault is invented, and attach ends it all.
func TestDetachInAnyOrder(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 5))
			b := monitor(t)
			defer b.stop()
			b.source.Store(&Source{Open: b.Open, Attach: b.Attach, StallAfter: 3 * time.Second})
			pass(5 * time.Second)
			var hang chan struct{}
			release := func() {
				if hang != nil {
					b.set(func(s *script) { s.hang, s.detachHang = nil, nil })
					close(hang)
					hang = nil
				}
			}
			said, polls := "", -1 // polls: how many there were when the driver was last let go of
			check := func() {
				t.Helper()
				synctest.Wait()
				s := b.out.Load()
				v := s.Devices[0].Verdict
				open := b.count(&b.live)
				if s.Source.Status == health.SourceDetached && (open != 0 || b.count(&b.inside) != 0 || !v.Has(health.CauseReleased) || v.State != health.Unhealthy) {
					t.Errorf("seed %d,%s: let go of, with %d sessions open, and the GPU is %+v", seed, said, open, v)
				}
				if s.Source.Status == health.SourceDetached {
					polls = b.count(&b.polls)
				}
				if polls == b.count(&b.polls) && !v.Has(health.CauseReleased) {
					t.Errorf("seed %d,%s: given out before it was seen again: %+v", seed, said, v)
				}
				if len(s.Devices) != 1 || len(v.Findings) > 1 || len(v.Findings) == 1 && v.Cause() != health.CauseReleased || len(v.Trips) > 0 {
					t.Errorf("seed %d,%s: %+v", seed, said, s.Devices)
				}
				if n := b.count(&b.most); n > 1 || open > 1 {
					t.Errorf("seed %d,%s: %d calls at once, %d sessions open", seed, said, n, open)
				}
			}
			for range 40 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(10))*time.Second)
				switch r.IntN(10) {
				case 0, 1:
					said += " detach"
					length := time.Duration(1+r.IntN(60)) * time.Second
					w, err := b.m.Withhold(length)
					if err == nil {
						check()
						pass(time.Duration(r.IntN(3)) * time.Second)
						if r.IntN(3) > 0 {
							_, _ = b.m.Detach(ctx, length)
						}
						w.End()
					}
				case 2, 3:
					said += " attach"
					_, _ = b.m.Attach(ctx)
				case 4:
					said += " fail"
					err := []error{nil, errors.New("broken")}[r.IntN(2)]
					b.set(func(s *script) { s.openErr = err })
				case 5:
					said += " die"
					err := []error{nil, errors.New("dead")}[r.IntN(2)]
					b.set(func(s *script) { s.pollErr = err })
				case 6:
					said += " refuse"
					err := []error{nil, errors.New("refused")}[r.IntN(2)]
					b.set(func(s *script) { s.detachErr = err })
				case 7:
					said += " hang"
					if release(); r.IntN(2) == 0 {
						hang = make(chan struct{})
						b.set(func(s *script) { s.hang, s.detachHang = hang, hang })
					}
				case 8:
					said += " reload"
					b.source.Store(&Source{Open: b.Open, Attach: b.Attach, StallAfter: 3 * time.Second})
				case 9:
					said += " config"
					c := health.DefaultConfig()
					b.config.Store(&c)
				}
				cancel()
				check()
				pass(time.Duration(r.IntN(20)) * time.Second)
				check()
			}
			release()
			b.set(func(s *script) { s.openErr, s.pollErr, s.detachErr = nil, nil, nil })
			synctest.Wait()
			if _, err := b.m.Attach(t.Context()); err != nil {
				t.Errorf("seed %d,%s: %v", seed, said, err)
			}
			pass(2 * time.Minute)
			if v := b.out.Load().Devices[0].Verdict; b.shown().Status != health.SourceUp || v.State != health.Healthy {
				t.Errorf("seed %d,%s: source %+v, %+v", seed, said, b.shown(), v)
			}
		})
	}
}
