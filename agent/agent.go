// Package agent puts the parts together and keeps them running.
//
//	health/dcgm or health/sim ─► Monitor ─► Snapshot ─► Latest ─┬─► plugin ─► kubelet
//	                                                            ├─► metrics ─► /metrics ─► Prometheus
//	                                                            ├─► agent/kube ─► API server
//	                                                            └─► status page, /api/v1/snapshot, /livez, /readyz
//
// Configuration flows the same way: each part follows a Latest of its section, and a reload stores a new
// value in the sections that have changed.
package agent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"os"
	"os/signal"
	"reflect"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/podlabels"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Agent is one running agent.
type Agent struct {
	loader config.Loader
	build  Build
	log    *zap.Logger
	level  zap.AtomicLevel

	logDropped func() uint64 // entries since the start

	// The sections of the configuration in force.
	source  health.Latest[sourceWanted]
	health  health.Latest[health.Config]
	plugin  health.Latest[plugin.Config]
	metrics health.Latest[metrics.Config]
	web     health.Latest[web.Config]
	shown   health.Latest[podlabels.Config] // of metrics.podLabels

	monitored   health.Latest[monitor.Source]
	snapshots   health.Latest[health.Snapshot]
	events      status.Events
	reloadEvery time.Duration
	reloaded    atomic.Pointer[metrics.Reload]
	loadedSum   [sha256.Size]byte      // Config.Sum of the configuration in force; used by reloadOn only, like bad
	bad         string                 // what was wrong with the newest configuration, as it was logged
	badConfig   atomic.Pointer[string] // the same for whoever asks; it counts while reloaded is not OK
	monitor     *monitor.Monitor
	devices     *plugin.Plugin
	totals      *metrics.Totals
	reporter    *kube.Reporter
	keeper      *statefile.File
	labels      *podlabels.Follower
	jobs        *metrics.Jobs
}

// Run loads the configuration and runs an agent until ctx ends.
func Run(ctx context.Context, loader config.Loader, build Build) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP) // to the end: one that comes too early or too late ends nothing
	signal.Ignore(syscall.SIGPIPE)     // the next line would end the agent when whoever reads its log is gone
	c, err := loader.Load()
	if err != nil {
		return err
	}
	level := zap.NewAtomicLevelAt(logLevel(c.Log))
	sink := newSink(os.Stderr, c.Log)
	defer func() { _ = sink.Close() }() // a log that cannot be written has nowhere to report it
	log := newLogger(sink, c.Log, level)
	plugin.CaptureGRPCLog(log.Named("grpc"))
	restore, err := captureStdLog(log)
	if err != nil {
		return err
	}
	defer restore()

	a := &Agent{loader: loader, build: build, log: log, level: level, logDropped: sink.Dropped, reloadEvery: reloadEvery}
	log.Info("starting", zap.String("version", build.Version), zap.String("revision", build.Revision),
		zap.String("config", cmp.Or(loader.Path(), "none: defaults")), zap.String("source", c.Source.Resolved()))
	a.apply(c)
	a.note(c)
	a.reloaded.Store(&metrics.Reload{OK: true, At: time.Now()})
	a.monitor = monitor.New(&a.health, &a.monitored, &a.snapshots, log.Named("health"))
	a.devices = plugin.New(&a.plugin, &a.snapshots, log.Named("plugin"))
	a.totals = metrics.NewTotals(&a.metrics, &a.snapshots, a.devices.Holders)
	a.monitor.SetHeld((&holding{holders: a.devices.Holders, hurry: a.devices.AskHolders}).held)
	a.labels = podlabels.New(podlabels.Options{Config: &a.shown, Node: nodeName(), Log: log.Named("kubernetes")})
	a.jobs = metrics.NewJobs(&a.metrics, log.Named("metrics"))
	boot := statefile.BootID()
	a.keeper = statefile.New(&a.health, &a.snapshots, boot, log.Named("health"))
	a.reporter = a.newReporter(a.remember(c, boot))
	err = supervise(ctx, log,
		part{name: "source", run: a.runSource},
		part{name: "monitor", run: a.monitor.Run},
		part{name: "memory", run: a.keeper.Run, after: []string{"monitor", "operator"}}, // what they found last is kept
		part{name: "operator", run: a.operatorServer().Run},
		part{name: "plugin", run: a.devices.Run},
		part{name: "kubernetes", run: a.reporter.Run},
		part{name: "events", run: func(ctx context.Context) error { return a.events.Follow(ctx, &a.snapshots) }},
		part{name: "totals", run: a.totals.Run},
		part{name: "pod labels", run: a.labels.Run},
		part{name: "jobs", run: a.jobs.Run},
		part{name: "web", run: a.webServer().Run},
		part{name: "reload", run: func(ctx context.Context) error { a.reloadOn(ctx, hup); return nil }},
	)
	log.Info("stopped")
	return err
}

// remember gives the monitor what the process before this one knew, and returns it.
func (a *Agent) remember(c config.Config, boot string) []health.DeviceState {
	memory, err := a.keeper.Load(c.Health.StateFile)
	if err != nil {
		a.log.Warn("what was known of the devices cannot be used in full", zap.String("key", "health.stateFile"), zap.Error(err))
	}
	recalled := memory.Restore(boot, monitorSourceOf(c.Source).SourceID, time.Now())
	for _, d := range recalled.Devices {
		if len(d.Verdict.Findings) > 0 || len(d.Verdict.Trips) > 0 {
			a.log.Info("remembered from before the start", zap.String("device", string(d.Device.ID)),
				zap.Stringer("state", d.Verdict.State), zap.String("cause", d.Verdict.Cause()))
		}
	}
	a.monitor.Restore(recalled)
	if s := a.snapshots.Load(); s != nil { // a detach is in force, which was told before the start
		return s.Devices
	}
	return recalled.Devices
}

// apply puts a configuration in force: each part sees only a change of its own section.
func (a *Agent) apply(c config.Config) {
	a.loadedSum = c.Sum
	a.level.SetLevel(logLevel(c.Log))
	storeChanged(&a.source, sourceOf(c))
	storeChanged(&a.health, c.Health)
	storeChanged(&a.plugin, c.Plugin)
	storeChanged(&a.metrics, c.Metrics)
	if w := cmp.Or(c.Web, &web.Config{}); a.web.Load() == nil || !a.web.Load().Equal(w) {
		a.web.Store(w)
	}
	storeChanged(&a.shown, podlabels.Config{Labels: c.Metrics.ShownPodLabels(), Kubeconfig: c.Health.Kubernetes.Kubeconfig})
}

// note logs what is worth saying of a configuration that is not wrong.
func (a *Agent) note(c config.Config) {
	for _, n := range c.Notes {
		a.log.Warn("configuration", zap.String("note", n))
	}
}

func storeChanged[T any](l *health.Latest[T], v T) {
	if was := l.Load(); was == nil || !reflect.DeepEqual(*was, v) {
		l.Store(&v)
	}
}
