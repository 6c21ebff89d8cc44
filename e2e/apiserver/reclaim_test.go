package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	batchv1 "k8s.io/api/batch/v1"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

const (
	reclaimAccount   = agentsAccount + "-reclaim"
	reclaimUser      = "reclaim" // its files
	reclaimNamespace = "default" // of the policy in the chart's values
	recordKey        = "gpu-node-agent/reclaimed"
	afterAction      = "after the action"
)

// reclaimRun is the report of a run of the command.
type reclaimRun struct {
	Actions []struct {
		Action, Kind, Name, Error string
		Done                      bool
	}
	Skipped []struct{ Kind, Name, Reason, Text string }
	Errors  []string
}

// done returns the actions that were done, such as "scale Deployment web", and the errors of the others.
func (r reclaimRun) done() (all []string) {
	for _, a := range r.Actions {
		text := a.Action + " " + a.Kind + " " + a.Name
		if !a.Done {
			text += ": " + a.Error
		}
		all = append(all, text)
	}
	return all
}

// skipped returns why an object is left alone.
func (r reclaimRun) skipped(name string) (reason, text string) {
	for _, s := range r.Skipped {
		if s.Name == name {
			return s.Reason, s.Text
		}
	}
	return "", ""
}

// reclaimRig is a node with an agent that the API server lists, and idle pods.
type reclaimRig struct {
	machine
	t *testing.T
}

func newReclaimRig(t *testing.T) reclaimRig {
	t.Helper()
	g := reclaimRig{newMachine(t, "reclaim", unprivileged), t}
	if err := theCluster.pki.User(reclaimUser, reclaimAccount); err != nil {
		t.Fatal(err)
	}
	g.Configure("source: {sim: {profile: h100-8}}\nmetrics: {processes: {enabled: true}}\n")
	g.start(8)
	g.Inject(`{"gpu": 0, "processes": []}`) // from now on no GPU works
	g.Write("policy.yaml", reclaimPolicy("0s"))
	host, port, err := net.SplitHostPort(g.Address)
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	pod := node.Pod(releaseNamespace, "agent", node.GPU, 1)
	pod.Labels, pod.Spec.NodeName = map[string]string{"app.kubernetes.io/name": "gpu-node-agent"}, g.name
	pod.Spec.Containers[0].Resources = v1.ResourceRequirements{}
	pod.Spec.Containers[0].Ports = []v1.ContainerPort{{Name: "metrics", ContainerPort: int32(number)}}
	g.setReady(g.create(pod), host)
	return g
}

func reclaimPolicy(notice string) string {
	return "namespaces: [" + reclaimNamespace + "]\nidle: {after: 3s, evidence: noProcess}\nminimumAge: 0s\nnotice: " + notice + "\n"
}

// create creates a pod.
func (g reclaimRig) create(pod *v1.Pod) *v1.Pod {
	g.t.Helper()
	pod, err := theCluster.client.CoreV1().Pods(pod.Namespace).Create(g.t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { g.remove(pod) })
	return pod
}

// setReady writes the status of a pod that has been Ready for an hour, as the kubelet does.
func (g reclaimRig) setReady(pod *v1.Pod, ip string) {
	g.t.Helper()
	pod.Status = v1.PodStatus{Phase: v1.PodRunning, PodIP: ip, PodIPs: []v1.PodIP{{IP: ip}}, Conditions: []v1.PodCondition{{
		Type: v1.PodReady, Status: v1.ConditionTrue, LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Hour)),
	}}}
	if ip == "" {
		pod.Status.PodIPs = nil
	}
	if _, err := theCluster.client.CoreV1().Pods(pod.Namespace).UpdateStatus(g.t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		g.t.Fatal(err)
	}
}

