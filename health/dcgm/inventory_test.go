//go:build cgo && linux

package dcgm

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

func TestInventory(t *testing.T) {
	b := newFixture(t, 4)
	b.lib.Int(script.GPU, 2, 86, 0x5, 0, b.clock.now())
	b.lib.Int(script.GPU, 2, 87, 1, 0, b.clock.now())
	b.lib.Int(script.GPU, 3, 86, 9223372036854775794, 0, b.clock.now())
	b.lib.Int(script.GPU, 3, 55, 9223372036854775794, 0, b.clock.now())
	b.lib.Int(script.GPU, 3, 250, 2147483634, 0, b.clock.now())
	b.lib.Int(script.GPU, 3, 253, 9223372036854775794, 0, b.clock.now())
	b.lib.Int(script.GPU, 3, 63, 9223372036854775794, 0, b.clock.now())
	b.lib.Int(script.GPU, 2, 63, 8<<16|9, 0, b.clock.now())
	b.lib.Link(0, 1, 1<<(8+17)|0x10) // 18 NVLinks
	b.lib.Link(0, 2, 0x2)
	b.lib.Link(0, 3, 0x20)
	b.lib.Link(0, 9, 0x20) // no such GPU
	b.lib.Link(1, 0, 0)    // unknown
	b.lib.Text(script.GPU, 0, 53, "1654922006530", 0, b.clock.now())
	_, r := b.open(testConfig()).poll()
	want := health.Device{
		ID: gpuID(0), Kind: health.KindGPU, Index: 0, Minor: 3, NUMA: []int{0}, Model: "NVIDIA H100 80GB HBM3",
		PCI: "00000000:10:00.0", Memory: 81559 << 20, Reserved: 551 << 20, ComputeCapability: health.ComputeCapability{Major: 9}, GI: -1, CI: -1,
		MIGIndex: -1,
		Links: []health.Link{
			{Peer: gpuID(1), NVLinks: 18}, {Peer: gpuID(2), Path: health.PathSingleSwitch}, {Peer: gpuID(3), Path: health.PathSystem},
		},
	}
	if !reflect.DeepEqual(r.Devices[0], want) {
		t.Errorf("GPU 0:\n%+v, want\n%+v", r.Devices[0], want)
	}
	if got := r.Devices[1].Links; got != nil {
		t.Errorf("links of GPU 1: %v", got)
	}
	if got := r.Devices[2].NUMA; !reflect.DeepEqual(got, []int{0, 2, 64}) {
		t.Errorf("NUMA nodes %v, want 0, 2 and 64", got)
	}
	if got, want := r.Devices[2].ComputeCapability, (health.ComputeCapability{Major: 8, Minor: 9}); got != want {
		t.Errorf("compute capability %v, want %v", got, want)
	}
	if d := r.Devices[3]; d.NUMA != nil || d.Minor != -1 || d.Memory != 0 || d.Reserved != 0 ||
		d.ComputeCapability != (health.ComputeCapability{}) {
		t.Errorf("blank fields: %+v", d)
	}
	b.expectWatch(script.GPU, 0, 53, script.Watch{}) // the serial number is not requested
	b.lib.Fail("dcgmGetDeviceTopology", -3, -1)
	b.inventoryDirty = true
	if b.poll(); len(b.devices) != 4 || !reflect.DeepEqual(b.devices[0].Links, want.Links) {
		t.Errorf("devices without a current topology: %+v", b.devices)
	}
	b.close()
	if _, r := b.open(testConfig()).poll(); len(r.Devices) != 4 || r.Devices[0].Links != nil {
		t.Errorf("devices without a topology: %+v", r.Devices)
	}
}

// Links of either version of DCGM's structure (OBSERVED.md#older-topology).
func TestLinksByVersion(t *testing.T) {
	for _, version := range []string{"4.2.3", "4.5.2", "4.6.0", "4.7.0"} {
		b := newFixture(t, 3)
		b.lib.SetVersion(version)
		b.lib.Link(0, 1, 1<<(8+17)|0x10)
		b.lib.Link(0, 2, 0x20)
		_, r := b.open(testConfig()).poll()
		want := []health.Link{{Peer: gpuID(1), NVLinks: 18}, {Peer: gpuID(2), Path: health.PathSystem}}
		if got := r.Devices[0].Links; !slices.Equal(got, want) {
			t.Errorf("DCGM %s: links %v, want %v", version, got, want)
		}
		b.close()
	}
}

