//go:build cgo && linux

package dcgm

import (
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

func TestLostGPUReturns(t *testing.T) {
	b := startFixture(t, 3)
	b.lib.Entity(script.GPU, 1, statusLost)
	s := b.pollAfter(time.Second, 3)[gpuID(1)]
	if s.Presence != health.Lost {
		t.Fatalf("presence %v, want lost", s.Presence)
	}
	// The next poll drops its values; the device stays.
	s = b.pollAfter(time.Second, 3)[gpuID(1)]
	if len(s.Values) != 0 || s.Presence != health.Lost {
		t.Errorf("values %v, presence %v of a lost GPU", s.Values, s.Presence)
	}
	if got := b.pollAfter(time.Minute, 3)[gpuID(0)]; got.Presence != health.Present || got.Values[health.FieldGPUTemp] != 40 {
		t.Errorf("other GPU: %+v", got)
	}
	b.lib.Entity(script.GPU, 1, statusOK)
	if s = b.pollAfter(time.Second, 3)[gpuID(1)]; s.Presence != health.Present {
		t.Errorf("presence %v, want present", s.Presence)
	}
	if s = b.pollAfter(time.Second, 3)[gpuID(1)]; s.Values[health.FieldGPUTemp] != 41 {
		t.Errorf("values of the returned GPU: %v", s.Values)
	}
}

// After a rebuild DCGM does not watch a lost GPU, which then has no values.
func TestLostGPUDuringRebuild(t *testing.T) {
	b := startFixture(t, 2)
	b.lib.Entity(script.GPU, 1, statusLost)
	b.pollAfter(time.Second, 2)
	b.inventoryDirty = true
	samples := b.pollAfter(time.Second, 2)
	if s := samples[gpuID(1)]; s.Presence != health.Lost || len(s.Values) != 0 {
		t.Errorf("lost GPU: presence %v, values %v", s.Presence, s.Values)
	}
	if s := samples[gpuID(0)]; s.Presence != health.Present || s.Values[health.FieldGPUTemp] != 40 {
		t.Errorf("other GPU: presence %v, values %v", s.Presence, s.Values)
	}
}

// DCGM adds no lost GPU to a group; it is watched when it returns (OBSERVED.md#lost-gpu).
func TestLostGPUAtOpen(t *testing.T) {
	b := newFixture(t, 2)
	b.lib.Instance(script.GPU, 1, script.GPU, 1, script.InstanceInfo{GPU: gpuUUID(1)}) // the UUID in DCGM's attributes
	b.lib.Entity(script.GPU, 1, statusLost)
	samples, r := b.open(testConfig()).poll()
	if len(r.Devices) != 2 || samples[gpuID(1)].Presence != health.Lost || len(samples[gpuID(1)].Values) != 0 {
		t.Fatalf("devices %+v, sample %+v", r.Devices, samples[gpuID(1)])
	}
	if r.Devices[1].PCI != "00000000:11:00.0" || r.Devices[1].Model != "" || r.Devices[1].Minor != -1 {
		t.Errorf("GPU with DCGM's attributes only: %+v", r.Devices[1])
	}
	b.lib.Entity(script.GPU, 1, statusOK)
	b.pollAfter(time.Second, 2)
	if s := b.pollAfter(time.Second, 2)[gpuID(1)]; s.Presence != health.Present || s.Values[health.FieldGPUTemp] != 41 {
		t.Errorf("after its return: %+v", s)
	}
	if d := b.devices[1]; d.Model == "" || d.Minor != 0 {
		t.Errorf("after its return: %+v", d)
	}
}

func TestUnnamedGPUIsOmitted(t *testing.T) {
	b := newFixture(t, 2)
	b.lib.Entity(script.GPU, 1, statusInaccessible)
	b.lib.Text(script.GPU, 1, 54, "<<<NULL>>>", 0, b.clock.now())
	b.open(testConfig())
	if _, r := b.poll(); len(r.Devices) != 1 || r.Devices[0].ID != gpuID(0) {
		t.Errorf("devices %+v", r.Devices)
	}
}

func TestPresenceOfStatus(t *testing.T) {
	b := startFixture(t, 1)
	want := map[int]health.Presence{
		1: health.Present, 2: health.Present, 3: health.Inaccessible, 4: health.Lost, 5: health.Present, 6: health.Present,
		0: health.PresenceUnknown, // go-dcgm returns it for a failed call
	}
	for status, want := range want {
		b.lib.Entity(script.GPU, 0, status)
		if got := b.pollAfter(time.Second, 1)[gpuID(0)].Presence; got != want {
			t.Errorf("status %d: %v, want %v", status, got, want)
		}
	}
}

func TestShortDetachIsIgnored(t *testing.T) {
	b := startFixture(t, 4)
	expect := func(when string, after time.Duration, want health.Presence) {
		t.Helper()
		samples := b.pollAfter(after, 4)
		for id := range uint(4) {
			if got := samples[gpuID(id)].Presence; got != want {
				t.Errorf("%s: GPU %d is %v, want %v", when, id, got, want)
			}
		}
	}
	b.setStatus(4, statusDetached)
	expect("detached", 0, health.Present)
	expect("after 1 s", time.Second, health.Present)
	b.setStatus(4, statusOK)
	expect("OK", 0, health.Present)
	b.setStatus(4, statusDetached)
	expect("detached for 1 s", time.Second, health.Present)
	expect("after 2 s", 2*time.Second, health.Detached)
	b.setStatus(4, statusOK)
	expect("bound again", 0, health.Present)
}

// Each call to a hung engine can last a minute: after statusTimeout the status of the other GPUs stays unknown.
func TestSlowStatusCalls(t *testing.T) {
	b := startFixture(t, 4)
	b.session.now = func() time.Time { // every call is slow
		b.add(statusTimeout - time.Second)
		return b.clock.now()
	}
	before := b.lib.Calls("dcgmGetGpuStatus")
	samples, _ := b.poll()
	b.expectCalls("dcgmGetGpuStatus", before+1)
	for id, want := range []health.Presence{health.Present, health.PresenceUnknown, health.PresenceUnknown, health.PresenceUnknown} {
		if got := samples[gpuID(uint(id))].Presence; got != want {
			t.Errorf("GPU %d is %v, want %v", id, got, want)
		}
	}
}
