package dra

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

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

// conflict is why a claim keeps another one from a device.
type conflict struct {
	claim  Claim
	held   ClaimDevice // of claim
	device string      // the name of the other one's device
	// Of a device that both share: what all shares would have, and may have. 0 if one of the claims has the device, its GPU or a part of it.
	memory, offered uint64
}

// conflicts returns what keeps a claim from its devices, at most one conflict for each other claim, in order. offered has the memory that all
// shares of a device may have. The error is that the claim cannot have its devices whatever others have.
func (c checkpoint) conflicts(claim *Claim, offered map[health.DeviceID]uint64) (found []conflict, err error) {
	others := slices.Sorted(maps.Keys(c.Claims))
	for i := range claim.Devices {
		d := &claim.Devices[i]
		if d.Admin {
			continue
		}
		memory, limit := d.Memory, offered[d.Device]
		for j := range claim.Devices {
			o := &claim.Devices[j]
			switch {
			case i == j || o.Admin || !d.sharesGPU(o):
			case !d.shares(o):
				return nil, fmt.Errorf("expected devices of several GPUs, or shares, found %s and %s of one GPU", d.Name, o.Name)
			default:
				memory += o.Memory
			}
		}
		if d.Memory > 0 && memory > limit {
			return nil, fmt.Errorf("device %s: expected at most %d MiB of memory, found %d MiB", d.Name, limit>>20, memory>>20)
		}
		var sharers []conflict
		for _, uid := range others {
			other := c.Claims[uid]
			for j := range other.Devices {
				o := &other.Devices[j]
				switch {
				case uid == claim.UID || o.Admin || !d.sharesGPU(o):
				case !d.shares(o):
					found = append(found, conflict{claim: other, held: *o, device: d.Name})
				default:
					memory += o.Memory
					sharers = append(sharers, conflict{claim: other, held: *o, device: d.Name, offered: limit})
				}
			}
		}
		if d.Memory > 0 && memory > limit {
			for _, s := range sharers {
				s.memory = memory
				found = append(found, s)
			}
		}
	}
	slices.SortStableFunc(found, func(a, b conflict) int { return strings.Compare(string(a.claim.UID), string(b.claim.UID)) })
	return slices.CompactFunc(found, func(a, b conflict) bool { return a.claim.UID == b.claim.UID }), nil
}

// shares reports whether containers can have both: they are shares of the memory of one device, by MPS or not.
func (d *ClaimDevice) shares(o *ClaimDevice) bool {
	return d.Memory > 0 && o.Memory > 0 && d.Device == o.Device && d.MPS == o.MPS
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
