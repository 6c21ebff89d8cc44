// Package doctor checks whether the agent could do its job on a node.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// CheckStatus is the result of a check.
type CheckStatus string

// The results of a check. Only CheckFail means that the agent cannot work.
const (
	CheckOK   CheckStatus = "ok"
	CheckInfo CheckStatus = "info"
	CheckWarn CheckStatus = "warn"
	CheckFail CheckStatus = "fail"
)

// Check is a line of a Report.
type Check struct {
	Name   string      `json:"name"`
	Status CheckStatus `json:"status"`
	Found  string      `json:"found"`
	Fix    string      `json:"fix"` // what to do; empty if nothing needs to be done
}

// Report is the output of `doctor`.
type Report struct {
	Checks []Check `json:"checks"`
	OK     bool    `json:"ok"` // no check failed
}

// Err returns an error that names the failed checks, nil if there is none.
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
	return errors.New("the agent cannot work here; failed checks: " + strings.Join(failed, ", "))
}

// String returns the report as a table, with each fix below its line.
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

// How long a check may take. Each may hang on a faulty node: a driver can block reads of its files, and DCGM blocks for a
// minute.
const (
	checkTimeout = 5 * time.Second
	dialTimeout  = 2 * time.Second
	dcgmTimeout  = 30 * time.Second // without persistence mode, DCGM takes some seconds to wake each GPU
)

// doctor has the inputs of the checks.
type doctor struct {
	loader      config.Loader
	host        host
	inContainer bool                   // the root directory is a container's, not the node's
	library     func() (string, error) // dcgm.Library: the path of libdcgm
	nvml        func() (string, error) // nvml.Path: the path of libnvidia-ml
	survey      surveyFunc
	engine      string // the default address of a host engine
	version     string // of this program
	mpsStatus   func(context.Context, mps.Root) (mps.Status, error)

	runtime func(ctx context.Context, kubeconfig string) (kube.Runtime, error)
}

// surveyFunc is dcgm.MeasureOnce, which changes nothing in an engine that others use.
type surveyFunc func(context.Context, dcgm.Config, *zap.Logger) (*health.Reading, []health.Field, error)

// Diagnose checks whether an agent with this configuration can work on this node, and what to do if not. It reads the node's /dev, /etc,
// /proc, /run, /sys, /usr and /var below root. It uses paths of the configuration as the agent does. version is this program's.
func Diagnose(ctx context.Context, loader config.Loader, root, version string) Report {
	h := host(root)
	d := doctor{
		loader: loader, host: h, library: dcgm.Library, nvml: nvml.Path, survey: dcgm.MeasureOnce, engine: "localhost:5555",
		version: version, mpsStatus: mps.QueryStatus, runtime: runtimeOf,
		inContainer: filepath.Clean(root) == "/" &&
			(os.Getenv("KUBERNETES_SERVICE_HOST") != "" || h.exists("/.dockerenv") || h.exists("/run/.containerenv")),
	}
	return d.run(ctx)
}

func (d doctor) run(ctx context.Context) Report {
	c, checks := d.checkConfiguration()

	ifPluginOn := func(run func(context.Context) []Check) func(context.Context) []Check {
		if !c.Plugin.Enabled {
			return pluginOff
		}
		return run
	}

	// These checks do not need DCGM, so they run concurrently with it.
	others := make(chan []Check, 1)
	go func() {
		var steps []step
		if c.Source.Resolved() == config.ModeSim {
			steps = []step{{"container runtime", simulated}, {"CDI specs", simulated}}
		} else {
			steps = []step{
				{"container runtime", ifPluginOn(func(context.Context) []Check { return d.checkRuntime(c.Plugin) })},
				{"CDI specs", ifPluginOn(func(context.Context) []Check { return d.checkCDI(c.Plugin) })},
				{"GPU operator", func(context.Context) []Check { return d.checkGPUOperator() }},
			}
		}
		steps = append(steps, d.sharingSteps(c)...)
		steps = append(append(steps, d.draSteps(c)...), d.cdiSteps(c)...)
		others <- runSteps(ctx, append(steps,
			step{"kubelet", ifPluginOn(func(ctx context.Context) []Check { return checkKubelet(ctx, c.Plugin.KubeletDir) })},
			step{"pod resources", func(ctx context.Context) []Check { return checkPodResources(ctx, c.Plugin.KubeletDir) }},
			step{"other plugins", func(ctx context.Context) []Check { return checkOtherPlugins(ctx, c.Plugin) }},
		))
	}()

	var (
		hardware []step
		s        survey
	)
	if c.Source.Resolved() == config.ModeSim {
		for _, n := range UnmatchedRefs(ctx, c) {
			checks = append(checks, noteCheck(n))
		}
		for _, name := range []string{"libdcgm", "host engine", "DCGM", "driver", "GPUs", "MIG", "device nodes"} {
			hardware = append(hardware, step{name, simulated})
		}
	} else {
		s = d.surveyDCGM(ctx, c.Source)
		if s.reading != nil { // otherwise these checks say why
			for _, n := range unmatchedRefs(c, s.reading) {
				checks = append(checks, noteCheck(n))
			}
		}
		checks = append(checks, s.checks()...)
		hardware = []step{
			{"driver", func(context.Context) []Check { return d.checkDriver(s, c.Plugin) }},
			{"GPUs", func(context.Context) []Check { return d.checkGPUs(s) }},
			{"MIG", func(context.Context) []Check { return checkMIG(s) }},
			{"device nodes", func(context.Context) []Check { return d.checkDeviceNodes(s) }},
		}
	}
	checks = append(checks, runSteps(ctx, append(hardware, d.eventSteps(c)...))...)
	checks = append(checks, <-others...)
	// The agent is asked last: a survey of a hung engine takes long, and /readyz may change meanwhile.
	checks = append(checks, runSteps(ctx, []step{
		{"agent", func(ctx context.Context) []Check { return checkAgent(ctx, c, s) }},
		{"own files", func(context.Context) []Check { return checkAgentFiles(c) }},
		{"metrics.listen", func(ctx context.Context) []Check { return checkPort(ctx, c) }},
		{"metrics.webConfigFile", func(context.Context) []Check { return checkWebConfig(c, time.Now()) }},
	})...)

	r := Report{Checks: checks, OK: true}
	for i := range r.Checks {
		r.Checks[i].Found = strings.Join(strings.Fields(r.Checks[i].Found), " ") // one line
		r.OK = r.OK && r.Checks[i].Status != CheckFail
	}
	return r
}

