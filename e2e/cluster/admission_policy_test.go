//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	authv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// account is the service account of the release, and the name of its DaemonSet.
const account = release + "-gpu-node-agent"

// withToken returns a client with a token of the agents' service account, for a pod unless pod is nil.
func withToken(t *testing.T, pod *v1.Pod) *kubernetes.Clientset {
	t.Helper()
	request := &authv1.TokenRequest{}
	if pod != nil {
		request.Spec.BoundObjectRef = &authv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
	}
	token, err := theCluster.client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config := rest.AnonymousClientConfig(theCluster.config)
	config.BearerToken = token.Status.Token
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// otherNode creates a second node, on which no pod runs.
func otherNode(t *testing.T) string {
	t.Helper()
	return createNode(t, nil, v1.Taint{Key: "test", Effect: v1.TaintEffectNoSchedule})
}

// createNode creates a second node, which has no kubelet.
func createNode(t *testing.T, labels map[string]string, taints ...v1.Taint) string {
	t.Helper()
	const name = "node2"
	nodes := theCluster.client.CoreV1().Nodes()
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}, Spec: v1.NodeSpec{Taints: taints}}
	if _, err := nodes.Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := nodes.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	return name
}

// patchStatus patches a node's status, and the parts of its metadata that such a patch can change.
func patchStatus(ctx context.Context, client *kubernetes.Clientset, node, patch string) error {
	_, err := client.CoreV1().Nodes().Patch(ctx, node, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status")
	return err
}

// eventFrom returns an event as the agent on a node writes it.
func eventFrom(host, kind, name string) *v1.Event {
	return &v1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: "default", GenerateName: "test-"},
		InvolvedObject: v1.ObjectReference{APIVersion: "v1", Kind: kind, Name: name, Namespace: map[string]string{"Pod": "default"}[kind]},
		Reason:         "Test", Message: "test", Type: v1.EventTypeWarning, Count: 1,
		Source:              v1.EventSource{Component: "gpu-node-agent", Host: host},
		ReportingController: "gpu-node-agent", ReportingInstance: host,
	}
}

// refusedByPolicy returns an error unless the release's admission policy refused a request.
func refusedByPolicy(err error) error {
	if apierrors.IsForbidden(err) && strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+namespace+"."+account) {
		return nil
	}
	return fmt.Errorf("error %q, want a refusal by the policy", fmt.Sprint(err))
}

// statusCondition is a patch of the node's status: a condition by its type.
const statusCondition = `{"status": {"conditions": [{"type": %q, "status": "False", "reason": "Test", "message": "test"}]}}`

// TestAdmissionPolicy checks that a token of an agent writes only what this agent writes, that other users are not
// affected, and what remains on the nodes after helm uninstall.
func TestAdmissionPolicy(t *testing.T) {
	var agent *kubernetes.Clientset
	other := otherNode(t)
	step(t, "the agent writes its condition", func(t *testing.T) {
		upgrade(t, oldTag, withdrawOnStop)
		awaitCondition(t, v1.ConditionTrue, "AllHealthy")
		agent = withToken(t, mustAgentPod(t))
		eventually(t, "the policies are in force", func(ctx context.Context) error {
			_, err := agent.CoreV1().Events("default").Create(ctx, eventFrom(other, "Pod", "x"), metav1.CreateOptions{})
			return errors.Join(refusedByPolicy(patchStatus(ctx, agent, other, fmt.Sprintf(statusCondition, "GPUHealthy"))), refusedByPolicy(err))
		})
	})
	step(t, "the API server accepts the types of all expressions", checkPolicyTypes)
	step(t, "a token for a pod writes the condition and events of its node only", func(t *testing.T) { checkStatusPolicy(t, agent, other) })
	step(t, "a token without a pod writes nothing", func(t *testing.T) {
		unbound := withToken(t, nil)
		_, err := unbound.CoreV1().Events("default").Create(t.Context(), eventFrom("", "Pod", "x"), metav1.CreateOptions{})
		if err := errors.Join(refusedByPolicy(err),
			refusedByPolicy(patchStatus(t.Context(), unbound, nodeName, fmt.Sprintf(statusCondition, "GPUHealthy")))); err != nil {
			t.Error(err)
		}
	})
	step(t, "events", func(t *testing.T) { checkEventPolicy(t, agent, other) })
	step(t, "other users are not affected", func(t *testing.T) {
		created, err := theCluster.client.CoreV1().Events("default").Create(t.Context(), eventFrom(other, "Service", "x"), metav1.CreateOptions{})
		if err == nil {
			err = theCluster.client.CoreV1().Events("default").Delete(t.Context(), created.Name, metav1.DeleteOptions{})
		}
		if err := errors.Join(err, patchStatus(t.Context(), theCluster.client, other, fmt.Sprintf(statusCondition, "Other"))); err != nil {
			t.Error(err)
		}
	})
	step(t, "a fault reaches the condition, and the events of the node and of the pod", func(t *testing.T) {
		startPod(t, "confined", gpu, "8")
		awaitRunning(t, "confined")
		inject(t, "{gpu: 3, lost: true}")
		awaitCondition(t, v1.ConditionFalse, "Lost")
		awaitPodEvent(t, "confined", "GPUUnhealthy")
		awaitPodEvent(t, nodeName, "GPUUnhealthy")
		deletePods(t, "confined")
	})
	step(t, "without its hook, helm uninstall leaves the condition, which the command in the notes removes", func(t *testing.T) {
		if notes := helm(t, "get", "notes", release, "-n", namespace); !strings.Contains(notes, "gpu-node-agent cleanup --context NAME") {
			t.Fatalf("no command in:\n%s", notes)
		}
		uninstall(t)
		awaitCondition(t, v1.ConditionFalse, "Lost")
		// the other has no such condition
		before := map[string]map[v1.NodeConditionType]string{nodeName: conditionTypes(t, nodeName), other: conditionTypes(t, other)}
		cleanUp(t)
		for name, want := range before {
			delete(want, "GPUHealthy")
			if after := conditionTypes(t, name); fmt.Sprint(after) != fmt.Sprint(want) {
				t.Errorf("%s has the conditions %v, want %v", name, after, want)
			}
		}
	})
	awaitAmounts(t, gpu, "0/0")
}

