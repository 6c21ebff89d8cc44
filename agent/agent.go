// Package agent wires the components of the agent, supervises them and reloads the configuration.
//
//	health/dcgm or health/sim ─► Monitor ─► Snapshot ─► Latest ─┬─► plugin ─► kubelet
//	                                                            ├─► metrics ─► /metrics ─► Prometheus
//	                                                            ├─► agent/kube ─► API server
//	                                                            └─► status page, /api/v1/snapshot, /livez, /readyz
//
// Configuration flows the same way: each component follows the Latest of its section, and a reload stores the sections
// that changed.
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
	"github.com/gpu-node-agent/gpu-node-agent/agent/mounts"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/podlabels"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/logonce"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Agent is a running agent.
type Agent struct {
	loader config.Loader
	build  Build
	log    *zap.Logger
	level  zap.AtomicLevel

	logDropped         func() uint64 // the number of dropped log entries since the start
	connectionsDropped atomic.Uint64 // by the web server

	// The sections of the configuration in force.
	sourceConfig       health.Latest[sourceConfig]
	indexEntries       health.Latest[health.IndexEntries]
	healthConfig       health.Latest[judge.Config]
	pluginConfig       health.Latest[plugin.Config]
	metricsConfig      health.Latest[metrics.Config]
	webConfig          health.Latest[web.Config]
	podLabelsConfig    health.Latest[podlabels.Config]
	processesConfig    health.Latest[processes.Config]
	memoryLimitsConfig health.Latest[memlimits.Config]
	nodeConfig         health.Latest[node.Config]
	runtimeConfig      health.Latest[kube.RuntimeConfig]
	served             health.Latest[[]byte]   // servedSection
	cleaned            health.Latest[string]   // kube.CleanedAnnotation of the agent's pod
	configNotes        health.Latest[[]string] // Config.Notes
	lastGood           health.Latest[[]byte]   // Config.LastGood of the newest configuration that fits the devices

	// The last reload.
	reloadInterval time.Duration
	lastReload     atomic.Pointer[view.Reload]
	loadedSum      [sha256.Size]byte // Config.Sum of the configuration in force; for reloadOn only, like loggedError
	loggedError    logonce.State     // of the configuration
	files          []byte            // Config.LastGood of the configuration in force; for reloadOn only, like settled
	settled        bool              // the configuration in force fits the devices of the node
	keepLastGood   bool              // the last good configuration stays to the end: pods may have what only that serves

	sources      health.Latest[monitor.Source]
	snapshots    health.Latest[health.Snapshot]
	pciGPUs      health.Latest[[]string]    // their IDs on the PCI bus
	runtime      health.Latest[cdi.Runtime] // the container runtime of the node; empty until it was asked for
	events       status.Events
	history      status.History
	monitor      *monitor.Monitor
	stateDir     *statefile.Dir
	lock         *nodelock.Lock
	plugin       *plugin.Plugin
	dra          *dra.Driver
	totals       *metrics.Totals
	podLabels    *podlabels.Follower
	processes    *processes.Follower
	mps          *mps.Follower
	memoryLimits *memlimits.Follower
	jobs         *metrics.Jobs
	reporter     *kube.Reporter
	node         *node.Follower
	nodeWriter   *kube.NodeWriter
	mounts       *mounts.Watcher
	loss         *mounts.Loss // of the state directory; nil if an earlier process did not lose it
}

