// Mutants measures what the unit tests of packages notice: it plants mistakes in the code, one at a time, and runs the
// tests of the package. A seed draws the mistakes from all conditions, returns, constants, assignments and calls.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
)

// packages returns the packages that hold state or decide about devices.
func packages() []string {
	return []string{
		"health", "health/judge", "health/catalog", "health/monitor", "health/statefile", "health/nvml", "health/kernellog", "plugin",
		"plugin/dra", "plugin/mps", "plugin/memlimits", "agent/node", "agent/kube", "metrics/processes",
	}
}

func main() {
	seed := flag.Uint64("seed", 1, "what draws the mutants; equal seeds draw equal mutants from equal code")
	count := flag.Int("n", 20, "mutants per package that compile")
	dir := flag.String("results", "internal/mutants/results", "the directory of the results, one file per package and seed")
	again := flag.Bool("again", false, "try again what the results have")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: mutants [flags] [package directory]...; run it in the root of the repository")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	paths := flag.Args()
	if len(paths) == 0 {
		paths = packages()
	}
	var errs []error
	for _, path := range paths {
		if err := measure(ctx, path, *seed, *count, *dir, *again); err != nil {
			errs = append(errs, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	if err := errors.Join(errs...); err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// measurement is one run over the mutants of a package.
type measurement struct {
	source       *source
	earlier, now *results
	again        bool // try again what earlier has
	tmp          string
	trial        *trial // nil until a mutant needs it
}

// measure tries the mutants of one package and writes the results after each. It keeps what an earlier run found for the
// same code: the mutants that were noticed, and the survivors that have a reason. Tests that were written since then
// meet the other survivors.
func measure(ctx context.Context, path string, seed uint64, count int, dir string, again bool) error {
	source, err := load(ctx, path)
	if err != nil {
		return err
	}
	earlier, err := readResults(dir, path, seed)
	if err != nil {
		return err
	}
	now := &results{file: earlier.file, path: path, seed: seed, hash: source.hash}
	tmp, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	run := measurement{source: source, earlier: earlier, now: now, again: again, tmp: tmp}
	for _, m := range source.draw(seed) {
		if len(now.rows) == count {
			break
		}
		r := run.recall(newRow(m))
		if !r.noticed && (r.reason == "" || again || earlier.hash != source.hash) {
			if compiles, err := run.try(ctx, &m, &r); err != nil {
				return err
			} else if !compiles {
				continue
			}
		}
		now.rows = append(now.rows, r)
		if err := keepRest(now, earlier); err != nil {
			return err
		}
	}
	report(now)
	return now.write()
}

// recall completes a mutant with what an earlier run found: its reason, and if the code is the same, who noticed it.
func (n *measurement) recall(r row) row {
	for _, old := range n.earlier.rows {
		if !old.same(r) {
			continue
		}
		r.reason = old.reason
		if n.earlier.hash == n.source.hash && !n.again && old.place == r.place && (old.noticed || old.reason != "") {
			r.noticed, r.by = old.noticed, old.by
			break
		}
	}
	return r
}

// try plants a mutant, runs the tests and writes into r what they noticed. A mutant that does not compile is none.
func (n *measurement) try(ctx context.Context, m *mutant, r *row) (compiles bool, err error) {
	if n.trial == nil {
		if n.trial, err = newTrial(ctx, n.source, n.tmp); err != nil {
			return false, err
		}
	}
	if _, err := n.trial.compile(ctx, m); err != nil {
		return false, ctx.Err()
	}
	test, err := n.trial.run(ctx)
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	if r.noticed = err != nil; r.noticed {
		r.reason, r.by = "", test
	}
	if errors.Is(err, errLimit) {
		r.by = errLimit.Error()
	}
	fmt.Fprintf(os.Stderr, "%s: %s %s: %q -> %q: noticed %t %s\n", n.now.path, r.place, r.kind, r.old, r.new, r.noticed, r.by)
	return true, nil
}

// report prints the score of a package and its survivors without a reason.
func report(now *results) {
	noticed, total := now.score()
	fmt.Printf("%-20s seed %d: %d of %d noticed (%d %%)\n", now.path, now.seed, noticed, total, 100*noticed/max(total, 1))
	for _, r := range now.rows {
		if !r.noticed && r.reason == "" {
			fmt.Printf("  %s/%s %s: %s -> %s\n", now.path, r.place, r.function, r.old, r.new)
		}
	}
}

// keepRest writes what is known now, and what an earlier run of the same code knew beyond: a run that is interrupted loses
// nothing.
func keepRest(now, earlier *results) error {
	merged := *now
	if earlier.hash == now.hash {
		for _, old := range earlier.rows {
			if !slices.ContainsFunc(now.rows, func(r row) bool { return r.same(old) && r.place == old.place }) {
				merged.rows = append(slices.Clip(merged.rows), old)
			}
		}
	}
	return merged.write()
}
