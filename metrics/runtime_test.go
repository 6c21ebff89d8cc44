package metrics

import (
	"regexp"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"
)

// Go's series are those of client_golang's collector: names, types, help, labels and values. What moves meanwhile is between
// what theirs says before and after.
func TestRuntime(t *testing.T) {
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	collector := collectors.NewGoCollector()
	before := theirs(t, collector)
	families := ours(t, "go_")
	after := theirs(t, collector)
	if len(families) != len(before) || len(families) < 20 {
		t.Fatalf("%d families, they have %d", len(families), len(before))
	}
	for i, f := range families {
		if f.GetName() != before[i].GetName() || f.GetHelp() != before[i].GetHelp() || f.GetType() != before[i].GetType() || f.GetUnit() != before[i].GetUnit() || len(f.Metric) != 1 ||
			!slices.EqualFunc(f.Metric[0].Label, before[i].Metric[0].Label, func(a, b *dto.LabelPair) bool { return a.String() == b.String() }) {
			t.Errorf("%v, they have %v", f, before[i])
			continue
		}
		if f.GetType() == dto.MetricType_SUMMARY {
			if f.Metric[0].String() != before[i].Metric[0].String() {
				t.Errorf("%v, they have %v", f, before[i])
			}
			continue
		}
		low, high := valueOf(before[i]), valueOf(after[i])
		low, high = min(low, high), max(low, high)
		if f.GetName() == "go_goroutines" {
			low = 2 // the test's and its parent's: a registry has some of its own
		}
		if v := valueOf(f); v < low-high/20 || v > high+high/20 {
			t.Errorf("%s is %v, they say %v and %v", f.GetName(), v, valueOf(before[i]), valueOf(after[i]))
		}
	}
}

// A sum is of what its help says, and Go has that.
func TestRuntimeTable(t *testing.T) {
	known := make(map[string]bool)
	for _, d := range metrics.All() {
		known[d.Name] = d.Kind == metrics.KindUint64
	}
	for _, row := range runtimeTable() {
		said := regexp.MustCompile(`/[a-z/-]+:[a-z]+`).FindAllString(row.help, -1)
		if row.name == "memstats_sys_bytes" {
			said = []string{"/memory/classes/total:bytes"} // they have forgotten the s
		}
		if !slices.Equal(said, row.of) || len(said) == 0 {
			t.Errorf("%s is the sum of %q, its help says %q", row.name, row.of, said)
		}
		for _, name := range row.of {
			if !known[name] {
				t.Errorf("%s: Go has no %s", row.name, name)
			}
		}
	}
}
