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

// addInstances partitions a GPU into GPU instances with compute instances, by DCGM's numbers.
func (b *fixture) addInstances(gpu uint, instances map[uint][]uint) {
	b.lib.Int(script.GPU, gpu, 67, 1, 0, b.clock.now())
	for gi, computes := range instances {
		b.lib.Instance(script.GI, gi, script.GPU, gpu, script.InstanceInfo{GPU: gpuUUID(gpu), GI: gi + 1, CI: 4294967295})
		b.lib.Text(script.GI, gi, 54, migUUID(computes[0]), 0, b.clock.now()) // its first compute instance's
		for i, ci := range computes {
			b.lib.Instance(script.CI, ci, script.GI, gi, script.InstanceInfo{GPU: gpuUUID(gpu), GI: gi + 1, CI: uint(i)})
			b.lib.Text(script.CI, ci, 54, migUUID(ci), 0, b.clock.now())
			b.lib.Text(script.CI, ci, 50, fmt.Sprintf("1c.%dg.10gb", len(computes)), 0, b.clock.now())
			b.lib.Int(script.CI, ci, 250, 9984, 0, b.clock.now())
			b.lib.Int(script.CI, ci, 252, int64(100+ci), 0, b.clock.now())
			b.lib.Float(script.CI, ci, 155, 300, 0, b.clock.now()) // DCGM returns the GPU's
		}
	}
}

// replaceInstance replaces the only instance of GPU 0 by another with the driver's ID gi and the same numbers in DCGM.
func (b *fixture) replaceInstance(gi uint, uuid string) {
	b.lib.Instance(script.GI, 0, script.GPU, 0, script.InstanceInfo{GPU: gpuUUID(0), GI: gi, CI: 4294967295})
	b.lib.Instance(script.CI, 0, script.GI, 0, script.InstanceInfo{GPU: gpuUUID(0), GI: gi})
	b.lib.Text(script.CI, 0, 54, uuid, 0, b.clock.now())
}

func TestMIGDevices(t *testing.T) {
	b := newFixture(t, 2)
	b.addInstances(0, map[uint][]uint{5: {7}, 6: {8, 9}})
	samples, r := b.open(testConfig(health.FieldFBUsed)).poll()
	var ids []health.DeviceID
	for _, d := range r.Devices {
		ids = append(ids, d.ID)
	}
	if want := []health.DeviceID{gpuID(0), migID(7), migID(8), migID(9), gpuID(1)}; !reflect.DeepEqual(ids, want) {
		t.Fatalf("devices %v, want %v", ids, want)
	}
	want := health.Device{
		ID: migID(9), Parent: gpuID(0), Kind: health.KindMIG, Index: 0, Minor: 1, NUMA: []int{0}, Model: "NVIDIA H100 80GB HBM3",
		PCI: "00000000:10:00.0", Memory: 9984 << 20, ComputeCapability: health.ComputeCapability{Major: 9}, Profile: "1c.2g.10gb", GI: 7, CI: 1,
		MIGIndex: 2,
	}
	if !reflect.DeepEqual(r.Devices[3], want) {
		t.Errorf("MIG device:\n%+v, want\n%+v", r.Devices[3], want)
	}
	if !r.Devices[0].MIGMode || r.Devices[4].MIGMode {
		t.Errorf("MIG modes %v and %v", r.Devices[0].MIGMode, r.Devices[4].MIGMode)
	}
	values := samples[migID(9)].Values
	if values[health.FieldFBUsed] != 109 {
		t.Errorf("memory used by the instance: %v, want 109", values[health.FieldFBUsed])
	}
	if power, ok := values[health.FieldPower]; ok {
		t.Errorf("power of an instance: %v, want none", power)
	}
	b.lib.Entity(script.GPU, 0, statusLost)
	for id, s := range b.pollAfter(time.Second, 2) {
		want := health.Lost
		if id == gpuID(1) {
			want = health.Present
		}
		if s.Presence != want {
			t.Errorf("%s: presence %v, want %v", id, s.Presence, want)
		}
	}
}

