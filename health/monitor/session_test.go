package monitor

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

func TestMonitorPollsAndWakes(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		if s := h.out.Load(); s.Source.Status != health.SourceUp || len(s.Devices) != 1 || !s.Polled() {
			t.Fatalf("after the first poll: %+v", s)
		}
		advance(10*time.Second + time.Millisecond)
		if n := h.count(&h.polls); n != 11 {
			t.Fatalf("%d polls in 10 s, want 11", n)
		}
		h.wake <- struct{}{}
		synctest.Wait()
		if h.count(&h.polls) != 12 {
			t.Fatal("no poll after a wake")
		}
		h.stop()
		if h.opens != 1 || h.closes != 1 {
			t.Fatalf("%d opens, %d closes", h.opens, h.closes)
		}
	})
}

func TestMonitorReopensWithBackoff(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.set(func(s *fakeSource) {
			s.pollErr, s.openErr = errors.New("connection lost"), errors.New("connection refused")
		})
		advance(1500 * time.Millisecond) // a poll fails, the pause of 1 s begins
		if s := h.status(); s.Status != health.SourceDown || s.Err != "connection lost" || h.verdict().State != health.Healthy {
			t.Fatalf("source %+v, verdict %+v", s, h.verdict())
		}
		advance(10 * time.Minute)
		// Pauses of up to 1, 2, 4, 8, 16, 30, 30…: at least 20 in ten minutes, at most twice as many.
		if n := h.count(&h.opens); n < 20 || n > 45 {
			t.Fatalf("%d attempts in ten minutes", n)
		}
		if n := h.logs.FilterMessage("source down").Len(); n != 2 {
			t.Fatalf("logged %d times, want once for each of two causes", n)
		}
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = nil, nil })
		advance(31 * time.Second)
		if s := h.status(); s.Status != health.SourceUp || s.Err != "" || s.Reconnects != 1 {
			t.Fatalf("source %+v", s)
		}
	})
}

// Sessions that die early keep the long pauses; sessions that lasted are reopened quickly.
func TestMonitorResetsBackoffAfterSteadySession(t *testing.T) {
	for name, c := range map[string]struct {
		polls, least, most int
		within             time.Duration
	}{
		"dies after a reading": {1, 20, 45, 10 * time.Minute}, // like a source that cannot be opened
		"dies after a minute":  {60, 58, 62, time.Hour},       // with pauses of up to a second
	} {
		t.Run(name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				h.set(func(s *fakeSource) { s.dieAfter = c.polls })
				advance(c.within)
				if n := h.count(&h.opens); n < c.least || n > c.most {
					t.Errorf("%d opens in %v, want %d to %d", n, c.within, c.least, c.most)
				}
			})
		})
	}
}

func TestMonitorStalls(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		resume := h.hangPolls()
		before := h.out.Load()
		advance(9 * time.Second)
		if s := h.status(); s.Status != health.SourceUp {
			t.Fatalf("source %+v too early", s)
		}
		advance(time.Hour)
		h.wantCauses(t, "while a poll hangs", health.SourceStalled, "")
		if s := h.out.Load(); s.At.Before(before.At) {
			t.Fatalf("snapshot %+v", s)
		}
		if most, opens := h.count(&h.mostCalls), h.count(&h.opens); most != 1 || opens != 1 {
			t.Fatalf("%d calls at once, %d opens", most, opens)
		}
		resume()
		synctest.Wait()
		if s := h.status(); s.Status != health.SourceUp || s.Reconnects != 0 {
			t.Fatalf("source %+v", s)
		}
	})
}

func TestRunEndsWhilePollHangs(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		defer h.hangPolls()() // the bubble ends only with all its goroutines
		advance(2 * time.Second)
		begin := time.Now()
		h.stop()
		if took := time.Since(begin); took > 3*time.Second {
			t.Fatalf("Run took %v to end", took)
		}
		if n := h.count(&h.closes); n != 0 {
			t.Fatalf("closed %d times beside the call that hangs", n)
		}
	})
}

func TestMonitorFollowsConfig(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Present(healthtest.Value(health.FieldGPUTemp, 80)))
		advance(1500 * time.Millisecond)
		h.wantCauses(t, "below the default limit", health.SourceUp, "")
		h.configure(func(c *judge.Config) { c.Temperature = 75 })
		synctest.Wait()
		h.wantCauses(t, "above the new limit", health.SourceUp, health.CauseTemperature)
	})
}

