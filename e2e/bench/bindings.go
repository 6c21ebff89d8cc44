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

// bindings measures what an exporter that reads DCGM at each scrape pays for the bindings: the CPU time of one read of
// 8 GPUs and 30 fields through go-dcgm. The scripted libdcgm responds at once; a real one adds its own work.
func (b *bench) bindings(ctx context.Context) error {
	scrape := -1.0
	for _, r := range b.table.Rows {
		if r.What == perThousand {
			scrape = *r.Value // s per 1,000 scrapes are ms per scrape
			break
		}
	}
	if b.repo == "" || scrape < 0 {
		b.table.left("cost of DCGM's bindings: no -repo")
		return nil
	}
	b.say("one read through go-dcgm")
	read, err := b.read(ctx)
	if err != nil {
		b.table.left("cost of DCGM's bindings: %v", err)
		return nil
	}
	b.table.value("CPU of one read of 8 GPUs x 30 fields, go-dcgm", milliseconds(read), "ms", none, "of a scripted libdcgm")
	b.table.value("CPU of a scrape, relative to such a read", 100*scrape/milliseconds(read), "%", 10, "")
	return nil
}

// read runs the benchmark of health/dcgm with few and many iterations. The difference is the cost of the reads alone.
func (b *bench) read(ctx context.Context) (cpu time.Duration, err error) {
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
	few, many := 1, b.times(2000)
	var used [2]time.Duration
	for i, n := range []int{few, many} {
		cmd := exec.CommandContext(ctx, binary, "-test.run", "^$", "-test.bench", "^BenchmarkPoll$/^8x30$/^metrics$", "-test.benchtime", fmt.Sprintf("%dx", n))
		cmd.Dir = home
		if out, err := cmd.CombinedOutput(); err != nil {
			return 0, fmt.Errorf("%w: %s", err, out)
		}
		used[i] = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	return (used[1] - used[0]) / time.Duration(many-few), nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