// Run loads the configuration and runs an agent until ctx ends.
func Run(ctx context.Context, loader config.Loader, build Build) error {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP) // until the end: a signal during the start or the shutdown must not end the process
	signal.Ignore(syscall.SIGPIPE)     // or the next log entry would end the process after its reader has exited
	c, rejection, err := loader.LoadOrLastGood()
	if err != nil {
		return err
	}
	boot := statefile.BootID()
	from := start{Config: c, Rejection: rejection, former: &c.Plugin}
	if rejection == nil {
		from = checkStart(ctx, loader, c, boot)
		c, rejection = from.Config, from.Rejection
	}
	level := zap.NewAtomicLevelAt(logLevel(c.Log))
	log, sink := newLogger(os.Stderr, c.Log, level)
	defer func() { _ = sink.Close() }() // there is nowhere to report that the log cannot be written
	plugin.CaptureGRPCLog(log.Named("grpc"))
	kube.CaptureLog(log.Named("kubernetes"))
	restore, err := captureStdLog(log)
	if err != nil {
		return err
	}
	defer restore()

	log.Info("starting", zap.String("version", build.Version), zap.String("revision", build.Revision),
		zap.String("config", cmp.Or(loader.Path(), "none: defaults")), zap.String("source", c.Source.Resolved()))
	a := newAgent(c, log, level, boot)
	a.loader, a.build, a.logDropped = loader, build, sink.Dropped
	a.lock.SetConfig(loader.Path())
	a.keepLastGood = from.keepLastGood
	a.dra.SetFormer(from.former)
	if rejection != nil {
		a.reject(rejection.Err, "start", rejection.Since)
	}
	a.logNotes(c)
	a.monitor.SetHeld((&holderCheck{facts: a.facts, refresh: a.plugin.RefreshHolders}).mayBeHeld)
	a.readLoss()
	a.reporter = a.newReporter(a.restore(ctx, boot))
	if e := a.lossEvent(); e != nil {
		a.reporter.Report(*e)
	}
	err = supervise(ctx, log,
		component{name: "source", run: a.runSource},
		component{name: "monitor", run: a.monitor.Run},
		// to save their last changes
		component{name: "state", run: a.stateDir.Run, after: []string{"monitor", "operator", "totals", "node"}},
		component{name: "mounts", run: a.mounts.Run},
		component{name: "operator", run: a.operatorServer().Run},
		component{name: "lock", run: a.lock.Run, after: []string{"plugin", "dra"}}, // it stays to the end of the process
		component{name: "plugin", run: a.plugin.Run},
		component{name: "dra", run: a.dra.Run},
		component{name: "kubernetes", run: a.unlessWaiting(a.reporter.Run)},
		component{name: "host", run: a.node.Examine},
		component{name: "node", run: a.unlessWaiting(a.node.Run)},
		component{name: "node writer", run: a.unlessWaiting(a.nodeWriter.Run), after: []string{"node"}}, // to remove its labels at last
		component{name: "claims without driver", run: a.unlessWaiting(a.reportOrphans)},
		component{name: "runtime", run: a.followRuntime},
		component{name: "events", run: func(ctx context.Context) error { return a.events.Follow(ctx, &a.snapshots) }},
		component{name: "history", run: func(ctx context.Context) error { return a.history.Follow(ctx, &a.snapshots, a.pollInterval) }},
		component{name: "totals", run: a.totals.Run},
		component{name: "pod labels", run: a.podLabels.Run},
		component{name: "jobs", run: a.jobs.Run},
		component{name: "pci", run: a.followPCI},
		component{name: "web", run: a.webServer().Run},
		component{name: "reload", run: func(ctx context.Context) error { a.reloadOn(ctx, hup); return nil }},
	)
	a.mounts.RecordLoss()
	log.Info("stopped")
	return err
}

