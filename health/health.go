// Package health knows which GPUs a node has, measures them, and judges them.
//
// The nouns are here. One Monitor polls one Session, folds each Sample into a Verdict and stores an
// immutable Snapshot in a Latest. Everything else in the agent is a view of that snapshot, so the
// kubelet and Prometheus can never be told different things.
package health

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// DeviceID is the UUID that the container runtime knows a device by: "GPU-…" or "MIG-…".
type DeviceID string

// Kind tells a whole GPU from a MIG device.
type Kind uint8

// The kinds of device.
const (
	KindGPU Kind = iota
	KindMIG
)

// Device is what does not change while a device is plugged in and partitioned as it is.
type Device struct {
	ID     DeviceID
	Parent DeviceID // MIG: the GPU it is a part of; empty for a GPU
	Kind   Kind
	Index  int    // the driver's index of the GPU (nvidia-smi -i); MIG: its parent's
	Minor  int    // /dev/nvidia<Minor>; MIG: its parent's; -1 if unknown
	NUMA   []int  // the NUMA nodes next to the GPU; empty if unknown
	Model  string // "NVIDIA H100 80GB HBM3"; MIG: its parent's
	PCI    string // bus id as the driver writes it, "00000000:1B:00.0"; MIG: its parent's
	Memory uint64 // framebuffer in bytes

	MIGMode bool   // GPU: partitioning is on
	Profile string // MIG: "1g.10gb"
	GI, CI  int    // MIG: the driver's GPU instance and compute instance ids; -1 for a GPU

	// MIGIndex is the MIG device's number on its GPU as nvidia-smi -L counts, by GPU instance and compute instance: with
	// Index it is the 3:0 that people read and write. It is -1 for a GPU, and for a MIG device if it is not known. The
	// source sets it, which knows the instances that it cannot name yet.
	MIGIndex int

	Links []Link // GPU: how each other GPU is reached; a missing peer is simply unknown

	Texts map[Field]string // serial number, VBIOS version and so on, those asked for; a blank is absent; MIG: its parent's
}

// Matches reports whether word identifies the device or its GPU. If word is no name of a device, named is false. It does
// not allocate: it is called for every device at every layout.
func (d *Device) Matches(word string) (match, named bool) {
	names := deviceref.Names{UUID: string(d.ID), Parent: string(d.Parent), Index: d.Index, MIG: d.MIGIndex, PCI: d.PCI}
	return names.Match(word)
}

// Link is how one GPU reaches another.
type Link struct {
	Peer    DeviceID
	NVLinks int  // number of NVLinks, 0 if none
	Path    Path // the PCIe way, if known
}

// Path is the PCIe way between two GPUs, worst first, so that a greater Path is a better one.
type Path uint8

// The ways over PCIe, named as `nvidia-smi topo -m` draws them.
const (
	PathUnknown      Path = iota
	PathSystem            // SYS: across CPU sockets
	PathNode              // NODE: across host bridges of one NUMA node
	PathHostBridge        // PHB: through one host bridge
	PathMultiSwitch       // PXB: through several PCIe switches
	PathSingleSwitch      // PIX: through one PCIe switch
	PathBoard             // PSB: on one board
)

// Presence is whether the driver can reach a device at all.
type Presence uint8

// The presences. PresenceUnknown keeps the last verdict: not knowing is not losing.
const (
	PresenceUnknown Presence = iota
	Present
	Lost         // fallen off the bus
	Inaccessible // hidden from us, usually by cgroups
	Detached     // the driver is unbound
	Missing      // was known, and the driver lists it no more; said by the judge, not by a source
)

//nolint:gochecknoglobals // a table of constants
var presenceNames = [...]string{"unknown", "present", "lost", "inaccessible", "detached", "missing"}

func (p Presence) String() string { return name(presenceNames[:], int(p)) }

// XID is one error report of the driver.
type XID struct {
	Code int
	At   time.Time // when the driver reported it
}

// InKernelLog reports whether DCGM reads an XID from /dev/kmsg as well as from the driver (DCGM, DcgmKmsgReader.cpp).
func InKernelLog(code int) bool { return code == 79 || code == 119 || code == 120 }

// Same reports whether two XIDs of a device are one event. One that DCGM reads twice has two times. An RPC to the GSP times out
// after six seconds, so 119 and 120 do not come to a GPU twice in five.
func (x XID) Same(y XID) bool {
	if x.Code == y.Code && InKernelLog(x.Code) {
		return x.At.Sub(y.At).Abs() < 5*time.Second
	}
	return x.Code == y.Code && x.At.Equal(y.At)
}

