package formerhealth

import (
	"strings"
	"time"
)

// MPSDaemon is the state of the MPS control daemon of a device. It is immutable once stored.
type MPSDaemon struct {
	// Ready means that the daemon answers, that its limits are set and, where it can report them, read back, and that everything that
	// containers mount exists. A device that is shared by MPS is offered only while its daemon is ready.
	Ready bool

	// Leaving means that the device is no longer shared by MPS, but its daemon still runs: a container holds a share, a client is
	// connected, or the daemon is being stopped. Until it has ended, the device cannot be used in another way.
	Leaving bool

	// Cause is the cause of the device's finding, one of the CauseMPS constants; empty for none. A daemon that is starting for the first time
	// is neither ready nor a finding, and one that is leaving is no finding.
	Cause  string
	Reason string // a clause for people; why the daemon is not ready, also without a Cause
	Action Action

	PID      int       // of the control daemon in the PID namespace of `gpu-node-agent mps-daemon`; 0 if it does not run
	Started  time.Time // zero if unknown
	Restarts uint64    // since mps-daemon started

	Servers []MPSServer
	// The limits of one share that are in force by default, also for a client that removes its own; 0 if unknown.
	ThreadPercentage float64 // percent of the SMs
	PinnedMemory     uint64  // bytes

	MultiUser bool // clients of different users run at the same time; else one user's wait for another's
}

// MPSServer is an MPS server process, which a daemon starts for the clients of a user.
type MPSServer struct {
	PID     int
	Status  string // as the daemon writes it: INITIALIZING, ACTIVE or FAULT
	Clients []int  // PIDs
}

// ClientCount returns the number of clients of all servers.
func (d *MPSDaemon) ClientCount() (n int) {
	for _, s := range d.Servers {
		n += len(s.Clients)
	}
	return n
}

const mpsPrefix = "mps-"

// The causes of findings about MPS daemons.
const (
	CauseMPSForeign  = "mps-foreign"   // a daemon that mps-daemon has not started serves the device
	CauseMPSDown     = "mps-down"      // the daemon does not run, or mps-daemon itself does not
	CauseMPSHung     = "mps-hung"      // the daemon does not answer
	CauseMPSFault    = "mps-fault"     // a fatal fault of a client; the server refuses new clients until the affected ones have exited
	CauseMPSLimits   = "mps-limits"    // the limits could not be set, or the daemon reports others
	CauseMPSNotReady = "mps-not-ready" // what containers mount is missing, or the daemon has been starting for too long
)

// finding returns the finding about the daemon of a device, and false if there is none.
func (d *MPSDaemon) finding() (Finding, bool) {
	if d == nil || d.Cause == "" {
		return Finding{}, false
	}
	return Finding{Cause: d.Cause, State: Unhealthy, Reason: d.Reason, Action: d.Action, Clears: ClearsItself}, true
}

// OfMPS reports whether the finding is about the device's MPS daemon. Decide renews it while the daemon's state has it, so it
// ends with its reason in every recovery mode, is not saved, and an operator cannot clear it. It does not count as a trip: the
// device itself works.
func (f Finding) OfMPS() bool { return strings.HasPrefix(f.Cause, mpsPrefix) }

// MPSState is the state of all MPS daemons, by device. A device without an entry is not served by MPS.
type MPSState struct{ Daemons map[DeviceID]*MPSDaemon }
