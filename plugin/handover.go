package plugin

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Handover is whether an API has released the node's devices, so that the other may serve them. Otherwise pods of two APIs could get
// one device twice, because neither the kubelet nor the scheduler compares the APIs.
//
// Each API stores that it has not released the devices before it reads whether the other has, and serves only if the other has. So
// the two never serve at once, however fast the configuration changes back and forth.
type Handover struct {
	Released bool
	Reason   string // why not; empty if it has
	Pods     bool   // the reason is only that pods still hold devices: that ends by itself, maybe after days
}

// SetDRAReleased sets where the plugin finds whether dynamic resource allocation has released the devices. Call it before Run. Without it,
// dynamic resource allocation counts as released.
func (p *Plugin) SetDRAReleased(released *health.Latest[Handover]) {
	p.draReleased = released
	p.setTurn(turn{notServing: draUnknown})
}

// SetLock sets the lock that the plugin must hold to serve; package dra requests it. Call it before Run. Without it, there is one agent on
// the node.
func (p *Plugin) SetLock(l *nodelock.Lock) { p.lock = l }

// PluginReleased holds whether the plugin has released the devices: with plugin.api dra, when no pod holds a device that a device plugin
// allocated and the kubelet lists none.
func (p *Plugin) PluginReleased() *health.Latest[Handover] { return &p.released }

// SetClaims sets how the devices of claims are found in the kubelet's pod resources, and the prepared claims. Call it before Run. Without
// it, claims have no devices.
func (p *Plugin) SetClaims(resolve podresources.ClaimResolver, prepared *health.Latest[offer.Claims]) {
	p.claims, p.layouts.claims = resolve, prepared
}

// turn is whether the plugin has its turn to serve the devices.
type turn struct {
	notServing string // why it does not serve, so that there is no layout; empty if it does
	releasing  string // why new pods get nothing, while the devices of running pods stay healthy; empty if they do
}

// handover is how far the plugin has taken or released the devices. Its steps are pure.
type handover struct {
	taken bool // dynamic resource allocation had released the devices, and may not serve until the plugin has
	waits waits
	since time.Time // since when the plugin waits for that
}

// waits is which answer of the kubelet a handover waits for.
type waits uint8

const (
	forNothing waits = iota
	forHolders       // to serve: which pods hold devices
	forPods          // to release: that no pod holds a device, while the resources are registered or about to be
	forDevices       // to release: that nothing is registered, either
)

// wait starts to wait, unless the handover waits for that already.
func (h *handover) wait(w waits, now time.Time) (starts bool) {
	if h.waits == w {
		return false
	}
	h.waits, h.since = w, now
	return true
}

// handoverFacts are what a step of the handover depends on.
type handoverFacts struct {
	now         time.Time
	settle      time.Duration // from an answer of the plugin to the kubelet's record of the allocation
	enabled     bool          // plugin.enabled
	toDRA       bool          // plugin.api is dra
	lock        string        // why the lock of the node is not held; empty if it is
	polled      bool          // the devices are known
	serves      bool          // resources are registered or about to be
	released    bool          // the plugin has released the devices
	dra         *Handover     // nil: unknown
	offer       offer.Facts
	allocatable *podresources.Allocatable // nil before the first answer
	isDevice    podresources.Resolver
}

// handoverStep is what the plugin does next.
type handoverStep struct {
	serve      bool // the resources of the layout
	turn       turn
	keepTurn   bool     // and not turn
	notOffered Handover // why the devices are not offered to new pods; empty if they are, and if dynamic resource allocation is to serve them
	released   Handover
	ask        bool // the kubelet, soon
	noLock     bool // another agent may serve the node
	ordersMPS  bool // which daemons run; otherwise dynamic resource allocation orders them
}

