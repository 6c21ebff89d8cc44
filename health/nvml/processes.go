//go:build cgo && linux

package nvml

import (
	"context"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// OpenProcesses loads NVML and returns a lister of processes. The driver's files are open until release is called. Both belong to one
// goroutine. The lister returns the processes that the driver shows. To a container, the driver shows the processes of its PID namespace.
func OpenProcesses() (list driver.ProcessLister, release func(), err error) {
	u, err := openUse()
	if err != nil {
		return nil, nil, err
	}
	p := &processLister{use: u, lastSeen: map[health.DeviceID]uint64{}}
	return p.list, u.end, nil
}

type processLister struct {
	*use
	lastSeen map[health.DeviceID]uint64 // the time of the newest sample of utilization, in µs, by GPU
}

// list lists the processes of the GPUs and MIG devices. The processes of a partitioned GPU are its MIG devices'. A device whose processes
// NVML does not list is not measured. A process may have several kinds of context.
func (p *processLister) list(ctx context.Context, devices []health.Device) (*driver.ProcessReading, error) {
	if _, err := p.get(); err != nil {
		return nil, err
	}
	partitioned := map[health.DeviceID]bool{}
	for i := range devices {
		partitioned[devices[i].Parent] = true
	}
	r := &driver.ProcessReading{}
	seen := map[health.DeviceID]uint64{}
	var failed error
	tried := 0
	for i := range devices {
		id := devices[i].ID
		if partitioned[id] {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		tried++
		processes, err := p.measure(id, devices[i].Kind, seen)
		if err != nil {
			failed = fmt.Errorf("%s: %w", id, err)
			continue
		}
		r.Processes, r.Measured = append(r.Processes, processes...), append(r.Measured, id)
	}
	p.lastSeen = seen
	if tried > 0 && len(r.Measured) == 0 {
		p.endAfter(failed)
		return nil, failed
	}
	r.At = time.Now()
	return r, nil
}

// measure lists the processes of a device. It records the time of the newest sample in seen.
func (p *processLister) measure(id health.DeviceID, kind health.Kind, seen map[health.DeviceID]uint64) ([]driver.Process, error) {
	device, ret := p.library.DeviceGetHandleByUUID(string(id))
	if err := failure("nvmlDeviceGetHandleByUUID", ret); err != nil {
		return nil, err
	}
	var processes []driver.Process
	listed := false
	for _, l := range []struct {
		call string
		kind driver.ProcessKind
		get  func() ([]nvml.ProcessInfo, nvml.Return)
	}{
		{"nvmlDeviceGetComputeRunningProcesses", driver.ProcessCompute, device.GetComputeRunningProcesses},
		{"nvmlDeviceGetGraphicsRunningProcesses", driver.ProcessGraphics, device.GetGraphicsRunningProcesses},
		{"nvmlDeviceGetMPSComputeRunningProcesses", driver.ProcessMPS, device.GetMPSComputeRunningProcesses},
	} {
		infos, ret := l.get()
		if ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_FUNCTION_NOT_FOUND {
			continue // a device without graphics, or an older driver
		}
		if err := failure(l.call, ret); err != nil {
			return nil, err
		}
		listed = true
		for _, info := range infos {
			process := driver.Process{Device: id, PID: int(info.Pid), Kind: l.kind}
			if info.UsedGpuMemory != notAvailable {
				process.Memory, process.HasMemory = float64(info.UsedGpuMemory), true
			}
			processes = append(processes, process)
		}
	}
	if !listed {
		return nil, failure("nvmlDeviceGetComputeRunningProcesses", nvml.ERROR_NOT_SUPPORTED)
	}
	if kind == health.KindMIG { // "not currently supported" on partitioned GPUs (nvml.h)
		return processes, nil
	}
	sm, newest, ok := utilization(device, p.lastSeen[id])
	if !ok {
		return processes, nil
	}
	seen[id] = newest
	for i := range processes {
		samples := sm[processes[i].PID]
		if len(samples) == 0 && processes[i].Kind == driver.ProcessMPS {
			continue // the MPS server has the samples instead
		}
		processes[i].SM, processes[i].HasSM = mean(samples)/100, true
	}
	return processes, nil
}

// notAvailable is NVML_VALUE_NOT_AVAILABLE, -1, as an unsigned value.
const notAvailable = ^uint64(0)

// utilization returns what percentage of the time each process has used the GPU since a time in µs, and the time of the newest
// sample.
func utilization(device nvml.Device, since uint64) (sm map[int][]uint32, newest uint64, ok bool) {
	now := uint64(time.Now().UnixMicro()) //nolint:gosec // not negative
	if since == 0 || since > now {        // if the clock was set back, no sample would be newer for that time
		since = now - uint64(time.Second/time.Microsecond)
	}
	// go-nvml asks for the number of samples, then for the samples. If there are more by then, it panics: it cuts its slice to
	// the new number.
	defer func() {
		if recover() != nil {
			sm, newest, ok = nil, 0, false
		}
	}()
	samples, ret := device.GetProcessUtilization(since)
	if ret != nvml.SUCCESS && ret != nvml.ERROR_NOT_FOUND { // not found: no process has used the GPU
		return nil, 0, false
	}
	sm, newest = map[int][]uint32{}, since
	for _, s := range samples {
		if s.TimeStamp > since && s.SmUtil <= 100 { // drivers fill a part of the samples with arbitrary values
			sm[int(s.Pid)] = append(sm[int(s.Pid)], s.SmUtil)
			newest = max(newest, s.TimeStamp)
		}
	}
	return sm, newest, true
}

// mean returns 0 for no samples: NVML has none of a process that did not use the GPU.
func mean(values []uint32) float64 {
	sum := 0.0
	for _, v := range values {
		sum += float64(v)
	}
	return sum / max(1, float64(len(values)))
}
