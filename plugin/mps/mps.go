// Package mps runs, configures and judges MPS control daemons, one per GPU or MIG device.
//
//	gpu-node-agent mps-daemon: Supervisor ─► nvidia-cuda-mps-control -f, one per device; outlives the agent
//	gpu-node-agent:            Follower   ─► tells the Supervisor which daemons to run, sets and reads back their limits, judges
//	                                         them ─► health.MPSState ─► Monitor ─► Snapshot
//
// Both share the directory Root of the node. They use the control program's commands of MPS v2
// (https://docs.nvidia.com/deploy/mps/latest/mpsv2-interface.html).
package mps

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Desired is what the Follower has the Supervisor run.
type Desired struct {
	Root    Root
	Control string // the control program: a path, or a name to search in PATH
	Daemons []Spec // by device
}

// Spec describes the daemon of a device.
type Spec struct {
	Device health.DeviceID
	Kind   health.Kind
	GPU    health.DeviceID // the device itself, or the parent of a MIG device
	Index  int             // of the GPU, for texts

	// The limits of a share, which are the daemon's defaults for all clients.
	ThreadPercentage int    // percent of the SMs; 100 for no limit; 0 if the limits are unknown, which are then left as they are
	PinnedMemory     uint64 // bytes, a multiple of 1 MiB; 0 for no limit
}

// unknownSpec returns the spec of a device of which only the directory is known.
func unknownSpec(id health.DeviceID) Spec {
	s := Spec{Device: id, GPU: id}
	if strings.HasPrefix(string(id), "MIG-") {
		s.Kind = health.KindMIG
	}
	return s
}

// Root is the directory that mps-daemon, the agent and, in part, the containers share.
type Root string

// PipeDir returns the directory of the daemon's control socket, which containers mount.
func (r Root) PipeDir(id health.DeviceID) string { return filepath.Join(string(r), string(id), "pipe") }

// LogDir returns the directory of the daemon's logs.
func (r Root) LogDir(id health.DeviceID) string { return filepath.Join(string(r), string(id), "log") }

// ShmDir returns the directory that is /dev/shm of the daemons and of all clients.
func (r Root) ShmDir() string { return filepath.Join(string(r), "shm") }

// computeModeFile returns the path of the record of what a GPU's compute mode was before MPS.
func (r Root) computeModeFile(gpu health.DeviceID) string {
	return filepath.Join(string(r), string(gpu), "compute-mode")
}

// lockFile returns the path of the file that the Supervisor locks.
func (r Root) lockFile() string { return filepath.Join(string(r), "mps-daemon.lock") }

// devices returns the devices that have directories.
func (r Root) devices() (ids []health.DeviceID) {
	entries, _ := os.ReadDir(string(r)) // an error shows when a daemon starts
	for _, e := range entries {
		name := e.Name()
		if e.IsDir() && isFileName(name) && (strings.HasPrefix(name, "GPU-") || strings.HasPrefix(name, "MIG-")) {
			ids = append(ids, health.DeviceID(name))
		}
	}
	return ids
}

// Socket returns the path of the Supervisor's socket.
func (r Root) Socket() string { return filepath.Join(string(r), "mps-daemon.sock") }

// used reports whether mps-daemon runs or has run below the root: it may have daemons, or compute modes to set back.
func (r Root) used() bool {
	_, err := os.Lstat(r.Socket())
	return err == nil || len(r.devices()) > 0
}
