package plugin

import (
	"slices"

	"go.uber.org/zap"
)

// Log messages that tests count.
const (
	msgDisabled     = "plugin disabled, nothing is registered with the kubelet"
	msgNothing      = "nothing to register with the kubelet"
	msgNotOffered   = "devices not offered"
	msgUnmatched    = "no device of this node matches"
	msgUnhealthy    = "device reported unhealthy to the kubelet"
	msgHealthy      = "device reported healthy to the kubelet"
	msgWithheld     = "device withheld from new pods"
	msgOffered      = "device offered to new pods again"
	msgRegistered   = "registered with the kubelet"
	msgUnregistered = "not registered with the kubelet"
	msgMismatch     = "audit mismatch: the kubelet has another list although its stream is open; registering again"
)

// publishWarnings stores the layout's warnings for Status and logs new ones. logWithheld logs the withheld devices.
func (p *Plugin) publishWarnings(now *layout) {
	for _, w := range now.warnings {
		if !slices.Contains(p.loggedWarnings, w) {
			p.log.Warn(msgNotOffered, zap.String("reason", w))
		}
	}
	p.loggedWarnings = now.warnings
	all := slices.Clone(now.warnings)
	for _, w := range now.withheld {
		all = append(all, w.String())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.warnings = all
}

// logUnmatchedSelectors logs the selectors that match no device, when they change. health.cordon is logged alike.
func (p *Plugin) logUnmatchedSelectors(unmatched []unmatchedSelectors) {
	for _, u := range unmatched {
		logged := slices.ContainsFunc(p.loggedUnmatched, func(l unmatchedSelectors) bool {
			return l.key == u.key && slices.Equal(l.selectors, u.selectors)
		})
		if !logged {
			p.log.Warn(msgUnmatched, zap.String("key", u.key), zap.Strings("entries", u.selectors))
		}
	}
	p.loggedUnmatched = unmatched
}

// setError stores why nothing is served and logs it when it changes: as information while the source starts, otherwise
// as a warning.
func (p *Plugin) setError(disabled bool, reason string, starting bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if disabled && !p.disabled {
		p.log.Info(msgDisabled, zap.String("key", "plugin.enabled"))
	}
	p.disabled = disabled
	if p.err == reason {
		return
	}
	p.err = reason
	switch {
	case reason == "":
	case starting:
		p.log.Info(msgNothing, zap.String("reason", reason))
	default:
		p.log.Warn(msgNothing, zap.String("reason", reason))
	}
}

// logHealthChanges logs the changes of health and presence between two layouts.
func (p *Plugin) logHealthChanges(before, after []Resource) {
	for _, r := range after {
		old := findResource(before, r.Name)
		for _, d := range r.Devices {
			was, existed := old.device(d.ID)
			log := p.log.With(zap.String("resource", r.Name), zap.String("device", d.ID))
			switch {
			case (!existed || was.usable()) && !d.usable():
				log.Warn(msgUnhealthy, zap.String("reason", unhealthyReason(d)))
			case existed && !was.usable() && d.usable():
				log.Info(msgHealthy)
			}
		}
		for _, d := range old.Devices {
			if _, exists := r.device(d.ID); !exists {
				p.log.Warn("device removed from the kubelet", zap.String("resource", r.Name), zap.String("device", d.ID))
			}
		}
	}
}