// checkStatusPolicy checks what the token of an agent's pod writes to the status of its node and of another one.
func checkStatusPolicy(t *testing.T, agent *kubernetes.Clientset, other string) {
	for name, c := range map[string]struct {
		node, patch string
		admitted    bool
	}{
		"the condition":      {nodeName, fmt.Sprintf(statusCondition, "GPUHealthy"), true},
		"no condition":       {nodeName, `{"status": {"conditions": [{"$patch": "delete", "type": "GPUHealthy"}]}}`, true},
		"another node":       {other, fmt.Sprintf(statusCondition, "GPUHealthy"), false},
		"another condition":  {nodeName, fmt.Sprintf(statusCondition, "Ready"), false},
		"a new condition":    {nodeName, fmt.Sprintf(statusCondition, "Other"), false},
		"a condition less":   {nodeName, `{"status": {"conditions": [{"$patch": "delete", "type": "Ready"}]}}`, false},
		"all conditions":     {nodeName, `{"status": {"conditions": null}}`, false},
		"the address":        {nodeName, `{"status": {"addresses": [{"type": "InternalIP", "address": "10.99.0.2"}]}}`, false},
		"no addresses":       {nodeName, `{"status": {"addresses": null}}`, false},
		"the kubelet's port": {nodeName, `{"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}}`, false},
		"a capacity":         {nodeName, `{"status": {"capacity": {"example.test/x": "1"}}}`, false},
		"a GPU less":         {nodeName, `{"status": {"allocatable": {"nvidia.com/gpu": "7"}}}`, false},
		"a label":            {nodeName, `{"metadata": {"labels": {"a": "b"}}}`, false},
		"a label less":       {nodeName, `{"metadata": {"labels": {"kubernetes.io/hostname": null}}}`, false},
		"an annotation":      {nodeName, `{"metadata": {"annotations": {"a": "b"}}}`, false},
		"a finalizer":        {nodeName, `{"metadata": {"finalizers": ["example.test/x"]}}`, false},
		"an owner": {
			nodeName, `{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "x"}]}}`,
			false,
		},
		"condition with labels": {nodeName, strings.Replace(fmt.Sprintf(statusCondition, "GPUHealthy"), "{",
			`{"metadata": {"labels": {"a": "b"}}, `,
			1), false},
	} {
		err := patchStatus(t.Context(), agent, c.node, c.patch)
		if !c.admitted {
			err = refusedByPolicy(err)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// checkPolicyTypes waits until the API server has checked both policies, and reports its warnings.
func checkPolicyTypes(t *testing.T) {
	eventually(t, "two checked policies", func(ctx context.Context) error {
		list, err := theCluster.client.AdmissionregistrationV1().ValidatingAdmissionPolicies().List(ctx,
			metav1.ListOptions{LabelSelector: "app.kubernetes.io/instance=" + release})
		if err != nil {
			return err
		}
		checked := 0
		for _, p := range list.Items {
			if p.Status.TypeChecking == nil {
				continue
			}
			checked++
			for _, w := range p.Status.TypeChecking.ExpressionWarnings {
				t.Errorf("%s: %s: %s", p.Name, w.FieldRef, w.Warning)
			}
		}
		if checked != 2 {
			return fmt.Errorf("%d of %d policies are checked", checked, len(list.Items))
		}
		return nil
	})
}

// checkEventPolicy checks which events an agent's token can write.
func checkEventPolicy(t *testing.T, agent *kubernetes.Clientset, other string) {
	t.Helper()
	foreign := func(change func(*v1.Event)) *v1.Event {
		e := eventFrom(nodeName, "Node", nodeName)
		change(e)
		return e
	}
	for name, c := range map[string]struct {
		event    *v1.Event
		admitted bool
	}{
		"node":               {eventFrom(nodeName, "Node", nodeName), true},
		"pod":                {eventFrom(nodeName, "Pod", "x"), true},
		"other node":         {eventFrom(nodeName, "Node", other), false},
		"other kind":         {eventFrom(nodeName, "Service", "x"), false},
		"from another node":  {eventFrom(other, "Pod", "x"), false},
		"from the kubelet":   {foreign(func(e *v1.Event) { e.Source.Component = "kubelet" }), false},
		"another host":       {foreign(func(e *v1.Event) { e.Source.Host = other }), false},
		"another controller": {foreign(func(e *v1.Event) { e.ReportingController = "kubelet" }), false},
		"another instance":   {foreign(func(e *v1.Event) { e.ReportingInstance = other }), false},
		"without any sources": {
			foreign(func(e *v1.Event) { e.Source, e.ReportingController, e.ReportingInstance = v1.EventSource{}, "", "" }),
			false,
		},
	} {
		_, err := agent.CoreV1().Events("default").Create(t.Context(), c.event, metav1.CreateOptions{})
		if !c.admitted {
			err = refusedByPolicy(err)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	patch := func(of *v1.Event, patch string) error {
		t.Helper()
		created, err := theCluster.client.CoreV1().Events("default").Create(t.Context(), of, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = agent.CoreV1().Events("default").Patch(t.Context(), created.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	const count, toOther = `{"count": 2}`, `{"involvedObject": {"kind": "Pod", "name": "y"}}`
	own, kubelets := eventFrom(nodeName, "Pod", "x"), foreign(func(e *v1.Event) { e.Source.Component = "kubelet" })
	const claim = `{"source": {"component": "gpu-node-agent"}}`
	if err := errors.Join(patch(own, count), refusedByPolicy(patch(own, toOther)), refusedByPolicy(patch(kubelets, count)),
		refusedByPolicy(patch(kubelets, claim)),
		refusedByPolicy(patch(eventFrom(other, "Pod", "x"), count))); err != nil {
		t.Error(err)
	}
}

// conditionTypes returns the types and reasons of a node's conditions.
func conditionTypes(t *testing.T, node string) map[v1.NodeConditionType]string {
	t.Helper()
	object, err := theCluster.client.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	reasons := make(map[v1.NodeConditionType]string)
	for _, c := range object.Status.Conditions {
		reasons[c.Type] = c.Reason
	}
	return reasons
}

// TestKubeletCredentials checks that the agent works with the kubelet's kubeconfig, which the Node authorizer and
// NodeRestriction confine to the node, and without rights of its service account.
func TestKubeletCredentials(t *testing.T) {
	dir := theCluster.file("state", "pki")
	step(t, "the condition, an event and a pod's label", func(t *testing.T) {
		upgrade(t, oldTag, withdrawOnStop, `rbac.create=false`, `config.metrics.podLabels=["team"]`,
			fmt.Sprintf(`config.health.kubernetes.kubeconfig=%q`, theCluster.pki.Kubeconfig(kubeletUser)),
			fmt.Sprintf(`extraVolumes=[{"name": "kubelet", "hostPath": {"path": %q}}]`, dir),
			fmt.Sprintf(`extraVolumeMounts=[{"name": "kubelet", "mountPath": %q, "readOnly": true}]`, dir))
		startPod(t, "labelled", gpu, "8")
		awaitRunning(t, "labelled")
		if _, err := theCluster.client.CoreV1().Pods("default").Patch(t.Context(), "labelled", types.MergePatchType,
			[]byte(`{"metadata": {"labels": {"team": "a"}}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		awaitSeries(t, "DCGM_FI_DEV_GPU_TEMP{", `team="a"`)
		inject(t, "{gpu: 3, lost: true}")
		awaitCondition(t, v1.ConditionFalse, "Lost")
		awaitPodEvent(t, "labelled", "GPUUnhealthy")
		deletePods(t, "labelled")
	})
	step(t, "helm uninstall", uninstall)
}
