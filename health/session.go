package health

import (
	"context"
	"slices"
	"time"
)

// Presence tells whether the driver can reach a device.
type Presence uint8

// The presences. PresenceUnknown keeps the last verdict.
const (
	PresenceUnknown Presence = iota
	Present
	Lost         // fallen off the bus
	Inaccessible // hidden from the agent, usually by cgroups
	Detached     // the driver is unbound
	Missing      // no longer in the driver's inventory; set by judge.Measure, never by a source
)

//nolint:gochecknoglobals // a table of constants
var presenceNames = [...]string{"unknown", "present", "lost", "inaccessible", "detached", "missing"}

func (p Presence) String() string { return EnumName(presenceNames[:], int(p)) }

// XID is one error report of the driver.
type XID struct {
	Code    int       `json:"code"`
	At      time.Time `json:"at"` // when the driver reported it
	Witness Witness   `json:"-"`  // the first to report it
	Detail  XIDDetail `json:"-"`  // from the kernel log; zero without it
	Times   int       `json:"-"`  // how often it was reported, the last time at At; 0 means once
}

// Count returns how often the XID was reported.
func (x XID) Count() int { return max(x.Times, 1) }

const (
	// UnknownXID is the number that NVML and DCGM report for an XID that they have no number for.
	UnknownXID = 999
	// MaxXID limits the number of an XID. The driver's highest is 176.
	MaxXID = 9999
)

// XIDNumber returns the number that a witness reports, or UnknownXID above MaxXID, which limits the counts by number.
func XIDNumber(n uint64) int {
	if n > MaxXID {
		return UnknownXID
	}
	return int(n)
}

// XIDDetail is what only the kernel log has of an XID.
type XIDDetail struct {
	Process string // name of the process that caused it, at most 15 bytes; empty if there is none
	PID     int    // of Process in the host's PID namespace; 0 if unknown
	Text    string // the driver's message without process and PID, at most 200 bytes
}

// InKernelLog reports whether DCGM reads an XID from /dev/kmsg as well as from the driver (DCGM, DcgmKmsgReader.cpp).
func InKernelLog(code int) bool { return code == 79 || code == 119 || code == 120 }

// sameEventWindow merges no two events: 119 and 120 follow an RPC to the GSP that times out after six seconds.
const sameEventWindow = 5 * time.Second

// SameEvent reports whether two XIDs of a device are one event. DCGM delivers an XID that it reads from both places twice,
// with two times.
func (x XID) SameEvent(y XID) bool {
	if x.Code == y.Code && InKernelLog(x.Code) {
		return x.At.Sub(y.At).Abs() < sameEventWindow
	}
	return x.Code == y.Code && x.At.Equal(y.At)
}

// Severity is DCGM's grade of an Incident.
type Severity uint8

// The severities of an incident.
const (
	SeverityWarn Severity = iota
	SeverityFail
)

//nolint:gochecknoglobals // a table of constants
var severityNames = [...]string{"warn", "fail"}

func (s Severity) String() string { return EnumName(severityNames[:], int(s)) }

// Incident is a finding of DCGM's own health checks.
type Incident struct {
	System   string // "pcie", "nvlink", "imex", "memory", "inforom", "thermal", "power", "driver", …
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
	Rows      []XIDRow          // of the stream of XIDs that this poll listed, oldest first, again and again; none once judged
	RowsWhole bool              // Rows are the whole stream, not only the latest value or the end
	XIDs      []XID             // reported since the previous poll and in no row, oldest first; once judged, those that count
	Stale     bool              // the source measures other devices but has no current value of this one; Values is empty
	Checked   bool              // Incidents holds the result of DCGM's health checks
	Incidents []Incident        // all current incidents; none while the checks do not work
}

// Versions are the versions of the software that the agent uses, each empty if unknown.
type Versions struct {
	Driver string // "580.95.05"
	CUDA   string // "13.0"
	DCGM   string // the library in this process
	Engine string // the host engine, if it is another process
}

// Reading is the result of one poll. It holds devices and samples together so that both are of the same inventory.
type Reading struct {
	Devices []Device          // a GPU before its MIG devices
	Unnamed []UnnamedInstance // not modified once returned

	Samples  []Sample // at most one per device, in any order
	Entities []Entity // only with requested fields; not modified once returned
	Versions Versions

	// Measured changes whenever the source has measured. It is the newest time of a measurement by the source's clock, which may step;
	// zero if the source has none, or measures in Poll.
	Measured time.Time

	Checks    Checks
	Incidents []Incident // current incidents of DCGM's health checks that name no device, such as IMEX's
}

// UnnamedInstance is a compute instance of a GPU in Devices whose name is unknown, so a MIG device that Devices lack may be it.
type UnnamedInstance struct {
	Parent DeviceID
	GI, CI int
}

// MayHave reports whether a MIG device that Devices lack may exist without its name.
func (r *Reading) MayHave(d *Device) bool {
	return slices.Contains(r.Unnamed, UnnamedInstance{d.Parent, d.GI, d.CI})
}

// Session is a live connection to a source. Only an Opener returns one, so no call can reach a source that is not connected.
//
// The Monitor makes one call at a time. A call may hang for as long as the driver does.
type Session interface {
	// Poll measures every device. An error means that the session is unusable.
	Poll(ctx context.Context) (*Reading, error)
	// Wake fires when an immediate poll is worthwhile, for example after an XID.
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

// XIDWatcher is a Session that can detect new XIDs cheaply. The Monitor asks it between polls, and polls at once when there
// is one.
type XIDWatcher interface {
	// XIDsChanged reports whether Poll may deliver an XID now, and returns Reading.Measured as of now. It must not report the same
	// XID again after that Poll. An error means that the session is unusable.
	XIDsChanged(ctx context.Context) (changed bool, measured time.Time, err error)
	// ReadAllXIDs makes the next Poll list all rows: the part that it lists otherwise may lack one.
	ReadAllXIDs()
}

// Opener opens a session. Operators see its error, so it names what is missing.
type Opener func(ctx context.Context) (Session, error)

// ReportedAt returns when the XID was reported, on the clock of a sample of now. The driver's clock may differ or may have been set.
// DCGM keeps XIDs for ten minutes, so a time outside of them is replaced by now.
func (x XID) ReportedAt(now time.Time) time.Time {
	if age := now.Sub(x.At); age < 0 || age > 10*time.Minute {
		return now
	}
	return x.At
}
