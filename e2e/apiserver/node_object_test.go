package apiserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
)

// nodeMachine is a machine whose agent has the rights for its Node object, as a user of its own.
func nodeMachine(t *testing.T, name string, rules ...rbac.PolicyRule) machine {
	t.Helper()
	if err := theCluster.pki.User(name, name); err != nil {
		t.Fatal(err)
	}
	if len(rules) > 0 {
		theCluster.grantRules(t, name, name, rules...)
	}
	n := newMachine(t, name, name)
	n.Env = append(n.Env, "POD_NAMESPACE=default")
	return n
}

func nodeRights() rbac.PolicyRule {
	return rbac.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "patch"}}
}

// configureNode writes a configuration with a section node.
func (n machine) configureNode(section string) {
	n.T.Helper()
	n.Configure(fmt.Sprintf("source: {sim: {profile: h100-8}}\nhealth: {kubernetes: {kubeconfig: %s}}\nnode: %s\n",
		theCluster.pki.Kubeconfig(n.name), section))
}

// object returns the Node.
func (n machine) object() *v1.Node {
	n.T.Helper()
	object, err := theCluster.client.CoreV1().Nodes().Get(n.T.Context(), n.name, metav1.GetOptions{})
	if err != nil {
		n.T.Fatal(err)
	}
	return object
}

// patch patches the Node as a field manager.
func (n machine) patch(manager, patch string) {
	n.T.Helper()
	options := metav1.PatchOptions{FieldManager: manager}
	if _, err := theCluster.client.CoreV1().Nodes().Patch(n.T.Context(), n.name, types.MergePatchType, []byte(patch), options); err != nil {
		n.T.Fatal(err)
	}
}

// awaitLabels waits until the Node has labels, and none of others. A value of "" stands for no such label.
func (n machine) awaitLabels(what string, want map[string]string) {
	n.T.Helper()
	n.Eventually(what, func() error {
		labels := n.object().Labels
		for key, value := range want {
			if has := labels[key]; has != value {
				return fmt.Errorf("label %s is %q, want %q; labels %v", key, has, value, labels)
			}
		}
		return nil
	})
}

// awaitTaints waits until the Node has exactly these taints, in order, each as KEY[=VALUE]:EFFECT.
func (n machine) awaitTaints(what string, want ...string) {
	n.T.Helper()
	n.Eventually(what, func() error {
		var have []string
		for _, t := range n.object().Spec.Taints {
			have = append(have, t.ToString())
		}
		if !slices.Equal(have, want) {
			return fmt.Errorf("taints %q, want %q", have, want)
		}
		return nil
	})
}

// nodeStatus is the key nodeObject of the agent's status.
type nodeStatus struct {
	Enabled      bool
	Writes       int
	LabelsError  string
	FeatureError string
	TaintsError  string
	StartupTaint []string
}

// awaitNodeStatus waits until the agent's status fulfils a condition.
func (n machine) awaitNodeStatus(what string, ok func(nodeStatus) bool) {
	n.T.Helper()
	n.Eventually(what, func() error {
		text, err := n.Page("/api/v1/snapshot", http.StatusOK)
		if err != nil {
			return err
		}
		var status struct{ NodeObject nodeStatus }
		if err := json.Unmarshal([]byte(text), &status); err != nil || !ok(status.NodeObject) {
			return fmt.Errorf("%+v, %w", status.NodeObject, err)
		}
		return nil
	})
}

// nodeRequests returns the agent's requests for its node, and its successful writes of it.
func (n machine) nodeRequests() (all, writes int) {
	n.T.Helper()
	requests, err := theCluster.requests(n.name)
	if err != nil {
		n.T.Fatal(err)
	}
	for _, r := range requests {
		if strings.HasSuffix(r, " 200") && strings.HasPrefix(r, "patch nodes ") {
			writes++
		}
	}
	return len(requests), writes
}

