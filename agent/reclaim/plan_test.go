package reclaim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// now is the time of the tests' worlds.
func now() time.Time { return time.Date(2026, 3, 4, 12, 0, 0, 0, time.UTC) } // a Wednesday

func ago(d time.Duration) metav1.Time { return metav1.NewTime(now().Add(-d)) }

func hours(n float64) *float64 { return new(n * 3600) }

// testPolicy takes GPUs without a notice.
func testPolicy() Policy {
	p := DefaultPolicy()
	p.Namespaces, p.Idle.After.Duration, p.Notice.Duration = []string{"ns"}, 2*time.Hour, 0
	return p
}

// testWorld has the Deployment web with one pod, which has been Ready for five hours and holds one GPU, idle for three.
type testWorld struct{ World }

func newTestWorld() *testWorld {
	w := &testWorld{World{
		Now: now(), Agents: make(map[string]Agent),
		Objects: Objects{Namespaces: map[string]map[string]string{"ns": nil}, Owners: make(map[Ref]*Owner)},
	}}
	w.addOwner(kindDeployment, "web", nil)
	w.addOwner(kindReplicaSet, "web-1", w.owner(kindDeployment, "web"))
	w.addPod("a", w.owner(kindReplicaSet, "web-1"), "n1", 3)
	return w
}

func (w *testWorld) owner(kind, name string) *Owner { return w.Owners[Ref{"ns", kind, name}] }

func reference(o *Owner) *metav1.OwnerReference {
	if o == nil {
		return nil
	}
	group, version := kindGroups[o.Kind], "v1"
	if group != "" {
		version = group + "/v1"
	}
	return &metav1.OwnerReference{APIVersion: version, Kind: o.Kind, Name: o.Name, UID: o.UID, Controller: new(true)}
}

func (w *testWorld) addOwner(kind, name string, controller *Owner) *Owner {
	o := &Owner{
		Ref: Ref{"ns", kind, name}, UID: "uid-" + "x", Replicas: 1, Generation: 5, Controller: reference(controller),
		Annotations: map[string]string{},
	}
	w.Owners[o.Ref] = o
	return o
}

// addPod adds a pod that holds a GPU of a node, idle for some hours.
func (w *testWorld) addPod(name string, controller *Owner, at string, idle float64) *corev1.Pod {
	p := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, Annotations: map[string]string{}, Labels: map[string]string{"app": "web"},
			CreationTimestamp: ago(6 * time.Hour),
		},
		Spec: corev1.PodSpec{NodeName: at, Containers: []corev1.Container{{
			Name: "main", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": quantity.MustParse("1")}},
		}}},
		Status: corev1.PodStatus{
			Phase:      corev1.PodRunning,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: ago(5 * time.Hour)}},
		},
	}
	if controller != nil {
		p.OwnerReferences = []metav1.OwnerReference{*reference(controller)}
	}
	w.Pods = append(w.Pods, p)
	if at != "" {
		w.hold(at, name, idle)
	}
	return &w.Pods[len(w.Pods)-1]
}

// hold makes a pod a holder of one more GPU.
func (w *testWorld) hold(at, pod string, idle float64) {
	a, exists := w.Agents[at]
	if !exists {
		a.Status = status.Node{
			Node: at, Time: now(), Source: status.Source{Status: "up", Measured: now().Add(-time.Second)},
			Kubelet: status.Kubelet{Holders: now().Add(-time.Second), Resources: []status.Resource{{Name: "nvidia.com/gpu"}}},
		}
	}
	h := status.Holder{
		Namespace: "ns", Pod: pod, Container: "main", Resource: "nvidia.com/gpu", GPUShare: new(1.0),
		Idle: &status.Idle{NoWork: hours(idle), NoProcess: hours(idle), Observed: *hours(max(idle, 5))},
	}
	a.Status.GPUs = append(a.Status.GPUs, status.Device{Holders: []status.Holder{h}})
	w.Agents[at] = a
}

// agent changes the response of the agent on n1.
func (w *testWorld) agent(change func(*status.Node)) {
	a := w.Agents["n1"]
	change(&a.Status)
	w.Agents["n1"] = a
}

// holder changes the holder of the n-th GPU of n1.
func (w *testWorld) holder(n int, change func(*status.Holder)) {
	change(&w.Agents["n1"].Status.GPUs[n].Holders[0])
}

func (w *testWorld) bare() *corev1.Pod {
	w.Pods[0].OwnerReferences = nil
	return &w.Pods[0]
}

func recordText(replicas int, at time.Time, generation int64) string {
	return Record{Replicas: int32(replicas), GPUs: 1.5, At: at, Generation: generation}.String()
}

