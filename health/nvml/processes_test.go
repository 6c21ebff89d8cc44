//go:build cgo && linux

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

func gpuDevice(i int) health.Device {
	return health.Device{ID: health.DeviceID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)), Index: i}
}

func migDevice(i, gi int) health.Device {
	return health.Device{
		ID:   health.DeviceID(fmt.Sprintf("MIG-%08d-%04d-0000-0000-000000000000", i, gi)),
		Kind: health.KindMIG, Parent: gpuDevice(i).ID, Index: i, GI: gi,
	}
}

// openProcesses returns a lister, and checks at the end that it was released.
func openProcesses(t *testing.T) driver.ProcessLister {
	t.Helper()
	list, release, err := OpenProcesses()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	return list
}

func mustList(t *testing.T, list driver.ProcessLister, devices ...health.Device) *driver.ProcessReading {
	t.Helper()
	r, err := list(t.Context(), devices)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestProcesses(t *testing.T) {
	lib := newLibrary(t)
	list := openProcesses(t)
	lib.Do("process 0 -1 compute 4242 1073741824")
	lib.Do("process 0 -1 compute 4243 -1")
	lib.Do("process 0 -1 graphics 4242 1073741824")
	lib.Do("process 0 -1 mps 4244 2048")
	lib.Do("process 2 -1 compute 4245 4096")
	lib.Do("mig 3 0 7 0")
	lib.Do("mig 3 1 8 0")
	lib.Do("process 3 1 compute 4246 512")
	now := time.Now().UnixMicro()
	lib.Do("sample 0 4242 %d 25", now)
	lib.Do("sample 0 4242 %d 75", now+1)
	lib.Do("sample 0 4243 %d 100", now-int64(time.Hour/time.Microsecond)) // before the last second
	lib.Do("sample 0 4243 %d 4294967295", now)                            // arbitrary
	lib.Do("sample 2 999 %d 10", now)                                     // of a process that has ended
	lib.Do("fail nvmlDeviceGetGraphicsRunningProcesses_v3 2 %d -1", nvml.ERROR_NOT_SUPPORTED)

	process := func(d health.Device, pid int, kind driver.ProcessKind, memory, sm float64) driver.Process {
		return driver.Process{Device: d.ID, PID: pid, Kind: kind, Memory: max(memory, 0), HasMemory: memory >= 0, SM: max(sm, 0), HasSM: sm >= 0}
	}
	first, second := migDevice(3, 7), migDevice(3, 8)
	r := mustList(t, list, gpuDevice(0), gpuDevice(1), gpuDevice(2), gpuDevice(3), first, second)
	want := []driver.Process{
		process(gpuDevice(0), 4242, driver.ProcessCompute, 1<<30, 0.5),
		process(gpuDevice(0), 4243, driver.ProcessCompute, -1, 0),
		process(gpuDevice(0), 4242, driver.ProcessGraphics, 1<<30, 0.5),
		process(gpuDevice(0), 4244, driver.ProcessMPS, 2048, -1),
		process(gpuDevice(2), 4245, driver.ProcessCompute, 4096, 0),
		process(second, 4246, driver.ProcessCompute, 512, -1),
	}
	if !slices.Equal(r.Processes, want) {
		t.Errorf("got  %+v\nwant %+v", r.Processes, want)
	}
	if measured := []health.DeviceID{gpuDevice(0).ID, gpuDevice(1).ID, gpuDevice(2).ID, first.ID, second.ID}; !slices.Equal(r.Measured,
		measured) || r.At.IsZero() {
		t.Errorf("measured %q at %v", r.Measured, r.At)
	}

	// Samples are used once, and processes end.
	lib.Do("end 4242")
	if r = mustList(t, list, gpuDevice(0)); len(r.Processes) != 2 || r.Processes[0].SM != 0 || !r.Processes[0].HasSM {
		t.Errorf("%+v", r.Processes)
	}
	lib.Do("sample 0 4243 %d 40", time.Now().UnixMicro()+2)
	if r = mustList(t, list, gpuDevice(0)); r.Processes[0].SM != 0.4 {
		t.Errorf("%+v", r.Processes)
	}
}

// A sample that came while the clock was ahead does not hide the later ones.
func TestProcessesAfterClockStep(t *testing.T) {
	lib := newLibrary(t)
	list := openProcesses(t)
	lib.Do("process 0 -1 compute 1 0")
	lib.Do("sample 0 1 %d 10", time.Now().Add(time.Hour).UnixMicro())
	if r := mustList(t, list, gpuDevice(0)); r.Processes[0].SM != 0.1 {
		t.Fatalf("%+v", r.Processes)
	}
	lib.Do("reset")
	lib.Do("process 0 -1 compute 1 0")
	lib.Do("sample 0 1 %d 30", time.Now().UnixMicro())
	if r := mustList(t, list, gpuDevice(0)); r.Processes[0].SM != 0.3 {
		t.Errorf("%+v", r.Processes)
	}
}

// go-nvml panics when the number of samples grows between its two calls.
func TestProcessesWithGrowingSamples(t *testing.T) {
	lib := newLibrary(t)
	list := openProcesses(t)
	lib.Do("process 0 -1 compute 1 2048")
	lib.Do("sample 0 1 %d 10", time.Now().UnixMicro())
	lib.Do("sample 0 1 %d 20", time.Now().UnixMicro())
	lib.Do("grow")
	if r := mustList(t, list, gpuDevice(0)); len(r.Processes) != 1 || r.Processes[0].HasSM || !r.Processes[0].HasMemory {
		t.Errorf("%+v", r.Processes)
	}
}

func TestProcessesOfBadGPUs(t *testing.T) {
	lib := newLibrary(t)
	list := openProcesses(t)
	lib.Do("process 1 -1 compute 1 2048")
	lib.Do("lost 0")
	lib.Do("fail nvmlDeviceGetMPSComputeRunningProcesses_v3 2 %d -1", nvml.ERROR_UNKNOWN)
	for _, kind := range []string{"Compute", "Graphics", "MPSCompute"} {
		lib.Do("fail nvmlDeviceGet%sRunningProcesses_v3 3 %d -1", kind, nvml.ERROR_NOT_SUPPORTED)
	}
	lib.Do("fail nvmlDeviceGetProcessUtilization 1 %d -1", nvml.ERROR_NO_PERMISSION)
	r := mustList(t, list, gpuDevice(0), gpuDevice(1), gpuDevice(2), gpuDevice(3), gpuDevice(12))
	if !slices.Equal(r.Measured, []health.DeviceID{gpuDevice(1).ID}) || len(r.Processes) != 1 || r.Processes[0].HasSM {
		t.Errorf("%+v", r)
	}
	inits := lib.Number("calls nvmlInit_v2")
	var code Error
	if _, err := list(t.Context(), []health.Device{gpuDevice(0)}); !errors.As(err, &code) || nvml.Return(code) != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("all GPUs lost: %v", err)
	}
	if r = mustList(t, list, gpuDevice(1)); len(r.Processes) != 1 || lib.Number("calls nvmlInit_v2") != inits {
		t.Errorf("%d Inits for a lost GPU, %+v", lib.Number("calls nvmlInit_v2")-inits, r)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := list(ended, []health.Device{gpuDevice(1)}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if r = mustList(t, list); len(r.Measured) != 0 {
		t.Errorf("no device: %+v", r)
	}
}

// A driver that was unloaded and loaded again has other handles and needs another Init.
func TestProcessesAfterDriverReload(t *testing.T) {
	lib := newLibrary(t)
	list := openProcesses(t)
	mustList(t, list, gpuDevice(0))
	lib.Do("unload")
	for range 2 {
		if _, err := list(t.Context(), []health.Device{gpuDevice(0)}); err == nil {
			t.Error("listed without a driver")
		}
	}
	lib.Do("load")
	lib.Do("process 0 -1 compute 1 2048")
	if r := mustList(t, list, gpuDevice(0)); len(r.Processes) != 1 {
		t.Errorf("%+v", r)
	}
}

// A call that hangs for one GPU is the caller's to wait for: the lister blocks, and goes on with the others afterwards.
func TestProcessesOfHangingGPU(t *testing.T) {
	lib := newLibrary(t)
	list := openProcesses(t)
	lib.Do("process 1 -1 compute 1 2048")
	lib.Do("hang nvmlDeviceGetComputeRunningProcesses_v3 0")
	done := make(chan *driver.ProcessReading)
	go func() {
		r, _ := list(t.Context(), []health.Device{gpuDevice(0), gpuDevice(1)})
		done <- r
	}()
	lib.Do("await hanging 1")
	select {
	case r := <-done:
		t.Errorf("returned while a call hangs: %+v", r)
	default:
	}
	lib.Do("release")
	if r := <-done; len(r.Measured) != 2 || len(r.Processes) != 1 {
		t.Errorf("%+v", r)
	}
}
