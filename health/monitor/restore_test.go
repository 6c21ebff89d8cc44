package monitor

import (
	"context"
	"encoding/json"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// restarted runs a new monitor over the same source, with what the last snapshot leaves in the state file, after a while.
func (b *bench) restarted(t *testing.T, bootID string, after time.Duration) *bench {
	t.Helper()
	text, err := json.Marshal(statefile.FromSnapshot(b.out.Load(), "boot"))
	if err != nil {
		t.Fatal(err)
	}
	var memory statefile.Saved
	if err := json.Unmarshal(text, &memory); err != nil {
		t.Fatal(err)
	}
	b.stop()
	if after > 0 {
		pass(after)
	}
	next := &bench{script: newScript(), out: new(health.Latest[health.Snapshot]), config: b.config, source: new(health.Latest[Source]), logs: b.logs}
	next.reading = b.reading
	src := *b.source.Load()
	src.Open = next.Open
	if src.Attach != nil {
		src.Attach = next.Attach
	}
	next.source.Store(&src)
	next.m = New(next.config, next.source, next.out, zap.NewNop())
	next.m.Restore(memory.Restore(bootID, src.SourceID, time.Now()))
	return next
}

// run runs the monitor of restarted.
func (b *bench) run(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.m.Run(ctx) }()
	b.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	synctest.Wait()
}

// withTwo has the bench show two GPUs, of which the second has an XID 95.
func (b *bench) withTwo() {
	b.set(func(s *script) {
		s.reading = health.Reading{Devices: []health.Device{healthtest.GPU0, healthtest.GPU1}, Samples: []health.Sample{{Device: healthtest.GPU0.ID, Presence: health.Present}, {Device: healthtest.GPU1.ID, Presence: health.Present}}}
		s.reading.Samples[1].Values = map[health.Field]float64{health.FieldRemapFailed: 1}
	})
	pass(5 * time.Second)
}

func TestRestartDuringDetach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		b.engine()
		b.withTwo()
		let := b.letGo(t, 10*time.Minute)
		pass(time.Minute)
		polled := b.out.Load().At
		next := b.restarted(t, "boot", time.Minute)

		// Before anything runs, every view has the devices and what withholds them.
		s := next.out.Load()
		if !s.Polled() || !s.At.Equal(polled) || s.Source.Status != health.SourceDetached || !s.Source.Until.Equal(let.Until) || len(s.Devices) != 2 {
			t.Fatalf("%+v", s)
		}
		for i, want := range []string{health.CauseReleased, health.CauseRemapFailed} {
			if d := s.Devices[i]; d.Verdict.State != health.Unhealthy || !d.Verdict.Has(health.CauseReleased) || d.Verdict.Cause() != want || d.Device.PCI != []health.Device{healthtest.GPU0, healthtest.GPU1}[i].PCI {
				t.Errorf("%+v", d)
			}
		}
		next.run(t)
		defer func() { next.stop() }()
		pass(7 * time.Minute)
		if next.count(&next.opens) != 0 || next.shown().Status != health.SourceDetached {
			t.Fatalf("opened %d times, source %+v", next.opens, next.shown())
		}
		if again := next.letGo(t, 10*time.Minute); !again.Already || !again.Since.Equal(let.Since) || again.Unasked {
			t.Errorf("a second detach: %+v, the first %+v", again, let)
		}
		if back := next.takeBack(t); back.Already || back.Status != health.SourceUp || next.count(&next.attaches) != 1 {
			t.Errorf("%+v, the engine was told %d times", back, next.attaches)
		}
		if d := next.out.Load(); next.stands() != "" || !slices.Equal(d.Devices[1].Verdict.Causes(), []string{health.CauseRemapFailed}) {
			t.Errorf("%+v", d.Devices)
		}
		if d := statefile.FromSnapshot(next.out.Load(), "boot").Detachment; d != (health.Detachment{}) {
			t.Errorf("the next process would find %+v", d)
		}
	})
}

