package dra

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// checkpointVersion is raised only for a change that an earlier release would misread.
const checkpointVersion = 1

// checkpointName is the file in the driver's directory.
const checkpointName = "gpu-node-agent.json"

// Suffix of a checkpoint that cannot be read.
const corruptSuffix = ".corrupt"

// reserve is the space in bytes that the disk keeps for the checkpoint at least, twice: some hundred claims with the names of the devices.
const reserve = 256 << 10

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

// add returns a copy with a claim that is permitted.
func (c checkpoint) add(claim *Claim, g offer.Grant) checkpoint {
	if !g.Allows(string(claim.UID)) {
		panic("a claim without permission")
	}
	c.Claims = maps.Clone(c.Claims)
	if c.Claims == nil {
		c.Claims = make(map[types.UID]Claim)
	}
	c.Claims[claim.UID] = *claim
	return c
}

// without returns a copy without a claim.
func (c checkpoint) without(uid types.UID) checkpoint {
	c.Claims = maps.Clone(c.Claims)
	delete(c.Claims, uid)
	return c
}

// needed reports whether pods may have devices, or may get them.
func (c checkpoint) needed() bool { return c.Publishing || c.Lost || len(c.Claims) > 0 }

// remember returns a copy with these names. If they are too many, it forgets names of devices that are not published and that no claim has.
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

// offerClaim returns what a claim of a driver has, for decisions.
func (c *Claim) offerClaim(driver string) offer.Claim {
	o := offer.Claim{UID: string(c.UID), Namespace: c.Namespace, Name: c.Name, Driver: driver}
	for i := range c.Devices {
		d := &c.Devices[i]
		o.Parts = append(o.Parts, offer.Part{Name: d.Name, Device: d.Device, Parent: d.Parent, Admin: d.Admin, Memory: d.Memory, MPS: d.MPS})
	}
	return o
}

// offerClaims returns what all claims of a driver have.
func (c *checkpoint) offerClaims(driver string) offer.Claims {
	all := offer.Claims{Lost: c.Lost}
	for _, uid := range slices.Sorted(maps.Keys(c.Claims)) {
		all.List = append(all.List, new(c.Claims[uid]).offerClaim(driver)) //nolint:forbidigo // makes it
	}
	return all
}

// readCheckpoint reads a file. If there is none, the error is fs.ErrNotExist; a *corruptError means that it can never be read.
func readCheckpoint(dir string) (checkpoint, error) {
	text, _, err := durable.WithSpare(reserve).Read(filepath.Join(dir, checkpointName))
	switch {
	case errors.Is(err, durable.ErrNotRegular), errors.Is(err, durable.ErrTooLarge):
		return checkpoint{}, &corruptError{err}
	case err != nil:
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

func isCorrupt(err error) bool {
	_, ok := errors.AsType[*corruptError](err)
	return ok
}
