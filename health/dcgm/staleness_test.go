//go:build cgo && linux

package dcgm

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// After an XID 119 DCGM calls the GPUs OK and has no value of them any more.
func TestBlindEngineEndsSession(t *testing.T) {
	for name, interval := range map[string]time.Duration{"light polls": time.Hour, "full polls": time.Second} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.addGPUs(2)
			cfg := testConfig()
			cfg.Interval = interval
			b.open(cfg)
			b.poll()
			b.pollAfter(time.Second, 2)
			for id := range uint(2) {
				for _, f := range []uint{54, 67, 150, 395, 396, 1507, 1523} {
					b.lib.Int(script.GPU, id, f, 9223372036854775792, 0, b.clock.now())
				}
				b.lib.Float(script.GPU, id, 155, 140737488355328, 0, b.clock.now())
			}
			var err error
			seconds := 0
			for ; err == nil && seconds < 20; seconds++ {
				b.add(time.Second)
				_, err = b.Poll(t.Context())
			}
			if err == nil || !strings.Contains(err.Error(), "blind") || seconds > 5 {
				t.Fatalf("after %d s: %v", seconds, err)
			}
			if err := b.Close(); err != nil {
				t.Error(err)
			}
			if _, err := Open(t.Context(), cfg, b.log); err == nil || !strings.Contains(err.Error(), "blind") {
				t.Errorf("Open of a blind engine: %v", err)
			}
		})
	}
}

// GPUs that have none of the fields of health are not blind for that.
func TestGPUWithoutHealthFieldsIsNotBlind(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(1)
	blank := func() {
		for _, f := range []uint{150, 395, 396, 1507, 1523} {
			b.lib.Int(script.GPU, 0, f, 9223372036854775794, 0, b.clock.now())
		}
		b.lib.Float(script.GPU, 0, 155, 50, 0, b.clock.now())
	}
	blank()
	b.open(testConfig())
	for range 100 {
		b.poll()
		b.add(time.Second)
		blank()
	}
}

func TestFrozenEngineEndsSession(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(2)
	b.open(testConfig())
	b.poll()
	for range 60 {
		b.pollAfter(time.Second, 2)
	}
	var err error
	seconds := 0
	for ; err == nil && seconds < 100; seconds++ {
		b.add(time.Second)
		_, err = b.Poll(t.Context())
	}
	if err == nil || !strings.Contains(err.Error(), "has not measured") || seconds < 30 || seconds > 35 {
		t.Errorf("after %d s: %v, want an error after 30 s", seconds, err)
	}
}

// blank has GPUs read blank from now on.
func (b *fixture) blankGPUs(gpus ...uint) {
	for _, id := range gpus {
		for _, f := range []uint{67, 150, 395, 396, 1507, 1523} {
			b.lib.Int(script.GPU, id, f, 9223372036854775792, 0, b.clock.now())
		}
		b.lib.Float(script.GPU, id, 155, 140737488355328, 0, b.clock.now())
	}
}

// A GPU that cannot be measured while the others can is stale: after 3 s without a value, or after 30 s without a new one.
// It keeps no old values, nor do its MIG devices, and comes back by itself.
func TestStaleGPU(t *testing.T) {
	for name, tt := range map[string]struct {
		others func(b *fixture) // in each second
		from   int              // the seconds after which it is stale
		to     int
	}{
		"without a value":     {func(b *fixture) { b.sampleGPUs(2); b.blankGPUs(2) }, 3, 5},
		"without a new value": {func(b *fixture) { b.sampleGPUs(2) }, 30, 32},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t)
			b.addGPUs(3)
			b.addInstances(2, map[uint][]uint{0: {0}})
			cfg := testConfig()
			cfg.Fields = append(cfg.Fields, health.FieldFBUsed)
			b.open(cfg)
			b.poll()
			pass := func(sample func(*fixture)) map[health.DeviceID]health.Sample {
				b.add(time.Second)
				sample(b)
				samples, _ := b.poll()
				return samples
			}
			since := 0
			for second := 1; second <= 100; second++ {
				samples := pass(tt.others)
				if s := samples[gpuID(2)]; s.Stale && since == 0 {
					since = second
				} else if s.Stale != (since > 0) {
					t.Fatalf("after %d s stale is %v", second, s.Stale)
				}
				for _, id := range []health.DeviceID{gpuID(2), migID(0)} {
					s := samples[id]
					if s.Stale != (since > 0) || s.Presence != health.Present || s.Stale && len(s.Values) != 0 {
						t.Fatalf("after %d s: %s: stale %v, %v, values %v", second, id, s.Stale, s.Presence, s.Values)
					}
				}
				for gpu := range uint(2) {
					if s := samples[gpuID(gpu)]; s.Stale || s.Values[health.FieldGPUTemp] != float64(40+gpu) {
						t.Fatalf("after %d s: GPU %d is stale %v, values %v", second, gpu, s.Stale, s.Values)
					}
				}
			}
			if since < tt.from || since > tt.to {
				t.Errorf("stale after %d s, want %d to %d", since, tt.from, tt.to)
			}
			b.xid(script.GPU, 2, 119, b.clock.now())
			if s := pass(tt.others)[gpuID(2)]; !slices.Equal(xidCodes(s), []int{119}) || len(s.Values) != 0 {
				t.Errorf("XIDs %v, values %v", s.XIDs, s.Values)
			}
			all := func(b *fixture) { b.sampleGPUs(3); b.lib.Int(script.GPU, 2, 67, 1, 0, b.clock.now()) }
			if s := pass(all)[gpuID(2)]; s.Stale {
				t.Error("measured again and still stale")
			}
			samples := pass(all)
			if s := samples[gpuID(2)]; s.Stale || s.Values[health.FieldPower] != 72.5 || s.Values[health.FieldGPUTemp] != 42 {
				t.Errorf("after a poll of everything: stale %v, values %v", s.Stale, s.Values)
			}
			if s := samples[migID(0)]; s.Stale || s.Values[health.FieldFBUsed] != 100 {
				t.Errorf("the MIG device: stale %v, values %v", s.Stale, s.Values)
			}
		})
	}
}