// Severity is how DCGM grades an Incident.
type Severity uint8

// The severities of an incident.
const (
	SeverityWarn Severity = iota
	SeverityFail
)

// Incident is one finding of DCGM's own health checks, kept apart from all others.
type Incident struct {
	System   string // "pcie", "nvlink", "memory", "inforom", "thermal", "power", "driver", …
	Code     int    // dcgmError_t, the DCGM_FR_ number
	Severity Severity
	Message  string
}

// Sample is what one poll measured of one device.
type Sample struct {
	Device    DeviceID
	At        time.Time
	Presence  Presence
	Values    map[Field]float64 // a blank is absent, never 0; not modified once returned
	XIDs      []XID             // new since the poll before, oldest first
	Past      []XID             // reported before this process first read the device, oldest first; each only once
	Stale     bool              // the source measures other devices and has no current value of this one; Values is empty
	Checked   bool              // DCGM's health checks were made, and Incidents is what they say
	Incidents []Incident        // all that stand now
}

// Versions are those of the software below us, each empty if unknown.
type Versions struct {
	Driver string // "580.95.05"
	CUDA   string // "13.0"
	DCGM   string // the library in this process
	Engine string // the host engine, if it is another process
}

// Reading is the result of one poll. Devices and samples come together so that they cannot belong to
// different inventories.
type Reading struct {
	Devices  []Device // a GPU before its MIG devices
	Samples  []Sample // at most one a device, in any order
	Versions Versions
}

// Session is a live connection to whatever measures GPUs. Only an Opener returns one, so that a call
// on something that was never connected cannot be written.
//
// The Monitor makes one call at a time. A call may hang for as long as the driver does.
type Session interface {
	// Poll measures every device. An error means that the session is of no more use.
	Poll(ctx context.Context) (*Reading, error)
	// Wake fires when a poll is worth making now: something has happened, an XID perhaps.
	Wake() <-chan struct{}
	Close() error
}

// Detacher is a Session whose driver another process uses too, as a host engine does.
type Detacher interface {
	// CanDetach returns why Detach would be refused, without asking the other process. It may be called at any time.
	CanDetach() error
	// Detach asks the other process to stop using the driver. What this process uses ends with Close, which is the only
	// call after it.
	Detach(ctx context.Context) error
}

// XIDWatcher is a Session that can find out at little cost whether an XID has come since the last Poll. The Monitor asks
// it between polls and polls at once if so.
type XIDWatcher interface {
	// XIDsChanged reports whether Poll may deliver an XID now. It may not report the same XID again after that Poll. An
	// error means that the session is of no more use.
	XIDsChanged(ctx context.Context) (bool, error)
}

// Opener opens a session. Its error is shown to people: it says what is missing.
type Opener func(ctx context.Context) (Session, error)

// State is a device's health in one word. Only Unhealthy reaches the kubelet as Unhealthy.
type State uint8

// The states, in the order of their severity.
const (
	Unknown State = iota
	Healthy
	Degraded
	Unhealthy
)

//nolint:gochecknoglobals // a table of constants
var stateNames = [...]string{"unknown", "healthy", "degraded", "unhealthy"}

func (s State) String() string { return name(stateNames[:], int(s)) }

// States returns every state, least severe first.
func States() []State { return []State{Unknown, Healthy, Degraded, Unhealthy} }

// Clears is the positive evidence that ends a finding.
type Clears uint8

// What clears a finding.
const (
	ClearsItself   Clears = iota // with the condition that it reports
	ClearsGPUReset               // when a reset, or the GPU's return to the bus, was seen
	ClearsReboot                 // when the node has booted anew
	ClearsOperator               // when a person says so
	ClearsRestart                // when the application was started anew: of an XID, which then comes no more
)

//nolint:gochecknoglobals // a table of constants
var clearsNames = [...]string{"self", "gpu-reset", "reboot", "operator", "app-restart"}

func (c Clears) String() string { return name(clearsNames[:], int(c)) }

// Finding is one thing that is wrong with a device.
type Finding struct {
	Cause  string // short and stable, fit for a label: "xid-79", "lost", "recovery-action"
	State  State  // Degraded or Unhealthy
	Reason string // in words
	Action Action // what an operator should do about it
	Since  time.Time
	Last   time.Time // when it was last seen
	Reset  time.Time // when a reset was last seen since it began; zero if none was
	Clears Clears
	From   DeviceID // the parent that it was inherited from; empty if the device's own

	Common bool      // of a device that is gone: all of the node went together, so that its return is no reset
	alone  time.Time // Common: since when others are back without it; zero while none is
}

