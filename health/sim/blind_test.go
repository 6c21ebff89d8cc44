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
