package health

import (
	"testing"
)

// A source that lists more rows than the ledger keeps otherwise lists them again and again: none counts twice, over reads, a reconnect and
// a restart. Once it no longer lists them, the oldest are forgotten, but only after a whole read.
func TestLedgerKeepsListedRows(t *testing.T) {
	var rows []XIDRow
	for i := range 1500 {
		rows = append(rows, XIDRow{31, int64(i)})
	}
	whole := RowsRead{Rows: rows, Whole: true}
	l, fresh := Ledger{}.list(RowsRead{Whole: true}, false)
	total := len(fresh)
	for range 3 {
		l, fresh = l.list(whole, false)
		total += len(fresh)
	}
	l = l.Restarted()
	for _, read := range []RowsRead{{Rows: rows[1400:]}, whole, whole} {
		l, fresh = l.list(read, true)
		total += len(fresh)
	}
	if total != len(rows) || len(l.Rows) != len(rows) {
		t.Fatalf("%d XIDs are new and %d rows known, want %d", total, len(l.Rows), len(rows))
	}

	l, _ = l.list(RowsRead{Rows: rows[:10]}, true)
	if len(l.Rows) != len(rows) {
		t.Errorf("a read of a part left %d rows", len(l.Rows))
	}
	l, _ = l.list(RowsRead{Rows: rows[:10], Whole: true}, true)
	if len(l.Rows) != maxLedgerRows || !l.knows(rows[0]) || l.knows(rows[10]) || !l.knows(rows[1499]) {
		t.Errorf("%d rows, want %d, with the listed ones and the newest", len(l.Rows), maxLedgerRows)
	}
}

// Ledgers are values: each method leaves the earlier one as it was.
func TestLedgerIsAValue(t *testing.T) {
	l, _ := Ledger{}.list(RowsRead{Rows: []XIDRow{{31, 1}}, Whole: true}, false)
	l, _, _ = l.report(XID{Code: 31, Witness: WitnessNVML, Times: 2}, at(0), []Witness{WitnessNVML}, at(0))
	rows, owed, total := len(l.Rows), l.Owed[0], l.Codes[31].Total
	next, _ := l.list(RowsRead{Rows: []XIDRow{{31, 2}}}, false)
	other, _ := l.list(RowsRead{Rows: []XIDRow{{48, 3}}}, false)
	next, _, _ = next.report(XID{Code: 31}, at(1), nil, at(1))
	next = next.pass(maxStep, &sourceProgress{reports: true}).expireEvents(at(60))
	if len(next.Rows) != 2 || next.Rows[1].At != 2 || len(other.Rows) != 2 || other.Rows[1].At != 3 {
		t.Errorf("two ledgers share rows: %v and %v", next.Rows, other.Rows)
	}
	if len(l.Rows) != rows || l.Owed[0] != owed || l.Codes[31].Total != total || l.measured != 0 {
		t.Errorf("the earlier ledger was changed: %+v", l)
	}
}
