package monitor

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

func TestDetach(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		advance(5 * time.Second)
		var atClose health.Snapshot
		h.set(func(s *fakeSource) { s.onClose = func() { atClose = *h.out.Load() } })
		first := h.detach(t, time.Hour)
		if v := atClose.Devices[0].Verdict; v.State != health.Unhealthy || !v.Has(health.CauseReleased) {
			t.Errorf("verdict when the session was closed: %+v", v)
		}
		if s := h.status(); first.Already || first.EngineUnasked || !first.Until.Equal(first.Since.Add(time.Hour)) ||
			s.Status != health.SourceDetached || !s.Detachment.Until.Equal(first.Until) ||
			!strings.Contains(s.Err, first.Until.UTC().Format(time.RFC3339)) {
			t.Errorf("%+v, source %+v", first, s)
		}
		if v := h.verdict(); v.Cause() != health.CauseReleased || v.State != health.Unhealthy || !v.Decided() {
			t.Errorf("verdict %+v", v)
		}
		polls, opens := h.count(&h.polls), h.count(&h.opens)
		advance(30 * time.Minute)
		if h.count(&h.polls) != polls || h.count(&h.opens) != opens {
			t.Error("the driver was used while detached")
		}

		until := time.Now().Add(2 * time.Hour)
		if again := h.detach(t, 2*time.Hour); !again.Already || !again.Since.Equal(first.Since) || !again.Until.Equal(until) {
			t.Errorf("second detach: %+v", again)
		}
		if s := h.status(); !s.Detachment.Until.Equal(until) || s.Detachment.For != 2*time.Hour ||
			!strings.Contains(s.Err, until.UTC().Format(time.RFC3339)) {
			t.Errorf("source %+v", s)
		}
		h.m.attachAtLimit()       // the first timer, which fired before it was stopped
		advance(45 * time.Minute) // past the first time limit
		if h.status().Status != health.SourceDetached {
			t.Fatal("the second detach did not extend the time limit")
		}
	})
}

func TestAttach(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		advance(5 * time.Second)
		h.detach(t, time.Hour)
		h.detach(t, 2*time.Hour)
		if r := h.attach(t); r.Already || r.Status != health.SourceUp {
			t.Errorf("%+v", r)
		}
		if v := h.verdict(); v.State != health.Healthy || h.trips() > 0 || !h.status().Detachment.Until.IsZero() {
			t.Errorf("%+v, source %+v", v, h.status())
		}
		if r := h.attach(t); !r.Already || r.Status != health.SourceUp || h.count(&h.opens) != 2 {
			t.Errorf("second attach: %+v, %d opens", r, h.count(&h.opens))
		}
		for _, message := range []string{"detach requested", "driver detached", "attaching the driver"} {
			if n := h.logs.FilterMessage(message).Len(); n != 1 {
				t.Errorf("%q was logged %d times", message, n)
			}
		}
	})
}

// After the time limit a source that does not open is an ordinary source that is down. The GPU stays withheld until a reading
// reports it.
func TestDetachReachesTimeLimit(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.detach(t, 10*time.Minute)
		advance(10*time.Minute - time.Second)
		if h.status().Status != health.SourceDetached {
			t.Fatalf("source %+v", h.status())
		}
		h.set(func(s *fakeSource) { s.openErr = errors.New("no driver") })
		advance(2 * time.Second)
		h.wantCauses(t, "after the time limit", health.SourceDown, health.CauseReleased)
		if s := h.status(); s.Err != "no driver" || !s.Detachment.Until.IsZero() {
			t.Errorf("source %+v", s)
		}
		if r := h.attach(t); !r.Already || r.Status != health.SourceDown || r.Err != "no driver" {
			t.Errorf("%+v", r)
		}
		h.set(func(s *fakeSource) { s.openErr = nil })
		advance(time.Minute)
		h.wantCauses(t, "when the source opens", health.SourceUp, "")
	})
}

