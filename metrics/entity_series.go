package metrics

import (
	"strconv"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// collectEntities adds the selected fields of NVSwitches, NVLinks, CPUs and cores, with dcgm-exporter's labels, after
// collectFields. No pod holds them.
func (s *scrape) collectEntities() {
	for i := range s.Snapshot.Entities {
		e := &s.Snapshot.Entities[i]
		var labels []*dto.LabelPair // of all series of the entity
		for n := range s.cfg.Chosen.Fields {
			v, ok := s.cfg.Chosen.Fields[n].Value(e.Values)
			if !ok {
				continue
			}
			if labels == nil {
				if labels, ok = s.hardwareLabels(e); !ok {
					break
				}
			}
			s.Add(s.firstField+n, v, labels)
		}
	}
}

// hardwareLabels returns the labels of an entity; ok is false for a link of a GPU that is not listed.
func (s *scrape) hardwareLabels(e *health.Entity) (labels []*dto.LabelPair, ok bool) {
	id, parent := strconv.FormatUint(uint64(e.ID), 10), strconv.FormatUint(uint64(e.Parent), 10)
	var more []Label
	switch e.Kind {
	case health.EntityNVSwitch:
		more = []Label{label("nvswitch", "nvswitch"+id)}
	case health.EntitySwitchLink:
		more = []Label{label("nvlink", id), label("nvswitch", "nvswitch"+parent)}
	case health.EntityGPULink:
		n, exists := s.entityByKey[entityKey{uuid: e.GPU}]
		if !exists {
			return nil, false
		}
		gpu := &s.firstDevice(&s.entities[n]).Device
		more = []Label{
			label("nvlink", id), label("gpu", gpu.IndexText()), label("gpu_uuid", string(gpu.ID)), label("pci_bus_id", gpu.PCI),
			label("device", nodeLabel(gpu)), label("model_name", gpu.Model),
		}
	case health.EntityCPU:
		more = []Label{label("cpu", id)}
	case health.EntityCPUCore:
		more = []Label{label("cpucore", id), label("cpu", parent)}
	}
	more = append(more, label(s.cfg.Compat.HostnameLabel, s.Node))
	return s.Labels(nil, s.addFieldLabels(more, health.Device{Texts: e.Texts}, e.Values)...), true
}
