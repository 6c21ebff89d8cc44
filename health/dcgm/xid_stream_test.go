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

// xid adds an XID to the stream, and makes it the latest value.
func (b *fixture) xid(kind script.Kind, id uint, code int64, at time.Time) {
	b.lib.XID(kind, id, code, at)
}

func xidCodes(xids []health.XID) (codes []int) {
	for _, x := range xids {
		codes = append(codes, x.Code)
	}
	return codes
}

// codes holds the numbers of XIDs by device.
type codes map[health.DeviceID][]int

// expectCodes compares the XIDs of all devices in the latest poll that count, and those from before the start; each device in fresh and
// past must have a sample.
func (b *fixture) expectCodes(samples map[health.DeviceID]health.Sample, fresh, past codes) {
	b.t.Helper()
	for _, want := range []codes{fresh, past} {
		for id := range want {
			if _, ok := samples[id]; !ok {
				b.t.Errorf("no sample of %s", id)
			}
		}
	}
	for id, s := range samples {
		if !slices.Equal(xidCodes(s.XIDs), fresh[id]) || !slices.Equal(b.past[id], past[id]) {
			b.t.Errorf("%s: XIDs %v, past %v; want %v, past %v", id, s.XIDs, b.past[id], fresh[id], past[id])
		}
	}
}

// expectXIDs polls after a time and expects new XIDs of one device only.
func (b *fixture) expectXIDs(after time.Duration, gpus uint, id health.DeviceID, want ...int) {
	b.t.Helper()
	b.expectCodes(b.pollAfter(after, gpus), codes{id: want}, nil)
}

func TestXIDCountsOnce(t *testing.T) {
	b := startFixture(t, 2)
	b.add(time.Second)
	at := b.clock.now().Truncate(time.Microsecond)
	b.xid(script.GPU, 1, 79, at)
	samples, _ := b.poll()
	if got := samples[gpuID(1)].XIDs; len(got) != 1 || got[0].Code != 79 || !got[0].At.Equal(at) {
		t.Errorf("XIDs %v, want 79 at %v", got, at)
	}
	b.expectCodes(samples, codes{gpuID(1): {79}}, nil)
	b.expectLastXID(gpuID(1), 79)
	b.expectLastXID(gpuID(0), 0)
	for range 100 {
		b.expectXIDs(7*time.Second, 2, gpuID(1))
	}
}

// DCGM has no value of field 230 before the first XID of a GPU. The value is then 0, and unknown if DCGM cannot tell. It stays when DCGM
// loses the samples.
func TestValueWithoutXID(t *testing.T) {
	const blank = 9223372036854775792
	for name, c := range map[string]struct {
		prepare func(b *fixture) // of GPU 1
		want    float64          // negative: unknown
	}{
		"no data":        {prepare: func(*fixture) {}},
		"blank":          {prepare: func(b *fixture) { b.lib.Int(script.GPU, 1, 230, blank, 0, b.clock.now()) }},
		"status unknown": {prepare: func(b *fixture) { b.lib.Entity(script.GPU, 1, 0) }},
		"not supported":  {prepare: func(b *fixture) { b.lib.Int(script.GPU, 1, 230, blank+2, 0, b.clock.now()) }, want: -1},
		"not watched":    {prepare: func(b *fixture) { b.lib.Int(script.GPU, 1, 230, blank, errNotWatched, b.clock.now()) }, want: -1},
		"lost":           {prepare: func(b *fixture) { b.lib.Entity(script.GPU, 1, statusLost) }, want: -1},
		"no samples in this session": {
			prepare: func(b *fixture) {
				b.close()
				b.blankGPUs(1)
				b.open(testConfig())
			},
			want: -1,
		},
		"an XID, but no samples in this session": {
			prepare: func(b *fixture) {
				b.close()
				b.blankGPUs(1)
				b.xid(script.GPU, 1, 31, b.clock.now())
				b.open(testConfig())
			},
			want: 31,
		},
		"samples lost after an XID": {
			prepare: func(b *fixture) {
				b.xid(script.GPU, 1, 79, b.clock.now())
				b.pollAfter(time.Second, 1)
				b.lib.Int(script.GPU, 1, 230, 79, errNoData, b.clock.now())
			},
			want: 79,
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := startFixture(t, 2)
			b.pollAfter(time.Second, 1)
			c.prepare(b)
			b.pollAfter(time.Second, 1)
			b.expectLastXID(gpuID(1), c.want)
			b.expectLastXID(gpuID(0), 0)
		})
	}
}

