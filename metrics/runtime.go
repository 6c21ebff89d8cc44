package metrics

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// runtimeFamilies are the numbers of the families that client_golang's collector of Go's runtime has too.
//
// Theirs makes each series anew at each scrape, and the registry that it needs makes it once more, with room for two
// thousand others: that was four fifths of what a scrape of eight GPUs left behind. Here the same is read into memory
// that is used again.
type runtimeFamilies struct {
	sums    []runtimeSum
	samples []string // what the sums are of

	goroutines, threads, pauses, lastGC, info int
}

// runtimeSum is a row of the table.
type runtimeSum struct {
	number int
	of     []int // in samples
}

func (s *shape) declareRuntime() {
	r := &s.runtime
	for _, row := range runtimeTable() {
		sum := runtimeSum{number: s.declare("go_"+row.name, row.help, row.kind)}
		s.families[sum.number].unit = row.unit
		for _, name := range row.of {
			i := slices.Index(r.samples, name)
			if i < 0 {
				i = len(r.samples)
				r.samples = append(r.samples, name)
			}
			sum.of = append(sum.of, i)
		}
		r.sums = append(r.sums, sum)
	}
	gauge := func(name, help string) int { return s.declare("go_"+name, help, dto.MetricType_GAUGE) }
	r.goroutines = gauge("goroutines", "Number of goroutines that currently exist.")
	r.threads = gauge("threads", "Number of OS threads created.")
	r.lastGC = gauge("memstats_last_gc_time_seconds", "Number of seconds since 1970 of last garbage collection.")
	r.info = gauge("info", "Information about the Go environment.")
	r.pauses = s.declare("go_gc_duration_seconds", "A summary of the wall-time pause (stop-the-world) duration in garbage collection cycles.",
		dto.MetricType_SUMMARY)
}

// runtimeReading is what is read of the runtime.
type runtimeReading struct {
	samples []metrics.Sample
	gc      debug.GCStats
}

func (r *runtimeFamilies) reading() runtimeReading {
	reading := runtimeReading{gc: debug.GCStats{PauseQuantiles: make([]time.Duration, 5)}}
	for _, name := range r.samples {
		reading.samples = append(reading.samples, metrics.Sample{Name: name})
	}
	return reading
}

// collectRuntime shows Go's runtime.
func (s *scrape) collectRuntime() {
	families, reading := &s.runtime, &s.reading
	metrics.Read(reading.samples)
	for _, sum := range families.sums {
		v := 0.0
		for _, i := range sum.of {
			// What this release of Go does not have is bad.
			if value := reading.samples[i].Value; value.Kind() == metrics.KindUint64 {
				v += float64(value.Uint64())
			}
		}
		s.add(sum.number, v, nil)
	}
	s.add(families.goroutines, float64(runtime.NumGoroutine()), nil)
	threads, _ := runtime.ThreadCreateProfile(nil)
	s.add(families.threads, float64(threads), nil)
	s.addWith(families.info, 1, nil, Label{"version", runtime.Version()})
	s.collectPauses(&reading.gc)
}

// collectPauses shows the only summary.
func (s *scrape) collectPauses(gc *debug.GCStats) {
	debug.ReadGCStats(gc)
	n, sum := uint64(gc.NumGC), gc.PauseTotal.Seconds()
	summary := &dto.Summary{SampleCount: &n, SampleSum: &sum}
	for i, pause := range gc.PauseQuantiles {
		quantile, v := float64(i)/float64(len(gc.PauseQuantiles)-1), pause.Seconds()
		summary.Quantile = append(summary.Quantile, &dto.Quantile{Quantile: &quantile, Value: &v})
	}
	f := s.made[s.runtime.pauses]
	f.Metric = append(f.Metric, &dto.Metric{Summary: summary})
	s.add(s.runtime.lastGC, float64(gc.LastGC.UnixNano())/1e9, nil)
}
