package sim

import (
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Partitions, the values of Event.MIG. They have the MIG devices of the profile h100-8-mig.
const (
	migOff      = "off"
	migSevenths = "sevenths" // 7x 1g.10gb
	migBalanced = "balanced" // 3g.40gb, 2g.20gb, 2x 1g.10gb
)

// partitioned reports whether a GPU is in MIG mode.
func (p profile) partitioned(gpu int) bool { return p.mig != nil && p.mig[gpu] != nil }

// withPartitions returns the profile with other partitions of its GPUs; "" keeps a GPU's own.
func (p profile) withPartitions(partitions []string) profile {
	mig := make([][]slice, len(p.pci))
	for i, partition := range partitions {
		switch partition {
		case migSevenths:
			mig[i] = sevenths()
		case migBalanced:
			mig[i] = balanced()
		case "":
			if p.mig != nil {
				mig[i] = p.mig[i]
			}
		}
	}
	p.mig = mig
	return p
}

// updateGPUs merges the layers, and replaces the devices if that changes a partition. Called with mu held.
func (s *Source) updateGPUs(at time.Time) {
	before := slices.Clone(s.states)
	partitions, changed := make([]string, len(s.gpus)), make([]bool, len(s.gpus))
	defer func() {
		for i := range s.gpus {
			s.reportChanges(i, &before[i], &s.states[i], changed[i])
		}
	}()
	for i := range partitions {
		s.states[i] = s.control.gpus[i].over(s.scenario.gpus[i])
		partitions[i] = valueOf(s.states[i].MIG)
		changed[i] = partitions[i] != s.partitions[i]
	}
	t := 0.0
	if !s.start.IsZero() {
		t = at.Sub(s.start).Seconds()
	}
	defer s.updateLoads(t)
	if !slices.Contains(changed, true) {
		return
	}
	p := s.profile.withPartitions(partitions)
	devices := p.devices(s.cfg.Seed) // a new slice: readings share the old one
	gpus := p.newGPUs(devices)
	for i := range gpus {
		g, old := &gpus[i], &s.gpus[i]
		g.xidRecord, g.tempOffset = old.xidRecord, old.tempOffset
		g.energyOffset += old.energy(t) - g.energy(t) // the counter continues
	}
	s.partitions, s.devices, s.gpus = partitions, devices, gpus
	s.number()
}

func (p profile) newGPUs(devices []health.Device) (gpus []gpu) {
	for i, d := range devices {
		if d.Kind == health.KindGPU {
			gpus = append(gpus, newGPU(p, d.Index, i, devices))
		}
	}
	return gpus
}
