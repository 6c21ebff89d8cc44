//go:build cgo && linux

package dcgm

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

// After an XID 119 the status is OK and all values are blank (OBSERVED.md#blind-engine).
func TestBlindEngineEndsSession(t *testing.T) {
	for name, interval := range map[string]time.Duration{"health polls": time.Hour, "full polls": time.Second} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig()
			cfg.Interval = interval
			b := openFixture(t, 2, cfg)
			b.poll()
			b.pollAfter(time.Second, 2)
			b.blankGPUs(0, 1)
			for id := range uint(2) {
				b.lib.Int(script.GPU, id, 54, lib.BlankInt64, 0, b.clock.now())
			}
			seconds, err := b.pollUntilFailure(func() {}, func(int, *health.Reading) {})
			if !errors.Is(err, errBlind) || seconds > 5 {
				t.Fatalf("after %d s: %v", seconds, err)
			}
			b.close()
			if _, err := Open(t.Context(), cfg, b.log); !errors.Is(err, errBlind) {
				t.Errorf("Open of a blind engine: %v", err)
			}
		})
	}
}

func TestFrozenEngineEndsSession(t *testing.T) {
	b := startFixture(t, 2)
	for range 60 {
		b.pollAfter(time.Second, 2)
	}
	seconds, err := b.pollUntilFailure(func() {}, func(int, *health.Reading) {})
	if !errors.Is(err, errFrozen) || seconds < 30 || seconds > 35 {
		t.Errorf("after %d s: %v, want errFrozen after 30 s", seconds, err)
	}
}

// blankGPUs makes the values of GPUs blank.
func (b *fixture) blankGPUs(gpus ...uint) {
	for _, id := range gpus {
		for _, f := range []uint{67, 150, 395, 396, 1507, 1523} {
			b.lib.Int(script.GPU, id, f, 9223372036854775792, 0, b.clock.now())
		}
		b.lib.Float(script.GPU, id, 155, 140737488355328, 0, b.clock.now())
	}
}

// A GPU is stale after 3 s without values, or 30 s without new ones, while others have them (OBSERVED.md#stale-gpu). A
// stale GPU and its MIG devices have no values until the next sample.
func TestStaleGPU(t *testing.T) {
	for name, tt := range map[string]struct {
		others func(b *fixture) // in each second
		from   int              // the seconds after which it is stale
		to     int
	}{
		"blank values": {func(b *fixture) { b.sampleGPUs(2); b.blankGPUs(2) }, 3, 5},
		"old values":   {func(b *fixture) { b.sampleGPUs(2) }, 30, 32},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, 3)
			b.addInstances(2, map[uint][]uint{0: {0}})
			b.open(testConfig(health.FieldFBUsed)).poll()
			pass := func(sample func(*fixture)) map[health.DeviceID]health.Sample {
				b.add(time.Second)
				sample(b)
				samples, _ := b.poll()
				return samples
			}
			since := 0
			for second := 1; second <= 100; second++ {
				samples := pass(tt.others)
				if since == 0 && samples[gpuID(2)].Stale {
					since = second
				}
				checkStale(t, fmt.Sprintf("after %d s", second), since > 0, samples)
			}
			if since < tt.from || since > tt.to {
				t.Errorf("stale after %d s, want %d to %d", since, tt.from, tt.to)
			}
			b.xid(script.GPU, 2, 119, b.clock.now())
			if s := pass(tt.others)[gpuID(2)]; !slices.Equal(xidCodes(s.XIDs), []int{119}) || len(s.Values) != 0 {
				t.Errorf("XIDs %v, values %v", s.XIDs, s.Values)
			}
			all := func(b *fixture) { b.sampleGPUs(3); b.lib.Int(script.GPU, 2, 67, 1, 0, b.clock.now()) }
			if s := pass(all)[gpuID(2)]; s.Stale {
				t.Error("stale after a new sample")
			}
			samples := pass(all)
			if s := samples[gpuID(2)]; s.Stale || s.Values[health.FieldPower] != 72.5 || s.Values[health.FieldGPUTemp] != 42 {
				t.Errorf("after a full poll: stale %v, values %v", s.Stale, s.Values)
			}
			if s := samples[migID(0)]; s.Stale || s.Values[health.FieldFBUsed] != 100 {
				t.Errorf("MIG device: stale %v, values %v", s.Stale, s.Values)
			}
		})
	}
}

// checkStale checks whether GPU 2 is stale with its MIG device, and that the other two GPUs are measured.
func checkStale(t *testing.T, when string, stale bool, samples map[health.DeviceID]health.Sample) {
	t.Helper()
	for _, id := range []health.DeviceID{gpuID(2), migID(0)} {
		s := samples[id]
		if s.Stale != stale || s.Presence != health.Present || s.Stale && len(s.Values) != 0 {
			t.Fatalf("%s: %s: stale %v, %v, values %v", when, id, s.Stale, s.Presence, s.Values)
		}
	}
	for gpu := range uint(2) {
		if s := samples[gpuID(gpu)]; s.Stale || s.Values[health.FieldGPUTemp] != float64(40+gpu) {
			t.Fatalf("%s: GPU %d: stale %v, values %v", when, gpu, s.Stale, s.Values)
		}
	}
}