func TestGPUAddedAndRemoved(t *testing.T) {
	b := startFixture(t, 2)
	b.addGPUs(3)
	b.pollAfter(10*time.Second, 3)
	if n := len(b.pollAfter(2*time.Second, 3)); n != 3 {
		t.Errorf("%d devices, want 3", n)
	}
	b.lib.Drop(script.GPU, 1)
	// DCGM refuses to read a removed GPU. With the others the read succeeds.
	if samples := b.pollAfter(10*time.Second, 3); len(b.devices) != 2 || len(samples) != 2 {
		t.Errorf("devices %+v", b.devices)
	}
}

// Binding one GPU briefly hides all, so a changed hierarchy is confirmed first (OBSERVED.md#short-detach).
func TestInventoryConfirmsChange(t *testing.T) {
	b := startMIG(t, 2, 1, map[uint][]uint{0: {0}})
	b.lib.Fail("dcgmGetGpuInstanceHierarchy", 0, 0)
	b.add(10 * time.Second)
	b.sampleGPUs(2)
	before := b.lib.Calls("dcgmGroupCreate")
	// For one poll the hierarchy lacks the instances, which can be read meanwhile.
	b.lib.Instance(script.CI, 0, script.GI, 99, script.InstanceInfo{GPU: gpuUUID(1), GI: 1})
	if samples, _ := b.poll(); len(samples) != 3 {
		t.Errorf("%d devices, want 3", len(samples))
	}
	b.lib.Instance(script.CI, 0, script.GI, 0, script.InstanceInfo{GPU: gpuUUID(1), GI: 1})
	for range 5 {
		if samples := b.pollAfter(time.Second, 2); len(samples) != 3 {
			t.Errorf("%d devices, want 3", len(samples))
		}
	}
	b.expectCalls("dcgmGroupCreate", before)
}

// Text fields are part of the inventory, which is read again once a minute (OBSERVED.md#text-fields).
func TestTexts(t *testing.T) {
	b := newFixture(t, 3)
	b.addInstances(1, map[uint][]uint{0: {0}})
	for id := range uint(3) {
		b.lib.Text(script.GPU, id, 53, fmt.Sprintf("165492200653%d", id), 0, b.clock.now())
		b.lib.Text(script.GPU, id, 85, " 96.00.99.00.01 ", 0, b.clock.now())
	}
	b.lib.Text(script.CI, 0, 53, "of an instance", 0, b.clock.now())
	b.lib.Text(script.GPU, 2, 85, "<<<NOT_SUPPORTED>>>", 0, b.clock.now())
	cfg := testConfig(53, 85, 57, 1, 51, 515) // 51 has no value, 515 is neither a number nor a text
	b.open(cfg).poll()
	want := map[health.DeviceID]map[health.Field]string{
		gpuID(0): {1: "580.95.05", 53: "1654922006530", 57: "00000000:10:00.0", 85: "96.00.99.00.01"},
		gpuID(1): {1: "580.95.05", 53: "1654922006531", 57: "00000000:11:00.0", 85: "96.00.99.00.01"},
		migID(0): {1: "580.95.05", 53: "1654922006531", 57: "00000000:11:00.0", 85: "96.00.99.00.01"},
		gpuID(2): {1: "580.95.05", 53: "1654922006532", 57: "00000000:12:00.0"},
	}
	expect := func(when string) {
		t.Helper()
		if len(b.devices) != len(want) {
			t.Errorf("%s: %d devices", when, len(b.devices))
		}
		for _, d := range b.devices {
			if !reflect.DeepEqual(d.Texts, want[d.ID]) {
				t.Errorf("%s: %s: %v, want %v", when, d.ID, d.Texts, want[d.ID])
			}
		}
	}
	expect("first poll")
	b.expectWatch(script.GPU, 0, 53, script.Watch{Every: time.Minute, Samples: 1})
	b.expectWatch(script.GPU, 0, 57, script.Watch{Every: time.Minute, Samples: 1})
	for _, id := range []script.Kind{script.GI, script.CI} {
		b.expectWatch(id, 0, 53, script.Watch{}) // for an instance DCGM returns the GPU's
	}

	// The next poll does not read them. Blank texts keep their values.
	for id := range uint(3) {
		b.lib.Text(script.GPU, id, 53, "<<<NULL>>>", 0, b.clock.now())
	}
	before := b.lib.Calls("dcgmEntitiesGetLatestValues")
	b.pollAfter(10*time.Second, 3)
	if full := b.lib.Calls("dcgmEntitiesGetLatestValues") - before; full > 3 {
		t.Errorf("%d reads in a full poll", full)
	}
	expect("blank texts")
	b.inventoryDirty = true
	b.pollAfter(10*time.Second, 3)
	expect("rebuild with blank texts")

	// A lost GPU keeps its texts.
	for id := range uint(3) {
		b.lib.Text(script.GPU, id, 53, fmt.Sprintf("165492200653%d", id), 0, b.clock.now())
	}
	b.lib.Entity(script.GPU, 0, statusLost)
	b.addGPUs(3)
	b.lib.Entity(script.GPU, 0, statusLost)
	b.lib.Drop(script.GI, 0)
	b.lib.Drop(script.CI, 0)
	delete(want, migID(0))
	b.pollAfter(10*time.Second, 3)
	b.pollAfter(3*time.Second, 3)
	expect("rebuild with a lost GPU")
}

