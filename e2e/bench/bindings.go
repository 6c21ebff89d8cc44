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

// bindings measures what an exporter pays that reads DCGM for each scrape: the CPU of one read of 8 GPUs and 30
// fields through go-dcgm, of a scripted libdcgm that answers at once. With a real one there is its work beside it.
func (b *bench) bindings(ctx context.Context) error {
	scrape := -1.0
	for _, r := range b.table.Rows {
		if r.What == perThousand {
			scrape = *r.Value // s of a thousand are ms of one
			break
		}
	}
	if b.repo == "" || scrape < 0 {
		b.table.left("what DCGM's bindings cost: no -repo was given")
		return nil
	}
	b.say("one read through go-dcgm")
	read, err := b.read(ctx)
	if err != nil {
		b.table.left("what DCGM's bindings cost: %v", err)
		return nil
	}
	b.table.value("CPU of one read of 8 GPUs x 30 fields, go-dcgm", milliseconds(read), "ms", none, "of a scripted libdcgm")
	b.table.value("CPU of a scrape, of such a read", 100*scrape/milliseconds(read), "%", 10, "")
	return nil
}

// read runs the benchmark of health/dcgm a few times and then many times: what differs is that of the reads alone.
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
