package monitor

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// reportAction sets the recovery action of GPU-0 in later readings.
func (h *harness) reportAction(a health.RecoveryAction) {
	h.reportGPU0(healthtest.Present(healthtest.Value(health.FieldRecoveryAction, float64(a))))
}

// reportNoAction lets later readings lack the field of the recovery action.
func (h *harness) reportNoAction() {
	s := healthtest.Present()
	delete(s.Values, health.FieldRecoveryAction)
	h.reportGPU0(s)
}

// failPolls makes the source fail until the function that it returns is called.
func (s *fakeSource) failPolls() (restore func()) {
	set := func(err error) func() {
		return func() { s.set(func(s *fakeSource) { s.pollErr, s.openErr = err, err }) }
	}
	set(errors.New("no engine"))()
	return set(nil)
}

// Without a source that measures it, a GPU that needs a reset is unhealthy within two seconds. It is cured when the source shows the reset.
func TestRecoveryActionWithoutSource(t *testing.T) {
	stalled := func(h *harness) func() { return h.hangPolls() }
	down := func(h *harness) func() { return h.failPolls() }
	for name, c := range map[string]struct {
		since time.Duration // how long before the events
		away  func(h *harness) (back func())
	}{
		"down":               {time.Minute, down},
		"stalled":            {time.Minute, stalled},
		"dies with the XID":  {0, down},
		"hangs with the XID": {0, stalled},
		"lists no GPU":       {0, func(h *harness) func() { h.report(); return func() {} }},
		"is blind":           {0, func(h *harness) func() { h.reportGPU0(healthtest.Blank(health.Present)); return func() {} }},
	} {
		for order, events := range map[string]func(f *fakeEvents){
			"XID first": func(f *fakeEvents) { f.xid(149); f.xid(xidRecoveryAction); f.action(health.RecoveryReset) },
			"XID last":  func(f *fakeEvents) { f.action(health.RecoveryReset); f.xid(xidRecoveryAction); f.xid(149) },
			"a storm": func(f *fakeEvents) {
				for i := range 1000 {
					if f.xid(149); i == 0 {
						f.action(health.RecoveryReset)
					}
					advance(time.Millisecond)
				}
			},
		} {
			t.Run(name+", "+order, func(t *testing.T) {
				runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
					h.reportAction(health.RecoveryNone)
					advance(time.Minute)
					back := c.away(h)
					advance(c.since)
					began := time.Now()
					events(f)
					advance(2*time.Second - time.Since(began))
					if v := h.verdict(); v.State != health.Unhealthy || h.causes() != "xid-149,recovery-action" {
						t.Fatalf("%v by %s", v.State, h.causes())
					}
					f.action(health.RecoveryNone)
					advance(5 * time.Second)
					if h.causes() != "xid-149,recovery-action" {
						t.Fatalf("%s without the source", h.causes())
					}
					h.reportAction(health.RecoveryNone)
					h.set(func(s *fakeSource) { s.xids = []health.XID{{Code: 149, At: began}} })
					back()
					advance(maxBackoff + 5*time.Second)
					h.wantCauses(t, "reset", health.SourceUp, "")
				})
			})
		}
	}
}

// After a restart the saved devices are known, although the source is away.
func TestRecoveryActionAfterRestart(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Present(healthtest.XIDs(63)))
		advance(5 * time.Second)
		next := h.restart(t, "boot", time.Second)
		f := new(fakeEvents)
		next.source.Store(next.withEvents(f))
		defer next.hangPolls()()
		next.start(t)
		f.action(health.RecoveryReboot)
		advance(maxPause)
		next.wantCauses(t, "before the first poll", health.SourceStarting, "recovery-action,xid-63")
		again := next.restart(t, "boot", time.Second)
		again.reportAction(health.RecoveryReboot)
		again.start(t)
		defer again.stop()
		advance(2 * time.Second)
		again.wantCauses(t, "restarted again", health.SourceUp, "recovery-action,xid-63")
	})
}

// A source that measures shows the recovery action itself. A value from before the event does not.
func TestRecoveryActionOfSource(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		h.reportAction(health.RecoveryNone)
		advance(time.Minute)
		f.action(health.RecoveryReboot)
		advance(time.Second)
		h.wantCauses(t, "before the source has measured", health.SourceUp, "")
		h.reportAction(health.RecoveryReboot)
		advance(time.Second)
		h.wantCauses(t, "measured", health.SourceUp, "recovery-action")
		f.xid(95)
		advance(time.Minute)
		h.reportAction(health.RecoveryNone)
		f.action(health.RecoveryNone)
		advance(time.Minute)
		h.wantCauses(t, "withdrawn", health.SourceUp, "")
		if n := f.get(&f.reads); n != 0 {
			t.Errorf("read %d times from the driver", n)
		}
	})
}

