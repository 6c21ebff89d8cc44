// Package doctor checks whether the agent could do its job on a node.
package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
)

// CheckStatus is how a check came out.
type CheckStatus string

// The statuses. Only CheckFail means that the agent could not do its job.
const (
	CheckOK   CheckStatus = "ok"
	CheckInfo CheckStatus = "info"
	CheckWarn CheckStatus = "warn"
	CheckFail CheckStatus = "fail"
)

// Check is one line of what `doctor` found.
type Check struct {
	Name   string      `json:"name"`
	Status CheckStatus `json:"status"`
	Found  string      `json:"found"`
	Fix    string      `json:"fix"` // what to do about it; empty if it is right
}

// Report is all that `doctor` found.
type Report struct {
	Checks []Check `json:"checks"`
	OK     bool    `json:"ok"` // no check failed
}

// Err says which checks failed, nil if none.
func (r Report) Err() error {
	if r.OK {
		return nil
	}
	var failed []string
	for _, c := range r.Checks {
		if c.Status == CheckFail && (len(failed) == 0 || failed[len(failed)-1] != c.Name) {
			failed = append(failed, c.Name)
		}
	}
	return errors.New("the agent cannot do its job here: see " + strings.Join(failed, ", "))
}

// JSON returns the report as one document.
func (r Report) JSON() (string, error) {
	text, err := json.MarshalIndent(r, "", "  ")
	return string(text) + "\n", err
}

// String returns the report as a table, each fix below its line.
func (r Report) String() string {
	width := 0
	for _, c := range r.Checks {
		width = max(width, len(c.Name))
	}
	var b strings.Builder
	for _, c := range r.Checks {
		fmt.Fprintf(&b, "%-5s %-*s  %s\n", c.Status, width, c.Name, c.Found)
		if c.Fix != "" {
			fmt.Fprintf(&b, "%*s  fix: %s\n", len("fail  ")+width, "", c.Fix)
		}
	}
	return b.String()
}

// How long a check may take. What it looks at is most likely broken, so each may hang: a driver blocks
// whoever reads its files, and DCGM does so for a minute.
const (
	checkLimit = 5 * time.Second
	dialLimit  = 2 * time.Second
	dcgmLimit  = 30 * time.Second // it wakes every GPU, some seconds each without persistence mode
)

// doctor is what the checks look at.
type doctor struct {
	loader  config.Loader
	host    host
	inside  bool                   // a container, whose files are not the node's
	library func() (string, error) // dcgm.Library
	survey  surveyor
	engine  string // where a host engine listens by default
}

// surveyor is dcgm.Survey: it leaves nothing behind in an engine that others use too.
type surveyor func(context.Context, dcgm.Config, *zap.Logger) (*health.Reading, []health.Field, error)

// Diagnose checks whether an agent with this configuration could do its job here, and says what to do
// where it could not. The node's /dev, /etc, /proc, /run, /sys, /usr and /var are looked for below root;
// what the configuration names is taken as the agent would take it.
func Diagnose(ctx context.Context, loader config.Loader, root string) Report {
	h := host(root)
	d := doctor{
		loader: loader, host: h, library: dcgm.Library, survey: dcgm.MeasureOnce, engine: "localhost:5555",
		inside: filepath.Clean(root) == "/" &&
			(os.Getenv("KUBERNETES_SERVICE_HOST") != "" || h.exists("/.dockerenv") || h.exists("/run/.containerenv")),
	}
	return d.run(ctx)
}

