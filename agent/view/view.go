// Package view is what the agent knows at one moment. Each scrape, probe and page takes it once and shows it.
package view

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// View is what the agent knows. It is not changed.
type View struct {
	At                time.Time
	Node              string // its name in Kubernetes
	Version, Revision string // of the agent

	// The configuration in force.
	Reload        Reload
	Notes         []string // on it
	PluginConfig  plugin.Config
	MaxAge        time.Duration          // of the snapshot of a source that is up
	StartupTaint  bool                   // the node may have node.startupTaint
	UnmatchedRefs []health.UnmatchedRefs // its device references that match no device; nil while the devices are unknown

	Snapshot  *health.Snapshot // nil before the first
	Lock      nodelock.State   // whether this agent may serve the node
	Plugin    plugin.Status
	DRA       dra.Status
	Claims    *dra.Claims // prepared; nil if unknown
	Holders   podresources.Holders
	Processes *processes.Snapshot // of the devices; nil if they are not measured
	Shares    []plugin.ShareUnits // of the shared devices
	Memory    *memlimits.Snapshot // of the containers on devices that are shared by memory; nil without such devices
	MPSErr    string              // why the MPS daemons are not as they should be

	CDIRuntime  *CDIRuntime    // nil unless pods get their devices by CDI names alone
	NodeDevices map[SeenBy]int // the number of GPUs as each of SeenBy sees them; one that is unknown is missing

	Kube            kube.Status
	NodeObject      kube.NodeStatus
	LabelsErr       string // why the file of node.labels.file is not as configured
	PodLabelsStatus PodLabels

	StateDir  statefile.Status
	StateLoss string // why an earlier process lost the state directory; empty if none did

	LogDropped         uint64 // entries of the log
	ConnectionsDropped uint64 // of the web server
}

// Reload is the result of the last reload of the configuration.
type Reload struct {
	OK  bool
	At  time.Time // of the last successful one
	Err string    // of the newest configuration, if it is not in force
}

// CDIRuntime is the container runtime of the node.
type CDIRuntime struct {
	Version string // empty if it is unknown
	Support string // see cdi.Support
}

// PodLabels is whether the labels of pods are exported, and whether the API server provides them.
type PodLabels struct{ Enabled, Up bool }

// SeenBy is who sees GPUs.
type SeenBy string

// The values of SeenBy.
const (
	SeenByPCI     SeenBy = "pci"     // on the PCI bus, without those for virtual machines
	SeenByDriver  SeenBy = "driver"  // reached by the driver
	SeenByKubelet SeenBy = "kubelet" // with a device that the kubelet counts; with DRA published
	OfferedToPods SeenBy = "offered" // with a device that new pods can get
)

// WaitsFor reports whether another agent serves the node instead of this one, and the name of its pod if that is known. With plugin.enabled
// false, this agent is a monitor beside the other.
func (v *View) WaitsFor() (holder string, waits bool) {
	if !v.PluginConfig.Enabled {
		return "", false
	}
	if v.Lock.Holder != nil {
		holder = v.Lock.Holder.Pod
	}
	return holder, v.Lock.Waits
}

// Unwritten returns the files that cannot be written, without which a restart would lose something.
func (v *View) Unwritten() []durable.Failure {
	all := []durable.Failure{v.StateDir.Failure(), v.DRA.Checkpoint}
	return slices.DeleteFunc(all, func(f durable.Failure) bool { return f.Err == "" })
}
