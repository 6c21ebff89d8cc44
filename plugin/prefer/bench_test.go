package prefer

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// shuffled returns the IDs as the kubelet sends them: in random order, as strings of their own.
func shuffled(devices []Device) []string {
	ids := all(devices)
	for i, id := range ids {
		ids[i] = strings.Clone(id)
	}
	rand.New(rand.NewPCG(7, 8)).Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

// withUUIDs gives the devices IDs as long as real ones.
func withUUIDs(devices []Device) []Device {
	uuid := func(id health.DeviceID) health.DeviceID {
		if id == "" {
			return ""
		}
		kind, number, _ := strings.Cut(string(id), "-")
		sum := sha256.Sum256([]byte(number))
		return health.DeviceID(fmt.Sprintf("%s-%x-%x-%x-%x-%x", kind, sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16]))
	}
	out := make([]Device, len(devices))
	for n, d := range devices {
		state := *d.State
		state.Device.ID, state.Device.Parent = uuid(state.Device.ID), uuid(state.Device.Parent)
		state.Device.Links = slices.Clone(state.Device.Links)
		for i := range state.Device.Links {
			state.Device.Links[i].Peer = uuid(state.Device.Links[i].Peer)
		}
		out[n] = Device{State: &state, Units: 1}
	}
	return out
}

// BenchmarkChoose asks what real machines ask, then what none does. Each takes less than a millisecond.
func BenchmarkChoose(b *testing.B) {
	nvswitch := func(n int) []Device { return withUUIDs(hgx(n)) }
	mig := func(n int) []Device { return withUUIDs(migs(n)) }
	mixed := func(n int) []Device { // healthy, and no two GPUs connected alike
		devices := randomGPUs(rand.New(rand.NewPCG(7, 8)), n)
		for _, d := range devices {
			d.State.Verdict.State = health.Healthy
		}
		return withUUIDs(devices)
	}
	alone := func(devices []Device) []Device {
		markAlone(devices, ^uint32(0))
		return devices
	}
	const half = -1 // of the devices
	for _, c := range []struct {
		name           string
		devices        []Device
		required, size int
	}{
		{"8", nvswitch(8), 0, 4},
		{"16", nvswitch(16), 0, 8},
		{"16-mixed", mixed(16), 0, 8}, // the most sets to examine
		{"17", nvswitch(17), 0, 8},    // the first size whose order decides
		{"32", nvswitch(32), 0, half},
		{"64", nvswitch(64), 0, half},
		{"128", nvswitch(128), 0, half},
		{"128-all-but-one", nvswitch(128), 0, 127},
		{"128-required-64", nvswitch(128), 64, 96},
		{"1000", nvswitch(1000), 0, half},
		{"8x10", replicas(nvswitch(8), 10), 0, 4},
		{"8x7MIG", mig(8), 0, 4},
		{"16x7x10", replicas(mig(16), 10), 0, 16},
		{"32x7x10", replicas(mig(32), 10), 0, 4},
		{"32x7x10-half", replicas(mig(32), 10), 0, half},
		{"32x7x10-required", replicas(mig(32), 10), 1000, half},
		{"128x7", mig(128), 0, half},
		{"8x1000", replicas(nvswitch(8), 1000), 0, 4},
		{"8x1000-half", replicas(nvswitch(8), 1000), 0, half},
		{"8x1000-required", replicas(nvswitch(8), 1000), 3000, half},
		{"16x1000", replicas(nvswitch(16), 1000), 0, 4},
		{"8x78-alone", alone(replicas(nvswitch(8), 78)), 0, 10},
		{"8x625-alone", alone(replicas(nvswitch(8), 625)), 0, 10},
		{"8x625-alone-too-large", alone(replicas(nvswitch(8), 625)), 0, 1000},
	} {
		b.Run(c.name, func(b *testing.B) {
			var a Allocator
			available, size := shuffled(c.devices), c.size
			if size == half {
				size = len(available) / 2
			}
			b.ReportAllocs()
			for b.Loop() {
				a.Choose(c.devices, Request{Available: available, Required: available[:c.required], Size: size})
			}
		})
	}
}

func BenchmarkTopology16(b *testing.B) {
	devices := hgx(16)
	for b.Loop() {
		newTopology(devices)
	}
}
