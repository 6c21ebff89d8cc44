package kube

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
)

func TestTracesOf(t *testing.T) {
	fields := func(manager string, operation metav1.ManagedFieldsOperationType, text string) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{Manager: manager, Operation: operation, FieldsV1: metav1.NewFieldsV1(text)}
	}
	const labels = `{"f:metadata": {"f:labels": {".": {}, "f:a/%s": {}, "f:b": {}}}}`
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "n", Annotations: map[string]string{taintsAnnotation: `["a:NoSchedule","b:NoExecute"]`},
		ManagedFields: []metav1.ManagedFieldsEntry{
			fields("gpu-node-agent", metav1.ManagedFieldsOperationUpdate, fmt.Sprintf(labels, "updated")), // writes of taints and the condition
			fields("gpu-node-agent", metav1.ManagedFieldsOperationApply, fmt.Sprintf(labels, "applied")),
			fields("kubelet", metav1.ManagedFieldsOperationApply, fmt.Sprintf(labels, "other")),
			{Manager: "gpu-node-agent", Operation: metav1.ManagedFieldsOperationApply},
		},
	}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady}, {Type: conditionType}}
	if got := TracesOf(n); got.Node != "n" || !slices.Equal(got.Taints, []string{"a:NoSchedule", "b:NoExecute"}) ||
		!slices.Equal(got.Labels, []string{"a/applied", "b"}) || !got.Condition {
		t.Errorf("%+v", got)
	}
	n.Annotations[taintsAnnotation], n.ManagedFields, n.Status.Conditions = "[", nil, n.Status.Conditions[:1]
	if got := TracesOf(n); len(got.Taints)+len(got.Labels) > 0 || got.Condition {
		t.Errorf("nothing of agents: %+v", got)
	}
}

