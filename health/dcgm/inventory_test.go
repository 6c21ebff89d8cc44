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
	b := fresh(t)
	b.gpus(4)
	b.lib.Int(script.GPU, 2, 86, 0x5, 0, b.clock.now())
	b.lib.Int(script.GPU, 2, 87, 1, 0, b.clock.now())
	b.lib.Int(script.GPU, 3, 86, 9223372036854775794, 0, b.clock.now())
	b.lib.Int(script.GPU, 3, 55, 9223372036854775794, 0, b.clock.now())
	b.lib.Int(script.GPU, 3, 250, 2147483634, 0, b.clock.now())
	b.lib.Link(0, 1, 1<<(8+17)|0x10) // 18 NVLinks
	b.lib.Link(0, 2, 0x2)
	b.lib.Link(0, 3, 0x20)
	b.lib.Link(0, 9, 0x20) // nobody
	b.lib.Link(1, 0, 0)    // unknown
	b.open(config())
	_, r := b.poll()
	want := health.Device{
		ID: gpuID(0), Kind: health.KindGPU, Index: 0, Minor: 3, NUMA: []int{0}, Model: "NVIDIA H100 80GB HBM3",
		PCI: "00000000:10:00.0", Memory: 81559 << 20, GI: -1, CI: -1,
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
	if d := r.Devices[3]; d.NUMA != nil || d.Minor != -1 || d.Memory != 0 {
		t.Errorf("of blanks: NUMA %v, minor %d, memory %d", d.NUMA, d.Minor, d.Memory)
	}
}

func TestTopologyThatFailsLeavesLinksUnknown(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.lib.Link(0, 1, 0x2)
	b.lib.Fail("dcgmGetDeviceTopology", -3, -1)
	b.open(config())
	if _, r := b.poll(); len(r.Devices) != 2 || r.Devices[0].Links != nil {
		t.Errorf("devices %+v", r.Devices)
	}
}

func TestGPUAddedAndRemoved(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.open(config())
	b.poll()
	b.gpus(3)
	b.pollAfter(10*time.Second, 3)
	if n := len(b.pollAfter(2*time.Second, 3)); n != 3 {
		t.Errorf("%d devices, want the new one too", n)
	}
	b.lib.Drop(script.GPU, 1)
	b.add(10 * time.Second)
	b.sample(3)
	// DCGM refuses the read of a GPU that it does not have; with those that it has, it works.
	samples, r := b.poll()
	if len(r.Devices) != 2 || len(samples) != 2 {
		t.Errorf("devices %+v", r.Devices)
	}
}

// A list without the GPUs is not believed at once: binding one GPU hides all for a moment.
func TestInventoryThatVanishesForAMoment(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.mig(1, map[uint][]uint{0: {0}})
	b.open(config())
	b.poll()
	b.lib.Fail("dcgmGetGpuInstanceHierarchy", 0, 0)
	b.add(10 * time.Second)
	b.sample(2)
	before := b.lib.Calls("dcgmGroupCreate")
	// The hierarchy is empty for one poll; the instances themselves can be read all the while.
	b.lib.Instance(script.CI, 0, script.GI, 99, gpuUUID(1), 1, 0)
	if samples, _ := b.poll(); len(samples) != 3 {
		t.Errorf("%d devices, want 3", len(samples))
	}
	b.lib.Instance(script.CI, 0, script.GI, 0, gpuUUID(1), 1, 0)
	for range 5 {
		if samples := b.pollAfter(time.Second, 2); len(samples) != 3 {
			t.Errorf("%d devices, want 3", len(samples))
		}
	}
	if n := b.lib.Calls("dcgmGroupCreate") - before; n != 0 {
		t.Errorf("%d groups were made for a change that was none", n)
	}
}

