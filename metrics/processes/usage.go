package processes

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/containers"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Reason is why a process belongs to no pod.
type Reason string

// The reasons. All but ReasonHost mean that the pod of a process may be missing.
const (
	ReasonHost           Reason = "host"            // its control group belongs to no pod
	ReasonUnreadable     Reason = "unreadable"      // its control group could not be read
	ReasonUnknownPod     Reason = "unknown_pod"     // the name of the pod is unknown
	ReasonNotHolder      Reason = "not_holder"      // the pod does not hold the device
	ReasonHoldersUnknown Reason = "holders_unknown" // the kubelet has not reported the holders
)

// Reasons returns all reasons.
func Reasons() []Reason {
	return []Reason{ReasonHost, ReasonUnreadable, ReasonUnknownPod, ReasonNotHolder, ReasonHoldersUnknown}
}

// maxContainers limits the containers of a device. A device that is shared by time has up to some dozen replicas.
const maxContainers = 64

type processKey struct {
	device health.DeviceID
	pid    int
}

// mergeProcesses returns each process of a measured device once, sorted. The driver lists a process of several kinds once per kind,
// with the same memory: a client of the MPS server also uses compute. A process of a MIG device is not one of its parent.
func mergeProcesses(r *driver.ProcessReading, devices []health.Device) []driver.Process {
	parents := make(map[health.DeviceID]health.DeviceID)
	for i := range devices {
		parents[devices[i].ID] = devices[i].Parent
	}
	merged := make(map[processKey]driver.Process)
	for _, p := range r.Processes {
		if !slices.Contains(r.Measured, p.Device) {
			continue
		}
		key := processKey{p.Device, p.PID}
		if other, exists := merged[key]; exists {
			p = mergeProcess(other, p)
		}
		merged[key] = p
	}
	for key := range merged {
		if parent := parents[key.device]; parent != "" {
			delete(merged, processKey{parent, key.pid})
		}
	}
	list := make([]driver.Process, 0, len(merged))
	for _, p := range merged {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b driver.Process) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.PID, b.PID))
	})
	return list
}

// mergeProcess merges two entries of one process.
func mergeProcess(a, b driver.Process) driver.Process {
	switch {
	case a.Kind == driver.ProcessMPS || b.Kind == driver.ProcessMPS:
		a.Kind = driver.ProcessMPS
	case b.Kind == driver.ProcessCompute:
		a.Kind = driver.ProcessCompute
	}
	a.Memory, a.HasMemory = max(a.Memory, b.Memory), a.HasMemory || b.HasMemory
	a.SM, a.HasSM = max(a.SM, b.SM), a.HasSM || b.HasSM
	return a
}

// attribution finds the container of each process.
type attribution struct {
	cgroup   func(pid int) (string, error)
	podByUID func(uid string) (namespace, name string, ok bool) // nil: none
	names    containers.Names
	holders  podresources.Holders
	related  map[health.DeviceID][]health.DeviceID // devices whose holders may use the device

	containers []Container // of the processes so far
	intruder   string      // the first pod that uses a device without holding it, with the device
}

// relatedDevices returns for each device those whose holders may use it: itself, the parent of a MIG device, the MIG devices of a GPU.
func relatedDevices(devices []health.Device) map[health.DeviceID][]health.DeviceID {
	related := make(map[health.DeviceID][]health.DeviceID, len(devices))
	for i := range devices {
		d := &devices[i]
		related[d.ID] = append(related[d.ID], d.ID)
		if d.Parent != "" {
			related[d.ID] = append(related[d.ID], d.Parent)
			related[d.Parent] = append(related[d.Parent], d.ID)
		}
	}
	return related
}

