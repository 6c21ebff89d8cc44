//go:build cgo && linux

package dcgm

import (
	"testing"
)

func TestSameXID(t *testing.T) {
	const second = 1_000_000
	for _, tt := range []struct {
		a, b xidRow
		want bool
	}{
		{xidRow{0, 79}, xidRow{4 * second, 79}, true}, // kernel log and driver
		{xidRow{4 * second, 119}, xidRow{0, 119}, true},
		{xidRow{0, 120}, xidRow{4 * second, 120}, true},
		{xidRow{0, 79}, xidRow{5 * second, 79}, false},
		{xidRow{0, 119}, xidRow{6 * second, 119}, false},
		{xidRow{0, 120}, xidRow{6 * second, 120}, false},
		{xidRow{0, 119}, xidRow{0, 120}, false},
		{xidRow{0, 48}, xidRow{1, 48}, false}, // DCGM does not read it from the log
		{xidRow{0, 48}, xidRow{0, 48}, true},
	} {
		if got := tt.a.xid().SameEvent(tt.b.xid()); got != tt.want {
			t.Errorf("%v and %v are the same: %v, want %v", tt.a, tt.b, got, tt.want)
		}
	}
}

// Rows that DCGM lists are never new again, whatever their number; of the others the newest by arrival are kept.
func TestHistoryIsBounded(t *testing.T) {
	h := newHistory()
	h.deliver("GPU-a", nil, true, false)
	var shown []xidRow
	const atOnce = 2 * maxXIDRows
	for i := range int64(5 * maxXIDRows) {
		shown = append(shown, xidRow{1_700_000_000_000_000 - i, 13}) // the engine's clock runs backwards
		shown = shown[max(0, len(shown)-atOnce):]
		fresh, past := h.deliver("GPU-a", shown[max(0, len(shown)-3):], false, false)
		if i%512 == 511 {
			fresh2, past2 := h.deliver("GPU-a", shown, true, false)
			fresh, past = append(fresh, fresh2...), append(past, past2...)
		}
		if len(fresh) != 1 || fresh[0] != shown[len(shown)-1] || len(past) != 0 {
			t.Fatalf("row %d: new %v, past %v", i, fresh, past)
		}
	}
	if n := len(h.devices["GPU-a"].rows); n > atOnce {
		t.Errorf("%d rows, DCGM lists %d", n, atOnce)
	}
	h.deliver("GPU-a", nil, true, false)
	if n := len(h.devices["GPU-a"].rows); n != maxXIDRows {
		t.Errorf("%d unlisted rows, want %d", n, maxXIDRows)
	}
	if fresh, _ := h.deliver("GPU-a", shown[atOnce-maxXIDRows:], true, false); len(fresh) != 0 {
		t.Errorf("%d of the latest rows are new again", len(fresh))
	}
	h.deliver("GPU-b", nil, true, false)
	if fresh, _ := h.deliver("GPU-b", shown[:1], true, false); len(fresh) != 1 {
		t.Error("the row is not new on another device")
	}
}
