package health

import (
	"slices"
	"time"
)

// Held reports whether a pod holds a device, or may hold it: unknown counts as held.
type Held func(DeviceID) bool

// DeviceState is everything the agent knows about a device at one moment.
type DeviceState struct {
	Device  Device
	Sample  Sample
	Memory  Memory
	Verdict Verdict // as of the latest View

	XIDs    Ledger
	Unread  bool      // a GPU that was not measured since the driver was released: see judge.DiscardMeasurements
	ResetAt time.Time // when this process saw the latest reset of the device; zero if it saw none

	MPS *MPSDaemon // of a device that MPS serves; nil for others, and until it is first examined
}

// SourceStatus is the state of the connection to a source.
type SourceStatus uint8

// The states of a source. Verdicts are kept in all of them: a source can fail while the GPUs work.
const (
	SourceStarting SourceStatus = iota
	SourceUp
	SourceDown     // not connected; Source.Err holds the reason
	SourceStalled  // connected, but a call has not returned in time
	SourceDetached // an operator detached the driver
)

//nolint:gochecknoglobals // a table of constants
var sourceNames = [...]string{"starting", "up", "down", "stalled", "detached"}

func (s SourceStatus) String() string { return EnumName(sourceNames[:], int(s)) }

// SourceID identifies a source.
type SourceID struct {
	Kind      string // see Source.Kind
	Inventory string // names the set of devices: a source with another inventory does not miss the devices of this one
	Simulated bool   // the devices are not real: they are unknown to every other inventory, and its devices to this one
}

// Source is the state of the source of a snapshot.
type Source struct {
	Kind       string // "dcgm" or "sim"
	Inventory  string // SourceID.Inventory
	Status     SourceStatus
	Err        string // why the source is not up; empty if it is
	Since      time.Time
	Versions   Versions
	DriverLoad string // identifies the load of the driver; "" if unknown
	Reconnects uint64 // sessions opened after the first
	Detachment Detachment

	Events []EventSourceState // of each event source, whether it is on or off; not modified once stored
	XIDGap XIDGap

	Checks    Checks
	Incidents []Incident // Reading.Incidents, as of the last health check; not modified once stored

	Polls    uint64        // successful polls
	PollTook time.Duration // duration of the last successful poll
}

// XIDGap is the time in which no witness could report XIDs: the session with the source had failed or listed no GPU, and no event
// source was up. A host engine that is restarted has no XIDs of that time. The time of a detach is not part of it.
type XIDGap struct {
	Since, Until time.Time     // of the latest gap; zero if there was none, and Until also while it lasts
	Total        time.Duration // of the gaps that ended since the agent started
}

// Lasts reports whether no witness can report XIDs now.
func (g XIDGap) Lasts() bool { return !g.Since.IsZero() && g.Until.IsZero() }

// Of returns the time of all gaps until now.
func (g XIDGap) Of(now time.Time) time.Duration {
	if g.Lasts() {
		return g.Total + max(0, now.Sub(g.Since))
	}
	return g.Total
}

// Detachment is an operator's detach, from the moment when devices are withheld until each has been measured again. The
// zero Detachment means that the driver is attached.
type Detachment struct {
	Since         time.Time     `json:"since"`             // when the devices were withheld
	Until         time.Time     `json:"until"`             // time limit: when the agent attaches the driver automatically
	For           time.Duration `json:"forNanoseconds"`    // Until minus the time of the last detach
	Over          bool          `json:"over,omitempty"`    // the driver is to be attached now; no other field is set
	Undecided     bool          `json:"asking,omitempty"`  // the agent still asks the kubelet for the holders: see monitor.Monitor.Withhold
	EngineUnasked bool          `json:"unasked,omitempty"` // no host engine was asked to release the driver, as far as the agent knows
}

// InForce reports whether devices are withheld and the driver must not be used.
func (d Detachment) InForce() bool { return d != (Detachment{}) && !d.Over }

