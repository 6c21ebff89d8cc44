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

// The metrics are those of client_golang's Go collector; each value is between two of its readings.
func TestRuntimeMatchesClientGolang(t *testing.T) {
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	collector := collectors.NewGoCollector()
	before := gatherFrom(t, collector)
	got := agentFamilies(t, "go_")
	after := gatherFrom(t, collector)
	if len(got) != len(before) || len(got) < 20 {
		t.Fatalf("%d metrics, client_golang has %d", len(got), len(before))
	}
	for i, f := range got {
		sameLabel := func(a, b *dto.LabelPair) bool { return a.String() == b.String() }
		if !sameMetric(f, before[i]) || len(f.Metric) != 1 || !slices.EqualFunc(f.Metric[0].Label, before[i].Metric[0].Label, sameLabel) {
			t.Errorf("got %v, client_golang has %v", f, before[i])
			continue
		}
		if f.GetType() == dto.MetricType_SUMMARY {
			if f.Metric[0].String() != before[i].Metric[0].String() {
				t.Errorf("got %v, client_golang has %v", f, before[i])
			}
			continue
		}
		low, high := singleValue(before[i]), singleValue(after[i])
		low, high = min(low, high), max(low, high)
		if f.GetName() == "go_goroutines" {
			low = 2 // this test and its parent; a registry runs more
		}
		if v := singleValue(f); v < low-high/20 || v > high+high/20 {
			t.Errorf("%s: got %v, client_golang has %v and %v", f.GetName(), v, singleValue(before[i]), singleValue(after[i]))
		}
	}
}

// Each metric is the sum of the samples that its help names, and Go provides them.
func TestRuntimeTable(t *testing.T) {
	provided := make(map[string]bool)
	for _, d := range metrics.All() {
		provided[d.Name] = d.Kind == metrics.KindUint64
	}
	for _, m := range runtimeTable() {
		want := regexp.MustCompile(`/[a-z/-]+:[a-z]+`).FindAllString(m.help, -1)
		if m.name == "memstats_sys_bytes" {
			want = []string{"/memory/classes/total:bytes"} // client_golang's help lacks the s
		}
		if !slices.Equal(m.samples, want) || len(want) == 0 {
			t.Errorf("%s: sum of %q, the help names %q", m.name, m.samples, want)
		}
		for _, name := range m.samples {
			if !provided[name] {
				t.Errorf("%s: Go does not provide %s", m.name, name)
			}
		}
	}
}
