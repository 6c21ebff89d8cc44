package sim

import (
	"math"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// generation is the DCGM whose fields a source has.
type generation struct {
	name    string
	version string
	last    health.Field // the last of its fields in base units
}

func generationByName(name string) (generation, error) {
	all := []generation{
		{"4.6", "4.6.1 (simulated)", 1612},
		{"4.7", "4.7.0 (simulated)", health.LastBaseUnitField},
	}
	if i := slices.IndexFunc(all, func(g generation) bool { return g.name == name }); i >= 0 {
		return all[i], nil
	}
	return generation{}, keyErrorf("", `expected "4.6" or "4.7", got %q`, name)
}

func (g *generation) has(f health.Field) bool { return f <= g.last }

// Fields in base units that the simulation does not derive from the older fields, which have less precision.
const (
	fieldGPUUtilRatio health.Field = 1613 // and 1614 to 1616: of memory, encoder and decoder
	fieldFBTotalBytes health.Field = 1625 // and 1626 to 1628: free, used and reserved
	fieldNVLinkRate   health.Field = 1648 // bytes per second over all NVLinks
)

// addBaseUnits adds the fields in base units that DCGM has of the older ones among the values.
func (g *generation) addBaseUnits(v map[health.Field]float64) {
	for _, f := range [...]health.Field{1603, 1604, 1611} { // clocks, energy
		d, _ := health.DerivationOf(f)
		if old, ok := v[d.From]; ok && g.has(f) {
			v[f] = d.Apply(old)
		}
	}
}

// utilization sets the utilization of cores, memory, encoder and decoder, from 0 to 1. The older fields are whole percents.
func (g *generation) utilization(v map[health.Field]float64, ratios ...float64) {
	older := [...]health.Field{health.FieldGPUUtil, health.FieldMemCopyUtil, health.FieldEncUtil, health.FieldDecUtil}
	for i, x := range ratios {
		v[older[i]] = math.Round(100 * x)
		if f := fieldGPUUtilRatio + health.Field(i); g.has(f) {
			v[f] = x
		}
	}
}

// framebuffer sets the four sizes of the framebuffer, in MiB. The older fields are whole MiB, and add up to the total if
// DCGM has no others.
func (g *generation) framebuffer(v map[health.Field]float64, total, reserved, used float64) {
	const mebi = 1 << 20
	used = min(used, total-reserved)
	if f := fieldFBTotalBytes; g.has(f) {
		used = math.Round(16*used) / 16 // the driver allocates 64 KiB at least
		v[f], v[f+1], v[f+2], v[f+3] = mebi*total, mebi*(total-reserved-used), mebi*used, mebi*reserved
	} else {
		used = math.Round(used)
	}
	v[health.FieldFBTotal], v[health.FieldFBReserved] = total, reserved
	v[health.FieldFBUsed], v[health.FieldFBFree] = math.Floor(used), math.Floor(total-reserved-used)
}

// Fields of NVSwitches (dcgm_fields.h).
const (
	fieldFatalErrors    health.Field = 856
	fieldNonFatalErrors health.Field = 857
	fieldSwitchTemp     health.Field = 858 // °C
	fieldSwitchSlowdown health.Field = 859 // °C: where it slows down
	fieldSwitchShutdown health.Field = 860 // °C
)

// measureSwitches returns the NVSwitches at t seconds. They get warmer with the average load of the GPUs; the limits are as dcgmi prints
// them on an HGX H200.
func (s *Source) measureSwitches(t float64) []health.Entity {
	load := 0.0
	for i := range s.gpus {
		load += s.gpus[i].loads[0].at(t).slow / float64(len(s.gpus))
	}
	switches := make([]health.Entity, s.profile.switches)
	for i := range switches {
		switches[i] = health.Entity{Kind: health.EntityNVSwitch, ID: uint(i), Values: map[health.Field]float64{
			fieldFatalErrors: 0, fieldNonFatalErrors: 0,
			fieldSwitchTemp: math.Round(36 + 9*load + float64(i%2)), fieldSwitchSlowdown: 102, fieldSwitchShutdown: 105,
		}}
	}
	return switches
}
