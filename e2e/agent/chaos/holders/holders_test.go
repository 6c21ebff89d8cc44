// Package holders plays random sequences of what operators, pods and faults do to a node, and checks that each device has one holder. One
// model plays on two levels: against the agent's packages in this process, with shortened intervals, and against the built binary.
package holders

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/agent/chaos/internal/apart"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/sequence"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

var (
	seed    = flag.Uint64("seed", fixedSeed, "seed of the sequences; 0: from the clock")
	steps   = flag.Int("steps", 5000, "steps in this process")
	worlds  = flag.Int("worlds", 16, "nodes on which these steps are played at once")
	slack   = flag.Float64("slack", 1, "factor of all time limits, for a busy machine")
	replay  = flag.String("replay", "", "play these steps instead, in the form that a failure prints")
	shrink  = flag.Int("shrink", 0, "how often to try to shorten a failing sequence")
	single  = flag.Bool("single", false, "no second release of the chart")
	only    = flag.String("only", "", "play only these kinds of steps, separated by commas")
	verbose = flag.Bool("log", false, "print what pods do, and the log of the agents after a failure")
	fixed   bool // the seed is fixedSeed
)

// fixedSeed is the seed that .ci/run plays.
const fixedSeed = 12

func TestMain(m *testing.M) {
	if code, started := apart.Run(); started {
		os.Exit(code)
	}
	flag.Parse()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano()) % 1_000_000
	}
	fixed = *seed == fixedSeed
	os.Exit(m.Run())
}

// In this process, a second is short, and the agents have more time for what takes the machine as long as ever.
const (
	second = 50 * time.Millisecond
	busy   = 4
)

// setup makes a node for a sequence.
type setup func(t *testing.T, seed uint64, log func(string, ...any)) (w *world, logs func() string, err error)

// inThisProcess returns nodes whose agents are packages in this process.
func inThisProcess(k newKubelet, v kubelettest.Version) setup {
	return func(t *testing.T, seed uint64, log func(string, ...any)) (*world, func() string, error) {
		dir, err := os.MkdirTemp("", "gna")
		if err != nil {
			return nil, nil, err
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		api := apiservertest.New(t, nodeName)
		snapshots := &health.Latest[health.Snapshot]{}
		first := gpus()
		snapshots.Store(first)
		w, err := newWorld(api, worldOptions{
			dir: dir, seed: seed, kubelet: k, version: v, second: second, patience: time.Duration(busy * 30 * *slack * float64(second)),
			devices: devicesOf(first), log: log,
			byName: map[string]string{
				"gpu-0": "GPU-0", "gpu-1": "GPU-1", "gpu-2": "GPU-2", "gpu-3": "GPU-3", "gpu-3-mig-1g10gb-19-0": "MIG-0",
				"gpu-3-mig-1g10gb-19-1": "MIG-1",
			},
		})
		if err != nil {
			return nil, nil, err
		}
		core, logs := observer.New(zapcore.InfoLevel)
		for i := range w.releases {
			w.releases[i].agent = &inProcess{
				view: view{dir, i}, faster: int(time.Second / second), snapshots: snapshots, connect: api.Client, log: zap.New(core),
			}
		}
		w.fault = func(gpu int, unhealthy bool) error {
			next := *snapshots.Load()
			next.Seq, next.At = next.Seq+1, time.Now()
			next.Devices = append([]health.DeviceState(nil), next.Devices...)
			for i := range next.Devices {
				d := &next.Devices[i]
				if d.Device.Index != gpu {
					continue
				}
				d.Verdict = health.Verdict{State: health.Healthy}
				if unhealthy {
					d.Verdict = health.Verdict{
						State:    health.Unhealthy,
						Findings: []health.Finding{{Cause: "xid-79", State: health.Unhealthy, Since: time.Now()}},
					}
				}
			}
			snapshots.Store(&next)
			return nil
		}
		return w, func() string {
			var lines []string
			for _, e := range logs.All() {
				lines = append(lines, fmt.Sprintf("%s %s %s: %s %v", e.Time.Format("05.000"), e.Level, e.LoggerName, e.Message, e.ContextMap()))
			}
			return strings.Join(lines, "\n")
		}, nil
	}
}

// devicesOf returns the devices of a snapshot.
func devicesOf(s *health.Snapshot) (all sequence.Node) {
	for i := range s.Devices {
		d := &s.Devices[i].Device
		all = append(all, sequence.Device{ID: string(d.ID), Parent: string(d.Parent), Memory: d.Memory, MIGMode: d.MIGMode})
	}
	return all
}

// play plays steps until they end or one fails.
func play(t *testing.T, make setup, seed uint64, next func() (sequence.Step, bool), counts *sequence.Counts,
	say func(string, ...any),
) (played []sequence.Step, err error) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log := func(string, ...any) {}
	if *verbose {
		log = say
	}
	w, logs, err := make(t, seed, log)
	if err != nil {
		return nil, err
	}
	stopped, ended := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		for stopped.Err() == nil {
			w.scheduler.watch(5 * w.second)
			<-time.After(w.second / 4)
		}
	})
	for s, more := next(); more; s, more = next() {
		played = append(played, s)
		begin := time.Now()
		changed, stepErr := w.apply(ctx, s)
		counts.Add(s.Kind, changed)
		if err = stepErr; err == nil {
			err = w.violated()
		}
		switch {
		case err != nil || !changed:
		case s.Overlap:
			<-time.After(w.pause(.5))
		default:
			<-time.After(w.second + w.pause(1))
			err = w.check(ctx)
		}
		log("%4d %v, changed %v, %v", len(played), s, changed, time.Since(begin).Round(time.Millisecond))
		if err != nil {
			err = fmt.Errorf("step %d, %v: %w\n%s", len(played), s, err, w.describe())
			break
		}
	}
	if closeErr := w.close(); err == nil && closeErr != nil {
		err = fmt.Errorf("at the end: %w\n%s", closeErr, w.describe())
	}
	ended()
	watching.Wait()
	if err != nil && *verbose {
		say("%s", logs())
	}
	return played, err
}

