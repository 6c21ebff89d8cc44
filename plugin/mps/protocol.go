package mps

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Requests to the Supervisor, over Root.Socket. None waits for a daemon.
const (
	statusRoute  = "GET /status"   // returns a Status
	followRoute  = "POST /follow"  // has a Follow, and returns a Status
	restartRoute = "POST /restart" // has a Restart
)

// maxFollow limits the bytes of a Follow: 112 devices need about 25 KiB.
const maxFollow = 64 << 10

// followVersion is the version of Follow. The agent and mps-daemon may be of different releases: a release accepts its version and earlier
// ones, ignores keys that it lacks, and raises the version only for a change that others would misread.
const followVersion = 1

// Follow is what the Supervisor runs until the next Follow. It names devices only, no program and no path: who can send it has fewer rights
// than mps-daemon.
type Follow struct {
	Version int            `json:"version"`
	Sent    time.Duration  `json:"sent"`    // when, since the boot of the node
	Stopped bool           `json:"stopped"` // no daemon may run, because an operator detached the driver
	Daemons []followDaemon `json:"daemons"`
}

type followDaemon struct {
	Device           health.DeviceID `json:"device"`
	GPU              health.DeviceID `json:"gpu"`
	Index            int             `json:"index"`
	MIG              bool            `json:"mig"`
	ThreadPercentage int             `json:"threadPercentage"`
	PinnedMemory     uint64          `json:"pinnedMemory"`
}

func (d followDaemon) spec() Spec {
	s := Spec{Device: d.Device, GPU: d.GPU, Index: d.Index, ThreadPercentage: d.ThreadPercentage, PinnedMemory: d.PinnedMemory}
	if d.MIG {
		s.Kind = health.KindMIG
	}
	return s
}

func newFollowDaemon(s Spec) followDaemon {
	return followDaemon{
		Device: s.Device, GPU: s.GPU, Index: s.Index, MIG: s.Kind == health.KindMIG,
		ThreadPercentage: s.ThreadPercentage, PinnedMemory: s.PinnedMemory,
	}
}

// has reports whether a daemon is to run for a device. Nothing is followed before the first Follow.
func (f *Follow) has(id health.DeviceID) bool {
	return f != nil && slices.ContainsFunc(f.Daemons, func(d followDaemon) bool { return d.Device == id })
}

// sinceBoot returns the time since the boot of the node. All processes have the same.
func sinceBoot() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) // cannot fail
	return time.Duration(t.Nano())
}

// same reports whether the same daemons are to run.
func (f *Follow) same(g *Follow) bool {
	return f != nil && g != nil && f.Stopped == g.Stopped && slices.Equal(f.Daemons, g.Daemons)
}

func parseFollow(text []byte) (f Follow, err error) {
	if err := json.Unmarshal(text, &f); err != nil {
		return Follow{}, err
	}
	if f.Version < 1 || f.Version > followVersion {
		return Follow{}, fmt.Errorf("version: expected 1 to %d, found %d; run the same release of the agent and of mps-daemon",
			followVersion, f.Version)
	}
	seen := make(map[health.DeviceID]bool, len(f.Daemons))
	for i, daemon := range f.Daemons {
		switch id := daemon.Device; {
		case !isFileName(string(id)):
			return Follow{}, fmt.Errorf("daemons[%d].device: expected a UUID, found %q", i, id)
		case !isFileName(string(daemon.GPU)):
			return Follow{}, fmt.Errorf("daemons[%d].gpu: expected a UUID, found %q", i, daemon.GPU)
		case seen[id]:
			return Follow{}, fmt.Errorf("daemons[%d].device: %s is there twice", i, id)
		default:
			seen[id] = true
		}
	}
	return f, nil
}

// isFileName reports whether a device's ID can name its directory below Root.
func isFileName(id string) bool {
	return id != "" && id[0] != '.' && len(id) <= 100 && !strings.ContainsFunc(id, func(r rune) bool {
		return r != '-' && r != '.' && r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	})
}

// Restart kills the daemon of a device, with its servers, and starts it again.
type Restart struct {
	Device health.DeviceID `json:"device"`
}

// Status is what the Supervisor does.
type Status struct {
	Version string         `json:"version"`           // of the program
	Shm     string         `json:"shm,omitempty"`     // why Root.ShmDir is not /dev/shm of the daemons; empty if it is
	Error   string         `json:"error,omitempty"`   // why the Follow of the request is not followed; empty if it is
	Follows *Follow        `json:"follows,omitempty"` // nil before the first
	Pending bool           `json:"pending,omitempty"` // the daemons do not follow it yet
	Daemons []DaemonStatus `json:"daemons"`           // by device; also daemons that do not run yet or are being stopped
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
