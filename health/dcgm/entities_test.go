//go:build cgo && linux

package dcgm

import (
	"runtime"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// Fields of NVSwitches, links, CPUs and cores (dcgm_fields.h).
const (
	fieldSwitchTemp, fieldSwitchUUID       = 858, 878
	fieldSwitchLinkFlits, fieldGPULinkCRCs = 786, 1525
	fieldCPUTemp, fieldCoreUtil            = 1110, 1100
	fieldGPULinkDowns                      = 585
)

// States of an NVLink (dcgm_structs.h: dcgmNvLinkLinkState_t).
const linkUnsupported, linkDisabled, linkDown, linkUp = 0, 1, 2, 3

// linkID returns a dcgm_link_t.
func linkID(parent script.Kind, id, port uint) uint { return uint(parent) | port<<8 | id<<24 }

// addHardware adds two NVSwitches with links, links of GPU 0, and a CPU with two cores.
func (b *fixture) addHardware() {
	at := b.clock.now()
	for id := range uint(2) {
		b.lib.Entity(script.Switch, id, statusOK)
		b.lib.Int(script.Switch, id, fieldSwitchTemp, int64(40+id), 0, at)
		b.lib.Text(script.Switch, id, fieldSwitchUUID, "SWX-1", 0, at)
	}
	for port, state := range map[uint]int{2: linkUp, 3: linkDown, 4: linkDisabled, 5: linkUnsupported} {
		b.lib.Entity(script.Link, linkID(script.Switch, 1, port), state)
		b.lib.Int(script.Link, linkID(script.Switch, 1, port), fieldSwitchLinkFlits, int64(port), 0, at)
		b.lib.Entity(script.Link, linkID(script.GPU, 0, port), state)
		b.lib.Int(script.Link, linkID(script.GPU, 0, port), fieldGPULinkCRCs, int64(10*port), 0, at)
	}
	b.lib.Entity(script.CPU, 0, statusOK)
	b.lib.Int(script.CPU, 0, fieldCPUTemp, 50, 0, at)
	b.lib.Float(script.CPU, 0, fieldCoreUtil, 0.25, 0, at)
	for id, util := range map[uint]float64{0: 0.5, 71: 0} {
		b.lib.Instance(script.Core, id, script.CPU, 0, script.InstanceInfo{})
		b.lib.Float(script.Core, id, fieldCoreUtil, util, 0, at)
	}
}

// pollEntities polls until no measurement of entities is in progress.
func (b *fixture) pollEntities() (map[health.DeviceID]health.Sample, *health.Reading) {
	b.t.Helper()
	samples, r := b.poll()
	for b.entities.running != nil {
		runtime.Gosched()
		samples, r = b.poll()
	}
	return samples, r
}

// entityValue is a value of an entity.
type entityValue struct {
	kind       health.EntityKind
	id, parent uint
	gpu        health.DeviceID
	field      health.Field
	value      float64
}

// valuesOf returns all values of the entities of a reading.
func valuesOf(r *health.Reading) (values []entityValue) {
	for _, e := range r.Entities {
		for f, v := range e.Values {
			values = append(values, entityValue{e.Kind, e.ID, e.Parent, e.GPU, f, v})
		}
	}
	return values
}

// expectEntities compares the values of the entities, in any order.
func expectEntities(t *testing.T, r *health.Reading, want ...entityValue) {
	t.Helper()
	got := valuesOf(r)
	for _, v := range want {
		if !slices.Contains(got, v) {
			t.Errorf("no value %+v", v)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d values, want %d: %+v", len(got), len(want), got)
	}
}

func switchTemps() []entityValue {
	return []entityValue{
		{health.EntityNVSwitch, 0, 0, "", fieldSwitchTemp, 40},
		{health.EntityNVSwitch, 1, 0, "", fieldSwitchTemp, 41},
	}
}

// Each kind of entity has the values of its fields, and links only where they are in use.
func TestEntities(t *testing.T) {
	cpus := []entityValue{
		{health.EntityCPU, 0, 0, "", fieldCoreUtil, 0.25}, // DCGM averages it
		{health.EntityCPUCore, 0, 0, "", fieldCoreUtil, 0.5},
		{health.EntityCPUCore, 71, 0, "", fieldCoreUtil, 0},
	}
	for name, test := range map[string]struct {
		fields []health.Field
		want   []entityValue
	}{
		"switches": {[]health.Field{fieldSwitchTemp}, switchTemps()},
		"links of switches": {[]health.Field{fieldSwitchLinkFlits}, []entityValue{
			{health.EntitySwitchLink, 2, 1, "", fieldSwitchLinkFlits, 2},
			{health.EntitySwitchLink, 3, 1, "", fieldSwitchLinkFlits, 3},
		}},
		"links of GPUs": {[]health.Field{fieldGPULinkCRCs}, []entityValue{
			{health.EntityGPULink, 2, 0, gpuID(0), fieldGPULinkCRCs, 20},
			{health.EntityGPULink, 3, 0, gpuID(0), fieldGPULinkCRCs, 30},
		}},
		"CPUs":                {[]health.Field{fieldCPUTemp}, []entityValue{{health.EntityCPU, 0, 0, "", fieldCPUTemp, 50}}},
		"cores":               {[]health.Field{fieldCoreUtil}, cpus},
		"CPUs and switches":   {[]health.Field{fieldCoreUtil, fieldSwitchTemp}, append(switchTemps(), cpus...)},
		"only fields of GPUs": {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, 2)
			b.addHardware()
			samples, r := b.open(testConfig(test.fields...)).pollEntities()
			expectEntities(t, r, test.want...)
			watches := b.lib.Calls("dcgmWatchFields")
			for range 2 { // the lists are read again, and have not changed
				b.add(inventoryInterval)
				b.sampleGPUs(2)
				samples, r = b.pollEntities()
				expectEntities(t, r, test.want...)
			}
			b.expectCalls("dcgmWatchFields", watches)
			values := samples[gpuID(0)].Values
			if values[health.FieldGPUTemp] != 40 || slices.ContainsFunc(test.fields, func(f health.Field) bool { _, ok := values[f]; return ok }) {
				t.Errorf("values of the GPU: %v", values)
			}
		})
	}
}

