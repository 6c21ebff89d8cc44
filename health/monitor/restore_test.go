package monitor

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// restart stops the monitor and returns one that continues from the saved state after a while. It does not run yet.
func (h *harness) restart(t *testing.T, bootID string, after time.Duration) *harness {
	t.Helper()
	text, err := json.Marshal(statefile.FromSnapshot(h.out.Load(), "boot"))
	if err != nil {
		t.Fatal(err)
	}
	var saved statefile.Saved
	if err := json.Unmarshal(text, &saved); err != nil {
		t.Fatal(err)
	}
	h.stop()
	advance(after)
	next := newHarness(zap.NewNop())
	next.reading = h.reading
	src := *h.source.Load()
	src.Open = next.Open
	if src.Attach != nil {
		src.Attach = next.Attach
	}
	next.source.Store(&src)
	next.m.Restore(saved.Restore(bootID, src.SourceID, time.Now()))
	return next
}

func TestRestartDuringDetach(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.useHostEngine()
		h.reportTwo()
		first := h.detach(t, 10*time.Minute)
		advance(time.Minute)
		polledAt := h.out.Load().At

		// The devices are published as withheld before Run.
		next := h.restart(t, "boot", time.Minute)
		next.wantCauses(t, "before Run", health.SourceDetached, health.CauseReleased, "row-remap-failed,driver-released")
		if s := next.out.Load(); !s.At.Equal(polledAt) || !s.Source.Detachment.Until.Equal(first.Until) ||
			s.Devices[1].Device.ID != healthtest.GPU1.ID {
			t.Fatalf("%+v", s)
		}
		next.start(t)
		defer next.stop()
		advance(7 * time.Minute)
		if next.count(&next.opens) != 0 || next.status().Status != health.SourceDetached {
			t.Fatalf("%d opens, source %+v", next.opens, next.status())
		}
		if again := next.detach(t, 10*time.Minute); !again.Already || !again.Since.Equal(first.Since) || again.EngineUnasked {
			t.Errorf("second detach: %+v, first %+v", again, first)
		}
		if r := next.attach(t); r.Already || r.Status != health.SourceUp || next.count(&next.attaches) != 1 {
			t.Errorf("%+v, %d attaches", r, next.attaches)
		}
		next.wantCauses(t, "attached", health.SourceUp, "", health.CauseRemapFailed)
		if d := statefile.FromSnapshot(next.out.Load(), "boot").Detachment; d != (health.Detachment{}) {
			t.Errorf("saved %+v", d)
		}
	})
}

// A release that takes long after a restart does not hide the detach for good.
func TestRestartReleasesSlowly(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		advance(time.Second)
		h.detach(t, time.Hour)
		next := h.restart(t, "boot", 0)
		src, released := *next.source.Load(), make(chan struct{})
		src.Release = func(context.Context) { <-released }
		next.source.Store(&src)
		next.start(t)
		defer next.stop()
		advance(time.Minute)
		next.wantCauses(t, "releasing", health.SourceStalled, health.CauseReleased)
		close(released)
		synctest.Wait()
		next.wantCauses(t, "released", health.SourceDetached, health.CauseReleased)
	})
}

// A restart that ends a detach asks the host engine to attach, because it may still be detached. A reboot has restarted it.
func TestRestartEndsDetach(t *testing.T) {
	for name, c := range map[string]struct {
		boot     string
		after    time.Duration
		attaches int
	}{
		"time limit reached":         {"boot", 11 * time.Minute, 1},
		"another boot":               {"another", time.Minute, 0},
		"time limit reached at last": {"boot", 9 * time.Minute, 1},
	} {
		t.Run(name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				h.useHostEngine()
				h.detach(t, 10*time.Minute)
				next := h.restart(t, c.boot, c.after)
				next.start(t)
				defer next.stop()
				advance(2 * time.Minute)
				next.wantCauses(t, "after the restart", health.SourceUp, "")
				if n := next.count(&next.attaches); n != c.attaches {
					t.Errorf("%d attaches, want %d", n, c.attaches)
				}
			})
		})
	}
}

// If a process ends before the host engine answers an attach, the next process asks, and the one after that does not.
func TestRestartDuringAttach(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.useHostEngine()
		h.detach(t, time.Hour)
		h.set(func(s *fakeSource) { s.attachUnanswered = true })
		h.m.requestAttach("test")
		advance(time.Second)
		if h.count(&h.attaches) != 1 {
			t.Fatalf("%d attaches", h.attaches)
		}
		for process, attaches := range []int{1, 0} {
			h = h.restart(t, "boot", 0)
			h.start(t)
			defer h.stop()
			h.wantCauses(t, "after the restart", health.SourceUp, "")
			if n := h.count(&h.attaches); n != attaches {
				t.Errorf("process %d: %d attaches, want %d", process, n, attaches)
			}
		}
	})
}

// The state file holds a detach from the moment when the devices are withheld, and that no host engine was asked.
func TestRestartWhileWithheld(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.useHostEngine()
		h.withhold(t)
		next := h.restart(t, "boot", time.Minute)
		next.start(t)
		defer next.stop()
		next.wantCauses(t, "after the restart", health.SourceDetached, health.CauseReleased)
		if again := next.detach(t, time.Hour); !again.EngineUnasked || next.count(&next.opens) != 0 {
			t.Errorf("%+v, %d opens", again, next.opens)
		}
	})
}

// The devices of another kind of source are set aside and return with it.
func TestSourceReturnsWithItsDevices(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		real := h.fakeSource.source(health.SourceID{Kind: "dcgm", Inventory: "dcgm "})
		h.source.Store(real)
		advance(time.Second)
		h.reportGPU0(healthtest.Present(healthtest.XIDs(48)))
		advance(5 * time.Second)
		sim := newFakeSource()
		sim.reading.Devices[0], sim.reading.Samples[0].Device = healthtest.GPU1, healthtest.GPU1.ID
		h.source.Store(sim.source(health.SourceID{Kind: "sim", Inventory: "sim x", Simulated: true}))
		advance(5 * time.Second)
		if d := h.out.Load().Devices; len(d) != 1 || d[0].Device.ID != healthtest.GPU1.ID {
			t.Fatalf("%+v", d)
		}
		h.source.Store(real)
		advance(5 * time.Second)
		h.wantCauses(t, "with the first source", health.SourceUp, "xid-48")
	})
}

// restored returns a monitor that has devices and does not run.
func restored(c judge.Config, r statefile.Restored) *Monitor {
	config := new(health.Latest[judge.Config])
	config.Store(&c)
	m := New(config, new(health.Latest[Source]), new(health.Latest[health.Snapshot]), zap.NewNop())
	m.Restore(r)
	return m
}

func FuzzRestore(f *testing.F) {
	f.Add([]byte(`{"format":"gpu-node-agent state","version":1,"source":"sim","history":true,"detach":{"until":"2000-01-01T00:00:01Z",` +
		`"forNanoseconds":9},"devices":[{"id":"a"}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var saved statefile.Saved
		if json.Unmarshal(text, &saved) != nil {
			return
		}
		r := saved.Restore("boot", health.SourceID{Kind: "sim"}, healthtest.Epoch)
		m := restored(judge.DefaultConfig(), r)
		if requested := m.detach.detachRequested(); requested != r.Detachment.InForce() {
			t.Errorf("detached: %t, saved %+v", requested, r.Detachment)
		}
		m.requestAttach("test") // stops the timer
		if m.detach.detachRequested() {
			t.Errorf("attach has no effect: %+v", m.detach)
		}
	})
}