// TestNodeLabels applies labels to a node that others have labelled, and removes them.
func TestNodeLabels(t *testing.T) {
	t.Parallel()
	n := nodeMachine(t, "labels-of-node", nodeRights())
	n.patch("kubectl-label", `{"metadata": {"labels": {"team": "a", "nvidia.com/gpu.product": "theirs", "nvidia.com/gpu.count": "8"}}}`)
	n.configureNode(`{labels: {output: api}}`)
	n.start(8)
	n.awaitLabels("the labels, except one", map[string]string{
		"team": "a", "nvidia.com/gpu.product": "theirs", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81559",
		"gpu-node-agent/gpus-healthy": "8",
	})
	n.awaitNodeStatus("the status names the other manager", func(s nodeStatus) bool {
		return s.Enabled && strings.Contains(s.LabelsError, `"kubectl-label"`) && strings.Contains(s.LabelsError, "nvidia.com/gpu.product") &&
			!strings.Contains(s.LabelsError, "nvidia.com/gpu.count") // it has the same value
	})
	n.AwaitStatus("/readyz", "/readyz", http.StatusOK)
	if i := slices.IndexFunc(n.object().ManagedFields, func(f metav1.ManagedFieldsEntry) bool {
		return f.Manager == "gpu-node-agent" && f.Operation == metav1.ManagedFieldsOperationApply
	}); i < 0 {
		t.Errorf("managed fields %+v", n.object().ManagedFields)
	}
	n.Inject(`{"gpu": 3, "lost": true}`)
	n.awaitLabels("an unhealthy GPU", map[string]string{
		"gpu-node-agent/gpus-healthy": "7", "gpu-node-agent/gpus-unhealthy": "1",
		"nvidia.com/gpu.count": "8",
	})

	// A process that starts with everything off removes what one that was killed has left, and nothing else.
	n.KillAgent()
	n.configureNode(`{}`)
	n.StartAgent()
	none := map[string]string{
		"team": "a", "nvidia.com/gpu.product": "theirs", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "",
		"gpu-node-agent/gpus-healthy": "",
	}
	n.awaitLabels("no labels of the agent", none)
	n.awaitNodeStatus("nothing to do", func(s nodeStatus) bool { return !s.Enabled })
	n.EndAgent()
	before, _ := n.nodeRequests()
	n.start(8)
	n.EndAgent()
	if after, _ := n.nodeRequests(); after != before {
		t.Errorf("%d requests while everything is off", after-before)
	}
}

