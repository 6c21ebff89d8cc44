package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	cleanupAccount    = agentsAccount + "-cleanup"
	cleanupJob        = "gna-gpu-node-agent-cleanup"
	cleanedAnnotation = "gpu-node-agent/cleaned"
)

// cleanupReport is what `gpu-node-agent cleanup -o json` prints.
type cleanupReport struct {
	Nodes []struct {
		Node, Waits, Unknown, Error string
		Taints, Labels              []string
		NodeFeatures                []string
		Condition, Done             bool
	}
	Errors []string
}

// TestCleanup has an agent write what it can, and the hook's account remove what no configuration has any more.
func TestCleanup(t *testing.T) {
	const (
		theirs = "dedicated=ml:NoSchedule"
		bad    = "gpu-node-agent/unhealthy:NoSchedule"
	)
	defineNodeFeatures(t)
	installChart(t, "cluster-values.yaml")
	createNamespace(t, releaseNamespace)
	createNamespace(t, "other")
	n := nodeMachine(t, "left", nodeRights(), rbac.PolicyRule{
		APIGroups: []string{""}, Resources: []string{"nodes/status"},
		Verbs: []string{"patch"},
	})
	n.patch("karpenter", `{"spec": {"taints": [{"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]},
		"metadata": {"labels": {"example.test/rack": "r1"}}}`)
	n.Configure(fmt.Sprintf("source: {sim: {profile: h100-8}}\nhealth: {kubernetes: {enabled: true, kubeconfig: %s}}\n"+
		"node: {labels: {output: api}, taints: [{when: allUnhealthy, key: gpu-node-agent/unhealthy, effect: NoSchedule}]}\n",
		theCluster.pki.Kubeconfig(n.name)))
	n.start(8)
	for i := range 8 {
		n.Inject(`{"gpu": %d, "xid": 79, "lost": true}`, i)
	}
	n.awaitTaints("all GPUs are unhealthy", theirs, bad)
	n.awaitLabels("the labels of unhealthy GPUs", map[string]string{"gpu-node-agent/gpus-unhealthy": "8", "nvidia.com/gpu.count": "8"})
	n.awaitCondition(v1.ConditionFalse, "Xid79")
	n.EndAgent()

	features := createFeature(t, n.name)
	for _, other := range []string{"waits", "keeps", "foreign", "replaced", "dropped"} {
		createNode(t, other)
		machine{n.Node, other}.patch("test", `{"metadata": {"annotations": {"`+recordedTaints+`": "[\"`+bad+`\"]"}},
			"spec": {"taints": [{"key": "gpu-node-agent/unhealthy", "effect": "NoSchedule"}]}}`) // without the taints of a new node
	}
	unset := createAgents(t, releaseNamespace, "gna-gpu-node-agent", "{}")
	keeps := createAgents(t, releaseNamespace, "gna-gpu-node-agent-plain",
		"node: {taints: [{when: anyUnhealthy, key: gpu-node-agent/unhealthy, effect: NoSchedule}]}")
	foreign := createAgents(t, "other", "other", "{}")
	pod := createAgentPod(t, unset, n.name, "new")
	createAgentPod(t, unset, "waits", "old")
	createAgentPod(t, keeps, "keeps", "new")
	createAgentPod(t, foreign, "foreign", "new")
	createAgentPod(t, foreign, "replaced", "new") // a release that the hook's account cannot read

	createJob(t, cleanupJob)
	kubeconfig := impersonate(t, cleanupAccount)
	run := func(args ...string) cleanupReport {
		t.Helper()
		out, err := n.Output(append([]string{"cleanup", "--kubeconfig", kubeconfig, "--namespace", releaseNamespace, "-o", "json"}, args...)...)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		var r cleanupReport
		if err := json.Unmarshal(out, &r); err != nil || len(r.Errors) > 0 {
			t.Fatalf("%v\n%s", err, out)
		}
		return r
	}
	run().check(t, n.name, bad, false)
	n.awaitTaints("a dry run changes nothing", theirs, bad)
	run("--apply", "--hook", cleanupJob, "--wait", "1s").check(t, n.name, bad, true)
	n.awaitTaints("the agent's are removed", theirs)
	machine{n.Node, "dropped"}.awaitTaints("no DaemonSet selects the node")
	checkCleaned(t, n.object())
	if _, err := features.Get(t.Context(), "gpu-node-agent-"+n.name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the NodeFeature: %v", err)
	}
	for _, other := range []string{"waits", "keeps", "foreign", "replaced"} {
		machine{n.Node, other}.awaitTaints("what may still be configured stays", bad)
	}
	marked := func() (at string) {
		p, err := theCluster.client.CoreV1().Pods(releaseNamespace).Get(t.Context(), pod, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return p.Annotations[cleanedAnnotation]
	}
	at := marked()
	if at == "" {
		t.Error("the agent's pod has no annotation")
	}
	if run("--apply", "--hook", cleanupJob); marked() != at {
		t.Error("the hook told an agent on whose node nothing was left")
	}
	if run("--apply"); marked() == at {
		t.Error("the command did not tell an agent on whose node nothing is left")
	}
	checkCleanupRights(t, pod)
	theCluster.deletePods(t, releaseNamespace, "other")
	deleteAgents(t, keeps, foreign, unset)
	if r := run("--apply", "--hook", cleanupJob); len(r.Nodes) != 4 { // after helm uninstall
		t.Errorf("%+v", r)
	}
	for _, other := range []string{"waits", "keeps", "foreign", "replaced"} {
		machine{n.Node, other}.awaitTaints("no agent is left in the cluster")
	}
}

// check checks that the hook finds all that an agent has written on its node, and why it leaves other nodes alone. done: it has removed it.
func (r cleanupReport) check(t *testing.T, name, taint string, done bool) {
	t.Helper()
	want := map[string]string{
		"left": "", "dropped": "", "waits": "not of the newest revision", "foreign": "not in the namespace",
		"replaced": "not in the namespace",
	}
	for _, i := range r.Nodes {
		reason, ok := want[i.Node]
		if !ok || i.Error != "" || !strings.Contains(i.Waits+i.Unknown, reason) || (reason == "") != (i.Waits+i.Unknown == "") ||
			i.Done != (done && reason == "") {
			t.Errorf("%+v", i)
		}
		if i.Node == name && (!slices.Equal(i.Taints, []string{taint}) || len(i.Labels) < 10 || !i.Condition ||
			!slices.Equal(i.NodeFeatures, []string{releaseNamespace})) {
			t.Errorf("%+v", i)
		}
		delete(want, i.Node)
	}
	if len(want) > 0 {
		t.Errorf("the report has no nodes %v", want)
	}
}

// checkCleaned checks that a node has only labels, annotations and conditions of others.
func checkCleaned(t *testing.T, object *v1.Node) {
	t.Helper()
	for key := range object.Labels {
		if key != v1.LabelHostname && key != "example.test/rack" {
			t.Errorf("label %s is left", key)
		}
	}
	if len(object.Labels) != 2 || object.Annotations[recordedTaints] != "" {
		t.Errorf("labels %v, annotations %v", object.Labels, object.Annotations)
	}
	if len(object.Status.Conditions) != 1 || object.Status.Conditions[0].Type != v1.NodeReady {
		t.Errorf("conditions %v", object.Status.Conditions)
	}
}

// checkCleanupRights checks that the account cannot change what runs in a pod, nor read other ConfigMaps.
func checkCleanupRights(t *testing.T, pod string) {
	t.Helper()
	client, err := kubernetes.NewForConfig(accountConfig(t, cleanupAccount, "n1"))
	if err != nil {
		t.Fatal(err)
	}
	core := client.CoreV1()
	const image = `{"spec": {"containers": [{"name": "gpu-node-agent", "image": "example.test/other"}]}}`
	if _, err := core.Pods(releaseNamespace).Patch(t.Context(), pod, types.StrategicMergePatchType, []byte(image),
		metav1.PatchOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("an image: %v", err)
	}
	if p, err := core.Pods(releaseNamespace).Patch(t.Context(), pod, types.StrategicMergePatchType, []byte(image), metav1.PatchOptions{},
		"status"); err != nil || p.Spec.Containers[0].Image == "example.test/other" {
		t.Errorf("an image by the status: %v", err)
	}
	for name, err := range map[string]error{
		"a ConfigMap of others": func() error {
			_, err := core.ConfigMaps("other").Get(t.Context(), "other", metav1.GetOptions{})
			return err
		}(),
		"another ConfigMap": func() error {
			_, err := core.ConfigMaps(releaseNamespace).Get(t.Context(), "kube-root-ca.crt", metav1.GetOptions{})
			return err
		}(),
		"another Job": func() error {
			_, err := client.BatchV1().Jobs(releaseNamespace).Get(t.Context(), "other", metav1.GetOptions{})
			return err
		}(),
		"a pod of others": func() error {
			_, err := core.Pods("other").Patch(t.Context(), "agent-foreign", types.MergePatchType, []byte("{}"), metav1.PatchOptions{}, "status")
			return err
		}(),
		"secrets": func() error {
			_, err := core.Secrets(releaseNamespace).List(t.Context(), metav1.ListOptions{})
			return err
		}(),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// createJob creates the Job that the command runs as.
func createJob(t *testing.T, name string) {
	t.Helper()
	jobs := theCluster.client.BatchV1().Jobs(releaseNamespace)
	spec := v1.PodSpec{RestartPolicy: v1.RestartPolicyNever, Containers: []v1.Container{{Name: "cleanup", Image: "example.test/agent"}}}
	job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: batchv1.JobSpec{Template: v1.PodTemplateSpec{Spec: spec}}}
	if _, err := jobs.Create(t.Context(), job, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := jobs.Delete(context.Background(), name,
			metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationBackground)}); err != nil {
			t.Error(err)
		}
	})
}