// newAgent returns an agent with a configuration and its components, except the reporter. They do not run yet.
func newAgent(c config.Config, log *zap.Logger, level zap.AtomicLevel, boot string) *Agent {
	a := &Agent{log: log, level: level, reloadInterval: reloadInterval}
	a.apply(c)
	a.lastReload.Store(&view.Reload{OK: true, At: time.Now()})
	a.monitor = monitor.New(&a.healthConfig, &a.sources, &a.snapshots, log.Named("health"))
	a.monitor.SetIndexEntries(&a.indexEntries)
	a.stateDir = statefile.New(c.StateDir, &a.snapshots, &a.lastGood, boot, log.Named("health"))
	a.lock = nodelock.New(nodelock.Self(), log.Named("lock"))
	a.plugin = plugin.New(&a.pluginConfig, &a.snapshots, log.Named("plugin"))
	a.plugin.SetLock(a.lock)
	a.stateDir.AddSection(servedSection, &a.served)
	noPlugin := func() bool { return a.stateDir.LacksSection(servedSection) }
	a.plugin.SetNote(plugin.Note{
		Write: func(ctx context.Context) error {
			a.served.Store(new([]byte("true")))
			return a.stateDir.WaitSection(ctx, servedSection)
		},
		Missing: noPlugin,
	})
	a.mps = mps.NewFollower(mps.Options{
		Desired: a.plugin.MPS(), Facts: a.facts, Log: log.Named("mps"),
		Root:      func() mps.Root { return mps.Root(a.pluginConfig.Load().Sharing.MPS.Root) },
		Simulated: func() bool { return a.sourceConfig.Load().Resolved() == config.ModeSim },
	})
	a.monitor.SetMPS(a.mps.State())
	a.node = a.newNode(nvml.Properties(log.Named("nvml")), log.Named("node"))
	a.dra = dra.New(dra.Options{
		Config: &a.pluginConfig, Snapshots: &a.snapshots, Node: nodeName(), BootID: boot, PluginReleased: a.plugin.PluginReleased(),
		Holders:    a.plugin.LatestHolders(),
		Ask:        a.plugin.AskHolders,
		Runtime:    &a.runtime,
		NoPlugin:   noPlugin,
		Connect:    kube.Connector(func() string { return a.healthConfig.Load().Kubernetes.Kubeconfig }),
		MPS:        a.plugin.MPS(),
		Lock:       a.lock,
		Simulated:  func() bool { return a.sourceConfig.Load().Resolved() == config.ModeSim },
		Properties: a.node.Known(), AwaitProperties: a.node.AwaitKnown,
		Log: log.Named("dra"),
	})
	a.stateDir.AddSection(draSection, a.dra.Saved())
	a.plugin.SetRuntime(&a.runtime)
	a.plugin.SetDRAReleased(a.dra.DRAReleased())
	a.plugin.SetClaims(a.dra.ClaimDevice, a.dra.Prepared())
	a.memoryLimits = a.newMemoryLimits(log.Named("memory limits"))
	a.plugin.SetMemoryCapabilities(a.memoryLimits.Capabilities())
	a.dra.SetMemoryCapabilities(a.memoryLimits.Capabilities())
	a.podLabels = podlabels.New(podlabels.Options{Config: &a.podLabelsConfig, Node: nodeName(), Log: log.Named("kubernetes")})
	a.processes = processes.New(processes.Options{
		Config: &a.processesConfig, Snapshots: &a.snapshots, Holders: a.plugin.Holders, PodByUID: a.podLabels.PodByUID,
		Log: log.Named("processes"),
	})
	a.totals = metrics.NewTotals(metrics.TotalsInputs{
		Config: &a.metricsConfig, Snapshots: &a.snapshots, Holders: a.plugin.Holders, Processes: a.processes.Latest().Load,
		Identity: func() metrics.Identity {
			return metrics.Identity{PodLabels: a.podLabels.Labels, Allocated: a.lastAllocation, Allocates: a.pluginConfig.Load().Enabled}
		},
	})
	a.stateDir.AddSection(idleSection, a.totals.Saved())
	a.jobs = metrics.NewJobs(&a.metricsConfig, log.Named("metrics"))
	a.stateDir.AddSection(nodeSection, a.node.Saved())
	a.nodeWriter = kube.NewNodeWriter(kube.NodeOptions{
		Desired: a.node.Desired(), Written: a.node.Written(), Kubeconfig: func() string { return a.healthConfig.Load().Kubernetes.Kubeconfig },
		Node: nodeName(), Namespace: kube.PodNamespace(), Log: log.Named("kubernetes"),
	})
	a.mounts = a.newMounts()
	return a
}

func (a *Agent) newNode(read readProperties, log *zap.Logger) *node.Follower {
	return node.NewFollower(node.Options{
		Config: &a.nodeConfig, Plugin: &a.pluginConfig, Health: &a.healthConfig, Snapshots: &a.snapshots, Node: nodeName(),
		Serving: a.plugin.Serving, OffersAll: a.offersAll,
		SysFS: a.sysFS, Properties: propertiesOf(&a.sourceConfig, &a.snapshots, read), Cleaned: &a.cleaned, Log: log,
	})
}

