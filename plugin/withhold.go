package plugin

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// withheldDevice is a working device that is not offered to new pods, because a pod holds it, its GPU or a part of it
// under an ID outside the layout: a whole GPU that is now shared, or a replica of one that is now whole.
type withheldDevice struct {
	Resource string
	Device   health.DeviceID
	Index    int // of the GPU
	Reason   string
}

func (w withheldDevice) String() string {
	return fmt.Sprintf("%s: %s (GPU %d) is not offered to new pods: %s", w.Resource, w.Device, w.Index, w.Reason)
}

// withhold keeps new pods off devices that pods hold under IDs outside the layout. The kubelet identifies an allocation
// by resource and ID alone, so after a change of sharing, of resource names or of the MIG strategy it considers the new
// IDs of a held GPU free.
//
// The IDs are listed as unhealthy, which is the only way to prevent their allocation: removing them would change the
// node's capacity twice. IDs that pods hold stay healthy, because the kubelet shows their health in the pod's status and
// does not restart a container whose device is unhealthy.
//
// This is not a finding. A finding applies to a whole device, so it would mark a working GPU as broken on /metrics, in
// the node's condition and in the IDs of its pods; it would also need the layout, which package health does not know.
// Nothing is stored: the result follows from the layout and the last known holders, and ends with the holder. While the
// holders are unknown, nothing is withheld.
func (l *layout) withhold(spans map[health.DeviceID]span, holders map[health.DeviceID][]podresources.Holder, snap *health.Snapshot) {
	outside := make(map[health.DeviceID]podresources.Holder) // by device: a holder under an ID outside the layout
	onParent := make(map[health.DeviceID]podresources.Holder)
	for i := range snap.Devices {
		d := &snap.Devices[i].Device
		for _, h := range holders[d.ID] {
			if spans[d.ID].indexOf(l.resources, h) < 0 {
				outside[d.ID] = h
				if d.Parent != "" {
					onParent[d.Parent] = h
				}
				break
			}
		}
	}
	if len(outside) == 0 {
		return
	}
	for r := range l.resources {
		devices := l.resources[r].Devices
		for first, next := 0, 0; first < len(devices); first = next {
			state := devices[first].State
			next = first + 1
			for next < len(devices) && devices[next].State == state {
				next++
			}
			d := &state.Device
			h, held := outside[d.ID]
			if !held && d.Parent != "" {
				h, held = outside[d.Parent]
			}
			if !held {
				h, held = onParent[d.ID]
			}
			if !held {
				continue
			}
			reason := fmt.Sprintf("%s/%s (%s) holds it as %s of %s since before the layout changed", h.Namespace, h.Pod, h.Container, h.DeviceID, h.Resource)
			l.withheld = append(l.withheld, withheldDevice{l.resources[r].Name, d.ID, d.Index, reason})
			for i := first; i < next; i++ {
				devices[i].withheld = reason
			}
			for _, h := range holders[d.ID] {
				if i := spans[d.ID].indexOf(l.resources, h); i >= 0 {
					devices[i].withheld = ""
				}
			}
		}
	}
}

// span is where the IDs of a device start in a layout; they are adjacent.
type span struct {
	resource, first int
	exists          bool
}

func (l *layout) spans() map[health.DeviceID]span {
	spans := make(map[health.DeviceID]span)
	for r := range l.resources {
		devices := l.resources[r].Devices
		for i, d := range devices {
			if i == 0 || devices[i-1].State != d.State {
				spans[d.State.Device.ID] = span{r, i, true}
			}
		}
	}
	return spans
}

// indexOf returns the index of a holder's ID in its resource, -1 if the layout lacks it.
func (s span) indexOf(resources []Resource, h podresources.Holder) int {
	if !s.exists || resources[s.resource].Name != h.Resource {
		return -1
	}
	_, replica, _ := strings.Cut(h.DeviceID, replicaSep)
	n, _ := strconv.Atoi(replica) // the comparison below detects other IDs
	i, devices := s.first+n, resources[s.resource].Devices
	if i < s.first || i >= len(devices) || devices[i].ID != h.DeviceID {
		return -1
	}
	return i
}

// logWithheld logs each device once when it is withheld and once when it is offered again.
func (p *Plugin) logWithheld(before, after *layout) {
	has := func(all []withheldDevice, id health.DeviceID) bool {
		return slices.ContainsFunc(all, func(w withheldDevice) bool { return w.Device == id })
	}
	for _, w := range after.withheld {
		if !has(before.withheld, w.Device) {
			p.log.Warn(msgWithheld, zap.String("resource", w.Resource), zap.String("device", string(w.Device)),
				zap.Int("gpu", w.Index), zap.String("reason", w.Reason))
		}
	}
	for _, w := range before.withheld {
		if after.spans()[w.Device].exists && !has(after.withheld, w.Device) {
			p.log.Info(msgOffered, zap.String("device", string(w.Device)), zap.Int("gpu", w.Index))
		}
	}
}
