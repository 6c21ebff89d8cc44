package metrics

import (
	"sync"
	"syscall"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/procfs"
)

// processFamilies are the numbers of the families that client_golang's collector of the process has too, but for the
// network's: those are of all that shares the pod's network, and the kernel's text for them is long.
//
// Their collector reads all of /proc/stat at each scrape, which has a line for each CPU and each interrupt, for
// when the node has started, and the limits by regular expressions: half of what a scrape of eight GPUs took, and
// more on a node with more CPUs. What does not change is read once here; the rest is read by the same library.
type processFamilies struct {
	cpu, openFDs, maxFDs, virtual, virtualMax, resident, start int
}

func (s *shape) declareProcess() {
	gauge := func(name, help string) int { return s.declare("process_"+name, help, dto.MetricType_GAUGE) }
	counter := func(name, help string) int { return s.declare("process_"+name, help, dto.MetricType_COUNTER) }
	s.process = processFamilies{
		cpu:        counter("cpu_seconds_total", "Total user and system CPU time spent in seconds."),
		openFDs:    gauge("open_fds", "Number of open file descriptors."),
		maxFDs:     gauge("max_fds", "Maximum number of open file descriptors."),
		virtual:    gauge("virtual_memory_bytes", "Virtual memory size in bytes."),
		virtualMax: gauge("virtual_memory_max_bytes", "Maximum amount of virtual memory available in bytes."),
		resident:   gauge("resident_memory_bytes", "Resident memory size in bytes."),
		start:      gauge("start_time_seconds", "Start time of the process since unix epoch in seconds."),
	}
}

// self is the agent's own directory in /proc. It does not become another's while the agent lives.
var self = sync.OnceValues(procfs.Self) //nolint:gochecknoglobals // found once

// startTime is when the process has started, in seconds since 1970; 0 if it cannot be known.
var startTime = sync.OnceValue(func() float64 { //nolint:gochecknoglobals // read once
	self, err := self()
	if err != nil {
		return 0
	}
	stat, err := self.Stat()
	if err != nil {
		return 0
	}
	at, err := stat.StartTime()
	if err != nil {
		return 0
	}
	return at
})

// collectProcess shows the agent's own process. What cannot be read is left out. The CPU's time and the memory are not
// taken from /proc/self/stat, of whose fifty numbers three would be used.
func (s *scrape) collectProcess() {
	self, err := self()
	if err != nil {
		return
	}
	var used syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &used) == nil {
		s.add(s.process.cpu, float64(used.Utime.Nano()+used.Stime.Nano())/1e9, nil)
	}
	if memory, err := self.Statm(); err == nil {
		s.add(s.process.virtual, float64(memory.SizeBytes()), nil)
		s.add(s.process.resident, float64(memory.ResidentBytes()), nil)
	}
	if at := startTime(); at != 0 {
		s.add(s.process.start, at, nil)
	}
	if n, err := self.FileDescriptorsLen(); err == nil {
		s.add(s.process.openFDs, float64(n), nil)
	}
	limit := func(family, resource int) {
		var l syscall.Rlimit
		if syscall.Getrlimit(resource, &l) == nil {
			s.add(family, float64(l.Cur), nil)
		}
	}
	limit(s.process.maxFDs, syscall.RLIMIT_NOFILE)
	limit(s.process.virtualMax, syscall.RLIMIT_AS)
}
