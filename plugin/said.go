package plugin

import (
	"slices"

	"go.uber.org/zap"
)

// remark publishes what the layout leaves out, and logs the warnings about it that are news. What is withheld is
// logged by device.
func (p *Plugin) remark(now *arrangement) {
	for _, w := range now.Warnings {
		if !slices.Contains(p.remarked, w) {
			p.log.Warn("layout", zap.String("warning", w))
		}
	}
	p.remarked = now.Warnings
	all := slices.Clone(now.Warnings)
	for _, w := range now.Withheld {
		all = append(all, w.text())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lacks = all
}

// sayIdle logs the selectors that mean no device, if they are others than before, as health.cordon's are.
func (p *Plugin) sayIdle(idle []idleSelectors) {
	for _, i := range idle {
		known := slices.ContainsFunc(p.idle, func(was idleSelectors) bool { return was.key == i.key && slices.Equal(was.words, i.words) })
		if !known {
			p.log.Warn("no device of this node has this name", zap.String("key", i.key), zap.Strings("entries", i.words))
		}
	}
	p.idle = idle
}

// explain stores why nothing is served, and logs it if that is news: as a warning, unless we have only
// just started or are told so.
func (p *Plugin) explain(off bool, why string, starting bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if off && !p.off {
		p.log.Info("the plugin is off: nothing is registered with the kubelet", zap.String("key", "plugin.enabled"))
	}
	p.off = off
	if p.err == why {
		return
	}
	p.err = why
	switch {
	case why == "":
	case starting:
		p.log.Info("nothing to register with the kubelet yet", zap.String("why", why))
	default:
		p.log.Warn("nothing to register with the kubelet", zap.String("why", why))
	}
}

// logFlips logs what changes for the kubelet between two layouts.
func (p *Plugin) logFlips(before, after []Resource) {
	for _, r := range after {
		old := find(before, r.Name)
		for _, d := range r.Devices {
			was, known := old.device(d.ID)
			log := p.log.With(zap.String("resource", r.Name), zap.String("device", d.ID))
			switch {
			case (!known || was.works()) && !d.works():
				log.Warn("device is unhealthy for the kubelet", zap.String("why", whyUnhealthy(d)))
			case known && !was.works() && d.works():
				log.Info("device is healthy again for the kubelet")
			}
		}
		for _, d := range old.Devices {
			if _, known := r.device(d.ID); !known {
				p.log.Warn("device is gone for the kubelet", zap.String("resource", r.Name), zap.String("device", d.ID))
			}
		}
	}
}
