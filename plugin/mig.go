package plugin

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// The strategies for MIG, in NVIDIA's words.
const (
	MIGNone   = "none"   // GPUs are handed out whole, even if they are in MIG mode
	MIGSingle = "single" // every MIG device of the node is alike, and is handed out under the name of a GPU
	MIGMixed  = "mixed"  // MIG devices are handed out by profile: nvidia.com/mig-1g.10gb
)

// migPrefix begins the names of MIG resources, and the patterns that are about MIG profiles.
const migPrefix = "mig-"

// migProfile is a profile in its parts: [<compute>c.]<slices>g.<gb>gb[<attributes>], such as 1c.3g.40gb or
// 1g.10gb+me.
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

// String is the profile as NVIDIA's plugin has it: without the compute slices if they are all.
func (p migProfile) String() string {
	s := strconv.Itoa(p.slices) + "g." + strconv.Itoa(p.gb) + "gb" + p.attributes
	if p.compute != p.slices {
		s = strconv.Itoa(p.compute) + "c." + s
	}
	return s
}

// nvidiaGB is the size in the name of a profile: the share of the GPU's memory, rounded up to eighths, of the
// GPU's memory in whole GiB (NVIDIA/go-nvlib, pkg/nvlib/device). Both sizes are in bytes.
func nvidiaGB(memory, whole uint64) int {
	const gib = 1 << 30
	eighths := (memory*8 + whole - 1) / whole
	gibs := (whole + gib - 1) / gib
	return int((eighths*gibs + 4) / 8)
}

// maxOff is by how much DCGM's size in a profile's name may differ from NVIDIA's. A greater difference means
// that one of the two memory sizes is not what it should be.
const maxOff = 2

// profileOf returns a MIG device's profile as NVIDIA's plugin names it. DCGM says 7g.79gb and 1g.11gb of what
// NVIDIA calls 7g.80gb and 1g.12gb (NVIDIA/dcgm-exporter#544, #713): it rounds the device's own memory. A
// profile that cannot be read stays as it is.
func profileOf(d *health.Device, whole uint64) string {
	p, ok := parseProfile(d.Profile)
	if !ok {
		return d.Profile
	}
	if d.Memory > 0 && d.Memory <= whole {
		if gb := nvidiaGB(d.Memory, whole); max(gb-p.gb, p.gb-gb) <= maxOff {
			p.gb = gb
		}
	}
	return p.String()
}

// handOut gives each chosen device its name, and leaves out what the strategy for MIG does not hand out.
func (a *arrangement) handOut(in layoutInput, chosen []candidate) []candidate {
	cfg := in.cfg
	switch cfg.MIGStrategy {
	case MIGSingle:
		return a.single(cfg, chosen, in.before)
	case MIGMixed:
		return a.mixed(cfg, chosen)
	}
	whole := slices.DeleteFunc(chosen, func(c candidate) bool { return c.state.Device.Kind != health.KindGPU })
	for i := range whole {
		whole[i].name = cfg.nameOfGPU(whole[i].state.Device.Model)
	}
	return whole
}

// singleLayout is what the strategy single has handed out: devices that are all alike. The zero value is nothing.
type singleLayout struct {
	serving bool
	profile string // of the MIG devices; empty if it is whole GPUs
}

// conforms reports whether a device is one of those that are handed out. How a GPU is partitioned that cannot be
// reached is not known: it stays what it was.
func (l singleLayout) conforms(c *candidate) bool {
	if c.state.Device.Kind == health.KindMIG {
		return l.profile != "" && c.profile == l.profile
	}
	return l.profile == "" && (!c.state.Device.MIGMode || !reached(c))
}

func reached(c *candidate) bool {
	return c.state.Sample.Presence == health.Present || c.state.Sample.Presence == health.PresenceUnknown
}

// single hands out devices that are all alike under the name of a GPU, since pods could not tell different ones
// apart: the MIG devices of the node, or its whole GPUs if none is in MIG mode, because the strategy is one for a whole
// cluster.
//
// A node whose GPUs differ hands out nothing at first, as with NVIDIA's plugin: a person has to decide. On a node that
// serves, a GPU that comes to differ takes away its own devices only: withdrawing the others would fail the pods that
// wait for them, and says no more about the GPU. When nothing is left of what was handed out, the first rule holds again.
func (a *arrangement) single(cfg *Config, chosen []candidate, before singleLayout) []candidate {
	now := before
	if !before.serving || !slices.ContainsFunc(chosen, func(c candidate) bool { return before.conforms(&c) }) {
		var why string
		if now, why = uniform(chosen); why != "" {
			a.Err = why
			return nil
		}
	}
	a.warnDiffering(chosen, now)
	chosen = slices.DeleteFunc(chosen, func(c candidate) bool { return !now.conforms(&c) })
	now.serving = len(chosen) > 0
	a.Single = now
	for i := range chosen {
		chosen[i].name = cfg.nameOfGPU(chosen[i].state.Device.Model)
	}
	return chosen
}