func TestXIDsInStreamOnly(t *testing.T) {
	b := startFixture(t, 1)
	b.add(time.Second)
	start := b.clock.now()
	// Of three XIDs within a second, the latest value is the last.
	b.lib.Row(script.GPU, 0, 13, 0, start)
	b.lib.Row(script.GPU, 0, 48, 0, start.Add(500*time.Millisecond))
	b.xid(script.GPU, 0, 13, start.Add(time.Second))
	b.expectXIDs(time.Second, 1, gpuID(0), 13, 48, 13)
	// A full poll reads the stream although no latest value has changed.
	b.lib.Row(script.GPU, 0, 74, 0, start.Add(-500*time.Millisecond))
	b.expectXIDs(10*time.Second, 1, gpuID(0), 74)
}

// A number that no driver has is no number of its own: each would be a count, a finding and a series for good.
func TestXIDNumbersAreLimited(t *testing.T) {
	b := startFixture(t, 1)
	b.add(time.Second)
	start := b.clock.now()
	for i, code := range []int64{health.MaxXID, health.MaxXID + 1, 1 << 40} {
		b.xid(script.GPU, 0, code, start.Add(time.Duration(i)*time.Millisecond))
	}
	b.expectXIDs(time.Second, 1, gpuID(0), health.MaxXID, health.UnknownXID, health.UnknownXID)
}

// Rows that are older than other entities' rows, and duplicates, count once.
func TestXIDRowsOutOfOrder(t *testing.T) {
	b := startFixture(t, 2)
	b.add(20 * time.Second)
	start := b.clock.now()
	b.xid(script.GPU, 0, 31, start)
	b.pollAfter(time.Second, 2)
	b.lib.Row(script.GPU, 1, 43, 0, start.Add(-5*time.Second)) // before the row of GPU 0
	b.lib.Row(script.GPU, 1, 43, 0, start.Add(-5*time.Second))
	b.lib.Row(script.GPU, 1, 45, 0, start.Add(-6*time.Second))
	b.expectXIDs(10*time.Second, 2, gpuID(1), 45, 43)
}

// An XID 79 of the kernel log has an earlier time (OBSERVED.md#kernel-log-xid).
func TestXIDInLatestValueOnly(t *testing.T) {
	forRows(t, func(t *testing.T, rows int) {
		b := startFixture(t, 1)
		b.add(time.Hour)
		b.addRows(0, rows)
		start := b.clock.now()
		b.xid(script.GPU, 0, 31, start)
		b.pollAfter(time.Second, 1)
		b.lib.Int(script.GPU, 0, 230, 79, 0, start.Add(-10*time.Minute))
		b.expectXIDs(time.Second, 1, gpuID(0), 79)
		b.expectLastXID(gpuID(0), 79)
		reads := b.lib.Calls("dcgmGetValuesSince_v2")
		for range 3 { // the value is not in the stream, and no poll looks for it again
			b.expectXIDs(time.Second, 1, gpuID(0))
		}
		b.expectCalls("dcgmGetValuesSince_v2", reads)
		// The driver reports the same XID with another time.
		b.lib.Row(script.GPU, 0, 79, 0, start.Add(-10*time.Minute+3*time.Second))
		b.xid(script.GPU, 0, 79, start.Add(-10*time.Minute-4*time.Second))
		b.expectXIDs(time.Second, 1, gpuID(0))
		b.expectXIDs(wholeInterval, 1, gpuID(0))
		b.xid(script.GPU, 0, 79, start.Add(time.Minute))
		b.expectXIDs(time.Minute, 1, gpuID(0), 79)
		b.expectXIDs(wholeInterval, 1, gpuID(0))
	})
}