// Entities are measured in each nth poll, also if that comes early because the monitor follows DCGM's measurements.
func TestEntitiesInEarlyPoll(t *testing.T) {
	for early, want := range map[time.Duration]float64{200 * time.Millisecond: 60, 500 * time.Millisecond: 40} {
		b := newFixture(t, 1)
		b.addHardware()
		b.open(testConfig(fieldSwitchTemp)).pollEntities()
		b.add(b.cfg.Interval - early)
		b.lib.Int(script.Switch, 0, fieldSwitchTemp, 60, 0, b.clock.now())
		_, r := b.pollEntities()
		expectEntities(t, r, entityValue{health.EntityNVSwitch, 0, 0, "", fieldSwitchTemp, want}, switchTemps()[1])
		b.close()
	}
}

// Without a selected field nothing is listed, which would load a module, and nothing is watched.
func TestEntitiesAreNotWatchedWithoutFields(t *testing.T) {
	b := newFixture(t, 1)
	b.addHardware()
	b.open(testConfig(fieldCPUTemp, fieldSwitchUUID)).pollEntities()
	b.expectWatch(script.Switch, 0, fieldSwitchTemp, script.Watch{})
	b.expectWatch(script.CPU, 0, fieldCPUTemp, script.Watch{Every: 10 * time.Second, Samples: 1})
	b.expectWatch(script.Core, 0, fieldCPUTemp, script.Watch{})
	b.expectCalls("dcgmGetNvLinkLinkStatus", 0)
	b.expectCalls("dcgmGetCpuHierarchy", 1)
}

func TestEntityTexts(t *testing.T) {
	b := newFixture(t, 1)
	b.addHardware()
	_, r := b.open(testConfig(fieldSwitchUUID)).pollEntities()
	if len(r.Entities) != 2 || r.Entities[1].Texts[fieldSwitchUUID] != "SWX-1" || len(r.Entities[1].Values) > 0 {
		t.Errorf("entities %+v", r.Entities)
	}
	if _, ok := r.Devices[0].Texts[fieldSwitchUUID]; ok {
		t.Error("the GPU has the UUID of an NVSwitch")
	}
}