// A text that changes, such as the state of an IMEX domain, is new within a minute on the GPU and its MIG devices.
func TestTextChanges(t *testing.T) {
	b := newFixture(t, 2)
	b.addInstances(1, map[uint][]uint{0: {0}})
	set := func(text string) {
		for id := range uint(2) {
			b.lib.Text(script.GPU, id, 85, text, 0, b.clock.now())
		}
	}
	set("UP")
	b.open(testConfig(85))
	groups := b.lib.Calls("dcgmGroupCreate")
	poll := func() (texts []string) {
		b.pollAfter(10*time.Second, 2)
		for _, d := range b.devices {
			texts = append(texts, d.Texts[85])
		}
		return slices.Compact(texts)
	}
	for _, tt := range [][2]string{{"UP", "UP"}, {"DOWN", "DOWN"}, {"UP", "UP"}, {"<<<NULL>>>", "UP"}} {
		set(tt[0])
		for range 6 {
			poll()
		}
		if got := poll(); !slices.Equal(got, []string{tt[1]}) {
			t.Errorf("%s: texts %q, want %q", tt[0], got, tt[1])
		}
	}
	b.expectCalls("dcgmGroupCreate", groups)
}

// The reserved memory stays as in the first inventory of a driver until the GPU has another total or MIG mode.
func TestReservedMemoryIsStable(t *testing.T) {
	b := startFixture(t, 2)
	b.add(time.Minute)
	setReserved := func(mebibytes int64, driver string) {
		for id := range uint(2) {
			b.lib.Int(script.GPU, id, 253, mebibytes, 0, b.clock.now())
			b.lib.Text(script.GPU, id, 1, driver, 0, b.clock.now())
		}
	}
	for _, tt := range []struct {
		driver         string
		reserved, want uint64
	}{{"580.95.05", 600, 551}, {"615.10", 601, 601}, {"615.10", 602, 601}, {"580.95.05", 551, 551}} {
		b.close()
		setReserved(int64(tt.reserved), tt.driver) //nolint:gosec // small
		_, r := b.open(testConfig()).poll()
		if got := r.Devices[1].Reserved >> 20; got != tt.want {
			t.Errorf("next session, driver %s: %d MiB, want %d", tt.driver, got, tt.want)
		}
	}
	for _, tt := range []struct {
		name                     string
		reserved, total, migMode int64
		want                     uint64
	}{
		{"another value", 600, 81559, 0, 551},
		{"another total", 700, 80000, 0, 700},
		{"lower value", 10, 80000, 0, 700},
		{"MIG mode", 800, 80000, 1, 800},
		{"no MIG mode", 0, 80000, 0, 0},
		{"zero is not measured", 900, 80000, 0, 900},
	} {
		b.lib.Int(script.GPU, 1, 253, tt.reserved, 0, b.clock.now())
		b.lib.Int(script.GPU, 1, 250, tt.total, 0, b.clock.now())
		b.lib.Int(script.GPU, 1, 67, tt.migMode, 0, b.clock.now())
		for range 3 {
			b.rebind(1)
			b.pollAfter(10*time.Second, 2)
			if got := b.devices[1].Reserved >> 20; got != tt.want {
				t.Errorf("%s: %d MiB, want %d", tt.name, got, tt.want)
			}
		}
	}
	expect := func(when string, want uint64) {
		t.Helper()
		if got := b.devices[1].Reserved >> 20; got != want {
			t.Errorf("%s: %d MiB, want %d", when, got, want)
		}
	}
	// The value may come later than the MIG mode, or than a new driver.
	late := func(mebibytes int64) {
		b.lib.Int(script.GPU, 1, 253, mebibytes, 0, b.clock.now())
		b.lib.Hold(script.GPU, 1, 253, 3)
	}
	b.rebind(1)
	b.lib.Int(script.GPU, 1, 67, 1, 0, b.clock.now())
	late(800)
	for range 8 {
		b.pollAfter(time.Second, 2)
	}
	expect("late with a MIG mode", 800)
	b.close()
	setReserved(820, "620.1")
	late(820)
	b.open(testConfig()).poll()
	for range 8 {
		b.pollAfter(time.Second, 2)
	}
	expect("late with a driver", 820)
	// It stays while the GPU is not reached, although DCGM's cache still has its fields.
	b.lib.Int(script.GPU, 1, 253, 900, 0, b.clock.now())
	b.lib.Entity(script.GPU, 1, statusDetached)
	b.inventoryDirty = true
	b.pollAfter(time.Second, 2)
	expect("not reached", 820)
}

