//go:build cgo && linux

package dcgm

import (
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
)

// xid has DCGM report an XID as it does: a row of the stream that is the latest value too.
func (b *bench) xid(kind script.Kind, id uint, code int64, at time.Time) {
	b.lib.Row(kind, id, code, 0, at)
	b.lib.Int(kind, id, 230, code, 0, at)
}

func codes(s health.Sample) (codes []int) {
	for _, x := range s.XIDs {
		codes = append(codes, x.Code)
	}
	return codes
}

func TestXIDIsReportedOnce(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.open(config())
	b.poll()
	b.add(time.Second)
	at := b.clock.now().Truncate(time.Microsecond)
	b.xid(script.GPU, 1, 79, at)
	samples, _ := b.poll()
	if got := samples[gpuID(1)].XIDs; len(got) != 1 || got[0].Code != 79 || !got[0].At.Equal(at) {
		t.Errorf("XIDs %v, want 79 at %v", got, at)
	}
	if got := samples[gpuID(1)].Values[health.FieldXID]; got != 79 {
		t.Errorf("value of field 230: %v", got)
	}
	if got := samples[gpuID(0)]; len(got.XIDs) != 0 {
		t.Errorf("XIDs of the other GPU: %v", got.XIDs)
	}
	if _, there := samples[gpuID(0)].Values[health.FieldXID]; there {
		t.Error("a GPU without an XID has a value of field 230")
	}
	for range 100 {
		if got := codes(b.pollAfter(7*time.Second, 2)[gpuID(1)]); len(got) != 0 {
			t.Fatalf("reported again: %v", got)
		}
	}
}

func TestXIDsThatOnlyTheStreamShows(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.open(config())
	b.poll()
	b.add(time.Second)
	start := b.clock.now()
	// 13, 48 and 13 within a second: the latest value shows the last only.
	b.lib.Row(script.GPU, 0, 13, 0, start)
	b.lib.Row(script.GPU, 0, 48, 0, start.Add(500*time.Millisecond))
	b.xid(script.GPU, 0, 13, start.Add(time.Second))
	if got := codes(b.pollAfter(time.Second, 1)[gpuID(0)]); !slices.Equal(got, []int{13, 48, 13}) {
		t.Errorf("XIDs %v, want 13 48 13", got)
	}
	// A row that nothing else tells of is there with the next full poll.
	b.lib.Row(script.GPU, 0, 74, 0, start.Add(-500*time.Millisecond))
	if got := codes(b.pollAfter(10*time.Second, 1)[gpuID(0)]); !slices.Equal(got, []int{74}) {
		t.Errorf("XIDs %v, want 74", got)
	}
}

// Rows out of order, a row later than the cursor of another entity's row, rows twice: each once.
func TestXIDRowsThatComeLate(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.open(config())
	b.poll()
	b.add(20 * time.Second)
	start := b.clock.now()
	b.xid(script.GPU, 0, 31, start)
	b.pollAfter(time.Second, 2)
	b.lib.Row(script.GPU, 1, 43, 0, start.Add(-5*time.Second)) // before the cursor, behind the latest value
	b.lib.Row(script.GPU, 1, 43, 0, start.Add(-5*time.Second))
	b.lib.Row(script.GPU, 1, 45, 0, start.Add(-6*time.Second))
	if got := codes(b.pollAfter(10*time.Second, 2)[gpuID(1)]); !slices.Equal(got, []int{45, 43}) {
		t.Errorf("XIDs %v, want 45 43", got)
	}
}

// DCGM takes an XID 79 of /dev/kmsg into field 230 with a time before the cursor (13).
func TestXIDThatOnlyTheLatestValueShows(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.open(config())
	b.poll()
	b.add(time.Hour)
	start := b.clock.now()
	b.xid(script.GPU, 0, 31, start)
	b.pollAfter(time.Second, 1)
	b.lib.Int(script.GPU, 0, 230, 79, 0, start.Add(-10*time.Minute))
	if got := codes(b.pollAfter(time.Second, 1)[gpuID(0)]); !slices.Equal(got, []int{79}) {
		t.Errorf("XIDs %v, want 79", got)
	}
	// The same event of the driver's, by another clock.
	b.lib.Row(script.GPU, 0, 79, 0, start.Add(-10*time.Minute+3*time.Second))
	b.xid(script.GPU, 0, 79, start.Add(-10*time.Minute-4*time.Second))
	if got := codes(b.pollAfter(time.Second, 1)[gpuID(0)]); len(got) != 0 {
		t.Errorf("XIDs %v: the same XID 79 twice", got)
	}
	b.xid(script.GPU, 0, 79, start.Add(time.Minute))
	if got := codes(b.pollAfter(time.Minute, 1)[gpuID(0)]); !slices.Equal(got, []int{79}) {
		t.Errorf("XIDs %v: another XID 79", got)
	}
}