// Each case changes one thing of a world in which Deployment web is scaled.
func TestPlanOfOneOwner(t *testing.T) {
	const deployment = "Deployment ns/web"
	for name, c := range map[string]struct {
		change func(p *Policy, w *testWorld)
		ref    string // of the action, or of what is left alone
		want   string // the action or the reason; "" if there is neither
	}{
		"idle":    {func(*Policy, *testWorld) {}, deployment, "scale"},
		"no work": {func(p *Policy, _ *testWorld) { p.Idle.Evidence = node.EvidenceNoWork }, deployment, "scale"},
		"no work, and the work is not measured": {func(p *Policy, w *testWorld) {
			p.Idle.Evidence = node.EvidenceNoWork
			w.holder(0, func(h *status.Holder) { h.Idle.NoWork = nil })
		}, deployment, "scale"},
		"no work, but a process": {func(p *Policy, w *testWorld) {
			p.Idle.Evidence = node.EvidenceNoWork
			w.holder(0, func(h *status.Holder) { h.Idle.NoProcess = hours(0) })
		}, deployment, "scale"},
		"work": {func(p *Policy, w *testWorld) {
			p.Idle.Evidence = node.EvidenceNoWork
			w.holder(0, func(h *status.Holder) { h.Idle.NoWork = hours(0) })
		}, deployment, "busy"},
		"process": {func(_ *Policy, w *testWorld) { w.holder(0, func(h *status.Holder) { h.Idle.NoProcess = hours(0) }) }, deployment, "busy"},
		"work of a process that is not seen": {
			func(_ *Policy, w *testWorld) { w.holder(0, func(h *status.Holder) { h.Idle.NoWork = hours(0) }) },
			deployment, "busy",
		},
		"busy an hour ago": {
			func(_ *Policy, w *testWorld) { w.holder(0, func(h *status.Holder) { h.Idle.NoProcess = hours(1) }) }, deployment,
			"busy",
		},
		"observed for an hour": {func(_ *Policy, w *testWorld) {
			w.holder(0, func(h *status.Holder) { *h.Idle = status.Idle{NoProcess: hours(1), Observed: *hours(1)} })
		}, deployment, "young"},
		"never used": {func(_ *Policy, w *testWorld) {
			w.holder(0, func(h *status.Holder) {
				*h.Idle = status.Idle{NoProcess: hours(1), Observed: *hours(3), NeverUsed: true}
			})
		}, deployment, "young"},
		"processes unknown": {
			func(_ *Policy, w *testWorld) { w.holder(0, func(h *status.Holder) { h.Idle.NoProcess = nil }) }, deployment,
			"unknown",
		},
		"processes unknown, but work": {func(_ *Policy, w *testWorld) {
			w.holder(0, func(h *status.Holder) { h.Idle.NoProcess, h.Idle.NoWork = nil, hours(0) })
		}, deployment, "busy"},
		"use unknown":     {func(_ *Policy, w *testWorld) { w.holder(0, func(h *status.Holder) { h.Idle = nil }) }, deployment, "unknown"},
		"second GPU busy": {func(_ *Policy, w *testWorld) { w.hold("n1", "a", 0) }, deployment, "busy"},
		"second GPU idle": {func(_ *Policy, w *testWorld) { w.hold("n1", "a", 4) }, deployment, "scale"},
		"second GPU unknown": {func(_ *Policy, w *testWorld) {
			w.hold("n1", "a", 4)
			w.holder(1, func(h *status.Holder) { h.Idle = nil })
		}, deployment, "unknown"},
		"MIG device busy": {func(_ *Policy, w *testWorld) {
			w.hold("n1", "a", 0)
			w.agent(func(n *status.Node) { n.GPUs = []status.Device{{MIG: n.GPUs}} })
		}, deployment, "busy"},
		"not Ready": {
			func(_ *Policy, w *testWorld) { w.Pods[0].Status.Conditions[0].Status = corev1.ConditionFalse }, deployment,
			"notReady",
		},
		"no Ready condition":      {func(_ *Policy, w *testWorld) { w.Pods[0].Status.Conditions = nil }, deployment, "notReady"},
		"younger than minimumAge": {func(p *Policy, _ *testWorld) { p.MinimumAge.Duration = 6 * time.Hour }, deployment, "young"},
		"Ready for an hour": {
			func(_ *Policy, w *testWorld) { w.Pods[0].Status.Conditions[0].LastTransitionTime = ago(time.Hour) },
			deployment, "young",
		},
		"created an hour ago": {func(_ *Policy, w *testWorld) { w.Pods[0].CreationTimestamp = ago(time.Hour) }, deployment, "young"},
		"Ready in the future": {
			func(_ *Policy, w *testWorld) { w.Pods[0].Status.Conditions[0].LastTransitionTime = ago(-time.Hour) },
			deployment, "young",
		},
		"no time of Ready nor creation": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Status.Conditions[0].LastTransitionTime, w.Pods[0].CreationTimestamp = metav1.Time{}, metav1.Time{}
		}, deployment, "notReady"},
		"opt-out of the pod": {
			func(_ *Policy, w *testWorld) { w.Pods[0].Annotations["gpu-node-agent/reclaim-opt-out"] = "" }, deployment,
			"optedOut",
		},
		"opt-out by another annotation": {
			func(p *Policy, w *testWorld) { p.OptOut = "x"; w.Pods[0].Annotations["x"] = "true" }, deployment,
			"optedOut",
		},
		"opt-out false": {
			func(_ *Policy, w *testWorld) { w.Pods[0].Annotations["gpu-node-agent/reclaim-opt-out"] = "false" }, deployment,
			"scale",
		},
		"opt-out of the ReplicaSet": {
			func(p *Policy, w *testWorld) { w.owner(kindReplicaSet, "web-1").Annotations[p.OptOut] = "true" },
			deployment, "optedOut",
		},
		"opt-out of the Deployment": {
			func(p *Policy, w *testWorld) { w.owner(kindDeployment, "web").Annotations[p.OptOut] = "true" }, deployment,
			"optedOut",
		},
		"opt-out of the namespace": {
			func(p *Policy, w *testWorld) { w.Namespaces["ns"] = map[string]string{p.OptOut: ""} }, deployment,
			"optedOut",
		},
		"opt-out of a busy pod": {func(p *Policy, w *testWorld) {
			w.Namespaces["ns"] = map[string]string{p.OptOut: ""}
			w.hold("n1", "a", 0)
		}, deployment, "optedOut"},
		"system's priority class": {
			func(_ *Policy, w *testWorld) { w.Pods[0].Spec.PriorityClassName = "system-node-critical" }, deployment,
			"system",
		},
		"system's priority":         {func(_ *Policy, w *testWorld) { w.Pods[0].Spec.Priority = new(int32(2000000000)) }, deployment, "system"},
		"highest priority of users": {func(_ *Policy, w *testWorld) { w.Pods[0].Spec.Priority = new(int32(1000000000)) }, deployment, "scale"},
		"pod that is being deleted": {func(_ *Policy, w *testWorld) { w.Pods[0].DeletionTimestamp = new(ago(0)) }, deployment, "ending"},
		"0 replicas":                {func(_ *Policy, w *testWorld) { w.owner(kindDeployment, "web").Replicas = 0 }, deployment, "ending"},
		"more replicas than pods":   {func(_ *Policy, w *testWorld) { w.owner(kindDeployment, "web").Replicas = 2 }, deployment, "notReady"},
		"more pods than replicas and than are listed": {
			func(_ *Policy, w *testWorld) { w.owner(kindDeployment, "web").Pods = 2 }, deployment,
			"notReady",
		},
		"pod that ended":  {func(_ *Policy, w *testWorld) { w.Pods[0].Status.Phase = corev1.PodSucceeded }, "", ""},
		"pod that failed": {func(_ *Policy, w *testWorld) { w.Pods[0].Status.Phase = corev1.PodFailed }, "", ""},
		"pod without GPUs": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers = nil
			w.agent(func(n *status.Node) { n.GPUs = nil })
		}, "", ""},
		"request of 0 GPUs": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits["nvidia.com/gpu"] = quantity.MustParse("0")
			w.agent(func(n *status.Node) { n.GPUs = nil })
		}, "", ""},
		"holder without a request": {func(_ *Policy, w *testWorld) { w.Pods[0].Spec.Containers = nil }, deployment, "scale"},
		"waits for a node": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.NodeName = ""
			w.Agents = nil
			w.Pods[0].Status.Conditions = nil
		}, "", ""},
		"node by its agent":       {func(_ *Policy, w *testWorld) { w.Pods[0].Spec.NodeName = "" }, deployment, "scale"},
		"two agents list the pod": {func(_ *Policy, w *testWorld) { w.Pods[0].Spec.NodeName = ""; w.hold("n2", "a", 3) }, "", ""},
		"no holder":               {func(_ *Policy, w *testWorld) { w.agent(func(n *status.Node) { n.GPUs = nil }) }, deployment, "unknown"},
		"two GPUs, one holder": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits["nvidia.com/gpu"] = quantity.MustParse("2")
		}, deployment, "unknown"},
		"GPU of a sidecar that is not listed": {func(_ *Policy, w *testWorld) {
			sidecar := w.Pods[0].Spec.Containers[0]
			sidecar.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
			w.Pods[0].Spec.InitContainers = []corev1.Container{sidecar}
		}, deployment, "unknown"},
		"GPU of an init container": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.InitContainers = slices.Clone(w.Pods[0].Spec.Containers)
		}, deployment, "scale"},
		"two GPUs, one holder, of another device plugin": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits["nvidia.com/gpu"] = quantity.MustParse("2")
			w.agent(func(n *status.Node) { n.Kubelet.Resources = nil })
		}, deployment, "unknown"},
		"GPU by a resource of a DeviceClass": {func(_ *Policy, w *testWorld) {
			w.holder(0, func(h *status.Holder) { h.Resource, h.Claim = "", &status.Claim{Name: "made"} })
		}, deployment, "scale"},
		"two GPUs by a resource of a DeviceClass, one holder": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits["nvidia.com/gpu"] = quantity.MustParse("2")
			w.holder(0, func(h *status.Holder) { h.Resource, h.Claim = "", &status.Claim{Name: "made"} })
		}, deployment, "unknown"},
		"GPU, and a claim of another": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}}
			w.holder(0, func(h *status.Holder) { h.Resource, h.Claim = "", &status.Claim{Name: "gpu"} })
		}, deployment, "unknown"},
		"GPU and its memory": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits["nvidia.com/gpumem"] = quantity.MustParse("3000")
		}, deployment, "scale"},
		"GPU and a network device": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits["nvidia.com/hostdev"] = quantity.MustParse("2")
		}, deployment, "scale"},
		"network device": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits = corev1.ResourceList{"nvidia.com/hostdev": quantity.MustParse("1")}
			w.agent(func(n *status.Node) { n.GPUs = nil })
		}, "", ""},
		"no holder of the agent's resource": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits = corev1.ResourceList{"example.com/gpu": quantity.MustParse("1")}
			w.agent(func(n *status.Node) { n.GPUs, n.Kubelet.Resources = nil, []status.Resource{{Name: "example.com/gpu"}} })
		}, deployment, "unknown"},
		"another resource": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers[0].Resources.Limits = corev1.ResourceList{"example.com/nic": quantity.MustParse("1")}
			w.agent(func(n *status.Node) { n.GPUs = nil })
		}, "", ""},
		"init container": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.InitContainers, w.Pods[0].Spec.Containers = w.Pods[0].Spec.Containers, nil
			w.agent(func(n *status.Node) { n.GPUs = nil })
		}, deployment, "unknown"},
		"claim of a GPU that is not listed": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers, w.Pods[0].Spec.ResourceClaims = nil, []corev1.PodResourceClaim{{Name: "gpu"}}
			w.agent(func(n *status.Node) { n.GPUs, n.DRA = nil, &status.DRA{} })
		}, deployment, "unknown"},
		"claim of a GPU": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers, w.Pods[0].Spec.ResourceClaims = nil, []corev1.PodResourceClaim{{Name: "gpu"}}
			w.agent(func(n *status.Node) { n.DRA = &status.DRA{} })
		}, deployment, "scale"},
		"claim with adminAccess": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers, w.Pods[0].Spec.ResourceClaims = nil, []corev1.PodResourceClaim{{Name: "gpu"}}
			w.agent(func(n *status.Node) {
				n.GPUs[0].AdminHolders, n.GPUs[0].Holders, n.DRA = n.GPUs[0].Holders, nil, &status.DRA{}
			})
		}, "", ""},
		"claim of another device": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers, w.Pods[0].Spec.ResourceClaims = nil, []corev1.PodResourceClaim{{Name: "nic"}}
			w.agent(func(n *status.Node) { n.GPUs = nil })
		}, "", ""},
		"claim and no agent": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Spec.Containers, w.Pods[0].Spec.ResourceClaims = nil, []corev1.PodResourceClaim{{Name: "gpu"}}
			w.Agents = nil
		}, deployment, "noAgent"},
		"no agent":               {func(_ *Policy, w *testWorld) { w.Agents = nil }, deployment, "noAgent"},
		"agent does not respond": {func(_ *Policy, w *testWorld) { w.Agents["n1"] = Agent{Err: errors.New("refused")} }, deployment, "noAgent"},
		"source down": {
			func(_ *Policy, w *testWorld) { w.agent(func(n *status.Node) { n.Source.Status = "down" }) }, deployment,
			"sourceDown",
		},
		"source detached": {
			func(_ *Policy, w *testWorld) { w.agent(func(n *status.Node) { n.Source.Status = "detached" }) }, deployment,
			"sourceDown",
		},
		"old measurement": {func(_ *Policy, w *testWorld) {
			w.agent(func(n *status.Node) { n.Source.Measured = n.Time.Add(-10 * time.Minute) })
		}, deployment, "sourceDown"},
		"no measurement": {
			func(_ *Policy, w *testWorld) { w.agent(func(n *status.Node) { n.Source.Measured = time.Time{} }) }, deployment,
			"sourceDown",
		},
		"holders' error": {
			func(_ *Policy, w *testWorld) { w.agent(func(n *status.Node) { n.Kubelet.HoldersError = "refused" }) }, deployment,
			"unknown",
		},
		"old holders": {func(_ *Policy, w *testWorld) {
			w.agent(func(n *status.Node) { n.Kubelet.Holders = n.Time.Add(-10 * time.Minute) })
		}, deployment, "unknown"},
		"no holders yet": {
			func(_ *Policy, w *testWorld) { w.agent(func(n *status.Node) { n.Kubelet.Holders = time.Time{} }) }, deployment,
			"unknown",
		},
		"clock of the node is ahead": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Status.Conditions[0].LastTransitionTime = ago(-5 * time.Hour)
			w.agent(func(n *status.Node) {
				n.Time, n.Source.Measured, n.Kubelet.Holders = now().Add(10*time.Hour), now().Add(10*time.Hour), now().Add(10*time.Hour)
			})
		}, deployment, "scale"},
		"clock of the node is behind": {func(_ *Policy, w *testWorld) {
			w.Pods[0].Status.Conditions[0].LastTransitionTime = ago(15 * time.Hour)
			w.agent(func(n *status.Node) {
				n.Time, n.Source.Measured, n.Kubelet.Holders = ago(10*time.Hour).Time, ago(10*time.Hour).Time, ago(10*time.Hour).Time
			})
		}, deployment, "scale"},
		"idle time out of range": {func(_ *Policy, w *testWorld) {
			w.holder(0, func(h *status.Holder) { h.Idle.NoProcess = new(1e300); h.Idle.NoWork = new(1e300) })
		}, deployment, "scale"},
		"negative idle time": {
			func(_ *Policy, w *testWorld) { w.holder(0, func(h *status.Holder) { h.Idle.NoProcess = new(-1.0) }) }, deployment,
			"busy",
		},

		"another namespace": {func(p *Policy, _ *testWorld) { p.Namespaces = []string{"other"} }, "", ""},
		"selected": {func(p *Policy, _ *testWorld) {
			p.PodSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
		}, deployment, "scale"},
		"not selected": {func(p *Policy, _ *testWorld) {
			p.PodSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}}
		}, "", ""},
		"only one pod is selected": {func(p *Policy, w *testWorld) {
			p.PodSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
			w.addPod("b", w.owner(kindReplicaSet, "web-1"), "n1", 3).Labels = nil
		}, "", ""},

		"second pod idle": {func(_ *Policy, w *testWorld) { w.addPod("b", w.owner(kindReplicaSet, "web-1"), "n2", 4) }, deployment, "scale"},
		"second pod busy": {func(_ *Policy, w *testWorld) { w.addPod("b", w.owner(kindReplicaSet, "web-1"), "n2", 0) }, deployment, "busy"},
		"busy pod of another rollout": {func(_ *Policy, w *testWorld) {
			w.addPod("b", w.addOwner(kindReplicaSet, "web-2", w.owner(kindDeployment, "web")), "n2", 0)
		}, deployment, "busy"},
		"second pod without an agent": {func(_ *Policy, w *testWorld) {
			w.addPod("b", w.owner(kindReplicaSet, "web-1"), "n2", 4)
			delete(w.Agents, "n2")
		}, deployment, "noAgent"},
		"second pod waits for a node": {
			func(_ *Policy, w *testWorld) { w.addPod("b", w.owner(kindReplicaSet, "web-1"), "", 0) }, deployment,
			"notReady",
		},
		"second pod without a GPU": {func(_ *Policy, w *testWorld) {
			w.addPod("b", w.owner(kindReplicaSet, "web-1"), "n3", 0).Spec.Containers = nil
			delete(w.Agents, "n3")
		}, deployment, "scale"},

		"bare pod": {func(_ *Policy, w *testWorld) { w.bare() }, "Pod ns/a", "evict"},
		"static pod": {
			func(_ *Policy, w *testWorld) { w.bare().Annotations[corev1.MirrorPodAnnotationKey] = "x" }, "Pod ns/a",
			"unsupported",
		},
		"owner, no controller": {func(_ *Policy, w *testWorld) { w.Pods[0].OwnerReferences[0].Controller = nil }, "Pod ns/a", "unsupported"},
		"DaemonSet": {
			func(_ *Policy, w *testWorld) { w.Pods[0].OwnerReferences[0].Kind = "DaemonSet" }, "DaemonSet ns/web-1",
			"unsupported",
		},
		"Job of another group": {func(_ *Policy, w *testWorld) {
			r := &w.Pods[0].OwnerReferences[0]
			r.Kind, r.APIVersion, r.Name = "Job", "batch.volcano.sh/v1alpha1", w.addOwner(kindJob, "train", nil).Name
		}, "Job.batch.volcano.sh ns/train", "unsupported"},
		"ReplicaSet without an owner": {
			func(_ *Policy, w *testWorld) { w.owner(kindReplicaSet, "web-1").Controller = nil },
			"ReplicaSet ns/web-1", "scale",
		},
		"ReplicaSet of a Rollout": {
			func(_ *Policy, w *testWorld) { w.owner(kindReplicaSet, "web-1").Controller.Kind = "Rollout" },
			"ReplicaSet ns/web-1", "unsupported",
		},
		"ReplicaSet is missing": {
			func(_ *Policy, w *testWorld) { delete(w.Owners, Ref{"ns", kindReplicaSet, "web-1"}) },
			"ReplicaSet ns/web-1", "unknown",
		},
		"Deployment is missing": {
			func(_ *Policy, w *testWorld) { delete(w.Owners, Ref{"ns", kindDeployment, "web"}) }, deployment,
			"unknown",
		},
		"Deployment was created again": {func(_ *Policy, w *testWorld) { w.owner(kindDeployment, "web").UID = "other" }, deployment, "unknown"},
		"StatefulSet": {func(_ *Policy, w *testWorld) {
			w.Pods[0].OwnerReferences[0] = *reference(w.addOwner(kindStatefulSet, "db", nil))
		}, "StatefulSet ns/db", "scale"},
		"StatefulSet of a Notebook": {func(_ *Policy, w *testWorld) {
			o := w.addOwner(kindStatefulSet, "nb", nil)
			o.Controller = &metav1.OwnerReference{APIVersion: "kubeflow.org/v1", Kind: "Notebook", Name: "nb", Controller: new(true)}
			w.Pods[0].OwnerReferences[0] = *reference(o)
		}, "StatefulSet ns/nb", "unsupported"},
		"Deployment of an InferenceService": {func(_ *Policy, w *testWorld) {
			w.owner(kindDeployment, "web").Controller = &metav1.OwnerReference{
				APIVersion: "serving.kserve.io/v1beta1", Kind: "InferenceService",
				Name: "x", Controller: new(true),
			}
		}, deployment, "unsupported"},
		"StatefulSet that deletes its volumes": {func(_ *Policy, w *testWorld) {
			o := w.addOwner(kindStatefulSet, "db", nil)
			o.DeletesVolumes = true
			w.Pods[0].OwnerReferences[0] = *reference(o)
		}, "StatefulSet ns/db", "unsupported"},
		"Job with a pod that is not listed": {func(_ *Policy, w *testWorld) {
			o := w.addOwner(kindJob, "train", nil)
			o.Pods = 2
			w.Pods[0].OwnerReferences[0] = *reference(o)
		}, "Job ns/train", "notReady"},
		"Job": {func(_ *Policy, w *testWorld) {
			w.Pods[0].OwnerReferences[0] = *reference(w.addOwner(kindJob, "train", nil))
		}, "Job ns/train", "suspend"},
		"Job of a CronJob": {func(_ *Policy, w *testWorld) {
			w.Pods[0].OwnerReferences[0] = *reference(w.addOwner(kindJob, "train", w.addOwner(kindCronJob, "nightly", nil)))
		}, "Job ns/train", "suspend"},
		"opt-out of the CronJob": {func(p *Policy, w *testWorld) {
			o := w.addOwner(kindCronJob, "nightly", nil)
			o.Annotations[p.OptOut] = ""
			w.Pods[0].OwnerReferences[0] = *reference(w.addOwner(kindJob, "train", o))
		}, "Job ns/train", "optedOut"},
		"Job of a JobSet": {func(_ *Policy, w *testWorld) {
			o := w.addOwner(kindJob, "train", nil)
			o.Controller = &metav1.OwnerReference{APIVersion: "jobset.x-k8s.io/v1alpha2", Kind: "JobSet", Name: "x", Controller: new(true)}
			w.Pods[0].OwnerReferences[0] = *reference(o)
		}, "Job ns/train", "unsupported"},
		"suspended Job": {func(_ *Policy, w *testWorld) {
			o := w.addOwner(kindJob, "train", nil)
			o.Suspended = true
			w.Pods[0].OwnerReferences[0] = *reference(o)
		}, "Job ns/train", "ending"},
		"Kueue's pod": {func(_ *Policy, w *testWorld) { w.Pods[0].Labels[kueueQueue] = "q" }, deployment, "unsupported"},
		"Kueue's Deployment": {func(_ *Policy, w *testWorld) {
			w.owner(kindDeployment, "web").Labels = map[string]string{kueueQueue: "q"}
		}, deployment, "unsupported"},

		"first notice": {func(p *Policy, _ *testWorld) { p.Notice.Duration = time.Hour }, deployment, "notify"},
		"noticed": {
			func(p *Policy, w *testWorld) { p.Notice.Duration = time.Hour; w.notice(59 * time.Minute) }, deployment,
			"noticed",
		},
		"notice period ended": {func(p *Policy, w *testWorld) { p.Notice.Duration = time.Hour; w.notice(time.Hour) }, deployment, "scale"},
		"busy since the notice": {
			func(p *Policy, w *testWorld) { p.Notice.Duration = time.Hour; w.notice(3*time.Hour + time.Second) },
			deployment, "notify",
		},
		"notice in the future": {func(p *Policy, w *testWorld) { p.Notice.Duration = time.Hour; w.notice(-time.Minute) }, deployment, "notify"},
		"invalid notice": {func(p *Policy, w *testWorld) {
			p.Notice.Duration = time.Hour
			w.owner(kindDeployment, "web").Annotations[noticeAnnotation] = "x"
		}, deployment, "notify"},
		"notice on the copy of a ReplicaSet": {func(p *Policy, w *testWorld) {
			p.Notice.Duration = time.Hour
			w.owner(kindReplicaSet, "web-1").Annotations[noticeAnnotation] = rfc3339(ago(2 * time.Hour).Time)
		}, deployment, "notify"},
		"notice on a pod": {func(p *Policy, w *testWorld) {
			p.Notice.Duration = time.Hour
			w.bare().Annotations[noticeAnnotation] = rfc3339(ago(2 * time.Hour).Time)
		}, "Pod ns/a", "evict"},

		"scaled back":                    {func(_ *Policy, w *testWorld) { w.record(24*time.Hour, 5) }, deployment, "scaledBack"},
		"scaled back and busy":           {func(_ *Policy, w *testWorld) { w.record(24*time.Hour, 5); w.hold("n1", "a", 0) }, deployment, "busy"},
		"scaled back long ago":           {func(_ *Policy, w *testWorld) { w.record(8*24*time.Hour, 5) }, deployment, "scale"},
		"recorded change did not happen": {func(_ *Policy, w *testWorld) { w.record(time.Hour, 6) }, deployment, "scale"},
		"invalid record": {
			func(_ *Policy, w *testWorld) { w.owner(kindDeployment, "web").Annotations[recordAnnotation] = "3" }, deployment,
			"scale",
		},
		"record on the copy of a ReplicaSet": {func(_ *Policy, w *testWorld) {
			w.owner(kindReplicaSet, "web-1").Annotations[recordAnnotation] = recordText(3, now(), 1)
		}, deployment, "scale"},
	} {
		p, w := testPolicy(), newTestWorld()
		c.change(&p, w)
		r := plan(p, w.World)
		var ref, got string
		switch {
		case len(r.Actions)+len(r.Skipped) > 1:
			t.Errorf("%s: %+v", name, r)
		case len(r.Actions) == 1:
			ref, got = r.Actions[0].String(), string(r.Actions[0].Kind)
		case len(r.Skipped) == 1:
			ref, got = r.Skipped[0].String(), string(r.Skipped[0].Reason)
			if r.Skipped[0].Text == "" {
				t.Errorf("%s: no text", name)
			}
		}
		if c.ref == "DaemonSet ns/web-1" {
			c.ref = "DaemonSet.apps ns/web-1"
		}
		if ref != c.ref || got != c.want {
			t.Errorf("%s: %s of %q, want %s of %q\n%+v", name, got, ref, c.want, c.ref, r)
		}
	}
}

