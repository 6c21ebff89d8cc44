// Package chaos plays random faults against the built agent and checks the invariants after each step. Equal seeds give
// equal sequences.
package chaos

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/agent/chaos/internal/apart"
	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

var (
	seed      = flag.Uint64("seed", 0, "seed of the sequence; 0: from the clock")
	length    = flag.Duration("time", 20*time.Second, "duration")
	agentPath = flag.String("agent", "",
		"the agent's binary; \"\": $AGENT_BIN, or built from the repository, with the race detector if -raced is set")
	raced     = flag.Bool("raced", false, "build the agent with the race detector")
	replay    = flag.String("replay", "", "play these steps instead, in the format that a failure prints")
	kindsFlag = flag.String("only", "", "play only these kinds of steps, separated by commas; runs without any of them are skipped")
	shrinkFor = flag.Duration("shrink", 5*time.Minute, "how long to shorten a failing sequence; 0: do not")
	slack     = flag.Float64("slack", 1, "factor of all time limits, for a busy machine")
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(kubeletDirEnv); dir != "" {
		if err := serveKubelet(dir); err != nil {
			fmt.Fprintln(os.Stderr, "kubelet:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if code, started := apart.Run(); started {
		os.Exit(code)
	}
	os.Exit(mpstest.Main(m))
}

// build builds the agent.
func build(t *testing.T) string {
	if *agentPath != "" {
		return *agentPath
	}
	if built := os.Getenv("AGENT_BIN"); built != "" && !*raced {
		return built
	}
	path := filepath.Join(t.TempDir(), "gpu-node-agent")
	args := []string{"build", "-o", path}
	if *raced {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, ".")...)
	cmd.Dir = "../../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

// failed is the failure of a sequence.
type failed struct {
	err error
	log string
}

// player is a world that a sequence plays in.
type player interface {
	apply(context.Context, step) error
	check(context.Context) error
	end() error
	summary() string
	description() string
	logged() *buffer
}

// play plays steps until they end or one fails, and returns the played steps.
func play(t *testing.T, with setup, next func() (step, bool), say func(string, ...any)) (played []step, f *failed) {
	ctx := t.Context()
	var w player
	var err error
	if with.mps {
		w, err = newMPSWorld(ctx, t, with)
	} else {
		w, err = newWorld(ctx, with)
	}
	if err != nil {
		return nil, &failed{err: fmt.Errorf("start: %w", err)}
	}
	say("%s", w.description())
	for s, more := next(); more && ctx.Err() == nil; s, more = next() {
		played = append(played, s)
		begin := time.Now()
		err := w.apply(ctx, s)
		if err == nil && s.kind != calm && !s.immediate {
			err = w.check(ctx)
		}
		say("%4d %-18v %8v  %s", len(played), s, time.Since(begin).Round(time.Millisecond), w.summary())
		if err != nil {
			f = &failed{err: fmt.Errorf("step %d, %v: %w", len(played), s, err)}
			break
		}
	}
	if f == nil {
		say("%s", w.description())
	}
	log := w.logged()
	if err := w.end(); err != nil && f == nil {
		f = &failed{err: fmt.Errorf("at the end: %w", err)}
	}
	if f != nil {
		f.log = log.last(6000)
	}
	return played, f
}

// TestChaos runs the agent with simulated GPUs, with their events if the seed is even, and for the last third of the time with DCGM's
// interface and a scripted library: first as a host engine, then embedded in the agent. If the seed is a multiple of four, it also runs the
// agent with GPUs that are shared by MPS, for a sixth of the time more.
func TestChaos(t *testing.T) {
	agent := build(t)
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano()) % 1_000_000
	}
	t.Run("sim", func(t *testing.T) { chaos(t, setup{agent: agent, events: *seed%2 == 0}, simKinds(), *length-*length/3) })
	// Not in each run: the agent waits long for a daemon that hangs.
	if *seed%4 == 0 || *replay != "" || *kindsFlag != "" {
		t.Run("mps", func(t *testing.T) { chaos(t, setup{agent: agent, mps: true}, mpsKinds(), *length/6) })
	}
	t.Run("host", func(t *testing.T) {
		chaos(t, setup{agent: agent, library: compile(t), host: true}, hostKinds(), *length/6)
	})
	t.Run("embedded", func(t *testing.T) { chaos(t, setup{agent: agent, library: compile(t)}, embeddedKinds(), *length/6) })
}

// setup is the environment of a sequence.
type setup struct {
	agent   string // binary
	library string // a directory with libdcgm.so.4, "" for simulated GPUs
	host    bool   // the library stands for the client of a host engine
	mps     bool   // GPUs are shared by MPS
	events  bool   // the agent follows the events of the simulated driver
}

// chaos plays random steps for a time, or the steps of -replay.
func chaos(t *testing.T, with setup, kinds []kind, duration time.Duration) {
	if kinds = selectKinds(kinds, *kindsFlag); len(kinds) == 0 {
		t.Skipf("none of the kinds %s", *kindsFlag)
	}
	end, from, n := time.Now().Add(duration), sequence(*seed, kinds), 0
	next := func() (step, bool) {
		if n%calmInterval == 0 && n > 0 && time.Now().After(end) { // it ends after a calm
			return step{}, false
		}
		n++
		return from(), true
	}
	if *replay != "" {
		steps, err := parse(*replay)
		if err != nil {
			t.Fatal(err)
		}
		next = iterate(steps)
	}
	t.Logf("seed %d", *seed)
	played, f := play(t, with, next, t.Logf)
	if f == nil {
		t.Logf("%d steps, every invariant holds", len(played))
		return
	}
	t.Errorf("seed %d: %v\nend of the agent's log:\n%s\nsteps: %s", *seed, f.err, f.log, formatSteps(played))
	what := violatedInvariant(f.err)
	if *shrinkFor == 0 || what == "" || len(played) < 2 {
		return
	}
	var last *failed
	short := shrink(played, time.Now().Add(*shrinkFor), func(steps []step) bool {
		_, f := play(t, with, iterate(steps), func(string, ...any) {})
		same := f != nil && violatedInvariant(f.err) == what
		if same {
			last = f
		}
		return same
	})
	if last == nil {
		t.Errorf("not reproduced")
		return
	}
	t.Errorf("shortened to %d of %d steps: %v\nrerun: go test . -run '%s' -replay '%s'", len(short), len(played), last.err, t.Name(),
		formatSteps(short))
}

// violatedInvariant returns the violated invariant, or "" for another failure.
func violatedInvariant(err error) string {
	if v, ok := errors.AsType[violation](err); ok {
		return v.what
	}
	return ""
}

func iterate(steps []step) func() (step, bool) {
	return func() (step, bool) {
		if len(steps) == 0 {
			return step{}, false
		}
		s := steps[0]
		steps = steps[1:]
		return s, true
	}
}