// A reading without any GPU means that the driver is not back; a reading that lacks one GPU means that it is missing.
func TestAttachBeforeDriverIsBack(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		both := []health.Sample{of(healthtest.GPU0, healthtest.Present()), of(healthtest.GPU1, healthtest.Present())}
		h.report(both...)
		advance(5 * time.Second)
		h.detach(t, time.Hour)
		h.report()
		if r := h.attach(t); r.Status != health.SourceDown || r.Err != ErrNotBack.Error() {
			t.Errorf("%+v", r)
		}
		advance(5 * time.Minute)
		h.wantCauses(t, "without a GPU", health.SourceDown, health.CauseReleased, health.CauseReleased)
		h.report(both[0])
		advance(31 * time.Second)
		h.wantCauses(t, "with one GPU", health.SourceUp, "", health.CauseMissing)
	})
}

// A new source stays closed while the driver is detached, and a cordon takes effect at once.
func TestReloadWhileDetached(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		first := h.detach(t, time.Hour)
		since := h.verdict().Findings[0].Since
		advance(time.Minute)
		h.cordon("0")
		synctest.Wait()
		h.wantCauses(t, "with a cordon", health.SourceDetached, "driver-released,cordoned")
		next := newFakeSource()
		src := next.source(health.SourceID{Kind: "other"})
		src.Attach = next.Attach
		h.source.Store(src)
		advance(time.Minute)
		if s := h.status(); s.Status != health.SourceDetached || s.Kind != "other" || !s.Since.Equal(first.Since) ||
			next.count(&next.opens) != 0 {
			t.Errorf("source %+v, %d opens", s, next.opens)
		}
		if f := h.verdict().Findings[0]; !f.Since.Equal(since) {
			t.Errorf("%+v", f)
		}
		h.attach(t)
		if h.causes() != health.CauseCordoned || next.count(&next.attaches) != 1 {
			t.Errorf("causes %s, %d attaches", h.causes(), next.attaches)
		}
		if h.count(&h.opens) != 1 || h.count(&h.closes) != 1 {
			t.Errorf("old source: %d opens, %d closes", h.opens, h.closes)
		}
	})
}

// A poll or failure from before an attach does not answer it.
func TestAttachWaitsForNewSession(t *testing.T) {
	t.Run("after a poll", func(t *testing.T) {
		runTest(t, func(t *testing.T, h *harness) {
			h.useHostEngine()
			resume := h.hangPolls()
			advance(2 * time.Second)
			before := h.count(&h.attaches)
			attaches := make(chan int, 1)
			go func() {
				h.attach(t)
				attaches <- h.count(&h.attaches) - before
			}()
			synctest.Wait()
			resume()
			if n := <-attaches; n != 1 {
				t.Errorf("the host engine was asked to attach %d times", n)
			}
		})
	})
	t.Run("after a failure", func(t *testing.T) {
		runTest(t, func(t *testing.T, h *harness) {
			h.useHostEngine()
			err := errors.New("no driver")
			h.set(func(s *fakeSource) { s.pollErr, s.openErr = err, err })
			advance(20 * time.Second)
			h.set(func(s *fakeSource) { s.pollErr, s.openErr = nil, nil })
			if r := h.attach(t); r.Status != health.SourceUp || r.Err != "" {
				t.Errorf("%+v", r)
			}
		})
	})
}

func TestAttachWaitsForDevices(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		advance(5 * time.Second)
		h.detach(t, time.Hour)
		h.reportGPU0(healthtest.Blank(health.PresenceUnknown))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if r, err := h.m.Attach(ctx); err == nil || !strings.Contains(err.Error(), "GPU-0") {
			t.Errorf("%+v, %v", r, err)
		}
		time.AfterFunc(10*time.Second, func() { h.reportGPU0(healthtest.Present()) })
		if r := h.attach(t); !r.Already || r.Status != health.SourceUp || h.causes() != "" {
			t.Errorf("%+v, causes %s", r, h.causes())
		}
	})
}