// impersonate returns a kubeconfig file with the rights of a service account.
func impersonate(t *testing.T, account string) string {
	t.Helper()
	config, err := clientcmd.LoadFromFile(theCluster.pki.Kubeconfig(admin))
	if err != nil {
		t.Fatal(err)
	}
	for _, user := range config.AuthInfos {
		user.Impersonate, user.ImpersonateGroups = account, []string{"system:serviceaccounts", "system:authenticated"}
	}
	file := t.TempDir() + "/kubeconfig"
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		t.Fatal(err)
	}
	return file
}

func createNode(t *testing.T, name string) {
	t.Helper()
	if _, err := theCluster.client.CoreV1().Nodes().Create(t.Context(), newObject(name), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := theCluster.client.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
}

// createFeature creates the NodeFeature of a node as an agent does, and one of Node Feature Discovery.
func createFeature(t *testing.T, node string) dynamic.ResourceInterface {
	t.Helper()
	client, err := dynamic.NewForConfig(adminConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	features := client.Resource(schema.GroupVersionResource{
		Group: "nfd.k8s-sigs.io", Version: "v1alpha1",
		Resource: "nodefeatures",
	}).Namespace(releaseNamespace)
	for _, name := range []string{"gpu-node-agent-" + node, node} {
		object := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "nfd.k8s-sigs.io/v1alpha1", "kind": "NodeFeature",
			"metadata": map[string]any{"name": name, "labels": map[string]any{"nfd.node.kubernetes.io/node-name": node}},
			"spec":     map[string]any{"labels": map[string]any{"nvidia.com/gpu.count": "8"}},
		}}
		if _, err := features.Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	return features
}

// createAgents creates a DaemonSet of agents with its ConfigMap, and its revisions old and new as its controller does.
func createAgents(t *testing.T, namespace, name, config string) *appsv1.DaemonSet {
	t.Helper()
	apps := theCluster.client.AppsV1()
	labels := map[string]string{"app": name, "gpu-node-agent/serves": "node"}
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: appsv1.DaemonSetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: v1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec:       agentPodSpec(name),
		},
	}}
	set, err := apps.DaemonSets(namespace).Create(t.Context(), set, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = apps.DaemonSets(namespace).Delete(context.Background(), name, metav1.DeleteOptions{}) })
	set.Status.ObservedGeneration = set.Generation
	if _, err := apps.DaemonSets(namespace).UpdateStatus(t.Context(), set, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	for i, hash := range []string{"old", "new"} {
		revision := &appsv1.ControllerRevision{
			Revision: int64(i + 1), Data: runtime.RawExtension{Raw: []byte("{}")},
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: name + "-" + hash,
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))},
				Labels:          map[string]string{"app": name, "gpu-node-agent/serves": "node", appsv1.DefaultDaemonSetUniqueLabelKey: hash},
			},
		}
		if _, err := apps.ControllerRevisions(namespace).Create(t.Context(), revision, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = apps.ControllerRevisions(namespace).Delete(context.Background(), revision.Name, metav1.DeleteOptions{})
		})
	}
	maps := theCluster.client.CoreV1().ConfigMaps(namespace)
	if _, err := maps.Create(t.Context(), &v1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Data:       map[string]string{"config.yaml": config},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = maps.Delete(context.Background(), name, metav1.DeleteOptions{}) })
	return set
}

