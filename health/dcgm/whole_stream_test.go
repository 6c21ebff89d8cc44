//go:build cgo && linux

package dcgm

import (
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// manyRows is how many rows a stream has in tests of a long one.
const manyRows = 1200

// addRows adds XIDs of a GPU to the stream, one per second until now, and makes the newest the latest value.
func (b *fixture) addRows(gpu uint, n int) {
	now := b.clock.now()
	for i := range n - 1 {
		b.lib.Row(script.GPU, gpu, 13, 0, now.Add(-time.Duration(n-1-i)*time.Second))
	}
	if n > 0 {
		b.xid(script.GPU, gpu, 13, now)
	}
}

// expectWhole compares whether a poll reads the whole stream.
func (b *fixture) expectWhole(when string, want bool) {
	b.t.Helper()
	b.sampleGPUs(2)
	_, r := b.poll()
	for _, s := range r.Samples {
		if s.RowsWhole != want {
			b.t.Errorf("%s: %s: the whole stream was read: %v, want %v", when, s.Device, s.RowsWhole, want)
		}
	}
}

// A read lists the rows from a minute before the newest on, of all devices.
func TestXIDWindow(t *testing.T) {
	b := newFixture(t, 2)
	b.addRows(0, manyRows)
	newest := b.clock.now()
	b.open(testConfig())
	b.expectWhole("first poll", true)
	b.lib.Row(script.GPU, 1, 48, 0, newest.Add(-59*time.Second))
	b.lib.Row(script.GPU, 1, 74, 0, newest.Add(-61*time.Second))
	samples := b.pollAfter(10*time.Second, 2)
	b.expectCodes(samples, codes{gpuID(1): {48}}, nil)
	if n := len(samples[gpuID(0)].Rows); n != 61 {
		t.Errorf("%d rows of the first GPU, want the last minute's", n)
	}
	b.add(10 * time.Second)
	b.expectWhole("full poll", false)
	b.xid(script.GPU, 0, 31, b.clock.now())
	b.expectWhole("new XID", false)
	b.expectXIDs(5*time.Minute-pollShift-20*time.Second-time.Millisecond, 2, gpuID(1))
	b.expectXIDs(time.Second, 2, gpuID(1), 74)
	b.expectWhole("after that", false)
}

// Rows that DCGM sorts before the window are listed within two polls of whatever suggests that there are such.
func TestWholeStreamIsRead(t *testing.T) {
	const second = time.Second
	for name, trigger := range map[string]func(b *fixture, newest time.Time){
		"latest value outside of the window": func(b *fixture, newest time.Time) {
			b.lib.Int(script.GPU, 1, 230, 79, 0, newest.Add(-4*time.Minute))
		},
		"latest value with the same number": func(b *fixture, newest time.Time) {
			b.lib.Int(script.GPU, 0, 230, 13, 0, newest.Add(-4*time.Minute-time.Millisecond))
		},
		"latest value of a compute instance": func(b *fixture, newest time.Time) {
			b.lib.Int(script.CI, 0, 230, 13, 0, newest.Add(-4*time.Minute))
		},
		"presence": func(b *fixture, _ time.Time) { b.lib.Entity(script.GPU, 1, statusLost) },
		"recovery action": func(b *fixture, _ time.Time) {
			b.add(second)
			b.sampleGPUs(2)
			b.lib.Int(script.GPU, 1, 1523, 1, 0, b.clock.now())
			b.poll()
		},
		"ReadAllXIDs": func(b *fixture, _ time.Time) { b.ReadAllXIDs() },
		"no new samples": func(b *fixture, _ time.Time) {
			for range 2 {
				b.add(second)
				b.poll()
			}
		},
		"clock set back": func(b *fixture, _ time.Time) {
			b.lib.Clock(-time.Hour)
			b.pollAfter(second, 2)
			b.pollAfter(second, 2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, 2)
			b.addInstances(1, map[uint][]uint{0: {0}})
			b.addRows(0, manyRows)
			newest := b.clock.now()
			b.open(testConfig()).poll()
			b.pollAfter(10*second, 2)
			b.lib.Row(script.GPU, 0, 74, 0, newest.Add(-4*time.Minute))
			b.expectXIDs(10*second, 2, gpuID(0))
			trigger(b, newest)
			for range 2 {
				b.pollAfter(second, 2)
			}
			if d := b.device(gpuID(0)); d.XIDs.Codes[74].Total != 1 {
				t.Errorf("%d XIDs 74, want 1", d.XIDs.Codes[74].Total)
			}
			if strings.HasPrefix(name, "latest value") {
				b.expectWhole("the value is known", false)
			}
		})
	}
}

