package health

import "testing"

func TestSameEvent(t *testing.T) {
	const second = 1_000_000
	for _, tt := range []struct {
		a, b XIDRow
		want bool
	}{
		{XIDRow{Code: 79}, XIDRow{Code: 79, At: 4 * second}, true}, // kernel log and driver
		{XIDRow{Code: 119, At: 4 * second}, XIDRow{Code: 119}, true},
		{XIDRow{Code: 120}, XIDRow{Code: 120, At: 4 * second}, true},
		{XIDRow{Code: 79}, XIDRow{Code: 79, At: 5 * second}, false},
		{XIDRow{Code: 119}, XIDRow{Code: 119, At: 6 * second}, false},
		{XIDRow{Code: 120}, XIDRow{Code: 120, At: 6 * second}, false},
		{XIDRow{Code: 119}, XIDRow{Code: 120}, false},
		{XIDRow{Code: 48}, XIDRow{Code: 48, At: 1}, false}, // DCGM does not read it from the log
		{XIDRow{Code: 48}, XIDRow{Code: 48}, true},
	} {
		if got := tt.a.XID().SameEvent(tt.b.XID()); got != tt.want {
			t.Errorf("%v and %v are the same: %v, want %v", tt.a, tt.b, got, tt.want)
		}
	}
}
