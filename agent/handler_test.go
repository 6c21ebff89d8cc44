package agent

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// idleAgent returns an agent with a snapshot whose components do not run.
func idleAgent(snapshot *health.Snapshot) *Agent {
	a := newAgent(config.DefaultConfig(), zap.NewNop(), zap.NewAtomicLevel(), "")
	a.build, a.reloadInterval, a.reporter = Build{Version: "1.2.3"}, 20*time.Millisecond, a.newReporter(nil)
	if snapshot != nil {
		a.snapshots.Store(snapshot)
	}
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

// All expensive pages are rendered, and compressed, by the same renderer. Probes never wait for it.
func TestHandlerRendersPages(t *testing.T) {
	h := idleAgent(agenttest.Node()).handler()
	for path, want := range map[string]string{
		"/": "gzip", "/metrics": "gzip", status.SnapshotPath: "gzip", web.LivezPath: "", web.ReadyzPath: "", "/health": "",
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
		r.Header.Set("Accept-Encoding", "gzip")
		h.ServeHTTP(w, r)
		if got := w.Header().Get("Content-Encoding"); got != want {
			t.Errorf("%s: Content-Encoding %q, want %q", path, got, want)
		}
	}
}

func TestHandlerShowsDetach(t *testing.T) {
	node := agenttest.Node()
	node.Source.Status, node.Source.Detachment = health.SourceDetached, health.Detachment{Since: agenttest.Now(), Until: agenttest.Now()}
	a := idleAgent(node)
	for path, want := range map[string]string{
		web.LivezPath: "ok", web.ReadyzPath: "source: detached", "/metrics": "gpu_node_agent_source_detached 1",
		status.SnapshotPath: `"until":"2026-03-02T12:00:00Z"`, "/": `<span class="badge degraded">detached</span>`,
	} {
		w := httptest.NewRecorder()
		a.handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		if ok := w.Code == http.StatusOK; ok != (path != web.ReadyzPath) {
			t.Errorf("%s: %d", path, w.Code)
		}
		agenttest.MustContain(t, w.Body.String(), want)
	}
	agenttest.MustContain(t, a.status().Table(false, terminal.Output{}), "dcgm detached")
}

// A startup taint that was removed is not reported as staying when the devices are not offered for a moment.
func TestStartupTaintStays(t *testing.T) {
	removed := corev1.Taint{Key: "gpu/not-ready", Effect: corev1.TaintEffectNoSchedule}
	for configured, want := range map[string]bool{
		"": false, "gpu/not-ready:NoSchedule": false, "gpu/not-ready=x:NoSchedule": false, "gpu/not-ready:NoExecute": true,
		"other:NoSchedule": true,
	} {
		if got := startupTaintMayRemain(configured, removed); got != want {
			t.Errorf("%q: %v", configured, got)
		}
		if got := startupTaintMayRemain(configured, corev1.Taint{}); got != (configured != "") {
			t.Errorf("%q before it was removed: %v", configured, got)
		}
	}
}
