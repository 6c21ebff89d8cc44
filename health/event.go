package health

import (
	"context"
	"time"
)

// Witness is what reported an XID.
type Witness uint8

// The witnesses. The source reads XIDs from DCGM's field 230; an EventSource reports them earlier.
const (
	WitnessSource Witness = iota
	WitnessNVML
	WitnessKernelLog
)

//nolint:gochecknoglobals // a table of constants
var witnessNames = [...]string{"source", "nvml", "kernel-log"}

func (w Witness) String() string { return EnumName(witnessNames[:], int(w)) }

// EventKind is the kind of an Event.
type EventKind uint8

// The kinds of event. Every event causes a poll; only an XID is judged itself.
const (
	EventXID            EventKind = iota
	EventRecoveryAction           // the driver's recovery action has changed
	EventUnavailable              // the driver has lost the GPU
	EventMIG                      // the MIG configuration has changed
	EventDBE                      // a double-bit error
	EventDriver                   // the driver was bound to a GPU or unbound from it
)

//nolint:gochecknoglobals // a table of constants
var eventNames = [...]string{"xid", "recovery-action", "gpu-unavailable", "mig-configuration", "double-bit-error", "driver-binding"}

func (k EventKind) String() string { return EnumName(eventNames[:], int(k)) }

// Event is what an EventSource reports of a GPU.
type Event struct {
	Kind   EventKind
	GPU    string // UUID or PCI bus ID, as a device reference; empty if the event source does not know it
	GI, CI int    // the driver's IDs of the GPU instance and the compute instance; -1 if the event names none
	XID    XID    // EventXID; At is when the event source received it
}

// EventReceiver takes the events of an EventSource.
type EventReceiver interface {
	// Receive takes an event. It does not block, and no XID is lost.
	Receive(e Event)
	// SetEvents publishes whether events arrive now: err is nil, or why they do not, or PartialEvents, or UnusedEvents.
	SetEvents(err error)
}

// PartialEvents is why the events of some GPUs do not arrive. The other GPUs' events do.
type PartialEvents struct{ Err error }

func (e PartialEvents) Error() string { return e.Err.Error() }

// UnusedEvents is why an event source has no events of the source's GPUs, and is not down either.
type UnusedEvents struct{ Err error }

func (e UnusedEvents) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e UnusedEvents) Unwrap() error { return e.Err }

// EventSource reports the driver's events as they happen, beside a source.
type EventSource struct {
	Witness Witness
	// Run reports events until ctx ends, and retries inside. Once it has returned it holds no file of the driver.
	Run func(ctx context.Context, to EventReceiver)
	// Off is why the event source does not run; Run is nil then.
	Off string
}

// EventSourceStatus is the state of an event source.
type EventSourceStatus uint8

// The states of an event source.
const (
	EventsOff EventSourceStatus = iota
	EventsStarting
	EventsUp
	EventsDown
)

//nolint:gochecknoglobals // a table of constants
var eventSourceNames = [...]string{"off", "starting", "up", "down"}

func (s EventSourceStatus) String() string { return EnumName(eventSourceNames[:], int(s)) }

// EventSourceState is the state of an event source of a snapshot.
type EventSourceState struct {
	Witness Witness
	Status  EventSourceStatus
	Err     string // why it is off or down, or which GPUs it lacks while it is up
	Since   time.Time
}
