//go:build cgo && linux

package dcgm

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// loggedNumbers returns the numbers of the fields in a log line's "fields", whose entries are "number (reason)".
func loggedNumbers(context map[string]any) (numbers []string) {
	fields, _ := context["fields"].([]any)
	for _, field := range fields {
		number, _, _ := strings.Cut(fmt.Sprint(field), " (")
		numbers = append(numbers, number)
	}
	return numbers
}

func TestUnknownFieldsAreLoggedOnce(t *testing.T) {
	b := newFixture(t, 1)
	b.lib.Engine("4.2.3")
	core, logs := observer.New(zap.WarnLevel)
	b.log = zap.New(core)
	cfg := hostConfig()
	// Neither number nor text, unknown, a duplicate, and two that are watched anyway.
	cfg.Fields = append(cfg.Fields, 515, 1700, health.FieldGPUTemp, health.FieldXID, health.FieldRemapFailed)
	cfg.Fields = append(cfg.Fields, 1520) // unknown to the engine, like two of the health fields
	samples, _ := b.open(cfg).poll()
	if got := samples[gpuID(0)].Values[health.FieldGPUTemp]; got != 40 {
		t.Errorf("temperature %v, want 40", got)
	}
	b.inventoryDirty = true
	b.poll()
	if logs.Len() != 1 {
		t.Fatalf("%d warnings, want 1: %v", logs.Len(), logs.All())
	}
	if got := loggedNumbers(logs.All()[0].ContextMap()); !slices.Equal(got, []string{"515", "1700", "1523", "1507", "1520"}) {
		t.Errorf("logged fields %v", got)
	}
}

// baseUnitFields are all fields in base units.
func baseUnitFields() (fields []health.Field) {
	for f := health.Field(1600); f <= health.LastBaseUnitField; f++ {
		fields = append(fields, f)
	}
	return fields
}

// addBaseUnits adds a sample of the fields in base units and of the fields that they follow from: both measure the same.
func (b *fixture) addBaseUnits(kind script.Kind, id uint) {
	for i, f := range baseUnitFields() {
		n := int64(37 + i)
		d, ok := health.DerivationOf(f)
		if ok {
			b.lib.Int(kind, id, uint(d.From), n, 0, b.clock.now())
		}
		if native := d.Apply(float64(n)); f >= 1612 && f <= 1624 {
			b.lib.Float(kind, id, uint(f), native, 0, b.clock.now())
		} else if ok {
			b.lib.Int(kind, id, uint(f), int64(native), 0, b.clock.now())
		} else {
			b.lib.Int(kind, id, uint(f), n, 0, b.clock.now())
		}
	}
}

// Every DCGM provides the same values of the fields in base units: its own, or the older ones that they follow from. It
// measures no field twice.
func TestBaseUnitFields(t *testing.T) {
	// The fields that do not follow from an older one.
	underivable := func(f health.Field) bool { _, ok := health.DerivationOf(f); return !ok }
	newest := []string{}
	for _, f := range baseUnitFields() {
		if underivable(f) {
			newest = append(newest, strconv.Itoa(int(f)))
		}
	}
	for _, tt := range []struct {
		library, engine string       // engine "": embedded
		native          health.Field // the last field that both have
		omitted         []string
	}{
		{"4.2.3", "", 0, append([]string{"1523", "1507"}, newest...)},
		{"4.6.0", "", 0, newest},
		{"4.6.1", "", 1612, newest},
		{"4.6.1", "4.2.3", 0, slices.Concat(newest, []string{"1523", "1507"})},
		{"4.6.1", "4.6.0", 0, newest},
		{"4.6.0", "4.7.0", 0, newest},
		{"4.7.0", "4.6.1", 1612, newest},
		{"4.7.0", "4.7.1", 1650, nil},
		{"4.7.0", "", 1650, nil},
	} {
		t.Run(tt.library+" and "+cmp.Or(tt.engine, "embedded"), func(t *testing.T) {
			b := newFixture(t, 2)
			b.lib.SetVersion(tt.library)
			cfg := testConfig(baseUnitFields()...)
			if tt.engine != "" {
				cfg.Address = "node:5555"
				b.lib.Engine(tt.engine)
			}
			core, logs := observer.New(zap.WarnLevel)
			b.log = zap.New(core)
			b.addBaseUnits(script.GPU, 0)
			samples, _ := b.open(cfg).poll()
			values := samples[gpuID(0)].Values
			for i, f := range baseUnitFields() {
				d, ok := health.DerivationOf(f)
				native, hasNative := values[f]
				older, hasOlder := values[d.From]
				switch {
				case hasNative != (f <= tt.native), hasOlder != (ok && !hasNative):
					t.Errorf("field %d: has a value %v, field %d %v", f, hasNative, d.From, hasOlder)
				case hasNative && ok && native != d.Apply(float64(37+i)), hasOlder && !hasNative && older != float64(37+i):
					t.Errorf("field %d is %v, field %d is %v", f, native, d.From, older)
				}
			}
			var logged []string
			for _, line := range logs.All() {
				logged = append(logged, loggedNumbers(line.ContextMap())...)
			}
			if !slices.Equal(logged, tt.omitted) {
				t.Errorf("logged %v, want %v", logged, tt.omitted)
			}
		})
	}
}

