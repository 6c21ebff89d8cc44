package judge

import (
	"slices"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// Of findings with equal severity, the one with the strongest action is first, whichever began first.
func TestStrongestActionIsFirst(t *testing.T) {
	devices := judge(nil, 0, samples{"GPU-0": present(xids(48))}, gpu0, mig0)
	devices = judge(devices, 5, samples{"GPU-0": present(value(health.FieldRemapFailed, 1), value(health.FieldRemapPending, 1))}, gpu0, mig0)
	for _, d := range devices {
		if got := d.Verdict.Causes(); !slices.Equal(got, []string{health.CauseRemapFailed, "xid-48", health.CauseRemapPending}) ||
			d.Verdict.Findings[0].Action != health.ActionReplaceGPU {
			t.Errorf("%s: %v", d.Device.ID, got)
		}
	}
}

// XID 79 and the loss of its GPU give the same advice. A finding that only a reboot ends, and a finding about the driver, name no reset.
func TestRebootAdvice(t *testing.T) {
	const both = "drain and reboot the node; a reset that brings the GPU back clears it too"
	devices := judge(nil, 0, nil, gpu0, gpu1)
	devices = judge(devices, 1, samples{
		"GPU-0": func() health.Sample { s := blank(health.Lost); xids(79)(&s); return s }(),
		"GPU-1": present(xids(151), value(health.FieldRecoveryAction, 2)),
	}, gpu0, gpu1)
	for i, want := range []string{both, health.ActionRebootNode.Advice()} {
		for _, f := range devices[i].Verdict.Findings {
			if got := f.Advice(); got != want {
				t.Errorf("%s of GPU %d: %q, want %q", f.Cause, i, got, want)
			}
		}
	}
	if got := catalog.LookupXID(79).Advice(); got != both {
		t.Errorf("XID 79: %q", got)
	}
}
