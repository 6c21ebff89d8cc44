package monitor

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// logChangesLater leaves logChanges to unlock. If a log entry was written shortly before and only XIDs were counted since, the entry waits.
// m.mu is held.
func (m *Monitor) logChangesLater(now time.Time) {
	before, after := m.logged, m.now.Devices
	changes := health.Changes(before, after)
	otherThanXID := func(c health.Change) bool { return c.Kind != health.ChangeXID }
	waited := m.logWaits
	m.logWaits = len(changes) > 0 && now.Sub(m.changesLogged) < xidLogGap && !slices.ContainsFunc(changes, otherThanXID)
	switch {
	case m.logWaits && !waited:
		m.events.wake()
	case !m.logWaits:
		m.logged = after
		if len(changes) > 0 {
			m.changesLogged = now
			m.logLater(func() { logChanges(m.log, before, after) })
		}
	}
}

// logChanges logs the differences between two lists of devices, one line for each GPU and change.
func logChanges(log *zap.Logger, before, after []health.DeviceState) {
	for _, c := range health.GroupChanges(before, after) {
		fields := deviceFields(&c)
		switch c.Kind {
		case health.ChangeFound:
			if all := profiles(&c); all != nil {
				fields = append(fields, zap.Strings("profiles", all))
			}
			log.Info("device found", append(fields, zap.String("model", c.Device.Model), zap.String("pci", c.Device.PCI))...)
		case health.ChangeXID:
			fields = append(fields, zap.Int("xid", c.XID), zap.String("meaning", catalog.Describe(c.Reported())), zap.Uint64("count", c.Count),
				zap.Uint64("new", c.New))
			if c.Detail.Text != "" {
				fields = append(fields, zap.String("message", c.Detail.Text))
			}
			log.Warn("XID", fields...)
		case health.ChangeState:
			fields = append(fields, zap.Stringer("state", c.Now.State), zap.Stringer("was", c.Was.State))
			if cleared := c.Cleared(); len(cleared) > 0 {
				fields = append(fields, zap.Strings("cleared", cleared))
			}
			if len(c.Now.Findings) == 0 {
				log.Info("device state", fields...)
				continue
			}
			if more := c.Now.Causes()[1:]; len(more) > 0 {
				fields = append(fields, zap.Strings("also", more))
			}
			f := c.Now.Findings[0]
			log.Warn("device state", append(fields, zap.String("cause", f.Cause), zap.String("reason", f.Reason),
				zap.String("action", string(f.Action)), zap.String("advice", f.Advice()), zap.Time("since", f.Since),
				zap.Stringer("clears", f.Clears))...)
		case health.ChangeRemoved:
			log.Info("device removed", fields...)
		}
	}
}

// deviceFields name the device, or the GPU and the number of its MIG devices that have changed.
func deviceFields(c *health.ChangeGroup) []zap.Field {
	if c.Single() {
		return []zap.Field{zap.String("device", string(c.Device.ID)), zap.Int("gpu", c.Device.Index)}
	}
	return []zap.Field{
		zap.String("device", string(c.Device.GPU())), zap.Int("gpu", c.Device.Index), zap.Int("migDevices", len(c.MIGDevices)),
	}
}

// profiles returns the profiles of the MIG devices, each once.
func profiles(c *health.ChangeGroup) []string {
	var all []string
	for _, m := range c.MIGDevices {
		if !slices.Contains(all, m.Device.Profile) {
			all = append(all, m.Device.Profile)
		}
	}
	return all
}
