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

// theirs is what a collector of client_golang's shows.
func theirs(t *testing.T, c prometheus.Collector) []*dto.MetricFamily {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// ours are the families with such names on our page.
func ours(t *testing.T, prefix string) []*dto.MetricFamily {
	t.Helper()
	families, done, _ := NewGatherer(sources(nil)).Gather()
	t.Cleanup(done)
	return slices.DeleteFunc(slices.Clone(families), func(f *dto.MetricFamily) bool { return !strings.HasPrefix(f.GetName(), prefix) })
}

// The process's series are those of client_golang's collector but for the network's: names, types, help and, as far as time stands
// still meanwhile, values.
func TestProcess(t *testing.T) {
	theirs := slices.DeleteFunc(theirs(t, collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})), func(f *dto.MetricFamily) bool {
		return strings.HasPrefix(f.GetName(), "process_network_")
	})
	ours := ours(t, "process_")
	if len(ours) != len(theirs) || len(ours) != 7 {
		t.Fatalf("%d families, they have %d", len(ours), len(theirs))
	}
	for i, f := range ours {
		if f.GetName() != theirs[i].GetName() || f.GetHelp() != theirs[i].GetHelp() || f.GetType() != theirs[i].GetType() {
			t.Errorf("%v, they have %v", f, theirs[i])
		}
		got, want := valueOf(f), valueOf(theirs[i])
		near := 0.01 * want
		switch f.GetName() {
		case "process_cpu_seconds_total":
			near = 5
		case "process_open_fds":
			near = 5
		case "process_resident_memory_bytes", "process_virtual_memory_bytes":
			near = want / 2
		}
		if math.Abs(got-want) > near || got <= 0 && want > 0 {
			t.Errorf("%s is %v, they say %v", f.GetName(), got, want)
		}
	}
}

func valueOf(f *dto.MetricFamily) float64 {
	m := f.Metric[0]
	return m.GetGauge().GetValue() + m.GetCounter().GetValue()
}
