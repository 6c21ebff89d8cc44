package monitor

import (
	"slices"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// logChangesLater leaves logChanges to unlock, with the XIDs of events that were not logged before. m.mu is held.
func (m *Monitor) logChangesLater(before, after []health.DeviceState) {
	if m.unloggedFrom != nil {
		before, m.unloggedFrom = m.unloggedFrom, nil
	}
	m.logLater(func() { logChanges(m.log, before, after) })
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
			fields = append(fields, zap.Int("xid", c.XID), zap.String("meaning", c.Description()), zap.Uint64("count", c.Count),
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