// If a poll hangs, the GPUs return to their state at the time limit, because the driver was never detached.
func TestDetachReachesTimeLimitWhileStalled(t *testing.T) {
	for name, withholds := range map[string]bool{"after a withhold": true, "alone": false} {
		t.Run(name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				defer h.hangPolls()()
				advance(time.Minute)
				var w *Withholding
				if withholds {
					w = h.withhold(t)
				}
				if _, err := h.m.Detach(t.Context(), time.Minute); !errors.Is(err, errDetachCanceled) {
					t.Errorf("%v", err)
				}
				if withholds {
					w.End()
				}
				h.wantCauses(t, "after the time limit", health.SourceStalled, "")
			})
		})
	}
}

// If the host engine detaches only after the time limit, Detach fails and the engine is asked to attach.
func TestEngineDetachesAfterTimeLimit(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.useHostEngine()
		hang := make(chan struct{})
		h.set(func(s *fakeSource) { s.detachHang = hang })
		time.AfterFunc(5*time.Second, func() { close(hang) })
		if r, err := h.m.Detach(t.Context(), 3*time.Second); !errors.Is(err, errDetachCanceled) {
			t.Errorf("%+v, %v", r, err)
		}
		if h.causes() != health.CauseReleased {
			t.Errorf("causes %s", h.causes())
		}
		attaches := h.count(&h.attaches)
		advance(10 * time.Second)
		h.wantCauses(t, "after attach", health.SourceUp, "")
		if n := h.count(&h.attaches) - attaches; n != 1 {
			t.Errorf("the host engine was asked to attach %d times", n)
		}
	})
}

func TestDetachHostEngine(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.useHostEngine()
		attaches, detaches := 0, 0
		wantCalls := func(when string, moreAttaches, moreDetaches int) {
			t.Helper()
			attaches, detaches = attaches+moreAttaches, detaches+moreDetaches
			if a, d := h.count(&h.attaches), h.count(&h.detaches); a != attaches || d != detaches {
				t.Errorf("%s: the host engine was asked %d times to attach and %d times to detach, want %d and %d", when, a, d, attaches, detaches)
			}
		}

		unable, refused := errors.New("too old"), errors.New("refused")
		h.set(func(s *fakeSource) { s.canDetach = unable })
		seq := h.out.Load().Seq
		if _, err := h.m.Detach(t.Context(), time.Hour); !errors.Is(err, unable) || h.out.Load().Seq != seq {
			t.Errorf("unable to detach: %v, %d snapshots", err, h.out.Load().Seq-seq)
		}
		h.attach(t)
		wantCalls("unable to detach", 0, 0)

		h.set(func(s *fakeSource) { s.canDetach, s.detachErr = nil, refused })
		if _, err := h.m.Detach(t.Context(), time.Hour); !errors.Is(err, refused) {
			t.Errorf("refused: %v", err)
		}
		advance(time.Second)
		h.wantCauses(t, "refused", health.SourceUp, "")
		wantCalls("refused", 1, 1) // the engine may have detached in part

		h.set(func(s *fakeSource) { s.detachErr = nil })
		if r := h.detach(t, time.Hour); r.EngineUnasked {
			t.Errorf("%+v", r)
		}
		h.attach(t)
		wantCalls("detached and attached", 1, 1)
		advance(time.Second)

		lost := errors.New("connection lost")
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = lost, lost })
		advance(20 * time.Second)
		wantCalls("connection lost", 0, 0)
		if r := h.detach(t, time.Hour); !r.EngineUnasked {
			t.Errorf("without a connection: %+v", r)
		}
		wantCalls("without a connection", 0, 0)
		if r := h.attach(t); r.Status != health.SourceDown || r.Err != lost.Error() {
			t.Errorf("%+v", r)
		}
	})
}

