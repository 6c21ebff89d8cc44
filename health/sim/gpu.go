package sim

import (
	"math"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// gpu is one simulated GPU with its MIG devices.
type gpu struct {
	model  model
	device int    // its place among the devices; its MIG devices follow it
	loads  []load // one of the whole GPU, or one of each MIG device
	slices []slice
	boot   float64 // mJ used before the source was opened
	warmth float64 // °C that this one differs from the model

	record
}

func newGPU(p profile, index, device int, devices []health.Device) gpu {
	g := gpu{model: p.model, device: device}
	room := func(total int) float64 { return float64(total) * 0.97 } // jobs leave a little free
	if !p.partitioned(index) {
		g.loads = []load{newLoad(seedOf(devices[device].ID), 1, room(g.model.total-g.model.reserved))}
	} else {
		g.slices = p.mig[index]
		for i, s := range g.slices {
			id := devices[device+1+i].ID
			g.loads = append(g.loads, newLoad(seedOf(id), float64(s.compute)/7, room(s.memory)))
		}
	}
	l := &g.loads[0]
	g.boot = math.Round(3600e3 * g.model.restPower * (1 + 200*l.random(0, 9))) // an hour to a week ago
	g.warmth = math.Round(4*l.random(0, 10)) - 2
	return g
}

// idleUsed is the framebuffer in use without a job, MiB.
const idleUsed = 4

// values appends what can be measured at t seconds: first the GPU's, then each MIG device's. What is
// absent here is blank in DCGM on that kind of device: a partitioned GPU has no utilization and no NVLink,
// a MIG device has a framebuffer and shares the rest with its GPU.
func (g *gpu) values(t float64, c conditions, to []map[health.Field]float64) []map[health.Field]float64 {
	const fields = 32 // the most that a GPU has, so that the map does not grow
	var (
		m      = &g.model
		v      = make(map[health.Field]float64, fields)
		all    level
		work   float64
		second = int64(math.Floor(t))
		noise  = func(n uint64) float64 { return 2*g.loads[0].random(second, n) - 1 } // -1 to 1, anew each second
	)
	to = append(to, v)
	for i := range g.loads {
		l := &g.loads[i]
		now := l.at(t)
		all.fast += l.share * now.fast
		all.slow += l.share * now.slow
		all.memory += now.memory
		work += l.share * l.work(t, now.fast)
		if g.slices != nil {
			s := make(map[health.Field]float64, 10)
			framebuffer(s, float64(g.slices[i].memory), 0, now.memory+idleUsed)
			profiling(s, now.fast, l.share)
			to = append(to, s)
		}
	}

	busy := all.fast > 0.02
	v[health.FieldSMClock], v[health.FieldMemClock] = m.restSM, m.restMem
	if busy {
		// A board at its power limit lowers the clock, in steps of 15 MHz.
		v[health.FieldSMClock] = math.Round((m.topSM-(m.topSM-m.lowSM)*all.slow*all.slow)/15) * 15
		v[health.FieldMemClock] = m.topMem
	}
	v[health.FieldClocksEvents] = clockEvents(busy, all.fast)
	if is(c.slowed) {
		v[health.FieldClocksEvents] = clocksSlowed
		v[health.FieldSMClock] = min(v[health.FieldSMClock], math.Round(m.topSM/2/15)*15)
	}

	span := m.maxPower - m.restPower
	v[health.FieldPower] = milli(min(m.maxPower, (m.restPower+span*all.fast)*(1+0.01*noise(11))))
	v[health.FieldEnergy] = g.used(t, work)

	temp := m.restTemp + g.warmth + (m.maxTemp-m.restTemp)*all.slow
	if pinned := is(c.temperature); pinned != 0 {
		temp = pinned
	}
	v[health.FieldGPUTemp] = math.Round(temp)
	if m.memTempOver > 0 {
		v[health.FieldMemoryTemp] = math.Round(temp + m.memTempOver)
	}

	framebuffer(v, float64(m.total), float64(m.reserved), all.memory+idleUsed)
	profiling(v, all.fast, 1)
	if g.slices == nil {
		util := percent(all.fast * (1 + 0.06*noise(12)))
		v[health.FieldGPUUtil] = util
		v[health.FieldMemCopyUtil] = percent(util / 100 * (0.45 + 0.1*noise(13)))
		v[health.FieldEncUtil], v[health.FieldDecUtil] = 0, 0 // training leaves the video engines alone
		if m.nvlinkRate > 0 {
			v[health.FieldNVLinkBandwidth] = math.Floor(m.nvlinkRate * work)
		}
	}
	if m.canMIG {
		v[health.FieldMIGMode] = number(g.slices != nil)
	}

	v[health.FieldPCIeReplays] = 0
	v[health.FieldVGPULicense] = 0 // what DCGM says of a GPU that is no vGPU
	v[health.FieldDBEVolatile] = float64(is(c.doubleBits))
	if m.retires {
		v[health.FieldRetiredSBE], v[health.FieldRetiredDBE], v[health.FieldRetiredPending] = 0, float64(is(c.retired)), 0
	}
	v[health.FieldRemappedUncorr], v[health.FieldRemappedCorr] = 0, 0
	v[health.FieldRemapFailed] = number(is(c.remapFailed))
	v[health.FieldRemapPending] = number(is(c.remap))
	v[health.FieldUnrepairable] = 0
	v[health.FieldRecoveryAction] = float64(is(c.recovery))
	if g.lastXID != 0 {
		v[health.FieldXID] = float64(g.lastXID)
	}
	return to
}

// Bits of FieldClocksEvents (nvml.h: nvmlClocksEventReasonGpuIdle, nvmlClocksEventReasonSwPowerCap,
// nvmlClocksEventReasonHwSlowdown with nvmlClocksEventReasonHwThermalSlowdown). The hardware's slowdown halves the core
// clocks at least.
const (
	clocksIdle     = 0x1
	clocksPowerCap = 0x4
	clocksSlowed   = 0x8 | 0x40
)

// clockEvents says why the clocks are not at their top: nothing runs, or all that the board may draw is drawn, which
// only the heaviest of the jobs do.
func clockEvents(busy bool, load float64) float64 {
	switch {
	case !busy:
		return clocksIdle
	case load > 0.97:
		return clocksPowerCap
	}
	return 0
}

// used is the energy in mJ until t, with so much work done.
func (g *gpu) used(t, work float64) float64 {
	return g.boot + math.Floor(1000*(g.model.restPower*t+(g.model.maxPower-g.model.restPower)*work))
}

// energy is the same for whoever does not know the work.
func (g *gpu) energy(t float64) float64 {
	work := 0.0
	for i := range g.loads {
		l := &g.loads[i]
		work += l.share * l.work(t, l.at(t).fast)
	}
	return g.used(t, work)
}

// framebuffer sets the four sizes, in whole MiB that add up.
func framebuffer(v map[health.Field]float64, total, reserved, used float64) {
	used = math.Round(min(used, total-reserved))
	v[health.FieldFBTotal], v[health.FieldFBReserved] = total, reserved
	v[health.FieldFBUsed], v[health.FieldFBFree] = used, total-reserved-used
}

// profiling sets what DCGM's profiling module measures, DCGM_FI_PROF_ fields 1001 to 1010: ratios of the device, and
// bytes per second of a training job over its share of a PCIe link.
func profiling(v map[health.Field]float64, busy, share float64) {
	busy = max(0, min(1, busy))
	v[1001], v[1002] = milli(busy), milli(0.92*busy)     // graphics engine, SMs
	v[1004], v[1005] = milli(0.6*busy), milli(0.45*busy) // tensor pipes, memory interface
	v[1009], v[1010] = math.Round(0.8e9*busy*share), math.Round(2.4e9*busy*share)
}

func percent(x float64) float64 { return math.Round(100 * max(0, min(1, x))) }

func milli(x float64) float64 { return math.Round(x*1000) / 1000 }

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