func TestRestartDuringDetachEnds(t *testing.T) {
	for name, c := range map[string]struct {
		boot     string
		after    time.Duration
		attaches int // the engine may still have let go, and nobody else tells it
	}{
		"its time is up":          {"boot", 11 * time.Minute, 1},
		"another boot":            {"another", time.Minute, 0},
		"its time is up later on": {"boot", 9 * time.Minute, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := monitor(t)
				b.engine()
				b.letGo(t, 10*time.Minute)
				next := b.restarted(t, c.boot, c.after)
				next.run(t)
				defer func() { next.stop() }()
				pass(2 * time.Minute)
				if next.shown().Status != health.SourceUp || next.stands() != "" || next.count(&next.attaches) != c.attaches {
					t.Errorf("source %+v, %s stands, the engine was told %d times", next.shown(), next.stands(), next.attaches)
				}
			})
		})
	}
}

// A process that ends between attach and the engine's answer leaves it to the next one.
func TestRestartDuringAttach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		b.engine()
		b.letGo(t, time.Hour)
		b.m.requestAttach("test")
		next := b.restarted(t, "boot", 0)
		next.run(t)
		defer func() { next.stop() }()
		if next.shown().Status != health.SourceUp || next.count(&next.attaches) != 1 {
			t.Errorf("source %+v, told %d times", next.shown(), next.attaches)
		}
		third := next.restarted(t, "boot", 0)
		third.run(t)
		next.stop = third.stop
		if n := third.count(&third.attaches); n != 0 {
			t.Errorf("told %d times by the process after that", n)
		}
	})
}

// The file says so from the moment when the devices are withheld, and that nobody has asked the host engine yet.
func TestRestartBeforeTheEngineLetsGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		b.engine()
		if _, err := b.m.Withhold(time.Hour); err != nil {
			t.Fatal(err)
		}
		next := b.restarted(t, "boot", time.Minute)
		next.run(t)
		defer func() { next.stop() }()
		if s := next.shown(); s.Status != health.SourceDetached || next.stands() != health.CauseReleased || next.count(&next.opens) != 0 {
			t.Errorf("source %+v, %s stands", s, next.stands())
		}
		if again := next.letGo(t, time.Hour); !again.Unasked {
			t.Errorf("%+v", again)
		}
	})
}

func TestWithholdAndGiveBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.withTwo()
		before := b.out.Load()
		w, err := b.m.Withhold(time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 { // polls go on
			for _, d := range b.out.Load().Devices {
				if d.Verdict.State != health.Unhealthy || !d.Verdict.Has(health.CauseReleased) {
					t.Fatalf("%+v", d.Verdict)
				}
			}
			if b.shown().Status != health.SourceUp {
				t.Fatalf("source %+v", b.shown())
			}
			pass(time.Second)
		}
		if _, err := b.m.Withhold(time.Hour); err == nil {
			t.Error("two at once")
		}
		w.End()
		after := b.out.Load()
		for i, d := range after.Devices {
			was := before.Devices[i].Verdict
			if got := d.Verdict; got.State != was.State || !got.Since.Equal(was.Since) || len(got.Trips) != len(was.Trips) || !slices.Equal(got.Causes(), was.Causes()) {
				t.Errorf("%+v, was %+v", got, was)
			}
		}
		if after.Source.Detachment != (health.Detachment{}) || b.count(&b.closes) != 0 {
			t.Errorf("%+v, %d closed", after.Source, b.closes)
		}
		w.End() // nothing

		// A detach that goes on from there ends as any other.
		if w, err = b.m.Withhold(time.Hour); err != nil {
			t.Fatal(err)
		}
		b.letGo(t, time.Hour)
		w.End()
		if b.shown().Status != health.SourceDetached || b.stands() != health.CauseReleased {
			t.Errorf("source %+v, %s stands", b.shown(), b.stands())
		}
		if w, err = b.m.Withhold(time.Hour); err != nil {
			t.Fatal(err)
		}
		w.End()
		if b.shown().Status != health.SourceDetached || b.stands() != health.CauseReleased {
			t.Errorf("given back by another: source %+v, %s stands", b.shown(), b.stands())
		}
		if back := b.takeBack(t); back.Status != health.SourceUp || b.stands() != "" {
			t.Errorf("%+v", back)
		}
	})
}