// TestNodeLabelsOnNewNode creates the node again, and restarts the agent.
func TestNodeLabelsOnNewNode(t *testing.T) {
	t.Parallel()
	n := nodeMachine(t, "labels-again", nodeRights())
	n.configureNode(`{labels: {output: api}}`)
	n.start(8)
	labels := map[string]string{"nvidia.com/gpu.count": "8"}
	n.awaitLabels("labels", labels)
	n.EndAgent()
	n.Eventually("one write", func() error { // the API server logs a request after it responds
		if _, writes := n.nodeRequests(); writes != 1 {
			return fmt.Errorf("%d writes", writes)
		}
		return nil
	})
	uid := n.object().UID
	nodes := theCluster.client.CoreV1().Nodes()
	if err := nodes.Delete(t.Context(), n.name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	// What the agent sends never creates a node.
	apply := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Node", "metadata": {"name": %q, "uid": %q, "labels": {"a": "b"}}}`, n.name, uid)
	_, err := nodes.Patch(t.Context(), n.name, types.ApplyPatchType, []byte(apply), metav1.PatchOptions{FieldManager: "gpu-node-agent"})
	if !apierrors.IsConflict(err) {
		t.Errorf("apply to a deleted node: %v", err)
	}
	if _, err := nodes.Create(t.Context(), newObject(n.name), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	n.start(8)
	n.awaitLabels("labels of the new node", labels)
	n.EndAgent()
	n.awaitLabels("labels stay", labels)
	n.configureNode(`{labels: {output: api, removeOnExit: true}}`)
	n.start(8)
	n.EndAgent()
	n.awaitLabels("no labels after the exit", map[string]string{"nvidia.com/gpu.count": ""})
}

// newNodeTaints are the taints of a new node: the startup taint, and one of others.
const newNodeTaints = `{"spec": {"taints": [{"key": "gpu-node-agent/not-ready", "effect": "NoSchedule"},
  {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]}}`

// TestNodeTaints keeps the taints of the agent beside the taints of others.
func TestNodeTaints(t *testing.T) {
	t.Parallel()
	const (
		theirs, startup = "dedicated=ml:NoSchedule", "gpu-node-agent/not-ready:NoSchedule"
		anyBad, allBad  = "gpu-node-agent/unhealthy=yes:NoSchedule", "gpu-node-agent/unusable:NoExecute"
	)
	n := nodeMachine(t, "taints", nodeRights())
	n.patch("karpenter", newNodeTaints)
	const section = `{startupTaint: "gpu-node-agent/not-ready:NoSchedule", taints: [
  {when: anyUnhealthy, key: gpu-node-agent/unhealthy, value: "yes", effect: NoSchedule},
  {when: allUnhealthy, key: gpu-node-agent/unusable, effect: NoExecute}]}`
	n.configureNode(section)
	n.StopKubelet()
	n.StartAgent()
	n.awaitNodeStatus("the startup taint waits for the kubelet", func(s nodeStatus) bool {
		return len(s.StartupTaint) > 0 && strings.Contains(strings.Join(s.StartupTaint, " "), "kubelet") && s.TaintsError == ""
	})
	n.awaitTaints("the startup taint stays", startup, theirs)
	n.StartKubelet()
	n.awaitTaints("the startup taint is removed", theirs)

	n.Inject(`{"gpu": 3, "lost": true}`)
	n.awaitTaints("one GPU is unhealthy", theirs, anyBad)
	for i := range 8 {
		n.Inject(`{"gpu": %d, "lost": true}`, i)
	}
	n.awaitTaints("all GPUs are unhealthy", theirs, anyBad, allBad)
	if added := n.object().Spec.Taints[2].TimeAdded; added.IsZero() {
		t.Error("the taint NoExecute has no time")
	}
	n.patch("kubectl-taint", `{"spec": {"taints": [{"key": "dedicated", "value": "ml", "effect": "NoSchedule"},
  {"key": "gpu-node-agent/unhealthy", "value": "yes", "effect": "NoSchedule"},
  {"key": "gpu-node-agent/unusable", "effect": "NoExecute"}, {"key": "new", "effect": "PreferNoSchedule"}]}}`)

	// A restart leaves the taints as they are until the GPUs are measured again; one that is no longer configured is removed.
	n.KillAgent()
	n.configureNode(`{taints: [{when: allUnhealthy, key: gpu-node-agent/unusable, effect: NoExecute}]}`)
	n.StartAgent()
	n.awaitTaints("one taint is no longer configured", theirs, "new:PreferNoSchedule")
	n.Inject(`{"gpu": 0, "lost": true}`)
	n.configureNode(`{}`)
	n.awaitNodeStatus("nothing to do", func(s nodeStatus) bool { return !s.Enabled })
	n.awaitTaints("others' taints stay", theirs, "new:PreferNoSchedule")
	if a := n.object().Annotations; len(a) != 0 {
		t.Errorf("annotations %v", a)
	}
}

// TestNodeWithoutRights checks that the agent names the rights that it lacks, and works without them.
func TestNodeWithoutRights(t *testing.T) {
	t.Parallel()
	n := nodeMachine(t, "labels-forbidden")
	n.configureNode(`{labels: {output: api}, taints: [{when: anyUnhealthy, key: a/b, effect: NoSchedule}]}`)
	n.start(8)
	n.awaitNodeStatus("the status names the rights", func(s nodeStatus) bool {
		return strings.Contains(s.LabelsError, "get and patch on nodes") && strings.Contains(s.TaintsError, "get and patch on nodes")
	})
	n.AwaitStatus("/readyz", "/readyz", http.StatusOK)
	theCluster.grantRules(t, n.name, n.name, nodeRights())
	n.awaitLabels("labels with the rights", map[string]string{"nvidia.com/gpu.count": "8"})
}

func nodeFeatureCRD() *unstructured.Unstructured {
	text := func(properties map[string]any) map[string]any {
		return map[string]any{"type": "object", "properties": properties}
	}
	values := map[string]any{"type": "object", "additionalProperties": map[string]any{"type": "string"}}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "nodefeatures.nfd.k8s-sigs.io"},
		"spec": map[string]any{
			"group": "nfd.k8s-sigs.io", "scope": "Namespaced",
			"names": map[string]any{"kind": "NodeFeature", "listKind": "NodeFeatureList", "plural": "nodefeatures", "singular": "nodefeature"},
			"versions": []any{map[string]any{
				"name": "v1alpha1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": map[string]any{
					"type": "object", "required": []any{"spec"},
					"properties": map[string]any{"spec": text(map[string]any{
						"labels":   values,
						"features": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true},
					})},
				}},
			}},
		},
	}}
}