// While required fields are blank after binding (OBSERVED.md#late-inventory), a GPU keeps its last inventory, also in the
// next session.
func TestInventoryAfterBinding(t *testing.T) {
	for _, required := range requiredFields() {
		field := uint(required)
		t.Run(fmt.Sprint(field), func(t *testing.T) {
			b := newFixture(t, 2)
			b.lib.Int(script.GPU, 1, 87, 1, 0, b.clock.now())
			_, r := b.open(testConfig()).poll()
			want := r.Devices
			expect := func(when string, devices []health.Device) {
				t.Helper()
				if !reflect.DeepEqual(devices, want) {
					t.Errorf("%s:\n%+v, want\n%+v", when, devices, want)
				}
			}
			b.rebind(0, 1)
			b.lib.Hold(script.GPU, 1, field, 3)
			for range 10 {
				b.pollAfter(time.Second, 2)
				expect("bound again", b.devices)
			}
			every := time.Minute
			if field == 67 { // also a metric
				every = DefaultInterval
			}
			b.expectWatch(script.GPU, 1, field, script.Watch{Every: every, Samples: 1})
			b.rebind(0, 1)
			b.close()
			b.lib.Hold(script.GPU, 1, field, 3)
			b.open(testConfig())
			for range 10 {
				_, r := b.poll()
				expect("next session", r.Devices)
				b.pollAfter(time.Second, 2)
			}
		})
	}
}

// rebind unbinds the driver of some of two GPUs and binds it again.
func (b *fixture) rebind(gpus ...uint) {
	for _, status := range []int{statusDetached, statusOK} {
		for _, id := range gpus {
			b.lib.Entity(script.GPU, id, status)
		}
		if status == statusDetached {
			b.pollAfter(time.Second, 2)
		}
	}
}

// A required field can have another value after each binding. Its timeout starts again with the next binding.
func TestInventoryChangedByBinding(t *testing.T) {
	b := startFixture(t, 2)
	for _, tt := range []struct {
		node                   int64
		samples, seconds, want int
	}{{3, 2, 3, 3}, {2, 1000, 30, 3}, {0, 2, 5, 0}} {
		b.rebind(1)
		b.lib.Int(script.GPU, 1, 86, 1<<tt.node, 0, b.clock.now())
		b.lib.Hold(script.GPU, 1, 86, tt.samples)
		for range tt.seconds {
			b.pollAfter(time.Second, 2)
		}
		for range 2 {
			b.pollAfter(time.Second, 2)
			if got := b.devices[1].NUMA; !slices.Equal(got, []int{tt.want}) {
				t.Errorf("NUMA nodes %v after binding at node %d, want %d", got, tt.node, tt.want)
			}
		}
	}
}

