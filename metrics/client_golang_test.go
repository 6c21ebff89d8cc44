package metrics

import (
	"regexp"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"
)

// gather returns the metrics of client_golang's collectors of the process and of the Go runtime, without the metrics of the network.
func gather(t *testing.T) []*dto.MetricFamily {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewGoCollector())
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(families, func(f *dto.MetricFamily) bool { return strings.HasPrefix(f.GetName(), "process_network_") })
}

func singleValue(f *dto.MetricFamily) float64 {
	m := f.Metric[0]
	return m.GetGauge().GetValue() + m.GetCounter().GetValue()
}

// The metrics of the process and of the Go runtime are client_golang's; each value is near two of its readings.
func TestMetricsMatchClientGolang(t *testing.T) {
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	before := gather(t)
	p, done := collectorOf(testSources(nil)).collect()
	defer done()
	got := slices.DeleteFunc(slices.Clone(p.Families()), func(f *dto.MetricFamily) bool { return strings.HasPrefix(f.GetName(), namespace) })
	after := gather(t)
	if len(got) != len(before) || len(got) < 30 {
		t.Fatalf("%d metrics, client_golang has %d", len(got), len(before))
	}
	for i, f := range got {
		v, x, y := singleValue(f), singleValue(before[i]), singleValue(after[i])
		// Without the values of gauges and counters, the metrics are equal.
		for _, m := range slices.Concat(f.Metric, before[i].Metric) {
			m.Gauge, m.Counter = nil, nil
		}
		if f.String() != before[i].String() || len(f.Metric) != 1 {
			t.Errorf("got %v, client_golang has %v", f, before[i])
		}
		low, high := min(x, y), max(x, y)
		tolerance := high / 20
		switch f.GetName() {
		case "process_start_time_seconds", "process_max_fds", "process_virtual_memory_max_bytes":
			tolerance = 0
		case "process_cpu_seconds_total", "process_open_fds":
			tolerance = 5
		case "process_resident_memory_bytes", "process_virtual_memory_bytes":
			tolerance = high / 2
		case "go_memstats_other_sys_bytes":
			tolerance = 256 << 10 // the runtime allocates this much at once and then moves parts of it to other metrics
		case "go_goroutines":
			low = 2 // this test and its parent; a registry runs more
		}
		if v < low-tolerance || v > high+tolerance || v <= 0 && low > 0 {
			t.Errorf("%s: got %v, client_golang has %v and %v", f.GetName(), v, x, y)
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
