package health

import (
	"slices"
	"testing"
	"time"
)

// A source that lists more rows than the ledger keeps otherwise lists them again and again: none counts twice, over reads, a reconnect and
// a restart. Once it no longer lists them, the oldest are forgotten, but only after a whole read.
func TestLedgerKeepsListedRows(t *testing.T) {
	var rows []XIDRow
	for i := range 1500 {
		rows = append(rows, XIDRow{Code: 31, At: int64(i)})
	}
	l, fresh := Ledger{}.List(nil, true, false)
	total := len(fresh)
	for range 3 {
		l, fresh = l.List(rows, true, false)
		total += len(fresh)
	}
	l = l.Restarted()
	for _, first := range []int{1400, 0, 0} {
		l, fresh = l.List(rows[first:], first == 0, true)
		total += len(fresh)
	}
	if total != len(rows) || len(l.Rows) != len(rows) {
		t.Fatalf("%d XIDs are new and %d rows known, want %d", total, len(l.Rows), len(rows))
	}

	l, _ = l.List(rows[:10], false, true)
	if len(l.Rows) != len(rows) {
		t.Errorf("a read of a part left %d rows", len(l.Rows))
	}
	l, _ = l.List(rows[:10], true, true)
	knows := func(row XIDRow) bool {
		return slices.ContainsFunc(l.Rows, func(r LedgerRow) bool { return r.same(row) })
	}
	if len(l.Rows) != maxLedgerRows || !knows(rows[0]) || knows(rows[10]) || !knows(rows[1499]) {
		t.Errorf("%d rows, want %d, with the listed ones and the newest", len(l.Rows), maxLedgerRows)
	}
}

// Ledgers are values: each method leaves the earlier one as it was.
func TestLedgerIsAValue(t *testing.T) {
	l, _ := Ledger{}.List([]XIDRow{{Code: 31, At: 1}}, true, false)
	l, _, _ = l.report(XID{Code: 31, Witness: WitnessNVML, Times: 2}, at(0), []Witness{WitnessNVML}, at(0))
	rows, owed, total := len(l.Rows), l.Owed[0], l.Codes[31].Total
	next, _ := l.List([]XIDRow{{Code: 31, At: 2}}, false, false)
	other, _ := l.List([]XIDRow{{Code: 48, At: 3}}, false, false)
	next, _, _ = next.report(XID{Code: 31}, at(1), nil, at(1))
	next = next.Pass(2*time.Second, &SourceProgress{reports: true}).ExpireEvents(at(60))
	if len(next.Rows) != 2 || next.Rows[1].At != 2 || len(other.Rows) != 2 || other.Rows[1].At != 3 {
		t.Errorf("two ledgers share rows: %v and %v", next.Rows, other.Rows)
	}
	if len(l.Rows) != rows || l.Owed[0] != owed || l.Codes[31].Total != total || l.measured != 0 {
		t.Errorf("the earlier ledger was changed: %+v", l)
	}
}

// at returns a time some seconds after a fixed one.
func at(seconds int) time.Time {
	return time.Date(2026, time.January, 2, 3, 4, 5, 0, time.UTC).Add(time.Duration(seconds) * time.Second)
}

// The source's value of field 230 counts, but for one that it has lost, or that is of a device before this one.
func TestLedgerLastXID(t *testing.T) {
	rows := []LedgerRow{{XIDRow: XIDRow{Code: 31, At: 5}}, {XIDRow: XIDRow{Code: 48, At: 9}, Predecessor: true}}
	own := append(rows[:2:2], LedgerRow{XIDRow: XIDRow{Code: 63, At: 12}})
	for _, c := range []struct {
		rows        []LedgerRow
		value, want float64
	}{{nil, 0, 0}, {nil, 13, 13}, {rows, 48, 31}, {rows, 0, 31}, {rows[1:], 48, 0}, {own, 13, 13}, {own, 0, 63}} {
		if got := (&Ledger{Rows: c.rows}).LastXID(c.value); got != c.want {
			t.Errorf("%+v with %v: %v, want %v", c.rows, c.value, got, c.want)
		}
	}
}