// forRows runs a test without other rows in the stream, and with many.
func forRows(t *testing.T, test func(t *testing.T, rows int)) {
	for _, rows := range []int{0, manyRows} {
		t.Run(fmt.Sprintf("%d rows", rows), func(t *testing.T) { test(t, rows) })
	}
}

func TestRowsWithoutXID(t *testing.T) {
	b := startFixture(t, 1)
	at := b.clock.now().Add(time.Second)
	b.lib.Row(script.GPU, 0, 79, errNoData, at)
	b.lib.Row(script.GPU, 0, 9223372036854775792, 0, at)
	b.lib.Row(script.GPU, 0, 2147483632, 0, at)
	b.lib.Row(script.GPU, 0, 0, 0, at)
	b.lib.Int(script.GPU, 0, 230, 0, 0, at)
	b.lib.Row(script.GPU, 9, 79, 0, at) // no such GPU
	s := b.pollAfter(2*time.Second, 1)[gpuID(0)]
	if len(s.XIDs) != 0 {
		t.Errorf("XIDs %v", s.XIDs)
	}
	b.expectLastXID(gpuID(0), 0)
}

func TestXIDBeforeOpenIsPast(t *testing.T) {
	b := newFixture(t, 1)
	b.xid(script.GPU, 0, 48, b.clock.now().Add(-time.Minute))
	samples, _ := b.open(testConfig()).poll()
	b.expectCodes(samples, nil, codes{gpuID(0): {48}})
	b.expectLastXID(gpuID(0), 48)
	for range 20 {
		b.expectXIDs(time.Second, 1, gpuID(0))
	}
}

// Rows in the stream when the process first reads a device are past XIDs, whatever their times.
func TestPastXIDsPerDevice(t *testing.T) {
	b := newFixture(t, 3)
	b.addInstances(2, map[uint][]uint{0: {0}})
	b.lib.Instance(script.GPU, 1, script.GPU, 1, script.InstanceInfo{GPU: gpuUUID(1)}) // the UUID in DCGM's attributes
	b.lib.Entity(script.GPU, 1, statusLost)
	b.xid(script.GPU, 0, 95, b.clock.now().Add(time.Hour))
	b.xid(script.CI, 0, 31, b.clock.now().Add(-time.Hour))
	samples, _ := b.open(testConfig()).poll()
	if len(samples) != 4 {
		t.Errorf("%d samples, want 4", len(samples))
	}
	b.expectCodes(samples, nil, codes{gpuID(0): {95}, migID(0): {31}})
	b.lib.Row(script.GPU, 1, 79, 0, b.clock.now()) // not read: DCGM adds no lost GPU to a group
	b.pollAfter(10*time.Second, 3)
	b.lib.Entity(script.GPU, 1, statusOK)
	b.pollAfter(time.Second, 3)
	b.expectCodes(b.pollAfter(time.Second, 3), nil, codes{gpuID(1): {79}})
	b.xid(script.GPU, 1, 48, b.clock.now())
	b.expectXIDs(time.Second, 3, gpuID(1), 48)
	b.close()
	samples, _ = b.open(testConfig()).poll()
	b.expectCodes(samples, nil, nil)
}

// After a step of the engine's clock or ours, every row counts once within two seconds (OBSERVED.md#sample-order).
func TestXIDsAfterClockStep(t *testing.T) {
	for name, tt := range map[string]struct{ engine, ours time.Duration }{
		"the engine's back":     {-time.Hour, 0},
		"the engine's ahead":    {time.Hour, 0},
		"ours back":             {0, -time.Hour},
		"ours ahead":            {0, time.Hour},
		"both back":             {-time.Hour, -time.Hour},
		"the engine's by hours": {-100 * time.Hour, 0},
	} {
		t.Run(name, func(t *testing.T) {
			forRows(t, func(t *testing.T, rows int) { testXIDsAfterClockStep(t, rows, tt.engine, tt.ours) })
		})
	}
}

