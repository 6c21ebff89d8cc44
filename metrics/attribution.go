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
		return isShare(h.DeviceID) || containerOf(h) != containerOf(holders[0])
	})
	if !shared {
		return [][]Label{s.holderLabels(holders[0])}
	}
	// The values of a shared device belong to no single holder. They stay one series regardless of the holders;
	// gpu_node_agent_device_allocated lists these.
	lists := [][]Label{nil}
	if s.cfg.Attribution == AttributePerPod {
		// As dcgm-exporter with --kubernetes-virtual-gpus: the device itself, then each replica; each container once for all its units
		// of memory.
		for i, h := range holders {
			if isShare(h.DeviceID) && replicaOf(h.DeviceID) == "" &&
				slices.ContainsFunc(holders[:i], func(other podresources.Holder) bool { return containerOf(other) == containerOf(h) }) {
				continue
			}
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

// The separators before the number of a share in a device ID of the kubelet: GPU-1::3, or nvidia0/vgpu3 with GKE's plugin.
const shareSeparator, gkeShareSeparator = "::", "/vgpu"

// isShare reports whether a device ID of the kubelet is that of a share.
func isShare(id string) bool {
	return strings.Contains(id, shareSeparator) || strings.Contains(id, gkeShareSeparator)
}

// replicaOf returns the number of the replica or MPS share in a device ID of the kubelet, "" for a whole device and for a unit of
// memory. The ID of an MPS share is GPU-1::mps4::3, that of a unit of memory GPU-1::1024Mi::3.
func replicaOf(id string) string {
	_, share, ok := strings.Cut(id, shareSeparator)
	if !ok {
		_, share, _ = strings.Cut(id, gkeShareSeparator)
		return share
	}
	size, number, hasSize := strings.Cut(share, shareSeparator)
	switch {
	case !hasSize:
		return share
	case strings.HasPrefix(size, "mps"):
		return number
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
