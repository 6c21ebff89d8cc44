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

// answers are whether a device may be offered and given. All units of a device have the same.
type answers struct{ offer, give offer.Answer }

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
	isOwn := func(h podresources.Holder) bool { return findResource(l.resources, h.Resource).index(h.DeviceID) >= 0 }
	for _, r := range l.resources {
		for units := range r.byDevice() {
			d := &units[0].State.Device
			ask := offer.Request{API: offer.DevicePlugin, Purpose: offer.Offer, Device: d, Related: related[d.ID], Except: isOwn}
			held, may := decideUnits(units, ask, &in.facts)
			for _, h := range in.facts.Holders.By[d.ID] { //nolint:forbidigo // the answer says whether they keep it
				if i := r.index(h.DeviceID); i >= 0 && h.Resource == r.Name {
					r.Devices[i].held = true
				}
			}
			if w, withheld := withheldUnits(units, held, may.offer); withheld {
				w.resource = r.Name
				l.withheld = append(l.withheld, w)
			}
		}
	}
}

// decideUnits sets the answers of all units of a device. held is whether a pod holds the device under an ID outside the layout, also if it
// is not healthy or not ready.
func decideUnits(units []Device, ask offer.Request, facts *offer.Facts) (held offer.Answer, may *answers) {
	state, s := units[0].State, units[0].share
	held = facts.Decide(&ask)
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
	may = &answers{offer: facts.Decide(&ask)}
	ask.Purpose = offer.Give
	may.give = facts.Decide(&ask)
	for i := range units {
		units[i].may = may
	}
	return held, may
}

// withheldUnits describes a device that is withheld, and displaces its share if a pod holds it.
func withheldUnits(units []Device, held, answer offer.Answer) (w withheldDevice, withheld bool) {
	w.device = &units[0].State.Device
	switch {
	case held.Code() == offer.Held:
		h, _ := held.Holder()
		w.pod, w.reason = Pod{h.Namespace, h.Pod}, held.Reason()
		if s := units[0].share; s != nil {
			s.displaced = w.reason
		}
	case answer.Code() == offer.NoCDI: // it concerns all devices, so it is in layout.err
		return w, false
	case answer.Code() > offer.Held && !answer.Pending(): // what is pending takes a moment only
		w.reason = answer.Reason()
	default:
		return w, false
	}
	for _, u := range units {
		if !u.held {
			w.ids++
		}
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
			if ids := r.count(w.device.ID); ids > 0 && !has(after.withheld, w.device.ID) {
				offered.add(r.Name, w.device, ids, "")
			}
		}
	}
	withheld.log(p.log.Warn, msgWithheld)
	offered.log(p.log.Info, msgOffered)
}
