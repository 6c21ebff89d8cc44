package sim

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// readings polls a new source at the given times since its start.
func readings(t *testing.T, cfg Config, times ...time.Duration) []*health.Reading {
	t.Helper()
	var out []*health.Reading
	synctest.Test(t, func(t *testing.T) {
		ses := open(t, newSource(t, cfg))
		start := time.Now()
		for _, at := range times {
			sleep(time.Until(start.Add(at)))
			out = append(out, poll(t, ses))
		}
	})
	return out
}

func every(step, until time.Duration) []time.Duration {
	var out []time.Duration
	for at := time.Duration(0); at <= until; at += step {
		out = append(out, at)
	}
	return out
}

func TestReadingsDependOnTheSeed(t *testing.T) {
	for _, name := range []string{"h100-8", "h100-8-mig", "l4-1"} {
		cfg := profileConfig(name)
		all := readings(t, cfg, every(7*time.Second, 10*time.Minute)...)
		last := all[len(all)-1]
		if again := readings(t, cfg, every(7*time.Second, 10*time.Minute)...); !reflect.DeepEqual(all, again) {
			t.Errorf("%s: two runs with the same seed differ", name)
		}
		// A reading does not depend on earlier polls.
		if once := readings(t, cfg, 595*time.Second)[0]; !reflect.DeepEqual(once, last) {
			t.Errorf("%s: a reading depends on earlier polls\n%v\n%v", name, once.Samples[0], last.Samples[0])
		}
		cfg.Seed++
		if other := readings(t, cfg, 595*time.Second)[0]; reflect.DeepEqual(other.Samples[0].Values, last.Samples[0].Values) {
			t.Errorf("%s: two seeds give the same readings", name)
		}
	}
}

func TestReadingsArePlausible(t *testing.T) {
	bounds := map[string]map[health.Field][2]float64{
		"h100-8": {
			health.FieldPower: {65, 700}, health.FieldGPUTemp: {27, 70}, health.FieldMemoryTemp: {36, 80},
			health.FieldSMClock: {345, 1980}, health.FieldMemClock: {2619, 2619}, health.FieldGPUUtil: {0, 100},
			health.FieldFBTotal: {81559, 81559}, health.FieldMIGMode: {0, 0},
		},
		"h100-8-mig": {health.FieldPower: {65, 700}, health.FieldGPUTemp: {27, 70}, health.FieldMIGMode: {1, 1}},
		"a100-8":     {health.FieldPower: {55, 400}, health.FieldGPUTemp: {29, 68}, health.FieldSMClock: {210, 1410}},
		"l4-1":       {health.FieldPower: {11, 72}, health.FieldGPUTemp: {32, 80}, health.FieldMemClock: {405, 6251}},
	}
	for name, fields := range bounds {
		all := readings(t, profileConfig(name), every(time.Second, 10*time.Minute)...)
		distinct := map[health.Field]map[float64]bool{}
		for n, r := range all {
			for i, s := range r.Samples {
				checkFramebuffer(t, name, r.Devices[i], s.Values)
				if r.Devices[i].Kind == health.KindMIG {
					continue
				}
				gpu := fmt.Sprintf("%s: GPU %d after %d s", name, r.Devices[i].Index, n)
				checkBounds(t, gpu, fields, s.Values)
				checkSecond(t, gpu, all[max(n-1, 0)].Samples[i].Values, s.Values)
			}
			for f, x := range r.Samples[0].Values {
				if distinct[f] == nil {
					distinct[f] = map[float64]bool{}
				}
				distinct[f][x] = true
			}
		}
		for _, f := range []health.Field{health.FieldPower, health.FieldEnergy, health.FieldGPUTemp, health.FieldSMClock, health.FieldFBUsed} {
			if len(distinct[f]) < 4 {
				t.Errorf("%s: field %d of GPU 0 has %d values in ten minutes", name, f, len(distinct[f]))
			}
		}
	}
}

// checkFramebuffer checks that the parts of a device's framebuffer make the whole.
func checkFramebuffer(t *testing.T, profile string, d health.Device, v map[health.Field]float64) {
	t.Helper()
	if sum := v[health.FieldFBFree] + v[health.FieldFBUsed] + v[health.FieldFBReserved]; sum != v[health.FieldFBTotal] ||
		v[health.FieldFBFree] < 0 {
		t.Fatalf("%s: framebuffer %v", profile, v)
	}
	if v[health.FieldFBTotal] != float64(d.Memory>>20) {
		t.Fatalf("%s: %v MiB in the sample, %d in the device", profile, v[health.FieldFBTotal], d.Memory>>20)
	}
}