// restoreNode gives the saved labels to a follower.
func restoreNode(saved statefile.Node, boot string, restore func(text []byte, sameBoot bool) error) error {
	text := saved.Sections[nodeSection]
	if text == nil {
		return nil
	}
	return restore(text, saved.Section(nodeSection, boot) != nil)
}

// sysFS returns where the host of the GPUs has its sysfs, empty if they are on another host. Simulated GPUs are in this machine.
func (a *Agent) sysFS() string {
	if !isLocal(a.sourceConfig.Load().SourceConfig) {
		return ""
	}
	return "/sys"
}

// The sections of the state directory.
const (
	idleSection   = "idle"         // idle times
	nodeSection   = "node"         // the labels of the node, and where they were written
	servedSection = "devicePlugin" // exists if a device plugin has served in this boot
	draSection    = "dra"          // since when the devices are handed over
)

// restore gives the saved state of the previous process to the components, and returns the restored devices. It waits 10 s at most for the
// disk; if the disk answers later, restoreLate continues.
func (a *Agent) restore(ctx context.Context, boot string) []health.DeviceState {
	saved, err := a.stateDir.LoadInTime(ctx, func(saved statefile.Contents, err error) { a.restoreLate(saved, err, boot) })
	if err != nil {
		a.log.Warn("cannot restore all saved findings", zap.String("flag", "--state-dir"), zap.Error(err))
		a.served.Store(new([]byte("true"))) // a device plugin may have served
	}
	if !a.stateDir.Status().Unread.IsZero() {
		a.monitor.AwaitRestore()
		return nil
	}
	a.restoreSections(saved.Node, boot, a.node.Restore)
	restored := a.restoredDevices(saved, boot)
	a.monitor.Restore(restored)
	if s := a.snapshots.Load(); s != nil { // a detach from before the start is still in force
		return s.Devices
	}
	return restored.Devices
}

// restoreLate gives the running components what could be read of the saved state only after the start, or nothing with an error.
func (a *Agent) restoreLate(saved statefile.Contents, err error, boot string) {
	if err == nil {
		a.log.Info("read the state after the start", zap.String("flag", "--state-dir"))
	} else {
		a.log.Warn("cannot restore all saved findings", zap.String("flag", "--state-dir"), zap.Error(err))
	}
	a.restoreSections(saved.Node, boot, a.node.RestoreLate)
	a.monitor.RestoreLate(a.restoredDevices(saved, boot))
}

// restoreSections gives the sections of a saved state to their components.
func (a *Agent) restoreSections(saved statefile.Node, boot string, restoreLabels func(text []byte, sameBoot bool) error) {
	if text := saved.Section(idleSection, boot); text != nil {
		if err := a.totals.Restore(text); err != nil {
			a.log.Warn("cannot restore saved times", zap.String("flag", "--state-dir"), zap.Error(err))
		}
	}
	if text := saved.Sections[draSection]; text != nil { // a handover may last over reboots
		if err := a.dra.Restore(text); err != nil {
			a.log.Warn("cannot restore the beginning of a handover", zap.String("flag", "--state-dir"), zap.Error(err))
		}
	}
	if err := restoreNode(saved, boot, restoreLabels); err != nil {
		a.log.Warn("cannot restore the labels of the node", zap.String("flag", "--state-dir"), zap.Error(err))
	}
}

// restoredDevices returns the saved state for the source in force, and logs the devices.
func (a *Agent) restoredDevices(saved statefile.Contents, boot string) statefile.Restored {
	restored := saved.Restore(boot, sourceID(a.sourceConfig.Load().SourceConfig), time.Now())
	for _, d := range restored.Devices {
		if len(d.Verdict.Findings) > 0 || len(d.Memory.Trips) > 0 {
			a.log.Info("restored a device", zap.String("device", string(d.Device.ID)),
				zap.Stringer("state", d.Verdict.State), zap.String("cause", d.Verdict.Cause()))
		}
	}
	return restored
}