// On a MIG device DCGM measures the memory in either unit.
func TestBaseUnitFieldsOfMIG(t *testing.T) {
	for version, want := range map[string]health.Field{"4.6.0": health.FieldFBUsed, "4.7.0": 1627} {
		b := newFixture(t, 1)
		b.lib.SetVersion(version)
		b.addInstances(0, map[uint][]uint{3: {4}})
		b.addBaseUnits(script.CI, 4)
		samples, _ := b.open(testConfig(1613, 1627)).poll()
		values := samples[migID(4)].Values
		if _, ok := values[want]; !ok || len(values) != 2 { // and field 230
			t.Errorf("DCGM %s: values %v, want field %d", version, values, want)
		}
		b.close()
	}
}

// More fields than a group or a call may have are split, of GPUs and MIG devices.
func TestManyFields(t *testing.T) {
	b := newFixture(t, 8)
	b.addInstances(0, map[uint][]uint{3: {4}})
	cfg := testConfig()
	const first, last = 1150, 1399
	for f := uint(first); f <= last; f++ {
		cfg.Fields = append(cfg.Fields, health.Field(f))
		for gpu := range uint(8) {
			b.lib.Int(script.GPU, gpu, f, int64(1000*gpu+f), 0, b.clock.now())
		}
		b.lib.Int(script.CI, 4, f, int64(f), 0, b.clock.now())
	}
	cfg.Fields = append(cfg.Fields, 1595) // unknown
	samples, _ := b.open(cfg).poll()
	for f := uint(first); f <= last; f++ {
		for gpu := range uint(8) {
			if got := samples[gpuID(gpu)].Values[health.Field(f)]; got != float64(1000*gpu+f) {
				t.Fatalf("field %d of GPU %d is %v", f, gpu, got)
			}
		}
		if got := samples[migID(4)].Values[health.Field(f)]; got != float64(f) {
			t.Fatalf("field %d of the MIG device is %v", f, got)
		}
		b.expectWatch(script.GPU, 7, f, script.Watch{Every: cfg.Interval, Samples: 1})
	}
	if got := samples[gpuID(7)].Values[health.FieldGPUTemp]; got != 47 {
		t.Errorf("temperature %v", got)
	}
	if n := b.lib.Widest(); n > 256 { // above this go-dcgm allocates memory in every call
		t.Errorf("%d values in one call, want at most 256", n)
	}
}

// expectWatch compares how a field of an entity is watched; the zero Watch means that it is not.
func (b *fixture) expectWatch(kind script.Kind, id, field uint, want script.Watch) {
	b.t.Helper()
	if got, _ := b.lib.Watched(kind, id, field); got != want {
		b.t.Errorf("field %d of %d %d is watched %+v, want %+v", field, kind, id, got, want)
	}
}

// Health fields are sampled every second (OBSERVED.md#health-check-interval). DCGM keeps one sample, of XIDs ten minutes,
// on GPUs, GPU instances and compute instances (OBSERVED.md#instance-numbers).
func TestWatchIntervals(t *testing.T) {
	b := newFixture(t, 1)
	b.addInstances(0, map[uint][]uint{3: {4}})
	b.open(testConfig(health.FieldFBUsed))
	for _, f := range healthFields() {
		b.expectWatch(script.GPU, 0, uint(f), script.Watch{Every: time.Second, Samples: 1})
	}
	b.expectWatch(script.GPU, 0, 155, script.Watch{Every: 10 * time.Second, Samples: 1})
	b.expectWatch(script.CI, 4, 252, script.Watch{Every: 10 * time.Second, Samples: 1})
	for kind, id := range map[script.Kind]uint{script.GPU: 0, script.GI: 3, script.CI: 4} {
		b.expectWatch(kind, id, 230, script.Watch{Every: time.Second, Keep: 10 * time.Minute})
	}
	b.expectWatch(script.CI, 4, 155, script.Watch{}) // for an instance DCGM returns the power of the GPU
}

// A field that a GPU does not support is absent on that GPU only, and logged once.
func TestUnsupportedFields(t *testing.T) {
	b := newFixture(t, 3)
	core, logs := observer.New(zap.InfoLevel)
	b.log = zap.New(core)
	setUnsupported := func() {
		b.lib.Int(script.GPU, 1, 150, 9223372036854775794, 0, b.clock.now())
		b.lib.Int(script.GPU, 2, 150, 2147483634, 0, b.clock.now())
		b.lib.Float(script.GPU, 1, 155, 140737488355330, 0, b.clock.now())
		b.lib.Int(script.GPU, 0, 395, 9223372036854775792, 0, b.clock.now()) // blank, not unsupported
	}
	setUnsupported()
	samples, _ := b.open(testConfig()).poll()
	for id, want := range map[uint][2]bool{0: {true, true}, 1: {false, false}, 2: {false, true}} {
		values := samples[gpuID(id)].Values
		_, temperature := values[health.FieldGPUTemp]
		_, power := values[health.FieldPower]
		if got := [2]bool{temperature, power}; got != want {
			t.Errorf("GPU %d: temperature and power present %v, want %v", id, got, want)
		}
	}
	b.inventoryDirty = true
	for range 3 {
		b.add(10 * time.Second)
		b.sampleGPUs(3)
		setUnsupported()
		b.poll()
	}
	logged := logs.FilterFieldKey("fields").All()
	if len(logged) != 1 {
		t.Fatalf("%d log lines: %v", len(logged), logged)
	}
	if got := fmt.Sprint(logged[0].ContextMap()["fields"]); got != "[150 (GPU 1, 2) 155 (GPU 1)]" {
		t.Errorf("logged fields %s", got)
	}
}
