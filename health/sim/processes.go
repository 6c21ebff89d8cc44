package sim

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// Process is a simulated process of a GPU. The driver does not report unset fields.
type Process struct {
	PID    *int     `yaml:"pid,omitempty" json:"pid,omitempty"`
	Memory *int     `yaml:"memory,omitempty" json:"memory,omitempty"` // framebuffer in bytes
	SM     *float64 `yaml:"sm,omitempty" json:"sm,omitempty"`         // share of the time in which its kernels run
	Kind   *string  `yaml:"kind,omitempty" json:"kind,omitempty"`     // compute, which is the default, graphics or mps
	MIG    *int     `yaml:"mig,omitempty" json:"mig,omitempty"`       // number of the MIG device on the GPU, as in 3:0
}

// Limits of processes.
const (
	maxProcesses = 1000
	maxPID       = 1 << 22 // PID_MAX_LIMIT of Linux
	maxMemory    = 1 << 50 // bytes
	maxMIGIndex  = 6

	exampleProcesses = "[{pid: 4242, memory: 1073741824}]"
)

// processChecks are the checks of the keys of a process.
//
//nolint:gochecknoglobals // a table of constants
var processChecks = map[string]check{
	"pid":    within(1, maxPID),
	"memory": within(0, maxMemory),
	"sm":     within(0.0, 1),
	"kind":   oneOf(driver.ProcessCompute.String(), driver.ProcessGraphics.String(), driver.ProcessMPS.String()),
	"mig":    within(0, maxMIGIndex),
}

func (p *Process) kind() driver.ProcessKind {
	kind := driver.ProcessMPS
	for kind > driver.ProcessCompute && kind.String() != valueOf(p.Kind) {
		kind--
	}
	return kind
}

func entryKey(key string, i int) string { return fmt.Sprintf("%s[%d]", key, i) }

func checkProcesses(key string, value any) error {
	all, _ := value.([]Process)
	if len(all) > maxProcesses {
		return keyErrorf(key, "%d processes are too many; use at most %d", len(all), maxProcesses)
	}
	type identity struct {
		pid, mig int
		kind     driver.ProcessKind
	}
	seen := make(map[identity]bool)
	for i := range all {
		p := &all[i]
		key := entryKey(key, i)
		if err := p.check(key); err != nil {
			return err
		}
		id := identity{*p.PID, valueOf(cmp.Or(p.MIG, new(-1))), p.kind()}
		if seen[id] {
			return keyErrorf(key+".pid", "%d is repeated with the same kind and mig", *p.PID)
		}
		seen[id] = true
	}
	return nil
}

func (p *Process) check(key string) error {
	if p.PID == nil {
		return keyErrorf(key+".pid", "is missing; use 1 to %d", maxPID)
	}
	v := reflect.ValueOf(p).Elem()
	for i, name := range processKeys {
		if f := v.Field(i); !f.IsNil() {
			if err := processChecks[name](key+"."+name, f.Elem().Interface()); err != nil {
				return err
			}
		}
	}
	return nil
}

// validateMIG returns the errors of processes on MIG devices that the GPU does not have, after the event's own repartitioning.
// A scenario may repartition later, so that its processes are not checked. Called with mu held.
func (s *Source) validateMIG(e *Event) (errs []error) {
	if e.Processes == nil {
		return nil
	}
	partitions := slices.Clone(s.partitions)
	if e.MIG != nil {
		partitions[*e.GPU] = *e.MIG
	}
	n := len(s.profile.withPartitions(partitions).mig[*e.GPU])
	for i, p := range *e.Processes {
		if p.MIG != nil && *p.MIG >= n {
			errs = append(errs, keyErrorf(entryKey("processes", i)+".mig", "%d is not a MIG device of GPU %d, which has %d", *p.MIG, *e.GPU, n))
		}
	}
	return errs
}

// ListProcesses lists the simulated processes; it is a driver.ProcessLister. While the source is stalled, it waits until that
// or ctx ends: a hung driver answers nobody. Another failed engine does not affect it, and it needs no session. The processes
// of a lost GPU are unknown. A process of a MIG device that does not exist any more has ended.
func (s *Source) ListProcesses(ctx context.Context, devices []health.Device) (*driver.ProcessReading, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.advance(time.Now()); s.state == sourceStalled; s.advance(time.Now()) {
		if err := s.awaitChange(ctx, nil); err != nil {
			return nil, err
		}
	}
	if s.state == sourceEmpty || s.state == sourceLost {
		return nil, errNoDriver
	}
	r := &driver.ProcessReading{At: time.Now()}
	for i := range devices {
		d := &devices[i]
		at := slices.IndexFunc(s.devices, func(own health.Device) bool { return own.ID == d.ID })
		if at < 0 {
			continue
		}
		c := &s.states[s.devices[at].Index]
		if valueOf(c.Lost) || valueOf(c.Unbound) {
			continue
		}
		r.Measured = append(r.Measured, d.ID)
		for _, p := range valueOf(c.Processes) {
			onGPU := p.MIG == nil && d.Kind == health.KindGPU
			if onGPU || p.MIG != nil && *p.MIG == d.MIGIndex {
				r.Processes = append(r.Processes, p.reported(d.ID))
			}
		}
	}
	return r, nil
}

// reported returns the process as the driver reports it.
func (p *Process) reported(on health.DeviceID) driver.Process {
	return driver.Process{
		Device: on, PID: *p.PID, Kind: p.kind(),
		Memory: float64(valueOf(p.Memory)), HasMemory: p.Memory != nil, SM: valueOf(p.SM), HasSM: p.SM != nil,
	}
}

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
