package monitor

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
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

// Whether an entry matches a device is known after the first reading, and is logged once.
func TestUnmatchedCordonFromStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zapcore.InfoLevel)
		h := newHarness(zap.New(core))
		h.cordon("GPU-x")
		h.set(func(s *fakeSource) { s.openErr = errors.New("refused") })
		h.start(t)
		defer h.stop()
		advance(time.Minute)
		h.set(func(s *fakeSource) { s.openErr = nil })
		advance(time.Minute)
		if n := logs.FilterMessage("entries match no device of this node").Len(); n != 1 {
			t.Errorf("logged %d times, want once", n)
		}
	})
}

// The log of a change has what the change is about, and of MIG devices their number and profiles.
func TestLogChanges(t *testing.T) {
	profile := func(d health.Device, name string) health.Device { d.Profile = name; return d }
	gpu, mig0, mig1 := healthtest.GPU0, profile(healthtest.MIG0, "1g.10gb"), profile(healthtest.MIG1, "2g.20gb")
	detail := health.XIDDetail{Text: "the driver's message"}
	reported := healthtest.Present(healthtest.XIDs(48), healthtest.Value(health.FieldRemapPending, 1))
	reported.XIDs[0].Detail = detail
	found := healthtest.Judge(judge.DefaultConfig(), nil, 0, nil, nil, gpu, mig0, mig1)
	faulty := healthtest.Judge(judge.DefaultConfig(), found, 1, nil, map[health.DeviceID]health.Sample{"GPU-0": reported}, gpu, mig0, mig1)
	one := healthtest.Judge(judge.DefaultConfig(), found, 1, nil, map[health.DeviceID]health.Sample{
		"GPU-0": healthtest.Present(healthtest.Value(health.FieldRemapPending, 1)),
	}, gpu, mig0, mig1)
	core, logs := observer.New(zapcore.InfoLevel)
	for _, step := range [][2][]health.DeviceState{{nil, found}, {found, faulty}, {faulty, found}, {one, found}, {found, found[:1]}} {
		logChanges(zap.New(core), step[0], step[1])
	}
	var got []string
	for _, e := range logs.All() {
		f := e.ContextMap()
		got = append(got, fmt.Sprintf("%s %v %v: %v", e.Message, f["device"], f["migDevices"], map[string]any{
			"device found": f["profiles"], "XID": f["message"], "device state": []any{f["state"], f["cause"], f["also"], f["cleared"]},
			"device removed": nil,
		}[e.Message]))
	}
	want := []string{
		"device found GPU-0 2: [1g.10gb 2g.20gb]",
		"XID GPU-0 <nil>: the driver's message",
		"device state GPU-0 2: [unhealthy xid-48 [row-remap-pending] <nil>]",
		"device state GPU-0 2: [healthy <nil> <nil> [xid-48 row-remap-pending]]",
		"device state GPU-0 2: [healthy <nil> <nil> [row-remap-pending]]",
		"device removed GPU-0 2: <nil>",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}