// While the samples are older than before, each poll reads the whole stream: rows from before the step can hide new ones.
func TestWholeStreamAfterStepBack(t *testing.T) {
	b := newFixture(t, 1)
	b.open(testConfig()).poll()
	b.close()
	b.xid(script.GPU, 0, 31, b.clock.now())
	b.lib.Clock(-time.Hour)
	b.sampleGPUs(1)
	b.open(testConfig()).poll()
	for range 3 {
		b.lib.Row(script.GPU, 0, 74, 0, b.clock.now())
		b.expectXIDs(time.Second, 1, gpuID(0), 74)
	}
}

// Without any samples from before the step, a full poll lists the new rows.
func TestXIDWindowBehindNewestRow(t *testing.T) {
	b := newFixture(t, 1)
	b.lib.Row(script.GPU, 0, 31, 0, b.clock.now().Add(time.Hour))
	b.open(testConfig()).poll()
	b.add(time.Second)
	b.lib.Row(script.GPU, 0, 74, 0, b.clock.now())
	b.expectXIDs(10*time.Second, 1, gpuID(0), 74)
}

// When the samples are new again after a step back and one ahead, a poll lists the rows from in between.
func TestWholeStreamAfterStepAhead(t *testing.T) {
	b := newFixture(t, 1)
	b.addRows(0, manyRows)
	b.open(testConfig()).poll()
	b.pollAfter(10*time.Second, 1)
	b.lib.Clock(-10 * time.Minute)
	for range 4 {
		b.pollAfter(time.Second, 1)
	}
	b.lib.Row(script.GPU, 0, 74, 0, b.clock.now())
	b.lib.Clock(0)
	b.expectXIDs(wholeIfHidden-time.Millisecond, 1, gpuID(0))
	b.expectXIDs(time.Second, 1, gpuID(0), 74)
	b.add(time.Second)
	b.expectWhole("after that", false)
}

// ReadAllXIDs makes one poll read the whole stream, even directly after another that did.
func TestReadAllXIDs(t *testing.T) {
	b := newFixture(t, 2)
	b.addRows(0, manyRows)
	b.open(testConfig()).poll()
	b.pollAfter(kernelLogWindow, 2)
	for range 2 {
		b.ReadAllXIDs()
		b.add(time.Millisecond)
		b.expectWhole("asked", true)
	}
	b.add(time.Millisecond)
	b.expectWhole("not asked", false)
}

// When a device is listed, all of its rows are read. Those until then are from before the start, and the next one counts.
func TestWholeStreamOfNewDevice(t *testing.T) {
	b := newFixture(t, 2)
	b.addRows(0, manyRows)
	b.lib.Row(script.GPU, 1, 31, 0, b.clock.now().Add(-4*time.Minute))
	b.lib.Hold(script.GPU, 1, 86, 3)
	b.open(testConfig())
	if _, r := b.poll(); len(r.Devices) != 1 {
		t.Fatalf("devices %+v", r.Devices)
	}
	for range 5 {
		b.pollAfter(time.Second, 2)
	}
	b.expectCodes(b.pollAfter(0, 2), codes{gpuID(1): nil}, nil)
	b.xid(script.GPU, 1, 48, b.clock.now())
	b.expectXIDs(time.Second, 2, gpuID(1), 48)
	if rows := b.device(gpuID(1)).XIDs.Rows; len(rows) != 2 || !rows[0].Skipped || rows[1].Skipped {
		t.Errorf("rows %+v", rows)
	}
}

// A device that a poll lists first after it has read the stream has no rows yet: see TestHostEngineClockSetBack.
func TestRowsOfDeviceListedByRebuild(t *testing.T) {
	b := newFixture(t, 1)
	b.addInstances(0, map[uint][]uint{0: {0}})
	b.lib.Text(script.CI, 0, 54, "<<<NULL>>>", 0, b.clock.now())
	b.open(hostConfig()).poll()
	b.lib.Text(script.CI, 0, 54, migUUID(0), 0, b.clock.now())
	b.lib.Clock(-time.Hour)
	for range 40 {
		b.pollAfter(time.Second, 1)
		if len(b.devices) == 2 {
			break
		}
	}
	if d := b.device(migID(0)); d.XIDs.Read {
		t.Error("the stream counts as read")
	}
	b.pollAfter(time.Second, 1)
	if d := b.device(migID(0)); !d.XIDs.Read {
		t.Error("the stream was not read in the next poll")
	}
}

// Rows of a reading are not changed by later polls.
func TestRowsOfReadingStay(t *testing.T) {
	b := newFixture(t, 1)
	b.addRows(0, 3)
	_, first := b.open(testConfig()).poll()
	b.xid(script.GPU, 0, 31, b.clock.now().Add(time.Second))
	b.pollAfter(time.Second, 1)
	rows := first.Samples[0].Rows
	if len(rows) != 3 || rows[0].Code != 13 || rows[0].At >= rows[1].At || rows[1].At >= rows[2].At {
		t.Errorf("rows %v", rows)
	}
}