// If the host engine refuses to attach, the source is used anyway unless a detach is known.
func TestHostEngineRefusesAttach(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.useHostEngine()
		h.set(func(s *fakeSource) { s.attachErr = errors.New("refused") })
		if r := h.attach(t); !r.Already || r.Status != health.SourceUp {
			t.Errorf("without a detach: %+v", r)
		}
		h.detach(t, time.Hour)
		if r := h.attach(t); r.Already || r.Status != health.SourceDown || r.Err != "refused" {
			t.Errorf("after a detach: %+v", r)
		}
	})
}

// Detach waits for a poll that hangs. The caller may stop waiting, and attach cancels the detach.
func TestDetachWhileStalled(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		resume := h.hangPolls()
		advance(time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
		defer cancel()
		if _, err := h.m.Detach(ctx, time.Hour); err == nil || !strings.Contains(err.Error(), h.status().Err) {
			t.Errorf("%v", err)
		}
		h.wantCauses(t, "detaching", health.SourceStalled, health.CauseReleased)
		if n := h.count(&h.closes); n != 0 {
			t.Errorf("closed %d times beside a call that hangs", n)
		}
		if r := h.attach(t); r.Already || r.Status != health.SourceStalled || h.causes() != "" {
			t.Errorf("%+v, causes %s", r, h.causes())
		}
		resume()
		advance(3 * time.Second)
		h.wantCauses(t, "after the poll", health.SourceUp, "")
		if n := h.count(&h.detaches); n != 0 {
			t.Errorf("the host engine was asked to detach %d times", n)
		}
	})
}

// The end of the process does not wait for the driver, and asks the host engine nothing more.
func TestRunEndsDuringDetach(t *testing.T) {
	for name, c := range map[string]struct{ hangsDetach, hangsPoll bool }{
		"detached": {}, "host engine hangs": {hangsDetach: true}, "poll hangs": {hangsPoll: true},
	} {
		t.Run(name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) { h.endDuringDetach(t, c.hangsDetach, c.hangsPoll) })
		})
	}
}

// endDuringDetach ends the monitor when it has detached the driver, or while its call of the host engine or its poll hangs.
func (h *harness) endDuringDetach(t *testing.T, hangsDetach, hangsPoll bool) {
	t.Helper()
	h.useHostEngine()
	hang := make(chan struct{})
	h.set(func(s *fakeSource) {
		if hangsDetach {
			s.detachHang = hang
		}
		if hangsPoll {
			s.hang = hang
		}
	})
	advance(time.Second)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := h.m.Detach(ctx, time.Hour); (err != nil) != (hangsDetach || hangsPoll) {
		t.Errorf("%v", err)
	}
	if hangsPoll {
		time.AfterFunc(abandonAfter/2, func() { close(hang) })
	}
	closes, begin := h.count(&h.closes), time.Now()
	h.stop()
	if n := h.logs.FilterMessage("closing the source failed").Len(); n != 0 {
		t.Error("a close that was not tried is logged as failed")
	}
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("Run took %v to end", took)
	}
	if hangsPoll {
		if h.detaches != 0 || h.openSessions != 0 {
			t.Errorf("%d detaches, %d open sessions", h.detaches, h.openSessions)
		}
		return
	}
	if n := h.closes - closes; n != 0 || h.detaches != 1 || h.attaches != 0 {
		t.Errorf("%d closes, %d detaches, %d attaches", n, h.detaches, h.attaches)
	}
	close(hang)
}