// A GPU that was not seen since an earlier detach stays withheld, and no other.
func TestGiveBackTheUnseen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		b.withTwo()
		b.letGo(t, time.Hour)
		b.set(func(s *script) { s.reading.Samples[0].Presence = health.PresenceUnknown })
		b.m.requestAttach("test")
		pass(5 * time.Second)
		b.set(func(s *script) { s.reading.Samples[1].Presence = health.PresenceUnknown })
		pass(5 * time.Second)
		for range 2 {
			if d := b.out.Load().Devices; !d[0].Verdict.Has(health.CauseReleased) || d[1].Verdict.Has(health.CauseReleased) {
				t.Fatalf("%+v", d)
			}
			w, err := b.m.Withhold(time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			pass(2 * time.Second)
			w.End()
		}
	})
}

// A detach that is ended before the session was closed gives back what a Withhold before it has withheld.
func TestWithheldDetachExpiresWhileStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		synctest.Wait()
		hang := make(chan struct{})
		defer close(hang)
		b.set(func(s *script) { s.hang = hang })
		pass(time.Minute)
		w, err := b.m.Withhold(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.m.Detach(t.Context(), time.Minute); err == nil {
			t.Error("let go of beside a call that hangs")
		}
		if w.End(); b.stands() != "" {
			t.Errorf("%s stands", b.stands())
		}
	})
}

// What another kind of source has shown is set aside, in the process too, and comes back with it.
func TestAnotherSourceAndBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := monitor(t)
		defer b.stop()
		real := &Source{SourceID: health.SourceID{Kind: "dcgm", Inventory: "dcgm "}, Open: b.Open, StallAfter: 10 * time.Second}
		b.source.Store(real)
		pass(time.Second)
		b.show(healthtest.Present(healthtest.XIDs(48)))
		pass(5 * time.Second)
		sim := newScript()
		sim.reading = health.Reading{Devices: []health.Device{healthtest.GPU1}, Samples: []health.Sample{{Device: healthtest.GPU1.ID, Presence: health.Present}}}
		b.source.Store(&Source{SourceID: health.SourceID{Kind: "sim", Inventory: "sim x", Simulated: true}, Open: sim.Open, StallAfter: 10 * time.Second})
		pass(5 * time.Second)
		if d := b.out.Load().Devices; len(d) != 1 || d[0].Device.ID != healthtest.GPU1.ID {
			t.Fatalf("%+v", d)
		}
		b.source.Store(real)
		pass(5 * time.Second)
		if d := b.out.Load().Devices; len(d) != 1 || b.stands() != "xid-48" {
			t.Errorf("%+v", d)
		}
	})
}

// monitorOf is a monitor that has published these devices and does not run.
func monitorOf(c health.Config, known []health.DeviceState) *Monitor {
	config, out := new(health.Latest[health.Config]), new(health.Latest[health.Snapshot])
	config.Store(&c)
	m := New(config, new(health.Latest[Source]), out, zap.NewNop())
	m.Restore(statefile.Restored{Devices: known, Missed: true})
	return m
}

// A state file in whatever state gives the monitor nothing that it fails on.
func FuzzRestore(f *testing.F) {
	f.Add([]byte(`{"format":"gpu-node-agent findings","version":1,"source":"sim","devices":[{"id":"gpu-node-agent:extension","model":` +
		`"{\"minor\":2,\"history\":true,\"detach\":{\"until\":\"2000-01-01T00:00:01Z\",\"forNanoseconds\":9}}"},{"id":"a"}]}`))
	f.Fuzz(func(_ *testing.T, text []byte) {
		var saved statefile.Saved
		if json.Unmarshal(text, &saved) != nil {
			return
		}
		m := monitorOf(health.DefaultConfig(), nil)
		m.Restore(saved.Restore("boot", health.SourceID{Kind: "sim"}, healthtest.Epoch))
		m.requestAttach("test") // ends its timer
	})
}