func testXIDsAfterClockStep(t *testing.T, rows int, engine, ours time.Duration) {
	b := newFixture(t, 2)
	b.addRows(0, rows)
	b.addInstances(1, map[uint][]uint{0: {0}})
	cfg := testConfig()
	cfg.Interval = 10 * time.Minute // health polls only
	b.open(cfg).poll()
	for range 15 { // longer than kernelLogWindow
		b.pollAfter(time.Second, 2)
	}
	b.xid(script.GPU, 0, 13, b.clock.now())
	got := codes{}
	pass := func(seconds int) {
		for range seconds {
			for id, s := range b.pollAfter(time.Second, 2) {
				got[id] = append(got[id], xidCodes(s.XIDs)...)
			}
			if len(b.past) != 0 {
				t.Errorf("past XIDs %v", b.past)
			}
		}
	}
	pass(1)
	b.lib.Clock(engine - ours) // the library gets our times
	b.add(ours)
	pass(1)
	b.xid(script.GPU, 0, 79, b.clock.now())
	b.xid(script.CI, 0, 94, b.clock.now())
	pass(2)
	if want := (codes{gpuID(0): {13, 79}, migID(0): {94}, gpuID(1): nil}); !reflect.DeepEqual(got, want) {
		t.Errorf("XIDs %v, want %v", got, want)
	}
	b.xid(script.GPU, 0, 48, b.clock.now())
	pass(20)
	if want := (codes{gpuID(0): {13, 79, 48}, migID(0): {94}, gpuID(1): nil}); !reflect.DeepEqual(got, want) {
		t.Errorf("finally: XIDs %v, want %v", got, want)
	}
}

// A starting engine reads the old kernel log within kernelLogWindow (OBSERVED.md#kernel-log). Its XIDs from before this
// process are past XIDs; other rows are not, whatever their times.
func TestXIDsOfOldKernelLog(t *testing.T) {
	for name, tt := range map[string]struct {
		code  int64
		age   time.Duration // before the first reading
		after time.Duration // the first reading
		step  time.Duration // of the engine's clock, meanwhile
		again bool          // in a second session
		past  bool
	}{
		"79 an hour before":                        {code: 79, age: time.Hour, after: time.Second, past: true},
		"119 a minute before":                      {code: 119, age: time.Minute, after: time.Second, past: true},
		"120 an hour before":                       {code: 120, age: time.Hour, after: time.Second, past: true},
		"XID that DCGM does not read from the log": {code: 48, age: time.Hour, after: time.Second},
		"79 after opening":                         {code: 79, age: -time.Second, after: time.Second},
		"long after opening":                       {code: 79, age: time.Hour, after: time.Minute},
		"restarted engine":                         {code: 79, age: time.Hour, after: time.Second, again: true, past: true},
		"after opening, restarted engine":          {code: 79, age: -time.Second, after: time.Second, again: true},
		"after a clock step back":                  {code: 79, age: time.Minute, after: time.Second, step: -time.Hour, again: true},
	} {
		t.Run(name, func(t *testing.T) {
			b := startFixture(t, 1)
			first := b.clock.now()
			b.add(time.Second)
			b.lib.Clock(tt.step)
			if tt.again {
				b.close()
				b.sampleGPUs(1)
				b.open(testConfig()).poll()
			}
			for range int(tt.after / time.Second) {
				b.pollAfter(time.Second, 1)
			}
			b.xid(script.GPU, 0, tt.code, first.Add(-tt.age))
			s := b.pollAfter(time.Second, 1)[gpuID(0)]
			if past := b.past[gpuID(0)]; (len(past) == 1) != tt.past || (len(s.XIDs) == 1) == tt.past {
				t.Errorf("past %v, XIDs %v", past, s.XIDs)
			}
		})
	}
}

// A row of the old kernel log is found although the window lacks it and another XID is the latest value.
func TestOldKernelLogOutsideWindow(t *testing.T) {
	b := startFixture(t, 1)
	first := b.clock.now()
	b.add(time.Second)
	b.xid(script.GPU, 0, 31, b.clock.now())
	b.expectXIDs(0, 1, gpuID(0), 31)
	b.add(time.Second)
	b.lib.Row(script.GPU, 0, 79, 0, first.Add(-3*time.Minute))
	b.xid(script.GPU, 0, 31, b.clock.now())
	samples := b.pollAfter(0, 1)
	b.expectCodes(samples, codes{gpuID(0): {31}}, codes{gpuID(0): {79}})
	if rows := samples[gpuID(0)].Rows; len(rows) != 3 || rows[0].Code != 79 || !rows[0].Old || rows[1].Old || rows[2].Old {
		t.Errorf("rows %+v", rows)
	}
	for range 3 {
		b.expectXIDs(wholeInterval, 1, gpuID(0))
	}
}

