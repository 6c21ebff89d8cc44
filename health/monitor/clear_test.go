package monitor

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
)

var nvlinkError = health.Incident{System: "nvlink", Code: 71, Severity: health.SeverityFail, Message: "errors"} // NVLINK_ERROR_CRITICAL

const causeNVLinkError = "dcgm-nvlink-error-critical"

// Clear keeps what the latest reading shows: the kubelet would allocate the GPU before the next poll.
func TestClearKeepsMeasuredFindings(t *testing.T) {
	for name, c := range map[string]struct {
		sample health.Sample
		cause  string
	}{
		"lost":            {healthtest.Blank(health.Lost), health.CauseLost},
		"inaccessible":    {healthtest.Blank(health.Inaccessible), health.CauseInaccessible},
		"detached":        {healthtest.Blank(health.Detached), health.CauseDetached},
		"missing":         {healthtest.Blank(health.Missing), health.CauseMissing},
		"remap failed":    {healthtest.Present(healthtest.Value(health.FieldRemapFailed, 1)), health.CauseRemapFailed},
		"recovery action": {healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 2)), health.CauseRecoveryAction},
		"hot":             {healthtest.Present(healthtest.Value(health.FieldGPUTemp, 99)), health.CauseTemperature},
		"incident":        {healthtest.Checked(nvlinkError), causeNVLinkError},
	} {
		t.Run(name, func(t *testing.T) {
			runTest(t, func(t *testing.T, h *harness) {
				sample := c.sample
				sample.XIDs = []health.XID{{Code: 48}}
				h.reportGPU0(sample)
				advance(health.OutageDelay + 3*time.Second)
				before := h.verdict()
				measured := slices.Index(before.Causes(), c.cause)
				if measured < 0 || !before.Has("xid-48") {
					t.Fatalf("causes %v", before.Causes())
				}
				if _, err := h.m.Clear("GPU-0", c.cause); err == nil {
					t.Error("the measured finding was cleared")
				}
				causes, err := h.m.Clear("GPU-0", "")
				if err != nil || !slices.Equal(causes, []string{"xid-48"}) || h.causes() != c.cause {
					t.Fatalf("cleared %v, %v; causes %s", causes, err, h.causes())
				}
				if got, want := h.verdict().Findings[0], before.Findings[measured]; got.Since != want.Since || got.State != want.State {
					t.Errorf("%+v, want %+v", got, want)
				}
				// The latest reading of a stalled source is old, so the operator may clear it.
				defer h.hangPolls()()
				advance(time.Minute)
				if causes, err := h.m.Clear("GPU-0", c.cause); err != nil || !slices.Equal(causes, []string{c.cause}) {
					t.Errorf("stalled: %v, %v", causes, err)
				}
			})
		})
	}
}

// A finding that no reading shows any more may be cleared before it ages out.
func TestClearFindingThatAges(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Present(healthtest.Value(health.FieldRemapFailed, 1)))
		advance(2 * time.Second)
		h.reportGPU0(healthtest.Present())
		advance(2 * time.Second)
		h.wantCauses(t, "before", health.SourceUp, health.CauseRemapFailed)
		if causes, err := h.m.Clear("GPU-0", ""); err != nil || len(causes) != 1 || h.causes() != "" {
			t.Errorf("%v, %v; causes %s", causes, err, h.causes())
		}
	})
}

// After Clear a fault must be confirmed like a new one.
func TestClearDropsUnconfirmedFault(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Checked(nvlinkError))
		advance(time.Second)
		h.wantCauses(t, "after one check", health.SourceUp, "")
		if _, err := h.m.Clear("GPU-0", ""); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"", causeNVLinkError} {
			advance(time.Second)
			h.wantCauses(t, "after Clear", health.SourceUp, want)
		}
	})
}

// A recovery action after Clear does not escalate an XID from before.
func TestClearEndsEscalation(t *testing.T) {
	runTest(t, func(t *testing.T, h *harness) {
		h.reportGPU0(healthtest.Present(healthtest.XIDs(109)))
		advance(time.Second)
		if _, err := h.m.Clear("GPU-0", ""); err != nil {
			t.Fatal(err)
		}
		h.reportGPU0(healthtest.Present(healthtest.Value(health.FieldRecoveryAction, 1)))
		advance(time.Second)
		h.wantCauses(t, "after Clear", health.SourceUp, health.CauseRecoveryAction)
	})
}

// A decision ends with the finding that it depends on, without a poll.
func TestClearEndsIsolation(t *testing.T) {
	c := health.DefaultConfig()
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