// Snapshot has the devices and their source at one moment. It is never modified once stored.
type Snapshot struct {
	Seq     uint64
	At      time.Time // of the last successful poll; zero before the first
	Source  Source
	Devices []DeviceState // GPUs, then MIG devices, each by index

	Bindings Bindings // of the entries of the configuration that name a GPU by its index

	Entities []Entity // of the last reading
}

// Polled reports whether there was a successful poll.
func (s *Snapshot) Polled() bool { return s != nil && !s.At.IsZero() }

// keepValues is how long the values of the last poll count while the source is not up. A short interruption leaves no gap in graphs; a
// longer one must not look like a constant measurement.
const keepValues = time.Minute

// ValuesCount reports whether the values of the last poll may be shown. Every view asks it. States and findings count regardless.
func (s *Snapshot) ValuesCount(now time.Time) bool {
	return s.Source.Status == SourceUp || now.Sub(s.At) < keepValues
}

// DeviceIDs returns the IDs of all devices, in their order.
func (s *Snapshot) DeviceIDs() []DeviceID {
	ids := make([]DeviceID, len(s.Devices))
	for i := range s.Devices {
		ids[i] = s.Devices[i].Device.ID
	}
	return ids
}

// ChecksStatus tells whether DCGM's health checks work.
type ChecksStatus uint8

// The states of the health checks.
const (
	ChecksUnknown ChecksStatus = iota // not run yet, or there is no GPU to check
	ChecksOff                         // disabled by the configuration
	ChecksUp
	ChecksDown // they cannot be set or read; everything else is measured
)

//nolint:gochecknoglobals // a table of constants
var checksNames = [...]string{"unknown", "off", "up", "down"}

func (s ChecksStatus) String() string { return EnumName(checksNames[:], int(s)) }

// Checks is the state of DCGM's health checks.
type Checks struct {
	Status ChecksStatus
	Err    string    // ChecksDown: why they do not work
	Since  time.Time // of Status; only the Monitor sets it
}

// Memory is what health/judge keeps of a device from one reading to the next, beside its XIDs. Its findings are the device's own: the
// view adds what a MIG device inherits from its GPU, and what is decided about a device.
type Memory struct {
	Findings    []Finding   `json:"findings,omitempty"` // worst first
	Trips       []time.Time `json:"trips,omitempty"`    // when the device became unhealthy, within flap.within
	PendingXIDs []XID       `json:"pending,omitempty"`  // recent, whose severity the recovery action decides; immutable

	// The state file does not have the rest.

	Unconfirmed map[string]Confirmation `json:"-"` // FAILs that too few checks have shown, by cause; not modified once stored
	Measured    bool                    `json:"-"` // at least one sample had a known presence, so no finding means healthy

	AwaitsAction     bool        `json:"-"` // this process has no value of the recovery action yet, and there was none before
	AwaitsCheck      bool        `json:"-"` // this process has no result of DCGM's checks yet, and the device has no saved state
	UnexplainedReset bool        `json:"-"` // the first recovery action asked for a reset that no XID explains, and still does
	EventAction      EventAction `json:"-"`
}

// Confirmation counts the checks that have shown a fault which is not confirmed yet.
type Confirmation struct {
	Checks int
	Last   time.Time
}

// Find returns the first finding that matches, nil if there is none.
func (m *Memory) Find(match func(Finding) bool) *Finding {
	if i := slices.IndexFunc(m.Findings, match); i >= 0 {
		return &m.Findings[i]
	}
	return nil
}

// Has reports whether there is a finding with the cause.
func (m *Memory) Has(cause string) bool { return m.Find(HasCause(cause)) != nil }

// UnhealthyBy reports whether a finding with the cause makes the device Unhealthy.
func (m *Memory) UnhealthyBy(cause string) bool {
	f := m.Find(HasCause(cause))
	return f != nil && f.State == Unhealthy
}

// Without returns the memory without the findings for which drop returns true.
func (m Memory) Without(drop func(Finding) bool) Memory {
	m.Findings = slices.DeleteFunc(slices.Clone(m.Findings), drop)
	return m
}

// EventAction is a recovery action of an event.
type EventAction struct {
	At   time.Time     // of the event
	Left time.Duration // how long readings must pass until the source's recovery action counts again
}
