// Package memlimits finds out what limits the GPU memory of containers, sets the driver's limits where the agent has to, and
// reads them back.
package memlimits

import "github.com/gpu-node-agent/gpu-node-agent/health"

// Enforcement is what keeps a container within its GPU memory.
type Enforcement string

// The enforcements.
const (
	Driver Enforcement = "driver" // the driver's limit of the container's cgroup
	MPS    Enforcement = "mps"    // the limit of the container's MPS clients
	None   Enforcement = "none"   // the environment only tells the container its memory
)

// Capabilities are what this node can enforce. It is immutable once stored.
type Capabilities struct {
	// Driver is why the driver's limits cannot be used, by device: the driver or the cgroups are too old, or nobody would set the
	// limits; "" if they can. A device without an entry is not examined yet.
	Driver map[health.DeviceID]string
	Hook   bool // a hook of the container toolkit sets the limits by the container's environment; else the agent does
}

// Container is the GPU memory of a container on a device.
type Container struct {
	Namespace, Pod, Name string
	Device               health.DeviceID
	Resource             string // empty for a claim
	Units                int    // of the resource
	Limit                uint64 // bytes: what the container requested
	Enforcement          Enforcement
	Reason               string // why it is not the configured enforcement; empty if it is
	Used                 uint64 // bytes, by the driver's account of the cgroup
	HasUsed              bool
}

// Snapshot is the memory of all containers. It is immutable once stored.
type Snapshot struct {
	Containers []Container // by device, then by container
	Err        string      // why limits cannot be set or read; empty if they can or need not
}
