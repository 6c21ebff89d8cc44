package monitor

import (
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

// Clear keeps what the latest reading shows while the source is up. The reading of a stalled source is old.
func TestClearMeasuredFinding(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Present(healthtest.Value(health.FieldRemapFailed, 1)))
		advance(time.Second)
		if causes, err := h.m.Clear("GPU-0", ""); err != nil || len(causes) != 0 || h.causes() != health.CauseRemapFailed {
			t.Errorf("up: cleared %v, %v; causes %s", causes, err, h.causes())
		}
		defer h.hangPolls()()
		advance(time.Minute)
		if causes, err := h.m.Clear("GPU-0", ""); err != nil || len(causes) != 1 || h.causes() != "" {
			t.Errorf("stalled: cleared %v, %v; causes %s", causes, err, h.causes())
		}
	})
}

// A decision ends with the finding that it depends on, without a poll.
func TestClearEndsIsolation(t *testing.T) {
	c := judge.DefaultConfig()
	c.IsolatePending = true
	samples := map[health.DeviceID]health.Sample{"GPU-0": healthtest.Present(healthtest.Value(health.FieldRemapPending, 1))}
	m := restored(c, statefile.Restored{
		Devices: healthtest.Judge(c, nil, 0, func(health.DeviceID) bool { return false }, samples, healthtest.GPU0), Missed: true,
	})
	if _, err := m.Clear("GPU-0", health.CauseRemapPending); err != nil {
		t.Fatal(err)
	}
	if v := m.out.Load().Devices[0].Verdict; len(v.Findings) != 0 {
		t.Errorf("causes %v", v.Causes())
	}
}
