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

func TestProfiling(t *testing.T) {
	for name, tt := range map[string]struct {
		fields []health.Field
		want   float64
	}{
		"supported":                          {[]health.Field{1001}, 0.5},
		"one field held by another profiler": {[]health.Field{1001, 1002}, 0}, // DCGM refuses all profiling fields
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, 1)
			b.addInstances(0, map[uint][]uint{0: {0}})
			b.lib.Profiling(0, 1001)
			b.lib.Profiling(0, 1002)
			b.lib.Float(script.GPU, 0, 1001, 0.5, 0, b.clock.now())
			samples, _ := b.open(testConfig(tt.fields...)).poll()
			if v := samples[gpuID(0)].Values; v[1001] != tt.want || v[health.FieldGPUTemp] != 40 {
				t.Errorf("values %v, want ratio %v", v, tt.want)
			}
		})
	}
}

// GPUs can support different fields (OBSERVED.md#profiling-groups).
func TestProfilingMixedGPUs(t *testing.T) {
	b := newFixture(t, 4)
	b.addInstances(1, map[uint][]uint{0: {0}})
	for gpu, fields := range map[uint][]uint{1: {1001, 1003}, 2: {1001, 1003}, 3: {1003, 1004}} { // GPU 0 supports none
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
	b.open(testConfig(1001, 1003))
	expect := func() {
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
	expect()
	b.inventoryDirty = true
	expect()
	if logs.Len() != 1 {
		t.Fatalf("%d warnings, want 1: %v", logs.Len(), logs.All())
	}
	fields, _ := logs.All()[0].ContextMap()["fields"].([]any)
	for i, want := range []string{"1001 (GPU 0:", "1003 (GPU 0:", "1001 (GPU 3:"} {
		if len(fields) != 3 || !strings.HasPrefix(fmt.Sprint(fields[i]), want) {
			t.Errorf("logged fields %v, want %s", fields, want)
		}
	}
}
