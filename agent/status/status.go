// Package status builds and shows the status of a node: JSON, the status page, the terminal table and recent events.
package status

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
)

// Node is the status of a node: the JSON document at /api/v1/snapshot, and the input of the page and of
// `gpu-node-agent status`.
//
// An unknown value has no key; it is never 0. Keys may be added, but none changes its meaning within v1.
type Node struct {
	Node     string         `json:"node"`
	Version  string         `json:"version"`
	Revision string         `json:"revision,omitempty"`
	Time     time.Time      `json:"time"`     // of this response
	Ready    bool           `json:"ready"`    // as /readyz
	NotReady []string       `json:"notReady"` // why not; Problems has each too
	Problems []view.Problem `json:"problems"` // why it does not do its whole job, and what an operator should correct; the worst level first
	Config   Config         `json:"config"`
	Bindings []Binding      `json:"bindings"` // entries of the configuration that name a GPU by its index
	Source   Source         `json:"source"`
	Kubelet  Kubelet        `json:"kubelet"`
	DRA      *DRA           `json:"dra,omitempty"` // while plugin.api is dra, or claims are prepared
	API      APIServer      `json:"apiServer"`
	Object   NodeObject     `json:"nodeObject"`
	Memory   StateDir       `json:"memory"`
	GPUs     []Device       `json:"gpus"`   // by index
	Events   []Event        `json:"events"` // the newest first, at most 100

	ProcessesError    string `json:"processesError,omitempty"`    // why the processes of the devices, or their pods, are unknown
	MemoryLimitsError string `json:"memoryLimitsError,omitempty"` // why the memory limits of containers cannot be set or read
	MPSWarning        string `json:"mpsWarning,omitempty"`        // see view.SingleUserMPS
}

// Config is the result of the last reload of the configuration.
type Config struct {
	OK    bool      `json:"ok"` // false: it was invalid, and the last good one is in force
	Since time.Time `json:"since,omitzero"`
	Error string    `json:"error,omitempty"` // one line for each error
	// Notes are about settings of the configuration in force that have no effect, or one that is easily overlooked.
	Notes []string `json:"notes"`
}

// Binding is the GPU that an entry of the configuration means. It keeps it when the indexes change.
type Binding struct {
	Key     string          `json:"key"`               // without positions of lists: health.cordon
	Entry   string          `json:"entry"`             // an index, as 3 or 3:0
	GPU     health.DeviceID `json:"gpu,omitempty"`     // no key while no GPU had the index
	Reason  string          `json:"reason,omitempty"`  // of the warning: renumbered, replaced, incomplete
	Warning string          `json:"warning,omitempty"` // why it may be another GPU than was meant
}

// Bindings returns bindings as the status shows them.
func Bindings(bindings health.Bindings) []Binding {
	all := make([]Binding, 0, len(bindings))
	for _, b := range bindings {
		all = append(all, Binding{b.Key, b.Entry, b.GPU, b.Warning.Reason, b.Warning.Text})
	}
	return all
}

// Source is the status of the source.
type Source struct {
	Kind       string    `json:"kind"`   // dcgm, sim
	Status     string    `json:"status"` // starting, up, down, stalled, detached
	Since      time.Time `json:"since,omitzero"`
	Until      time.Time `json:"until,omitzero"` // detached: when the agent attaches without a request
	Error      string    `json:"error,omitempty"`
	Reconnects uint64    `json:"reconnects"`
	Measured   time.Time `json:"measured,omitzero"`  // the time of the last poll
	Outdated   bool      `json:"outdated,omitempty"` // the last poll is too old, so that devices have no values, here and at /metrics
	Driver     string    `json:"driver,omitempty"`
	CUDA       string    `json:"cuda,omitempty"`
	DCGM       string    `json:"dcgm,omitempty"`
	Engine     string    `json:"engine,omitempty"` // DCGM version of a host engine in another process

	Checks    Checks        `json:"checks"`
	Incidents []Incident    `json:"incidents"` // of DCGM's health checks, that name no GPU, as of the last check
	Events    []EventSource `json:"events"`    // what reports XIDs beside the source
	XIDGap    *XIDGap       `json:"xidGap,omitempty"`
}

