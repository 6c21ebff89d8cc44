package agent

import (
	"context"
	"net/http"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/operator"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/response"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// webServer returns the server of the agent's pages.
func (a *Agent) webServer() *web.Server {
	return &web.Server{
		Metrics: &a.metricsConfig, Config: &a.webConfig, Pages: a.handler(), NotReady: a.notReady,
		Dropped: &a.connectionsDropped, Log: a.log.Named("web"),
	}
}

// operatorServer returns the server of the operator's socket.
func (a *Agent) operatorServer() *operator.Server {
	return &operator.Server{
		Config: &a.healthConfig, Snapshots: &a.snapshots, Monitor: a.monitor, MPS: a.mps, Processes: a.processes.Latest().Load,
		Ask: func(ctx context.Context, timeout time.Duration) offer.Facts {
			return a.plugin.Facts(a.plugin.AskHolders(ctx, timeout))
		},
		AwaitSaved:    a.stateDir.WaitWritten,
		EngineAddress: func() string { return a.sourceConfig.Load().Address }, Slices: a.dra.Slices, Labels: a.node.Labels,
		Log: a.log.Named("operator"),
	}
}

// handler serves the metrics, the probes and the status.
func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	renderer := response.NewRenderer()
	mux.Handle("GET /metrics", metrics.Handler(metrics.Sources{
		Config:    &a.metricsConfig,
		Snapshots: &a.snapshots,
		Totals:    a.totals,
		Plugin:    a.plugin.Status,
		Holders:   a.plugin.Holders,
		Reload:    func() metrics.Reload { return *a.lastReload.Load() },
		Now:       time.Now,
		Hostname:  nodeName(),
		Version:   a.build.Version,
		Revision:  a.build.Revision,
		PodLabels: a.podLabels.Labels,
		PodLabelsUp: func() (up, on bool) {
			s := a.podLabels.Status()
			return s.Up, s.Enabled
		},
		Jobs:      a.jobs.Of,
		Processes: a.processes.Latest(),
		Shares:    a.shares,
		Memory:    a.memoryLimits.Latest(),
		DRA:       a.dra.Status,
		Claims:    a.dra.Claims(),
		Kubernetes: func() (metrics.Kubernetes, bool) {
			s := a.reporter.Status()
			return metrics.Kubernetes{Writes: s.Writes, Events: s.Events, Dropped: s.Dropped, Errors: s.Errors}, s.Enabled || s.IdleEnabled
		},
		NodeWrites: func() (metrics.NodeWrites, bool) {
			s := a.nodeWriter.Status()
			return metrics.NodeWrites{Writes: s.Writes, Errors: s.Errors, Leftovers: s.Leftovers()}, s.Enabled
		},
		Unwritten: a.unwrittenFiles,
		StateFileRead: func() (read, on bool) {
			s := a.stateDir.Status()
			return s.Unread.IsZero(), s.Path != ""
		},
		CDIRuntime:         a.cdiRuntime,
		WaitsFor:           a.waitsFor,
		OtherPlugins:       a.plugin.OtherPlugins,
		NodeDevices:        a.nodeDevices,
		UnmatchedRefs:      a.unmatchedRefs,
		LogDropped:         a.logDropped,
		ConnectionsDropped: a.connectionsDropped.Load,
	}, renderer, zap.NewStdLog(a.log.Named("metrics"))))
	web.HandleProbes(mux, a.notReady, a.warnings)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("OK")) }) // as dcgm-exporter
	pages := status.NewPages(a.status, &a.history, a.log.Named("web"))
	mux.Handle("GET /{$}", renderer.Handler("page", pages.ServeHTML))
	mux.Handle("GET "+status.SnapshotPath, renderer.Handler("snapshot", pages.ServeJSON))
	return mux
}

