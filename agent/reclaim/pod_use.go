package reclaim

import (
	"fmt"
	"math"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	// maxStaleness is the age of a measurement, and of the list of holders, above which an agent's response is not used. It is several times
	// the longest interval between two of them.
	maxStaleness = 5 * time.Minute

	// The prefixes of GPUs' resources, whichever resources the responding agents serve. NVIDIA's network devices are nvidia.com/ too.
	gpuResources = "nvidia.com/gpu"
	migResources = "nvidia.com/mig-"

	// highestUserPriority is the highest priority that users can define. The system's priorities are above.
	highestUserPriority = 1_000_000_000
	systemClasses       = "system-" // the prefix of their names
)

// podUse is how a pod uses the GPUs that it holds.
type podUse struct {
	pod    *corev1.Pod
	node   string
	holds  bool   // false: it waits for a node
	reason Reason // why it is not idle, or left alone; "" if it is idle
	text   string

	gpus     float64       // that it holds
	gpuHours float64       // for which these have been idle
	idle     time.Duration // the least of its devices
}

// podUses judges pods by the responses of the agents.
type podUses struct {
	Policy
	now       time.Time
	agents    map[string]Agent
	held      map[string]map[types.NamespacedName][]status.Holder // by node
	admin     map[string]map[types.NamespacedName]bool            // holders with adminAccess, which take nothing from others
	resources map[string]bool                                     // of the agents
}

func newPodUses(p Policy, w World) *podUses {
	s := &podUses{
		p, w.Now, w.Agents, make(map[string]map[types.NamespacedName][]status.Holder), make(map[string]map[types.NamespacedName]bool),
		make(map[string]bool),
	}
	for name, a := range w.Agents {
		if a.Err != nil {
			continue
		}
		for _, r := range a.Status.Kubelet.Resources {
			s.resources[r.Name] = true
		}
		held, admin := make(map[types.NamespacedName][]status.Holder), make(map[types.NamespacedName]bool)
		var add func([]status.Device)
		add = func(devices []status.Device) {
			for i := range devices {
				for _, h := range devices[i].Holders {
					key := types.NamespacedName{Namespace: h.Namespace, Name: h.Pod}
					held[key] = append(held[key], h)
				}
				for _, h := range devices[i].AdminHolders {
					admin[types.NamespacedName{Namespace: h.Namespace, Name: h.Pod}] = true
				}
				add(devices[i].MIG)
			}
		}
		add(a.Status.GPUs)
		s.held[name], s.admin[name] = held, admin
	}
	return s
}

// of returns how a pod uses GPUs. It is not relevant if the pod holds none and waits for none.
func (s *podUses) of(pod *corev1.Pod) (u podUse, relevant bool) {
	key := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	u = podUse{pod: pod, node: s.nodeOf(pod, key)}
	requests, claims := s.requests(pod), len(pod.Spec.ResourceClaims) > 0
	agent, exists := s.agents[u.node]
	holders := s.held[u.node][key]
	if len(holders) == 0 && claims && exists && agent.Err == nil && (agent.Status.DRA == nil || s.admin[u.node][key]) {
		claims = false // of other devices
	}
	if len(holders) == 0 && !requests && !claims {
		return u, false
	}
	u.holds = u.node != ""
	u.gpus = gpusOf(holders)
	u.reason, u.text = s.exclude(pod)
	if u.reason == "" {
		u.reason, u.text = s.judgeAgent(u.node)
	}
	switch {
	case u.reason != "":
	case !ready(pod):
		u.reason, u.text = ReasonNotReady, "is not Ready"
	case !s.listsAll(pod, holders):
		u.reason, u.text = ReasonUnknown, "the agent does not list it as the holder of all its devices"
	default:
		s.judgeUse(&u, holders, agent.Status.Time)
	}
	return u, true
}

// nodeOf returns the node of a pod. An object that a person wrote may lack it; the agent that lists the pod has it.
func (s *podUses) nodeOf(pod *corev1.Pod, key types.NamespacedName) string {
	found := pod.Spec.NodeName
	if found != "" || !ready(pod) {
		return found
	}
	for name := range s.agents {
		if len(s.held[name][key]) == 0 {
			continue
		}
		if found != "" {
			return ""
		}
		found = name
	}
	return found
}

