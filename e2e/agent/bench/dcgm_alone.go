package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// measureDCGMAlone measures agents that have XIDs from DCGM only: from the row of an XID in the engine to the kubelet, the reads of
// the engine, and the CPU time. The scripted engine measures once a second, at a phase that nothing tells and with 50 ms of jitter,
// and the phase changes with each reconnect and each step of the engine's clock. With -against, the agent of another version runs beside.
func (b *bench) measureDCGMAlone(ctx context.Context) error {
	if b.repo == "" {
		b.table.notMeasured("DCGM's row of an XID to kubelet: no -repo")
		return nil
	}
	// Together: the engine records XIDs when it measures, so that its measurements tell when a row may come. Apart: the thread that
	// records XIDs has a phase of its own, as the one of DCGM 4.6.
	if err := b.measurePace(ctx, "together", 500, 150); err != nil || b.quick {
		return err
	}
	return b.measurePace(ctx, "apart", 200, noAim)
}

// pacedAgent is an agent on an engine that keeps a pace, and what was measured of it.
type pacedAgent struct {
	name, binary string
	seed         uint64
	xids         int

	*testNode
	script *engineScript
	record *record

	took      []time.Duration // from rows to the kubelet
	idle, all float64         // CPU in percent of a core
}

func (b *bench) measurePace(ctx context.Context, pace string, xids int, aim float64) (err error) {
	b.progress("DCGM alone, %s", pace)
	dir, err := os.MkdirTemp("", "gna-bench")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := b.buildScripted(ctx, dir, scriptedDCGM); err != nil {
		return err
	}
	agents := []*pacedAgent{{name: "", binary: b.agent, seed: 1, xids: b.scale(xids)}}
	if b.against != "" {
		agents = append(agents, &pacedAgent{name: ", -against", binary: b.against, seed: 1, xids: b.scale(xids)})
	}
	idle := 2 * time.Minute
	if b.quick { // three engines take a third of the time
		agents, idle = nil, time.Second
		for seed := range uint64(3) {
			agents = append(agents, &pacedAgent{binary: b.agent, seed: seed, xids: b.scale(xids)/3 + 1})
		}
	}
	errs := make([]error, len(agents))
	var running sync.WaitGroup
	for i, a := range agents {
		running.Go(func() { errs[i] = a.run(ctx, dir, pace, idle) })
	}
	running.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if b.quick {
		for _, a := range agents[1:] {
			agents[0].took = append(agents[0].took, a.took...)
		}
		agents = agents[:1]
	}
	for _, a := range agents {
		what := "DCGM alone, " + pace + a.name + ": "
		if aim != noAim && a.name == "" {
			b.table.addMedian(what+"row to kubelet", a.took, aim)
			b.table.addDurations(what+"the same", a.took, 4*aim)
		} else {
			b.table.addDurations(what+"row to kubelet", a.took, noAim)
		}
		b.table.addValue(what+"most reads in a second", float64(a.record.mostReads()), "", noAim, "")
		b.table.addValue(what+"CPU, idle", a.idle, "% of a core", noAim, "")
		b.table.addValue(what+"CPU, with the XIDs", a.all, "% of a core", noAim, "")
	}
	return nil
}

// run starts the agent, measures and stops it.
func (a *pacedAgent) run(ctx context.Context, libraries, pace string, idle time.Duration) (err error) {
	dir, err := os.MkdirTemp("", "gna-bench")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	a.testNode, err = scripted{a.binary, libraries, dir}.start(ctx, "address: localhost:5555, events: off", "",
		fmt.Sprintf("DCGM_PACE=%d %s", a.seed, pace))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.stop()) }()
	if a.script, err = openScript(dir); err != nil {
		return err
	}
	defer func() { _ = a.script.Close() }()
	if a.record, err = openRecord(filepath.Join(dir, dcgmScript+".record")); err != nil {
		return err
	}
	defer func() { _ = a.record.file.Close() }()
	return a.measure(ctx, idle)
}

