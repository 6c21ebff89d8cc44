package healthtest

import (
	"fmt"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// NodeDevices returns the healthy devices of a node with four GPUs. The last one is in MIG mode and has two MIG devices.
func NodeDevices() (devices []health.DeviceState) {
	const gib = 1 << 30
	add := func(d health.Device) {
		devices = append(devices, health.DeviceState{
			Device: d, Sample: health.Sample{Device: d.ID, Presence: health.Present}, Verdict: health.Verdict{State: health.Healthy},
		})
	}
	for i := range 4 {
		add(health.Device{
			ID: health.DeviceID(fmt.Sprintf("GPU-%d", i)), Kind: health.KindGPU, Index: i, Minor: i, Memory: 80 * gib,
			Model: "NVIDIA H100 80GB HBM3",
			PCI:   fmt.Sprintf("00000000:1%d:00.0", i), MIGMode: i == 3, GI: -1, CI: -1, MIGIndex: -1,
		})
	}
	for i := range 2 {
		add(health.Device{
			ID: health.DeviceID(fmt.Sprintf("MIG-%d", i)), Parent: "GPU-3", Kind: health.KindMIG, Index: 3, Minor: 3, Memory: 10 * gib,
			Model: "NVIDIA H100 80GB HBM3",
			PCI:   "00000000:13:00.0", Profile: "1g.10gb", GI: 7 + i, CI: 0, MIGIndex: i,
			Properties: &health.Properties{MIG: &health.MIGProperties{ProfileID: 19, PlacementStart: i, MemorySlices: 1}},
		})
	}
	return devices
}
