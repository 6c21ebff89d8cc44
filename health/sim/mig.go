package sim

import (
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The words of Event.MIG. Partitions are those of profile h100-8-mig.
const (
	migOff      = "off"
	migSevenths = "sevenths" // 7x 1g.10gb
	migBalanced = "balanced" // 3g.40gb, 2g.20gb, 2x 1g.10gb
)

func migWords() []string { return []string{migOff, migSevenths, migBalanced} }

// partitioned reports whether a GPU is in MIG mode.
func (p profile) partitioned(gpu int) bool { return p.mig != nil && p.mig[gpu] != nil }

// repartitioned is the machine with its GPUs partitioned as words tell, where "" is as the profile has it.
func (p profile) repartitioned(words []string) profile {
	mig := make([][]slice, len(p.pci))
	for i, word := range words {
		switch word {
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

// partition brings the devices to what the layers say of MIG. Called with mu held.
func (s *Source) partition(at time.Time) {
	words, same := make([]string, len(s.gpus)), true
	for i := range words {
		words[i] = is(s.conditions(i).mig)
		same = same && words[i] == s.words[i]
	}
	if same {
		return
	}
	t := 0.0
	if !s.start.IsZero() {
		t = at.Sub(s.start).Seconds()
	}
	p := s.profile.repartitioned(words)
	devices := p.devices(s.cfg.Seed) // another list: the one before has been handed out
	var gpus []gpu
	for place, d := range devices {
		if d.Kind == health.KindGPU {
			gpus = append(gpus, newGPU(p, d.Index, place, devices))
		}
	}
	for i := range gpus {
		now, was := &gpus[i], &s.gpus[i]
		now.record, now.warmth = was.record, was.warmth
		now.boot += was.energy(t) - now.energy(t) // the meter goes on
	}
	s.words, s.devices, s.gpus = words, devices, gpus
}
