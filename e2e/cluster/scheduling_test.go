//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/manifests"
)

const schedulingDocument = "../../docs/scheduling.md"

// recipes are the recipes of docs/scheduling.md that no test has applied yet, by heading.
type recipes struct {
	mu     sync.Mutex // guards blocks
	blocks map[string]manifests.Block
}

// recipe is a recipe in a namespace of its own.
type recipe struct {
	manifests.Block
	namespace string
}

func readRecipes(t *testing.T) *recipes {
	t.Helper()
	blocks, err := manifests.Read(schedulingDocument)
	if err != nil {
		t.Fatal(err)
	}
	r := &recipes{blocks: make(map[string]manifests.Block)}
	for _, b := range blocks {
		if _, twice := r.blocks[b.Heading]; twice {
			t.Fatalf("%s: two blocks", b.Heading)
		}
		r.blocks[b.Heading] = b
	}
	return r
}

// take returns a recipe, with the namespace and the image of its objects replaced.
func (r *recipes) take(t *testing.T, heading string) recipe {
	t.Helper()
	r.mu.Lock()
	b, ok := r.blocks[heading]
	delete(r.blocks, heading)
	r.mu.Unlock()
	if !ok {
		t.Fatalf("%s has no YAML block below %q, or it was taken already", schedulingDocument, heading)
	}
	recipe := recipe{b, strings.ToLower(regexp.MustCompile(`\W+`).ReplaceAllString(heading, "-"))}
	for _, o := range b.Objects {
		if o.GetNamespace() != "" {
			o.SetNamespace(recipe.namespace)
		}
		for _, path := range [][]string{{"spec"}, {"spec", "template", "spec"}} {
			spec, _, _ := unstructured.NestedMap(o.Object, path...)
			containers, _, _ := unstructured.NestedSlice(spec, "containers")
			for _, c := range containers {
				c.(map[string]any)["image"], c.(map[string]any)["imagePullPolicy"] = workloadImage, string(v1.PullNever)
			}
			if len(containers) > 0 {
				spec["containers"], spec["terminationGracePeriodSeconds"] = containers, int64(1)
				_ = unstructured.SetNestedMap(o.Object, spec, path...)
			}
		}
	}
	return recipe
}

// apply creates the objects, and the namespace, until the test ends.
func (r recipe) apply(t *testing.T) {
	t.Helper()
	createNamespace(t, r.namespace, nil)
	if err := theCluster.createObjects(t.Context(), metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict},
		r.Objects...); err != nil {
		t.Fatal(err)
	}
}

// pod returns a reference to a pod in the recipe's namespace.
func (r recipe) pod(name string) string { return r.namespace + "/" + name }

