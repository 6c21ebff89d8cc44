package health

import (
	"fmt"
	"testing"
)

// BenchmarkLedgerList is a read of a device with 1,200 known rows.
func BenchmarkLedgerList(b *testing.B) {
	for _, code := range []int{31, 79} {
		var rows []XIDRow
		for i := range 1200 {
			rows = append(rows, XIDRow{Code: code, At: int64(i) * 6e6})
		}
		mixed := make([]XIDRow, 0, len(rows)) // as after the clock was set back
		for i := range 600 {
			mixed = append(mixed, rows[i], rows[i+600])
		}
		for _, c := range []struct {
			name       string
			known, new []XIDRow
			whole      bool
		}{
			{"latest", rows, rows[1199:], false},
			{"window", rows, rows[1140:], false},
			{"whole", rows, rows, true},
			{"mixed", mixed, rows, true},
			{"interleaved", rows, mixed, true},
			{"unknown", nil, rows, true},
		} {
			b.Run(fmt.Sprintf("%d/%s", code, c.name), func(b *testing.B) {
				l, _ := Ledger{Read: true}.list(c.known, true, true)
				b.ReportAllocs()
				for b.Loop() {
					l.list(c.new, c.whole, true)
				}
			})
		}
	}
}