// Findings from before a detach stay until a reading after attach. A reset that no reading saw is recognized by what it
// cleared. A detach is not a trip.
func TestDetachKeepsFindings(t *testing.T) {
	fail := health.Incident{System: "memory", Code: 4, Severity: health.SeverityFail, Message: "a double-bit error"}
	present, value, xids := healthtest.Present, healthtest.Value, healthtest.XIDs
	for name, c := range map[string]struct {
		before, after                           health.Sample
		whileDetached, afterAttach, minuteLater string // causes
	}{
		"healthy": {present(), present(), "driver-released", "", ""},
		"reset": {
			present(xids(95), value(health.FieldRecoveryAction, 1)), present(value(health.FieldRecoveryAction, 0)),
			"xid-95,driver-released,recovery-action", "", "",
		},
		"not reset": {
			present(xids(95), value(health.FieldRecoveryAction, 1)), present(value(health.FieldRecoveryAction, 1)),
			"xid-95,driver-released,recovery-action", "xid-95,recovery-action", "xid-95,recovery-action",
		},
		"no evidence of a reset": {present(xids(95)), present(), "xid-95,driver-released", "xid-95", "xid-95"},
		"double-bit errors cleared": {
			present(xids(48), value(health.FieldDBEVolatile, 2)), present(value(health.FieldDBEVolatile, 0)),
			"xid-48,double-bit-ecc,driver-released", "double-bit-ecc", "",
		},
		"lost":       {healthtest.Blank(health.Lost), present(), "lost,driver-released", "", ""},
		"still lost": {healthtest.Blank(health.Lost), healthtest.Blank(health.Lost), "lost,driver-released", "lost", "lost"},
		"fails":      {present(), healthtest.Blank(health.Lost), "driver-released", "lost", "lost"},
		"hot": {
			present(value(health.FieldGPUTemp, 99)), present(value(health.FieldGPUTemp, 40)), "driver-released,temperature", "temperature", "",
		},
		"not read": {present(), healthtest.Blank(health.PresenceUnknown), "driver-released", "driver-released", "driver-released"},
		"FAIL of a fresh engine": {
			healthtest.Checked(fail), healthtest.Checked(), "dcgm-volatile-dbe-detected,driver-released", "dcgm-volatile-dbe-detected", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				want := func(when, causes string) {
					t.Helper()
					if got := h.causes(); got != causes {
						t.Errorf("%s: causes %s, want %s", when, got, causes)
					}
				}
				h.reportGPU0(c.before)
				advance(5 * time.Second)
				trips := h.trips()
				h.detach(t, time.Hour)
				want("detached", c.whileDetached)
				advance(20 * time.Minute)
				want("detached for 20 minutes", c.whileDetached)
				h.reportGPU0(c.after)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if _, err := h.m.Attach(ctx); (err != nil) != strings.Contains(c.afterAttach, health.CauseReleased) {
					t.Errorf("attach: %v", err)
				}
				want("attached", c.afterAttach)
				advance(62 * time.Second)
				want("a minute after attach", c.minuteLater)
				if name == "fails" {
					trips++
				}
				if got := h.trips(); got != trips {
					t.Errorf("%d trips, want %d", got, trips)
				}
			})
		})
	}
}

func TestClearDuringDetach(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Present(healthtest.XIDs(48)))
		advance(time.Second)
		h.detach(t, time.Hour)
		if _, err := h.m.Clear("GPU-0", health.CauseReleased); err == nil {
			t.Error("a detach was cleared")
		}
		if causes, err := h.m.Clear("GPU-0", ""); err != nil || !slices.Equal(causes, []string{"xid-48"}) || h.causes() != health.CauseReleased {
			t.Errorf("cleared %v, %v; causes %s", causes, err, h.causes())
		}
	})
}

func (h *harness) reportTwo() {
	h.report(of(healthtest.GPU0, healthtest.Present()), of(healthtest.GPU1, healthtest.Present(healthtest.Value(health.FieldRemapFailed, 1))))
	advance(5 * time.Second)
}