func checkBounds(t *testing.T, gpu string, bounds map[health.Field][2]float64, values map[health.Field]float64) {
	t.Helper()
	for f, b := range bounds {
		if x, ok := values[f]; !ok || x < b[0] || x > b[1] {
			t.Fatalf("%s: field %d is %v (%v); want %v", gpu, f, x, ok, b)
		}
	}
}

// checkSecond checks what may change of a GPU in a second.
func checkSecond(t *testing.T, gpu string, before, after map[health.Field]float64) {
	t.Helper()
	for _, f := range []health.Field{health.FieldEnergy, health.FieldNVLinkBandwidth} {
		if after[f] < before[f] {
			t.Fatalf("%s: counter %d falls from %v to %v", gpu, f, before[f], after[f])
		}
	}
	// 40 °C with a lag of 14 s are 3 °C in the first second.
	if before, after := before[health.FieldGPUTemp], after[health.FieldGPUTemp]; math.Abs(after-before) > 4 {
		t.Fatalf("%s goes from %v to %v °C in a second", gpu, before, after)
	}
}

// TestEnergyIsTheIntegralOfPower compares the energy counter with the sum of the measured power.
func TestEnergyIsTheIntegralOfPower(t *testing.T) {
	const step = 250 * time.Millisecond
	all := readings(t, profileConfig("h100-8"), every(step, 5*time.Minute)...)
	for i := range all[0].Samples {
		var joule float64
		for n := 1; n < len(all); n++ {
			joule += (all[n].Samples[i].Values[health.FieldPower] + all[n-1].Samples[i].Values[health.FieldPower]) / 2 * step.Seconds()
		}
		counted := (all[len(all)-1].Samples[i].Values[health.FieldEnergy] - all[0].Samples[i].Values[health.FieldEnergy]) / 1000
		if off := math.Abs(counted-joule) / joule; off > 0.01 {
			t.Errorf("GPU %d: the counter increased by %.0f J, the integral is %.0f J", i, counted, joule)
		}
	}
}

func TestWorkIsTheIntegralOfLoad(t *testing.T) {
	const step = 0.05 // s
	l := newWorkload(seedOf("GPU-test"), 1, 80000)
	sum := 0.0
	for n := range 20_000 {
		at := step * float64(n)
		if work := l.work(at); math.Abs(work-sum) > 0.05 {
			t.Fatalf("the work until %v s is %v, the sum %v", at, work, sum)
		}
		sum += step * l.at(at+step/2).fast
	}
}

// TestLevelFollowsJobs checks that utilization, power and memory follow a job at once, and temperature later.
func TestLevelFollowsJobs(t *testing.T) {
	l := newWorkload(seedOf("GPU-test"), 1, 80000)
	end := func(slot int64) float64 { return l.job(slot).start + l.length }
	slot := int64(1)
	for l.job(slot+1).start < end(slot)+3*slowLag+1 {
		slot++ // a job before a long gap returns to idle
	}
	j, stop := l.job(slot), end(slot)
	before, early, late, after, cold := l.at(j.start-1), l.at(j.start+5), l.at(stop-1), l.at(stop+5), l.at(stop+3*slowLag)
	if before.fast > 0.001 || before.memory != 0 {
		t.Errorf("before the job the load is %+v", before)
	}
	if early.fast < 0.9*j.util || early.slow > 0.5*j.util {
		t.Errorf("5 s into a job of %.2f the load is %+v; want power reached and temperature rising", j.util, early)
	}
	if late.slow < 0.9*j.util || late.memory != j.memory {
		t.Errorf("at the end of a job of %.2f the load is %+v; want it warm and its memory in use", j.util, late)
	}
	if early.memory == 0 || early.memory > late.memory {
		t.Errorf("memory goes from %v to %v during the job", early.memory, late.memory)
	}
	if after.fast > 0.05 || after.memory != 0 || after.slow < 0.5*j.util {
		t.Errorf("5 s after the job the load is %+v; want it idle and warm", after)
	}
	if cold.slow > 0.06*j.util {
		t.Errorf("%v s after the job the load is %+v; want it cold", 3*slowLag, cold)
	}
}

func TestJobsFitTheirSlots(t *testing.T) {
	l := newWorkload(seedOf("GPU-test"), 1, 80000)
	for slot := range int64(1000) {
		j := l.job(slot)
		if l.slot(j.start) != slot || l.slot(j.start+l.length-1e-6) != slot || j.util < 0.35 || j.util > 1 || j.memory > l.memory {
			t.Fatalf("job %+v in slot %d", j, slot)
		}
	}
}

func BenchmarkPoll(b *testing.B) {
	for _, name := range []string{"h100-8", "h100-8-mig"} {
		b.Run(name, func(b *testing.B) {
			ses := open(b, newSource(b, profileConfig(name)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ses.Poll(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
