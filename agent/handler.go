package agent

import (
	"context"
	"net/http"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/operator"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/response"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// webServer returns the server of the agent's pages.
func (a *Agent) webServer() *web.Server {
	return &web.Server{
		Metrics: &a.metricsConfig, Config: &a.webConfig, Pages: a.handler(), Ready: func() bool { return a.offered().Ready() },
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
		Config: &a.metricsConfig, View: a.view, Totals: a.totals, PodLabels: a.podLabels.Labels, Jobs: a.jobs.Of,
	}, renderer, zap.NewStdLog(a.log.Named("metrics"))))
	web.HandleProbes(mux, a.problems)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("OK")) }) // as dcgm-exporter
	pages := status.NewPages(a.status, &a.history, a.log.Named("web"))
	mux.Handle("GET /{$}", renderer.Handler("page", pages.ServeHTML))
	mux.Handle("GET "+status.SnapshotPath, renderer.Handler("snapshot", pages.ServeJSON))
	return mux
}

// view returns what the agent knows now. It only reads what the components have stored.
func (a *Agent) view() *view.View {
	v := a.offered()
	v.Node, v.Version, v.Revision = nodeName(), a.build.Version, a.build.Revision
	v.Reload, v.Notes, v.UnmatchedRefs = *a.lastReload.Load(), *a.configNotes.Load(), a.unmatchedRefs(v.Snapshot)
	v.Lock, v.Claims, v.Holders, v.Shares = *a.lock.State().Load(), a.dra.Claims().Load(), a.plugin.Holders(), a.shares()
	v.Processes, v.Memory, v.MPSErr = a.processes.Latest().Load(), a.memoryLimits.Latest().Load(), a.mps.Err()
	v.CDIRuntime, v.NodeDevices = a.cdiRuntime(), a.nodeDevices(v.Snapshot)
	v.Kube, v.NodeObject, v.LabelsErr = a.reporter.Status(), a.nodeWriter.Status(), a.node.FileErr()
	v.StartupTaint = startupTaintMayRemain(a.nodeConfig.Load().StartupTaint, v.NodeObject.AbsentStartupTaint)
	labels := a.podLabels.Status()
	v.PodLabelsStatus = view.PodLabels{Enabled: labels.Enabled, Up: labels.Up}
	v.StateDir, v.StateLoss = a.stateDir.Status(), a.lossText()
	v.ConnectionsDropped = a.connectionsDropped.Load()
	if a.logDropped != nil {
		v.LogDropped = a.logDropped()
	}
	return v
}

// offered returns the part of the view that View.NotOffered and View.Ready need. A poll takes up to stallAfter before the source counts as
// stalled; a snapshot that is older than three polls and that time means that the monitor is stuck.
func (a *Agent) offered() *view.View {
	return &view.View{
		At: time.Now(), Snapshot: a.snapshots.Load(), MaxAge: 3*a.pollInterval() + a.sourceConfig.Load().StallAfter,
		PluginConfig: *a.pluginConfig.Load(), Plugin: a.plugin.Status(), DRA: a.dra.Status(),
	}
}

// offersAll reports whether every device is offered to pods, so that the startup taint can be removed.
func (a *Agent) offersAll() bool { return len(a.offered().NotOffered()) == 0 }

// startupTaintMayRemain reports whether the configured startup taint may be on the node. After a check did not find it, it is reported no
// more: devices are not offered for a moment after each change of a list that the kubelet has.
func startupTaintMayRemain(configured string, absent corev1.Taint) bool {
	if configured == "" {
		return false
	}
	t, err := node.ParseTaint(configured)
	return err == nil && !t.MatchTaint(&absent)
}

// problems returns what is wrong now.
func (a *Agent) problems() view.Problems { return a.view().Problems() }

// status returns the current status.
func (a *Agent) status() status.Node {
	return status.New(a.view(), a.totals.IdleTimes(), a.nodeConfig.Load().Idle, a.events.Latest())
}

// unmatchedRefs returns the device references of the configuration that match no device; nil while the devices are unknown.
func (a *Agent) unmatchedRefs(snap *health.Snapshot) []health.UnmatchedRefs {
	if !snap.Polled() {
		return nil
	}
	return config.UnmatchedRefs(*a.healthConfig.Load(), *a.pluginConfig.Load(), snap.Bindings, snap.Devices)
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