func (d doctor) run(ctx context.Context) Report {
	c, checks := d.configuration()

	// What matters only to who hands GPUs out.
	serving := func(run func(context.Context) []Check) func(context.Context) []Check {
		if !c.Plugin.Enabled {
			return pluginIsOff
		}
		return run
	}

	// What needs no DCGM goes on beside it.
	others := make(chan []Check, 1)
	go func() {
		var steps []step
		if c.Source.Resolved() == config.ModeSim {
			steps = []step{{"container runtime", simulated}, {"CDI specs", simulated}}
		} else {
			steps = []step{
				{"container runtime", serving(func(context.Context) []Check { return d.checkRuntime(c.Plugin) })},
				{"CDI specs", serving(func(context.Context) []Check { return d.checkCDI(c.Plugin) })},
				{"GPU operator", func(context.Context) []Check { return d.checkOperator() }},
			}
		}
		others <- runSteps(ctx, append(steps,
			step{"kubelet", serving(func(ctx context.Context) []Check { return checkKubelet(ctx, c.Plugin.KubeletDir) })},
			step{"pod resources", func(ctx context.Context) []Check { return checkPodResources(ctx, c.Plugin.KubeletDir) }},
			step{"other plugins", func(ctx context.Context) []Check { return checkOtherPlugins(ctx, c.Plugin) }},
			step{"agent", func(ctx context.Context) []Check { return checkRunning(ctx, c) }},
			step{"own files", func(context.Context) []Check { return checkOwnFiles(c) }},
			step{"metrics.listen", func(ctx context.Context) []Check { return checkPort(ctx, c) }},
			step{"metrics.webConfigFile", func(context.Context) []Check { return checkWebConfig(c, time.Now()) }},
		))
	}()

	var hardware []step
	if c.Source.Resolved() == config.ModeSim {
		for _, name := range []string{"libdcgm", "host engine", "DCGM", "driver", "GPUs", "MIG", "device nodes"} {
			hardware = append(hardware, step{name, simulated})
		}
	} else {
		p := d.probe(ctx, c.Source)
		checks = append(checks, p.checks()...)
		hardware = []step{
			{"driver", func(context.Context) []Check { return d.checkDriver(p, c.Plugin) }},
			{"GPUs", func(context.Context) []Check { return d.checkGPUs(p) }},
			{"MIG", func(context.Context) []Check { return checkMIG(p) }},
			{"device nodes", func(context.Context) []Check { return d.checkNodes(p) }},
		}
	}
	checks = append(checks, runSteps(ctx, hardware)...)
	checks = append(checks, <-others...)

	r := Report{Checks: checks, OK: true}
	for i := range r.Checks {
		r.Checks[i].Found = oneLine(r.Checks[i].Found)
		r.OK = r.OK && r.Checks[i].Status != CheckFail
	}
	return r
}

// configuration returns the configuration in force, and what is wrong with it. The other checks are worth
// having with the defaults too.
func (d doctor) configuration() (config.Config, []Check) {
	const name = "configuration"
	from := d.loader.Path()
	if from == "" {
		from = "no file; defaults, environment and flags"
	}
	c, err := d.loader.Load()
	if err == nil {
		checks := []Check{{Name: name, Status: CheckOK, Found: from + "; source " + c.Source.Resolved()}}
		for _, w := range c.Notes {
			checks = append(checks, Check{Name: name, Status: CheckWarn, Found: w, Fix: "correct it, or remove it: it has no effect here"})
		}
		return c, checks
	}
	if c.Validate() != nil {
		c = config.DefaultConfig()
		from += "; the lines below are for the defaults"
	}
	checks := []Check{{Name: name, Status: CheckFail, Found: "bad: " + from, Fix: "correct what follows; the agent does not start with it"}}
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); line != "" {
			checks = append(checks, fault(name, line, "correct it"))
		}
	}
	return c, checks
}

func simulated(context.Context) []Check { return []Check{{Status: CheckInfo, Found: "simulated"}} }

func pluginIsOff(context.Context) []Check {
	return []Check{{Status: CheckInfo, Found: "not needed: the plugin is off (plugin.enabled)"}}
}

// fault is a failed check from an error's text. Errors here say what is wrong, a semicolon, and what
// would be right; one that does not gets the fix.
func fault(name, text, fix string) Check {
	found, better, ok := strings.Cut(text, "; ")
	if ok {
		fix = better
	}
	return Check{Name: name, Status: CheckFail, Found: found, Fix: fix}
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// plural is "1 GPU", "2 GPUs".
func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}

// step is a check that has not been made. Its lines have its name unless they have one.
type step struct {
	name string
	run  func(context.Context) []Check
}

// runSteps makes the checks all at once and returns their lines in the order of the steps.
func runSteps(ctx context.Context, steps []step) []Check {
	results := make([]chan []Check, len(steps))
	for i, s := range steps {
		results[i] = make(chan []Check, 1)
		go func() {
			lines, ok := bounded(ctx, checkLimit, s.run)
			if !ok {
				lines = []Check{{
					Status: CheckWarn, Found: fmt.Sprintf("no answer within %v", checkLimit),
					Fix: "look for a hung driver or mount in the kernel log (dmesg)",
				}}
			}
			for j := range lines {
				if lines[j].Name == "" {
					lines[j].Name = s.name
				}
			}
			results[i] <- lines
		}()
	}
	var all []Check
	for _, r := range results {
		all = append(all, <-r...)
	}
	return all
}

// bounded returns what f does, or false if that takes too long; f is left behind then.
func bounded[T any](ctx context.Context, limit time.Duration, f func(context.Context) T) (result T, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := make(chan T, 1)
	go func() { done <- f(ctx) }()
	select {
	case result = <-done:
		return result, true
	case <-ctx.Done():
		return result, false
	}
}