// runIdle runs a Ready pod that holds a GPU, of an owner unless that is nil.
func (g reclaimRig) runIdle(name string, labels map[string]string, owner *metav1.OwnerReference) *v1.Pod {
	g.t.Helper()
	pod := node.Pod(reclaimNamespace, name, node.GPU, 1)
	pod.Labels, pod.Spec.NodeName = labels, g.name
	if owner != nil {
		pod.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	pod = g.create(pod)
	g.Admit(g.Bind(pod))
	g.setReady(pod, "")
	return pod
}

// remove deletes a pod, as its controller and the kubelet do.
func (g reclaimRig) remove(pod *v1.Pod) {
	err := theCluster.client.CoreV1().Pods(pod.Namespace).Delete(g.t.Context(), pod.Name, *metav1.NewDeleteOptions(0))
	if err != nil && !apierrors.IsNotFound(err) && g.t.Context().Err() == nil {
		g.t.Error(err)
	}
}

// reclaim runs the command with the account's rights. Only its actions may have errors.
func (g reclaimRig) reclaim(args ...string) reclaimRun {
	g.t.Helper()
	r := g.runReclaim(args...)
	for _, e := range r.Errors {
		g.t.Errorf("%v: %s", args, e)
	}
	return r
}

func (g reclaimRig) runReclaim(args ...string) (r reclaimRun) {
	g.t.Helper()
	args = append([]string{
		"reclaim", "--policy", g.File("policy.yaml"), "--kubeconfig", theCluster.pki.Kubeconfig(reclaimUser), "--agent-namespace",
		releaseNamespace, "-o", "json",
	}, args...)
	out, commandErr := g.Output(args...)
	if err := json.Unmarshal(out, &r); err != nil {
		g.t.Fatalf("%v: %v: %s", args, errors.Join(commandErr, err), out)
	}
	return r
}

// await runs dry runs until one would do exactly these actions.
func (g reclaimRig) await(want ...string) {
	g.t.Helper()
	g.Eventually(fmt.Sprintf("plan %q", want), func() error {
		var planned []string
		r := g.reclaim()
		for _, a := range r.Actions {
			planned = append(planned, a.Action+" "+a.Kind+" "+a.Name)
		}
		slices.Sort(planned)
		if !slices.Equal(planned, want) {
			return fmt.Errorf("planned %q, skipped %v", planned, r.Skipped)
		}
		return nil
	})
}

// checkReclaimCommand checks the command with the rights that the chart grants it.
func checkReclaimCommand(t *testing.T) {
	g := newReclaimRig(t)
	for _, kind := range []string{"Deployment", "StatefulSet", "ReplicaSet"} {
		t.Run(kind, func(t *testing.T) { reclaimRig{g.machine, t}.checkScaled(kind) })
	}
	t.Run("Job", func(t *testing.T) { reclaimRig{g.machine, t}.checkSuspended() })
	t.Run("Pod", func(t *testing.T) { reclaimRig{g.machine, t}.checkEvicted() })
	t.Run("namespaces", func(t *testing.T) { reclaimRig{g.machine, t}.checkOtherNamespaces() })
	g.EndAgent()
}

// scalable is a Deployment, ReplicaSet or StatefulSet.
type scalable struct {
	g              reclaimRig
	kind, resource string
	name           string
	scales         interface {
		UpdateScale(context.Context, string, *autoscalingv1.Scale, metav1.UpdateOptions) (*autoscalingv1.Scale, error)
	}
}

// newScalable creates an owner with an idle pod.
func (g reclaimRig) newScalable(kind string) scalable {
	g.t.Helper()
	apps := theCluster.client.AppsV1()
	s := scalable{g: g, kind: kind, resource: strings.ToLower(kind) + "s", name: strings.ToLower(kind)}
	labels := map[string]string{"app": s.name}
	m := metav1.ObjectMeta{Name: s.name, Namespace: reclaimNamespace, Annotations: map[string]string{"keep": "this"}}
	replicas, selector := int32(1), &metav1.LabelSelector{MatchLabels: labels}
	template := v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: node.Pod("", "", node.GPU, 1).Spec}
	var owner metav1.Object
	var err error
	if kind == "Deployment" {
		s.scales = apps.Deployments(reclaimNamespace)
		spec := appsv1.DeploymentSpec{Replicas: &replicas, Selector: selector, Template: template}
		owner, err = apps.Deployments(reclaimNamespace).Create(g.t.Context(), &appsv1.Deployment{ObjectMeta: m, Spec: spec},
			metav1.CreateOptions{})
		if err != nil {
			g.t.Fatal(err)
		}
		m.Name += "-1"
		m.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(owner, appsv1.SchemeGroupVersion.WithKind(kind))}
		kind = "ReplicaSet"
	}
	switch kind {
	case "ReplicaSet":
		spec := appsv1.ReplicaSetSpec{Replicas: &replicas, Selector: selector, Template: template}
		owner, err = apps.ReplicaSets(reclaimNamespace).Create(g.t.Context(), &appsv1.ReplicaSet{ObjectMeta: m, Spec: spec},
			metav1.CreateOptions{})
		if s.scales == nil {
			s.scales = apps.ReplicaSets(reclaimNamespace)
		}
	case "StatefulSet":
		s.scales = apps.StatefulSets(reclaimNamespace)
		spec := appsv1.StatefulSetSpec{Replicas: &replicas, Selector: selector, Template: template, ServiceName: s.name}
		owner, err = apps.StatefulSets(reclaimNamespace).Create(g.t.Context(), &appsv1.StatefulSet{ObjectMeta: m, Spec: spec},
			metav1.CreateOptions{})
	}
	if err != nil {
		g.t.Fatal(err)
	}
	g.runIdle(s.name+"-pod", labels, metav1.NewControllerRef(owner, appsv1.SchemeGroupVersion.WithKind(kind)))
	return s
}

