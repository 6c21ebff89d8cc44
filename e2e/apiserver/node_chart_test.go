package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	clientv1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

// TestNodeChart checks the chart's rights and policies for labels and taints of nodes on an API server.
func TestNodeChart(t *testing.T) {
	defineNodeFeatures(t)
	installChart(t, "cluster-values.yaml")
	t.Run("nodes", checkNodePolicy)
	t.Run("NodeFeatures", checkFeaturePolicy)
	t.Run("agent", checkConfinedNode)
}

// checkConfinedNode checks that the rights and the policy suffice for an agent with the token of its pod: it writes labels and taints,
// changes and removes them.
func checkConfinedNode(t *testing.T) {
	const (
		theirs = "dedicated=ml:NoSchedule"
		bad    = "gpu-node-agent/unhealthy:NoSchedule"
	)
	n := newMachine(t, "confined-node", unprivileged)
	n.patch("karpenter", newNodeTaints)
	kubeconfig := podKubeconfig(t, n)
	configure := func(section string) {
		n.Configure(fmt.Sprintf("source: {sim: {profile: h100-8}}\nhealth: {kubernetes: {kubeconfig: %s}}\nnode: %s\n", kubeconfig, section))
	}
	// As in cluster-values.yaml.
	configure(`{labels: {output: api}, startupTaint: "gpu-node-agent/not-ready:NoSchedule", taints: [
  {when: allUnhealthy, key: gpu-node-agent/unhealthy, effect: NoSchedule},
  {when: cordoned, key: example.com/cordoned, value: gpu, effect: PreferNoSchedule}]}`)
	n.start(8)
	written := func(s nodeStatus) bool { return s.LabelsError == "" && s.TaintsError == "" && s.Writes > 0 }
	n.awaitLabels("the labels", map[string]string{
		"nvidia.com/gpu.count": "8", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
		"gpu-node-agent/gpus-healthy": "8",
	})
	n.awaitTaints("the startup taint is removed", theirs)
	n.awaitNodeStatus("no errors", written)
	for i := range 8 {
		n.Inject(`{"gpu": %d, "lost": true}`, i)
	}
	n.awaitTaints("all GPUs are unhealthy", theirs, bad)
	n.awaitLabels("the labels of unhealthy GPUs", map[string]string{"gpu-node-agent/gpus-unhealthy": "8"})
	n.awaitNodeStatus("no errors", written)
	configure("{labels: {output: off}, taints: []}")
	n.awaitTaints("none of the agent's taints", theirs)
	n.awaitLabels("none of the agent's labels", map[string]string{"nvidia.com/gpu.count": "", "gpu-node-agent/gpus-unhealthy": ""})
	n.awaitNodeStatus("nothing to do", func(s nodeStatus) bool { return !s.Enabled })
}

// recordedTaints is the annotation in which the agent keeps the taints that it has set.
const recordedTaints = "gpu-node-agent/taints"

// largeNode returns a node with more labels and taints than most clusters have, because the API server limits the cost of a policy.
func largeNode(name string) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, Labels: map[string]string{},
		Annotations: map[string]string{"example.test/a": "b"},
	}}
	for i := range 200 {
		n.Labels[fmt.Sprintf("feature.node.kubernetes.io/a-rather-long-name-of-a-feature-%d", i)] = "true"
		n.Annotations[fmt.Sprintf("example.test/a-rather-long-name-of-an-annotation-%d", i)] = "true"
	}
	for i := range 20 {
		n.Spec.Taints = append(n.Spec.Taints, v1.Taint{
			Key:    fmt.Sprintf("example.test/a-rather-long-name-of-a-taint-%d", i),
			Effect: v1.TaintEffectNoExecute,
		})
	}
	maps.Copy(n.Labels, map[string]string{
		"nvidia.com/gpu.count": "8", "nvidia.com/gpu.present": "true", "nvidia.com/mig.config": "all-disabled", "gpu-node-agent/config": "a",
	})
	n.Spec.PodCIDR, n.Spec.PodCIDRs, n.Spec.ProviderID = "10.1.2.0/24", []string{"10.1.2.0/24"}, "test://"+name
	n.Annotations[recordedTaints] = `["example.test/old:NoExecute"]`
	n.Spec.Taints = append(n.Spec.Taints,
		v1.Taint{Key: "gpu-node-agent/not-ready", Effect: v1.TaintEffectNoSchedule}, // the startup taint
		v1.Taint{Key: "gpu-node-agent/unhealthy", Effect: v1.TaintEffectNoSchedule}, // of node.taints
		v1.Taint{Key: "example.test/old", Effect: v1.TaintEffectNoExecute},          // of an earlier node.taints
		v1.Taint{Key: "example.test/taint", Value: "x", Effect: v1.TaintEffectNoSchedule},
	)
	return n
}