// Verdict is what is thought of a device, and the judge's whole memory of it.
type Verdict struct {
	State    State     // the greatest of the findings' states
	Findings []Finding // the worst first
	Since    time.Time // when State was reached

	Trips   []time.Time        // when the device became unhealthy by itself, within Config.Flap.Within
	suspect map[string]suspect // FAILs that are not confirmed yet, by cause; not modified once stored
	Follow  []XID              // XIDs of the last minute that the recovery action is to tell more of; not modified once stored
	seen    bool               // there was a sample that tells something, so that no finding means no fault

	actionUntold bool // no sample of this process has told the recovery action yet, and none was known before
	checkUntold  bool // no sample has told DCGM's checks yet, and nothing is known of the device from before the start
	unexplained  bool // the first recovery action that was told wants a reset, and still stands
}

// suspect is a fault that was seen, and not often enough to be believed.
type suspect struct {
	seen int
	last time.Time
}

// Held tells whether a pod has a device, or may have: what is not known is held.
type Held func(DeviceID) bool

// DeviceState is all that is known of a device now.
type DeviceState struct {
	Device  Device
	Sample  Sample
	Verdict Verdict

	XIDCounts map[int]uint64 // XIDs since the agent started, by number; not modified once stored
	LastXID   XID            // zero if none was seen
	Seen      []XID          // the newest XIDs of the source's stream, counted or not, in order of arrival; not modified once stored
}

// SourceStatus is the state of the connection to whatever measures GPUs.
type SourceStatus uint8

// The states of a source. Losing the source is not losing the GPUs: verdicts are kept in all of them.
const (
	SourceStarting SourceStatus = iota
	SourceUp
	SourceDown     // not connected; Source.Err says why
	SourceStalled  // connected, but a call has not returned for too long
	SourceDetached // an operator has had the driver let go of
)

//nolint:gochecknoglobals // a table of constants
var sourceNames = [...]string{"starting", "up", "down", "stalled", "detached"}

func (s SourceStatus) String() string { return name(sourceNames[:], int(s)) }

// SourceID tells a source from others.
type SourceID struct {
	Kind      string // shown as Source.Kind
	Inventory string // names the set of devices: a source with another one does not miss those of this
	Simulated bool   // no real devices: those of another inventory are no more known with it, nor its own with another
}

// Source is the state of what measures the GPUs.
type Source struct {
	Kind       string // what measures: "dcgm" or "sim"
	Inventory  string // SourceID.Inventory
	Status     SourceStatus
	Err        string // why it is not up, in words; empty if it is
	Since      time.Time
	Until      time.Time // SourceDetached: when the driver is taken back if nobody asks for it before
	Versions   Versions
	DriverLoad string // identifies the load of the driver, see DriverLoad; "" if unknown
	Reconnects uint64 // sessions opened after the first
	Detachment Detachment

	Polls    uint64        // polls that went well
	PollTook time.Duration // how long the last of them took
}

// Detachment is an operator's detach, from the moment when the devices are withheld until each of them was seen again. The
// zero Detachment is none.
type Detachment struct {
	Since   time.Time     // when the devices were withheld
	Until   time.Time     // when the driver is taken back by itself
	For     time.Duration // how long that was from the last detach
	Over    bool          // the driver is to be taken back now; nothing else is set
	Asking  bool          // the kubelet is still asked who holds the devices: see monitor.Monitor.Withhold
	Unasked bool          // a host engine has not been asked to let go, as far as is known
}

// InForce reports whether the devices are withheld and the driver is not to be used.
func (d Detachment) InForce() bool { return d != (Detachment{}) && !d.Over }

// Snapshot is everything the agent knows, at one moment. It is never modified once stored.
type Snapshot struct {
	Seq     uint64
	At      time.Time // of the last good poll; zero if there was none yet
	Source  Source
	Devices []DeviceState // whole GPUs, then MIG devices, each by index
}

// Polled reports whether the GPUs have been seen at least once.
func (s *Snapshot) Polled() bool { return s != nil && !s.At.IsZero() }

// ParseState returns the state of that name. If there is none, ok is false.
func ParseState(s string) (state State, ok bool) {
	i := slices.Index(stateNames[:], s)
	return State(max(i, 0)), i >= 0
}

func name(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("%%!(%d)", i)
}