// A switch that vanishes is omitted, and measured again when it is back. The GPUs keep their watches.
func TestEntityVanishes(t *testing.T) {
	b := newFixture(t, 1)
	b.addHardware()
	_, r := b.open(testConfig(fieldSwitchTemp, fieldCPUTemp)).pollEntities()
	temp := entityValue{health.EntityCPU, 0, 0, "", fieldCPUTemp, 50}
	expectEntities(t, r, append(switchTemps(), temp)...)
	pollAfter := func(d time.Duration, want ...entityValue) {
		t.Helper()
		b.add(d)
		b.sampleGPUs(1)
		_, r := b.pollEntities()
		expectEntities(t, r, want...)
	}
	b.lib.Drop(script.Switch, 1)
	pollAfter(10*time.Second, temp) // DCGM refuses the read
	pollAfter(inventoryInterval, switchTemps()[0], temp)
	b.addHardware()
	pollAfter(inventoryInterval, append(switchTemps(), temp)...)
	b.expectWatch(script.GPU, 0, 155, script.Watch{Every: 10 * time.Second, Samples: 1})
}

// A GPU that gets more NVLinks does not end the watches of NVSwitches.
func TestGPULinksChange(t *testing.T) {
	b := newFixture(t, 1)
	b.addHardware()
	b.open(testConfig(fieldSwitchTemp, fieldGPULinkCRCs)).pollEntities()
	b.lib.Entity(script.Link, linkID(script.GPU, 0, 4), linkUp)
	b.add(inventoryInterval)
	b.sampleGPUs(1)
	_, r := b.pollEntities()
	want := switchTemps()
	for port := range uint(3) {
		want = append(want, entityValue{health.EntityGPULink, 2 + port, 0, gpuID(0), fieldGPULinkCRCs, float64(20 + 10*port)})
	}
	expectEntities(t, r, want...)
	b.expectWatch(script.Switch, 0, fieldSwitchTemp, script.Watch{Every: 10 * time.Second, Samples: 1})
}

// A module that fails costs only its own entities. It is logged once, and asked again after a minute.
func TestEntityModuleFails(t *testing.T) {
	b := newFixture(t, 1)
	core, logs := observer.New(zap.WarnLevel)
	b.log = zap.New(core)
	b.addHardware()
	b.lib.Fail("nvswitch", errModuleNotLoaded, -1)
	b.open(testConfig(fieldSwitchTemp, fieldCPUTemp))
	temp := entityValue{health.EntityCPU, 0, 0, "", fieldCPUTemp, 50}
	for range 20 {
		_, r := b.pollEntities()
		expectEntities(t, r, temp)
		if s := r.Samples[0]; s.Presence != health.Present || s.Values[health.FieldGPUTemp] != 40 {
			t.Fatalf("GPU %+v", s)
		}
		b.add(10 * time.Second)
		b.sampleGPUs(1)
	}
	if logs.Len() != 1 {
		t.Errorf("%d warnings: %v", logs.Len(), logs.All())
	}
	b.lib.Fail("", 0, 0)
	b.add(inventoryInterval)
	_, r := b.pollEntities()
	expectEntities(t, r, append(switchTemps(), temp)...)
}

// Entities that DCGM does not watch cost no other entities, not even of the same module. They leave nothing in the engine, and are back
// when DCGM watches them.
func TestEntityWatchFails(t *testing.T) {
	b := newFixture(t, 1)
	core, logs := observer.New(zap.WarnLevel)
	b.log = zap.New(core)
	b.addHardware()
	b.lib.Fail("links", 0, -1)
	b.open(testConfig(fieldSwitchTemp, fieldSwitchLinkFlits, fieldCPUTemp))
	want := append(switchTemps(), entityValue{health.EntityCPU, 0, 0, "", fieldCPUTemp, 50})
	for range 100 { // more often than the engine has groups
		_, r := b.pollEntities()
		expectEntities(t, r, want...)
		b.add(inventoryInterval)
		b.sampleGPUs(1)
	}
	b.expectWatch(script.Switch, 0, fieldSwitchTemp, script.Watch{Every: 10 * time.Second, Samples: 1})
	if logs.Len() != 1 {
		t.Errorf("%d warnings: %v", logs.Len(), logs.All())
	}
	b.lib.Fail("", 0, 0)
	_, r := b.pollEntities()
	for port := range uint(2) {
		want = append(want, entityValue{health.EntitySwitchLink, 2 + port, 1, "", fieldSwitchLinkFlits, float64(2 + port)})
	}
	expectEntities(t, r, want...)
}

