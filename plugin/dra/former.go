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
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// CheckFormer returns an error if pods have what c does not serve: claims that a driver of another name or below another kubelet's
// directory has prepared, which only that driver can end, and their pods with them; or shares by the MPS daemons of another root. former is
// the configuration of the process before this one; nil if it is unknown.
func CheckFormer(c, former *plugin.Config, bootID string) error {
	err := checkClaims(c, former, bootID)
	if former != nil {
		err = errors.Join(err, mps.CheckFormer(mps.Root(c.Sharing.MPS.Root), mps.Root(former.Sharing.MPS.Root)))
	}
	return err
}

// checkClaims does that for claims. The directory of a checkpoint has the driver's name. A pod of the agent may mount the directory of the
// configured name only. Then the claims show by their CDI specs, and former has the name.
func checkClaims(c, former *plugin.Config, bootID string) error {
	if !c.Enabled && (former == nil || !former.Enabled) {
		return nil // the claims may belong to another agent
	}
	for _, file := range checkpoints(c.KubeletDir) {
		dir := filepath.Dir(file)
		name := filepath.Base(dir)
		if name == c.DRA.DriverName {
			continue
		}
		claims, readable := preparedIn(dir, bootID)
		// An unreadable one may be of years ago. It matters if its driver served last.
		if claims != "" && (readable || former == nil || former.DRA.DriverName == name) {
			return errFormerName(name, c, claims)
		}
	}
	// A former release without DRA has no mounts of it: see Orphans.
	if former == nil || !c.ServesDRA() {
		return nil
	}
	if former.KubeletDir != c.KubeletDir {
		if claims, _ := preparedIn(former.DRADir(), bootID); claims != "" {
			return fmt.Errorf("plugin.kubeletDir: expected %s, got %s: %s there; set it back, and change it when the node is drained",
				former.KubeletDir, c.KubeletDir, claims)
		}
		return nil
	}
	if former.DRA.DriverName == c.DRA.DriverName {
		return nil
	}
	own, err := readCheckpoint(c.DRADir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil // its claims have specs too: preparer.open sets it aside, and they count as lost
	}
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

// preparedIn returns which claims a checkpoint has of this boot; empty if it has none. If it is not readable, claims says why that is
// unknown.
func preparedIn(dir, bootID string) (claims string, readable bool) {
	c, err := readCheckpoint(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", true
	case err != nil:
		return fmt.Sprintf("claims may be prepared (%s: %v)", filepath.Join(dir, checkpointName), err), false
	case bootID != "" && c.BootID != "" && c.BootID != bootID: // no container outlives a boot
		return "", true
	case c.Lost && len(c.Claims) == 0:
		return "claims of a lost checkpoint may be prepared", true
	case len(c.Claims) > 0:
		return preparedText(len(c.Claims)), true
	}
	return "", true
}

func preparedText(n int) string {
	if n == 1 {
		return "1 claim is prepared"
	}
	return fmt.Sprintf("%d claims are prepared", n)
}
