package binarytest

import (
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/agent/reclaim"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
)

// A dry run finds the idle Deployment with its GPU-hours, and leaves the others alone.
func TestReclaimDryRun(t *testing.T) {
	t.Parallel()
	p := newProcess(t, `source:
  {mode: sim, interval: 1s, sim: {scenario: [{at: 0s, gpu: 0, processes: []}, {at: 0s, gpu: 1, processes: [{pid: 4242, sm: 0.9}]}]}}
plugin: {kubeletDir: DIR}`)
	k := p.startKubelet()
	p.launch("NODE_NAME=node-1", "GPU_NODE_AGENT_METRICS_PROCESSES_ENABLED=true")
	p.awaitAllocatable(k, 8)
	for range 8 {
		p.allocate(k)
	}
	var idle []string
	var busy string
	p.await("seven idle pods and a busy one", func() bool {
		all, worker := gpuPods(p)
		idle, busy = nil, worker
		for pod, i := range all {
			if pod != worker && i.NoWork != nil && *i.NoWork >= 2 && *i.NoProcess >= 2 {
				idle = append(idle, pod)
			}
		}
		return len(idle) == 7 && all[worker] != nil && all[worker].Observed >= 2
	})
	slices.Sort(idle)
	server := reclaimServer(t, idle, busy)
	kubeconfig, policy := server.Kubeconfig(t), filepath.Join(p.Dir, "policy.yaml")
	for _, evidence := range []string{"noWork", "noProcess"} {
		text := "namespaces: [default]\nidle: {after: 1s, evidence: " + evidence + "}\nnotice: 0s\n"
		if err := os.WriteFile(policy, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		r := p.planReclaim(policy, kubeconfig)
		if len(r.Actions) != 1 {
			t.Fatalf("%+v", r)
		}
		a := r.Actions[0]
		all, _ := gpuPods(p)
		most := max(*all[idle[0]].NoWork, *all[idle[0]].NoProcess) / 3600
		if a.Kind != reclaim.ActionScale || a.String() != "Deployment default/web" || a.GPUs != 1 || a.GPUHours < 2.0/3600-1e-6 ||
			a.GPUHours > most+1e-6 ||
			math.Abs(a.Idle/3600-a.GPUHours) > 1e-6 || a.Evidence != evidence || a.Done || !r.DryRun {
			t.Errorf("%+v, expected at most %f GPU-hours", a, most)
		}
		got := make(map[string]reclaim.Reason)
		for _, s := range r.Skipped {
			got[s.Name] = s.Reason
		}
		for name, want := range map[string]reclaim.Reason{
			idle[1]: reclaim.ReasonOptedOut, idle[2]: reclaim.ReasonYoung, busy: reclaim.ReasonBusy, "elsewhere": reclaim.ReasonNoAgent,
		} {
			if got[name] != want {
				t.Errorf("%s: %s: %q, want %q", evidence, name, got[name], want)
			}
		}
	}
}

// gpuPods returns the pods that hold GPUs, and the pod that holds GPU 1.
func gpuPods(p *process) (all map[string]*status.Idle, worker string) {
	all = make(map[string]*status.Idle)
	for _, d := range p.snapshot().GPUs {
		for _, h := range d.Holders {
			if d.Index == 1 {
				worker = h.Pod // the process on GPU 1 is not known to be the pod's
			} else if h.Idle == nil || h.Idle.NoProcess == nil {
				continue
			}
			all[h.Pod] = h.Idle
		}
	}
	return all, worker
}

// reclaimServer is an API server with the Deployment of the first idle pod, and with bare pods: one that opts out, a young one, a busy one,
// and one on another node.
func reclaimServer(t *testing.T, idle []string, busy string) *apiservertest.Server {
	t.Helper()
	server := apiservertest.New(t)
	owner := metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "web", UID: "deployment"}
	server.Put(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceDefault}})
	server.Put(&appsv1.Deployment{ObjectMeta: owner})
	controller := func(kind string) []metav1.OwnerReference {
		return []metav1.OwnerReference{*metav1.NewControllerRef(&owner, appsv1.SchemeGroupVersion.WithKind(kind))}
	}
	replicaSet := owner
	replicaSet.UID, replicaSet.OwnerReferences = "replicaset", controller("Deployment")
	server.Put(&appsv1.ReplicaSet{ObjectMeta: replicaSet})
	owner = replicaSet
	pod := func(name, node string, readyFor time.Duration, change func(*corev1.Pod)) {
		since := metav1.NewTime(time.Now().Add(-readyFor))
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name, UID: types.UID(name), CreationTimestamp: since},
			Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{
				Limits: corev1.ResourceList{"nvidia.com/gpu": quantity.MustParse("1")},
			}}}},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{
				Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: since,
			}}},
		}
		change(pod)
		server.Put(pod)
	}
	bare := func(*corev1.Pod) {}
	pod(idle[0], "node-1", 2*time.Hour, func(p *corev1.Pod) { p.OwnerReferences = controller("ReplicaSet") })
	pod(idle[1], "node-1", 2*time.Hour, func(p *corev1.Pod) { p.Annotations = map[string]string{"gpu-node-agent/reclaim-opt-out": ""} })
	pod(idle[2], "node-1", 0, bare)
	pod(busy, "node-1", 2*time.Hour, bare)
	pod("elsewhere", "node-2", 2*time.Hour, bare)
	return server
}

// planReclaim runs the command reclaim with a policy, and returns what it would do.
func (p *process) planReclaim(policy, kubeconfig string) (r reclaim.Report) {
	p.t.Helper()
	cmd := exec.CommandContext(p.t.Context(), binary, "reclaim", "--policy", policy, "--kubeconfig", kubeconfig, "--snapshot", p.URL, "-o",
		"json")
	cmd.Env = append(os.Environ(), raceOptions)
	out, err := cmd.Output()
	if err != nil {
		p.t.Fatalf("%v: %s", err, out)
	}
	p.t.Logf("%s", out)
	if err := json.Unmarshal(out, &r); err != nil {
		p.t.Fatal(err)
	}
	return r
}
