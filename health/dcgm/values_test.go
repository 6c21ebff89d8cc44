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
			health.FieldRecoveryAction: 0, health.FieldXID: 0, health.FieldGPUTemp: float64(40 + id), health.FieldPower: 70.5 + float64(id),
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
	type value struct {
		set   func(b *fixture)
		field health.Field
		want  float64
		ok    bool
	}
	integer := func(v int64, status int, ok bool) value {
		return value{func(b *fixture) { b.lib.Int(script.GPU, 0, 150, v, status, b.clock.now()) }, health.FieldGPUTemp, float64(v), ok}
	}
	float := func(v float64, status int, ok bool) value {
		return value{func(b *fixture) { b.lib.Float(script.GPU, 0, 155, v, status, b.clock.now()) }, health.FieldPower, v, ok}
	}
	tests := map[string]value{
		"int64 with a status":    integer(50, errNoData, false),
		"double with a status":   float(50, -16, false),
		"text in a number field": {set: func(b *fixture) { b.lib.Text(script.GPU, 0, 150, "45", 0, b.clock.now()) }, field: health.FieldGPUTemp},
		"zero":                   integer(0, 0, true),
		"a negative value":       integer(-5, 0, true),
		"below the 32-bit blank": integer(0x7fffffef, 0, true),
		"above 32 bits":          integer(0x80000000, 0, true),
		"below the double blank": float(140737488355327, 0, true),
		"0 W":                    float(0, 0, true),
		"NaN":                    float(math.NaN(), 0, false),
		"infinite":               float(math.Inf(-1), 0, false),
	}
	for i, kind := range []string{"blank", "not found", "not supported", "not permissioned"} {
		tests["int64 "+kind] = integer(9223372036854775792+int64(i), 0, false)
		tests["int32 in int64 "+kind] = integer(2147483632+int64(i), 0, false)
		tests["double "+kind] = float(140737488355328+float64(i), 0, false)
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			b.add(10 * time.Second)
			b.sampleGPUs(1)
			tt.set(b)
			samples, _ := b.poll()
			got, ok := samples[gpuID(0)].Values[tt.field]
			if ok != tt.ok || ok && got != tt.want {
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
