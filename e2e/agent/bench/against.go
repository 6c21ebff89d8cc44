package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// againstRounds is how often measureAgainst measures each version.
const againstRounds = 7

// Limits of the median of the rounds, divided by the other version's.
const (
	limitOfMedians = 1.05
	limitOfP99     = 1.25
)

// comparison is one measure of two versions of the agent.
type comparison struct {
	What  string    `json:"what"`
	Unit  string    `json:"unit"`
	Limit float64   `json:"limit"` // of the ratio
	Agent []float64 `json:"agent"` // in the order of the rounds
	Other []float64 `json:"other"`
}

// ratio returns the median of the agent divided by the median of the other version.
func (c comparison) ratio() float64 { return median(c.Agent) / median(c.Other) }

func (c comparison) worse() bool { return c.ratio() > c.Limit }

// median returns the middle value of an odd number of values.
func median(values []float64) float64 { return slices.Sorted(slices.Values(values))[len(values)/2] }

// writeComparisons writes all rounds of all comparisons, the medians and their ratio.
func writeComparisons(w io.Writer, all []comparison) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintln(w, "what\tversion\tmedian\tunit\tratio\tlimit\trounds\t")
	for _, c := range all {
		limit := "<= " + short(c.Limit)
		if c.worse() {
			limit += " missed"
		}
		fmt.Fprintf(w, "%s\t-agent\t%s\t%s\t%.3f\t%s\t%s\t\n", c.What, short(median(c.Agent)), c.Unit, c.ratio(), limit, list(c.Agent))
		fmt.Fprintf(w, "\t-against\t%s\t\t\t\t%s\t\n", short(median(c.Other)), list(c.Other))
	}
}

func list(values []float64) string {
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = short(v)
	}
	return strings.Join(texts, " ")
}

// measureAgainst measures the agent and another version in turn, so that what else the machine does meets both, and fails if the agent is
// worse. With -quick it measures too little to judge.
func (b *bench) measureAgainst(ctx context.Context) error {
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	copies := map[string]string{b.agent: filepath.Join(dir, "agent"), b.against: filepath.Join(dir, "against")}
	for binary, to := range copies {
		if err := copyBinary(binary, to); err != nil {
			return err
		}
	}
	var all []comparison
	for i := range b.scale(againstRounds) {
		binaries := []string{b.agent, b.against}
		if i%2 == 1 {
			slices.Reverse(binaries)
		}
		var got [2][]comparison
		for j, binary := range binaries {
			b.progress("round %d: %s", i+1, binary)
			figures, err := b.measureVersion(ctx, copies[binary])
			if err != nil {
				return fmt.Errorf("%s: %w", binary, err)
			}
			got[(i+j)%2] = figures
		}
		if all == nil {
			all = make([]comparison, len(got[0]))
		}
		for k := range all {
			c := got[0][k]
			c.Agent, c.Other = append(all[k].Agent, c.Agent...), append(all[k].Other, got[1][k].Agent...)
			all[k] = c
		}
	}
	b.table.Compared = all
	var worse []error
	for _, c := range all {
		if c.worse() && !b.quick {
			worse = append(worse, fmt.Errorf("%s is %.3f times the one of %s, more than %v", c.What, c.ratio(), b.against, c.Limit))
		}
	}
	return errors.Join(worse...)
}

// copyBinary copies a binary by writes of a page. The kernel keeps a file in chunks of memory, whose size depends on how the file was
// written, and maps more of a large chunk than is touched: by that, copies of one binary differ in RSS by up to 20 MiB.
func copyBinary(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o700)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	// Files would let the kernel copy, in chunks of its choice.
	_, err = io.CopyBuffer(struct{ io.Writer }{out}, struct{ io.Reader }{in}, make([]byte, os.Getpagesize()))
	return err
}

// measureVersion returns the figures of one version in one round.
func (b *bench) measureVersion(ctx context.Context, binary string) (figures []comparison, err error) {
	r, err := startSim(ctx, binary, "h100-8", 8)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.stop()) }()
	add := func(what, unit string, limit, value float64) {
		figures = append(figures, comparison{What: what, Unit: unit, Limit: limit, Agent: []float64{value}})
	}

	length := time.Duration(b.scale(30)) * time.Second
	idle, err := cpuDuring(r.Pid(), func() error { return pause(ctx, length) })
	if err != nil {
		return nil, err
	}
	add("idle CPU", "% of a core", limitOfMedians, 100*idle.Seconds()/length.Seconds())

	took, err := b.toKubelet(ctx, r)
	if err != nil {
		return nil, err
	}
	add("XID to ListAndWatch, p50", "ms", limitOfMedians, percentile(took, 50))
	add("XID to ListAndWatch, p99", "ms", limitOfP99, percentile(took, 99))

	p := target{url: r.URL + "/metrics", pid: r.Pid()}
	n := b.scale(2000)
	before, err := p.allocations(ctx)
	if err != nil {
		return nil, err
	}
	cpu, err := cpuDuring(r.Pid(), func() (err error) {
		took, _, err = scrape(ctx, p.url, "gzip", n)
		return err
	})
	if err != nil {
		return nil, err
	}
	after, err := p.allocations(ctx)
	if err != nil {
		return nil, err
	}
	add("scrape, p50", "ms", limitOfMedians, percentile(took, 50))
	add("scrape, p99", "ms", limitOfP99, percentile(took, 99))
	add("CPU of 1,000 scrapes", "s", limitOfMedians, cpu.Seconds()*1000/float64(n))
	add("allocations per scrape", "", limitOfMedians, (after-before)/float64(n))
	u, err := node.UsageOf(r.Pid())
	add("RSS", "MiB", limitOfMedians, mebibytes(u.RSS))
	return figures, err
}

// allocations returns the number of objects that the agent has allocated, by the Go runtime's metric on its page.
func (p target) allocations(ctx context.Context) (float64, error) {
	const name = "go_memstats_mallocs_total"
	_, page, err := p.usage(ctx)
	if err != nil {
		return 0, err
	}
	n, ok := page.Value(name)
	if !ok {
		return 0, fmt.Errorf("%s has no %s", p.url, name)
	}
	return n, nil
}

// cpuDuring returns the CPU time that a process uses while a function runs. An idle agent uses too few of the ticks of
// /proc/PID/stat to see 5 %, so this is the time of the scheduler in nanoseconds. It lacks threads that end meanwhile.
func cpuDuring(pid int, f func() error) (time.Duration, error) {
	before, err := cpuOf(pid)
	if err != nil {
		return 0, err
	}
	if err := f(); err != nil {
		return 0, err
	}
	after, err := cpuOf(pid)
	return after - before, err
}

func cpuOf(pid int) (sum time.Duration, err error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		return 0, err
	}
	if len(files) == 0 {
		return 0, fmt.Errorf("process %d has no schedstat", pid)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue // the thread has ended
		}
		if err != nil {
			return 0, err
		}
		onCPU, _, _ := strings.Cut(string(text), " ")
		ns, err := strconv.ParseInt(onCPU, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", file, err)
		}
		sum += time.Duration(ns)
	}
	return sum, nil
}