// TestNodeFeature writes the NodeFeature once its API is there.
func TestNodeFeature(t *testing.T) {
	t.Parallel()
	client, err := dynamic.NewForConfig(adminConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	features := client.Resource(schema.GroupVersionResource{
		Group: "nfd.k8s-sigs.io", Version: "v1alpha1",
		Resource: "nodefeatures",
	}).Namespace("default")
	n := nodeMachine(t, "feature", rbac.PolicyRule{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get"}},
		rbac.PolicyRule{
			APIGroups: []string{"nfd.k8s-sigs.io"}, Resources: []string{"nodefeatures"},
			Verbs: []string{"get", "create", "update", "delete"},
		})
	n.configureNode(`{labels: {output: nodeFeature}}`)
	n.start(8)
	n.awaitNodeStatus("the API is missing", func(s nodeStatus) bool {
		return strings.Contains(s.FeatureError, "nfd.k8s-sigs.io/v1alpha1") && s.LabelsError == ""
	})
	defineNodeFeatures(t)
	n.Eventually("the API is served", func() error {
		_, err := features.List(t.Context(), metav1.ListOptions{})
		return err
	})
	n.KillAgent() // the agent would try again after minutes
	n.start(8)
	awaitFeature := func(what string, want map[string]string) {
		n.T.Helper()
		n.Eventually(what, func() error {
			f, err := features.Get(t.Context(), "gpu-node-agent-"+n.name, metav1.GetOptions{})
			if want == nil {
				if apierrors.IsNotFound(err) {
					return nil
				}
				return fmt.Errorf("%v, %w", f, err)
			}
			if err != nil {
				return err
			}
			labels, _, err := unstructured.NestedStringMap(f.Object, "spec", "labels")
			owners := f.GetOwnerReferences()
			if err != nil || len(owners) != 1 || owners[0].UID != n.object().UID || f.GetLabels()["nfd.node.kubernetes.io/node-name"] != n.name {
				return errors.Join(fmt.Errorf("%v", f.Object), err)
			}
			for key, value := range want {
				if labels[key] != value {
					return fmt.Errorf("labels %v, want %v", labels, want)
				}
			}
			return nil
		})
	}
	awaitFeature("the NodeFeature", map[string]string{"nvidia.com/gpu.count": "8", "gpu-node-agent/gpus-unhealthy": "0"})
	n.Inject(`{"gpu": 3, "lost": true}`)
	awaitFeature("an unhealthy GPU", map[string]string{"nvidia.com/gpu.count": "8", "gpu-node-agent/gpus-unhealthy": "1"})
	if labels := n.object().Labels; len(labels) != 1 {
		t.Errorf("the node itself has the labels %v", labels)
	}
	n.configureNode(`{}`)
	awaitFeature("no NodeFeature", nil)
	n.awaitNodeStatus("nothing to do", func(s nodeStatus) bool { return !s.Enabled })
	n.EndAgent()
}
