//go:build cgo && linux

package dcgm

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/lib"
)

var _ health.XIDWatcher = (*session)(nil)

// expectChanged compares the result of XIDsChanged.
func (b *fixture) expectChanged(when string, want bool) {
	b.t.Helper()
	if got, _, err := b.XIDsChanged(b.t.Context()); err != nil || got != want {
		b.t.Errorf("%s: changed %v, %v, want %v", when, got, err, want)
	}
}

func TestXIDsChanged(t *testing.T) {
	for name, on := range map[string]struct {
		kind script.Kind
		id   uint
	}{
		"a GPU": {script.GPU, 1}, "a GPU instance": {script.GI, 3}, "a compute instance": {script.CI, 4},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, 2)
			b.addInstances(0, map[uint][]uint{3: {4}})
			b.xid(script.GPU, 1, 31, b.clock.now().Add(-time.Minute))
			b.open(testConfig()).poll()
			reads, streams := b.lib.Calls("dcgmEntitiesGetLatestValues"), b.lib.Calls("dcgmGetValuesSince_v2")
			b.expectChanged("first poll", false)
			b.add(time.Second)
			b.xid(on.kind, on.id, 79, b.clock.now())
			b.expectChanged("an XID", true)
			b.expectChanged("before the poll", true)
			b.expectCalls("dcgmEntitiesGetLatestValues", reads+6)
			b.expectCalls("dcgmGetValuesSince_v2", streams)
			samples, _ := b.poll()
			count := 0
			for _, s := range samples {
				count += len(s.XIDs)
			}
			if count != 1 {
				t.Errorf("%d XIDs, want 1", count)
			}
			b.expectChanged("after the poll", false)
			b.xid(on.kind, on.id, 79, b.clock.now().Add(time.Millisecond))
			b.expectChanged("the same again", true)
			b.poll()
			b.lib.Int(on.kind, on.id, 230, 0, 0, b.clock.now().Add(time.Second))
			b.expectChanged("none", false)
			b.lib.Int(on.kind, on.id, 230, 79, errNoData, b.clock.now().Add(2*time.Second))
			b.expectChanged("no data", false)
			b.lib.Int(on.kind, on.id, 230, lib.BlankInt64, 0, b.clock.now().Add(3*time.Second))
			b.expectChanged("blank", false)
		})
	}
}

// A burst on five GPUs takes five seconds to read (OBSERVED.md#xid-rate); each XID counts at once.
func TestXIDsChangedInBurst(t *testing.T) {
	b := startFixture(t, 5)
	b.add(time.Second)
	at := b.clock.now()
	for gpu := range uint(5) {
		b.xid(script.GPU, gpu, 74, at) // with the same time, one after another
		b.expectChanged("an event", true)
		b.expectXIDs(time.Second, 5, gpuID(gpu), 74)
	}
}

func TestXIDsChangedDeadEngine(t *testing.T) {
	b := startFixture(t, 1)
	b.lib.Fail("*", errNotConnected, -1)
	for range 2 {
		if _, _, err := b.XIDsChanged(t.Context()); err == nil || !strings.Contains(err.Error(), "Host engine connection invalid") {
			t.Errorf("error %v", err)
		}
	}
	groups := b.lib.Calls("dcgmGroupDestroy")
	b.close()
	b.expectCalls("dcgmGroupDestroy", groups)
	if _, _, err := b.XIDsChanged(t.Context()); err == nil {
		t.Error("XIDsChanged of a closed session succeeded")
	}
}

// DCGM refuses a removed instance; the next poll omits it.
func TestXIDsChangedRemovedInstance(t *testing.T) {
	b := startMIG(t, 2, 0, map[uint][]uint{3: {4}})
	b.lib.Drop(script.CI, 4)
	b.lib.Drop(script.GI, 3)
	b.expectChanged("removed instance", true)
	if _, r := b.poll(); slices.ContainsFunc(r.Devices, func(d health.Device) bool { return d.Kind == health.KindMIG }) {
		t.Errorf("devices %+v", r.Devices)
	}
	b.expectChanged("after the poll", false)
}

// expectMeasured compares when DCGM has measured, of a check and then of a poll.
func (b *fixture) expectMeasured(when string, want time.Time) {
	b.t.Helper()
	if !want.IsZero() {
		want = want.Truncate(time.Microsecond)
	}
	_, got, err := b.XIDsChanged(b.t.Context())
	if err != nil || !got.Equal(want) {
		b.t.Errorf("%s: a check has measured at %v, %v, want %v", when, got, err, want)
	}
	if _, r := b.poll(); !r.Measured.Equal(want) {
		b.t.Errorf("%s: a poll has measured at %v, want %v", when, r.Measured, want)
	}
}

// Checks and polls see the same measurements: the ones that DCGM makes once a second.
func TestMeasured(t *testing.T) {
	b := newFixture(t, 2)
	b.addInstances(1, map[uint][]uint{3: {4}})
	first := b.clock.now()
	b.open(testConfig(health.FieldGPUTemp, health.FieldGPUUtil)).poll()
	b.expectMeasured("at first", first)
	b.add(20 * time.Second) // for a full poll
	at := b.clock.now()
	b.lib.Int(script.GPU, 0, 203, 7, 0, at)
	b.lib.Int(script.GPU, 1, 150, 41, 0, at)
	b.lib.Int(script.CI, 4, 150, 40, 0, at)
	b.xid(script.GPU, 0, 31, at)
	b.expectMeasured("other values", first)
	b.lib.Int(script.GPU, 0, 150, 41, 0, at)
	b.expectMeasured("the first GPU", at)
	b.lib.Int(script.GPU, 0, 150, lib.BlankInt64, 0, at)
	b.expectMeasured("a blank", time.Time{})
	b.lib.Entity(script.GPU, 0, statusLost)
	b.poll()
	b.add(confirmDelay)
	b.sampleGPUs(2)
	b.poll()
	b.expectMeasured("without that GPU", b.clock.now())
}

// A GPU that DCGM measures no longer does not tell when it measures the others.
func TestMeasuredBesideStaleGPU(t *testing.T) {
	b := startFixture(t, 2)
	for range 10 {
		b.add(time.Second)
		b.sampleGPUs(2)
		b.blankGPUs(0)
		b.poll()
	}
	b.expectMeasured("beside a stale GPU", b.clock.now())
}

// A poll that comes earlier, because the monitor follows DCGM's measurements, still reads what is due.
func TestFullPollComesEarly(t *testing.T) {
	for early, want := range map[time.Duration]bool{200 * time.Millisecond: true, 500 * time.Millisecond: false} {
		b := newFixture(t, 1)
		b.open(testConfig(health.FieldGPUUtil)).poll()
		b.add(b.cfg.Interval - early)
		b.lib.Int(script.GPU, 0, 203, 77, 0, b.clock.now())
		if samples, _ := b.poll(); (samples[gpuID(0)].Values[health.FieldGPUUtil] == 77) != want {
			t.Errorf("%v early: values %v", early, samples[gpuID(0)].Values)
		}
		b.close()
	}
}

// After a step back of the engine's clock each poll reads the stream, also one that comes early.
func TestStreamPollComesEarly(t *testing.T) {
	b := startFixture(t, 1)
	b.pollAfter(time.Second, 1)
	b.lib.Clock(-time.Hour)
	b.pollAfter(time.Second, 1)
	b.pollAfter(time.Second, 1)
	for range 5 {
		streams := b.lib.Calls("dcgmGetValuesSince_v2")
		b.pollAfter(800*time.Millisecond, 1)
		b.expectCalls("dcgmGetValuesSince_v2", streams+1)
	}
}
