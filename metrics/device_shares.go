package metrics

import (
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// collectShares adds the units of a device that is shared by MPS or by memory, its MPS daemon, and the memory of its containers.
// The replicas of a time-sliced device have no limits that a series could show.
func (s *scrape) collectShares(d labeledDevice) {
	for i := range s.Shares {
		u := &s.Shares[i]
		if u.Device != d.Device.ID || u.Sharing == plugin.SharingTimeSlicing {
			continue
		}
		for _, state := range [...]struct {
			name  string
			units int
		}{{"total", u.Total}, {"free", u.Free}, {"largest", u.Largest}} {
			if state.units >= 0 {
				s.AddWith(shareUnits, float64(state.units), d.labels,
					label("resource", u.Resource), label("sharing", string(u.Sharing)), label("state", state.name))
			}
		}
	}
	if d.MPS != nil {
		s.collectMPS(d.MPS, d)
	}
	s.collectMemoryLimits(d)
}

func (s *scrape) collectMPS(m *health.MPSDaemon, d labeledDevice) {
	if !m.Leaving { // on purpose it serves no new container
		s.Add(mpsDaemonUp, boolValue(m.Ready), d.labels)
	}
	s.Add(mpsDaemonRestarts, float64(m.Restarts), d.labels)
	s.Add(mpsClients, float64(m.ClientCount()), d.labels)
	if m.ThreadPercentage > 0 {
		s.Add(mpsActiveThreads, m.ThreadPercentage/100, d.labels)
	}
	if m.PinnedMemory > 0 {
		s.Add(mpsPinnedMemory, float64(m.PinnedMemory), d.labels)
	}
}

// collectMemoryLimits adds the memory of the device's containers.
func (s *scrape) collectMemoryLimits(d labeledDevice) {
	if s.Memory == nil {
		return
	}
	for i := range s.Memory.Containers {
		c := &s.Memory.Containers[i]
		if c.Device != d.Device.ID {
			continue
		}
		labels := []Label{label("namespace", c.Namespace), label("pod", c.Pod), label("container", c.Name), label("resource", c.Resource)}
		labels = append(labels, s.uidOfPod(podresources.Holder{Namespace: c.Namespace, Pod: c.Pod})...)
		pairs := s.Labels(d.labels, labels...)
		s.AddWith(containerMemoryLimit, float64(c.Limit), pairs, label("enforcement", string(c.Enforcement)))
		if c.HasUsed {
			s.Add(containerMemoryUsed, float64(c.Used), pairs)
		}
	}
}