// A source that comes back may have values from before the event. They end nothing.
func TestRecoveryActionOlderValue(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		h.reportAction(health.RecoveryNone)
		advance(time.Minute)
		resume := h.hangPolls()
		advance(time.Minute)
		f.action(health.RecoveryReboot)
		advance(10 * time.Second)
		resume()
		for range 20 {
			advance(100 * time.Millisecond)
			h.wantCauses(t, "older value", health.SourceUp, "recovery-action")
		}
		h.reportAction(health.RecoveryReboot)
		advance(time.Minute)
		h.wantCauses(t, "newer value", health.SourceUp, "recovery-action")
		h.reportAction(health.RecoveryNone)
		advance(time.Minute)
		h.wantCauses(t, "withdrawn", health.SourceUp, "")
	})
}

// An engine that lacks the field leaves it to the driver, which also ends the finding: while the engine is up, or when it is back. That
// proves no reset.
func TestRecoveryActionOfSourceWithoutField(t *testing.T) {
	for name, c := range map[string]struct{ awayAtFirst, awayAtEnd bool }{
		"up": {false, false}, "away at first": {true, false}, "away at the end": {false, true}, "away": {true, true},
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				h.reportNoAction()
				advance(time.Minute)
				change := func(away bool, a health.RecoveryAction, causes string) {
					t.Helper()
					back := func() {}
					if away {
						back = h.failPolls()
						advance(time.Minute)
					}
					f.action(a)
					advance(2 * time.Second)
					if away && a == health.RecoveryNone {
						h.wantCauses(t, "away", health.SourceDown, "xid-95,recovery-action")
					}
					back()
					advance(maxBackoff + 2*time.Second)
					h.wantCauses(t, "up", health.SourceUp, causes)
				}
				f.xid(95)
				change(c.awayAtFirst, health.RecoveryReset, "xid-95,recovery-action")
				change(c.awayAtEnd, health.RecoveryNone, "xid-95")
			})
		})
	}
}

// A value counts only if neither an event nor an XID of the GPU arrived while it was read. It is read again then. XID 154 only reports the
// event itself.
func TestRecoveryActionReadAgain(t *testing.T) {
	for name, c := range map[string]struct {
		during func(f *fakeEvents)
		reads  int
	}{
		"nothing":       {func(f *fakeEvents) { f.set(func(f *fakeEvents) { f.driver = health.RecoveryDrainP2P }) }, 1},
		"XID 154":       {func(f *fakeEvents) { f.xid(xidRecoveryAction) }, 1},
		"an XID":        {func(f *fakeEvents) { f.set(func(f *fakeEvents) { f.driver = health.RecoveryReboot }); f.xid(95) }, 2},
		"another event": {func(f *fakeEvents) { f.action(health.RecoveryReboot) }, 2},
		"two events":    {func(f *fakeEvents) { f.action(health.RecoveryNone); f.action(health.RecoveryReboot) }, 2},
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				defer h.failPolls()()
				advance(time.Minute)
				resume := f.hangReads()
				f.action(health.RecoveryReset)
				advance(time.Minute)
				c.during(f)
				advance(time.Minute)
				h.wantNoAction(t)
				resume()
				advance(maxPause)
				want := health.ActionRebootNode
				if c.reads == 1 {
					want = health.ActionResetGPU
				}
				i := 0
				for fs := h.verdict().Findings; i < len(fs) && fs[i].Cause != health.CauseRecoveryAction; i++ {
				}
				if fs := h.verdict().Findings; i == len(fs) || fs[i].Action != want || f.get(&f.reads) != c.reads {
					t.Errorf("%d reads, findings %+v", f.get(&f.reads), fs)
				}
			})
		})
	}
}

func (h *harness) wantNoAction(t *testing.T) {
	t.Helper()
	if h.verdict().Has(health.CauseRecoveryAction) {
		t.Fatalf("causes %s", h.causes())
	}
}

// An XID after the action asks for the action again, so that a later reset cures it.
func TestRecoveryActionAfterLaterXID(t *testing.T) {
	for name, withdrawn := range map[string]bool{"before the reset": false, "after the reset": true} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				h.reportAction(health.RecoveryNone)
				advance(time.Minute)
				resume := h.hangPolls()
				advance(time.Minute)
				f.xid(95)
				f.action(health.RecoveryReset)
				advance(time.Minute)
				if withdrawn {
					f.action(health.RecoveryNone)
				}
				f.xid(95)
				advance(time.Second)
				f.action(health.RecoveryNone)
				advance(time.Minute)
				h.set(func(s *fakeSource) {
					s.xids = []health.XID{{Code: 95, At: time.Now().Add(-2 * time.Minute)}, {Code: 95, At: time.Now()}}
				})
				resume()
				advance(time.Minute)
				want := ""
				if withdrawn {
					want = "xid-95"
				}
				h.wantCauses(t, "back", health.SourceUp, want)
			})
		})
	}
}

