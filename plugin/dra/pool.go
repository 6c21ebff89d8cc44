package dra

import (
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Pool is what a node publishes. It is immutable once published.
type Pool struct {
	Slices   []Slice
	ByName   map[string]health.DeviceID // by the name of a published device
	Warnings []string                   // devices or values that are left out, with the reason
}

// Slice is the part of a pool that is published as one ResourceSlice. A GPU and its MIG devices are in one slice, because they get their
// taints together.
type Slice struct {
	Devices []resourceapi.Device
}

// PoolInput is everything that a pool depends on.
type PoolInput struct {
	Config     *plugin.Config
	Snapshot   *health.Snapshot
	Properties map[health.DeviceID]*health.Properties // of devices that have none in the snapshot
	Names      map[health.DeviceID]string             // of devices that have been published before; a name never changes
	PCIeRoots  map[string]string                      // by PCI bus ID as the driver writes it
	// What the API server has. Without taints, unhealthy devices are not published; without shares, the memory of GPUs is not shared.
	NoTaints, NoShares bool
}

// BuildPool decides what is published. It is pure.
func BuildPool(in PoolInput) Pool { return Pool{} }
