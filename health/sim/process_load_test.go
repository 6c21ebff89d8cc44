package sim

import (
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

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
