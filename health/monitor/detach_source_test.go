package monitor

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// What a host engine refuses changes nothing; where there is no connection it cannot be asked, which is said.
func TestDetachOfAHostEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.source.Store(&Source{Open: b.Open, Attach: b.Attach, StallAfter: 10 * time.Second})
		pass(5 * time.Second)

		b.set(func(s *script) { s.canDetach = errors.New("too old") })
		seq := b.out.Load().Seq
		if _, err := b.m.Detach(t.Context(), time.Hour); err == nil || err.Error() != "too old" || b.out.Load().Seq != seq {
			t.Errorf("too old: %v, %d snapshots", err, b.out.Load().Seq-seq)
		}
		b.set(func(s *script) { s.canDetach, s.detachErr = nil, errors.New("refused") })
		if _, err := b.m.Detach(t.Context(), time.Hour); err == nil || err.Error() != "refused" {
			t.Errorf("refused: %v", err)
		}
		pass(time.Second)
		if v := b.out.Load().Devices[0].Verdict; b.shown().Status != health.SourceUp || v.State != health.Healthy {
			t.Errorf("source %+v, verdict %+v", b.shown(), v)
		}
		attaches := b.count(&b.attaches)
		if attaches != 1 { // the engine may have let go half way
			t.Errorf("told to take it back %d times", attaches)
		}
		b.set(func(s *script) { s.detachErr = nil })
		if let := b.letGo(t, time.Hour); let.Unasked || b.count(&b.detaches) != 2 {
			t.Errorf("%+v, asked %d times", let, b.detaches)
		}
		b.takeBack(t)
		if n := b.count(&b.attaches) - attaches; n != 1 {
			t.Errorf("told to take it back %d times", n)
		}
		pass(time.Second)

		b.set(func(s *script) {
			s.pollErr, s.openErr = errors.New("connection lost"), errors.New("connection refused")
		})
		pass(20 * time.Second)
		if n := b.count(&b.attaches) - attaches; n != 1 {
			t.Errorf("told to take back what it has: %d times", n)
		}
		detaches := b.count(&b.detaches)
		if let := b.letGo(t, time.Hour); !let.Unasked || b.count(&b.detaches) != detaches {
			t.Errorf("%+v, asked %d times", let, b.detaches-detaches)
		}
		if back := b.takeBack(t); back.Status != health.SourceDown || back.Err != "connection refused" {
			t.Errorf("%+v", back)
		}
	})
}

// A call that hangs is waited for: who asks may go, and attach is heard meanwhile.
func TestDetachWhileStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		synctest.Wait()
		hang := make(chan struct{})
		b.set(func(s *script) { s.hang = hang })
		pass(time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
		defer cancel()
		_, err := b.m.Detach(ctx, time.Hour)
		if err == nil || !strings.Contains(err.Error(), "is stalled: reading the GPUs has not returned") || b.stands() != health.CauseReleased {
			t.Errorf("%v; %s stands", err, b.stands())
		}
		if n := b.count(&b.closes); n != 0 {
			t.Errorf("closed %d times beside a call that hangs", n)
		}
		if back := b.takeBack(t); back.Already || back.Status != health.SourceStalled || b.stands() != "" {
			t.Errorf("%+v; %s stands", back, b.stands())
		}
		b.set(func(s *script) { s.hang = nil })
		close(hang)
		pass(3 * time.Second)
		if b.shown().Status != health.SourceUp || b.stands() != "" || b.count(&b.detaches) != 0 {
			t.Errorf("source %+v; %s stands; %d detached", b.shown(), b.stands(), b.detaches)
		}
	})
}

// The end of the process does not wait for the driver, and leaves a host engine as it is.
func TestEndWhileDetaching(t *testing.T) {
	for name, hangs := range map[string]bool{"detached": false, "detaching": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := monitor(t)
				b.source.Store(&Source{Open: b.Open, Attach: b.Attach, StallAfter: 10 * time.Second})
				pass(time.Second)
				hang := make(chan struct{})
				if hangs {
					b.set(func(s *script) { s.detachHang = hang })
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if _, err := b.m.Detach(ctx, time.Hour); (err != nil) != hangs {
					t.Errorf("%v", err)
				}
				closes, begin := b.count(&b.closes), time.Now()
				b.stop()
				if took := time.Since(begin); took > 3*time.Second {
					t.Errorf("took %v to end", took)
				}
				if n := b.count(&b.closes) - closes; n != 0 || b.count(&b.detaches) != 1 || b.count(&b.attaches) != 0 {
					t.Errorf("%d closed, %d detached, %d attached", n, b.detaches, b.attaches)
				}
				close(hang)
			})
		})
	}
}

// At the end of the process nobody is told any more to let go: there would be nobody to take it back.
func TestEndBeforeDetaching(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		b.source.Store(&Source{Open: b.Open, Attach: b.Attach, StallAfter: 10 * time.Second})
		hang := make(chan struct{})
		b.set(func(s *script) { s.hang = hang })
		pass(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := b.m.Detach(ctx, time.Hour); err == nil {
			t.Error("let go of beside a call that hangs")
		}
		time.AfterFunc(abandonAfter/2, func() { close(hang) })
		b.stop()
		if b.count(&b.detaches) != 0 || b.count(&b.live) != 0 {
			t.Errorf("%d detached, %d sessions open", b.detaches, b.live)
		}
	})
}