// next returns the next step and the handover after it.
func (h handover) next(f *handoverFacts) (handover, handoverStep) {
	var s handoverStep
	switch {
	case !f.enabled:
		orders := f.lock == "" && f.dra != nil && f.dra.Released
		return handover{}, handoverStep{keepTurn: true, released: Handover{Reason: "plugin.enabled is false"}, ordersMPS: orders}
	case f.lock != "":
		reason := Handover{Reason: f.lock}
		return handover{}, handoverStep{turn: turn{notServing: f.lock}, notOffered: reason, released: reason, noLock: true}
	case !f.toDRA:
		s = h.claim(f)
	case f.released:
		s = handoverStep{keepTurn: true, released: Handover{Released: true}}
	case !f.polled: // the IDs of other plugins resolve only with the devices
		h.wait(forNothing, f.now)
		s = handoverStep{serve: f.serves, keepTurn: true, released: Handover{Reason: "no poll of the GPUs has succeeded yet"}}
	default:
		s = h.release(f)
	}
	s.ordersMPS = s.serve
	return h, s
}

// claim takes the devices once dynamic resource allocation has released them and the kubelet has then said which pods hold them. They stay
// taken until the plugin releases them.
func (h *handover) claim(f *handoverFacts) handoverStep {
	s := handoverStep{serve: f.serves, released: Handover{Reason: "plugin.api is " + APIDevicePlugin}}
	switch {
	case !h.taken && !f.polled: // no holder resolves yet
		h.wait(forNothing, f.now)
		s.turn.notServing = holdersUnknown
		return s
	case !h.taken && f.dra != nil && f.dra.Released:
		s.ask = h.wait(forHolders, f.now)
		s.notOffered.Reason = h.awaitHolders(f)
	default:
		h.wait(forNothing, f.now)
		if !h.taken {
			s.notOffered = *cmp.Or(f.dra, &Handover{Reason: draUnknown})
		}
	}
	switch reason := s.notOffered.Reason; {
	case reason == "":
		s.serve = true
	case f.serves:
		s.turn.releasing = reason
	default:
		s.turn.notServing = reason
	}
	return s
}

// awaitHolders takes the devices if it is known which pods hold them. It returns why they are not offered; empty if they are.
func (h *handover) awaitHolders(f *handoverFacts) (reason string) {
	switch holders := &f.offer.Holders; {
	case !holders.At.Before(h.since.Add(f.settle)) && holders.Unknown(f.now) == "": // it has the last allocations of the agent before
		h.taken = true
		h.wait(forNothing, f.now)
	case holders.Silent: // that must not cost the node its devices; another kubelet is asked again
	case holders.Err != "" && !holders.Pending:
		return holdersUnknown + ": " + holders.Err
	default:
		return holdersUnknown
	}
	return ""
}

// release withholds the devices, stops serving when no pod has one, and releases them when the kubelet lists none.
func (h *handover) release(f *handoverFacts) handoverStep {
	if f.serves {
		h.wait(forPods, f.now)
	} else {
		h.wait(forDevices, f.now)
	}
	serve, reason, pods := h.releaseStep(f)
	s := handoverStep{serve: serve, ask: reason != "", released: Handover{Released: reason == "", Reason: reason, Pods: pods}}
	if serve {
		s.turn.releasing = releasingReason // the devices of running pods stay healthy
	} else {
		s.turn.notServing = cmp.Or(reason, "plugin.api is "+APIDRA)
	}
	if reason == "" {
		h.taken = false
	}
	return s
}

