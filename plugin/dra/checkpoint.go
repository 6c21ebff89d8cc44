package dra

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
)

// checkpointVersion is raised only for a change that an earlier release would misread.
const checkpointVersion = 1

// checkpointName is the file in the driver's directory.
const checkpointName = "gpu-node-agent.json"

// Suffix of a checkpoint that cannot be read.
const corruptSuffix = ".corrupt"

// maxCheckpoint is far more than the claims of a node take.
const maxCheckpoint = 64 << 20

// maxNames limits the remembered names. MIG devices come with a new UUID each time that they are made.
const maxNames = 1024

// checkpoint is what must outlive a restart of the agent. It is immutable once stored.
type checkpoint struct {
	Version int    `json:"version"`
	BootID  string `json:"bootID"` // of the boot in which the claims were prepared
	// Publishing means that slices of the driver may be on the API server, so that pods may get devices.
	Publishing bool `json:"publishing"`
	// Lost means that a checkpoint of this boot was lost: containers may hold devices by claims that Claims lacks.
	Lost   bool                       `json:"lost,omitempty"`
	Names  map[health.DeviceID]string `json:"names"` // of published devices
	Claims map[types.UID]Claim        `json:"claims"`
}

// parseCheckpoint reads a checkpoint. Its error means that the file is corrupt, or of a later release.
func parseCheckpoint(text []byte) (checkpoint, error) {
	var c checkpoint
	if err := json.Unmarshal(text, &c); err != nil {
		return checkpoint{}, err
	}
	if c.Version < 1 || c.Version > checkpointVersion {
		return checkpoint{}, fmt.Errorf("version: expected 1 to %d, found %d", checkpointVersion, c.Version)
	}
	devices := make(map[string]health.DeviceID, len(c.Names))
	for _, id := range slices.Sorted(maps.Keys(c.Names)) {
		name := c.Names[id]
		if other, exists := devices[name]; exists || name == "" || id == "" {
			return checkpoint{}, fmt.Errorf("names: expected a name of one device, found %q of %q and %q", name, other, id)
		}
		devices[name] = id
	}
	for uid, claim := range c.Claims {
		if _, ok := cdi.ClaimSpecPath("", string(uid)); !ok || claim.UID != uid {
			return checkpoint{}, fmt.Errorf("claims: expected a UID, found %q for %q", claim.UID, uid)
		}
		for i, d := range claim.Devices {
			if d.Device == "" || d.Name == "" {
				return checkpoint{}, fmt.Errorf("claims: %s: devices[%d]: expected a UUID and a name, found %q and %q", uid, i, d.Device, d.Name)
			}
		}
	}
	return c, nil
}

// encode returns the file's text.
func (c checkpoint) encode() ([]byte, error) {
	c.Version = checkpointVersion
	return json.Marshal(c)
}

// with returns a copy with these claims added or, if they are nil, removed.
func (c checkpoint) with(changes map[types.UID]*Claim) checkpoint {
	c.Claims = maps.Clone(c.Claims)
	if c.Claims == nil {
		c.Claims = make(map[types.UID]Claim)
	}
	for uid, claim := range changes {
		if claim == nil {
			delete(c.Claims, uid)
		} else {
			c.Claims[uid] = *claim
		}
	}
	return c
}

// remember returns a copy with these names. If they are too many, it forgets those of devices that are not published and that no claim has.
func (c checkpoint) remember(names map[health.DeviceID]string, published map[string]health.DeviceID) checkpoint {
	c.Names = maps.Clone(names)
	if len(names) <= maxNames {
		return c
	}
	used := make(map[health.DeviceID]bool)
	for _, id := range published {
		used[id] = true
	}
	for _, claim := range c.Claims {
		for _, d := range claim.Devices {
			used[d.Device] = true
		}
	}
	maps.DeleteFunc(c.Names, func(id health.DeviceID, _ string) bool { return !used[id] })
	return c
}

// sharesGPU reports whether two devices are one, or a GPU and a part of it.
func (d *ClaimDevice) sharesGPU(o *ClaimDevice) bool {
	return d.Device == o.Device || d.Parent == o.Device || o.Parent == d.Device
}

// conflicts returns the claims because of which another one cannot have a device: they have it, its GPU or a part of it, or so much of its
// memory that less than the claim's is left of capacity. claim has the devices to be given, which count as well.
func (c checkpoint) conflicts(claim *Claim, capacity map[health.DeviceID]uint64) (found map[types.UID]*ClaimDevice, err error) {
	found = make(map[types.UID]*ClaimDevice)
	for i := range claim.Devices {
		d := &claim.Devices[i]
		if d.Admin {
			continue
		}
		sum := d.Memory
		for j := range claim.Devices {
			o := &claim.Devices[j]
			switch {
			case i == j || o.Admin || !d.sharesGPU(o):
			case d.Memory == 0 || o.Memory == 0 || d.Device != o.Device:
				return nil, fmt.Errorf("device %s and device %s are of one GPU, and the claim has both", d.Name, o.Name)
			default:
				sum += o.Memory
			}
		}
		if limit := capacity[d.Device]; d.Memory > 0 && sum > limit {
			return nil, fmt.Errorf("device %s: expected at most %d MiB of memory, found %d MiB", d.Name, limit>>20, sum>>20)
		}
		var sharers []types.UID
		for _, uid := range slices.Sorted(maps.Keys(c.Claims)) {
			other := c.Claims[uid]
			for j := range other.Devices {
				o := &other.Devices[j]
				if uid == claim.UID || o.Admin || !d.sharesGPU(o) {
					continue
				}
				if d.Memory == 0 || o.Memory == 0 || d.Device != o.Device || d.MPS != o.MPS {
					found[uid] = o
					continue
				}
				sum += o.Memory
				sharers = append(sharers, uid)
			}
		}
		if d.Memory > 0 && sum > capacity[d.Device] {
			for _, uid := range sharers {
				found[uid] = d
			}
		}
	}
	return found, nil
}

// readCheckpoint reads a file. If there is none, the error is fs.ErrNotExist; a *corruptError means that it can never be read.
func readCheckpoint(dir string) (checkpoint, error) {
	path := filepath.Join(dir, checkpointName)
	info, err := os.Stat(path)
	if err != nil {
		return checkpoint{}, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxCheckpoint {
		return checkpoint{}, &corruptError{fmt.Errorf("expected a file of at most %d bytes, found %s of %d bytes", maxCheckpoint, info.Mode(), info.Size())}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return checkpoint{}, err
	}
	c, err := parseCheckpoint(text)
	if err != nil {
		return checkpoint{}, &corruptError{err}
	}
	return c, nil
}

// corruptError is why a file is not a checkpoint.
type corruptError struct{ error }

func (e *corruptError) Unwrap() error { return e.error }

func isCorrupt(err error) bool {
	_, ok := errors.AsType[*corruptError](err)
	return ok
}