func (a *pacedAgent) measure(ctx context.Context, idle time.Duration) error {
	begin := time.Now()
	atBegin, err := cpuWithout(a.Pid(), scriptThread)
	if err != nil {
		return err
	}
	share := func() (float64, error) {
		cpu, err := cpuWithout(a.Pid(), scriptThread)
		return 100 * (cpu - atBegin).Seconds() / time.Since(begin).Seconds(), err
	}
	if err := pause(ctx, idle); err != nil {
		return err
	}
	if a.idle, err = share(); err != nil {
		return err
	}
	random := rand.New(rand.NewPCG(a.seed, 0)) //nolint:gosec // the same in each run
	for i := range a.xids {
		if every := max(8, a.xids/12); i%every == every-1 {
			if err := a.disturb(ctx, i/every); err != nil {
				return err
			}
		}
		if err := pause(ctx, time.Duration(random.Int64N(int64(time.Second)))); err != nil {
			return err
		}
		if err := a.measureXID(ctx, random.IntN(engineGPUs)); err != nil {
			return err
		}
	}
	a.all, err = share()
	return err
}

// disturb changes the engine's phase, in turn with a reconnect and with a step of the engine's clock.
func (a *pacedAgent) disturb(ctx context.Context, i int) error {
	switch i % 4 {
	case 1:
		return a.write("clock 3600\nmove\n")
	case 3:
		return a.write("clock 3598\nmove\n") // DCGM shows no new values until the clock has caught up
	}
	if err := a.write("dead\n"); err != nil {
		return err
	}
	if err := a.awaitSource(ctx, 0); err != nil {
		return err
	}
	if err := a.write("up\nmove\n"); err != nil {
		return err
	}
	return a.awaitSource(ctx, 1)
}

func (a *pacedAgent) write(lines string) error {
	_, err := a.script.WriteString(lines)
	return err
}

// awaitSource waits until the agent's source is up, 1, or not, 0.
func (a *pacedAgent) awaitSource(ctx context.Context, up float64) error {
	for begin := time.Now(); time.Since(begin) < patience; {
		page, err := a.Metrics(ctx)
		if err != nil {
			return err
		}
		if v, _ := page.Value("gpu_node_agent_source_up"); v == up {
			return nil
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
	return fmt.Errorf("gpu_node_agent_source_up is not %v after %v", up, patience)
}

func (a *pacedAgent) measureXID(ctx context.Context, gpu int) error {
	id := engineGPU(gpu)
	if err := a.script.report(xidNumber, gpu); err != nil {
		return err
	}
	if err := a.awaitHealth(ctx, id, false); err != nil {
		return err
	}
	at := time.Now()
	row, err := a.record.latestRow()
	if err != nil {
		return err
	}
	a.took = append(a.took, at.Sub(row))
	return a.clearXID(ctx, id)
}

// record is what the script writes of an engine that keeps a pace: when rows were there, and when the agent read.
type record struct {
	file  *os.File
	lines *bufio.Reader
	row   time.Time
	reads []time.Duration // of the machine's monotonic clock
}

func openRecord(path string) (*record, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &record{file: f, lines: bufio.NewReader(f)}, nil
}

// latestRow returns when the latest row was there.
func (r *record) latestRow() (time.Time, error) {
	r.row = time.Time{}
	for {
		line, err := r.lines.ReadString('\n')
		if errors.Is(err, io.EOF) && !r.row.IsZero() {
			return r.row, nil
		}
		if err != nil {
			return time.Time{}, fmt.Errorf("no row: %w", err)
		}
		var what string
		var gpu int
		var us int64
		if _, err := fmt.Fscan(strings.NewReader(line), &what, &gpu, &us); err != nil {
			return time.Time{}, fmt.Errorf("%q: %w", line, err)
		}
		switch what {
		case "row":
			r.row = time.UnixMicro(us)
		case "read":
			r.reads = append(r.reads, time.Duration(us)*time.Microsecond)
		}
	}
}

// mostReads returns the largest number of reads in a second. The calls of one poll are one read. So are the calls that follow
// a check because it has found an XID.
func (r *record) mostReads() (most int) {
	var reads []time.Duration
	for _, at := range r.reads {
		if n := len(reads); n == 0 || at-reads[n-1] > 40*time.Millisecond {
			reads = append(reads, at)
		}
	}
	for i, last := range reads {
		first := slices.IndexFunc(reads, func(at time.Duration) bool { return last-at < time.Second-10*time.Millisecond })
		most = max(most, i-first+1)
	}
	return most
}
