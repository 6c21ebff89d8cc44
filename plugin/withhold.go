package plugin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// withheldDevice is a working device that is not offered to new pods. A pod holds it, its GPU or a part of it under an ID outside the
// layout: a whole GPU that is now shared, or a replica of a GPU that is now whole. Or nothing enforces the memory of its units.
type withheldDevice struct {
	resource string
	device   *health.Device
	pod      Pod // that holds it; empty if none does
	reason   string
	ids      int // withheld; pods may hold others
}

// gpuOf is a GPU in a resource.
type gpuOf struct {
	resource string
	gpu      health.DeviceID
}

// byGPU groups withheld devices by resource and GPU.
func byGPU(all []withheldDevice) (groups grouped.By[gpuOf, withheldDevice]) {
	for _, w := range all {
		groups.Add(gpuOf{w.resource, w.device.GPU()}, w)
	}
	return groups
}

// withheldReason returns why the devices of a group are withheld.
func withheldReason(group []withheldDevice) string {
	if !slices.ContainsFunc(group, func(w withheldDevice) bool { return w.reason != group[0].reason }) {
		return group[0].reason
	}
	var pods []Pod
	var reasons []string
	for _, w := range group {
		if w.pod != (Pod{}) {
			pods = append(pods, w.pod)
		} else if !slices.Contains(reasons, w.reason) {
			reasons = append(reasons, w.reason)
		}
	}
	if len(pods) > 0 {
		reasons = append(reasons, "held under other IDs or by claims, by "+PodNames(pods))
	}
	return strings.Join(reasons, "; ")
}

// withheldTexts describes withheld devices, one text for each GPU and resource.
func withheldTexts(all []withheldDevice) (texts []string) {
	for _, group := range byGPU(all).All() {
		w := group[0]
		which := fmt.Sprintf("%s (%s) is", w.device.ID, w.device.GPUName())
		if n := len(group); n > 1 {
			which = fmt.Sprintf("%d MIG devices of %s are", n, w.device.GPUName())
		}
		texts = append(texts, fmt.Sprintf("%s: %s not offered to new pods: %s", w.resource, which, withheldReason(group)))
	}
	return texts
}

// decide decides for each device whether it may be offered to new pods and given to one; see offer.Facts. The kubelet identifies an
// allocation by resource and ID alone, so after a change of sharing, of resource names or of the MIG strategy it considers the new IDs of
// a held GPU free.
//
// The IDs are listed as unhealthy, which is the only way to prevent their allocation: removing them would change the
// node's capacity twice. IDs that pods hold stay healthy, because the kubelet shows their health in the pod's status and
// does not restart a container whose device is unhealthy. Allocate refuses them: when their pod ends, a waiting pod gets them before the
// agent learns of it.
//
// A withheld device has no finding. A finding applies to a whole device, so it would mark a working GPU as broken on /metrics, in
// the node's condition and in the IDs of its pods; it would also need the layout, which package health does not know.
// Nothing is stored: the result follows from the layout and the last known holders, and ends with the holder. While the
// holders are unknown, nothing is withheld for them.
func (l *layout) decide(in layoutInput) {
	related := offer.RelatedTo(in.snap)
	isOwn := func(h podresources.Holder) bool { return findResource(l.resources, h.Resource).has(h.DeviceID) }
	for _, r := range l.resources {
		for _, device := range r.Devices {
			d := &device.State.Device
			ask := offer.Request{API: offer.DevicePlugin, Purpose: offer.Offer, Device: d, Related: related[d.ID], Except: isOwn}
			held := device.decide(ask, &in.facts)
			if by := in.facts.Holders.By; by != nil { //nolint:forbidigo // the answer says whether they keep it
				device.held = make(map[int]bool)
				for _, h := range by[d.ID] { // containers of a pod can hold the same unit
					if u, ok := r.unit(h.DeviceID); ok && h.Resource == r.Name {
						device.held[u.number] = true
					}
				}
			}
			if w, withheld := device.withheld(held); withheld {
				w.resource = r.Name
				l.withheld = append(l.withheld, w)
			}
		}
	}
}

// decide sets the answers of a device, and why it is displaced. held is whether a pod holds the device under an ID outside the layout, also
// if it is not healthy or not ready.
func (d *Device) decide(ask offer.Request, facts *offer.Facts) (held offer.Answer) {
	state, s := d.State, d.share
	if held = facts.Decide(&ask); held.Code() == offer.Held {
		d.displaced = held.Reason()
	}
	ask.Verdict = &state.Verdict
	if s != nil {
		ask.NotReady, ask.Blocked, ask.Pending = s.unready, s.blocked, s.pending
	}
	if ask.NotReady != "" && state.MPS != nil { // the finding is the same fault
		ask.Tolerates = func(f *health.Finding) bool { return f.Cause == state.MPS.Cause }
	}
	if state.MPS != nil && (s == nil || !s.mps) { // only its clients can use the GPU
		ask.Reserved = cmp.Or(state.MPS.Reason, "its MPS daemon still runs")
	}
	d.offer = facts.Decide(&ask)
	ask.Purpose = offer.Give
	d.give = facts.Decide(&ask)
	return held
}

// withheld describes a device that is withheld; held is what decide returned.
func (d *Device) withheld(held offer.Answer) (w withheldDevice, withheld bool) {
	w.device, w.ids = &d.State.Device, d.units()-len(d.held)
	switch {
	case held.Code() == offer.Held:
		h, _ := held.Holder()
		w.pod, w.reason = Pod{h.Namespace, h.Pod}, d.displaced
	case d.offer.Code() == offer.NoCDI: // it concerns all devices, so it is in layout.err
		return w, false
	case d.offer.Code() > offer.Held && !d.offer.Pending(): // what is pending takes a moment only
		w.reason = d.offer.Reason()
	default:
		return w, false
	}
	return w, true
}

// releasingReason is why a device is withheld while the node changes from one API to the other.
const releasingReason = "plugin.api has changed to " + APIDRA + ", which serves the devices when the running GPU pods have ended"

// logWithheld logs withheld devices once, one line for each GPU, and once when they are offered again.
func (p *Plugin) logWithheld(before, after *layout) {
	has := func(all []withheldDevice, id health.DeviceID) bool {
		return slices.ContainsFunc(all, func(w withheldDevice) bool { return w.device.ID == id })
	}
	withheld, offered := make(idsByReason), make(idsByReason)
	added := slices.DeleteFunc(slices.Clone(after.withheld), func(w withheldDevice) bool { return has(before.withheld, w.device.ID) })
	for _, group := range byGPU(added).All() {
		reason := withheldReason(group)
		for _, w := range group {
			withheld.add(w.resource, w.device, w.ids, reason)
		}
	}
	for _, w := range before.withheld {
		for _, r := range after.resources {
			if d := r.byID[w.device.ID]; d != nil && !has(after.withheld, w.device.ID) {
				offered.add(r.Name, w.device, d.units(), "")
			}
		}
	}
	withheld.log(p.log.Warn, msgWithheld)
	offered.log(p.log.Info, msgOffered)
}