// checkNodePolicy checks that a token writes only to its node, and only an agent's labels and taints.
func checkNodePolicy(t *testing.T) {
	const name, other = "policy1", "policy2"
	nodes := theCluster.client.CoreV1().Nodes()
	for _, name := range []string{name, other} {
		if _, err := nodes.Create(t.Context(), largeNode(name), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := nodes.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	own, unbound := agentClient(t, name).CoreV1().Nodes(), agentClient(t, "").CoreV1().Nodes()
	_, err := process.Await(t.Context(), node.Timeout, func(ctx context.Context) error {
		_, err := own.Patch(ctx, other, types.MergePatchType, []byte(`{"metadata": {"labels": {"nvidia.com/gpu.count": "7"}}}`),
			metav1.PatchOptions{})
		return refusedByPolicy(err, "node")
	})
	if err != nil {
		t.Fatal(err)
	}

	labels := func(keyValues string) string { return `{"metadata": {"labels": {` + keyValues + `}}}` }
	annotations := func(keyValues string) string { return `{"metadata": {"annotations": {` + keyValues + `}}}` }
	// taints returns a patch of all taints, as the agent writes it.
	taints := func(recorded string, change func([]v1.Taint) []v1.Taint) string {
		list, err := json.Marshal(change(slices.Clone(largeNode(name).Spec.Taints)))
		if err != nil {
			t.Fatal(err)
		}
		record, err := json.Marshal(recorded)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf(`{"metadata": {"annotations": {%q: %s}}, "spec": {"taints": %s}}`, recordedTaints, record, list)
	}
	without := func(key string) func([]v1.Taint) []v1.Taint {
		return func(list []v1.Taint) []v1.Taint {
			return slices.DeleteFunc(list, func(t v1.Taint) bool { return t.Key == key })
		}
	}
	with := func(key, value string, effect v1.TaintEffect) func([]v1.Taint) []v1.Taint {
		return func(list []v1.Taint) []v1.Taint {
			return append(list, v1.Taint{Key: key, Value: value, Effect: effect})
		}
	}
	same := func(list []v1.Taint) []v1.Taint { return list }
	const record, cordoned = `["example.test/old:NoExecute"]`, "example.com/cordoned"
	for name, c := range map[string]struct {
		patch    string
		admitted bool
	}{
		"labels of GPUs": {
			labels(`"nvidia.com/gpu.count": "7", "nvidia.com/mig-1g.10gb.me.engines.jpeg": "1", "nvidia.com/cuda.driver-version.full": "580.1.2"`),
			true,
		},
		"own labels": {
			labels(`"gpu-node-agent/gpus-healthy": "7", "gpu-node-agent/gpus-degraded": "0", "gpu-node-agent/gpus-unhealthy": "1"`), true,
		},
		"a label of GPUs less":       {labels(`"nvidia.com/gpu.count": null`), true},
		"a label":                    {labels(`"a": "b"`), false},
		"a label of the operator":    {labels(`"nvidia.com/gpu.deploy.driver": "false"`), false},
		"the MIG manager's label":    {labels(`"nvidia.com/mig.config": "all-1g.10gb"`), false},
		"the operator's label less":  {labels(`"nvidia.com/gpu.present": null`), false},
		"another configuration":      {labels(`"gpu-node-agent/config": "b"`), false},
		"no configuration":           {labels(`"gpu-node-agent/config": null`), false},
		"a label that ends like one": {labels(`"x.nvidia.com/gpu.count": "1"`), false},
		"no labels":                  {`{"metadata": {"labels": null}}`, false},

		"an annotation":      {annotations(`"a": "b"`), false},
		"another annotation": {annotations(`"example.test/a": "c"`), false},
		"an annotation less": {annotations(`"example.test/a": null`), false},
		"a finalizer":        {`{"metadata": {"finalizers": ["example.test/x"]}}`, false},
		"an owner":           {`{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "x"}]}}`, false},
		"unschedulable":      {`{"spec": {"unschedulable": true}}`, false},
		"label and cordon":   {`{"metadata": {"labels": {"nvidia.com/gpu.count": "7"}}, "spec": {"unschedulable": true}}`, false},

		"the same taints":       {taints(record, same), true},
		"startup taint removed": {taints(record, without("gpu-node-agent/not-ready")), true},
		"configured taint": {taints(`["example.test/old:NoExecute","example.com/cordoned:PreferNoSchedule"]`,
			with(cordoned, "gpu", v1.TaintEffectPreferNoSchedule)), true},
		"configured taint removed": {taints("[]", without("gpu-node-agent/unhealthy")), true},
		"earlier taint removed":    {taints("[]", without("example.test/old")), true},
		"others' taint removed":    {taints(record, without("example.test/taint")), false},
		"all taints removed":       {`{"spec": {"taints": null}}`, false},
		"others' taint":            {taints(record, with("example.test/new", "", v1.TaintEffectNoExecute)), false},
		"another effect":           {taints(record, with(cordoned, "gpu", v1.TaintEffectNoExecute)), false},
		"another value":            {taints(record, with(cordoned, "x", v1.TaintEffectPreferNoSchedule)), false},
		"startup taint set":        {taints(record, with("gpu-node-agent/not-ready", "", v1.TaintEffectNoExecute)), false},
		"others' value changed":    {taints(record, func(l []v1.Taint) []v1.Taint { l[len(l)-1].Value = "y"; return l }), false},
		"others' time changed": {
			taints(record, func(l []v1.Taint) []v1.Taint { now := metav1.Now(); l[0].TimeAdded = &now; return l }),
			false,
		},
		"others' taint recorded":   {taints(`["example.test/taint:NoSchedule"]`, same), false},
		"recorded beside another":  {taints(`["example.test/old:NoExecute","example.test/taint:NoSchedule"]`, same), false},
		"recorded with an edge":    {taints(`"test/old:NoExecute"]`, same), false},
		"a part of a recorded one": {taints(`"old:NoExecute"`, same), false},
		"recorded and removed":     {taints(`["example.test/taint:NoSchedule"]`, without("example.test/taint")), false},
		"another record":           {taints(`{}`, same), false},
		"an empty record":          {taints(``, same), false},
		"no record":                {annotations(fmt.Sprintf(`%q: null`, recordedTaints)), true},
		"nothing":                  {`{}`, true},
		"labels and taints at once": {strings.Replace(taints(record, without("gpu-node-agent/not-ready")), `"metadata": {`,
			`"metadata": {"labels": {"nvidia.com/gpu.count": "6"}, `, 1), true},
	} {
		resetNode(t, name, "policy1")
		patch := func(token, node string) error {
			client := own
			if token == "" {
				client = unbound
			}
			_, err := client.Patch(t.Context(), node, types.MergePatchType, []byte(c.patch), metav1.PatchOptions{})
			return err
		}
		err := patch("policy1", "policy1")
		if !c.admitted {
			err = refusedByPolicy(err, "node")
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if c.patch == `{}` {
			continue // the API server may skip admission of a patch that changes nothing
		}
		if err := refusedByPolicy(patch("policy1", other), "node"); err != nil {
			t.Errorf("%s: another node: %v", name, err)
		}
		if err := refusedByPolicy(patch("", "policy1"), "node"); err != nil {
			t.Errorf("%s: a token without a pod: %v", name, err)
		}
	}

	t.Run("server-side apply", func(t *testing.T) { checkNodeApply(t, own, name, other) })
	if err := forbidden(own.Delete(t.Context(), name, metav1.DeleteOptions{})); err != nil {
		t.Error(err)
	}
}

// checkNodeApply checks the policy with server-side apply, by a token of the agent on a node.
func checkNodeApply(t *testing.T, own clientv1.NodeInterface, name, other string) {
	resetNode(t, "apply", name)
	apply := func(node, keyValues string) error {
		patch := fmt.Sprintf(`{"apiVersion": "v1", "kind": "Node", "metadata": {"name": %q, "labels": {%s}}}`, node, keyValues)
		_, err := own.Patch(t.Context(), node, types.ApplyPatchType, []byte(patch), metav1.PatchOptions{FieldManager: "gpu-node-agent"})
		return err
	}
	const memory = `"nvidia.com/gpu.memory": "81559"`
	for name, err := range map[string]error{
		"labels":             apply(name, memory),
		"a conflict":         conflict(apply(name, memory+`, "nvidia.com/gpu.count": "7"`)), // of the admin
		"no labels":          apply(name, ""),
		"another node":       refusedByPolicy(apply(other, memory), "node"),
		"a foreign label":    refusedByPolicy(apply(name, memory+`, "a": "b"`), "node"),
		"a node that is not": forbidden(apply("policy3", memory)),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	got, err := theCluster.client.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
	if err != nil || !maps.Equal(got.Labels, largeNode(name).Labels) {
		t.Errorf("the labels %v, want the earlier ones: %v", got.Labels, err)
	}
}

// resetNode sets a node back to what largeNode returns.
func resetNode(t *testing.T, about, name string) {
	t.Helper()
	nodes := theCluster.client.CoreV1().Nodes()
	n, err := nodes.Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatalf("%s: %v", about, err)
	}
	want := largeNode(name)
	n.Labels, n.Annotations, n.Spec.Taints = want.Labels, want.Annotations, want.Spec.Taints
	if _, err := nodes.Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
		t.Fatalf("%s: %v", about, err)
	}
}

// conflict returns an error unless a request conflicts with another manager of a field.
func conflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil
	}
	return fmt.Errorf("error %q, want a conflict", fmt.Sprint(err))
}