func (w *testWorld) notice(before time.Duration) {
	w.owner(kindDeployment, "web").Annotations[noticeAnnotation] = rfc3339(ago(before).Time)
}

func (w *testWorld) record(before time.Duration, generation int64) {
	w.owner(kindDeployment, "web").Annotations[recordAnnotation] = recordText(3, ago(before).Time, generation)
}

// What an action gives back are the devices of all pods, each for its own time, but not for longer than its pod is Ready.
func TestPlanCountsGPUHours(t *testing.T) {
	p, w := testPolicy(), newTestWorld()
	w.hold("n1", "a", 4)                                           // a: 3 and 4 hours
	w.addPod("b", w.owner(kindReplicaSet, "web-1"), "n2", 1000)    // limited to 5
	w.hold("n1", "a", 2)                                           // a share
	w.holder(2, func(h *status.Holder) { h.GPUShare = new(0.25) }) // 0.5 hours
	w.hold("n1", "a", 2)                                           // a share of unknown size
	w.holder(3, func(h *status.Holder) { h.GPUShare = nil })       //
	w.hold("n1", "of-another-api-server", 9)                       // no pod has this name
	w.Agents["n1"].Status.GPUs[4].Holders[0].Namespace = "nowhere" //
	w.owner(kindDeployment, "web").Replicas = 2                    //
	w.Agents["n2"].Status.GPUs[0].Holders[0].Idle.NoWork = nil     // no process is enough
	got := plan(p, w.World)
	want := Action{
		Kind: ActionScale, Ref: Ref{"ns", kindDeployment, "web"}, Replicas: 2, Pods: []string{"a", "b"}, Nodes: []string{"n1", "n2"},
		GPUs: 3.25, GPUHours: 3 + 4 + 5 + 0.5, Idle: 7200, Evidence: node.EvidenceNoProcess,
	}
	if len(got.Actions) != 1 {
		t.Fatalf("%+v", got)
	}
	a := got.Actions[0]
	if a.owner != w.owner(kindDeployment, "web") || a.Reason == "" {
		t.Errorf("owner %v, reason %q", a.owner, a.Reason)
	}
	a.owner, a.Reason = nil, ""
	if !reflect.DeepEqual(a, want) {
		t.Errorf("%+v, want\n%+v", a, want)
	}
	if got.GPUs != 3.25 || got.GPUHours != 12.5 || got.Announced != 0 || !got.DryRun {
		t.Errorf("%+v", got)
	}
}

