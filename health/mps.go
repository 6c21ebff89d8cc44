package health

import "time"

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

// MPSState is the state of all MPS daemons, by device. A device without an entry is not served by MPS.
type MPSState struct{ Daemons map[DeviceID]*MPSDaemon }
