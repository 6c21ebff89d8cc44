package monitor

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// engine has the bench follow a host engine.
func (b *bench) engine() {
	b.source.Store(&Source{Open: b.Open, Attach: b.Attach, StallAfter: 10 * time.Second})
	pass(5 * time.Second)
}

// A poll that was under way when attach was said ends well: that is no answer, and the engine is told all the same.
func TestAttachDuringAPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.engine()
		hang := make(chan struct{})
		b.set(func(s *script) { s.hang = hang })
		pass(2 * time.Second)
		before := b.count(&b.attaches)
		told := make(chan int, 1)
		go func() {
			b.takeBack(t)
			told <- b.count(&b.attaches) - before
		}()
		synctest.Wait()
		b.set(func(s *script) { s.hang = nil })
		close(hang)
		if n := <-told; n != 1 {
			t.Errorf("when attach was done, the engine was told %d times", n)
		}
	})
}

// What failed before attach was said is no answer to it either.
func TestAttachAfterAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.engine()
		b.set(func(s *script) { s.pollErr, s.openErr = errors.New("no driver"), errors.New("no driver") })
		pass(20 * time.Second)
		b.set(func(s *script) { s.pollErr, s.openErr = nil, nil })
		if back := b.takeBack(t); back.Status != health.SourceUp || back.Err != "" {
			t.Errorf("%+v", back)
		}
	})
}

// A source that is up and has not seen a GPU is not all that attach is for.
func TestAttachWaitsForTheGPUs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		pass(5 * time.Second)
		b.letGo(t, time.Hour)
		b.show(healthtest.Blank(health.PresenceUnknown))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if back, err := b.m.Attach(ctx); err == nil || !strings.Contains(err.Error(), "the source is up, and not seen since are GPU-0;") {
			t.Errorf("%+v, %v", back, err)
		}
		time.AfterFunc(10*time.Second, func() { b.show(healthtest.Present()) })
		if back := b.takeBack(t); !back.Already || back.Status != health.SourceUp || b.stands() != "" {
			t.Errorf("%+v; %s stands", back, b.stands())
		}
	})
}

// A call that hangs for ever keeps no GPU from pods for ever: what was not let go of is as it was when the time is up.
func TestDetachExpiresWhileStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		synctest.Wait()
		hang := make(chan struct{})
		defer close(hang)
		b.set(func(s *script) { s.hang = hang })
		pass(time.Minute)
		if _, err := b.m.Detach(t.Context(), time.Minute); err == nil || !strings.Contains(err.Error(), "or the time was up, before") {
			t.Errorf("%v", err)
		}
		if b.stands() != "" || b.shown().Status != health.SourceStalled {
			t.Errorf("%s stands; source %+v", b.stands(), b.shown())
		}
	})
}

// Nobody is told that the driver is let go of when the time for it is over.
func TestDetachExpiresMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.engine()
		hang := make(chan struct{})
		b.set(func(s *script) { s.detachHang = hang })
		time.AfterFunc(5*time.Second, func() { close(hang) })
		if let, err := b.m.Detach(t.Context(), 3*time.Second); err == nil || !strings.Contains(err.Error(), "or the time was up, before") {
			t.Errorf("%+v, %v", let, err)
		}
		if b.stands() != health.CauseReleased { // the engine may have let go
			t.Errorf("%s stands", b.stands())
		}
		attaches := b.count(&b.attaches)
		pass(10 * time.Second)
		if n := b.count(&b.attaches) - attaches; n != 1 || b.stands() != "" || b.shown().Status != health.SourceUp {
			t.Errorf("told to take it back %d times; %s stands; source %+v", n, b.stands(), b.shown())
		}
	})
}

// A GPU that was not seen since the driver went is not given out because a second detach came to nothing.
func TestDetachOfTheUnseen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		pass(5 * time.Second)
		b.letGo(t, time.Hour)
		b.show(healthtest.Blank(health.PresenceUnknown))
		b.m.requestAttach("test")
		pass(5 * time.Second)
		hang := make(chan struct{})
		b.set(func(s *script) { s.hang = hang })
		pass(5 * time.Second)
		for _, d := range []time.Duration{time.Second, time.Hour} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			if _, err := b.m.Detach(ctx, d); err == nil {
				t.Error("let go of beside a call that hangs")
			}
			cancel()
		}
		b.m.requestAttach("test")
		if b.stands() != health.CauseReleased {
			t.Errorf("%s stands", b.stands())
		}
		b.set(func(s *script) { s.hang = nil })
		b.show(healthtest.Present())
		close(hang)
		pass(5 * time.Second)
		if b.stands() != "" || b.shown().Status != health.SourceUp {
			t.Errorf("%s stands; source %+v", b.stands(), b.shown())
		}
	})
}