func TestWithhold(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportTwo()
		before := h.out.Load()
		w := h.withhold(t)
		for range 3 { // polls continue
			h.wantCauses(t, "withheld", health.SourceUp, health.CauseReleased, "row-remap-failed,driver-released")
			advance(time.Second)
		}
		if _, err := h.m.Withhold(time.Hour); !errors.Is(err, errDetachPending) {
			t.Errorf("second withhold: %v", err)
		}
		w.End()
		after := h.out.Load()
		for i, d := range after.Devices {
			want := before.Devices[i].Verdict
			if got := d.Verdict; got.State != want.State || !got.Since.Equal(want.Since) ||
				len(d.Memory.Trips) != len(before.Devices[i].Memory.Trips) ||
				!slices.Equal(got.Causes(), want.Causes()) {
				t.Errorf("%+v, want %+v", got, want)
			}
		}
		if after.Source.Detachment != (health.Detachment{}) || h.count(&h.closes) != 0 {
			t.Errorf("%+v, %d closes", after.Source, h.closes)
		}
		if w.End(); h.out.Load().Seq != after.Seq {
			t.Error("a second End has an effect")
		}

		for _, step := range []string{"detach", "withhold while detached"} { // End has no effect
			w = h.withhold(t)
			if step == "detach" {
				h.detach(t, time.Hour)
			}
			w.End()
			h.wantCauses(t, step, health.SourceDetached, health.CauseReleased, "row-remap-failed,driver-released")
		}
		if r := h.attach(t); r.Status != health.SourceUp || h.causes() != "" {
			t.Errorf("%+v, causes %s", r, h.causes())
		}
	})
}

// A device that was not read since an earlier detach stays withheld after End, and no other device does.
func TestWithholdEndsWithUnreadDevice(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportTwo()
		h.detach(t, time.Hour)
		h.set(func(s *fakeSource) {
			s.reading.Samples[0] = of(healthtest.GPU0, healthtest.Blank(health.PresenceUnknown))
		})
		h.m.requestAttach("test")
		advance(5 * time.Second)
		h.set(func(s *fakeSource) {
			s.reading.Samples[1] = of(healthtest.GPU1, healthtest.Blank(health.PresenceUnknown))
		})
		advance(5 * time.Second)
		for range 2 {
			h.wantCauses(t, "attaching", health.SourceUp, health.CauseReleased, health.CauseRemapFailed)
			w := h.withhold(t)
			advance(2 * time.Second)
			w.End()
		}
	})
}

// A fault or a cordon of a withheld device lasts since it began, not since the withholding ended.
func TestWithholdEndsWithNewFault(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportTwo()
		w := h.withhold(t)
		withheldSince := time.Now()
		advance(2 * time.Second)
		h.report(of(healthtest.GPU0, healthtest.Blank(health.Lost)), of(healthtest.GPU1, healthtest.Present()))
		h.cordon("0")
		cordoned := time.Now()
		advance(5 * time.Second)
		w.End()
		v := h.verdict()
		if v.State != health.Unhealthy || !v.Since.Equal(withheldSince) || v.Has(health.CauseReleased) {
			t.Errorf("verdict %+v, withheld since %v", v, withheldSince)
		}
		for _, f := range v.Findings {
			if f.Cause == health.CauseCordoned && !f.Since.Equal(cordoned) {
				t.Errorf("cordoned since %v, want %v", f.Since, cordoned)
			}
		}
		if !slices.Equal(v.Causes(), []string{health.CauseLost, health.CauseCordoned}) {
			t.Errorf("causes %v", v.Causes())
		}
	})
}

// A refused detach keeps a device withheld that was not read since an earlier detach, and no other device, although the
// source stays down.
func TestRefusedDetachWithUnreadDevice(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.useHostEngine()
		h.reportTwo()
		h.detach(t, time.Hour)
		h.set(func(s *fakeSource) {
			s.reading.Samples[0] = of(healthtest.GPU0, healthtest.Blank(health.PresenceUnknown))
		})
		h.m.requestAttach("test")
		advance(5 * time.Second)
		refused := errors.New("refused")
		h.set(func(s *fakeSource) { s.detachErr, s.attachErr = refused, refused })
		if _, err := h.m.Detach(t.Context(), time.Hour); !errors.Is(err, refused) {
			t.Errorf("%v", err)
		}
		advance(5 * time.Second)
		h.wantCauses(t, "refused", health.SourceDown, health.CauseReleased, health.CauseRemapFailed)
		h.set(func(s *fakeSource) { s.attachErr = nil })
		h.reportTwo()
		advance(30 * time.Second)
		h.wantCauses(t, "read", health.SourceUp, "", health.CauseRemapFailed)
	})
}

