//go:build cgo && linux

package dcgm

import (
	"maps"
	"math"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

func TestValues(t *testing.T) {
	b := openFixture(t, 8, testConfig())
	samples, r := b.poll()
	if len(samples) != 8 || len(r.Devices) != 8 {
		t.Fatalf("%d samples of %d devices, want 8 of 8", len(samples), len(r.Devices))
	}
	for id := range uint(8) {
		want := map[health.Field]float64{
			health.FieldMIGMode: 0, health.FieldRemapFailed: 0, health.FieldRemapPending: 0, health.FieldUnrepairable: 0,
			health.FieldRecoveryAction: 0, health.FieldGPUTemp: float64(40 + id), health.FieldPower: 70.5 + float64(id),
		}
		s := samples[gpuID(id)]
		if !maps.Equal(s.Values, want) {
			t.Errorf("GPU %d: values %v, want %v", id, s.Values, want)
		}
		if s.Presence != health.Present || !s.At.Equal(b.clock.now()) {
			t.Errorf("GPU %d: presence %v at %v", id, s.Presence, s.At)
		}
	}
}

// All blanks are absent; values close to a blank are not (OBSERVED.md#blanks).
func TestBlankValues(t *testing.T) {
	b := openFixture(t, 1, testConfig())
	integers := func(v int64, status int) func() {
		return func() { b.lib.Int(script.GPU, 0, 150, v, status, b.clock.now()) }
	}
	floats := func(v float64, status int) func() {
		return func() { b.lib.Float(script.GPU, 0, 155, v, status, b.clock.now()) }
	}
	tests := map[string]struct {
		set   func()
		field health.Field
		want  float64
		ok    bool
	}{
		"int64 with a status":    {integers(50, errNoData), health.FieldGPUTemp, 0, false},
		"double with a status":   {floats(50, -16), health.FieldPower, 0, false},
		"text in a number field": {func() { b.lib.Text(script.GPU, 0, 150, "45", 0, b.clock.now()) }, health.FieldGPUTemp, 0, false},
		"zero":                   {integers(0, 0), health.FieldGPUTemp, 0, true},
		"a negative value":       {integers(-5, 0), health.FieldGPUTemp, -5, true},
		"below the 32-bit blank": {integers(0x7fffffef, 0), health.FieldGPUTemp, 0x7fffffef, true},
		"above 32 bits":          {integers(0x80000000, 0), health.FieldGPUTemp, 0x80000000, true},
		"below the double blank": {floats(140737488355327, 0), health.FieldPower, 140737488355327, true},
		"0 W":                    {floats(0, 0), health.FieldPower, 0, true},
		"NaN":                    {floats(math.NaN(), 0), health.FieldPower, 0, false},
		"infinite":               {floats(math.Inf(-1), 0), health.FieldPower, 0, false},
	}
	for i, kind := range []string{"blank", "not found", "not supported", "not permissioned"} {
		tests["int64 "+kind] = struct {
			set   func()
			field health.Field
			want  float64
			ok    bool
		}{integers(9223372036854775792+int64(i), 0), health.FieldGPUTemp, 0, false}
		tests["int32 in int64 "+kind] = struct {
			set   func()
			field health.Field
			want  float64
			ok    bool
		}{integers(2147483632+int64(i), 0), health.FieldGPUTemp, 0, false}
		tests["double "+kind] = struct {
			set   func()
			field health.Field
			want  float64
			ok    bool
		}{floats(140737488355328+float64(i), 0), health.FieldPower, 0, false}
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			b.add(10 * time.Second)
			b.sampleGPUs(1)
			tt.set()
			samples, _ := b.poll()
			got, ok := samples[gpuID(0)].Values[tt.field]
			if ok != tt.ok || got != tt.want {
				t.Errorf("value %v, present %v; want %v, %v", got, ok, tt.want, tt.ok)
			}
		})
	}
}

func TestHealthPollReadsHealthFieldsOnly(t *testing.T) {
	b := openFixture(t, 8, testConfig())
	first, _ := b.poll()
	calls := b.lib.Calls("dcgmEntitiesGetLatestValues")

	b.lib.Float(script.GPU, 3, 155, 99, 0, b.clock.now())
	b.add(time.Second)
	b.lib.Int(script.GPU, 3, 396, 1, 0, b.clock.now())
	light, _ := b.poll()
	b.expectCalls("dcgmEntitiesGetLatestValues", calls+1)
	values := light[gpuID(3)].Values
	if values[health.FieldRemapPending] != 1 {
		t.Errorf("no pending remap in a health poll: %v", values)
	}
	if values[health.FieldPower] != 73.5 {
		t.Errorf("power %v in a health poll, want the last one, 73.5", values[health.FieldPower])
	}
	if first[gpuID(3)].Values[health.FieldRemapPending] != 0 {
		t.Error("values of an earlier reading changed")
	}

	b.add(9 * time.Second)
	full, _ := b.poll()
	if got := full[gpuID(3)].Values[health.FieldPower]; got != 99 {
		t.Errorf("power %v after an interval, want 99", got)
	}
	b.expectCalls("dcgmEntitiesGetLatestValues", calls+2)
}

func TestReadsAreLimited(t *testing.T) {
	b := newFixture(t, 8)
	cfg := testConfig()
	for f := range 60 {
		cfg.Fields = append(cfg.Fields, health.Field(600+f))
	}
	for id := range uint(8) {
		for f := range uint(40) {
			b.lib.Int(script.GPU, id, 600+f, int64(id*100+f), 0, b.clock.now())
		}
	}
	cfg.Fields = cfg.Fields[:40]
	b.open(cfg)
	samples, _ := b.poll()
	for id := range uint(8) {
		for f := range uint(38) {
			if got := samples[gpuID(id)].Values[health.Field(600+f)]; got != float64(id*100+f) {
				t.Fatalf("GPU %d field %d: %v", id, 600+f, got)
			}
		}
	}
	if n := b.lib.Widest(); n > 256 { // above this go-dcgm allocates memory in every call
		t.Errorf("%d values in one call, want at most 256", n)
	}
}
