package plugin

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Handover is whether an API that does not serve the node's devices has released them, so that another may serve them. Pods of two APIs
// could get one device twice, because neither the kubelet nor the scheduler compares them.
//
// Each API stores that it has not released the devices before it reads whether the other has, and serves only if the other has. So
// the two never serve at once, however fast the configuration changes back and forth.
type Handover struct {
	Released bool
	Reason   string // why not; empty if it has
}

// SetDRA sets where the plugin finds whether dynamic resource allocation has released the devices. Call it before Run. Without it, it has.
func (p *Plugin) SetDRA(released *health.Latest[Handover]) {
	p.dra = released
	p.setOffer(offerNothing)
}

// SetLock sets the lock that the plugin must hold to serve. Call it before Run. Without it, there is one agent on the node.
func (p *Plugin) SetLock(l *nodelock.Lock) { p.lock = l }

// Released holds whether the plugin has released the devices: with plugin.api dra, when no pod holds a device that a device plugin
// allocated and the kubelet lists none.
func (p *Plugin) Released() *health.Latest[Handover] { return &p.released }

// SetClaims sets how the devices of claims are found in the kubelet's pod resources. Call it before Run. Without it, claims have none.
func (p *Plugin) SetClaims(resolve podresources.ClaimResolver) { p.claims = resolve }

// offer is which devices of the layout new pods may get.
type offer uint8

const (
	offerAll      offer = iota
	offerWithheld       // none; the devices of running pods stay healthy
	offerNothing        // there is no layout
)

// release is what the plugin knows while plugin.api is dra, for the decision of what to do next.
type release struct {
	holders     podresources.Holders
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
}

// next decides the next step. An answer of the kubelet counts only if it was asked some time after the last allocation could have been
// made: the kubelet records one after the plugin's answer. No timeout replaces an answer.
func (r *release) next() releaseStep {
	h, a := &r.holders, r.allocatable
	counts := func(at time.Time) bool { return at.After(r.since.Add(r.settle)) }
	switch {
	case h.Err != "" || h.By == nil:
		return releaseStep{r.serves, "the kubelet does not list the pods that hold devices: " + cmp.Or(h.Err, "it has not been asked yet")}
	case h.Settling:
		return releaseStep{r.serves, "the kubelet may not have read all its pods yet"}
	}
	if pods, served := pluginPods(h.By); len(pods) > 0 {
		return releaseStep{r.serves || served, "waiting for the end of the pods with devices of a device plugin: " + podNames(pods)}
	}
	switch {
	case !counts(h.At):
		return releaseStep{r.serves, "about to ask the kubelet which pods hold devices"}
	case r.serves:
		return releaseStep{false, "about to send the kubelet an empty device list"}
	case a == nil || !counts(a.At):
		return releaseStep{false, "about to ask the kubelet which devices it lists"}
	case a.Err != "":
		return releaseStep{false, "the kubelet does not list its devices: " + a.Err}
	}
	for _, name := range slices.Sorted(maps.Keys(a.IDs)) {
		n := 0
		for _, id := range a.IDs[name] {
			if _, ok := r.isDevice(name, id); ok {
				n++
			}
		}
		if n > 0 {
			return releaseStep{false, fmt.Sprintf("the kubelet lists %d devices of %s; stop the device plugin that serves them", n, name)}
		}
	}
	return releaseStep{}
}

// pluginPods returns the pods that hold devices of a device plugin, ours or another, and whether one of them holds an ID of the form that
// ours has.
func pluginPods(by map[health.DeviceID][]podresources.Holder) (pods []Pod, served bool) {
	for device, holders := range by {
		for _, h := range holders {
			if !h.ByClaim() {
				pods = append(pods, Pod{h.Namespace, h.Pod})
				served = served || deviceOf(h.DeviceID) == device
			}
		}
	}
	return uniquePods(pods), served
}

// handOver follows plugin.api. It reports whether the resources of the layout may be served and why they are not offered to new pods;
// the reason is empty if they are, and if dynamic resource allocation is to serve the devices. It belongs to Run.
func (p *Plugin) handOver() (serve bool, reason string) {
	cfg, snap := p.cfg.Load(), p.snapshots.Load()
	serves := len(p.registrars()) > 0
	if cfg == nil || !cfg.Enabled {
		p.exclusive = false
		p.setReleased(Handover{Reason: "plugin.enabled is false"})
		return false, ""
	}
	if lock, _ := p.lock.Request(cfg.KubeletDir); !lock.Held {
		p.exclusive, p.releasingSince = false, time.Time{}
		p.setReleased(Handover{Reason: lock.Reason})
		p.setOffer(offerNothing)
		return false, lock.Reason
	}
	if !cfg.ServesDRA() {
		p.releasingSince = time.Time{}
		p.setReleased(Handover{Reason: "plugin.api is " + APIDevicePlugin})
		reason := p.claimDevices()
		switch {
		case reason == "":
			p.setOffer(offerAll)
			return true, ""
		case serves:
			p.setOffer(offerWithheld)
		default:
			p.setOffer(offerNothing)
		}
		return serves, reason
	}
	if r := p.released.Load(); r != nil && r.Released {
		return false, ""
	}
	if !snap.Polled() {
		p.releasingSince = time.Time{}
		p.setReleased(Handover{Reason: "no poll of the GPUs has succeeded yet"}) // the IDs of other plugins resolve only with the devices
		return serves, ""
	}
	if p.releasingSince.IsZero() || serves != p.releasingServes {
		p.releasingSince, p.releasingServes = time.Now(), serves
	}
	step := (&release{
		holders: p.Holders(), allocatable: p.pods.Allocatable.Load(), isDevice: newResolver(*cfg, snap),
		serves: serves, since: p.releasingSince, settle: p.timing.settle,
	}).next()
	if step.serve {
		p.setOffer(offerWithheld)
	} else {
		p.setOffer(offerNothing)
	}
	if step.reason == "" {
		p.exclusive = false
	} else {
		p.pods.QueryWithin(p.timing.pods.QuickRefresh)
	}
	p.setReleased(Handover{Released: step.reason == "", Reason: step.reason})
	return step.serve, ""
}

// draUnknown is why the plugin must not offer devices while dynamic resource allocation starts.
const draUnknown = "about to learn whether dynamic resource allocation still serves the devices"

// claimDevices returns why the plugin must not offer devices to pods; empty if it may. It may from the moment when dynamic resource
// allocation had released the devices until the plugin releases them.
func (p *Plugin) claimDevices() (reason string) {
	if p.dra == nil || p.exclusive {
		return ""
	}
	switch dra := p.dra.Load(); {
	case dra == nil:
		return draUnknown
	case !dra.Released:
		return dra.Reason
	}
	p.exclusive = true
	return ""
}

// hasDRAReleased reports whether dynamic resource allocation has released the devices.
func (p *Plugin) hasDRAReleased() bool {
	if p.dra == nil {
		return true
	}
	dra := p.dra.Load()
	return dra != nil && dra.Released
}

func (p *Plugin) setOffer(o offer) {
	if last := p.offer.Load(); *cmp.Or(last, new(offer)) != o {
		p.offer.Store(&o)
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
