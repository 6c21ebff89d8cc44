package sim

import (
	"context"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/health"
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

// kind returns the kind of the process; ok is false if its name is unknown.
func (p *Process) kind() (kind health.ProcessKind, ok bool) {
	if p.Kind == nil {
		return health.ProcessCompute, true
	}
	for kind := health.ProcessCompute; kind <= health.ProcessMPS; kind++ {
		if kind.String() == *p.Kind {
			return kind, true
		}
	}
	return 0, false
}

// processList is the parameter Event.Processes.
type processList struct{}

func (processList) isSet(e *Event) bool { return e.Processes != nil }

func (processList) decode(e *Event, key string, node *yaml.Node) error {
	if node.Kind != yaml.SequenceNode {
		return keyErrorf(key, "expected a list such as %s", exampleProcesses)
	}
	all := make([]Process, len(node.Content))
	for i, entry := range node.Content {
		if err := all[i].decode(entryKey(key, i), entry); err != nil {
			return err
		}
	}
	e.Processes = &all
	return nil
}

func entryKey(key string, i int) string { return fmt.Sprintf("%s[%d]", key, i) }

func (p *Process) decode(key string, node *yaml.Node) (err error) {
	if node.Kind != yaml.MappingNode {
		return keyErrorf(key, "expected a process such as {pid: 4242, memory: 1073741824}")
	}
	seen := make(map[string]bool)
	for i := 0; i+1 < len(node.Content) && err == nil; i += 2 {
		name, value := node.Content[i].Value, node.Content[i+1]
		at := key + "." + name
		if seen[name] {
			return keyErrorf(at, "duplicate key")
		}
		seen[name] = true
		switch name {
		case "pid":
			p.PID, err = decodeScalar[int](at, value, []string{"!!int"}, "a whole number")
		case "memory":
			p.Memory, err = decodeScalar[int](at, value, []string{"!!int"}, "a whole number of bytes")
		case "sm":
			p.SM, err = decodeScalar[float64](at, value, []string{"!!int", "!!float"}, "a number from 0 to 1")
		case "kind":
			p.Kind, err = decodeScalar[string](at, value, []string{"!!str"}, "compute, graphics or mps")
		case "mig":
			p.MIG, err = decodeScalar[int](at, value, []string{"!!int"}, "the number of a MIG device")
		default:
			return keyErrorf(key, "%s is not known; use pid with memory, sm, kind, mig", quote(name))
		}
	}
	return err
}

func (processList) check(e *Event, key string) error {
	all := *e.Processes
	if len(all) > maxProcesses {
		return keyErrorf(key, "%d processes are too many; use at most %d", len(all), maxProcesses)
	}
	type identity struct {
		pid, mig int
		kind     health.ProcessKind
	}
	seen := make(map[identity]bool)
	for i := range all {
		p := &all[i]
		key := entryKey(key, i)
		if err := p.check(key); err != nil {
			return err
		}
		kind, _ := p.kind()
		mig := -1
		if p.MIG != nil {
			mig = *p.MIG
		}
		if id := (identity{*p.PID, mig, kind}); seen[id] {
			return keyErrorf(key+".pid", "%d is repeated with the same kind and mig", *p.PID)
		} else {
			seen[id] = true
		}
	}
	return nil
}

func (p *Process) check(key string) error {
	outside := func(v *int, least, most int) bool { return v != nil && (*v < least || *v > most) }
	_, kindOK := p.kind()
	switch {
	case p.PID == nil:
		return keyErrorf(key+".pid", "is missing; use 1 to %d", maxPID)
	case outside(p.PID, 1, maxPID):
		return keyErrorf(key+".pid", "%d is out of range; use 1 to %d", *p.PID, maxPID)
	case outside(p.Memory, 0, maxMemory):
		return keyErrorf(key+".memory", "%d is out of range; use 0 to %d", *p.Memory, maxMemory)
	case p.SM != nil && !(*p.SM >= 0 && *p.SM <= 1): // includes NaN
		return keyErrorf(key+".sm", "%v is out of range; use 0 to 1", *p.SM)
	case !kindOK:
		return keyErrorf(key+".kind", "%s is not known; use compute, graphics, mps", quote(*p.Kind))
	case outside(p.MIG, 0, maxMIGIndex):
		return keyErrorf(key+".mig", "%d is out of range; use 0 to %d", *p.MIG, maxMIGIndex)
	}
	return nil
}

func (processList) merge(to, from *Event) {
	if from.Processes != nil {
		to.Processes = from.Processes
	}
}

func (processList) value(*Event) float64 { return 0 }

func (processList) logField(key string, e *Event) zap.Field { return zap.Any(key, *e.Processes) }

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

// ListProcesses lists the simulated processes; it is a health.ProcessLister. While the source is stalled, it waits until that
// or ctx ends: a hung driver answers nobody. Another failed engine does not affect it, and it needs no session. The processes
// of a lost GPU are unknown. A process of a MIG device that does not exist any more has ended.
func (s *Source) ListProcesses(ctx context.Context, devices []health.Device) (*health.ProcessReading, error) {
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
	r := &health.ProcessReading{At: time.Now()}
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
func (p *Process) reported(on health.DeviceID) health.Process {
	kind, _ := p.kind()
	return health.Process{
		Device: on, PID: *p.PID, Kind: kind,
		Memory: float64(valueOf(p.Memory)), HasMemory: p.Memory != nil, SM: valueOf(p.SM), HasSM: p.SM != nil,
	}
}
