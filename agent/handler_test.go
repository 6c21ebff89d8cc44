package agent

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/podlabels"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
	"github.com/gpu-node-agent/gpu-node-agent/health/statefile"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// idleAgent returns an agent with a snapshot whose components do not run.
func idleAgent(snapshot *health.Snapshot) *Agent {
	a := &Agent{log: zap.NewNop(), level: zap.NewAtomicLevel(), reloadInterval: 20 * time.Millisecond, build: Build{Version: "1.2.3"}}
	a.apply(config.DefaultConfig())
	a.lastReload.Store(&metrics.Reload{OK: true, At: agenttest.Now()})
	if snapshot != nil {
		a.snapshots.Store(snapshot)
	}
	a.monitor = monitor.New(&a.healthConfig, &a.sources, &a.snapshots, a.log)
	a.plugin = plugin.New(&a.pluginConfig, &a.snapshots, a.log)
	a.totals = metrics.NewTotals(&a.metricsConfig, &a.snapshots, a.plugin.Holders)
	a.stateFile = statefile.New(&a.healthConfig, &a.snapshots, "", a.log)
	a.reporter = a.newReporter(nil)
	a.podLabels = podlabels.New(podlabels.Options{Config: &a.podLabelsConfig, Node: "node-1", Log: a.log})
	a.jobs = metrics.NewJobs(&a.metricsConfig, a.log)
	return a
}

// site is an agent that serves and reloads, with its configuration in files.
type site struct {
	*agenttest.Site
	*Agent
}

// newSite starts an agent with a web configuration, or without if that is "".
func newSite(t *testing.T, webConfig string) *site {
	t.Helper()
	node := agenttest.Node()
	node.At = time.Now().Add(time.Hour) // no monitor runs, and /readyz requires a recent poll
	s := &site{agenttest.NewSite(t), idleAgent(node)}
	s.log = s.Log
	s.loader = config.Loader{File: s.File("config.yaml")} // used by reloadOn only from here on
	s.Write("config.yaml", "metrics: {listen: 127.0.0.1:0}\n")
	if webConfig != "" {
		s.Write("web.yaml", webConfig)
		s.Write("config.yaml", "metrics: {listen: 127.0.0.1:0, webConfigFile: "+s.File("web.yaml")+"}\n")
	}
	c, err := s.loader.Load()
	if err != nil {
		t.Fatal(err)
	}
	s.apply(c)
	s.Start(s.webServer().Run)
	s.Start(func(ctx context.Context) error { s.reloadOn(ctx, nil); return nil })
	return s
}

func (s *site) rename(from, to string) {
	s.T.Helper()
	if err := os.Rename(s.File(from), s.File(to)); err != nil {
		s.T.Fatal(err)
	}
}

func TestHandlerServesEachPage(t *testing.T) {
	s := newSite(t, "")
	agenttest.MustContain(t, s.MustGet(http.StatusOK, "/metrics", nil, ""), "gpu_node_agent_device_state")
	agenttest.MustContain(t, s.MustGet(http.StatusServiceUnavailable, web.ReadyzPath, nil, ""), "plugin")
	for path, want := range map[string]string{"/health": "OK", web.LivezPath: "ok", status.SnapshotPath: "GPU-0", "/": "GPU-0"} {
		agenttest.MustContain(t, s.MustGet(http.StatusOK, path, nil, ""), want)
	}
}

// A detach is visible on every page.
func TestHandlerShowsDetach(t *testing.T) {
	t.Parallel()
	a := idleAgent(nil)
	c := config.DefaultConfig()
	c.Source.Mode, c.Health.StateFile = config.ModeSim, ""
	a.apply(c)
	ctx, cancel := context.WithCancel(t.Context())
	var components sync.WaitGroup
	for _, run := range []func(context.Context) error{a.runSource, a.monitor.Run} {
		components.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() { cancel(); components.Wait() })
	agenttest.Eventually(t, "the source is up", func() error {
		if s := a.snapshots.Load(); s == nil || s.Source.Status != health.SourceUp {
			return errors.New("not yet")
		}
		return nil
	})
	detached, err := a.monitor.Detach(ctx, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]struct {
		code  int
		parts []string
	}{
		web.LivezPath:       {http.StatusOK, []string{"ok"}},
		web.ReadyzPath:      {http.StatusServiceUnavailable, []string{"source detached: "}},
		"/metrics":          {http.StatusOK, []string{"gpu_node_agent_source_detached 1", `cause="` + health.CauseReleased + `"`}},
		status.SnapshotPath: {http.StatusOK, []string{`"status":"detached"`, `"until":"` + detached.Until.UTC().Format(time.RFC3339)[:10], `"cause":"` + health.CauseReleased + `"`}},
		"/":                 {http.StatusOK, []string{`<span class="badge degraded">detached</span>`}},
	} {
		w := httptest.NewRecorder()
		a.handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		if w.Code != want.code {
			t.Errorf("%s: %d", path, w.Code)
		}
		agenttest.MustContain(t, w.Body.String(), want.parts...)
	}
	agenttest.MustContain(t, a.status().Table(false, false), "source    sim detached for")
}
