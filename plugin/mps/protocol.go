package mps

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Requests to the Supervisor, over Root.Socket.
const (
	statusRoute  = "GET /status"   // returns a Status
	reloadRoute  = "POST /reload"  // read Root.DesiredFile now; does not wait for the daemons
	restartRoute = "POST /restart" // has a Restart; does not wait for the daemon
)

// Restart kills the daemon of a device, with its servers, and starts it again.
type Restart struct {
	Device health.DeviceID `json:"device"`
}

// Status is what the Supervisor does.
type Status struct {
	Version string         `json:"version"`         // of the program
	Shm     string         `json:"shm,omitempty"`   // why Root.ShmDir is not /dev/shm of the daemons; empty if it is
	Error   string         `json:"error,omitempty"` // why Root.DesiredFile is not followed; empty if it is, or if there is none
	Daemons []DaemonStatus `json:"daemons"`         // by device; also daemons that do not run yet or are being stopped
}

// DaemonStatus is the state of the process of a daemon.
type DaemonStatus struct {
	Device    health.DeviceID `json:"device"`
	PID       int             `json:"pid,omitempty"` // 0 if no process runs
	Started   time.Time       `json:"started,omitzero"`
	Restarts  uint64          `json:"restarts"` // since the Supervisor started
	MultiUser bool            `json:"multiUser"`
	Stopping  bool            `json:"stopping,omitempty"` // a process is being stopped, or the compute mode not yet set back
	Foreign   bool            `json:"foreign,omitempty"`  // no process runs because a daemon that mps-daemon has not started serves the device
	Error     string          `json:"error,omitempty"`    // why no process runs, with the last lines of the previous one's output
}
