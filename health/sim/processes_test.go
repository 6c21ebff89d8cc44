package sim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// listed returns the processes of a GPU and its MIG devices as "MIG index:pid", and whether the GPU is measured.
func listed(t *testing.T, src *Source, devices []health.Device, gpu int) (all []string, measured bool) {
	t.Helper()
	r, err := src.ListProcesses(t.Context(), devices)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		if d.Index != gpu {
			continue
		}
		is := slices.Contains(r.Measured, d.ID)
		if d.Kind == health.KindGPU {
			measured = is
		} else if is != measured {
			t.Errorf("%s is measured: %v, its GPU: %v", d.ID, is, measured)
		}
		for _, p := range r.Processes {
			if p.Device == d.ID {
				all = append(all, fmt.Sprintf("%d:%d", d.MIGIndex, p.PID))
			}
		}
	}
	return all, measured
}

func TestListProcesses(t *testing.T) {
	simulate(t, DefaultConfig(), func(t *testing.T, src *Source, _ health.Session) {
		for _, step := range []struct {
			event    string
			want     []string
			measured bool
		}{
			{`{gpu: 2, processes: [{pid: 9}]}`, nil, true},
			{`{gpu: 3, processes: [{pid: 7}, {pid: 8}, {pid: 7, kind: graphics}]}`, []string{"-1:7", "-1:8", "-1:7"}, true},
			{`{gpu: 3, xid: 31}`, []string{"-1:7", "-1:8", "-1:7"}, true},
			{`{gpu: 3, lost: true}`, nil, false},
			{`{gpu: 3, lost: false, stale: true}`, []string{"-1:7", "-1:8", "-1:7"}, true},
			{`{source: down}`, []string{"-1:7", "-1:8", "-1:7"}, true},
			{`{source: blind}`, []string{"-1:7", "-1:8", "-1:7"}, true},
			{`{source: up}`, []string{"-1:7", "-1:8", "-1:7"}, true},
			{
				`{gpu: 3, stale: false, mig: balanced, processes: [{pid: 7}, {pid: 8, mig: 3}, {pid: 9, mig: 0}]}`,
				[]string{"-1:7", "0:9", "3:8"},
				true,
			},
			{`{gpu: 3, mig: off}`, []string{"-1:7"}, true},
			{`{gpu: 3, processes: []}`, nil, true},
		} {
			inject(t, src, step.event)
			if got, measured := listed(t, src, src.devices, 3); !slices.Equal(got, step.want) || measured != step.measured {
				t.Errorf("%s: %q, measured %v; want %q, %v", step.event, got, measured, step.want, step.measured)
			}
		}

		inject(t, src, `{gpu: 3, processes: [{pid: 7, memory: 1073741824}, {pid: 8, kind: mps, sm: 0.5}]}`)
		gpu := gpuDevice(poll(t, open(t, src)), 3)
		r, err := src.ListProcesses(t.Context(), []health.Device{gpu, {ID: "GPU-of-another-node", Index: 3}})
		want := []driver.Process{
			{Device: gpu.ID, PID: 7, Kind: driver.ProcessCompute, Memory: 1 << 30, HasMemory: true},
			{Device: gpu.ID, PID: 8, Kind: driver.ProcessMPS, SM: .5, HasSM: true},
		}
		if err != nil || !slices.Equal(r.Processes, want) || !slices.Equal(r.Measured, []health.DeviceID{gpu.ID}) || !r.At.Equal(time.Now()) {
			t.Errorf("%+v, %v; want %+v", r, err, want)
		}

		inject(t, src, `{source: empty}`)
		if r, err := src.ListProcesses(t.Context(), []health.Device{gpu}); !errors.Is(err, errNoDriver) || r != nil {
			t.Errorf("without a driver: %+v, %v", r, err)
		}
	})
}

// TestListProcessesWhileStalled checks that the call hangs until the source is up or its context ends, also when nothing else
// uses the source and it does not run.
func TestListProcessesWhileStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, err := New(scenarioConfig("l4-1", 0, event(t, time.Minute, `{source: stalled}`), event(t, 3*time.Minute, `{source: up}`)), nil)
		if err != nil {
			t.Fatal(err)
		}
		ses := open(t, src)
		start := time.Now()
		if err := ses.Close(); err != nil {
			t.Fatal(err)
		}
		sleep(time.Minute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if r, err := src.ListProcesses(ctx, src.devices); !errors.Is(err, context.DeadlineExceeded) || r != nil {
			t.Errorf("%+v, %v; want the end of the context", r, err)
		}
		if r, err := src.ListProcesses(t.Context(), src.devices); err != nil || len(r.Measured) != 1 || time.Since(start) != 3*time.Minute {
			t.Errorf("%+v, %v after %v", r, err, time.Since(start))
		}
	})
}

// TestProcessLoads checks that processes are the load of the GPUs once an event has set some, and that the counters continue.
func TestProcessLoads(t *testing.T) {
	simulate(t, DefaultConfig(), func(t *testing.T, src *Source, ses health.Session) {
		energy := make(map[int]float64)
		value := func(gpu int, f health.Field) float64 { return gpuSample(t, poll(t, ses), gpu).Values[f] }
		step := func(event string) {
			t.Helper()
			if event != "" {
				inject(t, src, event)
			}
			for range 20 {
				for gpu := range 3 {
					now := value(gpu, health.FieldEnergy)
					if least, most := energy[gpu], energy[gpu]+701*1000; energy[gpu] > 0 && (now < least || now > most) {
						t.Fatalf("%s: the energy of GPU %d goes from %v to %v mJ in at most a second", event, gpu, least, now)
					}
					energy[gpu] = now
				}
				sleep(time.Second)
			}
		}
		within := func(gpu int, least, most float64) {
			t.Helper()
			if u := value(gpu, health.FieldGPUUtil); u < least || u > most {
				t.Errorf("utilization of GPU %d is %v %%, want %v to %v", gpu, u, least, most)
			}
		}
		step("")
		step(`{gpu: 0, processes: [{pid: 7, sm: 0.25, memory: 1073741824}, {pid: 8, sm: 0.25}]}`)
		within(0, 45, 55)
		within(1, 0, 0)
		if used := value(0, health.FieldFBUsed); used != 1024+idleUsed {
			t.Errorf("used %v MiB, want those of the processes", used)
		}
		step(`{gpu: 1, processes: [{pid: 9, sm: 1}]}`)
		within(1, 90, 100)
		step(`{gpu: 0, processes: []}`)
		within(0, 0, 0)
		step(`{gpu: 1, processes: [{pid: 9}]}`) // its work is unknown
		within(2, 0, 0)
		step(`{gpu: 1, mig: sevenths, processes: [{pid: 9, sm: 1, mig: 0}]}`)
		if v := gpuSample(t, poll(t, ses), 1).Values[health.FieldEngineActive]; v < 0.1 || v > 0.2 {
			t.Errorf("engine activity of the partitioned GPU is %v, want a seventh", v)
		}
	})
}
