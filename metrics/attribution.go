package metrics

import (
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/common/model"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// podName identifies a pod.
type podName struct{ namespace, name string }

// attributions returns the holder labels of an entity's series, one list for each time that the series are exported.
func (s *scrape) attributions(holders []podresources.Holder) [][]Label {
	if len(holders) == 0 {
		return [][]Label{nil}
	}
	if only, ok := onlyHolder(holders); ok {
		return [][]Label{s.holderLabels(only)}
	}
	// The values of a shared device belong to no single holder. They stay one series regardless of the holders;
	// gpu_node_agent_device_allocated lists these.
	lists := [][]Label{nil}
	if s.cfg.Attribution == AttributePerPod {
		// As dcgm-exporter with --kubernetes-virtual-gpus: the device itself, then each replica; each container once for all its units
		// of memory.
		for i, h := range holders {
			if isShare(h) && replicaOf(h) == "" &&
				slices.ContainsFunc(holders[:i], func(other podresources.Holder) bool { return containerOf(other) == containerOf(h) }) {
				continue
			}
			lists = append(lists, s.holderLabels(h))
		}
	}
	return lists
}

// onlyHolder returns the container to which the values of a device belong; ok is false if the device is shared. All containers that use a
// claim hold its devices, so several of one pod are the pod, without a container.
func onlyHolder(holders []podresources.Holder) (only podresources.Holder, ok bool) {
	only = holders[0]
	for _, h := range holders {
		switch {
		case isShare(h):
			return only, false
		case containerOf(h) == containerOf(holders[0]):
		case h.ByClaim() && h.Claim == holders[0].Claim && h.Namespace == only.Namespace && h.Pod == only.Pod:
			only.Container = ""
		default:
			return only, false
		}
	}
	return only, true
}

// holderLabels returns the labels of a holder. It omits empty ones: to Prometheus an empty label does not exist, so two
// series that differ here could be the same there.
func (s *scrape) holderLabels(h podresources.Holder) []Label {
	labels := make([]Label, 0, 16)
	for _, l := range []Label{
		label("container", h.Container), label("namespace", h.Namespace), label("pod", h.Pod),
		label("vgpu", replicaOf(h)),
	} {
		if l.Value != "" {
			labels = append(labels, l)
		}
	}
	return append(append(labels, s.claimLabels(h)...), s.labelsOfPod(h)...)
}

// claimLabelNames returns dcgm-exporter's labels of a claim (Dra in its internal/pkg/transformation).
func claimLabelNames() []string {
	return []string{
		"dra_claim_name", "dra_claim_namespace", "dra_driver_name", "dra_pool_name", "dra_device_name", "dra_mig_profile",
		"dra_mig_device_uuid",
	}
}

// claimLabels returns the labels of a holder's claim; none of a device without one, or unless metrics.claimLabels is set.
func (s *scrape) claimLabels(h podresources.Holder) (labels []Label) {
	if !s.cfg.ClaimLabels || !h.ByClaim() {
		return nil
	}
	values := []string{h.Claim.Name, h.Namespace, h.Claim.Driver, h.Claim.Pool, h.DeviceID, "", ""}
	if d := s.heldMIG(h); d != nil {
		values[5], values[6] = d.Profile, string(d.ID)
	}
	for i, name := range claimLabelNames() {
		if values[i] != "" {
			labels = append(labels, label(name, values[i]))
		}
	}
	return labels
}

// heldMIG returns the MIG device that a claim's device is, nil if it is a GPU.
func (s *scrape) heldMIG(h podresources.Holder) *health.Device {
	for i := range s.Snapshot.Devices {
		if d := &s.Snapshot.Devices[i].Device; d.Kind == health.KindMIG && slices.Contains(s.Holders.By[d.ID], h) {
			return d
		}
	}
	return nil
}

// gkeShareSeparator stands before the number of a share in an ID of GKE's plugin, such as nvidia0/vgpu3.
const gkeShareSeparator = "/vgpu"

// isShare reports whether a container holds a share of a device.
func isShare(h podresources.Holder) bool {
	return h.Claim.ShareID != "" || deviceid.Parse(h.DeviceID).Form().Kind != deviceid.Whole || strings.Contains(h.DeviceID, gkeShareSeparator)
}

// replicaOf returns the number of the replica or MPS share in a device ID of the kubelet, "" for a whole device, for a unit of memory
// and for a claim.
func replicaOf(h podresources.Holder) string {
	id := deviceid.Parse(h.DeviceID)
	switch form := id.Form(); form.Kind {
	case deviceid.Replica, deviceid.MPSShare, deviceid.MPSMemory:
		n, _ := form.Number(id)
		return strconv.Itoa(n)
	case deviceid.Whole:
		_, share, _ := strings.Cut(h.DeviceID, gkeShareSeparator)
		return share
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
