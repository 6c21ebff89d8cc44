//go:build cgo && linux

package nvml

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// eventSet is a set of events. A registration that hangs still uses it.
type eventSet struct {
	nvml.EventSet
	*shared
	spoiled atomic.Bool // a registration failed with UNKNOWN, which leaves the set undefined (nvml.h: nvmlDeviceRegisterEvents)
}

// gpu is the registration of a GPU.
type gpu struct {
	uuid   string // "" until it was read
	busy   bool   // a registration runs
	since  time.Time
	set    *eventSet // that it is registered with
	err    error     // why it is left out
	spoils bool      // its last registration made a set unusable
}

// register registers the GPUs that are not registered with the current set, each beside the caller, because a call may hang. Only
// retry includes a GPU that made a set unusable. The caller holds eventRun.mu.
func (s *session) register(retry bool) {
	for i := range s.gpus {
		g := &s.gpus[i]
		if s.set == nil || g.busy || (g.set == s.set && g.err == nil) || (g.spoils && !retry) {
			continue
		}
		g.busy, g.since = true, time.Now()
		set := s.set
		set.use()
		s.use()
		s.calls.Go(func() {
			defer s.release()
			defer set.release()
			s.registerGPU(i, set)
		})
	}
}

// registerGPU registers one GPU and records the result.
func (s *session) registerGPU(index int, set *eventSet) {
	uuid, err := s.registerIndex(index, set)
	s.mu.Lock()
	g := &s.gpus[index]
	wasRegistered := g.set != nil && g.err == nil
	if uuid != "" {
		g.uuid = uuid
	}
	g.busy, g.set, g.err, g.spoils = false, set, err, set.spoiled.Load() && isCode(err, nvml.ERROR_UNKNOWN)
	if wasRegistered && isCode(err, nvml.ERROR_GPU_IS_LOST) {
		s.to.Receive(health.Event{Kind: health.EventUnavailable, GPU: g.uuid, GI: -1, CI: -1})
	}
	if err == nil {
		s.register(false) // if the set has been replaced meanwhile
	}
	s.mu.Unlock()
	wait.Signal(s.changed)
	s.publishRegistrations()
}

// isCode reports whether an error is NVML's of that number.
func isCode(err error, code nvml.Return) bool {
	var e Error
	return errors.As(err, &e) && e == Error(code)
}

// registerIndex registers the GPU with an index and returns its UUID as soon as it has it.
func (s *session) registerIndex(index int, set *eventSet) (uuid string, err error) {
	handle, ret := s.library.DeviceGetHandleByIndex(index)
	if err := failure("nvmlDeviceGetHandleByIndex_v2", ret); err != nil {
		return "", err
	}
	uuid, ret = handle.GetUUID()
	if err := failure("nvmlDeviceGetUUID", ret); err != nil {
		return "", err
	}
	supported, ret := handle.GetSupportedEventTypes()
	if err := failure("nvmlDeviceGetSupportedEventTypes", ret); err != nil {
		return uuid, err
	}
	var types uint64 // one that is not supported would refuse the others
	for _, k := range eventKinds {
		types |= k.bit & supported
	}
	if types&nvml.EventTypeXidCriticalError == 0 {
		return uuid, fmt.Errorf("it reports no XIDs (supported types of events: %#x)", supported)
	}
	s.mu.Lock()
	s.uuids[handleOf(handle)] = uuid
	s.mu.Unlock()
	if err := s.try(handle, types); err != nil {
		return uuid, err
	}
	ret = handle.RegisterEvents(types, set.EventSet)
	if ret == nvml.ERROR_UNKNOWN {
		set.spoiled.Store(true)
	}
	return uuid, failure("nvmlDeviceRegisterEvents", ret)
}

// try registers a GPU with a set of its own, so that a lost or defective GPU does not cost the events of the others.
func (s *session) try(handle nvml.Device, types uint64) error {
	set, ret := s.library.EventSetCreate()
	if err := failure("nvmlEventSetCreate", ret); err != nil {
		return err
	}
	defer func() { _ = set.Free() }()
	if err := failure("nvmlDeviceRegisterEvents", handle.RegisterEvents(types, set)); err != nil {
		return err
	}
	for {
		switch data, ret := set.Wait(0); ret {
		case nvml.SUCCESS: // the GPU is not registered elsewhere
			s.receive(driverEvent{handleOf(data.Device), data.EventType, data.EventData, data.GpuInstanceId, data.ComputeInstanceId, time.Now()})
		case nvml.ERROR_TIMEOUT:
			return nil
		default:
			return failure("nvmlEventSetWait_v2", ret)
		}
	}
}

// countRegistered returns how many GPUs are registered with the set, and how many may be soon.
func (s *session) countRegistered(set *eventSet) (registered, pending int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, g := range s.gpus {
		switch {
		case g.busy:
			pending++
		case g.set == set && g.err == nil:
			registered++
		}
	}
	return registered, pending
}

// systemEvents is a set of system events; nil if the driver has none (before 575).
type systemEvents struct {
	library nvml.Interface
	set     nvml.SystemEventSet
}

func openSystemEvents(library nvml.Interface) *systemEvents {
	create := nvml.SystemEventSetCreateRequest{}
	create.Version = nvml.STRUCT_VERSION(create, 1)
	if library.SystemEventSetCreate(&create) != nvml.SUCCESS {
		return nil
	}
	s := &systemEvents{library, create.Set}
	register := nvml.SystemRegisterEventRequest{
		EventTypes: nvml.SystemEventTypeGpuDriverBind | nvml.SystemEventTypeGpuDriverUnbind, Set: s.set,
	}
	register.Version = nvml.STRUCT_VERSION(register, 1)
	if library.SystemRegisterEvents(&register) != nvml.SUCCESS {
		s.close()
		return nil
	}
	return s
}

// poll returns the events since the last poll.
func (s *systemEvents) poll() []nvml.SystemEventData_v1 {
	if s == nil {
		return nil
	}
	data := make([]nvml.SystemEventData_v1, 16)
	var pinner runtime.Pinner // the request points to them
	defer pinner.Unpin()
	pinner.Pin(&data[0])
	request := nvml.SystemEventSetWaitRequest{Set: s.set, Data: &data[0], DataSize: uint32(len(data))} //nolint:gosec // a constant
	request.Version = nvml.STRUCT_VERSION(request, 1)
	if s.library.SystemEventSetWait(&request) != nvml.SUCCESS { // with ERROR_TIMEOUT: none
		return nil
	}
	return data[:min(int(request.NumEvent), len(data))]
}

func (s *systemEvents) close() {
	if s == nil {
		return
	}
	request := nvml.SystemEventSetFreeRequest{Set: s.set}
	request.Version = nvml.STRUCT_VERSION(request, 1)
	_ = s.library.SystemEventSetFree(&request)
}