// A new GPU is listed when its inventory is complete, or after inventoryTimeout.
func TestInventoryOfNewGPU(t *testing.T) {
	for name, tt := range map[string]struct {
		samples  int
		from, to int // seconds until it is listed
		numa     []int
	}{
		"complete at once":        {0, 0, 0, []int{1}},
		"complete after a second": {2, 1, 3, []int{1}},
		"never complete":          {1000, 5, 6, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, 2)
			b.addInstances(1, map[uint][]uint{0: {0}})
			b.lib.Hold(script.GPU, 1, 86, tt.samples)
			b.open(testConfig())
			listed := -1
			for second := range 20 {
				_, r := b.poll()
				switch {
				case len(r.Devices) == 1 && r.Devices[0].ID == gpuID(0) && listed < 0:
				case len(r.Devices) == 3 && slices.Equal(r.Devices[1].NUMA, tt.numa) && slices.Equal(r.Devices[2].NUMA, tt.numa):
					if listed < 0 {
						listed = second
					}
				default:
					t.Fatalf("after %d s: %+v", second, r.Devices)
				}
				b.add(time.Second)
				b.sampleGPUs(2)
				b.lib.Int(script.GPU, 1, 67, 1, 0, b.clock.now())
			}
			if listed < tt.from || listed > tt.to {
				t.Errorf("listed after %d s, want %d to %d", listed, tt.from, tt.to)
			}
			b.expectWatch(script.GPU, 1, 86, script.Watch{Every: time.Minute, Samples: 1})
			b.expectWatch(script.GPU, 1, 67, script.Watch{Every: 10 * time.Second, Samples: 1})
			groups := b.lib.Calls("dcgmGroupCreate")
			for range 180 {
				b.pollAfter(time.Second, 2)
			}
			b.expectCalls("dcgmGroupCreate", groups)
		})
	}
}

// An engine that lists no GPU is neither blind nor an error (OBSERVED.md#empty-engine).
func TestEmptyEngine(t *testing.T) {
	b := startMIG(t, 2, 1, map[uint][]uint{0: {0}})
	count := func() (counts []int) {
		for range 5 {
			b.pollAfter(time.Second, 2)
			counts = append(counts, len(b.devices))
		}
		return counts
	}
	b.add(10 * time.Second)
	b.lib.Empty(true)
	if got := count(); !slices.Equal(got, []int{3, 3, 0, 0, 0}) {
		t.Errorf("devices %v from an empty list, want none after 2 s", got)
	}
	b.lib.Empty(false)
	b.add(10 * time.Second)
	if got := count(); !slices.Equal(got, []int{0, 0, 3, 3, 3}) {
		t.Errorf("devices %v from a full list", got)
	}
	b.xid(script.GPU, 0, 48, b.clock.now())
	b.expectXIDs(time.Second, 2, gpuID(0), 48)
}

// A blank MIG mode after binding keeps its last value.
func TestMIGModeAfterBinding(t *testing.T) {
	b := startMIG(t, 2, 1, map[uint][]uint{0: {0}})
	b.rebind(1)
	b.lib.Hold(script.GPU, 1, 67, 3)
	for range 15 {
		b.add(time.Second)
		b.sampleGPUs(2)
		b.lib.Int(script.GPU, 1, 67, 1, 0, b.clock.now())
		if b.poll(); !b.devices[1].MIGMode {
			t.Error("a reading with MIG mode off")
		}
	}
}

// A required field that arrives after inventoryTimeout is still read.
func TestInventoryCompletedLate(t *testing.T) {
	b := newFixture(t, 2)
	b.lib.Hold(script.GPU, 1, 86, 8)
	b.open(testConfig())
	for second := range 300 {
		b.add(time.Second)
		b.sampleGPUs(2)
		if second%60 == 59 {
			b.lib.Int(script.GPU, 1, 86, 2, 0, b.clock.now()) // the interval of its watch
		}
		b.poll()
	}
	if got := b.devices[len(b.devices)-1].NUMA; len(got) == 0 {
		t.Error("no NUMA node after 5 minutes")
	}
}
