package plugin

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// The MIG strategies, named as in NVIDIA's plugin.
const (
	MIGNone   = "none"   // GPUs are offered whole, even in MIG mode
	MIGSingle = "single" // all MIG devices of the node are alike and are offered under the resource of GPUs
	MIGMixed  = "mixed"  // MIG devices are offered by profile: nvidia.com/mig-1g.10gb
)

// migPrefix starts the names of MIG resources and the patterns for MIG profiles.
const migPrefix = "mig-"

// migProfile is a parsed profile: [<compute>c.]<slices>g.<gb>gb[<attributes>], such as 1c.3g.40gb or 1g.10gb+me.
type migProfile struct {
	compute, slices, gb int
	attributes          string
}

func parseProfile(s string) (p migProfile, ok bool) {
	rest := s
	if c, after, found := strings.Cut(rest, "c."); found {
		if p.compute, ok = deviceref.ParseDigits(c); !ok {
			return p, false
		}
		rest = after
	}
	g, rest, found := strings.Cut(rest, "g.")
	gb, attributes, foundGB := strings.Cut(rest, "gb")
	var okG, okGB bool
	p.slices, okG = deviceref.ParseDigits(g)
	p.gb, okGB = deviceref.ParseDigits(gb)
	p.attributes = attributes
	if p.compute == 0 {
		p.compute = p.slices
	}
	return p, found && foundGB && okG && okGB
}

// String returns the profile as NVIDIA's plugin names it: without the compute slices if they are all slices.
func (p migProfile) String() string {
	s := strconv.Itoa(p.slices) + "g." + strconv.Itoa(p.gb) + "gb" + p.attributes
	if p.compute != p.slices {
		s = strconv.Itoa(p.compute) + "c." + s
	}
	return s
}

// profileGB returns the size in a profile's name: the memory's share of the GPU in eighths, rounded up, of the GPU's
// memory in whole GiB (NVIDIA/go-nvlib, pkg/nvlib/device). Both arguments are in bytes.
func profileGB(memory, gpuMemory uint64) int {
	const gib = 1 << 30
	eighths := (memory*8 + gpuMemory - 1) / gpuMemory
	gibs := (gpuMemory + gib - 1) / gib
	return int((eighths*gibs + 4) / 8)
}

// maxGBDifference is the largest plausible difference between the sizes in DCGM's and NVIDIA's profile names. A greater
// one means that one of the two memory sizes is wrong.
const maxGBDifference = 2

// profileOf returns a MIG device's profile as NVIDIA's plugin names it. DCGM rounds the device's own memory, so it
// reports 7g.79gb and 1g.11gb for NVIDIA's 7g.80gb and 1g.12gb (NVIDIA/dcgm-exporter#544, #713). An unreadable profile
// is returned unchanged.
func profileOf(d *health.Device, gpuMemory uint64) string {
	p, ok := parseProfile(d.Profile)
	if !ok {
		return d.Profile
	}
	if d.Memory > 0 && d.Memory <= gpuMemory {
		if gb := profileGB(d.Memory, gpuMemory); max(gb-p.gb, p.gb-gb) <= maxGBDifference {
			p.gb = gb
		}
	}
	return p.String()
}

// applyMIGStrategy sets the resource of each device and removes the devices that the strategy does not offer.
func (l *layout) applyMIGStrategy(in layoutInput, selected []candidate) []candidate {
	switch in.cfg.MIGStrategy {
	case MIGSingle:
		return l.single(in.cfg, selected, in.before)
	case MIGMixed:
		return l.mixed(in.cfg, selected)
	}
	gpus := slices.DeleteFunc(selected, func(c candidate) bool { return c.state.Device.Kind != health.KindGPU })
	for i := range gpus {
		gpus[i].resource = in.cfg.gpuResource(gpus[i].state.Device.Model)
	}
	return gpus
}

// uniformLayout is what the strategy single offers: devices that are all alike. The zero value offers nothing.
type uniformLayout struct {
	active  bool
	profile string // of the MIG devices; empty for whole GPUs
}

// includes reports whether a device is offered. The partitions of an inaccessible GPU are unknown, so it
// counts as unchanged.
func (u uniformLayout) includes(c *candidate) bool {
	if c.state.Device.Kind == health.KindMIG {
		return u.profile != "" && c.profile == u.profile
	}
	return u.profile == "" && (!c.state.Device.MIGMode || !accessible(c))
}

func accessible(c *candidate) bool {
	return c.state.Sample.Presence == health.Present || c.state.Sample.Presence == health.PresenceUnknown
}