// requests reports whether a pod requests GPUs by a resource.
func (s *podUses) requests(pod *corev1.Pod) bool {
	return requestsAny(pod, func(resource string) bool {
		return s.resources[resource] || strings.HasPrefix(resource, gpuResources) || strings.HasPrefix(resource, migResources)
	})
}

// listsAll reports whether a pod's agent lists as many GPUs as the containers request. One that it does not list may be in use.
func (s *podUses) listsAll(pod *corev1.Pod, holders []status.Holder) bool {
	missing := make(map[string]int64)
	count := func(c *corev1.Container) {
		for name, quantity := range c.Resources.Limits {
			if s.isDevice(string(name)) {
				missing[string(name)] += quantity.Value()
			}
		}
	}
	for i := range pod.Spec.Containers {
		count(&pod.Spec.Containers[i])
	}
	for i := range pod.Spec.InitContainers { // the others have ended, and the containers have their devices
		if policy := pod.Spec.InitContainers[i].RestartPolicy; policy != nil && *policy == corev1.ContainerRestartPolicyAlways {
			count(&pod.Spec.InitContainers[i])
		}
	}
	claimed := int64(0)
	for _, h := range holders {
		if missing[h.Resource]--; h.Claim != nil && len(pod.Spec.ResourceClaims) == 0 {
			claimed++ // by a resource that a DeviceClass has: the scheduler made the claim
		}
	}
	for _, n := range missing {
		if n > 0 {
			claimed -= n
		}
	}
	return len(holders) > 0 && claimed >= 0
}

// isDevice reports whether a resource has GPUs that agents list with their holders, also GPUs of another device plugin. Other resources
// with the prefix count something else, such as memory.
func (s *podUses) isDevice(resource string) bool {
	return s.resources[resource] || resource == gpuResources || resource == gpuResources+".shared" || strings.HasPrefix(resource, migResources)
}

// requestsAny reports whether a container of a pod requests one of the resources.
func requestsAny(pod *corev1.Pod, matches func(resource string) bool) bool {
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range containers {
			for _, list := range []corev1.ResourceList{containers[i].Resources.Limits, containers[i].Resources.Requests} {
				for name, quantity := range list {
					if matches(string(name)) && !quantity.IsZero() {
						return true
					}
				}
			}
		}
	}
	return false
}

// exclude returns why a pod is left alone, whatever it does.
func (s *podUses) exclude(pod *corev1.Pod) (Reason, string) {
	_, queued := pod.Labels[kueueQueue]
	priority := pod.Spec.Priority
	switch {
	case optedOut(s.Policy, pod.Annotations):
		return ReasonOptedOut, "has the annotation " + s.OptOut
	case queued:
		return ReasonUnsupported, "Kueue suspends and resumes it: label " + kueueQueue
	case strings.HasPrefix(pod.Spec.PriorityClassName, systemClasses), priority != nil && *priority > highestUserPriority:
		return ReasonSystem, "has a priority of the system"
	case pod.DeletionTimestamp != nil:
		return ReasonEnding, "is being deleted"
	}
	return "", ""
}

// judgeAgent returns why the response of a node's agent cannot be used.
func (s *podUses) judgeAgent(name string) (Reason, string) {
	a, exists := s.agents[name]
	if name == "" {
		return ReasonNotReady, "waits for a node"
	}
	if !exists {
		return ReasonNoAgent, "no agent on node " + name
	}
	if a.Err != nil {
		return ReasonNoAgent, a.Err.Error()
	}
	src, kubelet := a.Status.Source, a.Status.Kubelet
	switch {
	case src.Status != health.SourceUp.String():
		return ReasonSourceDown, "source of node " + name + " is " + src.Status
	case a.Status.Time.Sub(src.Measured) > maxStaleness:
		return ReasonSourceDown, "last measurement on node " + name + " is " + duration.HumanDuration(a.Status.Time.Sub(src.Measured)) + " old"
	case kubelet.HoldersError != "":
		return ReasonUnknown, "holders of node " + name + " are unknown: " + kubelet.HoldersError
	case a.Status.Time.Sub(kubelet.Holders) > maxStaleness:
		return ReasonUnknown, "holders of node " + name + " are " + duration.HumanDuration(a.Status.Time.Sub(kubelet.Holders)) + " old"
	}
	return "", ""
}