// check checks the replicas of an owner and whether it has a record.
func (s scalable) check(what string, replicas int32, recorded bool) {
	s.g.t.Helper()
	text, err := theCluster.client.AppsV1().RESTClient().Get().Namespace(reclaimNamespace).Resource(s.resource).Name(s.name).Do(
		s.g.t.Context()).Raw()
	var o struct {
		Metadata metav1.ObjectMeta
		Spec     struct{ Replicas int32 }
	}
	if err := errors.Join(err, json.Unmarshal(text, &o)); err != nil {
		s.g.t.Fatal(err)
	}
	record, exists := o.Metadata.Annotations[recordKey]
	if o.Spec.Replicas != replicas || exists != recorded || o.Metadata.Annotations["keep"] != "this" {
		s.g.t.Errorf("%s: %d replicas, annotations %q", what, o.Spec.Replicas, o.Metadata.Annotations)
	}
	if what != afterAction {
		return
	}
	var r struct {
		Replicas   int32
		At         time.Time
		Generation int64
	}
	if err := json.Unmarshal([]byte(record), &r); err != nil || r.Replicas != 1 || r.Generation != o.Metadata.Generation ||
		time.Since(r.At) > time.Hour {
		s.g.t.Errorf("%s: record %q of generation %d, %v", what, record, o.Metadata.Generation, err)
	}
}

// scale sets the replicas as an autoscaler does.
func (s scalable) scale(replicas int32) {
	s.g.t.Helper()
	scale := &autoscalingv1.Scale{
		ObjectMeta: metav1.ObjectMeta{Name: s.name, Namespace: reclaimNamespace},
		Spec:       autoscalingv1.ScaleSpec{Replicas: replicas},
	}
	if _, err := s.scales.UpdateScale(s.g.t.Context(), s.name, scale, metav1.UpdateOptions{FieldManager: "autoscaler"}); err != nil {
		s.g.t.Fatal(err)
	}
}

// patch changes the owner as another manager does.
func (s scalable) patch(patch, manager string) {
	s.g.t.Helper()
	err := theCluster.client.AppsV1().RESTClient().Patch(types.MergePatchType).Namespace(reclaimNamespace).Resource(s.resource).Name(s.name).
		Param("fieldManager", manager).Body([]byte(patch)).Do(s.g.t.Context()).Error()
	if err != nil {
		s.g.t.Fatal(err)
	}
}

// expect checks which actions a run did.
func (g reclaimRig) expect(r reclaimRun, want ...string) {
	g.t.Helper()
	if got := r.done(); !slices.Equal(got, want) {
		g.t.Errorf("did %q, want %q; skipped %v", got, want, r.Skipped)
	}
}

// expectSkipped checks why a run leaves an object alone.
func (g reclaimRig) expectSkipped(r reclaimRun, name, reason, text string) {
	g.t.Helper()
	g.expect(r)
	if got, why := r.skipped(name); got != reason || !strings.Contains(why, text) {
		g.t.Errorf("%s is left alone because of %q (%s), want %q with %q", name, got, why, reason, text)
	}
}