// status returns the current status. Like a scrape, it only reads what the components have stored.
func (a *Agent) status() status.Node {
	in := status.Inputs{
		Node: nodeName(), Version: a.build.Version, Revision: a.build.Revision, Now: time.Now(), NotReady: a.notReady(),
		Lock:   *a.lock.State().Load(),
		Reload: *a.lastReload.Load(), Snapshot: a.snapshots.Load(), Plugin: a.plugin.Status(), DRA: a.dra.Status(), Claims: a.dra.Claims().Load(),
		Holders: a.plugin.Holders(), Processes: a.processes.Latest().Load(),
		Shares: a.shares(), IdleTimes: a.totals.IdleTimes(), Idle: a.nodeConfig.Load().Idle, Memory: a.memoryLimits.Latest().Load(),
		ConfigNotes: *a.configNotes.Load(), UnmatchedRefs: a.unmatchedRefs(),
		Kube: a.reporter.Status(), NodeObject: a.nodeWriter.Status(), StartupTaintReasons: a.startupTaintReasons(),
		StateDir:  a.stateDir.Status(),
		StateLoss: a.lossText(), Events: a.events.Latest(),
	}
	if err := a.configError.Load(); err != nil {
		in.ConfigError = *err
	}
	return status.New(in)
}

// unwrittenFiles returns the files that cannot be written, without which a restart would lose something.
func (a *Agent) unwrittenFiles() []durable.Failure {
	all := []durable.Failure{a.stateDir.Status().Failure(), a.dra.Status().Checkpoint}
	return slices.DeleteFunc(all, func(f durable.Failure) bool { return f.Err == "" })
}

// unmatchedRefs returns the device references of the configuration that match no device; nil while the devices are unknown.
func (a *Agent) unmatchedRefs() []health.UnmatchedRefs {
	snap := a.snapshots.Load()
	if !snap.Polled() {
		return nil
	}
	return config.UnmatchedRefs(*a.healthConfig.Load(), *a.pluginConfig.Load(), snap.Bindings, snap.Devices)
}

// notReady returns every reason why the agent cannot do its whole job now. A poll takes up to stallAfter before the
// source counts as stalled; a snapshot that is older than three polls and that time means that the monitor is stuck.
func (a *Agent) notReady() []string {
	p := a.plugin.Status()
	reasons := web.NotReady(a.snapshots.Load(), p, 3*a.pollInterval()+a.sourceConfig.Load().StallAfter)
	// A handover that waits for pods may last days, and must not stop a rolling update; see warnings.
	if s := a.dra.Status(); s.Err != "" && !s.WaitsForPods && s.Err != p.Err { // both wait for one lock
		reasons = append(reasons, "dra: "+s.Err)
	}
	return reasons
}

// waitsFor reports whether another agent serves the node instead of this one, and the name of its pod if that is known.
func (a *Agent) waitsFor() (holder string, waits bool) {
	s := a.lock.State().Load()
	if cfg := a.pluginConfig.Load(); cfg != nil && !cfg.Enabled { // a monitor beside that one
		return "", false
	}
	if s.Holder != nil {
		holder = s.Holder.Pod
	}
	return holder, s.Waits
}

// unlessWaiting returns a component that runs only while no other agent serves the node: that one writes to the API server.
func (a *Agent) unlessWaiting(run func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		for a.awaitServing(ctx, true) {
			serving, cancel := context.WithCancel(ctx)
			go func() {
				defer cancel()
				a.awaitServing(serving, false)
			}()
			err := run(serving)
			cancel()
			if err != nil {
				return err
			}
		}
		return nil
	}
}

// awaitServing waits until no other agent serves the node instead of this one, or until one does. It returns false when ctx ends.
func (a *Agent) awaitServing(ctx context.Context, want bool) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wake := health.Wake(ctx, &a.pluginConfig, a.lock.State())
	for ctx.Err() == nil {
		cfg, s := a.pluginConfig.Load(), a.lock.State().Load()
		if serves := !cfg.Enabled || s.KubeletDir != "" && !s.Waits; serves == want {
			return true
		}
		wait.For(ctx, wake)
	}
	return false
}

// pollInterval returns the time between two polls.
func (a *Agent) pollInterval() time.Duration { return a.healthConfig.Load().Interval }

func nodeName() string { return kube.NodeName() }