// sequenceOf plays a random sequence, or the one of -replay.
func sequenceOf(t *testing.T, make setup, seed uint64, n int, o sequence.Options, counts *sequence.Counts) {
	random := sequence.Random(seed, o)
	next := func() (sequence.Step, bool) {
		n--
		return random(), n >= 0
	}
	if *replay != "" {
		all, err := sequence.Parse(*replay)
		if err != nil {
			t.Fatal(err)
		}
		next = iterate(all)
	}
	played, err := play(t, make, seed, next, counts, t.Logf)
	if err == nil {
		return
	}
	t.Errorf("seed %d: %v\nsteps: %v\nrerun: go test -run '%s' -replay '%s'", seed, err, played, t.Name(), sequence.Format(played))
	if *shrink == 0 {
		return
	}
	short := sequence.Shrink(played, *shrink, func(s []sequence.Step) bool {
		_, err := play(t, make, seed, iterate(s), &sequence.Counts{}, func(string, ...any) {})
		return err != nil
	})
	t.Errorf("shortened: %v\n%s", short, sequence.Format(short))
}

func iterate(steps []sequence.Step) func() (sequence.Step, bool) {
	return func() (sequence.Step, bool) {
		if len(steps) == 0 {
			return sequence.Step{}, false
		}
		s := steps[0]
		steps = steps[1:]
		return s, true
	}
}

// TestInProcess plays the sequences against the agent's packages.
func TestInProcess(t *testing.T) {
	kubelets := append([]newKubelet{standInOf(kubelettest.V136), standInOf(kubelettest.V137)}, others()...)
	playAll(t, *worlds, *steps, func(i int) setup {
		v := kubelettest.V137
		if i%len(kubelets) == 0 {
			v = kubelettest.V136
		}
		return inThisProcess(kubelets[i%len(kubelets)], v)
	})
}

// playAll plays steps on several nodes at once.
func playAll(t *testing.T, worlds, steps int, make func(i int) setup) {
	var mu sync.Mutex
	var all sequence.Counts
	begin := time.Now()
	t.Logf("seed %d", *seed)
	t.Run("worlds", func(t *testing.T) {
		for i := range worlds {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				var counts sequence.Counts
				sequenceOf(t, make(i), *seed+uint64(i), steps/worlds, options(), &counts)
				mu.Lock()
				defer mu.Unlock()
				all.Merge(counts)
			})
		}
	})
	report(t, &all, begin, options())
}

// options returns the options of the flags.
func options() sequence.Options {
	o := sequence.Options{Single: *single}
	for k := range strings.SplitSeq(*only, ",") {
		if k != "" {
			o.Only = append(o.Only, sequence.Kind(k))
		}
	}
	return o
}

// report prints how often each kind of step changed something. With fixedSeed each must.
func report(t *testing.T, counts *sequence.Counts, begin time.Time, o sequence.Options) {
	t.Logf("%d steps in %v; changed something: %v", counts.Sum(), time.Since(begin).Round(time.Second), counts)
	if rare := counts.Rare(o); len(rare) > 0 && fixed && *replay == "" && !t.Failed() {
		t.Errorf("less than 1%% of the steps: %v", rare)
	}
}