// If no GPU is measured, the session fails, and no GPU is stale before.
func TestNoGPUIsStaleIfAllAre(t *testing.T) {
	for name, others := range map[string]func(*fixture){
		"blank":  func(b *fixture) { b.blankGPUs(0, 1) },
		"frozen": func(*fixture) {},
		"both":   func(b *fixture) { b.blankGPUs(0) },
	} {
		for _, lost := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, the other lost %v", name, lost), func(t *testing.T) {
				b := newFixture(t, 2)
				if lost {
					b.lib.Instance(script.GPU, 1, script.GPU, 1, script.InstanceInfo{GPU: gpuUUID(1)})
					b.lib.Entity(script.GPU, 1, statusLost)
				}
				b.open(testConfig()).poll()
				b.pollAfter(time.Second, 2)
				seconds, err := b.pollUntilFailure(func() { others(b) }, func(second int, r *health.Reading) {
					for _, s := range r.Samples {
						if s.Stale {
							t.Fatalf("after %d s: %s is stale", second, s.Device)
						}
					}
				})
				if err == nil || seconds > 60 {
					t.Errorf("after %d s: %v", seconds, err)
				}
			})
		}
	}
}

// Metric fields keep a GPU without health fields from being stale, and a node without them from being blind.
func TestGPUWithoutHealthFields(t *testing.T) {
	for name, tt := range map[string]struct {
		gpus  uint
		value int64
	}{"only GPU, not supported": {1, lib.BlankInt64 + 2}, "one of two GPUs, blank": {2, lib.BlankInt64}} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, tt.gpus)
			sample := func() {
				b.sampleGPUs(tt.gpus - 1)
				for _, f := range []uint{150, 395, 396, 1507, 1523} {
					b.lib.Int(script.GPU, tt.gpus-1, f, tt.value, 0, b.clock.now())
				}
				b.lib.Float(script.GPU, tt.gpus-1, 155, 50, 0, b.clock.now())
			}
			sample()
			b.open(testConfig())
			for range 100 {
				b.add(time.Second)
				sample()
				if samples, _ := b.poll(); samples[gpuID(tt.gpus-1)].Stale {
					t.Fatal("stale with a new power value")
				}
			}
		})
	}
}

// A GPU without any value in this session is stale if others have values.
func TestGPUNeverMeasuredIsStale(t *testing.T) {
	b := newFixture(t, 2)
	b.blankGPUs(1)
	b.open(testConfig())
	stale := false
	for range 120 {
		b.add(time.Second)
		b.sampleGPUs(1)
		b.blankGPUs(1)
		samples, _ := b.poll()
		stale = samples[gpuID(1)].Stale
	}
	if !stale {
		t.Error("not stale after 2 minutes")
	}
}

// An engine that is blind when opened, but has the UUIDs of the GPUs, ends the session too.
func TestEngineBlindAtOpen(t *testing.T) {
	b := newFixture(t, 2)
	b.blankGPUs(0, 1)
	b.lib.Incident(script.GPU, 0, 0x40, 10, 11, "Cannot reliably read the power usage")
	b.open(testConfig())
	seconds, err := b.pollUntilFailure(func() { b.blankGPUs(0, 1) }, func(second int, r *health.Reading) {
		for _, s := range r.Samples {
			if s.Checked || len(s.Incidents) != 0 {
				t.Fatalf("after %d s: %s: checked %v, incidents %v", second, s.Device, s.Checked, s.Incidents)
			}
		}
	})
	if !errors.Is(err, errBlind) {
		t.Errorf("after %d s: %v", seconds, err)
	}
}

// A rebuild recovers from a host engine whose clock was set back, without an error or a lost XID
// (OBSERVED.md#sample-order).
func TestHostEngineClockSetBack(t *testing.T) {
	b := openFixture(t, 2, hostConfig())
	b.poll()
	b.lib.Clock(-time.Hour)
	var got, want []int
	for n := range 120 {
		b.add(time.Second)
		b.xid(script.GPU, 0, int64(1000+n), b.clock.now())
		got = append(got, xidCodes(b.pollAfter(0, 2)[gpuID(0)].XIDs)...)
		want = append(want, 1000+n)
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("XIDs %v", got)
	}
}

// A stale GPU stays stale while no other GPU is measured.
func TestStaleGPUStaysStale(t *testing.T) {
	for _, how := range []string{"lost", "paused"} {
		t.Run(how, func(t *testing.T) {
			b := startFixture(t, 2)
			for second := range 40 { // GPU 1 has no new samples
				s := b.pollAfter(time.Second, 1)
				if second == 39 && !s[gpuID(1)].Stale {
					t.Fatal("not stale")
				}
			}
			if how == "lost" {
				b.lib.Entity(script.GPU, 0, statusLost)
			}
			for second := range 8 {
				b.add(time.Second)
				s, _ := b.poll()
				if !s[gpuID(1)].Stale {
					t.Fatalf("after %d s: GPU 1 is not stale, values %v", second, s[gpuID(1)].Values)
				}
			}
		})
	}
}