// XIDGap is time in which no witness could report XIDs, since the agent started.
type XIDGap struct {
	Since   time.Time `json:"since"`          // of the latest
	Until   time.Time `json:"until,omitzero"` // of the latest; missing while it lasts
	Seconds float64   `json:"seconds"`        // of all
}

// Checks is the status of DCGM's health checks.
type Checks struct {
	Status string    `json:"status"` // unknown, off, up, down
	Since  time.Time `json:"since,omitzero"`
	Error  string    `json:"error,omitempty"` // why they are down
}

// EventSource is the status of what reports XIDs as they happen.
type EventSource struct {
	Name   string    `json:"name"`   // the witness of its XIDs: nvml, kernel-log
	Status string    `json:"status"` // off, starting, up, down
	Since  time.Time `json:"since,omitzero"`
	Error  string    `json:"error,omitempty"` // why it is off or down, or which GPUs it lacks
}

// Incident is a finding of DCGM's health checks.
type Incident struct {
	System   string        `json:"system"`
	Code     string        `json:"code"`     // DCGM's name
	Severity string        `json:"severity"` // warn, fail
	Message  string        `json:"message"`
	Action   health.Action `json:"action"`
	Advice   string        `json:"advice"`
}

// Kubelet is the status of the device plugin at the kubelet.
type Kubelet struct {
	Plugin string `json:"plugin"`          // on, or off: plugin.enabled is false, or plugin.api is dra
	Error  string `json:"error,omitempty"` // why no resource, or not every one, is served
	// WaitsFor is another agent that serves the node, while this one waits for its end. Its keys are empty if it does not answer.
	WaitsFor     *nodelock.Holder `json:"waitsFor,omitempty"`
	AuditError   string           `json:"auditError,omitempty"`   // why the audit fails
	HoldersError string           `json:"holdersError,omitempty"` // why the holders are unknown or out of date
	Holders      time.Time        `json:"holders,omitzero"`       // the time of the last pod-resources response
	Resources    []Resource       `json:"resources"`
	// working devices that pods cannot get, with the reason, and a kubelet that needs a restart
	Warnings []string `json:"warnings"`
}

// APIServer counts the writes to the API server since the agent started, with health.kubernetes.enabled or node.idle.
type APIServer struct {
	Enabled        bool   `json:"enabled"`
	Writes         uint64 `json:"writes"`                   // of the node condition
	Events         uint64 `json:"events"`                   // created, or updated because they repeated
	Dropped        uint64 `json:"dropped"`                  // abandoned events
	Errors         uint64 `json:"errors"`                   // failed requests
	ConditionError string `json:"conditionError,omitempty"` // of the last write of the condition
	EventError     string `json:"eventError,omitempty"`     // of the last event
}

// NodeObject is the status of what the agent writes to its Node object, and to the node's NodeFeature, since it started.
type NodeObject struct {
	Enabled             bool     `json:"enabled"` // labels or taints are configured, or something is being removed
	Writes              uint64   `json:"writes"`
	Errors              uint64   `json:"errors"`                   // failed tries
	LabelsError         string   `json:"labelsError,omitempty"`    // why the node's labels are not as configured
	FeatureError        string   `json:"featureError,omitempty"`   // why the NodeFeature is not
	TaintsError         string   `json:"taintsError,omitempty"`    // why the taints are not
	ConditionError      string   `json:"conditionError,omitempty"` // why the condition may remain, although it is no longer reported
	StartupTaintReasons []string `json:"startupTaint,omitempty"`   // why node.startupTaint stays
}

// StateDir is the status of the state directory, which preserves findings over a restart.
type StateDir struct {
	Path    string    `json:"path,omitempty"`  // of --state-dir; "": nothing is kept
	Error   string    `json:"error,omitempty"` // why the file cannot be written
	Since   time.Time `json:"since,omitzero"`  // of the error
	Written time.Time `json:"written,omitzero"`
	Unread  time.Time `json:"unread,omitzero"` // since when it could not be read: the verdicts of before the start are unknown
	Loss    string    `json:"loss,omitempty"`  // why an earlier process lost the file with its directory

	Unreserved string `json:"unreserved,omitempty"` // why a full disk would lose the next findings
	SetAside   string `json:"setAside,omitempty"`   // what was set aside instead of being restored, and why
}

