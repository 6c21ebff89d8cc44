package sim

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// gpu is a simulated GPU with its MIG devices.
type gpu struct {
	model        model
	device       int        // index among the source's devices; its MIG devices follow
	loads        []workload // of the whole GPU, or of each MIG device
	slices       []slice
	energyOffset float64 // mJ used before the first Open
	tempOffset   float64 // °C by which this GPU differs from the model

	processLoads processLoads

	xidRecord
}

func newGPU(p profile, index, device int, devices []health.Device) gpu {
	g := gpu{model: p.models[index], device: device}
	m := &g.model
	free := func(total int) float64 { return float64(total) * 0.97 } // workloads leave a little free
	if !p.partitioned(index) {
		g.loads = []workload{newWorkload(seedOf(devices[device].ID), 1, free(m.total-m.reserved))}
	} else {
		g.slices = p.mig[index]
		for i, s := range g.slices {
			id := devices[device+1+i].ID
			g.loads = append(g.loads, newWorkload(seedOf(id), float64(s.compute)/7, free(s.memory)))
		}
	}
	l := &g.loads[0]
	g.energyOffset = math.Round(3600e3 * m.restPower * (1 + 200*l.random(0, 9))) // an hour to a week of it
	g.tempOffset = math.Round(4*l.random(0, 10)) - 2
	return g
}

// gpuState is the effect of all events on a GPU so far.
type gpuState struct {
	Event
	incidents incidentSet
}

// over returns s with the unset values of below.
func (s gpuState) over(below gpuState) gpuState {
	below.merge(&s.Event)
	below.incidents = s.incidents.over(below.incidents)
	return below
}

// idleUsed is the framebuffer in use without a job, MiB.
const idleUsed = 4

// values appends the values at t seconds: first the GPU's, then each MIG device's. DCGM has blanks for the fields that are absent here: a
// partitioned GPU has no utilization and no NVLink, a MIG device has a framebuffer and shares the rest with its GPU.
func (g *gpu) values(t float64, c *gpuState, dcgm *generation, to []map[health.Field]float64) []map[health.Field]float64 {
	const fields = 44 // at most, so that the map does not grow
	var (
		m      = &g.model
		v      = make(map[health.Field]float64, fields)
		all    level
		work   float64
		second = int64(math.Floor(t))
		noise  = func(n uint64) float64 { return 2*g.loads[0].random(second, n) - 1 } // -1 to 1, different each second
	)
	to = append(to, v)
	for i := range g.loads {
		l := &g.loads[i]
		now, done := g.load(i, t)
		all.fast += l.share * now.fast
		all.slow += l.share * now.slow
		all.memory += now.memory
		work += l.share * done
		if g.slices != nil {
			s := make(map[health.Field]float64, 15)
			dcgm.framebuffer(s, float64(g.slices[i].memory), 0, now.memory+idleUsed)
			profiling(s, now.fast, l.share)
			s[health.FieldXID] = 0 // the simulated driver reports XIDs of GPUs only
			to = append(to, s)
		}
	}

	busy := all.fast > 0.02
	v[health.FieldSMClock], v[health.FieldMemClock] = m.restSM, m.restMem
	if busy {
		// At the power limit the board lowers the clock, in steps of 15 MHz.
		v[health.FieldSMClock] = math.Round((m.topSM-(m.topSM-m.lowSM)*all.slow*all.slow)/15) * 15
		v[health.FieldMemClock] = m.topMem
	}
	v[health.FieldClocksEvents] = clocksEvents(busy, all.fast)
	if valueOf(c.ClocksSlowed) {
		v[health.FieldClocksEvents] = clocksSlowed
		v[health.FieldSMClock] = min(v[health.FieldSMClock], math.Round(m.topSM/2/15)*15)
	}

	span := m.maxPower - m.restPower
	v[health.FieldPower] = milli(min(m.maxPower, (m.restPower+span*all.fast)*(1+0.01*noise(11))))
	v[health.FieldEnergy] = g.energyAt(t, work)

	temp := m.restTemp + g.tempOffset + (m.maxTemp-m.restTemp)*all.slow
	temp = cmp.Or(valueOf(c.Temperature), temp)
	v[health.FieldGPUTemp] = math.Round(temp)
	if m.memTempOver > 0 {
		v[health.FieldMemoryTemp] = math.Round(temp + m.memTempOver)
	}

	dcgm.framebuffer(v, float64(m.total), float64(m.reserved), all.memory+idleUsed)
	profiling(v, all.fast, 1)
	if g.slices == nil {
		util := ratio(all.fast * (1 + 0.06*noise(12)))
		// Training does not use the video engines.
		dcgm.utilization(v, util, ratio(util*(0.45+0.1*noise(13))), 0, 0)
		if m.nvlinkRate > 0 {
			v[health.FieldNVLinkBandwidth] = math.Floor(m.nvlinkRate * work)
			if dcgm.has(fieldNVLinkRate) {
				v[fieldNVLinkRate] = math.Round(m.nvlinkRate * 1024 * all.fast)
			}
		}
	}
	if m.canMIG {
		v[health.FieldMIGMode] = boolValue(g.slices != nil)
	}

	for _, f := range []health.Field{health.FieldPCIeReplays, health.FieldRemappedUncorr, health.FieldRemappedCorr, health.FieldUnrepairable} {
		v[f] = 0
	}
	v[health.FieldVGPULicense] = 0 // DCGM's value for a GPU that is not a vGPU
	if m.retires {
		v[health.FieldRetiredSBE], v[health.FieldRetiredPending] = 0, 0
	}
	for i := range effects {
		if f := &effects[i]; f.metric != 0 && f.supports(m) {
			v[f.metric] = f.measured(&c.Event)
		}
	}
	v[health.FieldXID] = float64(g.lastXID)
	dcgm.addBaseUnits(v)
	return to
}

