//go:build cgo && linux

package dcgm

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

func TestUnknownFieldsAreLoggedOnce(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(1)
	core, logs := observer.New(zap.WarnLevel)
	b.log = zap.New(core)
	cfg := testConfig()
	// One that is neither a number nor a text, one that this DCGM does not know, one twice, and two that are watched anyway.
	cfg.Fields = append(cfg.Fields, 515, 1700, health.FieldGPUTemp, health.FieldXID, health.FieldRemapFailed)
	cfg.Fields = append(cfg.Fields, 1595) // newer than the engine
	b.open(cfg)
	samples, _ := b.poll()
	if got := samples[gpuID(0)].Values[health.FieldGPUTemp]; got != 40 {
		t.Errorf("temperature %v, want 40", got)
	}
	b.inventoryDirty = true
	b.poll()
	if logs.Len() != 1 {
		t.Fatalf("%d warnings, want 1: %v", logs.Len(), logs.All())
	}
	said := fmt.Sprint(logs.All()[0].ContextMap())
	if !strings.Contains(said, "515 (") || !strings.Contains(said, "1700 (") || !strings.Contains(said, "1595 (unknown to the engine") ||
		strings.Contains(said, "150") {
		t.Errorf("the warning says %s", said)
	}
}

// More fields than a group or a call takes are shared out, of GPUs and of their parts.
func TestManyFields(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(8)
	b.addInstances(0, map[uint][]uint{3: {4}})
	cfg := testConfig()
	const first, last = 1100, 1399
	for f := uint(first); f <= last; f++ {
		cfg.Fields = append(cfg.Fields, health.Field(f))
		for gpu := range uint(8) {
			b.lib.Int(script.GPU, gpu, f, int64(1000*gpu+f), 0, b.clock.now())
		}
		b.lib.Int(script.CI, 4, f, int64(f), 0, b.clock.now())
	}
	cfg.Fields = append(cfg.Fields, 1595) // newer than the engine
	b.open(cfg)
	samples, _ := b.poll()
	for f := uint(first); f <= last; f++ {
		for gpu := range uint(8) {
			if got := samples[gpuID(gpu)].Values[health.Field(f)]; got != float64(1000*gpu+f) {
				t.Fatalf("field %d of GPU %d is %v", f, gpu, got)
			}
		}
		if got := samples[migID(4)].Values[health.Field(f)]; got != float64(f) {
			t.Fatalf("field %d of the MIG device is %v", f, got)
		}
		if w, ok := b.lib.Watched(script.GPU, 7, f); !ok || w.Every != cfg.Interval {
			t.Fatalf("field %d is watched %v as %+v", f, ok, w)
		}
	}
	if got := samples[gpuID(7)].Values[health.FieldGPUTemp]; got != 47 {
		t.Errorf("temperature %v", got)
	}
	if n := b.lib.Widest(); n > maxValues {
		t.Errorf("%d values in one call", n)
	}
}

// DCGM's health check looks every 30 s, ours each second; one sample is kept, of XIDs ten minutes, on GPUs, GPU
// instances and compute instances (3, 9).
func TestWatchIntervals(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(1)
	b.addInstances(0, map[uint][]uint{3: {4}})
	cfg := testConfig()
	cfg.Fields = append(cfg.Fields, health.FieldFBUsed)
	b.open(cfg)
	watched := func(kind script.Kind, id, field uint, want script.Watch) {
		t.Helper()
		if got, ok := b.lib.Watched(kind, id, field); !ok || got != want {
			t.Errorf("field %d of %d %d is watched %v as %+v, want %+v", field, kind, id, ok, got, want)
		}
	}
	for _, f := range healthFields() {
		watched(script.GPU, 0, uint(f), script.Watch{Every: time.Second, Samples: 1})
	}
	watched(script.GPU, 0, 155, script.Watch{Every: 10 * time.Second, Samples: 1})
	watched(script.CI, 4, 252, script.Watch{Every: 10 * time.Second, Samples: 1})
	for kind, id := range map[script.Kind]uint{script.GPU: 0, script.GI: 3, script.CI: 4} {
		watched(kind, id, 230, script.Watch{Every: time.Second, Keep: 10 * time.Minute})
	}
	if w, ok := b.lib.Watched(script.CI, 4, 155); ok {
		t.Errorf("the power of a compute instance is watched (%+v): it has none of its own", w)
	}
}

// A field that one GPU does not have is absent there and nowhere else, and said once.
func TestUnsupportedFields(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(3)
	core, logs := observer.New(zap.InfoLevel)
	b.log = zap.New(core)
	lack := func() {
		b.lib.Int(script.GPU, 1, 150, 9223372036854775794, 0, b.clock.now())
		b.lib.Int(script.GPU, 2, 150, 2147483634, 0, b.clock.now())
		b.lib.Float(script.GPU, 1, 155, 140737488355330, 0, b.clock.now())
		b.lib.Int(script.GPU, 0, 395, 9223372036854775792, 0, b.clock.now()) // blank: perhaps the next time
	}
	lack()
	b.open(testConfig())
	samples, _ := b.poll()
	for id, want := range map[uint][2]bool{0: {true, true}, 1: {false, false}, 2: {false, true}} {
		values := samples[gpuID(id)].Values
		_, temperature := values[health.FieldGPUTemp]
		_, power := values[health.FieldPower]
		if got := [2]bool{temperature, power}; got != want {
			t.Errorf("GPU %d has temperature and power: %v, want %v", id, got, want)
		}
	}
	b.inventoryDirty = true
	for range 3 {
		b.add(10 * time.Second)
		b.sampleGPUs(3)
		lack()
		b.poll()
	}
	said := logs.FilterMessageSnippet("does not support").All()
	if len(said) != 1 {
		t.Fatalf("said %d times: %v", len(said), said)
	}
	if got := fmt.Sprint(said[0].ContextMap()["fields"]); got != "[150 (GPU 1, 2) 155 (GPU 1)]" {
		t.Errorf("it says %s", got)
	}
}
