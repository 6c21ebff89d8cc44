package reclaim

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// serveNode serves the status of a node.
func serveNode(t *testing.T, n status.Node) string {
	t.Helper()
	text, err := json.Marshal(n)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != status.SnapshotPath {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(text)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// testNode is the response of an agent with one holder.
func testNode(name string) status.Node {
	w := newTestWorld()
	n := w.Agents["n1"].Status
	n.Node = name
	return n
}

func TestAskURLs(t *testing.T) {
	starting := testNode("starting")
	starting.Source.Status, starting.GPUs = "starting", nil
	down := testNode("down") // with another plugin's shares
	down.Source.Status, down.GPUs[0].Holders[0].Idle, down.GPUs[0].Holders[0].GPUShare = "down", nil, nil
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) }))
	defer page.Close()
	n1 := serveNode(t, testNode("n1"))
	urls := []string{
		n1 + "/", n1 + status.SnapshotPath, strings.TrimPrefix(serveNode(t, testNode("n2")), "http://"),
		serveNode(t, starting), serveNode(t, down),
		serveNode(t, testNode("twice")), serveNode(t, testNode("twice")), serveNode(t, testNode("twice")), "http://127.0.0.1:1", page.URL,
	}
	agents, errs := askURLs(t.Context(), urls, status.Access{})
	if got := slices.Sorted(maps.Keys(agents)); !slices.Equal(got, []string{"down", "n1", "n2", "starting", "twice"}) {
		t.Errorf("nodes %q", got)
	}
	for node, want := range map[string]bool{"down": true, "n1": true, "n2": true, "starting": true, "twice": false} {
		if a := agents[node]; (a.Err == nil) != want {
			t.Errorf("%s: %v", node, a.Err)
		}
	}
	n := agents["n1"].Status
	if !n.Time.Equal(now()) || n.Source.Status != "up" || len(n.Kubelet.Resources) != 1 || len(n.GPUs) != 1 ||
		*n.GPUs[0].Holders[0].Idle.NoProcess != 3*3600 {
		t.Errorf("%+v", n)
	}
	if len(errs) != 4 { // twice (2), refused, not an agent
		t.Errorf("errors %q", errs)
	}
	if !responds(agents) || responds(map[string]Agent{"twice": agents["twice"]}) || responds(nil) {
		t.Error("responds")
	}
}

func TestAskNodes(t *testing.T) {
	urls := map[string]string{"n1": serveNode(t, testNode("n1")), "n2": serveNode(t, testNode("n3")), "n4": "http://127.0.0.1:1"}
	agents, errs := askNodes(t.Context(), []string{"n1", "n2", "n4"}, urls, status.Access{})
	if len(agents) != 3 || agents["n1"].Err != nil || agents["n2"].Err == nil || agents["n4"].Err == nil {
		t.Errorf("%+v", agents)
	}
	if len(errs) != 2 || !strings.Contains(errs[0], "n3") || !strings.HasPrefix(errs[1], "node n4: ") {
		t.Errorf("errors %q", errs)
	}
}

// At most agentLimit agents are asked at once, and all of them.
func TestAskIsBounded(t *testing.T) {
	var running, most, served atomic.Int64
	full := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := running.Add(1)
		defer running.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		if served.Add(1) == agentLimit {
			close(full)
		}
		<-full // the first responds only when all slots are in use
		_ = json.NewEncoder(w).Encode(testNode("n1"))
	}))
	defer s.Close()
	responses := ask(t.Context(), make([]string, 3*agentLimit), func(string) string { return s.URL }, status.Access{})
	for i, a := range responses {
		if a.Err != nil {
			t.Errorf("%d: %v", i, a.Err)
		}
	}
	if most.Load() != agentLimit || served.Load() != 3*agentLimit {
		t.Errorf("%d of %d at once", most.Load(), served.Load())
	}
}

func TestAgentNodes(t *testing.T) {
	w := newTestWorld() // a on n1
	w.addPod("b", nil, "n2", 0).Status.Phase = corev1.PodFailed
	w.addPod("c", nil, "n3", 0).Spec.Containers = nil
	w.addPod("d", nil, "n4", 0).Spec.Containers[0].Resources.Limits = corev1.ResourceList{"cpu": quantity.MustParse("1")}
	p := w.addPod("e", nil, "n5", 0)
	p.Spec.Containers, p.Spec.ResourceClaims = nil, []corev1.PodResourceClaim{{Name: "gpu"}}
	w.addPod("f", nil, "n0", 0).Spec.Containers[0].Resources.Limits = corev1.ResourceList{"example.com/gpu": quantity.MustParse("1")}
	w.addPod("g", nil, "", 0)
	if got := agentNodes(w.Objects); !slices.Equal(got, []string{"n0", "n1", "n5"}) {
		t.Errorf("%q", got)
	}
}