// forbidden returns an error unless the account has no right for a request.
func forbidden(err error) error {
	if apierrors.IsForbidden(err) && !strings.Contains(err.Error(), "ValidatingAdmissionPolicy") {
		return nil
	}
	return fmt.Errorf("error %q, want one about rights", fmt.Sprint(err))
}

// features names the NodeFeatures of Node Feature Discovery.
var features = schema.GroupVersionResource{Group: "nfd.k8s-sigs.io", Version: "v1alpha1", Resource: "nodefeatures"}

// defineNodeFeatures creates the definition of NodeFeatures, and removes it after the test.
func defineNodeFeatures(t *testing.T) {
	t.Helper()
	client, err := dynamic.NewForConfig(adminConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	definitions := client.Resource(schema.GroupVersionResource{
		Group: "apiextensions.k8s.io", Version: "v1",
		Resource: "customresourcedefinitions",
	})
	created, err := definitions.Create(t.Context(), nodeFeatureCRD(), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := definitions.Delete(context.Background(), created.GetName(), metav1.DeleteOptions{})
		if err == nil {
			_, err = process.Await(context.Background(), node.Timeout, func(ctx context.Context) error {
				if _, err := definitions.Get(ctx, created.GetName(), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
					return fmt.Errorf("the definition is still there: %w", err)
				}
				return nil
			})
		}
		if err != nil {
			t.Error(err)
		}
	})
}