// A read that hangs delays no other GPU, no poll and no XID. A detach waits for it.
func TestRecoveryActionReadHangs(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		h.report(of(healthtest.GPU0, healthtest.Present()), of(healthtest.GPU1, healthtest.Present()))
		advance(time.Minute)
		back := h.failPolls()
		advance(time.Minute)
		resume := f.hangReads()
		defer resume()
		f.action(health.RecoveryReset)
		f.receive(health.Event{Kind: health.EventRecoveryAction, GPU: "GPU-1", GI: -1, CI: -1})
		f.xid(79)
		advance(maxPause)
		h.wantCauses(t, "hangs", health.SourceDown, "xid-79", "recovery-action")
		back()
		advance(maxBackoff + 10*time.Second) // its first values may be older than the event
		h.wantCauses(t, "source back", health.SourceUp, "xid-79", "")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := h.m.Detach(ctx, time.Hour); err == nil {
			t.Error("detached while the driver is in use")
		}
		resume()
		advance(time.Second)
		if s := h.status(); s.Status != health.SourceDetached {
			t.Errorf("source %+v", s)
		}
	})
}

// A value that was read before the source has measured does not count after that.
func TestRecoveryActionMeasuredDuringRead(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		h.reportAction(health.RecoveryNone)
		back := h.failPolls()
		advance(time.Minute)
		resume := f.hangReads()
		f.action(health.RecoveryReboot)
		advance(time.Minute)
		f.set(func(f *fakeEvents) { f.driver = health.RecoveryNone })
		back()
		advance(maxBackoff)
		resume()
		advance(maxPause)
		h.wantCauses(t, "read late", health.SourceUp, "")
		defer h.failPolls()()
		advance(time.Minute)
		f.action(health.RecoveryReboot)
		advance(maxPause)
		h.wantCauses(t, "read again", health.SourceDown, "recovery-action")
	})
}

// A read of a GPU that the source does not list any more ends, and the GPU is read again when it is back.
func TestRecoveryActionOfRemovedGPU(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		h.failPolls()
		advance(time.Minute)
		resume := f.hangReads()
		f.action(health.RecoveryReboot)
		synctest.Wait()
		other := newSourceOf("GPU-b").source(sourceID("another engine", false))
		h.source.Store(other)
		advance(time.Minute)
		resume()
		if id := h.out.Load().Devices[0].Device.ID; id != "GPU-b" || h.logs.FilterLevelExact(zap.WarnLevel).FilterField(
			zap.String("gpu", "GPU-0")).Len() > 0 {
			t.Errorf("device %s, logs %v", id, h.logs.All())
		}
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = nil, nil })
		h.source.Store(h.withEvents(f))
		advance(time.Minute)
		h.failPolls()
		advance(time.Minute)
		f.action(health.RecoveryReboot)
		advance(maxPause)
		h.wantCauses(t, "back", health.SourceDown, "recovery-action")
	})
}

// A failed read changes nothing, and the next event is read.
func TestRecoveryActionReadFails(t *testing.T) {
	runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
		defer h.failPolls()()
		advance(time.Minute)
		f.set(func(f *fakeEvents) { f.readErr = errors.New("GPU is lost") })
		f.action(health.RecoveryReboot)
		advance(time.Minute)
		h.wantCauses(t, "failed", health.SourceDown, "")
		f.set(func(f *fakeEvents) { f.readErr = nil })
		f.action(health.RecoveryReboot)
		advance(maxPause)
		h.wantCauses(t, "read", health.SourceDown, "recovery-action")
		if n := f.get(&f.reads); n != 2 {
			t.Errorf("%d reads", n)
		}
	})
}

// The end of the process waits for no read.
func TestRunEndsWhileReadHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, f := newHarness(zap.NewNop()), new(fakeEvents)
		h.source.Store(h.withEvents(f))
		h.start(t)
		defer f.hangReads()()
		advance(time.Minute)
		h.failPolls()
		advance(time.Minute)
		f.action(health.RecoveryReset)
		begin := time.Now()
		h.stop()
		if took := time.Since(begin); took > 2*abandonAfter {
			t.Errorf("Run took %v to end", took)
		}
	})
}
