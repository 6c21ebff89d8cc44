package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"
)

// claimKind is the kind of the devices of claims. Their names contain the claim's UID, so no container runtime has an old version of one in
// its cache.
const claimKind = "k8s.gpu-node-agent/claim"

// The name of a claim's spec has its UID between these.
const claimPrefix, claimSuffix = "k8s.gpu-node-agent-claim_", ".json"

// ClaimDevice is what the containers of a claim get with a device, in addition to the device.
type ClaimDevice struct {
	Name   string // in the spec, without the kind
	Env    map[string]string
	Mounts []ClaimMount
}

// ClaimMount is a directory of the host.
type ClaimMount struct {
	HostPath, ContainerPath string
	ReadOnly                bool
}

// ClaimDeviceName returns the CDI name of a device of a claim, VENDOR/CLASS=NAME.
func ClaimDeviceName(device string) string { return claimKind + "=" + device }

// IsClaimDevice reports whether a CDI name is one of ClaimDeviceName: that this agent, or one before it, prepared the claim.
func IsClaimDevice(name string) bool { return strings.HasPrefix(name, claimKind+"=") }

// ClaimSpecPath returns the path of a claim's spec. ok is false if the UID cannot be part of a file name.
func ClaimSpecPath(dir, uid string) (path string, ok bool) {
	ok = uid != "" && len(uid) <= 100 && !strings.ContainsFunc(uid, func(r rune) bool {
		return r != '-' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	})
	return filepath.Join(dir, claimPrefix+uid+claimSuffix), ok
}

// WriteClaimSpec replaces the spec of a claim.
func WriteClaimSpec(dir, uid string, devices []ClaimDevice) error {
	path, ok := ClaimSpecPath(dir, uid)
	if !ok {
		return fmt.Errorf("claim %q: expected a UID of letters, digits and hyphens", uid)
	}
	spec := &specs.Spec{Version: specVersion, Kind: claimKind}
	for _, d := range devices {
		edits := specs.ContainerEdits{}
		for _, name := range slices.Sorted(maps.Keys(d.Env)) {
			edits.Env = append(edits.Env, name+"="+d.Env[name])
		}
		for _, m := range d.Mounts {
			access := "rw"
			if m.ReadOnly {
				access = "ro"
			}
			edits.Mounts = append(edits.Mounts, &specs.Mount{
				HostPath: m.HostPath, ContainerPath: m.ContainerPath, Options: []string{access, "nosuid", "nodev", "rbind"},
			})
		}
		spec.Devices = append(spec.Devices, specs.Device{Name: d.Name, ContainerEdits: edits})
	}
	text, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return err
	}
	return writeSpec(path, text)
}

// RemoveClaimSpec removes the spec of a claim, if there is one.
func RemoveClaimSpec(dir, uid string) error {
	path, ok := ClaimSpecPath(dir, uid)
	if !ok {
		return nil // it was never written
	}
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ClaimSpecs returns the UIDs of the claims that have a spec.
func ClaimSpecs(dir string) (uids []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		rest, ours := strings.CutPrefix(e.Name(), claimPrefix)
		uid, complete := strings.CutSuffix(rest, claimSuffix)
		if _, ok := ClaimSpecPath(dir, uid); ours && complete && ok {
			uids = append(uids, uid)
		}
	}
	return uids, err
}
