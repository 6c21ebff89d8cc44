package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// measureBindings measures what an exporter that reads DCGM at each scrape pays for the bindings: the CPU time of one read of
// 8 GPUs and 30 fields through go-dcgm. The scripted libdcgm responds at once; a real one adds its own work.
func (b *bench) measureBindings(ctx context.Context) error {
	scrape := -1.0
	for _, r := range b.table.Rows {
		if r.What == perThousandScrapes {
			scrape = *r.Value // s per 1,000 scrapes are ms per scrape
			break
		}
	}
	if b.repo == "" || scrape < 0 {
		b.table.notMeasured("cost of DCGM's bindings: no -repo")
		return nil
	}
	b.progress("one read through go-dcgm")
	read, err := b.measureRead(ctx)
	if err != nil {
		b.table.notMeasured("cost of DCGM's bindings: %v", err)
		return nil
	}
	b.table.addValue("CPU of one read of 8 GPUs x 30 fields, go-dcgm", milliseconds(read), "ms", noAim, "of a scripted libdcgm")
	b.table.addValue("CPU of a scrape, relative to such a read", 100*scrape/milliseconds(read), "%", 10, "")
	return nil
}

// measureRead runs the benchmark of health/dcgm with few and many iterations. The difference is the cost of the reads alone.
func (b *bench) measureRead(ctx context.Context) (cpu time.Duration, err error) {
	dir, err := os.MkdirTemp("", "gna-bench")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	binary, home := filepath.Join(dir, "dcgm.test"), filepath.Join(b.repo, "health", "dcgm")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-o", binary, ".")
	build.Dir = home
	if out, err := build.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%w: %s", err, out)
	}
	fewReads, manyReads := 1, b.scale(2000)
	var cpuTime [2]time.Duration
	for i, n := range []int{fewReads, manyReads} {
		cmd := exec.CommandContext(ctx, binary, "-test.run", "^$", "-test.bench", "^BenchmarkPoll$/^8x30$/^metrics$", "-test.benchtime",
			fmt.Sprintf("%dx", n))
		cmd.Dir = home
		if out, err := cmd.CombinedOutput(); err != nil {
			return 0, fmt.Errorf("%w: %s", err, out)
		}
		cpuTime[i] = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	return (cpuTime[1] - cpuTime[0]) / time.Duration(manyReads-fewReads), nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