// Resource is the status of a resource.
type Resource struct {
	Name             string            `json:"name"`
	Registered       bool              `json:"registered"`
	Error            string            `json:"error,omitempty"` // why it is not registered
	Devices          int               `json:"devices"`
	Healthy          int               `json:"healthy"`
	Registrations    uint64            `json:"registrations"`
	Streams          int               `json:"streams"`
	AuditMismatches  uint64            `json:"auditMismatches"`
	Allocations      uint64            `json:"allocations"`
	AllocationErrors map[string]uint64 `json:"allocationErrors,omitempty"` // by reason
	Unschedulable    *int              `json:"unschedulable,omitempty"`    // free healthy devices that no new pod can get
	// the pods to end: they hold devices that are unhealthy or no longer offered
	BlockingPods []Pod `json:"blockingPods,omitempty"`
}

// Pod names a pod.
type Pod struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
}

// Device is the status of a GPU or of a MIG device.
type Device struct {
	UUID health.DeviceID `json:"uuid"`
	// the driver's; of a MIG device its parent's; -1 while the GPU is missing and another has its index
	Index    int       `json:"index"`
	Model    string    `json:"model,omitempty"`
	PCI      string    `json:"pci,omitempty"`
	NUMA     []int     `json:"numa,omitempty"`
	Profile  string    `json:"profile,omitempty"`  // MIG
	MIGIndex *int      `json:"migIndex,omitempty"` // MIG: the index on its parent, as in nvidia-smi -L
	GI       *int      `json:"gi,omitempty"`       // MIG: the driver's ID of the GPU instance
	CI       *int      `json:"ci,omitempty"`       // MIG: the driver's ID of the compute instance
	MIGMode  bool      `json:"migMode,omitempty"`
	Presence string    `json:"presence"` // present, lost, inaccessible, detached, missing, unknown
	State    string    `json:"state"`    // healthy, degraded, unhealthy, unknown
	Since    time.Time `json:"since,omitzero"`
	Findings []Finding `json:"findings"` // the worst first
	Values   Values    `json:"values"`
	// the last sample by DCGM field number, in DCGM's units; none while Source.Outdated
	Fields  map[health.Field]float64 `json:"fields,omitempty"`
	XIDs    []XID                    `json:"xids"` // since the agent started, by number
	LastXID *XID                     `json:"lastXid,omitempty"`
	Holders []Holder                 `json:"holders"`
	// AdminHolders can use the device by a claim with adminAccess, such as monitors. They take nothing from others.
	AdminHolders []Holder `json:"adminHolders,omitempty"`

	// Processes has an entry for each container with processes, and one without a container for the processes of no pod. There is no key while
	// the processes are unknown.
	Processes *[]Usage `json:"processes,omitempty"`

	Shares       *Shares       `json:"shares,omitempty"`       // of a shared device
	MPS          *MPS          `json:"mps,omitempty"`          // of a device that MPS serves
	MemoryLimits []MemoryLimit `json:"memoryLimits,omitempty"` // of the containers, if the device is shared by memory

	MIG    []Device `json:"mig,omitempty"`
	Charts []Chart  `json:"-"` // of the page
}

// Finding is a problem found on a device.
type Finding struct {
	Cause  string          `json:"cause"`
	State  string          `json:"state"`
	Reason string          `json:"reason"`
	Action health.Action   `json:"action"`
	Advice string          `json:"advice"` // the action as a sentence
	Since  time.Time       `json:"since,omitzero"`
	Clears string          `json:"clears"`         // self, gpu-reset, reboot, operator, app-restart
	From   health.DeviceID `json:"from,omitempty"` // the parent that a MIG device inherits it from
}

// Values has the most important fields. The keys name the units.
type Values struct {
	Temperature       *float64 `json:"temperatureCelsius,omitempty"`
	MemoryTemperature *float64 `json:"memoryTemperatureCelsius,omitempty"`
	Power             *float64 `json:"powerWatts,omitempty"`
	Utilization       *float64 `json:"utilizationPercent,omitempty"` // field 203, or 1001 with MIG
	MemoryUsed        *float64 `json:"memoryUsedBytes,omitempty"`
	MemoryTotal       *float64 `json:"memoryTotalBytes,omitempty"`
	SMClock           *float64 `json:"smClockMHz,omitempty"`
}