// deleteAgents deletes DaemonSets with their ConfigMaps, as helm uninstall does.
func deleteAgents(t *testing.T, sets ...*appsv1.DaemonSet) {
	t.Helper()
	for _, set := range sets {
		if err := theCluster.client.AppsV1().DaemonSets(set.Namespace).Delete(t.Context(), set.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := theCluster.client.CoreV1().ConfigMaps(set.Namespace).Delete(t.Context(), set.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

func agentPodSpec(configMap string) v1.PodSpec {
	return v1.PodSpec{
		Containers:   []v1.Container{{Name: "gpu-node-agent", Image: "example.test/agent"}},
		NodeSelector: map[string]string{"example.test/agents": "true"},
		Volumes: []v1.Volume{{Name: "config", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{
			LocalObjectReference: v1.LocalObjectReference{Name: configMap},
		}}}},
	}
}

// createAgentPod creates the running pod of a DaemonSet on a node, of a revision.
func createAgentPod(t *testing.T, set *appsv1.DaemonSet, node, revision string) (name string) {
	t.Helper()
	pods := theCluster.client.CoreV1().Pods(set.Namespace)
	spec := agentPodSpec(set.Name)
	spec.NodeName = node
	pod, err := pods.Create(t.Context(), &v1.Pod{Spec: spec, ObjectMeta: metav1.ObjectMeta{
		Name: "agent-" + node, Labels: map[string]string{"gpu-node-agent/serves": "node", appsv1.DefaultDaemonSetUniqueLabelKey: revision},
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))},
	}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status.ContainerStatuses = []v1.ContainerStatus{{
		Name:  "gpu-node-agent",
		State: v1.ContainerState{Running: new(v1.ContainerStateRunning)},
	}}
	if _, err := pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return pod.Name
}

// deletePods deletes the agents' pods of namespaces at once.
func (c *cluster) deletePods(t *testing.T, namespaces ...string) {
	t.Helper()
	for _, namespace := range namespaces {
		err := c.client.CoreV1().Pods(namespace).DeleteCollection(t.Context(), metav1.DeleteOptions{GracePeriodSeconds: new(int64)},
			metav1.ListOptions{LabelSelector: "gpu-node-agent/serves"})
		if err != nil {
			t.Fatal(err)
		}
	}
}
