package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

const (
	messageSize = 8 << 20 // what libdcgm allocates for a read of values, in bytes
	callers     = 32      // threads beside the agent's, whose number depends on the machine
	briefSoak   = 2 * time.Minute
	sampleEvery = 5 * time.Second

	anonymousAim = 30 // MiB of a fullSoak
	growthAim    = 1  // MiB from a sixth of a fullSoak to its end
	fullSoak     = time.Hour
	// MiB of a shorter soak, on a machine that is busy otherwise. With the arenas of glibc an agent needs 80 on one processor.
	anonymousLimit = 40
)

// arenaNode is an agent over the scripted DCGM, in which many threads read values one after the other.
type arenaNode struct {
	*testNode
	arenas string // for the names of rows
	dir    string // the control files of the libraries
	memory samples
}

// samples are some in the order of time.
type samples []sample

// sample is the anonymous memory of an agent.
type sample struct {
	after time.Duration // since the start of the soak
	mib   float64
}

// defaultArenas is the limit that glibc has without the agent's: malloc.c of glibc.
func defaultArenas() int { return 8 * runtime.NumCPU() }

// startArenaNodes starts two agents for each source: as it is, and with as many arenas as glibc would allow. One more caller joins every
// so often.
func (b *bench) startArenaNodes(ctx context.Context, dir string, every time.Duration, sources ...string) (nodes []*arenaNode, err error) {
	if err := b.buildScripted(ctx, dir, scriptedDCGM, scriptedNVML); err != nil {
		return nil, err
	}
	lines := fmt.Sprintf("message %d\ncallers %d %d\n", messageSize, callers, every.Milliseconds())
	for _, source := range sources {
		for _, arenas := range []int{1, defaultArenas()} {
			n := &arenaNode{arenas: fmt.Sprintf("%d arenas", arenas)}
			var env []string
			if arenas == 1 {
				n.arenas = "1 arena"
			} else {
				env = append(env, fmt.Sprintf("MALLOC_ARENA_MAX=%d", arenas))
			}
			if n.dir, err = os.MkdirTemp(dir, ""); err != nil {
				return nodes, err
			}
			if n.testNode, err = (scripted{b.agent, dir, n.dir}).start(ctx, source, lines, env...); err != nil {
				return nodes, err
			}
			nodes = append(nodes, n)
		}
	}
	return nodes, nil
}

