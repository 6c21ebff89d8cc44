//go:build cgo && linux

package dcgm

import (
	"context"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

func TestMeasureOnce(t *testing.T) {
	b := newFixture(t, 2)
	b.lib.Text(script.GPU, 1, 85, "96.00.99.00.01", 0, b.clock.now())
	b.lib.Profiling(0, 1002)
	b.lib.Profiling(1, 1001)
	b.lib.Profiling(1, 1003)
	cfg := Config{Fields: []health.Field{1001, 1002, 1004, 85, health.FieldGPUTemp, health.FieldSMClock}}
	r, profiling, err := MeasureOnce(context.Background(), cfg, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(profiling, []health.Field{1001, 1002}) {
		t.Errorf("profiling fields %v", profiling)
	}
	if len(r.Devices) != 2 || r.Devices[1].Texts[85] == "" || r.Devices[0].Texts != nil {
		t.Errorf("devices %+v", r.Devices)
	}
	values := r.Samples[0].Values
	if _, has := values[health.FieldSMClock]; has || values[health.FieldGPUTemp] != 40 {
		t.Errorf("values %v", values)
	}
	if n := b.lib.Calls("dcgmPolicyRegister_v2") + b.lib.Calls("dcgmHealthSet"); n != 0 {
		t.Errorf("%d registrations and health checks", n)
	}
	if b.lib.Initialized() || b.lib.Leaked() != 0 {
		t.Errorf("%d groups or watches left, initialized %v", b.lib.Leaked(), b.lib.Initialized())
	}
}

// Without profiling fields the module is not queried, and an error of Close is logged only.
func TestMeasureOnceWithoutFields(t *testing.T) {
	b := newFixture(t, 2)
	b.lib.Fail("dcgmGroupDestroy", errTimeout, -1)
	core, logs := observer.New(zap.WarnLevel)
	r, profiling, err := MeasureOnce(context.Background(), Config{}, zap.New(core))
	if err != nil || len(profiling) != 0 || len(r.Devices) != 2 || r.Samples[1].Presence != health.Present {
		t.Errorf("%v: %+v, profiling fields %v", err, r, profiling)
	}
	b.expectCalls("dcgmProfGetSupportedMetricGroups", 0)
	if logs.Len() != 1 || b.lib.Initialized() {
		t.Errorf("initialized %v, logged %v", b.lib.Initialized(), logs.All())
	}
}

func TestMeasureOnceRunsHealthChecks(t *testing.T) {
	b := newFixture(t, 2)
	for code, want := range map[int]health.ChecksStatus{0: health.ChecksUp, errVersion: health.ChecksDown} {
		b.lib.Fail("dcgmHealthCheck", code, -1)
		r, _, err := MeasureOnce(context.Background(), Config{HealthSystems: []string{AllHealthSystems}}, zap.NewNop())
		if err != nil || r.Checks.Status != want {
			t.Errorf("code %d: checks %+v, %v", code, r.Checks, err)
		}
		if b.lib.Initialized() || b.lib.Leaked() != 0 || b.lib.Systems() != 0 {
			t.Errorf("code %d: %d groups or watches left", code, b.lib.Leaked())
		}
	}
}

func TestMeasureOnceFails(t *testing.T) {
	b := newFixture(t, 1)
	b.lib.Fail("dcgmStartEmbedded", errInit, 1)
	if _, _, err := MeasureOnce(context.Background(), Config{}, zap.NewNop()); err == nil ||
		!strings.Contains(err.Error(), "DCGM initialization error") {
		t.Errorf("%v", err)
	}
	b.lib.Fail("dcgmEntitiesGetLatestValues", errTimeout, -1)
	if _, _, err := MeasureOnce(context.Background(), Config{}, zap.NewNop()); err == nil {
		t.Error("no error from a hung engine")
	}
	if b.lib.Initialized() {
		t.Error("a session is still open")
	}
}