// DCGM gets some XIDs from the driver and from the kernel log, seconds apart.
func TestXIDInLogAndDriverIsOne(t *testing.T) {
	for _, code := range []int64{79, 119, 120} {
		forRows(t, func(t *testing.T, rows int) {
			b := newFixture(t, 1)
			b.addRows(0, rows)
			b.open(testConfig()).poll()
			b.add(20 * time.Second)
			at := b.clock.now()
			b.xid(script.GPU, 0, code, at)
			got := xidCodes(b.pollAfter(time.Second, 1)[gpuID(0)].XIDs)
			b.lib.Row(script.GPU, 0, code, 0, at.Add(-3*time.Second))
			for range 12 {
				got = append(got, xidCodes(b.pollAfter(time.Second, 1)[gpuID(0)].XIDs)...)
			}
			got = append(got, xidCodes(b.pollAfter(wholeInterval, 1)[gpuID(0)].XIDs)...)
			if !slices.Equal(got, []int{int(code)}) {
				t.Errorf("XIDs %v, want one %d", got, code)
			}
		})
	}
}

// After a reconnect, counted XIDs are not new, XIDs from between the sessions are, and the XIDs of a failed poll are not lost.
func TestXIDsAcrossReconnect(t *testing.T) {
	b := startFixture(t, 2)
	b.add(time.Second)
	b.xid(script.GPU, 0, 31, b.clock.now())
	b.expectXIDs(time.Second, 2, gpuID(0), 31)
	b.xid(script.GPU, 0, 74, b.clock.now().Add(time.Millisecond))
	b.lib.Fail("dcgmGetValuesSince_v2", errNotConnected, -1)
	b.add(time.Second)
	if r, err := b.Poll(t.Context()); err == nil {
		t.Fatalf("Poll without the stream: %v", r)
	}
	b.close()
	b.lib.Fail("", 0, 0)
	b.add(5 * time.Second)
	b.xid(script.GPU, 1, 95, b.clock.now())
	b.add(5 * time.Second)
	samples, _ := b.open(testConfig()).poll()
	b.expectCodes(samples, codes{gpuID(0): {74}, gpuID(1): {95}}, nil)
	b.expectXIDs(time.Second, 2, gpuID(1))
}

func TestXIDsAcrossRebuild(t *testing.T) {
	b := startFixture(t, 2)
	b.add(time.Second)
	b.lib.Row(script.GPU, 1, 63, 0, b.clock.now())
	b.inventoryDirty = true // the next poll recreates the watches
	calls := b.lib.Calls("dcgmGroupCreate")
	b.expectXIDs(time.Second, 2, gpuID(1), 63)
	if b.lib.Calls("dcgmGroupCreate") == calls {
		t.Error("the watches were not recreated")
	}
}

// MIG devices survive an empty list of GPUs.
func TestXIDsAfterEmptyList(t *testing.T) {
	b := startMIG(t, 1, 0, map[uint][]uint{0: {0}})
	b.lib.Empty(true)
	for range 20 {
		b.pollAfter(time.Second, 1)
	}
	b.lib.Empty(false)
	b.xid(script.CI, 0, 95, b.clock.now())
	b.xid(script.GPU, 0, 48, b.clock.now())
	got := codes{}
	for range 20 {
		for id, s := range b.pollAfter(time.Second, 1) {
			got[id] = slices.Concat(got[id], xidCodes(s.XIDs), b.past[id])
		}
	}
	if !slices.Equal(got[gpuID(0)], []int{48}) || !slices.Equal(got[migID(0)], []int{95}) {
		t.Errorf("XIDs %v", got)
	}
}
