package metrics

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
		{"gc_gogc_percent", gauge, "percent", []string{"/gc/gogc:percent"}, "Heap size target percentage configured by the user, otherwise 100. This value is set by the GOGC environment variable, and the runtime/debug.SetGCPercent function. Sourced from /gc/gogc:percent."},
		{"gc_gomemlimit_bytes", gauge, "bytes", []string{"/gc/gomemlimit:bytes"}, "Go runtime memory limit configured by the user, otherwise math.MaxInt64. This value is set by the GOMEMLIMIT environment variable, and the runtime/debug.SetMemoryLimit function. Sourced from /gc/gomemlimit:bytes."},
		{"memstats_alloc_bytes", gauge, "", []string{"/memory/classes/heap/objects:bytes"}, "Number of bytes allocated in heap and currently in use. Equals to /memory/classes/heap/objects:bytes."},
		{"memstats_alloc_bytes_total", counter, "", []string{"/gc/heap/allocs:bytes"}, "Total number of bytes allocated in heap until now, even if released already. Equals to /gc/heap/allocs:bytes."},
		{"memstats_buck_hash_sys_bytes", gauge, "", []string{"/memory/classes/profiling/buckets:bytes"}, "Number of bytes used by the profiling bucket hash table. Equals to /memory/classes/profiling/buckets:bytes."},
		{"memstats_frees_total", counter, "", []string{"/gc/heap/frees:objects", "/gc/heap/tiny/allocs:objects"}, "Total number of heap objects frees. Equals to /gc/heap/frees:objects + /gc/heap/tiny/allocs:objects."},
		{"memstats_gc_sys_bytes", gauge, "", []string{"/memory/classes/metadata/other:bytes"}, "Number of bytes used for garbage collection system metadata. Equals to /memory/classes/metadata/other:bytes."},
		{"memstats_heap_alloc_bytes", gauge, "", []string{"/memory/classes/heap/objects:bytes"}, "Number of heap bytes allocated and currently in use, same as go_memstats_alloc_bytes. Equals to /memory/classes/heap/objects:bytes."},
		{"memstats_heap_idle_bytes", gauge, "", []string{"/memory/classes/heap/released:bytes", "/memory/classes/heap/free:bytes"}, "Number of heap bytes waiting to be used. Equals to /memory/classes/heap/released:bytes + /memory/classes/heap/free:bytes."},
		{"memstats_heap_inuse_bytes", gauge, "", []string{"/memory/classes/heap/objects:bytes", "/memory/classes/heap/unused:bytes"}, "Number of heap bytes that are in use. Equals to /memory/classes/heap/objects:bytes + /memory/classes/heap/unused:bytes"},
		{"memstats_heap_objects", gauge, "", []string{"/gc/heap/objects:objects"}, "Number of currently allocated objects. Equals to /gc/heap/objects:objects."},
		{"memstats_heap_released_bytes", gauge, "", []string{"/memory/classes/heap/released:bytes"}, "Number of heap bytes released to OS. Equals to /memory/classes/heap/released:bytes."},
		{"memstats_heap_sys_bytes", gauge, "", []string{"/memory/classes/heap/objects:bytes", "/memory/classes/heap/unused:bytes", "/memory/classes/heap/released:bytes", "/memory/classes/heap/free:bytes"}, "Number of heap bytes obtained from system. Equals to /memory/classes/heap/objects:bytes + /memory/classes/heap/unused:bytes + /memory/classes/heap/released:bytes + /memory/classes/heap/free:bytes."},
		{"memstats_mallocs_total", counter, "", []string{"/gc/heap/allocs:objects", "/gc/heap/tiny/allocs:objects"}, "Total number of heap objects allocated, both live and gc-ed. Semantically a counter version for go_memstats_heap_objects gauge. Equals to /gc/heap/allocs:objects + /gc/heap/tiny/allocs:objects."},
		{"memstats_mcache_inuse_bytes", gauge, "", []string{"/memory/classes/metadata/mcache/inuse:bytes"}, "Number of bytes in use by mcache structures. Equals to /memory/classes/metadata/mcache/inuse:bytes."},
		{"memstats_mcache_sys_bytes", gauge, "", []string{"/memory/classes/metadata/mcache/inuse:bytes", "/memory/classes/metadata/mcache/free:bytes"}, "Number of bytes used for mcache structures obtained from system. Equals to /memory/classes/metadata/mcache/inuse:bytes + /memory/classes/metadata/mcache/free:bytes."},
		{"memstats_mspan_inuse_bytes", gauge, "", []string{"/memory/classes/metadata/mspan/inuse:bytes"}, "Number of bytes in use by mspan structures. Equals to /memory/classes/metadata/mspan/inuse:bytes."},
		{"memstats_mspan_sys_bytes", gauge, "", []string{"/memory/classes/metadata/mspan/inuse:bytes", "/memory/classes/metadata/mspan/free:bytes"}, "Number of bytes used for mspan structures obtained from system. Equals to /memory/classes/metadata/mspan/inuse:bytes + /memory/classes/metadata/mspan/free:bytes."},
		{"memstats_next_gc_bytes", gauge, "", []string{"/gc/heap/goal:bytes"}, "Number of heap bytes when next garbage collection will take place. Equals to /gc/heap/goal:bytes."},
		{"memstats_other_sys_bytes", gauge, "", []string{"/memory/classes/other:bytes"}, "Number of bytes used for other system allocations. Equals to /memory/classes/other:bytes."},
		{"memstats_stack_inuse_bytes", gauge, "", []string{"/memory/classes/heap/stacks:bytes"}, "Number of bytes obtained from system for stack allocator in non-CGO environments. Equals to /memory/classes/heap/stacks:bytes."},
		{"memstats_stack_sys_bytes", gauge, "", []string{"/memory/classes/heap/stacks:bytes", "/memory/classes/os-stacks:bytes"}, "Number of bytes obtained from system for stack allocator. Equals to /memory/classes/heap/stacks:bytes + /memory/classes/os-stacks:bytes."},
		{"memstats_sys_bytes", gauge, "", []string{"/memory/classes/total:bytes"}, "Number of bytes obtained from system. Equals to /memory/classes/total:byte."},
		{"sched_gomaxprocs_threads", gauge, "threads", []string{"/sched/gomaxprocs:threads"}, "The current runtime.GOMAXPROCS setting, or the number of operating system threads that can execute user-level Go code simultaneously. Sourced from /sched/gomaxprocs:threads."},
	}
}