// expectEvents checks the reasons of an object's events, oldest first.
func (g reclaimRig) expectEvents(kind, name string, want ...string) {
	g.t.Helper()
	list, err := theCluster.client.CoreV1().Events(reclaimNamespace).List(g.t.Context(),
		metav1.ListOptions{FieldSelector: "involvedObject.kind=" + kind + ",involvedObject.name=" + name})
	if err != nil {
		g.t.Fatal(err)
	}
	var got []string
	for _, e := range list.Items {
		if e.Source.Component == "gpu-node-agent-reclaim" && e.InvolvedObject.UID != "" {
			got = append(got, e.Reason)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		g.t.Errorf("events of %s: %q, want %q", name, got, want)
	}
}

func (g reclaimRig) checkScaled(kind string) {
	s := g.newScalable(kind)
	action := "scale " + kind + " " + s.name
	g.await(action)
	s.check("after dry runs", 1, false)

	// Two runs at once: one acts.
	var runs sync.WaitGroup
	var both [2]reclaimRun
	for i := range both {
		runs.Go(func() { both[i] = g.reclaim("--apply") })
	}
	runs.Wait()
	done := slices.DeleteFunc(slices.Concat(both[0].done(), both[1].done()), func(text string) bool { return text != action })
	if len(done) != 1 {
		g.t.Errorf("two runs at once: %v", both)
	}
	s.check(afterAction, 0, true)
	g.expectEvents(kind, s.name, "GPUReclaimed")

	g.expect(g.reclaim("--undo"), "restore "+kind+" "+s.name+": ")
	s.check("after a dry run of undo", 0, true)
	g.expect(g.reclaim("--undo", "--apply"), "restore "+kind+" "+s.name)
	s.check("after undo", 1, false)
	g.expectEvents(kind, s.name, "GPUReclaimed", "GPURestored")

	// Somebody scales it back. The API server has no name for a change of 0 by the subresource.
	g.expect(g.reclaim("--apply"), action)
	s.scale(1)
	g.expectSkipped(g.reclaim("--apply"), s.name, "scaledBack", "")
	g.expectSkipped(g.reclaim("--undo", "--apply"), s.name, "changed", "")
	s.scale(0)
	g.expectSkipped(g.reclaim("--undo", "--apply"), s.name, "changed", "2 times")
	s.scale(1)
	s.patch(`{"spec":{"replicas":0}}`, "editor")
	g.expectSkipped(g.reclaim("--undo", "--apply"), s.name, "changed", "editor")
	s.check("after undo of an owner that somebody set to 0", 0, true)
	s.patch(`{"spec":{"replicas":1}}`, "gitops")
	g.expectSkipped(g.reclaim("--apply"), s.name, "scaledBack", "gitops")
	s.patch(`{"metadata":{"annotations":{"gpu-node-agent/reclaim-opt-out":""}}}`, "owner")
	g.expectSkipped(g.reclaim("--apply"), s.name, "optedOut", "")
}

func (g reclaimRig) checkSuspended() {
	jobs := theCluster.client.BatchV1().Jobs(reclaimNamespace)
	template := v1.PodTemplateSpec{Spec: node.Pod("", "", node.GPU, 1).Spec}
	template.Spec.RestartPolicy = v1.RestartPolicyNever
	job, err := jobs.Create(g.t.Context(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "train"},
		Spec:       batchv1.JobSpec{Template: template},
	}, metav1.CreateOptions{})
	if err != nil {
		g.t.Fatal(err)
	}
	check := func(what string, suspended, recorded bool) {
		g.t.Helper()
		job, err := jobs.Get(g.t.Context(), "train", metav1.GetOptions{})
		if err != nil {
			g.t.Fatal(err)
		}
		if _, exists := job.Annotations[recordKey]; exists != recorded || (job.Spec.Suspend != nil && *job.Spec.Suspend) != suspended {
			g.t.Errorf("%s: suspended %v, annotations %q", what, job.Spec.Suspend, job.Annotations)
		}
	}
	g.runIdle("train-1", nil, metav1.NewControllerRef(job, batchv1.SchemeGroupVersion.WithKind("Job")))
	g.await("suspend Job train")
	g.expect(g.reclaim("--apply"), "suspend Job train")
	check("after the action", true, true)
	g.expect(g.reclaim("--undo", "--apply"), "resume Job train")
	check("after undo", false, false)
	g.expectEvents("Job", "train", "GPUReclaimed", "GPURestored")

	g.expect(g.reclaim("--apply"), "suspend Job train")
	if _, err := jobs.Patch(g.t.Context(), "train", types.MergePatchType, []byte(`{"spec":{"suspend":false}}`),
		metav1.PatchOptions{FieldManager: "queue"}); err != nil {
		g.t.Fatal(err)
	}
	g.expectSkipped(g.reclaim("--apply"), "train", "scaledBack", "queue")
}