func TestCordonWhileStalled(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		defer h.hangPolls()()
		advance(time.Minute)
		h.cordon("0", "5", "GPU-x")
		synctest.Wait()
		h.wantCauses(t, "cordoned", health.SourceStalled, health.CauseCordoned)
		cordoned := h.verdict()
		var unmatched []any
		for _, e := range h.logs.All() {
			if e.ContextMap()["key"] == "health.cordon" {
				unmatched = append(unmatched, e.ContextMap()["entries"].([]any)...)
			}
		}
		if !slices.Equal(unmatched, []any{"5", "GPU-x"}) {
			t.Errorf("logged as unmatched: %v", unmatched)
		}
		h.cordon("GPU-0") // another name of the same GPU
		synctest.Wait()
		if f := h.verdict().Findings; len(f) != 1 || !strings.Contains(f[0].Reason, "GPU-0") || !f[0].Since.Equal(cordoned.Since) {
			t.Fatalf("%+v", f)
		}
		h.cordon()
		synctest.Wait()
		h.wantCauses(t, "cordon removed", health.SourceStalled, "")
	})
}

// Each poll checks again whether a pod holds the device.
func TestMonitorIsolatesWhenPodEnds(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Present(healthtest.Value(health.FieldRemapPending, 1)))
		h.configure(func(c *judge.Config) { c.IsolatePending = true })
		advance(time.Minute)
		h.wantCauses(t, "held", health.SourceUp, health.CauseRemapPending)
		h.held.Store(false)
		advance(3 * time.Second / 2)
		h.wantCauses(t, "not held", health.SourceUp, "isolated,row-remap-pending")
	})
}

// A session that another replaces is polled once more, so that its latest XIDs count. The end of the process does not poll.
func TestFinalPoll(t *testing.T) {
	for _, end := range []string{"another source", "detach", "the end of Run"} {
		t.Run(end, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				advance(500 * time.Millisecond)
				polls := h.count(&h.polls)
				h.reportXID(48)
				switch end {
				case "another source":
					next := newFakeSource()
					h.source.Store(next.source(health.SourceID{Inventory: "dcgm y"}))
					synctest.Wait()
				case "detach":
					h.detach(t, time.Minute)
				default:
					h.stop()
				}
				want := 1
				if end == "the end of Run" {
					want = 0
				}
				if n := h.count(&h.polls) - polls; n != want || h.verdict().Has("xid-48") != (want == 1) {
					t.Errorf("%d polls, causes %s", n, h.causes())
				}
			})
		})
	}
}

func TestPollDuration(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		resume := h.hangPolls()
		advance(1300 * time.Millisecond) // the poll begins after a second
		resume()
		synctest.Wait()
		if got := h.status().PollTook; got != 300*time.Millisecond {
			t.Errorf("the poll took %v", got)
		}
	})
}

// Run waits for a source and a configuration, and ends while there is none.
func TestRunWithoutSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out health.Latest[health.Snapshot]
		m := New(new(health.Latest[judge.Config]), new(health.Latest[Source]), &out, zap.NewNop())
		stop := healthtest.Run(t, m.Run)
		advance(time.Hour)
		stop()
		if s := out.Load(); s != nil && s.Source.Status != health.SourceStarting {
			t.Errorf("%+v", s)
		}
	})
}

// A new source is starting, although the earlier one was up, until it has given a reading.
func TestStatusOfNewSource(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		advance(2 * time.Second)
		open := make(chan struct{})
		src := *h.source.Load()
		src.Inventory = "another"
		src.Open = func(ctx context.Context) (health.Session, error) {
			<-open
			return h.Open(ctx)
		}
		was := h.out.Load().Source.Status
		h.source.Store(&src)
		synctest.Wait()
		starting := h.out.Load().Source.Status
		close(open)
		advance(2 * time.Second)
		if now := h.out.Load().Source.Status; was != health.SourceUp || starting != health.SourceStarting || now != health.SourceUp {
			t.Errorf("was %v, then %v, then %v; want up, starting, up", was, starting, now)
		}
	})
}
