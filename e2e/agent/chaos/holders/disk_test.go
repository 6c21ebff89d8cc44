package holders

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/agent/chaos/internal/apart"
)

// disk is the node's disk with what the agent writes: its state, the checkpoint and the CDI specs of claims.
type disk struct {
	*apart.Disk
	full bool
}

// newDisk makes the directories of a node on a disk of its own.
func newDisk(root string) (*disk, error) {
	d, err := apart.NewDisk(filepath.Join(root, "disk"))
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"state", "cdi", "plugins"} {
		if err := errors.Join(os.Mkdir(filepath.Join(d.Dir, name), 0o750),
			os.Symlink(filepath.Join(d.Dir, name), filepath.Join(root, name))); err != nil {
			return nil, err
		}
	}
	return &disk{Disk: d}, nil
}

// set fills the disk, or frees it. It reports whether that changed something. Without the permission to mount, no disk can be full: the
// sockets of the driver are on it too.
func (d *disk) set(full bool) (changed bool, err error) {
	if !d.Mounted || d.full == full {
		return false, nil
	}
	if d.full = full; full {
		return true, d.Fill()
	}
	return true, d.Free()
}