// again creates the recipe's only pod under another name.
func (r recipe) again(t *testing.T, name string, change func(*v1.PodSpec)) {
	t.Helper()
	pod := &v1.Pod{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(r.Objects[0].Object, pod); err != nil {
		t.Fatal(err)
	}
	pod.Name = name
	if change != nil {
		change(&pod.Spec)
	}
	if _, err := theCluster.client.CoreV1().Pods(r.namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// checkDenied creates a pod, which the API server must refuse with the message of the document.
func (r recipe) checkDenied(t *testing.T, pod *v1.Pod) {
	t.Helper()
	_, err := theCluster.client.CoreV1().Pods(r.namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || r.Text == "" || !strings.Contains(err.Error(), r.Text) {
		t.Errorf("pod %s: %v, want a refusal with %q", pod.Name, err, r.Text)
	}
}

// awaitDenied waits until a pod is pending with the message of the document.
func (r recipe) awaitDenied(t *testing.T, name string) {
	t.Helper()
	if r.Text == "" {
		t.Fatalf("%s has no message", r.Heading)
	}
	awaitPending(t, r.pod(name), r.Text)
}

// createNamespace creates a namespace, deletes it when the test ends, and waits until pods can run in it.
func createNamespace(t *testing.T, name string, annotations map[string]string) {
	t.Helper()
	namespaces := theCluster.client.CoreV1().Namespaces()
	object := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}}
	if _, err := namespaces.Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := namespaces.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "namespace "+name+" has a service account", func(ctx context.Context) error {
		_, err := theCluster.client.CoreV1().ServiceAccounts(name).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// awaitPhase waits until a pod is in a phase, for a reason unless that is "".
func awaitPhase(t *testing.T, ref string, want v1.PodPhase, reason string) {
	t.Helper()
	eventually(t, fmt.Sprintf("pod %s is %s", ref, want), func(ctx context.Context) error {
		pod, err := getPod(ctx, ref)
		if err == nil && (pod.Status.Phase != want || reason != "" && pod.Status.Reason != reason) {
			err = fmt.Errorf("it is %s: %s: %s: %v", pod.Status.Phase, pod.Status.Reason, pod.Status.Message, pod.Status.Conditions)
		}
		return err
	})
}

// awaitEventIn waits until an object in a namespace has an event whose message contains a text.
func awaitEventIn(t *testing.T, namespace, name, reason, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s/%s has the event %s", namespace, name, reason), func(ctx context.Context) error {
		events, err := theCluster.client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
		if err != nil {
			return err
		}
		var seen []string
		for _, e := range events.Items {
			if e.Reason == reason && strings.Contains(e.Message, text) {
				return nil
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("events: %q", seen)
	})
}

// awaitLabels waits until the node has labels with these values; "" is for a label that it must not have.
func awaitLabels(t *testing.T, want map[string]string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the node has the labels %v", want), func(ctx context.Context) error {
		node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		var errs []error
		for _, key := range slices.Sorted(maps.Keys(want)) {
			if have := node.Labels[key]; have != want[key] {
				errs = append(errs, fmt.Errorf("%s is %q, want %q", key, have, want[key]))
			}
		}
		return errors.Join(errs...)
	})
}

// addTaint adds a taint to a node, and returns a function that removes it.
func addTaint(t *testing.T, node string, taint v1.Taint) (remove func()) {
	t.Helper()
	nodes := theCluster.client.CoreV1().Nodes()
	change := func(ctx context.Context, edit func([]v1.Taint) []v1.Taint) error {
		object, err := nodes.Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		object.Spec.Taints = edit(object.Spec.Taints)
		_, err = nodes.Update(ctx, object, metav1.UpdateOptions{})
		return err
	}
	eventually(t, "taint "+taint.ToString()+" is added", func(ctx context.Context) error {
		return change(ctx, func(taints []v1.Taint) []v1.Taint { return append(taints, taint) })
	})
	return func() {
		t.Helper()
		eventually(t, "taint "+taint.ToString()+" is removed", func(ctx context.Context) error {
			return change(ctx, func(taints []v1.Taint) []v1.Taint {
				return slices.DeleteFunc(taints, func(other v1.Taint) bool { return other.MatchTaint(&taint) })
			})
		})
	}
}

// TestScheduling applies each recipe of docs/scheduling.md, and checks its effect and its message.
func TestScheduling(t *testing.T) {
	all := readRecipes(t)
	step(t, "install", func(t *testing.T) {
		upgrade(t, oldTag, withdrawOnStop, neverFlaps, `config.node.labels.output="api"`,
			`config.plugin.sharing.memory={"resource": "nvidia.com/gpu-memory", "unit": "1Gi", "devices": ["6", "7"]}`)
		awaitAmounts(t, gpu, "6/6")
		awaitLabels(t, map[string]string{"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "gpu-node-agent/gpus-unhealthy": "0"})
	})
	step(t, "beside each other", func(t *testing.T) {
		for name, check := range map[string]func(*testing.T, *recipes){
			"node affinity": checkNodeAffinity, "quota": checkQuota, "limit range": checkLimitRange, "custom resources": checkCustomResources,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				check(t, all)
			})
		}
	})
	step(t, "taint", func(t *testing.T) { checkTaintRecipe(t, all) })
	step(t, "spread", func(t *testing.T) { checkSpread(t, all) })
	step(t, "unhealthy GPUs", func(t *testing.T) { checkUnhealthyRecipe(t, all) })
	step(t, "preemption", func(t *testing.T) { checkPreemption(t, all) })
	step(t, "topology manager", func(t *testing.T) { checkTopology(t, all) })
	for heading := range all.blocks {
		t.Errorf("%s: no test applies %q", schedulingDocument, heading)
	}
	step(t, "helm uninstall", uninstall)
}

func checkNodeAffinity(t *testing.T, all *recipes) {
	r := all.take(t, "Choose nodes by their GPUs")
	r.apply(t)
	r.again(t, "too-large", func(spec *v1.PodSpec) {
		for i := range spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions {
			e := &spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions[i]
			if e.Operator == v1.NodeSelectorOpGt {
				e.Values = []string{"81559"} // what these GPUs have
			}
		}
	})
	awaitRunning(t, r.pod("large"))
	r.awaitDenied(t, "too-large")
}

func checkUnhealthyRecipe(t *testing.T, all *recipes) {
	r := all.take(t, "Avoid nodes with unhealthy GPUs")
	const label = "gpu-node-agent/gpus-unhealthy"
	inject(t, "{gpu: 5, xid: 79, lost: true}")
	awaitLabels(t, map[string]string{label: "1"})
	r.apply(t)
	r.awaitDenied(t, "careful")
	inject(t, "{gpu: 5, lost: false}")
	awaitLabels(t, map[string]string{label: "0"})
	awaitRunning(t, r.pod("careful"))
	deletePods(t, r.pod("careful"))
}

func checkQuota(t *testing.T, all *recipes) {
	r := all.take(t, "Limit the GPUs of a namespace")
	r.apply(t)
	for name, request := range map[string]struct {
		of     v1.ResourceName
		amount string
	}{"first": {gpu, "1"}, "second": {gpu, "1"}, "part": {gpuMemory, "20"}, "mig": {"nvidia.com/mig-1g.10gb", "4"}} {
		startPod(t, r.pod(name), request.of, request.amount)
	}
	for _, name := range []string{"first", "second", "part"} {
		awaitRunning(t, r.pod(name))
	}
	r.checkDenied(t, workloadPod("third", gpu, "1"))
	for of, used := range map[v1.ResourceName]string{gpuMemory: "20", "nvidia.com/mig-1g.10gb": "4"} {
		_, err := theCluster.client.CoreV1().Pods(r.namespace).Create(t.Context(), workloadPod("more", of, "1"), metav1.CreateOptions{})
		if want := fmt.Sprintf("used: requests.%s=%s, limited: requests.%[1]s=%[2]s", of, used); !apierrors.IsForbidden(err) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want a refusal with %q", of, err, want)
		}
	}
	startClaimPod(t, r.namespace, "claims", claim(several(2, request(gpuClass)), ""), claim(request(gpuClass), ""))
	awaitEventIn(t, r.namespace, "claims", "FailedResourceClaimCreation", "exceeded quota: gpus")
	claims, err := theCluster.client.ResourceV1().ResourceClaims(r.namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var devices int64
	for _, c := range claims.Items {
		for _, request := range c.Spec.Devices.Requests {
			devices += request.Exactly.Count
		}
	}
	if len(claims.Items) != 1 || devices > 2 {
		t.Errorf("%d claims for %d devices, want one of at most 2", len(claims.Items), devices)
	}
}

func checkLimitRange(t *testing.T, all *recipes) {
	r := all.take(t, "Limit the GPUs of a container")
	r.apply(t)
	none := workloadPod("none", gpu, "0")
	none.Spec.Containers[0].Resources = v1.ResourceRequirements{}
	if _, err := theCluster.client.CoreV1().Pods(r.namespace).Create(t.Context(), none, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	startPod(t, r.pod("one"), gpu, "1")
	r.checkDenied(t, workloadPod("five", gpu, "5"))
	awaitRunning(t, r.pod("one"))
	awaitPhase(t, r.pod("none"), v1.PodRunning, "")
	pod, err := getPod(t.Context(), r.pod("none"))
	if err != nil {
		t.Fatal(err)
	}
	if amount := pod.Spec.Containers[0].Resources.Requests[gpu]; !amount.IsZero() {
		t.Errorf("a pod without GPUs requests %v", amount)
	}
	if held := heldDevices(t); len(held["none"]) > 0 {
		t.Errorf("a pod without GPUs holds %v", held["none"])
	}
}

// checkCustomResources checks recipes for programs that this cluster does not have by the schemas of these.
func checkCustomResources(t *testing.T, all *recipes) {
	definitions := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	files, err := filepath.Glob(theCluster.file(documentedCRDs, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no definitions: %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		objects, err := manifests.Parse(string(text))
		if err == nil {
			err = theCluster.createObjects(t.Context(), metav1.CreateOptions{}, objects...)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := theCluster.dynamic.Resource(definitions).Delete(context.Background(), objects[0].GetName(),
				metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	for _, heading := range []string{"Wait for the GPUs of a new node", "Queues with Kueue"} {
		r := all.take(t, heading)
		createNamespace(t, r.namespace, nil)
		dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict}
		eventually(t, heading, func(ctx context.Context) error { return theCluster.createObjects(ctx, dry, r.Objects...) })
	}
}

func checkTaintRecipe(t *testing.T, all *recipes) {
	r := all.take(t, "Keep other pods off GPU nodes")
	text, err := os.ReadFile(schedulingDocument)
	if err != nil {
		t.Fatal(err)
	}
	command := regexp.MustCompile(`(?m)^kubectl taint node NODE (\S+)=(\S+):(\S+)$`).FindStringSubmatch(string(text))
	if command == nil {
		t.Fatalf("no command in %s", schedulingDocument)
	}
	defer addTaint(t, nodeName, v1.Taint{Key: command[1], Value: command[2], Effect: v1.TaintEffect(command[3])})()
	r.apply(t)
	r.again(t, "other", func(spec *v1.PodSpec) { spec.Tolerations = nil })
	awaitRunning(t, r.pod("train"))
	r.awaitDenied(t, "other")
	replaceAgentPod(t)             // the chart tolerates it
	awaitKubeletDevices(t, gpu, 6) // it rejects pods until then
	awaitAmounts(t, gpu, "6/6")
	deletePods(t, r.pod("train"), r.pod("other"))
}

// checkSpread has a second node, without GPUs: the second replica waits for it until it has a taint.
func checkSpread(t *testing.T, all *recipes) {
	r := all.take(t, "Spread replicas over nodes")
	other := createNode(t, map[string]string{
		v1.LabelHostname: "node2", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
		"nvidia.com/gpu.present": "false", // for the chart
	})
	if err := patchStatus(t.Context(), theCluster.client, other,
		`{"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "Test"}]}}`); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other node has no taint", func(ctx context.Context) error {
		node, err := theCluster.client.CoreV1().Nodes().Get(ctx, other, metav1.GetOptions{})
		if err == nil && len(node.Spec.Taints) > 0 {
			err = fmt.Errorf("taints: %v", node.Spec.Taints)
		}
		return err
	})
	r.apply(t)
	replicas := func(want func([]v1.Pod) error) {
		t.Helper()
		eventually(t, "replicas", func(ctx context.Context) error {
			pods, err := theCluster.client.CoreV1().Pods(r.namespace).List(ctx, metav1.ListOptions{})
			if err == nil {
				err = want(pods.Items)
			}
			return err
		})
	}
	replicas(func(pods []v1.Pod) error {
		placed, waiting := 0, 0
		for _, p := range pods {
			if p.Spec.NodeName == nodeName {
				placed++
			}
			for _, c := range p.Status.Conditions {
				if c.Type == v1.PodScheduled && c.Status == v1.ConditionFalse && r.Text != "" && strings.Contains(c.Message, r.Text) {
					waiting++
				}
			}
		}
		if len(pods) != 2 || placed != 1 || waiting != 1 {
			return fmt.Errorf("%d pods, %d on %s, %d wait: %v", len(pods), placed, nodeName, waiting, pods)
		}
		return nil
	})
	addTaint(t, other, v1.Taint{Key: "gpu-node-agent/unhealthy", Effect: v1.TaintEffectNoSchedule})
	replicas(func(pods []v1.Pod) error {
		for _, p := range pods {
			if p.Spec.NodeName != nodeName {
				return fmt.Errorf("pod %s is on %q: %v", p.Name, p.Spec.NodeName, p.Status.Conditions)
			}
		}
		return nil
	})
}

func checkPreemption(t *testing.T, all *recipes) {
	r := all.take(t, "Priorities and preemption")
	r.apply(t)
	for _, o := range r.Objects {
		if o.GetKind() == "PriorityClass" {
			t.Cleanup(func() {
				if err := theCluster.client.SchedulingV1().PriorityClasses().Delete(context.Background(), o.GetName(),
					metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
			})
		}
	}
	withClass := func(name, class, gpus string) error {
		pod := workloadPod(name, gpu, gpus)
		pod.Spec.PriorityClassName = class
		_, err := theCluster.client.CoreV1().Pods(r.namespace).Create(t.Context(), pod, metav1.CreateOptions{})
		return err
	}
	start := func(name, class, gpus string) {
		t.Helper()
		eventually(t, "the API server has the PriorityClass", func(context.Context) error { return withClass(name, class, gpus) })
	}
	awaitFree(t)
	start("batch", "gpu-batch", "6")
	awaitRunning(t, r.pod("batch"))
	start("serving", "gpu-serving", "1")
	awaitRunning(t, r.pod("serving"))
	awaitEventIn(t, r.namespace, "batch", "Preempted", "")
	start("next-batch", "gpu-batch", "6")
	r.awaitDenied(t, "next-batch")
	// the API server may have admitted the pod before it saw the quota
	eventually(t, "the quota counts the GPU of the high priority", func(ctx context.Context) error {
		quotas, err := theCluster.client.CoreV1().ResourceQuotas(r.namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, q := range quotas.Items {
			if used := q.Status.Used["requests."+gpu]; q.Name == "gpu-serving" && used.Value() == 1 {
				return nil
			}
		}
		return fmt.Errorf("quotas %v", quotas.Items)
	})
	if err := withClass("greedy", "gpu-serving", "4"); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), "exceeded quota: gpu-serving") {
		t.Errorf("a fifth GPU with the high priority: %v, want a refusal by the quota", err)
	}
	deletePods(t, r.pod("serving"), r.pod("next-batch"))
}

// awaitFree waits until no pod holds a device.
func awaitFree(t *testing.T) {
	t.Helper()
	eventually(t, "no pod holds a GPU", func(context.Context) error {
		if held := heldDevices(t); len(held) > 0 { //nolint:contextcheck // it has t's context
			return fmt.Errorf("pods hold %v", held)
		}
		return nil
	})
}

// checkTopology restarts the kubelet with the policy. The machine has one NUMA node, and four of the simulated GPUs are of it.
func checkTopology(t *testing.T, all *recipes) {
	r := all.take(t, "GPUs of one NUMA node")
	file := theCluster.file("state", "kubelet.yaml")
	original, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	config := make(map[string]any)
	if err := yaml.Unmarshal(original, &config); err != nil {
		t.Fatal(err)
	}
	for key, value := range r.Objects[0].Object {
		if old, ok := config[key]; ok && old != value {
			t.Fatalf("%s is %v already", key, old)
		}
		config[key] = value
	}
	text, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	restart := func(config []byte) {
		t.Helper()
		if err := os.WriteFile(file, config, 0o644); err != nil {
			t.Fatal(err)
		}
		stopKubelet()
		awaitSeries(t, "gpu_node_agent_plugin_registered{", `resource="nvidia.com/gpu"`, "} 0")
		startKubelet(t)
		awaitKubeletDevices(t, gpu, 6)
		awaitAmounts(t, gpu, "6/6")
	}
	createNamespace(t, r.namespace, nil)
	awaitFree(t)
	restart(text)
	defer restart(original)
	startPod(t, r.pod("five"), gpu, "5")
	awaitPhase(t, r.pod("five"), v1.PodFailed, "TopologyAffinityError")
	startPod(t, r.pod("four"), gpu, "4") // before, the scheduler might place it first, and the other one not at all
	if pod, err := getPod(t.Context(), r.pod("five")); err != nil || r.Text == "" || !strings.Contains(pod.Status.Message, r.Text) {
		t.Errorf("message %q, want %q; %v", pod.Status.Message, r.Text, err)
	}
	devices := strings.Split(awaitRunning(t, r.pod("four")), ",")
	page, err := scrape(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range devices {
		if line, err := findLine(page, "gpu_node_agent_device_info{", d); err != nil || label(line, "numa") != "0" {
			t.Errorf("%s: %s, want NUMA node 0; %v", d, line, err)
		}
	}
	if len(devices) != 4 {
		t.Errorf("the pod has %v, want 4 GPUs", devices)
	}
	deletePods(t, r.pod("five"), r.pod("four"))
}
