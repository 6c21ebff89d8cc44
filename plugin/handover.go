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

// release is what the plugin knows while plugin.api is dra, for the decision of what to do next.
type release struct {
	facts       offer.Facts
	allocatable *podresources.Allocatable // nil before the first answer
	isDevice    podresources.Resolver

	serves bool      // resources are registered or about to be
	since  time.Time // since when new pods get nothing, or nothing is served
	settle time.Duration
}

// releaseStep is what the plugin does while plugin.api is dra.
type releaseStep struct {
	serve  bool   // serve the resources withheld, so that the devices of running pods stay healthy
	reason string // why the devices are not released; empty if they are
	pods   bool   // Handover.Pods
}

// next decides the next step. An answer of the kubelet counts only if the plugin asked some time after the last possible allocation,
// because the kubelet records an allocation after the plugin's answer. No timeout replaces an answer.
func (r *release) next() releaseStep {
	a := r.allocatable
	counts := func(at time.Time) bool { return at.After(r.since.Add(r.settle)) }
	switch unknown := r.facts.Unknown(); {
	case unknown == "":
	case r.facts.NobodyHas() && !r.serves:
		return releaseStep{}
	default:
		return releaseStep{serve: r.serves, reason: unknown}
	}
	if pods, served := pluginPods(&r.facts); len(pods) > 0 {
		return releaseStep{r.serves || served, "waiting for the end of the pods with devices of a device plugin: " + podNames(pods), true}
	}
	switch {
	case !counts(r.facts.Holders.At):
		return releaseStep{serve: r.serves, reason: "about to ask the kubelet which pods hold devices"}
	case r.serves:
		return releaseStep{reason: "about to send the kubelet an empty device list"}
	case a == nil || !counts(a.At):
		return releaseStep{reason: "about to ask the kubelet which devices it lists"}
	case a.Err != "":
		return releaseStep{reason: "the kubelet does not list its devices: " + a.Err}
	}
	for _, name := range slices.Sorted(maps.Keys(a.IDs)) {
		n := 0
		for _, id := range a.IDs[name] {
			if _, ok := r.isDevice(name, id); ok {
				n++
			}
		}
		if n > 0 {
			return releaseStep{reason: fmt.Sprintf("the kubelet lists %d devices of %s; stop the device plugin that serves them", n, name)}
		}
	}
	return releaseStep{}
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

// handOver follows plugin.api. It reports whether the resources of the layout may be served, and why they are not offered to new pods. The
// reason is empty if they are offered, and if dynamic resource allocation is to serve the devices. It belongs to Run.
func (p *Plugin) handOver() (serve bool, notOffered Handover) {
	cfg, snap := p.cfg.Load(), p.snapshots.Load()
	serves := len(p.registrars()) > 0
	if cfg == nil || !cfg.Enabled {
		p.exclusive = false
		p.setReleased(Handover{Reason: "plugin.enabled is false"})
		return false, Handover{}
	}
	if p.exclusive || cfg.ServesDRA() {
		p.claimingSince = time.Time{}
	}
	if lock := p.lock.In(cfg.KubeletDir); !lock.Held {
		p.exclusive, p.releasingSince, p.claimingSince = false, time.Time{}, time.Time{}
		p.setReleased(Handover{Reason: lock.Reason})
		p.setTurn(turn{notServing: lock.Reason})
		return false, Handover{Reason: lock.Reason}
	}
	if !cfg.ServesDRA() {
		p.releasingSince = time.Time{}
		p.setReleased(Handover{Reason: "plugin.api is " + APIDevicePlugin})
		if !snap.Polled() && !p.exclusive { // no holder resolves yet
			p.claimingSince = time.Time{}
			p.setTurn(turn{notServing: holdersUnknown})
			return serves, Handover{}
		}
		wait := p.claimDevices()
		switch {
		case wait.Reason == "":
			p.setTurn(turn{})
			return true, wait
		case serves:
			p.setTurn(turn{releasing: wait.Reason})
		default:
			p.setTurn(turn{notServing: wait.Reason})
		}
		return serves, wait
	}
	if r := p.released.Load(); r != nil && r.Released {
		return false, Handover{}
	}
	if !snap.Polled() {
		p.releasingSince = time.Time{}
		p.setReleased(Handover{Reason: "no poll of the GPUs has succeeded yet"}) // the IDs of other plugins resolve only with the devices
		return serves, Handover{}
	}
	if p.releasingSince.IsZero() || serves != p.releasingServes {
		p.releasingSince, p.releasingServes = time.Now(), serves
	}
	step := (&release{
		facts: p.Facts(p.Holders()), allocatable: p.pods.Allocatable.Load(), isDevice: newResolver(*cfg, snap),
		serves: serves, since: p.releasingSince, settle: p.timing.settle,
	}).next()
	if step.serve {
		p.setTurn(turn{releasing: releasingReason})
	} else {
		p.setTurn(turn{notServing: cmp.Or(step.reason, "plugin.api is "+APIDRA)})
	}
	if step.reason == "" {
		p.exclusive = false
	} else {
		p.pods.QueryWithin(p.timing.pods.QuickRefresh)
	}
	p.setReleased(Handover{Released: step.reason == "", Reason: step.reason, Pods: step.pods})
	return step.serve, Handover{}
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

// claimDevices returns why the plugin must not offer devices to pods; the reason is empty if it may. It may once dynamic resource
// allocation has released the devices and the kubelet has then said which pods hold them. It may until it releases them itself.
func (p *Plugin) claimDevices() Handover {
	if p.exclusive {
		return Handover{}
	}
	if p.draReleased != nil {
		switch dra := p.draReleased.Load(); {
		case dra == nil:
			return Handover{Reason: draUnknown}
		case !dra.Released:
			return *dra
		}
	}
	if p.claimingSince.IsZero() {
		p.claimingSince = time.Now()
		p.pods.QueryWithin(p.timing.settle)
	}
	h := p.Holders()
	switch {
	case !h.At.Before(p.claimingSince.Add(p.timing.settle)) && h.Unknown(time.Now()) == "": // it has the last allocations of the agent before
		p.exclusive = true
		return Handover{}
	case h.Silent:
		return Handover{} // that must not cost the node its devices; another kubelet is asked again
	case h.Err != "" && !h.Pending:
		return Handover{Reason: holdersUnknown + ": " + h.Err}
	}
	return Handover{Reason: holdersUnknown}
}

// hasDRAReleased reports whether dynamic resource allocation has released the devices.
func (p *Plugin) hasDRAReleased() bool {
	if p.draReleased == nil {
		return true
	}
	dra := p.draReleased.Load()
	return dra != nil && dra.Released
}

func (p *Plugin) setTurn(t turn) {
	if last := p.turn.Load(); *cmp.Or(last, new(turn)) != t {
		p.turn.Store(&t)
	}
}

// setReleased stores whether the devices are released, and logs changes while they are being released.
func (p *Plugin) setReleased(h Handover) {
	last := p.released.Load()
	if last != nil && *last == h {
		return
	}
	p.released.Store(&h)
	switch {
	case h.Released:
		p.log.Info(msgReleased)
	case !p.releasingSince.IsZero():
		p.log.Info(msgReleasing, zap.String("reason", h.Reason))
	}
}