// A GPU that is measured no more is no other's fault, and with the last of them it is the source's: none is stale before.
func TestNoGPUIsStaleIfAllAre(t *testing.T) {
	for name, others := range map[string]func(*fixture){
		"blank":  func(b *fixture) { b.blankGPUs(0, 1) },
		"frozen": func(*fixture) {},
		"both":   func(b *fixture) { b.blankGPUs(0) },
	} {
		for _, lost := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, the other lost %v", name, lost), func(t *testing.T) {
				b := newFixture(t)
				b.addGPUs(2)
				if lost {
					b.lib.Instance(script.GPU, 1, script.GPU, 1, gpuUUID(1), 0, 0)
					b.lib.Entity(script.GPU, 1, statusLost)
				}
				b.open(testConfig())
				b.poll()
				b.pollAfter(time.Second, 2)
				for second := range 60 {
					b.add(time.Second)
					others(b)
					r, err := b.Poll(t.Context())
					if err != nil {
						return
					}
					for _, s := range r.Samples {
						if s.Stale {
							t.Fatalf("after %d s %s is stale", second, s.Device)
						}
					}
				}
				t.Error("the session goes on")
			})
		}
	}
}

// A GPU that never had a value of the fields of health is measured by the others.
func TestGPUWithoutHealthFieldsIsNotStale(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(2)
	blank := func() {
		b.sampleGPUs(1)
		for _, f := range []uint{150, 395, 396, 1507, 1523} {
			b.lib.Int(script.GPU, 1, f, 9223372036854775792, 0, b.clock.now())
		}
		b.lib.Float(script.GPU, 1, 155, 50, 0, b.clock.now())
	}
	blank()
	b.open(testConfig())
	for range 100 {
		b.add(time.Second)
		blank()
		if samples, _ := b.poll(); samples[gpuID(1)].Stale {
			t.Fatal("stale, although its power is measured")
		}
	}
}

// A GPU that never had any value of this session is stale too, if the others have them.
func TestGPUNeverMeasuredIsStale(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(2)
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
		t.Error("not stale after two minutes")
	}
}

// An engine that was opened blind, and has the names of the GPUs, is told as one that went blind.
func TestEngineBlindAtOpen(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(2)
	b.blankGPUs(0, 1)
	b.lib.Incident(script.GPU, 0, 0x40, 10, 11, "Cannot reliably read the power usage")
	b.open(testConfig())
	for second := range 120 {
		r, err := b.Poll(t.Context())
		if err != nil {
			if !strings.Contains(err.Error(), "blind") {
				t.Errorf("after %d s: %v", second, err)
			}
			return
		}
		for _, s := range r.Samples {
			if s.Checked || len(s.Incidents) != 0 {
				t.Fatalf("after %d s: %s: checked %v, incidents %v", second, s.Device, s.Checked, s.Incidents)
			}
		}
		b.add(time.Second)
		b.blankGPUs(0, 1)
	}
	t.Error("the session goes on")
}

// A host engine whose clock was set back shows no new sample. Whoever connects to it again sees new ones.
func TestHostEngineClockSetBack(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(2)
	cfg := testConfig()
	cfg.Address = "node:5555"
	b.open(cfg)
	b.poll()
	b.lib.Clock(-time.Hour)
	pass := func(seconds int) (err error) {
		for i := 0; i < seconds && err == nil; i++ {
			b.add(time.Second)
			b.sampleGPUs(2)
			_, err = b.Poll(t.Context())
		}
		return err
	}
	if err := pass(120); err != nil {
		t.Errorf("%v", err)
	}
}

// A GPU that cannot be measured stays so when nothing is there to compare it with.
func TestStaleGPUStaysStale(t *testing.T) {
	for _, how := range []string{"lost", "paused"} {
		t.Run(how, func(t *testing.T) {
			b := newFixture(t)
			b.addGPUs(2)
			b.open(testConfig())
			b.poll()
			for second := range 40 { // GPU 1 stands still
				b.add(time.Second)
				b.sampleGPUs(1)
				s, _ := b.poll()
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
					t.Fatalf("%d s later GPU 1 is measured: %v", second, s[gpuID(1)].Values)
				}
			}
		})
	}
}