// apply puts a configuration in force. A component sees a change of its own section only.
func (a *Agent) apply(c config.Config) {
	a.loadedSum, a.files, a.settled = c.Sum, c.LastGood, false
	a.level.SetLevel(logLevel(c.Log))
	a.storeIndexEntries(c.Health, c.Plugin, false)
	storeChanged(&a.configNotes, c.Notes)
	storeChanged(&a.sourceConfig, sourceConfigOf(c))
	storeChanged(&a.healthConfig, c.Health)
	storeChanged(&a.pluginConfig, c.Plugin)
	storeChanged(&a.metricsConfig, c.Metrics)
	if w, current := cmp.Or(c.Web, &web.Config{}), a.webConfig.Load(); current == nil || !current.Equal(w) {
		a.webConfig.Store(w)
	}
	storeChanged(&a.processesConfig, c.Metrics.Processes)
	c.Node.Idle.Processes = c.Metrics.Processes.Enabled
	storeChanged(&a.nodeConfig, c.Node)
	storeChanged(&a.runtimeConfig, kube.RuntimeConfig{Needed: c.Plugin.NeedsCDI(), Kubeconfig: c.Health.Kubernetes.Kubeconfig})
	storeChanged(&a.memoryLimitsConfig, c.Plugin.MemoryLimits(c.Metrics.Processes.PodLogs))
	storeChanged(&a.podLabelsConfig, podlabels.Config{Labels: c.Metrics.SelectedPodLabels(), Kubeconfig: c.Health.Kubernetes.Kubeconfig})
}

// storeIndexEntries stores the entries that name a GPU by its index, before the sections that contain them. The entries are final once the
// configuration is known to fit the devices.
func (a *Agent) storeIndexEntries(h judge.Config, p plugin.Config, final bool) {
	storeChanged(&a.indexEntries, health.IndexEntries{Refs: append(h.IndexRefs(), p.IndexRefs()...), Final: final})
}

// logNotes logs the notes on a valid configuration.
func (a *Agent) logNotes(c config.Config) {
	for _, n := range c.Notes {
		a.log.Warn("configuration", zap.String("note", n))
	}
}

func storeChanged[T any](l *health.Latest[T], v T) {
	if current := l.Load(); current == nil || !reflect.DeepEqual(*current, v) {
		l.Store(&v)
	}
}

// newReporter returns the reporter to the API server. restored are the devices from before the start.
func (a *Agent) newReporter(restored []health.DeviceState) *kube.Reporter {
	return kube.New(kube.Options{
		Config: &a.healthConfig, Snapshots: &a.snapshots, Node: nodeName(), Holders: a.holdingPods,
		Unschedulable: a.plugin.Unschedulable, Idle: a.idlePods, Saved: restored, Log: a.log.Named("kubernetes"),
	})
}

// idlePods returns the pods that node.idle reports.
func (a *Agent) idlePods() kube.IdlePods {
	return node.IdlePods(a.nodeConfig.Load().Idle, a.snapshots.Load(), a.plugin.Holders(), a.totals.IdleTimes())
}

// facts returns what plugin/offer decides from: who has the devices.
func (a *Agent) facts() offer.Facts { return a.plugin.Facts(a.plugin.Holders()) }

// lastAllocation returns when the device that a container holds was last allocated or prepared; zero if that is unknown.
func (a *Agent) lastAllocation(h podresources.Holder) time.Time {
	if h.ByClaim() {
		return a.dra.PreparedAt(h)
	}
	return a.plugin.LastAllocation(h.DeviceID)
}

// holdingPods returns the pods that hold a device.
func (a *Agent) holdingPods(id health.DeviceID) []kube.Pod {
	var pods []kube.Pod
	for _, h := range a.plugin.Holders().By[id] {
		pods = append(pods, kube.Pod{Namespace: h.Namespace, Name: h.Pod})
	}
	return pods
}