func TestCleanedAt(t *testing.T) {
	for text, want := range map[string]string{
		"": "",
		"a=\"b\"\n" + CleanedAnnotation + "=\"2026-01-02T03:04:05.6Z\"\nz=\"" + CleanedAnnotation + "=\\\"x\\\"\"\n": "2026-01-02T03:04:05.6Z",
		CleanedAnnotation + "=\"a\\\"b\"": `a"b`,
		CleanedAnnotation + "-x=\"a\"":    "",
		CleanedAnnotation + "=\"half":     "",
	} {
		if got := cleanedAt(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// Without access to the API server, what earlier agents left is named, and that is no error of this agent.
func TestNodeWriterWithoutAccount(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "") // as outside of a pod
	withNode(t, func(g *nodeRig) {
		opened := 0
		g.writer.open = func(kubeconfig string) (*client, error) {
			opened++
			return connect(kubeconfig)
		}
		s := g.set(NodeState{Taints: []corev1.Taint{}, Labels: map[string]string{}, RemoveCondition: true})
		g.advance(time.Hour)
		g.wantWritten(s, false)
		status := g.writer.Status()
		if !slices.Equal(status.Leftovers(), []string{"labels", "taints", "condition"}) || status.Errors > 0 {
			t.Errorf("%+v", status)
		}
		g.wantStatus(taintsErr, CleanupCommand)
		g.wantStatus(conditionErr, CleanupCommand)
		g.wantRequests("")
		g.wantWarnings(3)
		if opened > 3*14 {
			t.Errorf("%d tries in an hour", opened)
		}
		g.set(NodeState{}) // somebody else removed it
		if status := g.writer.Status(); len(status.Leftovers()) > 0 || status.LabelsErr+status.TaintsErr+status.ConditionErr != "" ||
			status.Enabled {
			t.Errorf("%+v", status)
		}
		g.set(NodeState{Taints: []corev1.Taint{unhealthyTaint()}})
		if status := g.writer.Status(); len(status.Leftovers()) > 0 || status.Errors == 0 {
			t.Errorf("a configured taint: %+v", status)
		}
		if claims := g.logged.FilterMessageSnippet("nothing is left").All(); len(claims) > 0 {
			t.Errorf("nobody has looked: %v", claims)
		}
	})
}

func newTestCleaner(t *testing.T, server http.RoundTripper) *Cleaner {
	t.Helper()
	config := &rest.Config{Transport: server}
	c, err := NewCleaner(config)
	if err != nil || config.Timeout != 0 { // the caller's configuration stays
		t.Fatal(err, config.Timeout)
	}
	return c
}

func TestNewCleanerFails(t *testing.T) {
	if c, err := NewCleaner(&rest.Config{
		Host:            "https://server",
		TLSClientConfig: rest.TLSClientConfig{CAData: []byte("no certificate")},
	}); err == nil {
		t.Errorf("%+v", c)
	}
}

// A cleaner removes what agents have written, each kind by itself, and nothing of others.
func TestCleaner(t *testing.T) {
	withNode(t, func(g *nodeRig) {
		g.setTaints(taintsOf("theirs:NoSchedule")...)
		g.setLabel("kubectl", "theirs", "1")
		labels := map[string]string{"a": "1", "b": "2"}
		g.set(NodeState{Labels: labels, Feature: labels, Taints: taintsOf("gpu/unhealthy:NoSchedule", "gpu/kept:NoExecute",
			"gpu/unhealthy:NoExecute")})
		g.stop()
		g.setConditions(corev1.NodeCondition{Type: conditionType})
		c, ctx := newTestCleaner(g.t, g.transport), g.t.Context()
		check := func(err error) {
			g.t.Helper()
			if err != nil {
				g.t.Error(err)
			}
		}
		remove := map[string]func() error{
			"taints": func() error { return c.RemoveTaints(ctx, "node1", nil) }, "labels": func() error { return c.RemoveLabels(ctx, "node1") },
			"condition": func() error { return c.RemoveCondition(ctx, "node1") },
			"feature":   func() error { return c.RemoveFeature(ctx, "gpu", "node1") },
		}
		for _, mayRead := range []bool{false, true} {
			g.fail = func(r *http.Request) error {
				if mayRead && r.Method == "GET" {
					return nil
				}
				return apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "node1", errors.New("no rights"))
			}
			for kind, f := range remove {
				if err := f(); !apierrors.IsForbidden(err) {
					g.t.Errorf("%s without the right, may read: %v: %v", kind, mayRead, err)
				}
			}
		}
		g.fail = nil
		g.took()
		check(c.RemoveTaints(ctx, "node1", []string{"gpu/kept:NoExecute", "gpu/unhealthy:NoSchedule"}))
		g.wantTaints("theirs:NoSchedule", "gpu/unhealthy:NoSchedule", "gpu/kept:NoExecute")
		check(c.RemoveTaints(ctx, "node1", nil))
		g.wantTaints("theirs:NoSchedule")
		check(c.RemoveTaints(ctx, "node1", nil))
		g.wantRequests("GET nodes, PATCH nodes, GET nodes, PATCH nodes, GET nodes")
		g.wantLabels(map[string]string{"a": "1", "b": "2", "theirs": "1"})
		check(c.RemoveLabels(ctx, "node1"))
		g.wantLabels(map[string]string{"theirs": "1"})
		if len(g.conditions(g.t)) != 1 || g.feature() == nil {
			g.t.Errorf("conditions %v, feature %v", g.conditions(g.t), g.feature())
		}
		check(c.RemoveCondition(ctx, "node1"))
		check(c.RemoveFeature(ctx, "gpu", "node1"))
		if len(g.conditions(g.t)) != 0 || g.feature() != nil {
			g.t.Errorf("conditions %v, feature %v", g.conditions(g.t), g.feature())
		}
		g.Delete("nodes", "", "node1")
		g.SetAbsent("nfd.k8s-sigs.io")
		for kind, f := range remove {
			if err := f(); err != nil {
				g.t.Errorf("%s of a node that is gone: %v", kind, err)
			}
		}
	})
}

func TestCleanerFindsFeatures(t *testing.T) {
	s := newAPI(t)
	put := func(namespace, name, node string) {
		s.Put(&apiservertest.NodeFeature{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, Labels: map[string]string{featureNodeLabel: node},
		}})
	}
	put("gpu", "gpu-node-agent-node1", "node1")
	put("gpu", "node1", "node1") // Node Feature Discovery's own
	put("gpu", "gpu-node-agent-node2", "node2")
	put("old", "gpu-node-agent-node1", "node1")
	put("gpu", "gpu-node-agent-", "")
	for i := range listLimit { // others, on both pages
		put("old", fmt.Sprint("gpu-node-agent-", i), "node2")
	}
	c := newTestCleaner(t, s.transport)
	for namespace, want := range map[string]map[string][]string{
		"": {"node1": {"gpu", "old"}, "node2": {"gpu"}}, "gpu": {"node1": {"gpu"}, "node2": {"gpu"}}, "none": {},
	} {
		if got, err := c.Features(t.Context(), namespace); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("namespace %q: %v, %v, want %v", namespace, got, err, want)
		}
	}
	s.SetAbsent("nfd.k8s-sigs.io") // without Node Feature Discovery
	if got, err := c.Features(t.Context(), ""); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	s.SetAbsent()
	s.Deny("list nodefeatures")
	if got, err := c.Features(t.Context(), ""); !apierrors.IsForbidden(err) {
		t.Errorf("%v, %v", got, err)
	}
}

// The agent reads what the cleaner writes, and only the pod that was listed gets it.
func TestMarkCleaned(t *testing.T) {
	s := newAPI(t)
	s.Put(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: "agent-x", UID: "uid-1"}})
	c := newTestCleaner(t, s.transport)
	at := time.Date(2026, 1, 2, 3, 4, 5, 600, time.FixedZone("", 3600))
	if err := c.MarkCleaned(t.Context(), "gpu", "agent-x", "uid-1", at); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"gpu-node-agent/cleaned": "2026-01-02T02:04:05.0000006Z"}
	if got := s.Get("pods", "gpu", "agent-x").GetAnnotations(); !maps.Equal(got, want) || s.did("patch pods/status") != 1 {
		t.Errorf("%q, want %q", got, want)
	}
	if err := c.MarkCleaned(t.Context(), "gpu", "agent-x", "uid-2", at); !apierrors.IsConflict(err) {
		t.Errorf("another pod of the name: %v", err)
	}
	s.Delete("pods", "gpu", "agent-x")
	if err := c.MarkCleaned(t.Context(), "gpu", "agent-x", "uid-1", at); err != nil {
		t.Errorf("a pod that is gone: %v", err)
	}
}
