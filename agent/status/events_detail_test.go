package status

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// A missing GPU whose index another one has is named by its UUID.
func TestEventOfGPUWithoutIndex(t *testing.T) {
	k := testInputs()
	device := health.DeviceState{Device: health.Device{ID: "GPU-missing", Index: -1}, Verdict: health.Verdict{
		State: health.Unhealthy, Findings: []health.Finding{{Cause: "missing", State: health.Unhealthy, Reason: "it is missing"}},
	}}
	k.events = eventsBetween(k.Snapshot, &health.Snapshot{
		Source: k.Snapshot.Source, At: k.At,
		Devices: append(slices.Clone(k.Snapshot.Devices), device),
	})
	agenttest.MustContain(t, newNode(k).Table(false, terminal.Output{}), "  GPU-missing  unhealthy: missing: it is missing")
	agenttest.MustContain(t, pageOf(t, k), "<td>GPU-missing</td>")
}

// The kernel log may name the process after the event of the XID was stored.
func TestLateDetailCompletesEvent(t *testing.T) {
	device := health.Device{ID: "GPU-0"}
	at := func(n uint64, d health.XIDDetail) *health.Snapshot {
		return &health.Snapshot{Devices: []health.DeviceState{{
			Device: device, XIDs: health.Ledger{Codes: map[int]health.Tally{31: {Total: n, Newest: health.XID{Code: 31, Detail: d}}}},
		}}}
	}
	one, detailed, two := at(1, health.XIDDetail{}), at(1, health.XIDDetail{Process: "python3", PID: 7194}), at(2, health.XIDDetail{})
	stored := prependEvents(nil, eventsBetween(at(0, health.XIDDetail{}), one))
	before := stored[0].Text
	completed := prependEvents(stored, eventsBetween(one, detailed))
	if len(completed) != 1 || !strings.Contains(completed[0].Text, "process python3 (pid 7194)") || stored[0].Text != before {
		t.Errorf("%+v from %+v, want one event with the process, and the stored ones unchanged", completed, stored)
	}
	if again := prependEvents(completed, eventsBetween(detailed, two)); len(again) != 2 || strings.Contains(again[0].Text, "python3") {
		t.Errorf("%+v, want another event without the process", again)
	}
	if lost := prependEvents(nil, eventsBetween(one, detailed)); len(lost) != 1 {
		t.Errorf("%+v, want an event although the XID's is no longer stored", lost)
	}
}