// The driver's ID of a profile determines the attribute in its name (OBSERVED.md#mig-profiles).
func TestMIGProfileAttributes(t *testing.T) {
	b := newFixture(t, 1)
	want := map[health.DeviceID]string{}
	var id uint
	for _, c := range []struct {
		profile, slices uint
		name, want      string
	}{
		{19, 1, "1g.10gb", "1g.10gb"},
		{20, 1, "1g.10gb", "1g.10gb+me"},
		{20, 1, "1g.10gb+me", "1g.10gb+me"}, // a newer DCGM
		{20, 2, "2g.20gb", "2g.20gb"},       // an ID of another profile
		{21, 1, "1g.24gb", "1g.24gb+me"},
		{6, 2, "2g.12gb", "2g.12gb+me"},
		{47, 1, "1g.24gb", "1g.24gb+gfx"},
		{35, 2, "1c.2g.48gb", "1c.2g.48gb+gfx"},
		{32, 4, "4g.96gb", "4g.96gb+gfx"},
		{65, 1, "1g.24gb", "1g.24gb+me.all"},
		{64, 2, "2g.48gb", "2g.48gb+me.all"},
		{67, 1, "1g.24gb", "1g.24gb-me"},
		{66, 2, "2g.48gb", "2g.48gb-me"},
		{0, 7, "7g.80gb", "7g.80gb"},
		{99, 1, "1g.10gb", "1g.10gb"},
		{4294967295, 0, "", ""},
	} {
		b.addInstances(0, map[uint][]uint{id: {id}})
		b.lib.Profile(script.GI, id, c.profile, c.slices)
		b.lib.Profile(script.CI, id, 20, 1) // of compute instances, which have other IDs
		b.lib.Text(script.CI, id, 50, c.name, 0, b.clock.now())
		want[migID(id)] = c.want
		id++
	}
	_, r := b.open(testConfig()).poll()
	for _, d := range r.Devices[1:] {
		if d.Profile != want[d.ID] {
			t.Errorf("%s: profile %q, want %q", d.ID, d.Profile, want[d.ID])
		}
	}
	if len(r.Devices) != len(want)+1 {
		t.Errorf("%d devices, want %d", len(r.Devices), len(want)+1)
	}
}

func TestRepartition(t *testing.T) {
	b := startMIG(t, 1, 0, map[uint][]uint{0: {0}, 1: {1}})
	for _, id := range []uint{0, 1} {
		b.lib.Drop(script.GI, id)
		b.lib.Drop(script.CI, id)
	}
	b.addInstances(0, map[uint][]uint{2: {2, 3, 4}})
	b.pollAfter(10*time.Second, 1)
	samples := b.pollAfter(2*time.Second, 1)
	if len(b.devices) != 4 || b.devices[3].ID != migID(4) || b.devices[0].ID != gpuID(0) {
		t.Errorf("devices %+v", b.devices)
	}
	if got := samples[gpuID(0)].Values[health.FieldGPUTemp]; got != 40 {
		t.Errorf("temperature %v", got)
	}
}

func TestMIGModeWithoutInstances(t *testing.T) {
	b := startFixture(t, 1)
	b.lib.Int(script.GPU, 0, 67, 1, 0, b.clock.now())
	b.pollAfter(10*time.Second, 1)
	if b.pollAfter(10*time.Second, 1); !b.devices[0].MIGMode {
		t.Error("MIG mode is off")
	}
}

func TestInstanceXIDs(t *testing.T) {
	b := startMIG(t, 2, 1, map[uint][]uint{0: {0, 1}, 1: {2}})
	b.add(time.Second)
	at := b.clock.now()
	b.xid(script.GI, 0, 94, at)
	b.xid(script.CI, 2, 31, at)
	b.xid(script.GPU, 0, 63, at) // GPUs and instances have the same numbers
	b.xid(script.GPU, 1, 79, at)
	samples := b.pollAfter(time.Second, 2)
	want := codes{gpuID(0): {63}, gpuID(1): {79}, migID(0): {94}, migID(1): {94}, migID(2): {31}}
	b.expectCodes(samples, want, nil)
	for id, s := range samples {
		if len(want[id]) != 1 || len(s.XIDs) != 1 {
			t.Errorf("%s: XIDs %v, want %v", id, s.XIDs, want[id])
			continue
		}
		b.expectLastXID(id, float64(want[id][0]))
	}
	if len(samples) != len(want) {
		t.Errorf("%d samples, want %d", len(samples), len(want))
	}
}

