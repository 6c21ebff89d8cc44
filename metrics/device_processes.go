package metrics

import (
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// collectProcesses adds what the containers use of a device.
func (s *scrape) collectProcesses(d labeledDevice) {
	usage, measured := s.Processes.Of(d.Device.ID)
	if !measured || len(usage) == 0 && d.Device.Kind == health.KindGPU && d.Device.MIGMode {
		return // the processes of a GPU in MIG mode belong to its MIG devices
	}
	if len(usage) == 0 || usage[0].Container != (processes.Container{}) {
		s.Add(deviceProcesses, 0, s.Labels(d.labels, processLabels(processes.Container{})...)) // so that "no process" is not "not measured"
	}
	for i := range usage {
		u := &usage[i]
		labels := processLabels(u.Container)
		if c := u.Container; c.Pod != "" {
			labels = append(labels, s.uidOfPod(podresources.Holder{Namespace: c.Namespace, Pod: c.Pod})...)
		}
		pairs := s.Labels(d.labels, labels...) // all series of the container share one list
		s.Add(deviceProcesses, float64(u.Processes), pairs)
		if u.HasMemory {
			s.Add(deviceProcessMemory, u.Memory, pairs)
		}
		if u.HasSM {
			s.Add(deviceProcessSM, u.SM, pairs)
		}
	}
}

func processLabels(c processes.Container) []Label {
	return []Label{label("namespace", c.Namespace), label("pod", c.Pod), label("container", c.Name)}
}

// collectProcessesStatus adds whether the processes can be listed, and how many have no pod.
func (s *scrape) collectProcessesStatus() {
	p := s.Processes
	if p == nil {
		return
	}
	s.Add(processesUp, boolValue(p.Err == ""), nil)
	if p.Err == "" {
		for _, reason := range processes.Reasons() {
			s.AddWith(processesWithoutPod, float64(p.WithoutPod[reason]), nil, label("reason", string(reason)))
		}
	}
}
