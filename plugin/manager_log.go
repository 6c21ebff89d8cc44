package plugin

import (
	"cmp"
	"maps"
	"slices"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Log messages that tests count.
const (
	msgReleasing    = "releasing the devices to dynamic resource allocation"
	msgReleased     = "devices released to dynamic resource allocation"
	msgDisabled     = "plugin disabled, nothing is registered with the kubelet"
	msgNothing      = "nothing to register with the kubelet"
	msgNotOffered   = "devices not offered"
	msgUnmatched    = "no device of this node matches"
	msgUnhealthy    = "device reported unhealthy to the kubelet"
	msgHealthy      = "device reported healthy to the kubelet"
	msgRemoved      = "device removed from the kubelet"
	msgRefused      = "allocation refused"
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
	all := slices.Concat(now.warnings, withheldTexts(now.withheld))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.warnings = all
}

// logUnmatchedRefs logs the device references that match no device, when they change. health.cordon is logged alike.
func (p *Plugin) logUnmatchedRefs(unmatched []health.UnmatchedRefs) {
	for _, u := range unmatched {
		logged := slices.ContainsFunc(p.loggedUnmatched, func(l health.UnmatchedRefs) bool {
			return l.Key == u.Key && slices.Equal(l.Refs, u.Refs)
		})
		if !logged {
			p.log.Warn(msgUnmatched, zap.String("key", u.Key), zap.Strings("entries", u.Refs))
		}
	}
	p.loggedUnmatched = unmatched
}

// setError stores why nothing is served and logs it when it changes: as information during the start, otherwise as a
// warning. The lock of the node logs itself why it is not held.
func (p *Plugin) setError(cfg *Config, now plan, noLock bool) {
	disabled, released := cfg != nil && !cfg.Enabled, p.released.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	if disabled && !p.disabled {
		p.log.Info(msgDisabled, zap.String("key", "plugin.enabled"))
	}
	p.disabled = disabled || released != nil && released.Released
	p.forPods = now.forPods
	if p.err == now.reason {
		return
	}
	p.err = now.reason
	switch {
	case now.reason == "", noLock:
	case now.starting:
		p.log.Info(msgNothing, zap.String("reason", now.reason))
	default:
		p.log.Warn(msgNothing, zap.String("reason", now.reason))
	}
}

// logHealthChanges logs the changes of health and presence between two layouts: one line for each reason, whatever the number of
// GPUs, MIG devices and replicas.
func (p *Plugin) logHealthChanges(before, after []Resource) {
	unhealthy, healthy, removed := make(idsByReason), make(idsByReason), make(idsByReason)
	for _, r := range after {
		old := findResource(before, r.Name)
		for _, d := range r.Devices {
			was := old.byID[d.State.Device.ID]
			listed := d.alsoIn(was) // units that the list had before
			if added := d.units() - listed; added > 0 && !d.usable() && !d.starting() {
				unhealthy.add(r.Name, &d.State.Device, added, d.offer.Reason())
			}
			switch {
			case listed == 0:
			case d.usable() && !was.usable():
				healthy.add(r.Name, &d.State.Device, listed, "")
			case !d.usable() && (was.usable() || !d.starting() && was.starting()):
				unhealthy.add(r.Name, &d.State.Device, listed, d.offer.Reason())
			}
		}
		for _, d := range old.Devices {
			if gone := d.units() - d.alsoIn(r.byID[d.State.Device.ID]); gone > 0 {
				removed.add(r.Name, &d.State.Device, gone, "")
			}
		}
	}
	unhealthy.log(p.log.Warn, msgUnhealthy)
	healthy.log(p.log.Info, msgHealthy)
	removed.log(p.log.Warn, msgRemoved)
}

// alsoIn counts the units that another layout has as well; other is the device in it, nil if it lacks the device.
func (d *Device) alsoIn(other *Device) int {
	if other == nil || d.form() != other.form() {
		return 0
	}
	return min(d.units(), other.units())
}

// idsByReason collects the IDs of log lines by the reason of the change, which may be empty.
type idsByReason map[string]*changedIDs

type changedIDs struct {
	resources []string
	device    *health.Device // the first
	several   bool           // the IDs are of several devices
	gpus      []int          // by index
	ids       int
}

func (m idsByReason) add(resource string, device *health.Device, ids int, reason string) {
	c := m[reason]
	if c == nil {
		c = &changedIDs{device: device}
		m[reason] = c
	}
	if !slices.Contains(c.resources, resource) {
		c.resources = append(c.resources, resource)
	}
	if i, exists := slices.BinarySearch(c.gpus, device.Index); !exists {
		c.gpus = slices.Insert(c.gpus, i, device.Index)
	}
	c.several = c.several || device.ID != c.device.ID
	c.ids += ids
}

// log writes one line for each reason, by the first GPU.
func (m idsByReason) log(write func(string, ...zap.Field), message string) {
	reasons := slices.SortedFunc(maps.Keys(m),
		func(x, y string) int { return cmp.Or(cmp.Compare(m[x].gpus[0], m[y].gpus[0]), cmp.Compare(x, y)) })
	for _, reason := range reasons {
		c := m[reason]
		fields := []zap.Field{zap.Strings("resources", c.resources)}
		switch {
		case len(c.gpus) > 1:
			fields = append(fields, zap.Ints("gpus", c.gpus))
		case c.several:
			fields = append(fields, zap.String("device", string(c.device.GPU())), zap.Int("gpu", c.gpus[0]))
		default:
			fields = append(fields, zap.String("device", string(c.device.ID)), zap.Int("gpu", c.gpus[0]))
		}
		fields = append(fields, zap.Int("ids", c.ids))
		if reason != "" {
			fields = append(fields, zap.String("reason", reason))
		}
		write(message, fields...)
	}
}
