package sim

import "slices"

// processLoads are the loads that processes put on a GPU's devices, instead of its workloads. nil: none.
type processLoads []processLoad

// processLoad is the constant load of a device since a time in seconds.
type processLoad struct {
	level
	unknown bool // the work of a process is not set: the device has its workload

	since float64 // s
	done  float64 // the work until since, s at full load; with unknown, what to add to the workload's
}

// load returns the load of a device at t, and its work from 0 to t in seconds at full load.
func (g *gpu) load(device int, t float64) (now level, done float64) {
	var p processLoad
	if p.unknown = true; device < len(g.processLoads) {
		p = g.processLoads[device]
	}
	if !p.unknown {
		return p.level, p.done + p.fast*(t-p.since)
	}
	return g.loads[device].at(t), p.done + g.loads[device].work(t)
}

// updateLoads derives the loads at t from the processes: once an event has set the processes of any GPU, no GPU works without processes.
// Called with mu held.
func (s *Source) updateLoads(t float64) {
	set := slices.ContainsFunc(s.states, func(c gpuState) bool { return c.Processes != nil })
	for i := range s.gpus {
		g := &s.gpus[i]
		if !set && g.processLoads == nil {
			continue
		}
		loads := make(processLoads, len(g.loads))
		for device := range loads {
			l := &loads[device]
			_, done := g.load(device, t)
			l.since, l.unknown = t, !set
			for _, p := range valueOf(s.states[i].Processes) {
				if g.slices != nil && (p.MIG == nil || *p.MIG != device) {
					continue
				}
				l.memory += float64(valueOf(p.Memory)) / (1 << 20)
				l.fast += valueOf(p.SM)
				l.unknown = l.unknown || p.SM == nil
			}
			l.fast, l.memory = min(l.fast, 1), min(l.memory, g.loads[device].memory)
			l.slow = l.fast
			if l.done = done; l.unknown { // the counters continue
				l.done -= g.loads[device].work(t)
			}
		}
		g.processLoads = loads
	}
}