// judgeUse adds how a pod uses its devices, by the response of its agent at a time.
func (s *podUses) judgeUse(u *podUse, holders []status.Holder, at time.Time) {
	age, known := s.readyFor(u.pod, at)
	if !known {
		u.reason, u.text = ReasonNotReady, "the time since which it is Ready is unknown"
		return
	}
	if age <= 0 {
		u.reason, u.text = ReasonYoung, "became Ready in the future of its node's clock"
		return
	}
	var busy, young, unknown int
	u.idle = age
	for _, h := range holders {
		idle, observed, known := s.idleOf(h, age)
		switch {
		case !known:
			unknown++
			continue
		case idle >= s.Idle.After.Duration:
		case h.Idle.NeverUsed, idle > 0 && idle+time.Minute >= min(observed, age): // it cannot have been idle for longer
			young++
		default:
			busy++
		}
		u.idle = min(u.idle, idle)
		u.gpuHours += share(h) * idle.Hours()
	}
	switch after := s.Idle.After.Duration; {
	case busy > 0:
		u.reason, u.text = ReasonBusy, fmt.Sprintf("used %d of %d devices in the last %s", busy, len(holders), duration.HumanDuration(after))
	case unknown > 0 && s.Idle.Evidence == node.EvidenceNoProcess:
		u.reason, u.text = ReasonUnknown, "its processes are unknown; does its agent have metrics.processes.enabled?"
	case unknown > 0:
		u.reason, u.text = ReasonUnknown, "its work is not measured"
	case age < s.MinimumAge.Duration:
		u.reason, u.text = ReasonYoung, fmt.Sprintf("Ready for %s of %s", duration.HumanDuration(age),
			duration.HumanDuration(s.MinimumAge.Duration))
	case young > 0:
		u.reason, u.text = ReasonYoung, fmt.Sprintf("idle for %s of %s", duration.HumanDuration(u.idle), duration.HumanDuration(after))
	}
}

// idleOf returns how long a holder's device has been idle, and for how long the agent has observed it. A later pod of the same name, such
// as of a StatefulSet, is not idle for longer than it is Ready.
func (s *podUses) idleOf(h status.Holder, age time.Duration) (idle, observed time.Duration, known bool) {
	if h.Idle == nil {
		return 0, 0, false
	}
	work, process := h.Idle.NoWork, h.Idle.NoProcess
	seconds := process
	switch {
	case s.Idle.Evidence == node.EvidenceNoWork && work != nil:
		seconds = work
	case process == nil && work != nil && *work == 0: // it works now, whatever its processes
		seconds = work
	case process == nil: // a container without a process does no work; one without work may have a process
		return 0, 0, false
	case work != nil && *work < *process: // the driver may not list every process
		seconds = work
	}
	limited := func(seconds float64) time.Duration {
		return time.Duration(min(max(0, seconds), age.Seconds()) * float64(time.Second))
	}
	return limited(*seconds), limited(h.Idle.Observed), true
}

// readyFor returns for how long a pod has been Ready. at is the time on its node: the kubelet wrote the condition by the same clock. The
// time of creation is the API server's.
func (s *podUses) readyFor(pod *corev1.Pod, at time.Time) (age time.Duration, known bool) {
	age = math.MaxInt64
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady && !c.LastTransitionTime.IsZero() {
			age, known = at.Sub(c.LastTransitionTime.Time), true
		}
	}
	if created := pod.CreationTimestamp; !created.IsZero() {
		age, known = min(age, s.now.Sub(created.Time)), true
	}
	return age, known
}

// gpusOf returns the GPUs of holders.
func gpusOf(holders []status.Holder) (sum float64) {
	for _, h := range holders {
		sum += share(h)
	}
	return sum
}

// share returns the part of a GPU that a holder has, 0 if it is unknown.
func share(h status.Holder) float64 {
	if h.GPUShare == nil {
		return 0
	}
	return min(max(0, *h.GPUShare), 1)
}

// evidenceText returns the evidence for people.
func evidenceText(evidence string) string {
	if evidence == node.EvidenceNoWork {
		return "no work"
	}
	return "no process"
}
