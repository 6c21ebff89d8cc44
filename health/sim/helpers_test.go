package sim

import (
	"cmp"
	"context"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// ev reads an event as a person writes it; at is for scenarios.
func ev(t testing.TB, at time.Duration, s string) Event {
	t.Helper()
	e, err := ParseEvent(s)
	if err != nil {
		t.Fatalf("ParseEvent(%s): %v", s, err)
	}
	e.At = at
	return e
}

func newSource(t testing.TB, cfg Config) *Source {
	t.Helper()
	s, err := New(cfg, zaptest.NewLogger(t, zaptest.Level(zapcore.WarnLevel)))
	if err != nil {
		t.Fatalf("New: %v", err)
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

func poll(t testing.TB, ses health.Session) *health.Reading {
	t.Helper()
	r, err := ses.Poll(context.Background())
	if err != nil {
		t.Fatalf("Poll: %v", err)
	}
	return r
}

// sampleOf returns the sample of a whole GPU.
func sampleOf(t testing.TB, r *health.Reading, gpu int) health.Sample {
	t.Helper()
	for i, d := range r.Devices {
		if d.Kind == health.KindGPU && d.Index == gpu {
			return r.Samples[i]
		}
	}
	t.Fatalf("no GPU %d in the reading", gpu)
	panic("unreachable")
}

// woken reports whether a wake waits to be noticed, and notices it.
func woken(ses health.Session) bool {
	select {
	case <-ses.Wake():
		return true
	default:
		return false
	}
}

// pass lets time pass in a bubble of synctest, and all that happens in it happen.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// profileConfig is the named machine without events.
func profileConfig(name string) Config {
	cfg := DefaultConfig()
	cfg.Profile = name
	return cfg
}

func sortedFields(v map[health.Field]float64) []health.Field {
	out := make([]health.Field, 0, len(v))
	for f := range v {
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b health.Field) int { return cmp.Compare(a, b) })
	return out
}

// listing is the names in a directory.
func listing(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
