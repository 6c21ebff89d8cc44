package main

import (
	"strings"
	"testing"
	"time"
)

func TestTable(t *testing.T) {
	b := &bench{table: table{Machine: "machine: m"}}
	var took []time.Duration
	for i := range 200 {
		took = append(took, time.Duration(200-i)*time.Millisecond) // 200 to 1
	}
	b.table.addDurations("spread", took, 198)
	b.table.addDurations("met", took, 198.1)
	b.table.addDurations("one", took[:1], noAim)
	b.table.addMedian("half", took, 101)
	b.table.addDurations("nothing", nil, noAim)
	b.table.addValue("value", 0.4, "%", 0.5, "note")
	got := strings.Join(strings.Fields(b.table.String()), " ")
	for _, want := range []string{
		"spread 200 100 198 ms < 198 missed", "met 200 100 198 ms < 198 one", "one 1 200 200 ms", "half 200 100 198 ms p50 < 101 value",
		"value 0.400 % < 0.500 note",
		"not measured: nothing: no measurements", "machine: m",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in %q", want, got)
		}
	}
}
