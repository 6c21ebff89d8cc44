package metrics

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"
)

// gatherFrom returns the metrics of a collector of client_golang.
func gatherFrom(t *testing.T, c prometheus.Collector) []*dto.MetricFamily {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// agentFamilies returns the agent's metrics with a prefix.
func agentFamilies(t *testing.T, prefix string) []*dto.MetricFamily {
	t.Helper()
	p, done := newCollector(testSources(nil)).collect()
	t.Cleanup(done)
	return slices.DeleteFunc(slices.Clone(p.Families()), func(f *dto.MetricFamily) bool { return !strings.HasPrefix(f.GetName(), prefix) })
}

// sameMetric reports whether two families have the same name, type, help and unit.
func sameMetric(a, b *dto.MetricFamily) bool {
	return a.GetName() == b.GetName() && a.GetHelp() == b.GetHelp() && a.GetType() == b.GetType() && a.GetUnit() == b.GetUnit()
}

func singleValue(f *dto.MetricFamily) float64 {
	m := f.Metric[0]
	return m.GetGauge().GetValue() + m.GetCounter().GetValue()
}

// The metrics are those of client_golang's process collector except those of the network; the values are close.
func TestProcessMatchesClientGolang(t *testing.T) {
	want := slices.DeleteFunc(gatherFrom(t, collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})), func(f *dto.MetricFamily) bool {
		return strings.HasPrefix(f.GetName(), "process_network_")
	})
	got := agentFamilies(t, "process_")
	if len(got) != len(want) || len(got) != 7 {
		t.Fatalf("%d metrics, client_golang has %d", len(got), len(want))
	}
	for i, f := range got {
		if !sameMetric(f, want[i]) {
			t.Errorf("got %v, client_golang has %v", f, want[i])
		}
		v, expected := singleValue(f), singleValue(want[i])
		tolerance := 0.01 * expected
		switch f.GetName() {
		case "process_cpu_seconds_total", "process_open_fds":
			tolerance = 5
		case "process_resident_memory_bytes", "process_virtual_memory_bytes":
			tolerance = expected / 2
		}
		if math.Abs(v-expected) > tolerance || v <= 0 && expected > 0 {
			t.Errorf("%s: got %v, client_golang has %v", f.GetName(), v, expected)
		}
	}
}