// With a hung engine each call lasts a minute, so a measurement ends with the first: Close waits for it.
func TestEntitiesOfHungEngine(t *testing.T) {
	for _, function := range []string{"dcgmGetNvLinkLinkStatus", "dcgmGroupAddEntity", "dcgmWatchFields"} {
		t.Run(function, func(t *testing.T) {
			b := newFixture(t, 1)
			b.addHardware()
			core, logs := observer.New(zap.InfoLevel)
			b.log = zap.New(core)
			b.open(testConfig(fieldSwitchLinkFlits, fieldCPUTemp))
			logs.TakeAll()
			before := b.lib.Calls(function)
			b.lib.Fail(function, errTimeout, -1)
			_, r := b.pollEntities()
			expectEntities(t, r)
			b.expectCalls(function, before+1)
			b.expectWatch(script.CPU, 0, fieldCPUTemp, script.Watch{})
			if logs.Len() != 1 || logs.All()[0].Level != zap.WarnLevel {
				t.Errorf("logged %v", logs.All())
			}
			b.lib.Fail("", 0, 0)
		})
	}
}

// A module that hangs delays no poll. Its entities end, and are back when the call returns; Close waits for it.
func TestEntityModuleHangs(t *testing.T) {
	b := newFixture(t, 1)
	b.addHardware()
	core, logs := observer.New(zap.WarnLevel)
	b.log = zap.New(core)
	b.open(testConfig(fieldSwitchTemp, fieldCPUTemp)).pollEntities()
	calls := b.lib.Calls("dcgmGetCpuHierarchy")
	b.lib.Hang("dcgmGetCpuHierarchy")
	b.add(inventoryInterval)
	b.sampleGPUs(1)
	b.poll()
	b.lib.WaitHanging()
	for range 5 {
		b.add(10 * time.Second)
		b.sampleGPUs(1)
		_, r := b.poll()
		expectEntities(t, r)
		if s := r.Samples[0]; s.Presence != health.Present || s.Values[health.FieldGPUTemp] != 40 {
			t.Fatalf("GPU %+v", s)
		}
	}
	b.expectCalls("dcgmGetCpuHierarchy", calls+1)
	if logs.Len() != 1 {
		t.Errorf("%d warnings: %v", logs.Len(), logs.All())
	}
	b.lib.Release()
	for b.entities.slow {
		_, r := b.poll()
		expectEntities(t, r) // some may have been read before the hang
	}
	_, r := b.pollEntities()
	expectEntities(t, r, append(switchTemps(), entityValue{health.EntityCPU, 0, 0, "", fieldCPUTemp, 50})...)
}

// A field that the engine does not support does not affect the others of its entities.
func TestEntityFieldUnknownToEngine(t *testing.T) {
	b := newFixture(t, 1)
	b.lib.Engine("4.2.3")
	core, logs := observer.New(zap.WarnLevel)
	b.log = zap.New(core)
	b.addHardware()
	b.lib.Int(script.Link, linkID(script.GPU, 0, 2), fieldGPULinkDowns, 7, 0, b.clock.now())
	cfg := hostConfig()
	cfg.HealthSystems = []string{NoHealthSystems}
	cfg.Fields = append(cfg.Fields, fieldGPULinkDowns, fieldGPULinkCRCs)
	_, r := b.open(cfg).pollEntities()
	expectEntities(t, r, entityValue{health.EntityGPULink, 2, 0, gpuID(0), fieldGPULinkDowns, 7})
	logged := logs.FilterFieldKey("fields").All() // of entities, then of GPUs
	if len(logged) != 2 || !slices.Equal(loggedNumbers(logged[0].ContextMap()), []string{"1525"}) {
		t.Errorf("logged %v", logged)
	}
}

// Nothing is watched while the host engine has detached the driver.
func TestDetachUnwatchesEntities(t *testing.T) {
	b := newFixture(t, 1)
	b.addHardware()
	cfg := hostConfig()
	cfg.Fields = append(cfg.Fields, fieldSwitchTemp, fieldGPULinkCRCs)
	b.open(cfg).pollEntities()
	if err := b.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.expectWatch(script.Switch, 0, fieldSwitchTemp, script.Watch{})
	b.expectWatch(script.Link, linkID(script.GPU, 0, 2), fieldGPULinkCRCs, script.Watch{})
}
