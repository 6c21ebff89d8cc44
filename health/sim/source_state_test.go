package sim

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// TestSourceBlind: what it does not tell, it tells when it sees again. A session bears it for as long as one of DCGM,
// and no other is to be had until then.
func TestSourceBlind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, DefaultConfig())
		ses := open(t, src)
		turn := func(texts ...string) {
			t.Helper()
			for _, text := range texts {
				if err := src.inject(ev(t, 0, text)); err != nil {
					t.Fatal(err)
				}
			}
		}
		blind := func() {
			t.Helper()
			for _, s := range poll(t, ses).Samples {
				if s.Presence != health.PresenceUnknown || len(s.Values) != 0 || len(s.XIDs) != 0 || s.Checked {
					t.Errorf("blind: %+v", s)
				}
			}
		}
		turn(`{source: blind}`, `{gpu: 1, xid: 48, lost: true}`)
		blind()
		pass(blindAfter - time.Nanosecond)
		blind()
		turn(`{source: up}`)
		if s := sampleOf(t, poll(t, ses), 1); s.Presence != health.Lost || len(s.XIDs) != 1 {
			t.Errorf("it sees again: %+v", s)
		}

		turn(`{source: blind}`)
		pass(time.Minute) // nobody asks, and nobody knows
		blind()
		pass(blindAfter)
		if r, err := ses.Poll(t.Context()); !errors.Is(err, errBlind) || r != nil {
			t.Errorf("Poll gave %v, %v; want %v", r, err, errBlind)
		}
		if again, err := src.Open(t.Context()); !errors.Is(err, errBlind) || again != nil {
			t.Errorf("Open gave %v, %v; want %v", again, err, errBlind)
		}
		turn(`{gpu: 1, xid: 31}`, `{source: up}`)
		if _, err := ses.Poll(t.Context()); !errors.Is(err, errBlind) {
			t.Errorf("the old session's Poll: %v; want %v", err, errBlind)
		}
		ses = open(t, src)
		if s := sampleOf(t, poll(t, ses), 1); s.Presence != health.Lost || len(s.XIDs) != 1 || s.XIDs[0].Code != 31 {
			t.Errorf("another session sees again: %+v", s)
		}
	})
}

// TestSourceEmpty: an engine without a driver lists no GPU, and that is no error. It reads no XIDs either; those that
// were reported before wait.
func TestSourceEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, profileConfig("h100-8-mig"))
		ses := open(t, src)
		inject := func(texts ...string) {
			t.Helper()
			for _, text := range texts {
				if err := src.inject(ev(t, 0, text)); err != nil {
					t.Fatal(err)
				}
			}
		}
		before := poll(t, ses)
		inject(`{gpu: 3, xid: 95, source: empty}`, `{gpu: 4, xid: 79, lost: true}`)
		for _, s := range []health.Session{ses, open(t, src)} {
			if !woken(ses) && s == ses {
				t.Error("the change wakes nobody")
			}
			r := poll(t, s)
			if len(r.Devices) != 0 || len(r.Samples) != 0 || r.Versions.Driver != "" {
				t.Errorf("empty: %+v", r)
			}
			pass(time.Hour) // unlike a blind one, it stays of use
		}
		inject(`{source: up}`)
		r := poll(t, ses)
		if len(r.Devices) != len(before.Devices) {
			t.Errorf("%d devices; want %d", len(r.Devices), len(before.Devices))
		}
		if s := sampleOf(t, r, 3); len(s.XIDs) != 1 || s.XIDs[0].Code != 95 {
			t.Errorf("XID 95 was reported before: %+v", s)
		}
		if s := sampleOf(t, r, 4); s.Presence != health.Lost || len(s.XIDs) != 0 {
			t.Errorf("XID 79 was reported to nobody: %+v", s)
		}
		inject(`{gpu: 4, lost: false}`)
		if s := sampleOf(t, poll(t, ses), 4); len(s.Incidents) != 0 || s.Values[health.FieldXID] != 0 {
			t.Errorf("XID 79 was reported to nobody: %+v", s)
		}
	})
}

// TestStale: one GPU is not measured, with its MIG devices, while the others are. Its XIDs come all the same.
func TestStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := profileConfig("h100-8-mig")
		cfg.Scenario = []Event{ev(t, 0, `{gpu: 6, stale: true, xid: 48, temperature: 97}`), ev(t, 10*time.Second, `{gpu: 6, stale: false}`)}
		ses := open(t, newSource(t, cfg))
		for _, stale := range []bool{true, false} {
			r := poll(t, ses)
			devices := 0
			for i, d := range r.Devices {
				s := r.Samples[i]
				if s.Presence != health.Present || s.Stale != (stale && d.Index == 6) || s.Stale == (len(s.Values) > 0) ||
					s.Checked != (!s.Stale && d.Kind == health.KindGPU) || s.Stale && len(s.Incidents) > 0 {
					t.Errorf("stale is %t: %s of GPU %d: %+v", stale, d.ID, d.Index, s)
				}
				if s.Stale {
					devices++
				}
			}
			if stale != (devices == 5) {
				t.Errorf("%d devices are stale; want the GPU and its 4 parts: %t", devices, stale)
			}
			if s := sampleOf(t, r, 6); stale != (len(s.XIDs) == 1) {
				t.Errorf("stale is %t: XIDs %v", stale, s.XIDs)
			}
			pass(10 * time.Second)
		}
	})
}

// TestStaleOfAllIsBlind: if no GPU that is on the bus is measured, no GPU is to blame.
func TestStaleOfAllIsBlind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, profileConfig("l4-1"))
		ses := open(t, src)
		if err := src.inject(ev(t, 0, `{gpu: 0, stale: true}`)); err != nil {
			t.Fatal(err)
		}
		if s := sampleOf(t, poll(t, ses), 0); s.Stale || s.Presence != health.PresenceUnknown {
			t.Errorf("%+v; want a source that tells nothing", s)
		}
		pass(blindAfter)
		if _, err := ses.Poll(t.Context()); !errors.Is(err, errBlind) {
			t.Errorf("Poll: %v; want %v", err, errBlind)
		}
		if err := src.inject(ev(t, 0, `{gpu: 0, lost: true}`)); err != nil {
			t.Fatal(err)
		}
		if s := sampleOf(t, poll(t, open(t, src)), 0); s.Presence != health.Lost || s.Stale {
			t.Errorf("%+v; want lost", s)
		}
	})
}
