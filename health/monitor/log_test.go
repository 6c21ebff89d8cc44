package monitor

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// blockedWriter blocks until the channel is closed.
type blockedWriter chan struct{}

func (b blockedWriter) Write(p []byte) (int, error) {
	<-b
	return len(p), nil
}

// logger returns a logger that discards its output until block is called, and then blocks.
func (b blockedWriter) logger() (log *zap.Logger, block func()) {
	level := zap.NewAtomicLevelAt(zapcore.FatalLevel)
	encoder := zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig())
	return zap.New(zapcore.NewCore(encoder, zapcore.AddSync(b), level)), func() { level.SetLevel(zapcore.DebugLevel) }
}

// Every change is stored before it is logged, and logged outside the mutex: a log that blocks delays no verdict.
func TestMonitorStoresBeforeLogging(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*harness, blockedWriter)
		stored func(*health.Snapshot) bool
	}{
		"XID": {
			func(h *harness, _ blockedWriter) {
				h.reportXID(79)
				h.wake <- struct{}{}
			},
			func(s *health.Snapshot) bool { return s.Devices[0].Verdict.Has("xid-79") },
		},
		"source": {
			func(h *harness, _ blockedWriter) {
				h.set(func(s *fakeSource) { s.pollErr = errors.New("connection lost") })
				h.wake <- struct{}{}
			},
			func(s *health.Snapshot) bool { return s.Source.Status == health.SourceDown },
		},
		"config": {
			func(h *harness, blocked blockedWriter) {
				h.set(func(s *fakeSource) { s.hang = blocked }) // so that no reading decides
				h.cordon("0")
			},
			func(s *health.Snapshot) bool { return s.Devices[0].Verdict.Has(health.CauseCordoned) },
		},
		"detach": {
			func(h *harness, _ blockedWriter) { go func() { _, _ = h.m.Detach(t.Context(), time.Hour) }() },
			func(s *health.Snapshot) bool { return s.Devices[0].Verdict.Has(health.CauseReleased) },
		},
		"clear": {
			func(h *harness, _ blockedWriter) { go func() { _, _ = h.m.Clear("GPU-0", "xid-48") }() },
			func(s *health.Snapshot) bool { return !s.Devices[0].Verdict.Has("xid-48") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				blocked := make(blockedWriter)
				log, block := blocked.logger()
				h := newHarness(log)
				h.start(t)
				h.reportXID(48)
				h.wake <- struct{}{}
				synctest.Wait()
				block()
				c.change(h, blocked)
				synctest.Wait()
				stored := c.stored(h.out.Load())
				unlocked := stored && h.m.mu.TryLock()
				if unlocked {
					h.m.mu.Unlock()
				}
				close(blocked)
				h.stop()
				if !stored || !unlocked {
					t.Errorf("while the log blocks: stored %v, mutex unlocked %v", stored, unlocked)
				}
			})
		})
	}
}

func TestMonitorLogsTransitionsOnly(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		advance(time.Minute)
		if n := h.logs.Len(); n != 2 { // source up, device found
			t.Fatalf("%d lines for an idle minute: %v", n, h.logs.All())
		}
		h.reportXID(79)
		h.wake <- struct{}{}
		advance(time.Minute)
		lines := h.logs.FilterMessage("device state").All()
		if len(lines) != 1 || h.logs.FilterMessage("XID").Len() != 1 {
			t.Fatalf("lines %v", h.logs.All())
		}
		fields := lines[0].ContextMap()
		for key, want := range map[string]any{"device": "GPU-0", "state": "unhealthy", "was": "healthy", "cause": "xid-79"} {
			if fields[key] != want {
				t.Errorf("%s is %v, want %v", key, fields[key], want)
			}
		}
	})
}