// GPUs, GPU instances and compute instances can have the same number in DCGM, and instances the same IDs of the driver on
// each GPU. An XID belongs to its entity only (OBSERVED.md#instance-numbers).
func TestInstancesWithEqualNumbers(t *testing.T) {
	b := newFixture(t, 8)
	b.addInstances(0, map[uint][]uint{7: {7}})
	b.addInstances(3, map[uint][]uint{0: {3}})
	for _, gi := range []uint{7, 0} { // the driver's IDs are GI 1 and CI 0 on both GPUs
		b.lib.Instance(script.GI, gi, script.GPU, map[uint]uint{7: 0, 0: 3}[gi], script.InstanceInfo{GPU: gpuUUID(gi), GI: 1, CI: 4294967295})
	}
	b.lib.Instance(script.CI, 7, script.GI, 7, script.InstanceInfo{GPU: gpuUUID(0), GI: 1})
	b.lib.Instance(script.CI, 3, script.GI, 0, script.InstanceInfo{GPU: gpuUUID(3), GI: 1})
	b.lib.Incident(script.GPU, 7, 0xffffffff, 20, 120, "XID 79 on GPU 7")
	b.lib.Incident(script.GI, 7, 0xffffffff, 20, 120, "XID 79 on GPU instance 7")
	b.lib.Incident(script.CI, 7, 0xffffffff, 20, 120, "XID 79 on compute instance 7")
	b.open(testConfig()).poll()
	b.add(time.Second)
	b.xid(script.GPU, 7, 79, b.clock.now())
	b.xid(script.GPU, 3, 48, b.clock.now())
	b.xid(script.GI, 0, 94, b.clock.now())
	b.xid(script.CI, 7, 13, b.clock.now())
	samples := b.pollAfter(10*time.Second, 8)
	b.expectCodes(samples, codes{gpuID(7): {79}, gpuID(3): {48}, migID(3): {94}, migID(7): {13}}, nil)
	for id, s := range samples {
		if n := len(s.Incidents); (n == 1) != (id == gpuID(7)) || n > 1 {
			t.Errorf("%s: incidents %v", id, s.Incidents)
		}
	}
}

// A 3g.40gb and the 4g.40gb that replaces it have the same ID and UUID; only the profile differs
// (OBSERVED.md#reused-uuids).
func TestRepartitionKeepsUUID(t *testing.T) {
	b := newFixture(t, 1)
	b.addInstances(0, map[uint][]uint{0: {0}})
	b.lib.Profile(script.GI, 0, 9, 3)
	b.lib.Text(script.CI, 0, 50, "3g.40gb", 0, b.clock.now())
	b.open(testConfig())
	if _, r := b.poll(); r.Devices[1].Profile != "3g.40gb" {
		t.Fatalf("profile %q", r.Devices[1].Profile)
	}
	b.lib.Profile(script.GI, 0, 5, 4)
	b.lib.Text(script.CI, 0, 50, "4g.40gb", 0, b.clock.now())
	b.pollAfter(10*time.Second, 1)
	if b.pollAfter(2*time.Second, 1); b.devices[1].Profile != "4g.40gb" {
		t.Errorf("profile %q, want 4g.40gb", b.devices[1].Profile)
	}
}

// DCGM keeps the XIDs of an instance whose number it reuses; they are not XIDs of the new device (OBSERVED.md#reused-numbers).
func TestXIDOfPreviousInstance(t *testing.T) {
	b := startMIG(t, 1, 0, map[uint][]uint{0: {0}})
	b.add(time.Second)
	at := b.clock.now()
	b.xid(script.CI, 0, 95, at)
	b.expectXIDs(time.Second, 1, migID(0), 95)
	b.pollAfter(10*time.Second, 1)

	b.replaceInstance(7, migUUID(70))
	b.pollAfter(10*time.Second, 1)
	samples := b.pollAfter(2*time.Second, 1)
	createdAt := b.clock.now()
	s, ok := samples[migID(70)]
	if !ok || len(s.XIDs) != 0 {
		t.Errorf("new device listed %v: XIDs %v", ok, s.XIDs)
	}
	b.expectLastXID(migID(70), 0)
	b.lib.Row(script.CI, 0, 95, 0, at) // another client watches it
	b.lib.Row(script.CI, 0, 31, 0, createdAt)
	b.expectXIDs(10*time.Second, 1, migID(70), 31)
	b.close()
	b.lib.Row(script.CI, 0, 95, 0, at)
	samples, _ = b.open(testConfig()).poll()
	b.expectCodes(samples, nil, nil)
}

