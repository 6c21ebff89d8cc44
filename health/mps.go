package health

import "time"

// MPSDaemon is the state of the MPS control daemon of a device. It is immutable once stored.
type MPSDaemon struct {
	// Ready means that the daemon answers, its limits are set and, where it can report them, read back, and that what containers
	// mount is there. A device that is shared by MPS is offered only while its daemon is ready.
	Ready bool

	// Cause is that of the device's finding, one of the CauseMPS constants; empty for none. A daemon that is starting for the
	// first time is neither ready nor a finding.
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

	MultiUser bool // clients of different users run at the same time; else those of one user wait for those of another
}

// MPSServer is an MPS server process, which a daemon starts for the clients of a user.
type MPSServer struct {
	PID     int
	UID     int    // -1 if unknown
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

// The causes of findings about MPS daemons.
const (
	CauseMPSDown     = "mps-down"      // the daemon does not run, or mps-daemon itself does not
	CauseMPSHung     = "mps-hung"      // the daemon does not answer
	CauseMPSFault    = "mps-fault"     // a fatal fault of a client; the server refuses new clients until the affected ones have exited
	CauseMPSLimits   = "mps-limits"    // the limits could not be set, or the daemon reports others
	CauseMPSNotReady = "mps-not-ready" // what containers mount is missing, or the daemon has been starting for too long
	CauseMPSUsers    = "mps-users"     // Degraded: a client waits, because the server serves another user
)

// MPSState is the state of all MPS daemons, by device. A device without an entry is not served by MPS.
type MPSState struct{ Daemons map[DeviceID]*MPSDaemon }