// withArenaNodes runs a function with the nodes of startArenaNodes.
func (b *bench) withArenaNodes(ctx context.Context, every time.Duration, sources []string, do func([]*arenaNode) error) (err error) {
	for _, name := range []string{"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"} { // the agents would inherit it
		if err := os.Unsetenv(name); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp("", "gna-soak")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	nodes, err := b.startArenaNodes(ctx, dir, every, sources...)
	defer func() {
		for _, n := range nodes {
			err = errors.Join(err, n.stop())
		}
	}()
	if err != nil {
		return err
	}
	return do(nodes)
}

// soakBriefly is the part of all measurements.
func (b *bench) soakBriefly(ctx context.Context) error {
	if b.repo == "" {
		b.table.notMeasured("anonymous memory: no -repo")
		return nil
	}
	return b.measureSoak(ctx, briefSoak)
}

// measureSoak measures the anonymous memory of agents with a host engine and with embedded DCGM, with one arena and with as many as
// glibc has, at once. It fails if the agent needs too much, and if the others do not: then the soak shows nothing.
func (b *bench) measureSoak(ctx context.Context, length time.Duration) error {
	b.progress("anonymous memory, for %v", length)
	sources := []string{"mode: standalone, address: 'localhost:5555'", "mode: embedded"}
	return b.withArenaNodes(ctx, length/2/callers, sources, func(nodes []*arenaNode) error {
		begin := time.Now()
		for time.Since(begin) < length {
			for _, n := range nodes {
				if err := n.sample(ctx, time.Since(begin)); err != nil {
					return err
				}
			}
			if err := pause(ctx, sampleEvery); err != nil {
				return err
			}
		}
		var errs []error
		for i, source := range []string{"host engine", "embedded DCGM"} {
			errs = append(errs, b.addSoak(source, length, nodes[2*i], nodes[2*i+1]))
		}
		return errors.Join(errs...)
	})
}

// sample scrapes an agent, as Prometheus does, and records its memory.
func (n *arenaNode) sample(ctx context.Context, after time.Duration) error {
	if _, err := n.Metrics(ctx); err != nil {
		return err
	}
	u, err := node.UsageOf(n.Pid())
	n.memory = append(n.memory, sample{after, mebibytes(u.Anon)})
	return err
}

// addSoak adds the rows of the agents of a source, and judges them.
func (b *bench) addSoak(source string, length time.Duration, one, many *arenaNode) (err error) {
	limit, growthLimit := float64(anonymousLimit), math.Inf(1)
	if length >= fullSoak {
		limit, growthLimit = anonymousAim, growthAim
	}
	for _, n := range []*arenaNode{one, many} {
		aim, growthAim := float64(noAim), float64(noAim)
		if n == one && length >= fullSoak {
			aim, growthAim = limit, growthLimit
		}
		b.table.addValue(fmt.Sprintf("anonymous memory over %v, %s, %s", length, source, n.arenas), n.memory.highest(), "MiB", aim,
			n.memory.String())
		b.table.addValue("its growth from a sixth of that time on", n.memory.growth(length/6), "MiB", growthAim, "by the slope")
	}
	b.table.addValue("the second by the first, "+source, many.memory.last()/one.memory.last(), "times", noAim, "at the end")
	if grown := one.memory.growth(length / 6); grown >= growthLimit {
		err = fmt.Errorf("%s: anonymous memory grew by %.2f MiB, want less than %v", source, grown, growthLimit)
	}
	if most := one.memory.highest(); most >= limit {
		err = errors.Join(err, fmt.Errorf("%s: %.1f MiB of anonymous memory, want less than %v", source, most, limit))
	}
	if most := many.memory.highest(); most < anonymousLimit {
		err = errors.Join(err, fmt.Errorf("%s: %.1f MiB of anonymous memory with %s: the threads do not allocate as libdcgm's do",
			source, most, many.arenas))
	}
	return err
}

// String returns some samples.
func (s samples) String() string {
	var course []string
	for _, divisor := range []time.Duration{120, 6, 3, 2} {
		part := s.from(s[len(s)-1].after / divisor)[0]
		course = append(course, fmt.Sprintf("%s after %v", short(part.mib), part.after.Round(time.Second)))
	}
	return "the most; " + strings.Join(append(course, short(s.last())+" at the end"), ", ")
}

func (s samples) last() float64 { return s[len(s)-1].mib }

func (s samples) highest() float64 {
	return slices.MaxFunc(s, func(a, b sample) int { return cmp.Compare(a.mib, b.mib) }).mib
}

// from returns the samples after a time.
func (s samples) from(after time.Duration) samples {
	i, _ := slices.BinarySearchFunc(s, after, func(one sample, after time.Duration) int { return cmp.Compare(one.after, after) })
	return s[i:]
}

// growth returns the growth after a time, in MiB, by the line through the samples with the least squares: single ones vary by more,
// with the garbage of Go.
func (s samples) growth(after time.Duration) float64 {
	s = s.from(after)
	if len(s) < 2 {
		return 0
	}
	var t, m float64 // their means
	for _, one := range s {
		t += one.after.Seconds() / float64(len(s))
		m += one.mib / float64(len(s))
	}
	var tm, tt float64
	for _, one := range s {
		tm += (one.after.Seconds() - t) * (one.mib - m)
		tt += (one.after.Seconds() - t) * (one.after.Seconds() - t)
	}
	return tm / tt * (s[len(s)-1].after - s[0].after).Seconds()
}

// measureArenaLatency measures what threads may wait for in one arena, by turns with one and with many: NVML's event of an XID to the
// kubelet, and scrapes.
func (b *bench) measureArenaLatency(ctx context.Context) error {
	b.progress("latencies with one arena and with many")
	return b.withArenaNodes(ctx, 0, []string{"mode: embedded"}, func(nodes []*arenaNode) error {
		events, scrapes := make([][]time.Duration, len(nodes)), make([][]time.Duration, len(nodes))
		drivers, scripts := make([]*driver, len(nodes)), make([]*engineScript, len(nodes))
		for i, n := range nodes {
			d, err := dialDriver(ctx, filepath.Join(n.dir, nvmlSocket))
			if err != nil {
				return err
			}
			defer func() { _ = d.Close() }()
			script, err := openScript(n.dir)
			if err != nil {
				return err
			}
			defer func() { _ = script.Close() }()
			drivers[i], scripts[i] = d, script
		}
		for round := range b.scale(1000) {
			for turn := range nodes {
				i := (round + turn) % len(nodes)
				n := nodes[i]
				if err := pause(ctx, 60*time.Millisecond); err != nil { // the agent judges events together, at most every 50 ms
					return err
				}
				took, err := b.measureDriverEvent(ctx, n.testNode, drivers[i], scripts[i], []int{round % engineGPUs})
				if err != nil {
					return err
				}
				events[i] = append(events[i], took)
				took10, _, err := scrape(ctx, n.URL+"/metrics", "gzip", 10)
				if err != nil {
					return err
				}
				scrapes[i] = append(scrapes[i], took10...)
			}
		}
		for _, of := range []struct {
			what string
			took [][]time.Duration
		}{{"NVML's event of an XID to kubelet, ", events}, {"/metrics with DCGM, gzip, ", scrapes}} {
			for i, n := range nodes {
				b.table.addDurations(of.what+n.arenas, of.took[i], noAim)
			}
			b.table.addRatio("the first of these two by the second", of.took[0], of.took[1])
		}
		return nil
	})
}