// XID is an XID that the driver reported for a device.
type XID struct {
	XID    int       `json:"xid"`
	Name   string    `json:"name"`
	Count  uint64    `json:"count,omitempty"`
	Time   time.Time `json:"time,omitzero"`
	Source string    `json:"source,omitempty"` // what reported it first, of several the newest: dcgm, sim, nvml, kernel-log

	Process string `json:"process,omitempty"` // that caused the XID, from the kernel log
	PID     int    `json:"pid,omitempty"`     // of Process on the node
}

// Holder is a container that holds a device.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	Resource  string `json:"resource"` // "" for a claim
	// the kubelet's device ID: the UUID, of a replica with :: and its number; for a claim the name in its pool
	Device string `json:"device"`
	Claim  *Claim `json:"claim,omitempty"`

	// GPUShare is the part of a GPU that the holder has. A MIG device counts with its memory, in eighths of the GPU's, and a shared device
	// with one unit. Holders of the same unit or claim have equal parts of it, so that the sum of a GPU is at most 1. There is no key while it
	// is unknown.
	GPUShare *float64 `json:"gpuShare,omitempty"`
	// Idle is of the container: each of its units of the device has the same. There is no key while nothing is known.
	Idle *Idle `json:"idle,omitempty"`
}

// Idle is how long a container has not used a device that it holds, as of the last seconds. What is unknown now has no key, such as the
// processes while the driver does not list them. Time in which the use was unknown does not count.
type Idle struct {
	NoWork    *float64 `json:"noWorkSeconds,omitempty"`    // since it last worked: the load was metrics.idleBelow or more; 0 while it works
	NoProcess *float64 `json:"noProcessSeconds,omitempty"` // since it last had a process on the device; 0 while it has one
	Observed  float64  `json:"observedSeconds"`            // for which the agent has observed it; no other time is longer
	// NeverUsed means that the container has not used the device since it got it: no process was observed or, while the processes are unknown,
	// no work, and the device does not work now. It is false if the agent has not observed the container from its start.
	NeverUsed bool `json:"neverUsed,omitempty"`
	// Evidence is noProcess or noWork, as node.idle.evidence has it, once the container has been idle by it for node.idle.after. When the pod
	// became Ready does not matter here.
	Evidence string `json:"idleEvidence,omitempty"`
}

// Claim is a ResourceClaim by which a container holds a device.
type Claim struct {
	Name    string `json:"name"` // in the namespace of the pod
	Driver  string `json:"driver"`
	Pool    string `json:"pool"`
	ShareID string `json:"shareID,omitempty"` // of a share of the device
}

// Usage is what the processes of a container use of a device.
type Usage struct {
	Namespace string   `json:"namespace,omitempty"`
	Pod       string   `json:"pod,omitempty"`
	Container string   `json:"container,omitempty"` // "other" without a pod: the containers above the limit
	Processes int      `json:"processes"`
	Memory    *float64 `json:"memoryBytes,omitempty"`
	SM        *float64 `json:"smUtilizationPercent,omitempty"` // share of the time in which its kernels ran
}

// Event is a change of the node's state.
type Event struct {
	Time   time.Time       `json:"time"`
	Kind   string          `json:"kind"`               // state, xid, found, gone, source, checks, event-source
	GPU    *int            `json:"gpu,omitempty"`      // index
	MIG    *int            `json:"migIndex,omitempty"` // of a MIG device: its index on the GPU
	UUID   health.DeviceID `json:"uuid,omitempty"`     // of the GPU or the MIG device
	State  string          `json:"state,omitempty"`    // of the device, the source, the checks or the event source
	Was    string          `json:"was,omitempty"`
	Cause  string          `json:"cause,omitempty"`
	XID    int             `json:"xid,omitempty"`
	Source string          `json:"source,omitempty"` // of the newest of the XIDs: dcgm, sim, nvml, kernel-log
	Text   string          `json:"text"`             // for people

	late bool // only the detail of the XID is new
}
