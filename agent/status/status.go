// Package status builds and shows the status of a node: JSON, the status page, the terminal table and recent events.
package status

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Node is what /api/v1/snapshot answers, and what the page and `gpu-node-agent status` show.
//
// The words are those of the log and of /metrics. A key that is not there is not known: no value is ever 0
// for want of a better one. Keys may be added; none changes its meaning within v1.
type Node struct {
	Node     string    `json:"node"`
	Version  string    `json:"version"`
	Revision string    `json:"revision,omitempty"`
	Time     time.Time `json:"time"`     // of this answer
	Ready    bool      `json:"ready"`    // as /readyz
	NotReady []string  `json:"notReady"` // why not
	Config   Config    `json:"config"`
	Source   Source    `json:"source"`
	Kubelet  Kubelet   `json:"kubelet"`
	API      APIServer `json:"apiServer"`
	Memory   StateFile `json:"memory"`
	GPUs     []Device  `json:"gpus"`   // by index
	Events   []Event   `json:"events"` // the newest first, at most 100
}

// Config is how the last reload of the configuration went.
type Config struct {
	OK    bool      `json:"ok"` // false: it was bad, and the one before is in force
	Since time.Time `json:"since,omitzero"`
	Error string    `json:"error,omitempty"` // what is wrong with it, a line for each fault
}

// Source is the state of what measures the GPUs.
type Source struct {
	Kind       string    `json:"kind"`   // dcgm, sim
	Status     string    `json:"status"` // starting, up, down, stalled, detached
	Since      time.Time `json:"since,omitzero"`
	Until      time.Time `json:"until,omitzero"` // detached: when the agent takes the driver back by itself
	Error      string    `json:"error,omitempty"`
	Reconnects uint64    `json:"reconnects"`
	Measured   time.Time `json:"measured,omitzero"` // when the GPUs were last measured
	Driver     string    `json:"driver,omitempty"`
	CUDA       string    `json:"cuda,omitempty"`
	DCGM       string    `json:"dcgm,omitempty"`
	Engine     string    `json:"engine,omitempty"` // the host engine, if it is another process
}

// Kubelet is the state of the connection to the kubelet.
type Kubelet struct {
	Plugin       string     `json:"plugin"`                 // on, or off: plugin.enabled is false, and nothing is to be served
	Error        string     `json:"error,omitempty"`        // why nothing is served, or not all
	AuditError   string     `json:"auditError,omitempty"`   // why what the kubelet believes is not checked
	HoldersError string     `json:"holdersError,omitempty"` // why there is no newer word on who holds what
	Holders      time.Time  `json:"holders,omitzero"`       // when the kubelet last said who holds what
	Resources    []Resource `json:"resources"`
	Warnings     []string   `json:"warnings"` // which devices are not offered to pods though they work, and why
}

// APIServer is what the API server was told since the agent started, with health.kubernetes.enabled.
type APIServer struct {
	Enabled        bool   `json:"enabled"`
	Writes         uint64 `json:"writes"`                   // of the node's condition
	Events         uint64 `json:"events"`                   // written, a repeated one each time that its count was raised
	Dropped        uint64 `json:"dropped"`                  // events that were given up
	Errors         uint64 `json:"errors"`                   // refused or failed requests
	ConditionError string `json:"conditionError,omitempty"` // why the condition could not be written last
	EventError     string `json:"eventError,omitempty"`     // the same for the last event
}

// StateFile is how it goes with the findings that are kept over a restart of the agent.
type StateFile struct {
	File    string    `json:"file,omitempty"`  // health.stateFile; "": nothing is kept
	Error   string    `json:"error,omitempty"` // why a restart would forget findings now
	Since   time.Time `json:"since,omitzero"`  // of the error
	Written time.Time `json:"written,omitzero"`
}

// Resource is the state of one resource.
type Resource struct {
	Name             string            `json:"name"`
	Registered       bool              `json:"registered"`
	Error            string            `json:"error,omitempty"` // why it is not
	Devices          int               `json:"devices"`
	Healthy          int               `json:"healthy"`
	Registrations    uint64            `json:"registrations"`
	Streams          int               `json:"streams"`
	AuditMismatches  uint64            `json:"auditMismatches"`
	Allocations      uint64            `json:"allocations"`
	AllocationErrors map[string]uint64 `json:"allocationErrors,omitempty"` // by reason
}

