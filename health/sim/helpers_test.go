package sim

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// event parses an event; at is its time in a scenario.
func event(t testing.TB, at time.Duration, s string) Event {
	t.Helper()
	e, err := ParseEvent(s)
	if err != nil {
		t.Fatalf("ParseEvent(%s): %v", s, err)
	}
	e.At = at
	return e
}

// inject applies events of the control socket.
func inject(t testing.TB, s *Source, events ...string) {
	t.Helper()
	for _, text := range events {
		if err := s.inject(event(t, 0, text)); err != nil {
			t.Fatalf("inject(%s): %v", text, err)
		}
	}
}

// newSource returns a new source. Without a control socket it runs until the test ends.
func newSource(t testing.TB, cfg Config) *Source {
	t.Helper()
	s, err := New(cfg, zaptest.NewLogger(t, zaptest.Level(zapcore.WarnLevel)))
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	if cfg.Control == "" {
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { _ = s.Run(ctx) })
		t.Cleanup(func() { cancel(); running.Wait() })
	}
	return s
}

func open(t testing.TB, s *Source) health.Session {
	t.Helper()
	ses, err := s.Open(context.Background())
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() { _ = ses.Close() })
	return ses
}

// openSource returns a new source and a session.
func openSource(t testing.TB, cfg Config) (*Source, health.Session) {
	t.Helper()
	src := newSource(t, cfg)
	return src, open(t, src)
}

func poll(t testing.TB, ses health.Session) *health.Reading {
	t.Helper()
	r, err := ses.Poll(context.Background())
	if err != nil {
		t.Fatalf("Poll: %v", err)
	}
	return r
}

// gpuSample returns the sample of a GPU.
func gpuSample(t testing.TB, r *health.Reading, gpu int) health.Sample {
	t.Helper()
	for i, d := range r.Devices {
		if d.Kind == health.KindGPU && d.Index == gpu {
			return r.Samples[i]
		}
	}
	t.Fatalf("no GPU %d in the reading", gpu)
	panic("unreachable")
}

// woken reports whether Wake has fired, and resets it.
func woken(ses health.Session) bool {
	select {
	case <-ses.Wake():
		return true
	default:
		return false
	}
}

// sleep advances the time of a synctest bubble and waits until its goroutines are idle.
func sleep(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// profileConfig is a profile without events.
func profileConfig(name string) Config {
	cfg := DefaultConfig()
	cfg.Profile = name
	return cfg
}

// scenarioConfig is a profile with a scenario.
func scenarioConfig(profile string, loop time.Duration, events ...Event) Config {
	cfg := profileConfig(profile)
	cfg.Loop, cfg.Scenario = loop, events
	return cfg
}

// simulate runs test with a new source and a session, in a synctest bubble.
func simulate(t *testing.T, cfg Config, test func(t *testing.T, src *Source, ses health.Session)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, cfg)
		test(t, src, open(t, src))
	})
}

func expectPollFails(t *testing.T, ses health.Session, want error) {
	t.Helper()
	if r, err := ses.Poll(t.Context()); !errors.Is(err, want) || r != nil {
		t.Errorf("Poll returned %v, %v; want %v", r, err, want)
	}
}

func expectOpenFails(t *testing.T, src *Source, want error) {
	t.Helper()
	if ses, err := src.Open(t.Context()); !errors.Is(err, want) || ses != nil {
		t.Errorf("Open returned %v, %v; want %v", ses, err, want)
	}
}

func expectPresence(t *testing.T, ses health.Session, gpu int, want health.Presence) {
	t.Helper()
	if s := gpuSample(t, poll(t, ses), gpu); s.Presence != want {
		t.Errorf("GPU %d is %v, want %v", gpu, s.Presence, want)
	}
}
