package agent

import (
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestCountGPUs(t *testing.T) {
	gpu := func(id health.DeviceID, p health.Presence) health.DeviceState {
		return health.DeviceState{Device: health.Device{ID: id}, Sample: health.Sample{Presence: p}}
	}
	mig := health.DeviceState{
		Device: health.Device{ID: "MIG-1", Kind: health.KindMIG, Parent: "GPU-1"},
		Sample: health.Sample{Presence: health.Lost},
	}
	for name, c := range map[string]struct {
		source        health.SourceStatus
		devices       []health.DeviceState
		gpus, reached int
		known         bool
	}{
		"present":     {health.SourceUp, []health.DeviceState{gpu("GPU-0", health.Present), gpu("GPU-1", health.Present), mig}, 2, 2, true},
		"one lost":    {health.SourceUp, []health.DeviceState{gpu("GPU-0", health.Present), gpu("GPU-1", health.Lost)}, 2, 1, true},
		"one missing": {health.SourceUp, []health.DeviceState{gpu("GPU-0", health.Present), gpu("GPU-1", health.Missing)}, 2, 1, true},
		"one is unknown": {
			health.SourceUp,
			[]health.DeviceState{gpu("GPU-0", health.Present), gpu("GPU-1", health.PresenceUnknown)},
			2, 1,
			false,
		},
		"source down":        {health.SourceDown, []health.DeviceState{gpu("GPU-0", health.Present)}, 1, 1, false},
		"driver detached":    {health.SourceDetached, []health.DeviceState{gpu("GPU-0", health.Present)}, 1, 1, false},
		"a node without GPU": {health.SourceUp, nil, 0, 0, true},
	} {
		gpus, reached, known := countGPUs(&health.Snapshot{Source: health.Source{Status: c.source}, Devices: c.devices})
		if gpus != c.gpus || reached != c.reached || known != c.known {
			t.Errorf("%s: %d GPUs, %d reached, known %v; want %d, %d, %v", name, gpus, reached, known, c.gpus, c.reached, c.known)
		}
	}
}

func TestGPUsOf(t *testing.T) {
	snap := &health.Snapshot{Devices: []health.DeviceState{
		{Device: health.Device{ID: "GPU-0"}},
		{Device: health.Device{ID: "GPU-1"}},
		{Device: health.Device{ID: "MIG-a", Kind: health.KindMIG, Parent: "GPU-1"}},
		{Device: health.Device{ID: "MIG-b", Kind: health.KindMIG, Parent: "GPU-1"}},
	}}
	for want, devices := range map[int][]health.DeviceID{
		0: {"GPU-removed"}, 1: {"MIG-a", "MIG-b", "GPU-1"}, 2: {"GPU-0", "GPU-0", "MIG-b"},
	} {
		if got := gpusOf(snap, devices); got != want {
			t.Errorf("%v: %d GPUs, want %d", devices, got, want)
		}
	}
	if got := gpusOf(snap, nil); got != 0 {
		t.Errorf("none: %d GPUs", got)
	}
}
