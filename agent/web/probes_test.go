package web_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// An old snapshot of a source that is up means that the monitor is stuck.
func TestNotReadyWithOldSnapshot(t *testing.T) {
	for name, c := range map[string]struct {
		status health.SourceStatus
		age    time.Duration
		want   int // reasons
	}{
		"new":             {health.SourceUp, 0, 0},
		"within maxAge":   {health.SourceUp, 39 * time.Second, 0},
		"older":           {health.SourceUp, 45 * time.Second, 1},
		"stalled and old": {health.SourceStalled, 45 * time.Second, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				snapshot := &health.Snapshot{At: time.Now(), Source: health.Source{Status: c.status}}
				<-time.After(c.age)
				if reasons := web.NotReady(snapshot, plugin.Status{}, 40*time.Second); len(reasons) != c.want {
					t.Errorf("%q", reasons)
				}
			})
		})
	}
}

func TestNotReadyNamesEachReason(t *testing.T) {
	down := &health.Snapshot{Source: health.Source{Status: health.SourceDown, Err: "refused"}}
	p := plugin.Status{Err: "no kubelet", Resources: []plugin.ResourceStatus{{Name: "a", Registered: true}, {Name: "b", Err: "rejected"}}}
	for _, s := range []*health.Snapshot{nil, down} {
		reasons := web.NotReady(s, p, time.Minute)
		if len(reasons) != 3 || s != nil && !strings.Contains(reasons[0], "refused") || !strings.Contains(reasons[1], "no kubelet") ||
			!strings.Contains(reasons[2], "b: rejected") {
			t.Errorf("%q", reasons)
		}
	}
}

// A handover that waits for pods may last days.
func TestNotReadyIgnoresHandoverThatWaitsForPods(t *testing.T) {
	up := &health.Snapshot{Source: health.Source{Status: health.SourceUp}, At: time.Now()}
	p := plugin.Status{Err: "claims", WaitsForPods: true}
	if reasons := web.NotReady(up, p, time.Minute); len(reasons) > 0 {
		t.Errorf("%q", reasons)
	}
	p.Resources = []plugin.ResourceStatus{{Name: "a", Err: "rejected"}}
	if reasons := web.NotReady(up, p, time.Minute); len(reasons) != 1 {
		t.Errorf("%q", reasons)
	}
}

// A warning is in the response and does not make the agent unready.
func TestReadyzWarns(t *testing.T) {
	for name, c := range map[string]struct {
		notReady, warnings []string
		code               int
		text               string
	}{
		"ready":                  {nil, nil, http.StatusOK, "ok\n"},
		"ready with a warning":   {nil, []string{"a", "b"}, http.StatusOK, "ok\na\nb\n"},
		"unready":                {[]string{"x"}, nil, http.StatusServiceUnavailable, "x\n"},
		"unready with a warning": {[]string{"x"}, []string{"a"}, http.StatusServiceUnavailable, "x\na\n"},
	} {
		mux := http.NewServeMux()
		web.HandleProbes(mux, func() []string { return c.notReady }, func() []string { return c.warnings })
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, web.ReadyzPath, nil))
		if w.Code != c.code || w.Body.String() != c.text {
			t.Errorf("%s: %d %q", name, w.Code, w.Body)
		}
	}
}
