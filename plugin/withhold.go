package plugin

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// withheld is a device that works and is not offered to new pods, because a pod holds it, its GPU or a part of it
// under an id that is not in the layout: a whole GPU that is now shared, or a share of one that is now whole.
type withheld struct {
	Resource string
	Device   health.DeviceID
	Index    int // of the GPU
	Why      string
}

// withhold keeps new pods off the devices that pods hold under ids that are not in the layout. The kubelet knows an
// allocation by resource and id alone, so after a change of sharing, of names or of the strategy for MIG it takes the new
// ids of a held GPU for free ones.
//
// The ids are listed as unhealthy, because that is the only way to tell the kubelet to allocate none of them: ids that are
// left out would change the node's capacity twice. Ids that pods hold stay healthy: the kubelet shows their health in the
// pod's status, and admits no container again whose device is unhealthy.
//
// This is no finding of the device. A finding is of a whole device, and would show a GPU that works as broken on
// /metrics, in the node's condition and in the ids that its pods hold. It would also need the layout, which package health
// does not know. Nothing is kept here: the result follows from the layout and from what the kubelet said last, and ends
// with the holder. While the holders are not known, nothing is withheld.
func (a *arrangement) withhold(holders map[health.DeviceID][]Holder, snap *health.Snapshot) {
	if len(holders) == 0 || len(a.Resources) == 0 {
		return
	}
	at := a.spans()
	old := make(map[health.DeviceID]Holder)   // a holder by the device that it has under an old id
	parts := make(map[health.DeviceID]Holder) // the same by the GPU, if it has a part of it
	for i := range snap.Devices {
		d := &snap.Devices[i].Device
		for _, h := range holders[d.ID] {
			if at[d.ID].place(a.Resources, h) < 0 {
				old[d.ID] = h
				if d.Parent != "" {
					parts[d.Parent] = h
				}
				break
			}
		}
	}
	if len(old) == 0 {
		return
	}
	for r := range a.Resources {
		devices := a.Resources[r].Devices
		for first, next := 0, 0; first < len(devices); first = next {
			state := devices[first].State
			next = first + 1
			for next < len(devices) && devices[next].State == state {
				next++
			}
			d := &state.Device
			h, held := old[d.ID]
			if !held && d.Parent != "" {
				h, held = old[d.Parent]
			}
			if !held {
				h, held = parts[d.ID]
			}
			if !held {
				continue
			}
			why := fmt.Sprintf("%s/%s (%s) holds it as %s of %s, from before the layout was changed", h.Namespace, h.Pod, h.Container, h.DeviceID, h.Resource)
			a.Withheld = append(a.Withheld, withheld{a.Resources[r].Name, d.ID, d.Index, why})
			for i := first; i < next; i++ {
				devices[i].withheld = why
			}
			for _, h := range holders[d.ID] {
				if i := at[d.ID].place(a.Resources, h); i >= 0 {
					devices[i].withheld = ""
				}
			}
		}
	}
}

// span is where the ids of a device begin in a layout; they are side by side.
type span struct {
	resource, first int
	known           bool // the device is in the layout
}

func (a *arrangement) spans() map[health.DeviceID]span {
	at := make(map[health.DeviceID]span)
	for r := range a.Resources {
		devices := a.Resources[r].Devices
		for i, d := range devices {
			if i == 0 || devices[i-1].State != d.State {
				at[d.State.Device.ID] = span{r, i, true}
			}
		}
	}
	return at
}

// place returns where in its resource the id is that a container holds, -1 if the layout does not have it.
func (s span) place(layout []Resource, h Holder) int {
	if !s.known || layout[s.resource].Name != h.Resource {
		return -1
	}
	i, devices := s.first, layout[s.resource].Devices
	if _, replica := cutReplica(h.DeviceID); replica > 0 {
		i += replica - 1
	}
	if i >= len(devices) || devices[i].ID != h.DeviceID {
		return -1
	}
	return i
}

// text names the device as people do.
func (w withheld) text() string {
	return fmt.Sprintf("%s: %s (GPU %d) is not offered to new pods: %s", w.Resource, w.Device, w.Index, w.Why)
}

// logWithheld logs each device once when it is withheld, and once when it is offered again.
func (p *Plugin) logWithheld(before, after *arrangement) {
	has := func(all []withheld, id health.DeviceID) bool {
		return slices.ContainsFunc(all, func(w withheld) bool { return w.Device == id })
	}
	for _, w := range after.Withheld {
		if !has(before.Withheld, w.Device) {
			p.log.Warn("device is not offered to new pods", zap.String("resource", w.Resource), zap.String("device", string(w.Device)),
				zap.Int("gpu", w.Index), zap.String("why", w.Why))
		}
	}
	for _, w := range before.Withheld {
		if after.spans()[w.Device].known && !has(after.Withheld, w.Device) {
			p.log.Info("device is offered to new pods again", zap.String("device", string(w.Device)), zap.Int("gpu", w.Index))
		}
	}
}
