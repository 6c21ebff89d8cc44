package metrics

import (
	"sync"
	"syscall"

	"github.com/prometheus/procfs"
)

// self is the agent's own directory in /proc. It stays valid while the agent runs.
var self = sync.OnceValues(procfs.Self) //nolint:gochecknoglobals // read once

// startTime returns the Unix time in seconds at which the process started; 0 if unknown.
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

// collectProcess adds the metrics of client_golang's process collector. It leaves out the network's: they count for all processes in the
// pod's network namespace, and are expensive to read. It omits values that cannot be read.
//
// client_golang's collector took half of a scrape of eight GPUs, and more with more CPUs: for the start time it reads
// all of /proc/stat, which has a line for each CPU and each interrupt, and it parses the limits with regular
// expressions. Here the start time is read once, and system calls provide the limits and the CPU time.
func (s *scrape) collectProcess() {
	self, err := self()
	if err != nil {
		return
	}
	var used syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &used) == nil {
		s.Add(processCPU, float64(used.Utime.Nano()+used.Stime.Nano())/1e9, nil)
	}
	if memory, err := self.Statm(); err == nil {
		s.Add(processVirtual, float64(memory.SizeBytes()), nil)
		s.Add(processResident, float64(memory.ResidentBytes()), nil)
	}
	if at := startTime(); at != 0 {
		s.Add(processStart, at, nil)
	}
	if n, err := self.FileDescriptorsLen(); err == nil {
		s.Add(processOpenFDs, float64(n), nil)
	}
	for _, limit := range [...]struct{ family, resource int }{{processMaxFDs, syscall.RLIMIT_NOFILE}, {processVirtualMax, syscall.RLIMIT_AS}} {
		var l syscall.Rlimit
		if syscall.Getrlimit(limit.resource, &l) == nil {
			s.Add(limit.family, float64(l.Cur), nil)
		}
	}
}
