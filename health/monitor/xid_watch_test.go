package monitor

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// fakeWatcher is a fakeSource that is an XIDWatcher. The result of a check is set by the test.
type fakeWatcher struct {
	*fakeSource
	checks   atomic.Int64
	asked    atomic.Int64 // how often for all rows
	reported atomic.Bool  // for one check
	err      atomic.Pointer[error]
	hang     atomic.Pointer[chan struct{}]
}

func (w *fakeWatcher) XIDsChanged(context.Context) (bool, time.Time, error) {
	w.checks.Add(1)
	w.set(func(s *fakeSource) { s.calls++; s.mostCalls = max(s.mostCalls, s.calls) })
	defer w.set(func(s *fakeSource) { s.calls-- })
	if hang := w.hang.Load(); hang != nil {
		<-*hang
	}
	if err := w.err.Load(); err != nil {
		return false, time.Time{}, *err
	}
	return w.reported.Swap(false), time.Time{}, nil
}

func (w *fakeWatcher) ReadAllXIDs() { w.asked.Add(1) }

// hangChecks makes checks block until the function that it returns is called.
func (w *fakeWatcher) hangChecks() (resume func()) {
	hang := make(chan struct{})
	w.hang.Store(&hang)
	return func() {
		w.hang.Store(nil)
		close(hang)
		synctest.Wait()
	}
}

func runTestWithWatcher(t *testing.T, test func(t *testing.T, h *harness, w *fakeWatcher)) {
	t.Helper()
	runTest(t, func(t *testing.T, h *harness) {
		w := &fakeWatcher{fakeSource: h.fakeSource}
		src := *h.source.Load()
		src.Open = func(ctx context.Context) (health.Session, error) {
			if _, err := h.Open(ctx); err != nil {
				return nil, err
			}
			return w, nil
		}
		h.source.Store(&src)
		synctest.Wait()
		test(t, h, w)
		if n := h.count(&h.mostCalls); n != 1 {
			t.Errorf("%d calls at once", n)
		}
	})
}

func TestXIDsAreCheckedBetweenPolls(t *testing.T) {
	runTestWithWatcher(t, func(t *testing.T, h *harness, w *fakeWatcher) {
		before := h.count(&h.polls)
		advance(10*time.Second + time.Millisecond)
		if polls, checks := h.count(&h.polls)-before, w.checks.Load(); polls != 10 || checks != 10 {
			t.Errorf("%d polls and %d checks in 10 s, want 10 each", polls, checks)
		}
		before = h.count(&h.polls)
		h.reportXID(79)
		w.reported.Store(true)
		advance(maxXIDGap)
		if n := h.count(&h.polls) - before; n != 1 {
			t.Errorf("%d polls within %v of an XID, want 1", n, maxXIDGap)
		}
		if d := h.out.Load().Devices[0]; d.Verdict.State != health.Unhealthy || d.XIDs.Codes[79].Total != 1 {
			t.Errorf("%+v", d)
		}
	})
}

func TestFailedXIDCheckEndsSession(t *testing.T) {
	runTestWithWatcher(t, func(t *testing.T, h *harness, w *fakeWatcher) {
		died := errors.New("engine died")
		w.err.Store(&died)
		opens, closes := h.count(&h.opens), h.count(&h.closes)
		advance(maxXIDGap)
		if s := h.status(); s.Status != health.SourceDown || s.Err != died.Error() {
			t.Errorf("source %+v", s)
		}
		w.err.Store(nil)
		advance(minBackoff)
		if s := h.status(); s.Status != health.SourceUp || h.count(&h.opens) != opens+1 || h.count(&h.closes) != closes+1 {
			t.Errorf("source %+v, %d more opens", s, h.count(&h.opens)-opens)
		}
	})
}

func TestXIDCheckStalls(t *testing.T) {
	runTestWithWatcher(t, func(t *testing.T, h *harness, w *fakeWatcher) {
		h.configure(func(c *judge.Config) { c.Interval = time.Hour })
		synctest.Wait()
		resume := w.hangChecks()
		polls := h.count(&h.polls)
		advance(maxXIDGap)
		checks := w.checks.Load()
		advance(time.Minute)
		if s := h.status(); s.Status != health.SourceStalled {
			t.Errorf("source %+v", s)
		}
		if w.checks.Load() != checks || h.count(&h.polls) != polls {
			t.Error("another call runs beside the one that hangs")
		}
		resume()
		if s := h.status(); s.Status != health.SourceUp || h.count(&h.polls) != polls+1 {
			t.Errorf("after the check: source %+v, %d polls", s, h.count(&h.polls)-polls)
		}
	})
}

// A check that runs when another source is configured does not prevent the final poll, which lists all rows.
func TestFinalPollAfterXIDCheck(t *testing.T) {
	runTestWithWatcher(t, func(t *testing.T, h *harness, w *fakeWatcher) {
		resume := w.hangChecks()
		advance(maxXIDGap)
		h.reportXID(79)
		next := *h.source.Load()
		h.source.Store(&next)
		synctest.Wait()
		asked := w.asked.Load()
		resume()
		if n := w.asked.Load() - asked; n != 1 {
			t.Errorf("all rows were asked for %d times, want 1", n)
		}
		if d := h.out.Load().Devices[0]; d.XIDs.Codes[79].Total != 1 {
			t.Errorf("XIDs %v", d.XIDs.Codes)
		}
	})
}

// All rows are asked for every five seconds while the source owes an XID for more than three seconds, until it reports the XID or the debt
// expires.
func TestOverdueXIDsAreAskedFor(t *testing.T) {
	for name, tt := range map[string]struct {
		reportedAfter time.Duration // by the source
		asked         []int         // the seconds after the XID in which they are asked for
	}{
		"in time":  {1500 * time.Millisecond, nil},
		"late":     {9500 * time.Millisecond, []int{4, 9}},
		"never":    {time.Hour, []int{4, 9, 14}},
		"with 999": {0, []int{4, 9, 14}},
	} {
		t.Run(name, func(t *testing.T) {
			runTestWithEvents(t, func(t *testing.T, h *harness, f *fakeEvents) {
				w := &fakeWatcher{fakeSource: h.fakeSource}
				src := h.withEvents(f)
				open := src.Open
				src.Open = func(ctx context.Context) (health.Session, error) {
					if _, err := open(ctx); err != nil {
						return nil, err
					}
					return w, nil
				}
				h.source.Store(src)
				h.reportGPU0(healthtest.Present())
				advance(2500 * time.Millisecond)
				f.receive(xidEvent("GPU-0", 48))
				time.AfterFunc(tt.reportedAfter, func() {
					code := 48
					if tt.reportedAfter == 0 {
						code = health.UnknownXID
					}
					h.reportXID(code)
				})
				for second := 1; second <= 20; second++ {
					before := w.asked.Load()
					advance(time.Second)
					if asked, want := w.asked.Load() > before, slices.Contains(tt.asked, second); asked != want {
						t.Errorf("in second %d all rows were asked for: %v, want %v", second, asked, want)
					}
				}
			})
		})
	}
}
