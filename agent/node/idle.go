package node

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/kube"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Idle reports whether a holder has not used a device for node.idle.after, and since how long. What is unknown now is no evidence. A
// device that works has a process, also if the driver does not list it.
func (c IdleConfig) Idle(i metrics.IdleTime) (d time.Duration, idle bool) {
	known := i.WorkKnown
	if d = i.NoWork; c.Resolved() == EvidenceNoProcess {
		d, known = i.NoProcess, i.ProcessesKnown
		if i.WorkKnown {
			d = min(d, i.NoWork)
		}
	}
	return d, c.After > 0 && known && d >= c.After
}

// IdlePods returns the pods that do not use all of their devices. A device is idle if each container of the pod that holds it is.
// Others that share the device do not matter: with processes, each has its own, and without, their work counts as the container's.
func IdlePods(c IdleConfig, s *health.Snapshot, holders podresources.Holders, times metrics.IdleTimes) kube.IdlePods {
	all := kube.IdlePods{After: c.After, Evidence: "process"}
	if c.Resolved() == EvidenceNoWork {
		all.Evidence, all.ModelUnknown = "work", !c.Processes
	}
	if s == nil {
		return all
	}
	pods := make(map[kube.Pod]*kube.IdlePod)
	for i := range s.Devices {
		d := &s.Devices[i].Device
		shortest := make(map[kube.Pod]time.Duration) // of the pod's containers; negative if one is not idle
		for _, h := range holders.By[d.ID] {
			pod := kube.Pod{Namespace: h.Namespace, Name: h.Pod}
			before, exists := shortest[pod]
			of, _ := times.Of(d.ID, h)
			now, idle := c.Idle(of)
			if !idle {
				now = -1
			}
			if !exists || now < before {
				shortest[pod] = now
			}
		}
		for pod, idle := range shortest {
			p := pods[pod]
			if p == nil {
				p = &kube.IdlePod{Pod: pod, Kind: kindOf(d)}
				pods[pod] = p
			}
			p.Held++
			if p.Kind != kindOf(d) {
				p.Kind = "device"
			}
			if idle >= 0 {
				p.Idle = append(p.Idle, kube.IdleDevice{Name: nameOf(d), For: idle})
			}
		}
	}
	maps.DeleteFunc(pods, func(_ kube.Pod, p *kube.IdlePod) bool { return len(p.Idle) == 0 })
	for _, pod := range slices.SortedFunc(maps.Keys(pods), func(a, b kube.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	}) {
		all.Pods = append(all.Pods, *pods[pod])
	}
	return all
}

func kindOf(d *health.Device) string {
	if d.Kind == health.KindMIG {
		return "MIG device"
	}
	return "GPU"
}

// nameOf returns a device's name without its UUID, which means nothing to a pod's owner.
func nameOf(d *health.Device) string {
	switch {
	case d.Kind == health.KindMIG && d.MIGIndex >= 0 && d.Index >= 0:
		return fmt.Sprintf("MIG %d:%d", d.Index, d.MIGIndex)
	case d.Kind == health.KindMIG:
		return "MIG " + string(d.ID)
	}
	return d.GPUName()
}