// While a host engine is asked to attach, the source is starting. Another detach ends the attach. While that detach is in force,
// withholding changes nothing.
func TestAttachIsStarting(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.useHostEngine()
		h.detach(t, time.Hour)
		h.set(func(s *fakeSource) { s.attachUnanswered = true })
		attached := make(chan error, 1)
		go func() {
			_, err := h.m.Attach(t.Context())
			attached <- err
		}()
		advance(time.Second)
		h.wantCauses(t, "attaching", health.SourceStarting, health.CauseReleased)
		h.detach(t, time.Hour)
		if err := <-attached; !errors.Is(err, errAttachCanceled) {
			t.Errorf("attach: %v", err)
		}
		h.wantCauses(t, "detached again", health.SourceDetached, health.CauseReleased)
		before := h.out.Load().Seq
		h.withhold(t).End()
		if after := h.out.Load(); after.Seq != before || after.Source.Status != health.SourceDetached {
			t.Errorf("withheld while detached: %+v", after.Source)
		}
	})
}

// Attach while the source is down waits for a session that is opened after the request, because an earlier error says nothing about it.
func TestAttachWhileDownWaitsForSession(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		f, open := new(fakeEvents), make(chan struct{})
		answer := sync.OnceFunc(func() { close(open) })
		defer answer()
		var waits atomic.Bool
		src := h.withEvents(f)
		src.Open = func(ctx context.Context) (health.Session, error) {
			if waits.Load() {
				<-open
			}
			return h.Open(ctx)
		}
		h.source.Store(src)
		advance(2 * time.Second)
		defer f.hangEnd()() // so that the detach does not complete
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = errors.New("died"), errors.New("refused") })
		advance(2 * time.Second)
		canceled, attached := make(chan error, 1), make(chan AttachResult, 1)
		go func() {
			_, err := h.m.Detach(t.Context(), time.Hour)
			canceled <- err
		}()
		advance(time.Second)
		h.wantCauses(t, "detaching", health.SourceDown, health.CauseReleased)
		waits.Store(true)
		h.set(func(s *fakeSource) { s.pollErr, s.openErr = nil, nil })
		go func() {
			r, _ := h.m.Attach(t.Context())
			attached <- r
		}()
		advance(time.Second)
		h.wantCauses(t, "opening", health.SourceStarting, health.CauseReleased)
		if len(attached) > 0 {
			t.Fatalf("attached before a session is open: %+v", <-attached)
		}
		answer()
		if r := <-attached; r.Status != health.SourceUp {
			t.Errorf("%+v", r)
		}
		if err := <-canceled; !errors.Is(err, errDetachCanceled) {
			t.Errorf("detach: %v", err)
		}
	})
}

// A release that attach has ended does not complete the detach that was requested after it.
func TestDetachWaitsForItsRelease(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		first, second := make(chan struct{}), make(chan struct{})
		var calls atomic.Int32
		src := h.fakeSource.source(health.SourceID{})
		src.Release = func(ctx context.Context) {
			if calls.Add(1) == 1 {
				<-ctx.Done()
				<-first
				return
			}
			<-second
		}
		h.source.Store(src)
		advance(2 * time.Second)
		detach := func() {
			go func() { _, _ = h.m.Detach(t.Context(), time.Hour) }()
			synctest.Wait()
		}
		detach()
		h.m.requestAttach("test")
		synctest.Wait()
		detach()
		close(first)
		synctest.Wait()
		status := h.status().Status
		close(second)
		synctest.Wait()
		if status == health.SourceDetached || calls.Load() != 2 {
			t.Errorf("%v before the second of %d releases has ended", status, calls.Load())
		}
		h.wantCauses(t, "released", health.SourceDetached, health.CauseReleased)
	})
}
