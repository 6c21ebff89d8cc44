package monitor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// In any sequence of requests, failures, hangs and reloads: while detached no session is open and no event source runs, no GPU
// is offered before a reading after the detach, one call and one event source run at a time, no fault is invented, and attach
// ends the detach.
func TestDetachInAnyOrder(t *testing.T) {
	for seed := range uint64(60) {
		runTest(t, func(t *testing.T, h *harness) {
			p := &detachPlay{
				harness: h, r: rand.New(rand.NewPCG(seed, 5)), f: new(fakeEvents), resumeEvents: func() {}, resumeCalls: func() {},
				steps: fmt.Sprintf("seed %d,", seed), pollsAtDetach: -1,
			}
			p.reload()
			advance(5 * time.Second)
			for range 40 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(p.r.IntN(10))*time.Second)
				p.step(ctx, t)
				cancel()
				p.check(t)
				advance(time.Duration(p.r.IntN(20)) * time.Second)
				p.check(t)
			}
			p.checkAttach(t)
		})
	}
}

// detachPlay plays a random sequence.
type detachPlay struct {
	*harness
	r                         *rand.Rand
	f                         *fakeEvents
	resumeCalls, resumeEvents func() // ends what hangs
	steps                     string // the seed and the steps so far
	pollsAtDetach             int    // the number of polls when the driver was last seen detached
}

func (p *detachPlay) reload() {
	src := p.withEvents(p.f)
	src.Attach, src.StallAfter = p.Attach, 3*time.Second
	p.source.Store(src)
}

// step plays one step; ctx limits requests.
func (p *detachPlay) step(ctx context.Context, t *testing.T) {
	t.Helper()
	maybe := func(text string) error { return []error{nil, errors.New(text)}[p.r.IntN(2)] }
	step := p.r.IntN(11)
	p.steps += []string{
		" detach", " detach", " attach", " attach", " open", " poll", " refuse", " hang", " reload", " config", " events",
	}[step]
	switch step {
	case 0, 1:
		p.detach(ctx, t)
	case 2, 3:
		_, _ = p.m.Attach(ctx)
	case 4:
		err := maybe("broken")
		p.set(func(s *fakeSource) { s.openErr = err })
	case 5:
		err := maybe("dead")
		p.set(func(s *fakeSource) { s.pollErr = err })
	case 6:
		err := maybe("refused")
		p.set(func(s *fakeSource) { s.detachErr = err })
	case 7:
		p.resumeCalls()
		if p.resumeCalls = func() {}; p.r.IntN(2) == 0 {
			p.hangCalls()
		}
	case 8:
		p.reload()
	case 9:
		p.configure(func(*judge.Config) {})
	case 10:
		p.resumeEvents()
		if p.resumeEvents = func() {}; p.r.IntN(2) == 0 {
			p.resumeEvents = p.f.hangEnd()
		}
	}
}

// detach withholds the GPU, and then detaches the driver or not.
func (p *detachPlay) detach(ctx context.Context, t *testing.T) {
	t.Helper()
	limit := time.Duration(1+p.r.IntN(60)) * time.Second
	w, err := p.m.Withhold(limit)
	if err != nil {
		return
	}
	p.check(t)
	advance(time.Duration(p.r.IntN(3)) * time.Second)
	if p.r.IntN(3) > 0 {
		_, _ = p.m.Detach(ctx, limit)
	}
	w.End()
}

func (p *detachPlay) hangCalls() {
	hang := make(chan struct{})
	p.set(func(s *fakeSource) { s.hang, s.detachHang = hang, hang })
	p.resumeCalls = func() {
		p.set(func(s *fakeSource) { s.hang, s.detachHang = nil, nil })
		close(hang)
	}
}

// check checks what holds after each step.
func (p *detachPlay) check(t *testing.T) {
	t.Helper()
	synctest.Wait()
	s := p.out.Load()
	v := s.Devices[0].Verdict
	open, polls := p.count(&p.openSessions), p.count(&p.polls)
	if s.Source.Status == health.SourceDetached {
		if n := p.f.get(&p.f.running) + p.f.get(&p.f.besidesRunning); n != 0 {
			t.Errorf("%s: detached while %d companions run", p.steps, n)
		}
		if open != 0 || p.count(&p.calls) != 0 || v.State != health.Unhealthy {
			t.Errorf("%s: detached with %d open sessions, GPU %+v", p.steps, open, v)
		}
		p.pollsAtDetach = polls
	}
	if polls == p.pollsAtDetach && !v.Has(health.CauseReleased) {
		t.Errorf("%s: offered before a reading: %+v", p.steps, v)
	}
	if len(s.Devices) != 1 || len(v.Findings) > 1 || len(v.Findings) == 1 && v.Cause() != health.CauseReleased ||
		len(s.Devices[0].Memory.Trips) > 0 {
		t.Errorf("%s: %+v", p.steps, s.Devices)
	}
	if n := p.f.get(&p.f.mostRunning); n > 1 {
		t.Errorf("%s: %d event sources run at once", p.steps, n)
	}
	if n := p.count(&p.mostCalls); n > 1 || open > 1 {
		t.Errorf("%s: %d calls at once, %d open sessions", p.steps, n, open)
	}
}

// checkAttach checks that attach ends the detach once nothing fails or hangs.
func (p *detachPlay) checkAttach(t *testing.T) {
	t.Helper()
	p.resumeCalls()
	p.resumeEvents()
	p.set(func(s *fakeSource) { s.openErr, s.pollErr, s.detachErr = nil, nil, nil })
	synctest.Wait()
	if _, err := p.m.Attach(t.Context()); err != nil {
		t.Errorf("%s: %v", p.steps, err)
	}
	advance(2 * time.Minute)
	if p.status().Status != health.SourceUp || p.verdict().State != health.Healthy {
		t.Errorf("%s: source %+v, %+v", p.steps, p.status(), p.verdict())
	}
	if p.f.get(&p.f.running) != 1 || p.f.get(&p.f.besidesRunning) != 1 {
		t.Errorf("%s: %d event sources and %d other functions run", p.steps, p.f.running, p.f.besidesRunning)
	}
}
