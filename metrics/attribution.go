package metrics

import (
	"slices"
	"strings"

	"github.com/prometheus/common/model"

	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// podName identifies a pod.
type podName struct{ namespace, name string }

// attributions returns the holder labels of an entity's series, one list for each time that the series are exported.
func (s *scrape) attributions(holders []podresources.Holder) [][]Label {
	if len(holders) == 0 {
		return [][]Label{nil}
	}
	shared := slices.ContainsFunc(holders, func(h podresources.Holder) bool {
		return replicaOf(h.DeviceID) != "" || containerOf(h) != containerOf(holders[0])
	})
	if !shared {
		return [][]Label{s.holderLabels(holders[0])}
	}
	// The values of a shared device belong to no single holder. They stay one series regardless of the holders;
	// gpu_node_agent_device_allocated lists these.
	lists := [][]Label{nil}
	if s.cfg.Attribution == AttributePerPod {
		// As dcgm-exporter with --kubernetes-virtual-gpus: the device itself, then each replica.
		for _, h := range holders {
			lists = append(lists, s.holderLabels(h))
		}
	}
	return lists
}

// holderLabels returns the labels of a holder. It omits empty ones: to Prometheus an empty label does not exist, so two
// series that differ here could be the same there.
func (s *scrape) holderLabels(h podresources.Holder) []Label {
	labels := make([]Label, 0, 8)
	for _, l := range []Label{label("container", h.Container), label("namespace", h.Namespace), label("pod", h.Pod), label("vgpu", replicaOf(h.DeviceID))} {
		if l.Value != "" {
			labels = append(labels, l)
		}
	}
	return append(labels, s.labelsOfPod(h)...)
}

// replicaOf returns the replica number in a device ID of the kubelet, "" for a whole device. The ID of a replica is
// GPU-1::3, or nvidia0/vgpu3 with GKE's plugin.
func replicaOf(id string) string {
	for _, sep := range []string{"::", "/vgpu"} {
		if _, replica, ok := strings.Cut(id, sep); ok {
			return replica
		}
	}
	return ""
}

// labelsOfPod returns the exported labels of a holder's pod, including its UID. It asks for each pod once in a scrape.
// It omits empty labels, invalid names, and names that the agent uses itself: metrics.fieldsFile may have added such a
// name after metrics.podLabels was validated.
func (s *scrape) labelsOfPod(h podresources.Holder) []Label {
	if s.src.PodLabels == nil {
		return nil
	}
	name := podName{h.Namespace, h.Pod}
	labels, cached := s.podLabels[name]
	if !cached {
		labels = slices.DeleteFunc(slices.Clone(s.src.PodLabels(h.Namespace, h.Pod)), func(l Label) bool {
			valid := model.LegacyValidation.IsValidLabelName(l.Name) && !strings.HasPrefix(l.Name, model.ReservedLabelPrefix)
			return l.Value == "" || !valid || l.Name != podUIDLabel && s.cfg.labelReservedBy(l.Name) != ""
		})
		s.podLabels[name] = labels
	}
	return labels
}

// uidOfPod returns the UID label of a holder's pod; none if it is unknown or not exported.
func (s *scrape) uidOfPod(h podresources.Holder) []Label {
	labels := s.labelsOfPod(h)
	if i := slices.IndexFunc(labels, isPodUID); i >= 0 {
		return labels[i : i+1]
	}
	return nil
}

func isPodUID(l Label) bool { return l.Name == podUIDLabel }
