package sim

import (
	"math"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

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
