package offer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Claim is a prepared ResourceClaim, or one to prepare.
type Claim struct {
	UID, Namespace, Name string
	Driver               string
	Parts                []Part
}

// Claims are the prepared claims, by UID. They are immutable once published.
type Claims struct {
	List []Claim
	Lost bool // some may be missing: their checkpoint was lost
}

// Part is a device, or a share of one, that a claim has.
type Part struct {
	Name   string // of the published device
	Device health.DeviceID
	Parent health.DeviceID // of a MIG device
	Admin  bool            // the claim has adminAccess: it takes nothing from others
	Memory uint64          // bytes of a share; 0 for a whole device
	MPS    bool            // MPS serves the device for this claim
}

// String returns the namespace and the name.
func (c *Claim) String() string { return c.Namespace + "/" + c.Name }

// sharesGPU reports whether two parts are of one device, or of a GPU and a part of it.
func (p *Part) sharesGPU(o *Part) bool {
	return p.Device == o.Device || p.Parent == o.Device || o.Parent == p.Device
}

// shares reports whether containers can have both: they are shares of the memory of one device, by MPS or not.
func (p *Part) shares(o *Part) bool {
	return p.Memory > 0 && o.Memory > 0 && p.Device == o.Device && p.MPS == o.MPS
}

// excludes reports whether containers cannot have both parts.
func (p *Part) excludes(o *Part) bool { return !p.Admin && !o.Admin && p.sharesGPU(o) && !p.shares(o) }

// Grant is the permission to give a claim its devices. Only Facts.Grant makes one.
type Grant struct{ uid string }

// Allows reports whether the permission is for the claim with this UID.
func (g Grant) Allows(uid string) bool { return g.uid == uid && uid != "" }

// Denial is why a claim does not get a device.
type Denial struct {
	Part   Part // of the claim
	Device *health.Device
	Answer Answer
}

func (d *Denial) Error() string { return fmt.Sprintf("device %s: %s", d.Part.Name, d.Answer.Reason()) }

// Grant decides whether a claim gets its devices: each as its request says, and all of them beside the prepared claims. Otherwise it
// returns the prepared claims that keep the claim from its devices, or an error. The error is a *Denial, or says that the claim could not
// have its devices even if nobody else had any. offered has the memory that all shares of a device may have.
func (f *Facts) Grant(claim *Claim, requests []Request, offered map[health.DeviceID]uint64) (Grant, []Conflict, error) {
	for i := range requests {
		r := requests[i]
		r.Purpose, r.API, r.MustKnow = Give, DRA, true
		r.Except = f.partners(claim, &claim.Parts[i])
		r.ExceptClaim = func(*Claim, *Part) bool { return true } // they are conflicts
		if a := f.Decide(&r); !a.Allows(Give) {
			return Grant{}, nil, &Denial{claim.Parts[i], r.Device, a}
		}
	}
	conflicts, err := f.Conflicts(claim, offered)
	if err != nil || len(conflicts) > 0 {
		return Grant{}, conflicts, err
	}
	return Grant{claim.UID}, nil, nil
}

// partners returns which holders of a device do not keep it from a claim: holders of the claim itself and of other shares. Holders of
// prepared claims do not either, because the prepared claims themselves count.
func (f *Facts) partners(claim *Claim, p *Part) func(podresources.Holder) bool {
	return func(h podresources.Holder) bool {
		switch {
		case h.Claim.Driver != claim.Driver || !h.ByClaim():
			return false
		case h.Namespace == claim.Namespace && h.Claim.Name == claim.Name:
			return true
		case p.Memory > 0 && h.Claim.ShareID != "" && !f.Claims.Lost: // it was just removed
			return true
		}
		return slices.ContainsFunc(f.Claims.List, func(c Claim) bool { return c.Namespace == h.Namespace && c.Name == h.Claim.Name })
	}
}

// Conflict is why a prepared claim keeps another one from a device.
type Conflict struct {
	Claim  Claim  // that has the device
	Part   Part   // of it
	Device string // the name of the other one's device
	// Of a device that both share: what all shares would have, and may have. 0 if one of the claims has the device, its GPU or a part of it.
	Memory, Offered uint64
}

// Conflicts returns what keeps a claim from its devices, at most one conflict for each prepared claim, in order. offered has the memory
// that all shares of a device may have. It returns an error if the claim cannot have its devices whatever others have.
func (f *Facts) Conflicts(claim *Claim, offered map[health.DeviceID]uint64) (found []Conflict, err error) {
	for i := range claim.Parts {
		d := &claim.Parts[i]
		if d.Admin {
			continue
		}
		memory, limit := d.Memory, offered[d.Device]
		for j := range claim.Parts {
			o := &claim.Parts[j]
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
		var sharers []Conflict
		for _, other := range f.Claims.List {
			for _, o := range other.Parts {
				switch {
				case other.UID == claim.UID || o.Admin || !d.sharesGPU(&o):
				case !d.shares(&o):
					found = append(found, Conflict{Claim: other, Part: o, Device: d.Name})
				default:
					memory += o.Memory
					sharers = append(sharers, Conflict{Claim: other, Part: o, Device: d.Name, Offered: limit})
				}
			}
		}
		if d.Memory > 0 && memory > limit {
			for _, s := range sharers {
				s.Memory = memory
				found = append(found, s)
			}
		}
	}
	slices.SortStableFunc(found, func(a, b Conflict) int { return strings.Compare(a.Claim.UID, b.Claim.UID) })
	return slices.CompactFunc(found, func(a, b Conflict) bool { return a.Claim.UID == b.Claim.UID }), nil
}

// Doubled returns the claims that exclude each other, and the devices that several of them have.
func (c *Claims) Doubled() (claims []*Claim, devices map[health.DeviceID]bool) {
	devices = make(map[health.DeviceID]bool)
	for i := range c.List {
		excluded := false
		for j := range c.List {
			for _, p := range c.List[i].Parts {
				for _, o := range c.List[j].Parts {
					if i != j && p.excludes(&o) {
						excluded, devices[p.Device] = true, true
					}
				}
			}
		}
		if excluded {
			claims = append(claims, &c.List[i])
		}
	}
	return claims, devices
}
