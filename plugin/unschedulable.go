package plugin

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Unschedulable is the part of a resource that is free and healthy, but that no new pod can get. The kubelet's allocatable
// counts the healthy devices only. From it the scheduler subtracts what pods request, including the unhealthy devices that
// they hold. So each of these costs a free healthy device until its pod ends.
type Unschedulable struct {
	Resource string
	Devices  int   // free and healthy, but out of the scheduler's reach
	Pods     []Pod // those to end: they hold devices that the kubelet does not count as healthy; sorted
}

// Pod names a pod.
type Pod struct{ Namespace, Name string }

// uniquePods sorts pods and removes duplicates.
func uniquePods(pods []Pod) []Pod {
	slices.SortFunc(pods, func(a, b Pod) int { return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name)) })
	return slices.Compact(pods)
}

// PodNames lists pods: "pod a/b" or "pods a/b, a/c and 3 more".
func PodNames(pods []Pod) string { return podNames(uniquePods(pods)) }

// podNames lists pods that uniquePods has returned.
func podNames(pods []Pod) string {
	names := make([]string, len(pods))
	for i, p := range pods {
		names[i] = p.Namespace + "/" + p.Name
	}
	return grouped.Named("pod", names)
}

// String describes a loss and names the pods to end.
func (u Unschedulable) String() string {
	return fmt.Sprintf("%d free %s cannot be scheduled while pods hold unhealthy or no longer offered ones: end %s to get the capacity back",
		u.Devices, u.Resource, podNames(u.Pods))
}

// Unschedulable describes the lost capacity of each resource that has lost any. It is unknown while the holders are, or the resources. It
// may be called from any goroutine and never waits.
func (p *Plugin) Unschedulable() (texts []string, known bool) {
	now := p.layouts.current()
	for _, r := range now.resources {
		if u := r.Unschedulable; u != nil && u.Devices > 0 {
			texts = append(texts, u.String())
		}
	}
	return texts, p.Holders().By != nil && !isStarting(now.absent) //nolint:forbidigo // for a text
}

// countUnschedulable sets the lost capacity of each resource. A device that a pod holds under an ID outside the layout,
// such as a removed MIG device, costs as much as an unhealthy one.
func (l *layout) countUnschedulable(holders map[health.DeviceID][]podresources.Holder) {
	lost := make([]Unschedulable, len(l.resources))
	free := make([]int, len(l.resources))
	for i, r := range l.resources {
		l.resources[i].Unschedulable = &lost[i]
		lost[i].Resource, free[i] = r.Name, r.healthy()
	}
	for _, all := range holders {
		seen := make(map[[2]string]bool, len(all)) // containers of a pod can share a device
		for _, h := range all {
			id := [2]string{h.Resource, h.DeviceID}
			i := slices.IndexFunc(l.resources, func(r Resource) bool { return r.Name == h.Resource })
			if i < 0 || seen[id] {
				continue
			}
			seen[id] = true
			if u, ok := l.resources[i].unit(h.DeviceID); ok && u.healthy(u.number) {
				free[i]--
				continue
			}
			lost[i].Devices++
			lost[i].Pods = append(lost[i].Pods, Pod{h.Namespace, h.Pod})
		}
	}
	for i := range lost {
		u := &lost[i]
		if u.Devices = min(u.Devices, free[i]); u.Devices == 0 {
			u.Pods = nil
			continue
		}
		u.Pods = uniquePods(u.Pods)
	}
}