// Device is what is known of a GPU or of a MIG device.
type Device struct {
	UUID     health.DeviceID          `json:"uuid"`
	Index    int                      `json:"index"` // the driver's, of a MIG device its GPU's
	Model    string                   `json:"model,omitempty"`
	PCI      string                   `json:"pci,omitempty"`
	NUMA     []int                    `json:"numa,omitempty"`
	Profile  string                   `json:"profile,omitempty"`  // MIG
	MIGIndex *int                     `json:"migIndex,omitempty"` // MIG: its number on its GPU, as nvidia-smi -L counts
	GI       *int                     `json:"gi,omitempty"`       // MIG: the driver's id of the GPU instance
	CI       *int                     `json:"ci,omitempty"`       // MIG: the driver's id of the compute instance
	MIGMode  bool                     `json:"migMode,omitempty"`
	Presence string                   `json:"presence"` // present, lost, inaccessible, detached, missing, unknown
	State    string                   `json:"state"`    // healthy, degraded, unhealthy, unknown
	Since    time.Time                `json:"since,omitzero"`
	Findings []Finding                `json:"findings"` // the worst first
	Values   Values                   `json:"values"`
	Fields   map[health.Field]float64 `json:"fields,omitempty"` // all that was measured, by DCGM field number, in DCGM's units
	XIDs     []XID                    `json:"xids"`             // since the agent started, by number
	LastXID  *XID                     `json:"lastXid,omitempty"`
	Holders  []Holder                 `json:"holders"`
	MIG      []Device                 `json:"mig,omitempty"`
}

// Finding is one thing that is wrong with a device.
type Finding struct {
	Cause  string          `json:"cause"`
	State  string          `json:"state"`
	Reason string          `json:"reason"`
	Action health.Action   `json:"action"`
	Advice string          `json:"advice"` // the action as a sentence
	Since  time.Time       `json:"since,omitzero"`
	Clears string          `json:"clears"`         // self, gpu-reset, reboot, operator, app-restart
	From   health.DeviceID `json:"from,omitempty"` // the GPU that a MIG device has it from
}

// Values is what people look at first. The names tell the units.
type Values struct {
	Temperature       *float64 `json:"temperatureCelsius,omitempty"`
	MemoryTemperature *float64 `json:"memoryTemperatureCelsius,omitempty"`
	Power             *float64 `json:"powerWatts,omitempty"`
	Utilization       *float64 `json:"utilizationPercent,omitempty"`
	MemoryUsed        *float64 `json:"memoryUsedBytes,omitempty"`
	MemoryTotal       *float64 `json:"memoryTotalBytes,omitempty"`
	SMClock           *float64 `json:"smClockMHz,omitempty"`
}

// XID is an XID that a device has reported.
type XID struct {
	XID   int       `json:"xid"`
	Name  string    `json:"name"`
	Count uint64    `json:"count,omitempty"`
	Time  time.Time `json:"time,omitzero"`
}

// Holder is a container that has a device.
type Holder struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	Container string `json:"container"`
	Resource  string `json:"resource"`
	Device    string `json:"device"` // what the kubelet calls it: the UUID, of a replica followed by :: and its number
}

// Event is something that has happened.
type Event struct {
	Time  time.Time       `json:"time"`
	Kind  string          `json:"kind"`               // state, xid, found, gone, source
	GPU   *int            `json:"gpu,omitempty"`      // index
	MIG   *int            `json:"migIndex,omitempty"` // of a MIG device: its number on the GPU
	UUID  health.DeviceID `json:"uuid,omitempty"`     // of the GPU or the MIG device
	State string          `json:"state,omitempty"`    // of the device, or of the source
	Was   string          `json:"was,omitempty"`
	Cause string          `json:"cause,omitempty"`
	XID   int             `json:"xid,omitempty"`
	Text  string          `json:"text"` // all of it in words
}