// noteCheck is the check of a note on the configuration.
func noteCheck(note string) Check {
	return Check{Name: "configuration", Status: CheckWarn, Found: note, Fix: "correct or remove it, unless you intend that"}
}

// checkConfiguration loads the configuration. If it is invalid, the other checks use the one that LoadOrLastGood returns.
func (d doctor) checkConfiguration() (config.Config, []Check) {
	const name = "configuration"
	from := d.loader.Path()
	if from == "" {
		from = "no file; defaults, environment and flags"
	}
	c, rejection, err := d.loader.LoadOrLastGood()
	if err == nil && rejection == nil {
		checks := []Check{{Name: name, Status: CheckOK, Found: from + "; source " + c.Source.Resolved()}}
		for _, w := range c.Notes {
			checks = append(checks, noteCheck(w))
		}
		return c, checks
	}
	used := "its valid values and the defaults"
	fix := "correct these errors; the agent does not start with them"
	if rejection != nil {
		err = rejection.Err
		used = fmt.Sprintf("the last good configuration, %s of %s", rejection.Path, rejection.Since.Format(time.RFC3339))
		fix = "correct these errors; until then the agent uses the last good configuration"
	}
	checks := []Check{{Name: name, Status: CheckFail, Found: "invalid: " + from + "; the other checks use " + used, Fix: fix}}
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); line != "" {
			checks = append(checks, failure(name, line, "correct it"))
		}
	}
	return c, checks
}

func pass(found string) []Check      { return []Check{{Status: CheckOK, Found: found}} }
func info(found string) []Check      { return []Check{{Status: CheckInfo, Found: found}} }
func warn(found, fix string) []Check { return []Check{{Status: CheckWarn, Found: found, Fix: fix}} }
func fail(found, fix string) []Check { return []Check{{Status: CheckFail, Found: found, Fix: fix}} }

func simulated(context.Context) []Check { return info("simulated") }

func pluginOff(context.Context) []Check { return info("not needed: plugin.enabled is false") }

// failure returns a failed check for an error text. The fix is the part after the semicolon, or else the default one.
func failure(name, text, defaultFix string) Check {
	found, fix, ok := strings.Cut(text, "; ")
	if !ok {
		fix = defaultFix
	}
	return Check{Name: name, Status: CheckFail, Found: found, Fix: fix}
}

// step is a named check. Its lines without a name get that name.
type step struct {
	name string
	run  func(context.Context) []Check
}

// runSteps runs the checks concurrently and returns their lines in the order of the steps.
func runSteps(ctx context.Context, steps []step) []Check {
	results := make([]chan []Check, len(steps))
	for i, s := range steps {
		results[i] = make(chan []Check, 1)
		go func() {
			lines, err := callWithTimeout(ctx, checkTimeout, func(ctx context.Context) ([]Check, error) { return s.run(ctx), nil })
			if err != nil {
				lines = warn(fmt.Sprintf("no result within %v", checkTimeout),
					"look for a hung driver or mount in the kernel log (dmesg)")
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

var errTimeout = errors.New("no result in time")

// callWithTimeout calls f. If f does not return in time, callWithTimeout abandons it and returns errTimeout, or ctx's error if
// that ends first.
func callWithTimeout[T any](ctx context.Context, timeout time.Duration, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errTimeout)
	defer cancel()
	var v T
	err, abandoned := health.CallOnce(ctx.Done(), 0, func() (err error) { v, err = f(ctx); return err })
	if abandoned != nil { // v is still in use
		var none T
		return none, context.Cause(ctx)
	}
	return v, err
}
