package plugin

import (
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// Sharing is how a device is shared.
type Sharing string

// The kinds of sharing, named as in the configuration.
const (
	SharingNone        Sharing = ""
	SharingTimeSlicing Sharing = "timeSlicing"
	SharingMPS         Sharing = "mps"
	SharingMemory      Sharing = "memory"
)

// ShareUnits is how the units of a shared device are used: replicas, MPS shares, or units of memory.
type ShareUnits struct {
	Resource string
	Device   health.DeviceID
	Sharing  Sharing
	Unit     uint64 // bytes of a unit; 0 unless Sharing is SharingMemory

	Total   int // offered to the kubelet
	Free    int // of these, held by no container; -1 if the holders are unknown
	Largest int // the largest request of a container that the device can serve now; -1 if the holders are unknown

	Enforcement memlimits.Enforcement // of memory, for the next container; "" unless Sharing is SharingMemory
	Reason      string                // why Enforcement is not the configured one; empty if it is
}

// Shares returns the units of each shared device, by resource, then by index. It may be called from any goroutine.
func (p *Plugin) Shares() []ShareUnits { return nil }

// MPS returns what MPS daemons must run; empty until the devices are known.
func (p *Plugin) MPS() *health.Latest[mps.Desired] { return &p.mps }

// SetMemoryCapabilities sets where the plugin finds what the node can enforce. Call it before Run. Without it, nothing is enforced.
func (p *Plugin) SetMemoryCapabilities(*health.Latest[memlimits.Capabilities]) {}
