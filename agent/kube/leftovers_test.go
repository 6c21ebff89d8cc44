package kube

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
	if got := TracesOf(n); got.Node != "n" || !slices.Equal(got.Taints, []string{"a:NoSchedule", "b:NoExecute"}) || !slices.Equal(got.Labels, []string{"a/applied", "b"}) || !got.Condition {
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
		if status := g.writer.Status(); len(status.Leftovers()) > 0 || status.LabelsErr+status.TaintsErr+status.ConditionErr != "" || status.Enabled {
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
