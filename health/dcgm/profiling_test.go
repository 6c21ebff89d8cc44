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

// One profiling field that cannot be had takes the other profiling fields with it and nothing else.
func TestProfilingRefused(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(1)
	b.addInstances(0, map[uint][]uint{0: {0}})
	b.lib.Profiling(0, 1001)
	b.lib.Profiling(0, 1002)
	b.lib.Float(script.GPU, 0, 1001, 0.5, 0, b.clock.now())
	cfg := testConfig()
	cfg.Fields = append(cfg.Fields, 1001, 1002)
	b.open(cfg)
	samples, _ := b.poll()
	values := samples[gpuID(0)].Values
	if _, there := values[1001]; there || values[health.FieldGPUTemp] != 40 {
		t.Errorf("values %v", values)
	}
}

func TestProfiling(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(1)
	b.lib.Profiling(0, 1001)
	b.lib.Profiling(0, 1002)
	b.lib.Float(script.GPU, 0, 1001, 0.5, 0, b.clock.now())
	cfg := testConfig()
	cfg.Fields = append(cfg.Fields, 1001)
	b.open(cfg)
	samples, _ := b.poll()
	if got := samples[gpuID(0)].Values[1001]; got != 0.5 {
		t.Errorf("ratio %v, want 0.5", got)
	}
}

// Each GPU is asked what it has, the first does not speak for the others.
func TestProfilingMixedGPUs(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(4)
	b.addInstances(1, map[uint][]uint{0: {0}})
	for gpu, fields := range map[uint][]uint{1: {1001, 1003}, 2: {1001, 1003}, 3: {1003, 1004}} { // 0 has none
		for _, f := range fields {
			b.lib.Profiling(gpu, f)
		}
	}
	for gpu := range uint(4) {
		b.lib.Float(script.GPU, gpu, 1001, 0.1, 0, b.clock.now())
		b.lib.Float(script.GPU, gpu, 1003, 0.3, 0, b.clock.now())
	}
	b.lib.Float(script.CI, 0, 1001, 0.7, 0, b.clock.now())
	core, logs := observer.New(zap.WarnLevel)
	b.log = zap.New(core)
	cfg := testConfig()
	cfg.Fields = append(cfg.Fields, 1001, 1003)
	b.open(cfg)
	check := func() {
		t.Helper()
		samples := b.pollAfter(10*time.Second, 4)
		for id, want := range map[health.DeviceID][2]float64{
			gpuID(0): {}, gpuID(1): {0.1, 0.3}, gpuID(2): {0.1, 0.3}, gpuID(3): {0, 0.3}, migID(0): {0.7, 0},
		} {
			values := samples[id].Values
			if got := [2]float64{values[1001], values[1003]}; got != want {
				t.Errorf("%s: fields 1001 and 1003 are %v, want %v", id, got, want)
			}
		}
	}
	check()
	b.inventoryDirty = true
	check()
	if logs.Len() != 1 {
		t.Fatalf("%d warnings, want 1: %v", logs.Len(), logs.All())
	}
	said := fmt.Sprint(logs.All()[0].ContextMap())
	for _, want := range []string{"1001 (GPU 0: ", "1003 (GPU 0: ", "1001 (GPU 3 does not have it)"} {
		if !strings.Contains(said, want) {
			t.Errorf("the warning does not say %q: %s", want, said)
		}
	}
	if strings.Contains(said, "GPU 1") || strings.Contains(said, "GPU 2") {
		t.Errorf("the warning speaks of GPUs that lack nothing: %s", said)
	}
}

func TestProfilingNotRequested(t *testing.T) {
	b := newFixture(t)
	b.addGPUs(1)
	b.lib.Profiling(0, 1001)
	b.open(testConfig())
	if n := b.lib.Calls("dcgmProfGetSupportedMetricGroups"); n != 0 {
		t.Errorf("DCGM's profiling module was asked %d times, which loads it", n)
	}
}