// checkFeaturePolicy checks that a token writes only the NodeFeature of its node, and only labels of GPUs in it.
func checkFeaturePolicy(t *testing.T) {
	client := func(token string) dynamic.ResourceInterface {
		c, err := dynamic.NewForConfig(accountConfig(t, agentsAccount, token))
		if err != nil {
			t.Fatal(err)
		}
		return c.Resource(features).Namespace(releaseNamespace)
	}
	admin, err := dynamic.NewForConfig(adminConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	all := admin.Resource(features).Namespace(releaseNamespace)
	feature := func(name, nodeName string, spec map[string]any) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": features.GroupVersion().String(), "kind": "NodeFeature", "spec": spec,
			"metadata": map[string]any{"name": name, "labels": map[string]any{"nfd.node.kubernetes.io/node-name": nodeName}},
		}}
	}
	labels := func(key string) map[string]any {
		return map[string]any{"labels": map[string]any{"nvidia.com/gpu.count": "8", key: "1"}, "features": map[string]any{}}
	}
	const name = "gpu-node-agent-n1"
	own := labels("nvidia.com/gpu.family")
	_, err = process.Await(t.Context(), node.Timeout, func(ctx context.Context) error {
		_, err := client("n1").Create(ctx, feature("gpu-node-agent-n2", "n2", own), metav1.CreateOptions{})
		return refusedByPolicy(err, "node-features")
	})
	if err != nil {
		t.Fatal(err)
	}
	for about, c := range map[string]struct {
		token          string
		object         *unstructured.Unstructured
		write, deletes bool // admitted
	}{
		"own":                 {"n1", feature(name, "n1", own), true, true},
		"own, no features":    {"n1", feature(name, "n1", map[string]any{"labels": own["labels"]}), true, true},
		"of no node":          {"n1", feature(name, "", own), false, false},
		"of another node":     {"n1", feature(name, "n2", own), false, false},
		"of another name":     {"n1", feature("n1", "n1", own), false, false},
		"all of another":      {"n1", feature("gpu-node-agent-n2", "n2", own), false, false},
		"a token without pod": {"", feature(name, "n1", own), false, false},
		"a foreign label":     {"n1", feature(name, "n1", labels("nvidia.com/gpu.deploy.driver")), false, true},
		"NFD's label":         {"n1", feature(name, "n1", labels("feature.node.kubernetes.io/a")), false, true},
		"a raw feature": {
			"n1",
			feature(name, "n1", map[string]any{"features": map[string]any{
				"flags": map[string]any{"a.b": map[string]any{"elements": map[string]any{}}},
			}}), false, true,
		},
	} {
		check := func(verb string, err error, admitted bool) {
			if !admitted {
				err = refusedByPolicy(err, "node-features")
			}
			if err != nil {
				t.Errorf("%s: %s: %v", about, verb, err)
			}
		}
		_, err := client(c.token).Create(t.Context(), c.object, metav1.CreateOptions{})
		check("create", err, c.write)
		if !c.write {
			if _, err := all.Create(t.Context(), c.object, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		present, err := all.Get(t.Context(), c.object.GetName(), metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		present.SetAnnotations(map[string]string{"a": "b"})
		_, err = client(c.token).Update(t.Context(), present, metav1.UpdateOptions{})
		check("update", err, c.write)
		check("delete", client(c.token).Delete(t.Context(), c.object.GetName(), metav1.DeleteOptions{}), c.deletes)
		if !c.deletes {
			if err := all.Delete(t.Context(), c.object.GetName(), metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
}