// The most idle GPU-hours come first, then names; what was announced comes before new notices, and the rest is left to the next run.
func TestPlanOrderAndLimit(t *testing.T) {
	p, w := testPolicy(), &testWorld{World{Now: now(), Agents: make(map[string]Agent), Objects: Objects{Owners: make(map[Ref]*Owner)}}}
	p.MaxPerRun, p.Notice.Duration = 3, time.Hour
	for name, idle := range map[string]float64{"d": 3, "c": 3, "e": 4, "new": 5, "b": 2, "old": 4.5} {
		pod := w.addPod(name, nil, "n1", idle)
		if name != "new" && name != "old" {
			pod.Annotations[noticeAnnotation] = rfc3339(ago(time.Hour).Time)
		}
	}
	summary := func() (all []string) {
		r := plan(p, w.World)
		for _, a := range r.Actions {
			all = append(all, fmt.Sprint(a.Kind, " ", a.Name))
		}
		for _, s := range r.Skipped {
			all = append(all, fmt.Sprint(s.Reason, " ", s.Name))
		}
		return all
	}
	want := []string{"evict e", "evict c", "evict d", "limit b", "limit new", "limit old"}
	if got := summary(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	p.MaxPerRun = 5
	want = []string{"evict e", "evict c", "evict d", "evict b", "notify new", "limit old"}
	if got := summary(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// Of the actions above the limit, each is the first to replace a refused action in some runs, whatever its GPU-hours.
func TestPlanOrderAboveLimit(t *testing.T) {
	p, w := testPolicy(), &testWorld{World{Now: now(), Agents: make(map[string]Agent), Objects: Objects{Owners: make(map[Ref]*Owner)}}}
	p.MaxPerRun = 1
	for i := range 5 {
		w.addPod(fmt.Sprint("p", i), nil, "n1", 3+float64(i)/10)
	}
	next := make(map[string]int)
	for range 100 {
		w.Now = w.Now.Add(time.Second)
		r := plan(p, w.World)
		if r.Actions[0].Name != "p4" {
			t.Fatalf("first %s", r.Actions[0].Name)
		}
		next[r.rest[0].Name]++
	}
	if len(next) != 4 {
		t.Errorf("next: %v", next)
	}
}

func TestPlanUndo(t *testing.T) {
	for name, c := range map[string]struct {
		change func(o *Owner)
		want   string
	}{
		"scaled":                 {func(*Owner) {}, "restore 3"},
		"Job":                    {func(o *Owner) { o.Kind, o.Replicas, o.Suspended = kindJob, 1, true }, "resume 0"},
		"resumed Job":            {func(o *Owner) { o.Kind, o.Replicas = kindJob, 1 }, "changed"},
		"scaled back":            {func(o *Owner) { o.Replicas = 1 }, "changed"},
		"scaled to 0 by another": {func(o *Owner) { o.ChangedBy = "kubectl" }, "changed"},
		"scaled by us":           {func(o *Owner) { o.ChangedBy = fieldManager }, "restore 3"},
		"did not happen":         {func(o *Owner) { o.Generation = 4 }, "changed"},
		"opted out since, which a Deployment counts": {func(o *Owner) {
			o.Annotations[DefaultPolicy().OptOut], o.Generation = "", 6
		}, "restore 3"},
		"scaled up and down since": {func(o *Owner) { o.Generation = 7 }, "changed"},
		"invalid record":           {func(o *Owner) { o.Annotations[recordAnnotation] = "{}" }, "changed"},
		"no record":                {func(o *Owner) { delete(o.Annotations, recordAnnotation) }, ""},
		"other namespace":          {func(o *Owner) { o.Namespace = "other" }, ""},
		"ReplicaSet":               {func(o *Owner) { o.Kind = kindReplicaSet }, "restore 3"},
		"ReplicaSet of a Deployment": {func(o *Owner) {
			o.Kind, o.Controller = kindReplicaSet, &metav1.OwnerReference{
				APIVersion: "apps/v1", Kind: kindDeployment, Name: "web",
				Controller: new(true),
			}
		}, ""},
		"opted out since": {func(o *Owner) { o.Annotations[DefaultPolicy().OptOut] = "" }, "restore 3"},
	} {
		o := &Owner{
			Ref: Ref{"ns", kindDeployment, "web"}, Generation: 5,
			Annotations: map[string]string{recordAnnotation: recordText(3, ago(time.Hour).Time, 5)},
		}
		c.change(o)
		r := planUndo(testPolicy(), World{Now: now(), Objects: Objects{Owners: map[Ref]*Owner{o.Ref: o}}})
		var got string
		for _, a := range r.Actions {
			got += fmt.Sprint(a.Kind, " ", a.Replicas)
			if a.owner != o || a.GPUs != 1.5 || r.Restored != 1.5 || r.GPUs != 0 {
				t.Errorf("%s: owner %v, %v GPUs, report %+v", name, a.owner, a.GPUs, r)
			}
		}
		for _, s := range r.Skipped {
			got += string(s.Reason)
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// randomWorld returns owners and pods on three agents, and the names of the pods that must not be taken from.
func randomWorld(random *rand.Rand, p Policy) (w *testWorld, forbidden map[string]bool) {
	w = &testWorld{World{
		Now: now(), Agents: make(map[string]Agent),
		Objects: Objects{Namespaces: map[string]map[string]string{}, Owners: make(map[Ref]*Owner)},
	}}
	if random.IntN(20) == 0 {
		w.Namespaces["ns"] = map[string]string{p.OptOut: "true"}
	}
	forbidden = make(map[string]bool)
	for o := range 6 {
		var owner *Owner
		if kind := []string{kindDeployment, kindStatefulSet, kindJob, kindReplicaSet, ""}[random.IntN(5)]; kind != "" {
			owner = w.addOwner(kind, fmt.Sprint("o", o), nil)
		}
		for i := range 1 + random.IntN(3) {
			name, at := fmt.Sprintf("o%d-%d", o, i), fmt.Sprint("n", random.IntN(3))
			if random.IntN(30) == 0 {
				w.addPod(name, owner, "", 3)
				continue
			}
			pod := w.addPod(name, owner, at, 2+random.Float64())
			if random.IntN(4) == 0 {
				forbidden[name] = true
				forbid(random, pod, p, w.Agents[at].Status.GPUs)
			}
		}
	}
	if random.IntN(4) == 0 {
		w.Agents["n0"] = Agent{Err: errors.New("refused")}
	}
	return w, forbidden
}

// forbid gives a pod one of the properties for which it must not be taken from. The pod holds the last of gpus.
func forbid(random *rand.Rand, pod *corev1.Pod, p Policy, gpus []status.Device) {
	held := &gpus[len(gpus)-1]
	switch random.IntN(7) {
	case 0:
		held.Holders[0].Idle.NoWork = hours(0)
	case 1:
		held.Holders[0].Idle = nil
	case 2:
		pod.Annotations[p.OptOut] = "true"
	case 3:
		held.Holders = nil
	case 4:
		pod.Status.Conditions = nil
	case 5:
		pod.DeletionTimestamp = new(ago(0))
	case 6:
		pod.Spec.PriorityClassName = "system-cluster-critical"
	}
}

// takesFrom reports whether an action concerns a pod, alone or as one of its owner.
func takesFrom(a Action, pod corev1.Pod) bool {
	if a.owner != nil {
		return len(pod.OwnerReferences) > 0 && pod.OwnerReferences[0].Name == a.Name
	}
	return a.pod != nil && pod.Name == a.Name
}

// A plan takes only from owners all of whose pods may be taken from, has at most MaxPerRun actions, names each candidate once, and does not
// depend on the order in which the API server lists the objects.
func TestPlanInvariants(t *testing.T) {
	for seed := range uint64(1000) {
		random := rand.New(rand.NewPCG(seed, 0))
		p := testPolicy()
		p.MaxPerRun = 1 + random.IntN(4)
		if random.IntN(2) == 0 {
			p.Notice.Duration = time.Hour
		}
		w, forbidden := randomWorld(random, p)
		r := plan(p, w.World)
		if len(r.Actions) > p.MaxPerRun {
			t.Fatalf("seed %d: %d actions", seed, len(r.Actions))
		}
		seen := make(map[Ref]bool)
		for _, a := range r.Actions {
			if seen[a.Ref] || w.Namespaces["ns"] != nil {
				t.Fatalf("seed %d: %+v", seed, r)
			}
			seen[a.Ref] = true
			for _, pod := range w.Pods {
				if takesFrom(a, pod) && (forbidden[pod.Name] || pod.Spec.NodeName == "" || w.Agents[pod.Spec.NodeName].Err != nil ||
					!slices.Contains(a.Pods, pod.Name)) {
					t.Fatalf("seed %d: %s of %s although %s must not be taken from", seed, a.Kind, a.Ref, pod.Name)
				}
			}
		}
		for _, s := range r.Skipped {
			if seen[s.Ref] || s.Text == "" || rank(s.Reason) < 0 {
				t.Fatalf("seed %d: %+v", seed, s)
			}
			seen[s.Ref] = true
		}
		w.Pods = slices.Clone(w.Pods)
		random.Shuffle(len(w.Pods), func(i, j int) { w.Pods[i], w.Pods[j] = w.Pods[j], w.Pods[i] })
		again := plan(p, w.World)
		for i := range again.Actions { // the pods have moved
			again.Actions[i].pod, r.Actions[i].pod = nil, nil
		}
		if !reflect.DeepEqual(again, r) {
			t.Fatalf("seed %d:\n%+v\n%+v", seed, r, again)
		}
	}
}