// containerOf returns the container of a process, or why it belongs to no pod. A pod that does not hold the device is not returned: a wrong
// pod is worse than none.
func (a *attribution) containerOf(p driver.Process) (Container, Reason) {
	text, err := a.cgroup(p.PID)
	if err != nil {
		return Container{}, ReasonUnreadable
	}
	ref, ok := containers.ParseCgroup(text)
	if !ok {
		return Container{}, ReasonHost
	}
	pod, ok := a.podOf(ref.Pod)
	if !ok {
		return Container{}, ReasonUnknownPod
	}
	if a.holders.By == nil {
		return Container{}, ReasonHoldersUnknown
	}
	holding := a.holding(p.Device, pod)
	if len(holding) == 0 {
		a.intruder = cmp.Or(a.intruder, fmt.Sprintf("%s/%s on %s", pod.Namespace, pod.Name, p.Device))
		return Container{}, ReasonNotHolder
	}
	c := Container{Namespace: pod.Namespace, Pod: pod.Name}
	if linked, exists := a.names.Containers[ref.ID]; exists && linked.Namespace == pod.Namespace && linked.Pod == pod.Name {
		c.Name = linked.Name
	} else if len(holding) == 1 {
		c.Name = holding[0]
	}
	return c, ""
}

func (a *attribution) podOf(uid string) (containers.Pod, bool) {
	if a.podByUID != nil {
		if namespace, name, ok := a.podByUID(uid); ok {
			return containers.Pod{Namespace: namespace, Name: name}, true
		}
	}
	pod, ok := a.names.Pods[uid]
	return pod, ok
}

// holding returns the distinct names of the pod's containers that hold the device, or can use it by adminAccess.
func (a *attribution) holding(id health.DeviceID, pod containers.Pod) (names []string) {
	for _, device := range a.related[id] {
		for _, by := range []map[health.DeviceID][]podresources.Holder{a.holders.By, a.holders.Admin} {
			for _, h := range by[device] {
				if h.Namespace == pod.Namespace && h.Pod == pod.Name && !slices.Contains(names, h.Container) {
					names = append(names, h.Container)
				}
			}
		}
	}
	return names
}

// usage adds up the processes of each container, and counts the processes of no pod by reason.
func (a *attribution) usage(processes []driver.Process) (list []Usage, withoutPod map[Reason]int) {
	type key struct {
		device    health.DeviceID
		container Container
	}
	sums := make(map[key]Usage)
	withoutPod = make(map[Reason]int)
	for _, p := range processes {
		c, reason := a.containerOf(p)
		a.containers = append(a.containers, c)
		if reason != "" {
			withoutPod[reason]++
		}
		u := Usage{Device: p.Device, Container: c, Processes: 1, Memory: p.Memory, SM: p.SM, HasMemory: p.HasMemory, HasSM: p.HasSM}
		if sum, exists := sums[key{p.Device, c}]; exists {
			u = addUsage(sum, u)
		}
		sums[key{p.Device, c}] = u
	}
	for _, u := range sums {
		list = append(list, u)
	}
	slices.SortFunc(list, compareUsage)
	return limitContainers(list), withoutPod
}

// addUsage adds b to a. What one of them lacks the sum lacks too.
func addUsage(a, b Usage) Usage {
	a.Processes += b.Processes
	a.Memory, a.HasMemory = a.Memory+b.Memory, a.HasMemory && b.HasMemory
	a.SM, a.HasSM = min(1, a.SM+b.SM), a.HasSM && b.HasSM
	return a
}

func compareUsage(a, b Usage) int {
	return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Container.Namespace, b.Container.Namespace),
		cmp.Compare(a.Container.Pod, b.Container.Pod), cmp.Compare(a.Container.Name, b.Container.Name))
}

// limitContainers adds up the containers above the limit of each device. list is sorted, so the processes of no pod stay apart.
func limitContainers(list []Usage) []Usage {
	var limited []Usage
	var n int // containers of the device so far
	for _, u := range list {
		last := len(limited) - 1
		if last < 0 || limited[last].Device != u.Device {
			n = 0
		}
		n++
		switch {
		case n <= maxContainers:
			limited = append(limited, u)
		case n == maxContainers+1:
			u.Container = Container{Name: Other}
			limited = append(limited, u)
		default:
			limited[last] = addUsage(limited[last], u)
		}
	}
	return limited
}