// An instance that is removed and created again has its UUID again. The XIDs meanwhile belong to the instance between.
func TestXIDOfReplacingInstance(t *testing.T) {
	b := startMIG(t, 1, 0, map[uint][]uint{0: {0}})
	b.pollAfter(10*time.Second, 1)
	xids := codes{}
	after := func(d time.Duration) {
		for id, s := range b.pollAfter(d, 1) {
			xids[id] = append(xids[id], xidCodes(s.XIDs)...)
		}
	}
	replace := func(uuid string, gi uint) {
		t.Helper()
		b.replaceInstance(gi, uuid)
		after(10 * time.Second)
		after(2 * time.Second)
	}
	replace(migUUID(70), 7)
	after(10 * time.Second)
	b.add(time.Second)
	b.xid(script.CI, 0, 95, b.clock.now())
	after(10 * time.Second)
	replace(migUUID(0), 0)
	after(10 * time.Second)
	b.expectLastXID(migID(0), 0)
	b.xid(script.CI, 0, 31, b.clock.now())
	after(10 * time.Second)
	if !slices.Equal(xids[migID(70)], []int{95}) || !slices.Equal(xids[migID(0)], []int{31}) {
		t.Errorf("XIDs %v", xids)
	}
	b.expectLastXID(migID(0), 31)
}

// An instance with a reused number is omitted until it has a UUID.
func TestInstanceWithoutUUID(t *testing.T) {
	for name, tt := range map[string]struct {
		replace func(*fixture)
		want    health.UnnamedInstance
	}{
		"on the same GPU": {func(b *fixture) { b.replaceInstance(7, "<<<NULL>>>") }, health.UnnamedInstance{Parent: gpuID(0), GI: 7}},
		"on another GPU": {func(b *fixture) {
			b.lib.Int(script.GPU, 0, 67, 0, 0, b.clock.now())
			b.lib.Int(script.GPU, 1, 67, 1, 0, b.clock.now())
			b.lib.Instance(script.GI, 0, script.GPU, 1, script.InstanceInfo{GPU: gpuUUID(1), GI: 1, CI: 4294967295})
			b.lib.Instance(script.CI, 0, script.GI, 0, script.InstanceInfo{GPU: gpuUUID(1), GI: 1})
			b.lib.Text(script.CI, 0, 54, "<<<NULL>>>", 0, b.clock.now())
		}, health.UnnamedInstance{Parent: gpuID(1), GI: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			b := startMIG(t, 2, 0, map[uint][]uint{0: {0}})
			b.pollAfter(10*time.Second, 2)
			tt.replace(b)
			b.pollAfter(10*time.Second, 2)
			if b.pollAfter(2*time.Second, 2); len(b.devices) != 2 {
				t.Errorf("devices %+v, want the two GPUs", b.devices)
			}
			if _, r := b.poll(); !slices.Equal(r.Unnamed, []health.UnnamedInstance{tt.want}) {
				t.Errorf("unnamed instances %+v, want %+v", r.Unnamed, tt.want)
			}
			b.lib.Text(script.CI, 0, 54, migUUID(70), 0, b.clock.now())
			if b.pollAfter(retryInterval, 2); len(b.devices) != 3 {
				t.Errorf("devices %+v, want the new one", b.devices)
			}
			if _, r := b.poll(); len(r.Unnamed) > 0 {
				t.Errorf("unnamed instances %+v, want none", r.Unnamed)
			}
		})
	}
}

// An instance whose UUID a new session cannot read at first is the same device, and keeps its XIDs.
func TestXIDOfInstanceNamedLate(t *testing.T) {
	b := startMIG(t, 1, 0, map[uint][]uint{0: {0}, 1: {1}})
	b.xid(script.CI, 0, 31, b.clock.now())
	b.pollAfter(10*time.Second, 1)
	b.close()
	b.lib.Text(script.CI, 0, 54, "<<<NULL>>>", 0, b.clock.now())
	b.open(testConfig())
	if _, r := b.poll(); len(r.Devices) != 2 {
		t.Fatalf("devices %+v, want 2", r.Devices)
	}
	b.xid(script.CI, 0, 94, b.clock.now())
	b.pollAfter(10*time.Second, 1)
	b.lib.Text(script.CI, 0, 54, migUUID(0), 0, b.clock.now())
	b.expectXIDs(retryInterval, 1, migID(0), 94)
}
