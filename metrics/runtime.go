package metrics

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// runtimeReading is the memory into which a scrape reads the runtime's state.
type runtimeReading struct {
	samples  []metrics.Sample // of all metrics in runtimeTable
	families []int            // by sample: the number of the metric that adds it up
	gc       debug.GCStats
}

func newRuntimeReading() runtimeReading {
	r := runtimeReading{gc: debug.GCStats{PauseQuantiles: make([]time.Duration, 5)}}
	for i, m := range runtimeTable() {
		for _, name := range m.samples {
			r.samples = append(r.samples, metrics.Sample{Name: name})
			r.families = append(r.families, firstRuntimeMetric+i)
		}
	}
	return r
}

// collectRuntime adds the metrics of client_golang's Go collector.
//
// client_golang's collector allocates every series at each scrape, and the registry that it needs allocates it again,
// with room for two thousand others: four fifths of the garbage of a scrape of eight GPUs. Here the memory is reused.
func (s *scrape) collectRuntime() {
	metrics.Read(s.runtime.samples)
	sum := 0.0
	for i, sample := range s.runtime.samples {
		if sample.Value.Kind() == metrics.KindUint64 { // a sample that this version of Go lacks has another kind
			sum += float64(sample.Value.Uint64())
		}
		if i+1 == len(s.runtime.families) || s.runtime.families[i+1] != s.runtime.families[i] {
			s.Add(s.runtime.families[i], sum, nil)
			sum = 0
		}
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

// runtimeMetric is a metric of the Go runtime: the sum of samples of runtime/metrics.
type runtimeMetric struct {
	name    string // without go_
	typ     string
	unit    string
	samples []string
	help    string
}

// runtimeTable returns the metrics of client_golang's Go collector that are such sums, with its names and help.
func runtimeTable() []runtimeMetric {
	return []runtimeMetric{
		{
			"gc_gogc_percent", gauge, "percent",
			[]string{"/gc/gogc:percent"},
			"Heap size target percentage configured by the user, otherwise 100. This value is set by the GOGC environment variable, and the " +
				"runtime/debug.SetGCPercent function. Sourced from /gc/gogc:percent.",
		},
		{
			"gc_gomemlimit_bytes", gauge, "bytes",
			[]string{"/gc/gomemlimit:bytes"},
			"Go runtime memory limit configured by the user, otherwise math.MaxInt64. This value is set by the GOMEMLIMIT environment variable, " +
				"and the runtime/debug.SetMemoryLimit function. Sourced from /gc/gomemlimit:bytes.",
		},
		{
			"memstats_alloc_bytes", gauge, "",
			[]string{"/memory/classes/heap/objects:bytes"},
			"Number of bytes allocated in heap and currently in use. Equals to /memory/classes/heap/objects:bytes.",
		},
		{
			"memstats_alloc_bytes_total", counter, "",
			[]string{"/gc/heap/allocs:bytes"},
			"Total number of bytes allocated in heap until now, even if released already. Equals to /gc/heap/allocs:bytes.",
		},
		{
			"memstats_buck_hash_sys_bytes", gauge, "",
			[]string{"/memory/classes/profiling/buckets:bytes"},
			"Number of bytes used by the profiling bucket hash table. Equals to /memory/classes/profiling/buckets:bytes.",
		},
		{
			"memstats_frees_total", counter, "",
			[]string{"/gc/heap/frees:objects", "/gc/heap/tiny/allocs:objects"},
			"Total number of heap objects frees. Equals to /gc/heap/frees:objects + /gc/heap/tiny/allocs:objects.",
		},
		{
			"memstats_gc_sys_bytes", gauge, "",
			[]string{"/memory/classes/metadata/other:bytes"},
			"Number of bytes used for garbage collection system metadata. Equals to /memory/classes/metadata/other:bytes.",
		},
		{
			"memstats_heap_alloc_bytes", gauge, "",
			[]string{"/memory/classes/heap/objects:bytes"},
			"Number of heap bytes allocated and currently in use, same as go_memstats_alloc_bytes. Equals to /memory/classes/heap/objects:bytes.",
		},
		{
			"memstats_heap_idle_bytes", gauge, "",
			[]string{"/memory/classes/heap/released:bytes", "/memory/classes/heap/free:bytes"},
			"Number of heap bytes waiting to be used. Equals to /memory/classes/heap/released:bytes + /memory/classes/heap/free:bytes.",
		},
		{
			"memstats_heap_inuse_bytes", gauge, "",
			[]string{"/memory/classes/heap/objects:bytes", "/memory/classes/heap/unused:bytes"},
			"Number of heap bytes that are in use. Equals to /memory/classes/heap/objects:bytes + /memory/classes/heap/unused:bytes",
		},
		{
			"memstats_heap_objects", gauge, "",
			[]string{"/gc/heap/objects:objects"},
			"Number of currently allocated objects. Equals to /gc/heap/objects:objects.",
		},
		{
			"memstats_heap_released_bytes", gauge, "",
			[]string{"/memory/classes/heap/released:bytes"},
			"Number of heap bytes released to OS. Equals to /memory/classes/heap/released:bytes.",
		},
		{
			"memstats_heap_sys_bytes", gauge, "",
			[]string{
				"/memory/classes/heap/objects:bytes", "/memory/classes/heap/unused:bytes",
				"/memory/classes/heap/released:bytes", "/memory/classes/heap/free:bytes",
			},
			"Number of heap bytes obtained from system. Equals to /memory/classes/heap/objects:bytes + /memory/classes/heap/unused:bytes + " +
				"/memory/classes/heap/released:bytes + /memory/classes/heap/free:bytes.",
		},
		{
			"memstats_mallocs_total", counter, "",
			[]string{"/gc/heap/allocs:objects", "/gc/heap/tiny/allocs:objects"},
			"Total number of heap objects allocated, both live and gc-ed. Semantically a counter version for go_memstats_heap_objects gauge. " +
				"Equals to /gc/heap/allocs:objects + /gc/heap/tiny/allocs:objects.",
		},
		{
			"memstats_mcache_inuse_bytes", gauge, "",
			[]string{"/memory/classes/metadata/mcache/inuse:bytes"},
			"Number of bytes in use by mcache structures. Equals to /memory/classes/metadata/mcache/inuse:bytes.",
		},
		{
			"memstats_mcache_sys_bytes", gauge, "",
			[]string{
				"/memory/classes/metadata/mcache/inuse:bytes",
				"/memory/classes/metadata/mcache/free:bytes",
			},
			"Number of bytes used for mcache structures obtained from system. Equals to /memory/classes/metadata/mcache/inuse:bytes + " +
				"/memory/classes/metadata/mcache/free:bytes.",
		},
		{
			"memstats_mspan_inuse_bytes", gauge, "",
			[]string{"/memory/classes/metadata/mspan/inuse:bytes"},
			"Number of bytes in use by mspan structures. Equals to /memory/classes/metadata/mspan/inuse:bytes.",
		},
		{
			"memstats_mspan_sys_bytes", gauge, "",
			[]string{
				"/memory/classes/metadata/mspan/inuse:bytes",
				"/memory/classes/metadata/mspan/free:bytes",
			},
			"Number of bytes used for mspan structures obtained from system. Equals to /memory/classes/metadata/mspan/inuse:bytes + " +
				"/memory/classes/metadata/mspan/free:bytes.",
		},
		{
			"memstats_next_gc_bytes", gauge, "",
			[]string{"/gc/heap/goal:bytes"},
			"Number of heap bytes when next garbage collection will take place. Equals to /gc/heap/goal:bytes.",
		},
		{
			"memstats_other_sys_bytes", gauge, "",
			[]string{"/memory/classes/other:bytes"},
			"Number of bytes used for other system allocations. Equals to /memory/classes/other:bytes.",
		},
		{
			"memstats_stack_inuse_bytes", gauge, "",
			[]string{"/memory/classes/heap/stacks:bytes"},
			"Number of bytes obtained from system for stack allocator in non-CGO environments. Equals to /memory/classes/heap/stacks:bytes.",
		},
		{
			"memstats_stack_sys_bytes", gauge, "",
			[]string{"/memory/classes/heap/stacks:bytes", "/memory/classes/os-stacks:bytes"},
			"Number of bytes obtained from system for stack allocator. Equals to /memory/classes/heap/stacks:bytes + " +
				"/memory/classes/os-stacks:bytes.",
		},
		{
			"memstats_sys_bytes", gauge, "",
			[]string{"/memory/classes/total:bytes"},
			"Number of bytes obtained from system. Equals to /memory/classes/total:byte.",
		},
		{
			"sched_gomaxprocs_threads", gauge, "threads",
			[]string{"/sched/gomaxprocs:threads"},
			"The current runtime.GOMAXPROCS setting, or the number of operating system threads that can execute user-level Go code " +
				"simultaneously. Sourced from /sched/gomaxprocs:threads.",
		},
	}
}