// uniform returns what devices that are all alike are handed out as, or why they cannot be.
func uniform(chosen []candidate) (as singleLayout, why string) {
	// One of each: a whole GPU, an empty one, the first MIG device, and the first that is not like it.
	whole, empty, mig, different := -1, -1, -1, -1
	for i := range chosen {
		switch d := &chosen[i].state.Device; {
		case d.Kind == health.KindMIG:
			if mig < 0 {
				mig = i
			}
			if different < 0 && chosen[mig].profile != chosen[i].profile {
				different = i
			}
		case !reached(&chosen[i]): // it must not take the others away
		case !d.MIGMode:
			whole = i
		case chosen[i].parts == 0:
			empty = i
		}
	}
	if mig < 0 && empty < 0 {
		return as, ""
	}
	at := func(i int) *health.Device { return &chosen[i].state.Device }
	const how = "; partition all GPUs alike, or use migStrategy mixed, or exclude those that differ"
	switch {
	case whole >= 0:
		return as, fmt.Sprintf("migStrategy single: GPU %d is not in MIG mode, and others are", at(whole).Index) + how
	case empty >= 0:
		return as, fmt.Sprintf("migStrategy single: GPU %d is in MIG mode and has no MIG devices", at(empty).Index) + how
	case different >= 0:
		return as, fmt.Sprintf("migStrategy single: %s on GPU %d and %s on GPU %d are of different profiles",
			chosen[mig].profile, at(mig).Index, chosen[different].profile, at(different).Index) + how
	}
	as.profile = chosen[mig].profile
	return as, ""
}

// warnDiffering names each GPU that is not like those that are handed out, or has MIG devices that are not.
func (a *arrangement) warnDiffering(chosen []candidate, now singleLayout) {
	for i := range chosen {
		c := &chosen[i]
		d, differs := &c.state.Device, ""
		switch {
		case now.conforms(c):
		case d.Kind == health.KindMIG && now.profile != "":
			differs = "has " + c.profile + ", and " + now.profile + " is handed out: the former is left out"
		case d.Kind == health.KindMIG || !reached(c): // the one is said of its GPU, of the other nothing is known
		case now.profile == "":
			differs = "is in MIG mode, and whole GPUs are handed out: it is left out"
		case !d.MIGMode:
			differs = "is not in MIG mode: it is left out"
		case c.parts == 0:
			differs = "is in MIG mode and has no MIG devices: it is left out"
		}
		if differs == "" {
			continue
		}
		text := fmt.Sprintf("migStrategy single: GPU %d %s; the other GPUs are served", d.Index, differs)
		if !slices.Contains(a.Warnings, text) {
			a.Warnings = append(a.Warnings, text)
		}
	}
}

// mixed hands out whole GPUs and MIG devices side by side. A compute instance that has only a part of its
// GPU instance shares memory with its siblings: NVIDIA's plugin does not hand it out, and neither do we.
func (a *arrangement) mixed(cfg *Config, chosen []candidate) []candidate {
	parts := slices.DeleteFunc(chosen, func(c candidate) bool {
		d := &c.state.Device
		if d.Kind == health.KindGPU {
			if d.MIGMode && c.parts == 0 {
				a.warn("GPU %d is in MIG mode and has no MIG devices: nothing of it is handed out", d.Index)
			}
			return d.MIGMode
		}
		p, ok := parseProfile(c.profile)
		switch {
		case !ok:
			a.warn("MIG device %s has the profile %q, which is none: it is not handed out", d.ID, d.Profile)
			return true
		case p.compute != p.slices:
			a.warn("MIG device %s (%s) has only a part of its GPU instance: it is not handed out; make one compute instance that fills it",
				d.ID, c.profile)
			return true
		}
		return false
	})
	var names memo
	for i := range parts {
		c := &parts[i]
		if c.state.Device.Kind == health.KindGPU {
			c.name = cfg.nameOfGPU(c.state.Device.Model)
		} else {
			c.name = names.get(c.profile, cfg.nameOfMIG)
		}
	}
	return parts
}

// memo remembers what was made of a text, so that 56 MIG devices of one profile need one name.
type memo []struct{ from, to string }

func (m *memo) get(from string, compute func(string) string) string {
	for _, e := range *m {
		if e.from == from {
			return e.to
		}
	}
	to := compute(from)
	*m = append(*m, struct{ from, to string }{from, to})
	return to
}