// Texts hardly change: they are part of the inventory, and polls do not read them but once a minute.
func TestTexts(t *testing.T) {
	b := fresh(t)
	b.gpus(3)
	b.mig(1, map[uint][]uint{0: {0}})
	for id := range uint(3) {
		b.lib.Text(script.GPU, id, 53, fmt.Sprintf("165492200653%d", id), 0, b.clock.now())
		b.lib.Text(script.GPU, id, 85, " 96.00.99.00.01 ", 0, b.clock.now())
	}
	b.lib.Text(script.CI, 0, 53, "of an instance, which is not asked", 0, b.clock.now())
	b.lib.Text(script.GPU, 2, 85, "<<<NOT_SUPPORTED>>>", 0, b.clock.now())
	cfg := config()
	cfg.Fields = append(cfg.Fields, 53, 85, 57, 1, 51, 515) // 51 has no value, 515 is neither a number nor a text
	b.open(cfg)
	_, r := b.poll()
	want := map[health.DeviceID]map[health.Field]string{
		gpuID(0): {1: "580.95.05", 53: "1654922006530", 57: "00000000:10:00.0", 85: "96.00.99.00.01"},
		gpuID(1): {1: "580.95.05", 53: "1654922006531", 57: "00000000:11:00.0", 85: "96.00.99.00.01"},
		migID(0): {1: "580.95.05", 53: "1654922006531", 57: "00000000:11:00.0", 85: "96.00.99.00.01"},
		gpuID(2): {1: "580.95.05", 53: "1654922006532", 57: "00000000:12:00.0"},
	}
	check := func(when string, devices []health.Device) {
		t.Helper()
		if len(devices) != len(want) {
			t.Errorf("%s: %d devices", when, len(devices))
		}
		for _, d := range devices {
			if !reflect.DeepEqual(d.Texts, want[d.ID]) {
				t.Errorf("%s: %s: %v, want %v", when, d.ID, d.Texts, want[d.ID])
			}
		}
	}
	check("at first", r.Devices)
	if w, ok := b.lib.Watched(script.GPU, 0, 53); !ok || w != (script.Watch{Every: time.Minute, Samples: 1}) {
		t.Errorf("the serial number is watched %+v, %v", w, ok)
	}
	if w, ok := b.lib.Watched(script.GPU, 0, 57); !ok || w.Every != time.Minute {
		t.Errorf("the PCI bus id is watched %+v, %v", w, ok)
	}
	for _, id := range []script.Kind{script.GI, script.CI} {
		if w, ok := b.lib.Watched(id, 0, 53); ok {
			t.Errorf("the serial number of an instance is watched %+v", w)
		}
	}

	// The next poll does not look, and what DCGM forgets meanwhile is still so.
	for id := range uint(3) {
		b.lib.Text(script.GPU, id, 53, "<<<NULL>>>", 0, b.clock.now())
	}
	before := b.lib.Calls("dcgmEntitiesGetLatestValues")
	b.pollAfter(10*time.Second, 3)
	full := b.lib.Calls("dcgmEntitiesGetLatestValues") - before
	_, r = b.poll()
	check("later", r.Devices)

	// Neither does a lost GPU lose them.
	for id := range uint(3) {
		b.lib.Text(script.GPU, id, 53, fmt.Sprintf("165492200653%d", id), 0, b.clock.now())
	}
	b.lib.Entity(script.GPU, 0, statusLost)
	b.gpus(3)
	b.lib.Entity(script.GPU, 0, statusLost)
	b.lib.Drop(script.GI, 0)
	b.lib.Drop(script.CI, 0)
	delete(want, migID(0))
	b.add(10 * time.Second)
	b.sample(3)
	b.poll()
	b.pollAfter(3*time.Second, 3)
	_, r = b.poll()
	check("after a rebuild with a lost GPU", r.Devices)
	if full > 3 {
		t.Errorf("a full poll made %d reads", full)
	}
}

// A text that changes, as the state of an IMEX domain, is another within a minute, of the GPU and of its parts.
func TestTextThatChanges(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.mig(1, map[uint][]uint{0: {0}})
	set := func(text string) {
		for id := range uint(2) {
			b.lib.Text(script.GPU, id, 85, text, 0, b.clock.now())
		}
	}
	set("UP")
	cfg := config()
	cfg.Fields = append(cfg.Fields, 85)
	b.open(cfg)
	shown := func() (texts []string) {
		b.add(10 * time.Second)
		b.sample(2)
		_, r := b.poll()
		for _, d := range r.Devices {
			texts = append(texts, d.Texts[85])
		}
		return slices.Compact(texts)
	}
	for _, text := range []string{"UP", "DOWN", "UP"} {
		set(text)
		for range 6 {
			shown()
		}
		if got := shown(); !slices.Equal(got, []string{text}) {
			t.Errorf("shown %q, want %q", got, text)
		}
	}
	set("<<<NULL>>>")
	for range 6 {
		shown()
	}
	if got := shown(); !slices.Equal(got, []string{"UP"}) {
		t.Errorf("of one that reads blank: %q, want what it was", got)
	}
}

// Without texts among the fields, nothing is watched or read for them.
func TestNoTexts(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.lib.Text(script.GPU, 0, 53, "1654922006530", 0, b.clock.now())
	b.open(config())
	if _, r := b.poll(); r.Devices[0].Texts != nil {
		t.Errorf("%v", r.Devices[0].Texts)
	}
	if _, ok := b.lib.Watched(script.GPU, 0, 53); ok {
		t.Error("the serial number is watched, and nobody asked")
	}
}
