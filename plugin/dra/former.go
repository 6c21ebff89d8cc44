package dra

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
)

// CheckFormer returns an error if claims are prepared on this node by a driver of another name or below another kubelet's directory: only
// that driver can end them, and their pods with them. former is the configuration of the process before this one; nil if it is unknown.
//
// The directory of a checkpoint has the driver's name. A pod of the agent may mount the directory of the configured name only. Then the
// claims show by their CDI specs, and former has the name.
func CheckFormer(c, former *plugin.Config, bootID string) error {
	if !c.Enabled && (former == nil || !former.Enabled) {
		return nil // the claims may belong to another agent
	}
	for _, file := range checkpoints(c.KubeletDir) {
		dir := filepath.Dir(file)
		if name := filepath.Base(dir); name != c.DRA.DriverName {
			if claims := preparedIn(dir, bootID); claims != "" {
				return errFormerName(name, c, claims)
			}
		}
	}
	// A former release without DRA has no mounts of it: see Orphans.
	if former == nil || !c.ServesDRA() {
		return nil
	}
	if former.KubeletDir != c.KubeletDir {
		if claims := preparedIn(former.DRADir(), bootID); claims != "" {
			return fmt.Errorf("plugin.kubeletDir: expected %s, got %s: %s there; set it back, and change it when the node is drained",
				former.KubeletDir, c.KubeletDir, claims)
		}
		return nil
	}
	if former.DRA.DriverName == c.DRA.DriverName {
		return nil
	}
	own, _ := readCheckpoint(c.DRADir()) // an unreadable one has none of the former driver's claims
	uids, _ := cdi.ClaimSpecs(former.CDI.Dir)
	uids = slices.DeleteFunc(uids, func(uid string) bool { _, ok := own.Claims[types.UID(uid)]; return ok })
	if len(uids) > 0 {
		return errFormerName(former.DRA.DriverName, c, preparedText(len(uids)))
	}
	return nil
}

func errFormerName(former string, c *plugin.Config, claims string) error {
	return fmt.Errorf("plugin.dra.driverName: expected %s, got %s: %s by the driver %s; set it back, and change it when the node is drained",
		former, c.DRA.DriverName, claims, former)
}

// preparedIn returns which claims a checkpoint has of this boot, or why that is unknown; empty if it has none.
func preparedIn(dir, bootID string) string {
	c, err := readCheckpoint(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return ""
	case err != nil:
		return fmt.Sprintf("claims may be prepared (%v)", err)
	case bootID != "" && c.BootID != "" && c.BootID != bootID: // no container outlives a boot
		return ""
	case c.Lost && len(c.Claims) == 0:
		return "claims of a lost checkpoint may be prepared"
	case len(c.Claims) > 0:
		return preparedText(len(c.Claims))
	}
	return ""
}

func preparedText(n int) string {
	if n == 1 {
		return "1 claim is prepared"
	}
	return fmt.Sprintf("%d claims are prepared", n)
}
