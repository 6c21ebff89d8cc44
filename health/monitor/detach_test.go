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

// stands returns the causes of the first device, by commas.
func (b *bench) stands() string { return strings.Join(b.out.Load().Devices[0].Verdict.Causes(), ",") }

// letGo detaches, which must go well.
func (b *bench) letGo(t *testing.T, d time.Duration) DetachResult {
	t.Helper()
	let, err := b.m.Detach(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	return let
}

func (b *bench) takeBack(t *testing.T) AttachResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	back, err := b.m.Attach(ctx)
	if err != nil {
		t.Error(err)
	}
	return back
}

// show has the source show a sample of GPU-0 from now on, its XIDs once.
func (b *bench) show(sample health.Sample) {
	b.set(func(s *script) {
		sample.Device, s.xids = healthtest.GPU0.ID, sample.XIDs
		for i := range s.xids {
			s.xids[i].At = time.Now()
		}
		sample.XIDs = nil
		s.reading.Samples = []health.Sample{sample}
	})
}

// unhealthyAtClose returns a check that the kubelet was told before the session was closed.
func (b *bench) unhealthyAtClose(t *testing.T) func() {
	t.Helper()
	closed := make(chan health.Snapshot, 1)
	b.set(func(s *script) { s.onClose = func() { closed <- *b.out.Load() } })
	return func() {
		t.Helper()
		select {
		case s := <-closed:
			if v := s.Devices[0].Verdict; v.State != health.Unhealthy || !v.Has(health.CauseReleased) {
				t.Errorf("when the session was closed the device was %+v", v)
			}
		default:
			t.Error("the session was not closed")
		}
		b.set(func(s *script) { s.onClose = nil })
	}
}

func TestDetachAndAttach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		pass(5 * time.Second)
		check := b.unhealthyAtClose(t)
		let := b.letGo(t, time.Hour)
		check()
		s := b.out.Load()
		if let.Already || let.Unasked || !let.Until.Equal(let.Since.Add(time.Hour)) || s.Source.Status != health.SourceDetached || !s.Source.Until.Equal(let.Until) {
			t.Errorf("%+v, source %+v", let, s.Source)
		}
		f := s.Devices[0].Verdict.Findings[0]
		if f.Cause != health.CauseReleased || f.State != health.Unhealthy || !s.Devices[0].Verdict.Decided() ||
			f.Action != health.ActionAttach || !strings.Contains(f.Reason, let.Until.UTC().Format(time.RFC3339)) {
			t.Errorf("finding %+v", f)
		}
		if !strings.Contains(s.Source.Err, "gpu-node-agent attach") {
			t.Errorf("source %+v", s.Source)
		}
		polls, opens := b.count(&b.polls), b.count(&b.opens)
		pass(30 * time.Minute)
		if b.count(&b.polls) != polls || b.count(&b.opens) != opens {
			t.Error("the driver was used while it is let go of")
		}
		if again := b.letGo(t, time.Hour); !again.Already || !again.Since.Equal(let.Since) || !again.Until.Equal(time.Now().Add(time.Hour)) {
			t.Errorf("a second detach: %+v", again)
		}
		synctest.Wait()
		if got := b.shown(); !got.Until.Equal(time.Now().Add(time.Hour)) || !strings.Contains(b.out.Load().Devices[0].Verdict.Findings[0].Reason, got.Until.UTC().Format(time.RFC3339)) {
			t.Errorf("source %+v", got)
		}
		pass(45 * time.Minute) // the first hour is over
		if b.shown().Status != health.SourceDetached {
			t.Fatal("the second detach did not count")
		}
		if back := b.takeBack(t); back.Already || back.Status != health.SourceUp {
			t.Errorf("%+v", back)
		}
		v := b.out.Load().Devices[0].Verdict
		if v.State != health.Healthy || len(v.Trips) > 0 || !b.shown().Until.IsZero() {
			t.Errorf("%+v, source %+v", v, b.shown())
		}
		if back := b.takeBack(t); !back.Already || back.Status != health.SourceUp || b.count(&b.opens) != 2 {
			t.Errorf("a second attach: %+v, %d opened", back, b.count(&b.opens))
		}
		for _, line := range []string{"an operator has the driver let go of", "the driver is let go of", "the driver is taken back"} {
			if n := b.logs.FilterMessage(line).Len(); n != 1 {
				t.Errorf("%q was logged %d times", line, n)
			}
		}
	})
}

func TestDetachExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		pass(time.Second)
		b.letGo(t, 10*time.Minute)
		pass(10*time.Minute - time.Second)
		if b.shown().Status != health.SourceDetached {
			t.Fatalf("source %+v", b.shown())
		}
		b.set(func(s *script) { s.openErr = errors.New("no driver") })
		pass(2 * time.Second)
		// It is an ordinary source that is down, and a GPU that nobody has seen since is not given out.
		if s := b.shown(); s.Status != health.SourceDown || s.Err != "no driver" || !s.Until.IsZero() || b.stands() != health.CauseReleased {
			t.Fatalf("source %+v, %s stands", s, b.stands())
		}
		if back := b.takeBack(t); !back.Already || back.Status != health.SourceDown || back.Err != "no driver" {
			t.Errorf("%+v", back)
		}
		if f := b.out.Load().Devices[0].Verdict.Findings[0]; f.Action != health.ActionCheckSource {
			t.Errorf("%+v", f)
		}
		b.set(func(s *script) { s.openErr = nil })
		pass(time.Minute)
		if b.shown().Status != health.SourceUp || b.stands() != "" {
			t.Errorf("source %+v, %s stands", b.shown(), b.stands())
		}
		line := b.logs.FilterMessage("the driver is taken back").All()
		if len(line) != 1 || line[0].ContextMap()["because"] != "the time is up" {
			t.Errorf("%v", line)
		}
	})
}

// No GPU at all is a driver that is away: none is missing for it. One that is left out is.
func TestAttachBeforeTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		two := health.Reading{Devices: []health.Device{healthtest.GPU0, healthtest.GPU1}, Samples: []health.Sample{{Device: healthtest.GPU0.ID, Presence: health.Present}, {Device: healthtest.GPU1.ID, Presence: health.Present}}}
		b.set(func(s *script) { s.reading = two })
		pass(5 * time.Second)
		b.letGo(t, time.Hour)
		b.set(func(s *script) { s.reading = health.Reading{} })
		if back := b.takeBack(t); back.Status != health.SourceDown || back.Err != ErrNotBack.Error() {
			t.Errorf("%+v", back)
		}
		pass(5 * time.Minute)
		if b.stands() != health.CauseReleased {
			t.Errorf("%s", b.stands())
		}
		b.set(func(s *script) { s.reading = health.Reading{Devices: two.Devices[:1], Samples: two.Samples[:1]} })
		pass(31 * time.Second)
		if d := b.out.Load().Devices; b.stands() != "" || d[1].Verdict.Cause() != health.CauseMissing {
			t.Errorf("%+v", d)
		}
	})
}

// A reload while the driver is let go of opens nothing, and a cordon is in force at once.
func TestReloadWhileDetached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		pass(time.Second)
		let := b.letGo(t, time.Hour)
		since := b.out.Load().Devices[0].Verdict.Findings[0].Since
		pass(time.Minute)
		c := cordoning("0")
		b.config.Store(&c)
		synctest.Wait()
		if got := b.stands(); got != "driver-released,cordoned" {
			t.Errorf("%s stands", got)
		}
		other := newScript()
		b.source.Store(&Source{SourceID: health.SourceID{Kind: "other"}, Open: other.Open, Attach: other.Attach, StallAfter: 10 * time.Second})
		pass(time.Minute)
		if s := b.shown(); s.Status != health.SourceDetached || s.Kind != "other" || !s.Since.Equal(let.Since) || other.count(&other.opens) != 0 {
			t.Errorf("source %+v, %d opened", s, other.opens)
		}
		if f := b.out.Load().Devices[0].Verdict.Findings[0]; !f.Since.Equal(since) {
			t.Errorf("%+v", f)
		}
		b.takeBack(t)
		if b.stands() != health.CauseCordoned || other.count(&other.attaches) != 1 {
			t.Errorf("%s stands, %d attached", b.stands(), other.attaches)
		}
		if b.count(&b.opens) != 1 || b.count(&b.closes) != 1 {
			t.Errorf("the old source: %d opened, %d closed", b.opens, b.closes)
		}
	})
}