func TestRowsThatAreNoXIDs(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.open(config())
	b.poll()
	at := b.clock.now().Add(time.Second)
	b.lib.Row(script.GPU, 0, 79, errNoData, at)
	b.lib.Row(script.GPU, 0, 9223372036854775792, 0, at)
	b.lib.Row(script.GPU, 0, 2147483632, 0, at)
	b.lib.Row(script.GPU, 0, 0, 0, at)
	b.lib.Int(script.GPU, 0, 230, 0, 0, at)
	b.lib.Row(script.GPU, 9, 79, 0, at) // of nobody
	s := b.pollAfter(2*time.Second, 1)[gpuID(0)]
	if len(s.XIDs) != 0 {
		t.Errorf("XIDs %v", s.XIDs)
	}
	if v, ok := s.Values[health.FieldXID]; !ok || v != 0 {
		t.Errorf("value of field 230: %v, %v; DCGM says 0", v, ok)
	}
}

func TestXIDFromBeforeTheStartIsHistory(t *testing.T) {
	b := fresh(t)
	b.gpus(1)
	b.xid(script.GPU, 0, 48, b.clock.now().Add(-time.Minute))
	b.open(config())
	samples, _ := b.poll()
	if got := codes(samples[gpuID(0)]); len(got) != 0 {
		t.Errorf("XIDs %v are new", got)
	}
	if got := samples[gpuID(0)].Values[health.FieldXID]; got != 48 {
		t.Errorf("value of field 230: %v, want 48", got)
	}
}

// Across a reconnection: what was reported is not new, what happened between the sessions is, once, and
// nothing that a failed poll has read is lost.
func TestXIDsAcrossAReconnection(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.open(config())
	b.poll()
	b.add(time.Second)
	b.xid(script.GPU, 0, 31, b.clock.now())
	if got := codes(b.pollAfter(time.Second, 2)[gpuID(0)]); !slices.Equal(got, []int{31}) {
		t.Fatalf("XIDs %v", got)
	}
	b.xid(script.GPU, 0, 74, b.clock.now().Add(time.Millisecond))
	b.lib.Fail("dcgmGetValuesSince_v2", errNotConnected, -1)
	b.add(time.Second)
	if r, err := b.Poll(t.Context()); err == nil {
		t.Fatalf("a poll without the stream succeeds: %v", r)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	b.lib.Fail("", 0, 0)
	b.add(5 * time.Second)
	b.xid(script.GPU, 1, 95, b.clock.now())
	b.add(5 * time.Second)
	b.open(config())
	samples, _ := b.poll()
	if got := codes(samples[gpuID(0)]); !slices.Equal(got, []int{74}) {
		t.Errorf("XIDs of GPU 0: %v, want 74", got)
	}
	if got := codes(samples[gpuID(1)]); !slices.Equal(got, []int{95}) {
		t.Errorf("XIDs of GPU 1: %v, want 95", got)
	}
	for id, s := range b.pollAfter(time.Second, 2) {
		if len(s.XIDs) != 0 {
			t.Errorf("%s: %v again", id, s.XIDs)
		}
	}
}

func TestXIDsAcrossANewInventory(t *testing.T) {
	b := fresh(t)
	b.gpus(2)
	b.open(config())
	b.poll()
	b.add(time.Second)
	b.lib.Row(script.GPU, 1, 63, 0, b.clock.now())
	b.dirty = true // the watches are made anew in the next poll
	calls := b.lib.Calls("dcgmGroupCreate")
	if got := codes(b.pollAfter(time.Second, 2)[gpuID(1)]); !slices.Equal(got, []int{63}) {
		t.Errorf("XIDs %v, want 63", got)
	}
	if b.lib.Calls("dcgmGroupCreate") == calls {
		t.Error("the watches were not made anew: this test tests nothing")
	}
}

func TestLedgerIsBounded(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	l := newLedger(start)
	at := start.UnixMicro()
	for i := range int64(10 * xidsKept) {
		if !l.add("GPU-a", xidRow{at + 1 + i, 13}) {
			t.Fatalf("row %d is not new", i)
		}
		if l.add("GPU-a", xidRow{at + 1 + i, 13}) {
			t.Fatalf("row %d is new twice", i)
		}
	}
	if n := len(l.devices["GPU-a"].rows); n > xidsKept {
		t.Errorf("%d rows are kept, want at most %d", n, xidsKept)
	}
	if l.add("GPU-a", xidRow{at + 5, 13}) {
		t.Error("a row that was forgotten is new again")
	}
	if !l.add("GPU-b", xidRow{at + 5, 13}) {
		t.Error("another device's row is not new")
	}
}
