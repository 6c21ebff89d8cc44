package metrics

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// runtimeSums maps the metrics of runtimeTable to the samples that they add up.
type runtimeSums struct {
	samples []string // distinct names
	indices [][]int  // in samples, for each metric
}

func newRuntimeSums() (r runtimeSums) {
	for _, m := range runtimeTable() {
		var indices []int
		for _, name := range m.samples {
			i := slices.Index(r.samples, name)
			if i < 0 {
				i = len(r.samples)
				r.samples = append(r.samples, name)
			}
			indices = append(indices, i)
		}
		r.indices = append(r.indices, indices)
	}
	return r
}

// runtimeReading is the memory into which a scrape reads the runtime's state.
type runtimeReading struct {
	samples []metrics.Sample
	gc      debug.GCStats
}

func (r runtimeSums) newReading() runtimeReading {
	reading := runtimeReading{gc: debug.GCStats{PauseQuantiles: make([]time.Duration, 5)}}
	for _, name := range r.samples {
		reading.samples = append(reading.samples, metrics.Sample{Name: name})
	}
	return reading
}

// collectRuntime adds the metrics of client_golang's Go collector.
//
// client_golang's collector allocates every series at each scrape, and the registry that it needs allocates it again,
// with room for two thousand others: four fifths of the garbage of a scrape of eight GPUs. Here the memory is reused.
func (s *scrape) collectRuntime() {
	metrics.Read(s.runtime.samples)
	for i, indices := range s.runtimeSums.indices {
		v := 0.0
		for _, sample := range indices {
			// A sample that this version of Go lacks has another kind.
			if value := s.runtime.samples[sample].Value; value.Kind() == metrics.KindUint64 {
				v += float64(value.Uint64())
			}
		}
		s.Add(firstRuntimeMetric+i, v, nil)
	}
	s.Add(goGoroutines, float64(runtime.NumGoroutine()), nil)
	threads, _ := runtime.ThreadCreateProfile(nil)
	s.Add(goThreads, float64(threads), nil)
	s.AddWith(goInfo, 1, nil, label("version", runtime.Version()))
	s.collectGCPauses(&s.runtime.gc)
}

func (s *scrape) collectGCPauses(gc *debug.GCStats) {
	debug.ReadGCStats(gc)
	n, sum := uint64(gc.NumGC), gc.PauseTotal.Seconds()
	summary := &dto.Summary{SampleCount: &n, SampleSum: &sum}
	for i, pause := range gc.PauseQuantiles {
		quantile, v := float64(i)/float64(len(gc.PauseQuantiles)-1), pause.Seconds()
		summary.Quantile = append(summary.Quantile, &dto.Quantile{Quantile: &quantile, Value: &v})
	}
	s.AddMetric(goPauses, &dto.Metric{Summary: summary})
	s.Add(goLastGC, float64(gc.LastGC.UnixNano())/1e9, nil)
}