// Bits of FieldClocksEvents (nvml.h: nvmlClocksEventReasonGpuIdle, nvmlClocksEventReasonSwPowerCap,
// nvmlClocksEventReasonHwSlowdown with nvmlClocksEventReasonHwThermalSlowdown). A slowdown by the hardware at least
// halves the core clocks.
const (
	clocksIdle     = 0x1
	clocksPowerCap = 0x4
	clocksSlowed   = 0x8 | 0x40
)

// clocksEvents returns why the clocks are below their maximum: the GPU is idle, or one of the heaviest workloads draws
// all power that the board allows.
func clocksEvents(busy bool, load float64) float64 {
	switch {
	case !busy:
		return clocksIdle
	case load > 0.97:
		return clocksPowerCap
	}
	return 0
}

// energyAt returns the energy counter in mJ at t, after the given work.
func (g *gpu) energyAt(t, work float64) float64 {
	m := &g.model
	return g.energyOffset + math.Floor(1000*(m.restPower*t+(m.maxPower-m.restPower)*work))
}

// energy returns the energy counter in mJ at t.
func (g *gpu) energy(t float64) float64 {
	work := 0.0
	for i := range g.loads {
		_, done := g.load(i, t)
		work += g.loads[i].share * done
	}
	return g.energyAt(t, work)
}

// profiling sets fields 1001 to 1010 of DCGM's profiling module (DCGM_FI_PROF_): ratios of the device, and the bytes per
// second of a training workload over the device's share of a PCIe link.
func profiling(v map[health.Field]float64, busy, share float64) {
	busy = max(0, min(1, busy))
	v[1001], v[1002] = milli(busy), milli(0.92*busy)     // graphics engine, SMs
	v[1004], v[1005] = milli(0.6*busy), milli(0.45*busy) // tensor pipes, memory interface
	v[1009], v[1010] = math.Round(0.8e9*busy*share), math.Round(2.4e9*busy*share)
}

func ratio(x float64) float64 { return milli(max(0, min(1, x))) }

func milli(x float64) float64 { return math.Round(x*1000) / 1000 }

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

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