// single offers devices that are all alike under the resource of GPUs, because pods could not distinguish them: the MIG
// devices of the node, or its whole GPUs if none is in MIG mode. (The strategy is set for a whole cluster.)
//
// As in NVIDIA's plugin, a node whose GPUs differ at first offers nothing, because an operator has to decide. If a GPU
// of a node that already offers devices changes, only its own devices are removed: removing the others would fail the
// pods that wait for them. The first rule applies again when nothing is left of what was offered.
func (l *layout) single(cfg *Config, selected []candidate, before uniformLayout) []candidate {
	now := before
	if !before.active || !slices.ContainsFunc(selected, func(c candidate) bool { return before.includes(&c) }) {
		var reason string
		if now, reason = uniformLayoutOf(selected); reason != "" {
			l.err = "migStrategy single: " + reason + "; partition all GPUs alike, or use migStrategy mixed, or exclude those that differ"
			return nil
		}
	}
	l.warnDiffering(selected, now)
	selected = slices.DeleteFunc(selected, func(c candidate) bool { return !now.includes(&c) })
	now.active = len(selected) > 0
	l.uniform = now
	for i := range selected {
		selected[i].resource = cfg.gpuResource(selected[i].state.Device.Model)
	}
	return selected
}

// uniformLayoutOf returns the layout of devices that are all alike, or why they are not.
func uniformLayoutOf(selected []candidate) (u uniformLayout, reason string) {
	// Examples: a whole GPU, an empty one, the first MIG device, and the first MIG device of another profile.
	var whole, empty, mig, other *candidate
	for i := range selected {
		switch c := &selected[i]; {
		case c.state.Device.Kind == health.KindMIG:
			if mig == nil {
				mig = c
			}
			if other == nil && mig.profile != c.profile {
				other = c
			}
		case !accessible(c): // does not affect the other GPUs
		case !c.state.Device.MIGMode:
			whole = c
		case c.migCount == 0:
			empty = c
		}
	}
	switch {
	case mig == nil && empty == nil:
		return u, ""
	case whole != nil:
		return u, fmt.Sprintf("%s is not in MIG mode, and others are", whole.state.Device.GPUName())
	case empty != nil:
		return u, fmt.Sprintf("%s is in MIG mode and has no MIG devices", empty.state.Device.GPUName())
	case other != nil:
		return u, fmt.Sprintf("%s has %s, and %s has %s", mig.state.Device.GPUName(), mig.profile, other.state.Device.GPUName(), other.profile)
	}
	return uniformLayout{profile: mig.profile}, ""
}

// warnDiffering warns about each GPU that differs from the offered devices, or has MIG devices that differ.
func (l *layout) warnDiffering(selected []candidate, now uniformLayout) {
	for i := range selected {
		c := &selected[i]
		d, difference := &c.state.Device, ""
		switch {
		case now.includes(c):
		case d.Kind == health.KindMIG && now.profile != "":
			difference = "has " + c.profile + ", and only " + now.profile + " is offered"
		case d.Kind == health.KindMIG || !accessible(c): // reported with its GPU, or unknown
		case now.profile == "":
			difference = "is in MIG mode, and only whole GPUs are offered"
		case !d.MIGMode:
			difference = "is not in MIG mode"
		case c.migCount == 0:
			difference = "is in MIG mode and has no MIG devices"
		}
		if difference == "" {
			continue
		}
		l.warn("migStrategy single: %s is left out: it %s", d.GPUName(), difference)
	}
}

// mixed offers whole GPUs and MIG devices side by side. As in NVIDIA's plugin, it does not offer a compute instance that
// has only a part of its GPU instance, because it shares memory with its siblings.
func (l *layout) mixed(cfg *Config, selected []candidate) []candidate {
	offered := slices.DeleteFunc(selected, func(c candidate) bool {
		d := &c.state.Device
		if d.Kind == health.KindGPU {
			if d.MIGMode && c.migCount == 0 {
				l.warn("%s is not offered: it is in MIG mode and has no MIG devices", d.GPUName())
			}
			return d.MIGMode
		}
		reason := migMisfit(&c)
		if reason != "" {
			l.warn("%s", reason)
		}
		return reason != ""
	})
	var names nameCache
	for i := range offered {
		c := &offered[i]
		if c.state.Device.Kind == health.KindGPU {
			c.resource = cfg.gpuResource(c.state.Device.Model)
		} else {
			c.resource = names.get(c.profile, cfg.migResource)
		}
	}
	return offered
}

// migMisfit returns why a MIG device is not offered by its profile; empty if it is.
func migMisfit(c *candidate) string {
	d := c.device()
	p, ok := parseProfile(c.profile)
	switch {
	case !ok:
		return fmt.Sprintf("%s: MIG devices with the invalid profile %q are not offered", d.GPUName(), d.Profile)
	case p.compute != p.slices:
		return fmt.Sprintf("GPU %d: MIG devices %s are not offered: they have only a part of their GPU instance; create one compute instance "+
			"that fills it",
			d.Index, c.profile)
	}
	return ""
}

// nameCache saves computing the name of one profile for each of 56 MIG devices.
type nameCache []struct{ from, to string }

func (n *nameCache) get(from string, compute func(string) string) string {
	for _, e := range *n {
		if e.from == from {
			return e.to
		}
	}
	to := compute(from)
	*n = append(*n, struct{ from, to string }{from, to})
	return to
}

// ProfileSlices returns the compute slices of a MIG profile's GPU instance, and of its compute instance: 3 and 1 for 1c.3g.40gb.
func ProfileSlices(profile string) (gi, ci int, ok bool) {
	p, ok := parseProfile(profile)
	return p.slices, p.compute, ok
}
