package health_test

import (
	"fmt"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// BenchmarkLedgerList is a read of a device with 1,200 known rows.
func BenchmarkLedgerList(b *testing.B) {
	for _, code := range []int{31, 79} {
		var rows []health.XIDRow
		for i := range 1200 {
			rows = append(rows, health.XIDRow{Code: code, At: int64(i) * 6e6})
		}
		mixed := make([]health.XIDRow, 0, len(rows)) // as after the clock was set back
		for i := range 600 {
			mixed = append(mixed, rows[i], rows[i+600])
		}
		for _, c := range []struct {
			name       string
			known, new []health.XIDRow
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
				l, _ := health.Ledger{Read: true}.List(c.known, true, true)
				b.ReportAllocs()
				for b.Loop() {
					l.List(c.new, c.whole, true)
				}
			})
		}
	}
}
