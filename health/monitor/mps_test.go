package monitor

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func (h *harness) setMPS(cause string) {
	h.mps.Store(&health.MPSState{Daemons: map[health.DeviceID]*health.MPSDaemon{"GPU-0": {
		Ready: cause == "", Cause: cause,
		Reason: "it exited",
	}}})
}

// The state of an MPS daemon counts at once, whatever the source does, but no device is published before the first poll.
func TestMPSFollowed(t *testing.T) {
	for _, test := range []struct {
		name   string
		before func(h *harness) (after func())
		status health.SourceStatus
	}{
		{"source up", func(*harness) func() { return func() {} }, health.SourceUp},
		{"source stalled", func(h *harness) func() { return h.hangPolls() }, health.SourceStalled},
		{"source down", func(h *harness) func() {
			h.set(func(s *fakeSource) { s.pollErr, s.openErr = errors.New("engine died"), errors.New("no engine") })
			return func() {}
		}, health.SourceDown},
	} {
		t.Run(test.name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				advance(time.Second)
				after := test.before(h)
				defer after()
				advance(20 * time.Second)
				h.setMPS(health.CauseMPSDown)
				advance(time.Millisecond)
				h.wantCauses(t, "daemon down", test.status, "mps-down")
				if d := h.out.Load().Devices[0].MPS; d == nil || d.Reason != "it exited" {
					t.Errorf("%+v", d)
				}
				h.setMPS("")
				advance(time.Millisecond)
				h.wantCauses(t, "daemon back", test.status, "")
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(zap.NewNop())
		resume := h.hangPolls()
		h.start(t)
		defer func() { resume(); h.stop() }()
		h.setMPS(health.CauseMPSDown)
		advance(time.Millisecond)
		if s := h.out.Load(); len(s.Devices) > 0 {
			t.Errorf("published before the first poll: %+v", s.Devices)
		}
	})
}

// Source.Release runs once the companions have ended, and a detach is complete when it has returned. It also runs if the detach
// began in an earlier process.
func TestDetachReleases(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		ended, released, calls := make(chan struct{}), make(chan struct{}), 0
		src := h.fakeSource.source(health.SourceID{})
		src.Beside = []func(context.Context){func(ctx context.Context) { <-ctx.Done(); <-ended }}
		src.Release = func(context.Context) { calls++; <-released }
		h.source.Store(src)
		advance(time.Second)
		go func() { _, _ = h.m.Detach(t.Context(), time.Hour) }()
		advance(time.Second)
		if calls != 0 {
			t.Error("released before the companions ended")
		}
		close(ended)
		advance(time.Second)
		if calls != 1 || h.status().Status == health.SourceDetached {
			t.Errorf("%d calls, source %v before Release returned", calls, h.status().Status)
		}
		close(released)
		advance(time.Second)
		if calls != 1 || h.status().Status != health.SourceDetached {
			t.Errorf("%d calls, source %v after Release returned", calls, h.status().Status)
		}
	})
}