// releaseStep returns whether the resources are served, why the devices are not released, and whether that is only that pods hold some. An
// answer of the kubelet counts only if the plugin asked some time after the last possible allocation, because the kubelet records an
// allocation after the plugin's answer. No timeout replaces an answer.
func (h *handover) releaseStep(f *handoverFacts) (serve bool, reason string, pods bool) {
	a := f.allocatable
	counts := func(at time.Time) bool { return at.After(h.since.Add(f.settle)) }
	switch unknown := f.offer.Unknown(); {
	case unknown == "":
	case f.offer.NobodyHas() && !f.serves:
		return false, "", false
	default:
		return f.serves, unknown, false
	}
	if pods, served := pluginPods(&f.offer); len(pods) > 0 {
		return f.serves || served, "waiting for the end of the pods with devices of a device plugin: " + podNames(pods), true
	}
	switch {
	case !counts(f.offer.Holders.At):
		return f.serves, "about to ask the kubelet which pods hold devices", false
	case f.serves:
		return false, "about to send the kubelet an empty device list", false
	case a == nil || !counts(a.At):
		return false, "about to ask the kubelet which devices it lists", false
	case a.Err != "":
		return false, "the kubelet does not list its devices: " + a.Err, false
	}
	for _, name := range slices.Sorted(maps.Keys(a.IDs)) {
		n := 0
		for _, id := range a.IDs[name] {
			if _, ok := f.isDevice(name, id); ok {
				n++
			}
		}
		if n > 0 {
			return false, fmt.Sprintf("the kubelet lists %d devices of %s; stop the device plugin that serves them", n, name), false
		}
	}
	return false, "", false
}

// pluginPods returns the pods that hold devices of a device plugin, ours or another. It also reports whether one of them holds an ID in the
// form of ours.
func pluginPods(facts *offer.Facts) (pods []Pod, served bool) {
	for device, h := range facts.HeldByPlugins() {
		pods = append(pods, Pod{h.Namespace, h.Pod})
		served = served || deviceid.Parse(h.DeviceID).Device() == device
	}
	return uniquePods(pods), served
}

// handOver does the next step of the handover. A step that stores that the devices are not released is done again: it has read before that
// whether dynamic resource allocation has released them. It belongs to Run.
func (p *Plugin) handOver() handoverStep {
	for {
		h, s := p.handover.next(p.handoverFacts())
		if p.setReleased(s.released, h.waits) && !s.released.Released {
			continue
		}
		p.handover = h
		if !s.keepTurn {
			p.setTurn(s.turn)
		}
		if s.ask {
			p.pods.QueryWithin(p.timing.settle)
		}
		return s
	}
}

func (p *Plugin) handoverFacts() *handoverFacts {
	cfg, snap, released := cmp.Or(p.cfg.Load(), &Config{}), p.snapshots.Load(), p.released.Load()
	f := &handoverFacts{
		settle: p.timing.settle, enabled: cfg.Enabled, toDRA: cfg.ServesDRA(), polled: snap.Polled(), serves: len(p.registrars()) > 0,
		released: released != nil && released.Released, dra: &Handover{Released: true},
		offer: p.Facts(p.Holders()), allocatable: p.pods.Allocatable.Load(),
	}
	f.now = f.offer.Now
	if lock := p.lock.In(cfg.KubeletDir); !lock.Held {
		f.lock = lock.Reason
	}
	if p.draReleased != nil {
		f.dra = p.draReleased.Load()
	}
	if f.toDRA && f.polled && !f.released {
		f.isDevice = newResolver(*cfg, snap)
	}
	return f
}

// Why the plugin does not offer devices while it starts.
const (
	draUnknown     = "about to learn whether dynamic resource allocation still serves the devices"
	holdersUnknown = "about to learn which pods hold devices"
)

// isStarting reports whether the plugin does not offer devices because it starts.
func isStarting(reason string) bool {
	return reason == draUnknown || strings.HasPrefix(reason, holdersUnknown)
}

func (p *Plugin) setTurn(t turn) {
	if last := p.turn.Load(); *cmp.Or(last, new(turn)) != t {
		p.turn.Store(&t)
	}
}

// setReleased stores whether the devices are released, logs changes while they are being released, and reports whether it has changed.
func (p *Plugin) setReleased(h Handover, w waits) (changed bool) {
	if last := p.released.Load(); last != nil && *last == h {
		return false
	}
	p.released.Store(&h)
	switch {
	case h.Released:
		p.log.Info(msgReleased)
	case w >= forPods:
		p.log.Info(msgReleasing, zap.String("reason", h.Reason))
	}
	return true
}