func (g reclaimRig) checkEvicted() {
	budgets := theCluster.client.PolicyV1().PodDisruptionBudgets(reclaimNamespace)
	labels := map[string]string{"app": "notebook"}
	budget, err := budgets.Create(g.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "notebook"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: new(intstr.FromInt32(1)),
			Selector:     &metav1.LabelSelector{MatchLabels: labels},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		g.t.Fatal(err)
	}
	allow := func(disruptions int32) { // as the disruption controller does
		g.t.Helper()
		budget.Status = policyv1.PodDisruptionBudgetStatus{
			ObservedGeneration: budget.Generation, DisruptionsAllowed: disruptions, CurrentHealthy: 1 + disruptions, DesiredHealthy: 1,
			ExpectedPods: 1 + disruptions,
		}
		if budget, err = budgets.UpdateStatus(g.t.Context(), budget, metav1.UpdateOptions{}); err != nil {
			g.t.Fatal(err)
		}
	}
	pods := theCluster.client.CoreV1().Pods(reclaimNamespace)
	g.runIdle("notebook", labels, nil)
	g.await("evict Pod notebook")

	g.Write("policy.yaml", reclaimPolicy("1h"))
	g.expect(g.reclaim("--apply"), "notify Pod notebook")
	g.expectEvents("Pod", "notebook", "GPUReclaimNotice")
	g.expectSkipped(g.reclaim("--apply"), "notebook", "noticed", "")
	if pod, err := pods.Get(g.t.Context(), "notebook", metav1.GetOptions{}); err != nil ||
		pod.Annotations["gpu-node-agent/reclaim-notice"] == "" {
		g.t.Errorf("annotations %v, %v", pod.Annotations, err)
	}
	g.Write("policy.yaml", reclaimPolicy("0s"))

	allow(0)
	before := len(g.evictions())
	if r := g.reclaim("--apply"); len(r.Actions) != 1 || r.Actions[0].Done ||
		!strings.Contains(r.Actions[0].Error, "notebook needs 1 healthy pods") {
		g.t.Errorf("unexpected actions %+v", r.Actions)
	}
	g.Eventually("one refused eviction", func() error { // the API server logs a request after it responds
		if evictions := g.evictions()[before:]; len(evictions) != 1 || !strings.HasSuffix(evictions[0], " 429") {
			return fmt.Errorf("evictions %q", evictions)
		}
		return nil
	})
	allow(1)
	g.expect(g.reclaim("--apply"), "evict Pod notebook")
	if pod, err := pods.Get(g.t.Context(), "notebook", metav1.GetOptions{}); err == nil && pod.DeletionTimestamp == nil {
		g.t.Error("the pod was not evicted")
	}
	g.expectEvents("Pod", "notebook", "GPUReclaimNotice", "GPUReclaimed")
}

// evictions returns the requests for evictions.
func (g reclaimRig) evictions() (all []string) {
	g.t.Helper()
	requests, err := theCluster.requests(reclaimAccount)
	if err != nil {
		g.t.Fatal(err)
	}
	return slices.DeleteFunc(requests, func(r string) bool { return !strings.HasPrefix(r, "create pods/eviction ") })
}

// checkOtherNamespaces checks that namespaces without a Role are errors, and that the account has no other rights.
func (g reclaimRig) checkOtherNamespaces() {
	g.Write("policy.yaml", strings.Replace(reclaimPolicy("0s"), "[", "[kube-system, ", 1))
	r := g.runReclaim()
	if len(r.Errors) != 1 || !strings.HasPrefix(r.Errors[0], "kube-system: ") || len(r.Skipped) == 0 {
		g.t.Errorf("errors %q, skipped %v", r.Errors, r.Skipped)
	}
	requests, err := theCluster.requests(reclaimAccount)
	if err != nil {
		g.t.Fatal(err)
	}
	for _, request := range requests {
		if strings.HasSuffix(request, " 403") && !strings.HasPrefix(request, "get namespaces kube-system ") {
			g.t.Errorf("the Roles refuse a request: %s", request)
		}
	}
}
