// Package offer decides who may have a device of the node: whether it may be offered to new pods, given to a container, or taken from all.
package offer

import (
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Purpose is what is to be done with a device.
type Purpose uint8

// The purposes. An Answer to one is none to another.
const (
	Offer Purpose = iota + 1 // list it for new pods
	Give                     // give it to a container that asks for it now
	Take                     // use it as if no container had it: a reset, another driver, the end of its MPS daemon
)

// API is how pods get devices.
type API uint8

// The APIs.
const (
	DevicePlugin API = iota + 1
	DRA
)

// Code is the reason of an Answer, in order of precedence.
type Code uint8

// The codes.
const (
	Allowed    Code = iota
	NotServing      // another agent serves the node, or the API does not
	Detached        // an operator has detached the driver
	MIGMode         // of a GPU only the MIG devices can be given
	Unhealthy       // a finding, or a decision such as a cordon
	NotReady        // what serves the device to containers, such as its MPS daemon, is not ready
	Unknown         // which containers have devices is unknown
	Held            // a container has it, its GPU or a part of it otherwise than it is asked for
	NoCDI           // the container runtime would start the container without it
	Releasing       // the node changes from one API to the other
	Reserved        // only clients of its MPS daemon can use it
	Blocked         // nothing enforces the limits of its shares
)

// Answer is whether a device may be offered, given or taken. Only Facts make one that allows anything.
type Answer struct {
	purpose Purpose
	code    Code
	reason  string
	holder  podresources.Holder
	finding *health.Finding
	pending bool
}

// Allows reports whether the answer is to this purpose, and yes.
func (a Answer) Allows(p Purpose) bool { return a.purpose == p && a.code == Allowed }

// Keeps reports whether a container that has the device keeps it: the reason concerns other containers only. The kubelet shows the health
// of a container's device in the pod's status, and restarts no container whose device is unhealthy.
func (a Answer) Keeps() bool { return a.code == Allowed || a.code >= Unknown }

// Code returns the reason's code.
func (a Answer) Code() Code { return a.code }

// Reason returns why the answer is no, as a clause; empty if it is yes.
func (a Answer) Reason() string { return a.reason }

// Pending reports whether the reason ends by itself in a moment.
func (a Answer) Pending() bool { return a.pending }

// Holder returns the container that has the device; ok is false if it is not the reason.
func (a Answer) Holder() (h podresources.Holder, ok bool) {
	return a.holder, a.code == Held && a.holder != (podresources.Holder{})
}

// Finding returns the finding that is the reason; nil if none is.
func (a Answer) Finding() *health.Finding { return a.finding }

// Facts is everything that an Answer depends on, besides the device. It is not modified.
type Facts struct {
	Now     time.Time
	Holders podresources.Holders
	// Recent are allocations that the kubelet may not list yet, by device.
	Recent map[health.DeviceID][]podresources.Holder
	Claims Claims // that are prepared
	// NoPlugin means that no device plugin of ours has served in this boot. Then nobody has a device by it, even if the kubelet does not tell
	// who has devices.
	NoPlugin bool

	NoCDI      string // why the container runtime would start new containers without their devices; empty if it would not, as far as is known
	NotServing string // why this process does not serve: the lock of the node, the other API; empty if it does
	Releasing  string // why new pods get nothing: a handover; empty if they do
	Detached   string // why nothing can be given: an operator's detach; empty if it can
}

// Request is a question about one device.
type Request struct {
	Purpose Purpose
	API     API
	Device  *health.Device
	Related []health.DeviceID // its GPU, or its MIG devices

	Verdict   *health.Verdict            // nil: it does not matter
	Tolerates func(*health.Finding) bool // findings that do not matter; nil: none
	Admin     bool                       // by a claim with adminAccess, which takes nothing from others
	Monitors  bool                       // containers that can use the device with adminAccess matter as well

	// Except reports whether a holder does not matter: it has the device as it is asked for, or a part of it that is shared. nil: each
	// matters.
	Except func(podresources.Holder) bool
	// ExceptClaim is the same for a prepared claim.
	ExceptClaim func(*Claim, *Part) bool
	MustKnow    bool // while the holders are unknown, the answer is no; otherwise the last ones count

	NotReady string // why containers cannot use the device although it works; empty if they can
	Reserved string // why only others can use it; empty if all can
	Blocked  string // why no share of it is given; empty if it is
	Pending  bool   // of Blocked: in a moment it may not be
}

// Decide answers a request. The rule, by precedence:
//
//   - Without the lock of the node, or its turn between the APIs, this process offers and gives nothing.
//   - The device plugin neither offers nor gives an unhealthy device, whether a measurement or a decision makes it unhealthy. With DRA its
//     taints tell the scheduler, and claims that tolerate them get it.
//   - A container that holds the device, its GPU or a part of it keeps it from everybody who is no partner of that container: who asks for
//     IDs of another resource or another kind of sharing, for whole against MIG, or by the other API. A container shares what it holds
//     under an ID that is asked for: that ID stays listed as healthy, and the other units of the device stay offered. A prepared claim
//     counts as a container, from before its container starts.
//   - Nothing is taken from a container, and nothing is taken or added on the word of a kubelet that may not have read all its pods.
//   - While the container runtime surely ignores the devices of containers, none is offered or given, also not for adminAccess. Containers
//     keep theirs.
//   - While the node changes from one API to the other, or only some can use the device, it is offered to no new pod.
//
// Two processes or two APIs may change their inputs at once. Each first stores about itself that it does not serve, then reads what the
// other has stored. So at most one of the two serves.
func (f *Facts) Decide(r *Request) Answer {
	no := func(c Code, reason string) Answer {
		return Answer{purpose: r.Purpose, code: c, reason: reason, pending: c == Releasing || c == Blocked && r.Pending}
	}
	if r.Purpose != Take {
		switch {
		case f.NotServing != "":
			return no(NotServing, f.NotServing)
		case r.Purpose == Give && f.Detached != "":
			return no(Detached, f.Detached)
		case r.Admin && f.NoCDI != "":
			return no(NoCDI, f.NoCDI)
		case r.Admin:
			return Answer{purpose: r.Purpose}
		case r.Purpose == Give && r.API == DRA && r.Device.Kind == health.KindGPU && r.Device.MIGMode:
			return no(MIGMode, "it is in MIG mode; request its MIG devices")
		}
		if finding := r.worst(); finding != nil {
			a := no(Unhealthy, describe(finding))
			a.finding = finding
			return a
		}
		if r.NotReady != "" {
			return no(NotReady, r.NotReady)
		}
	}
	if holder, ok := f.holder(r); ok {
		a := no(Held, holderReason(holder))
		a.holder = holder
		return a
	}
	if c, p := f.claim(r); c != nil {
		return no(Held, "claim "+c.String()+" has "+p.Name)
	}
	if r.Purpose != Take && f.NoCDI != "" {
		return no(NoCDI, f.NoCDI)
	}
	if unknown := f.Unknown(); unknown != "" && r.MustKnow && (r.Purpose == Take || !f.NobodyHas()) {
		return no(Unknown, unknown)
	}
	switch {
	case r.Purpose == Take:
	case f.Releasing != "":
		return no(Releasing, f.Releasing)
	case r.Reserved != "":
		return no(Reserved, r.Reserved)
	case r.Blocked != "":
		return no(Blocked, r.Blocked)
	}
	return Answer{purpose: r.Purpose}
}

// worst returns the first finding that makes the device unhealthy; nil if there is none.
func (r *Request) worst() *health.Finding {
	if r.Verdict == nil || r.Verdict.State != health.Unhealthy {
		return nil
	}
	if r.Tolerates == nil {
		if len(r.Verdict.Findings) == 0 {
			return &health.Finding{Reason: "no finding"}
		}
		return &r.Verdict.Findings[0]
	}
	for i := range r.Verdict.Findings {
		if f := &r.Verdict.Findings[i]; f.State == health.Unhealthy && !r.Tolerates(f) {
			return f
		}
	}
	return nil
}

// describe returns the reason and the cause of a finding.
func describe(f *health.Finding) string {
	switch {
	case f.Reason == "":
		return f.Cause
	case f.Cause == "":
		return f.Reason
	}
	return f.Reason + " (" + f.Cause + ")"
}

// holder returns a container that keeps the device from the request.
func (f *Facts) holder(r *Request) (podresources.Holder, bool) {
	for i := range len(r.Related) + 1 {
		id := r.Device.ID
		if i > 0 {
			id = r.Related[i-1]
		}
		for _, list := range [][]podresources.Holder{f.Holders.By[id], f.Recent[id]} {
			for _, h := range list {
				if r.Except == nil || !r.Except(h) {
					return h, true
				}
			}
		}
		if r.Monitors {
			for _, h := range f.Holders.Admin[id] {
				if r.Except == nil || !r.Except(h) {
					return h, true
				}
			}
		}
	}
	return podresources.Holder{}, false
}

// claim returns a prepared claim that keeps the device from the request, and its part.
func (f *Facts) claim(r *Request) (*Claim, *Part) {
	for i := range f.Claims.List {
		c := &f.Claims.List[i]
		for j := range c.Parts {
			p := &c.Parts[j]
			if p.Admin && !r.Monitors || p.Device != r.Device.ID && !slices.Contains(r.Related, p.Device) {
				continue
			}
			if r.ExceptClaim == nil || !r.ExceptClaim(c, p) {
				return c, p
			}
		}
	}
	return nil, nil
}

// holderReason returns why a container keeps a device from others.
func holderReason(h podresources.Holder) string {
	switch {
	case h.Pod == "":
		return "it was just allocated as " + h.What()
	case h.ByClaim():
		return fmt.Sprintf("%s/%s (%s) holds it by %s", h.Namespace, h.Pod, h.Container, h.What())
	}
	return fmt.Sprintf("%s/%s (%s) holds it as %s", h.Namespace, h.Pod, h.Container, h.What())
}

// RelatedTo returns for each device of a snapshot its GPU, or its MIG devices.
func RelatedTo(snap *health.Snapshot) map[health.DeviceID][]health.DeviceID {
	related := make(map[health.DeviceID][]health.DeviceID)
	for i := range snap.Devices {
		if d := &snap.Devices[i].Device; d.Parent != "" {
			related[d.ID] = append(related[d.ID], d.Parent)
			related[d.Parent] = append(related[d.Parent], d.ID)
		}
	}
	return related
}

// HeldByPlugins yields the devices of device plugins, ours or others, that containers hold, and their holders.
func (f *Facts) HeldByPlugins() iter.Seq2[health.DeviceID, podresources.Holder] {
	return func(yield func(health.DeviceID, podresources.Holder) bool) {
		for id, list := range f.Holders.By {
			for _, h := range list {
				if !h.ByClaim() && !yield(id, h) {
					return
				}
			}
		}
	}
}

// Unknown returns why it is unknown which containers hold devices; empty if it is known.
func (f *Facts) Unknown() string {
	unknown := f.Holders.Unknown(f.Now)
	if unknown == "" {
		return ""
	}
	return "it is unknown which pods hold devices: " + unknown
}

// NobodyHas reports whether no container has a device of us except by a prepared claim, although the kubelet does not tell.
func (f *Facts) NobodyHas() bool { return f.Holders.Silent && f.NoPlugin && !f.Claims.Lost }

// DetachedReason returns why no device can be given while an operator has detached the driver; empty if none has.
func DetachedReason(d health.Detachment) string {
	if !d.InForce() {
		return ""
	}
	return "the driver is detached until " + d.Until.UTC().Format(time.RFC3339) + "; gpu-node-agent attach ends it"
}
