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

// The process's series are those of client_golang's collector but for the network's: names, types, help and, as far as time stands
// still meanwhile, values.
func TestProcess(t *testing.T) {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	theirs, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	theirs = slices.DeleteFunc(theirs, func(f *dto.MetricFamily) bool { return strings.HasPrefix(f.GetName(), "process_network_") })
	families, done, err := newGatherer(sources(nil)).Gather()
	defer done()
	if err != nil {
		t.Fatal(err)
	}
	var ours []*dto.MetricFamily
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "process_") {
			ours = append(ours, f)
		}
	}
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
