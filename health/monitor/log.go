package monitor

import (
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// logChangesLater leaves logChanges to unlock. m.mu is held.
func (m *Monitor) logChangesLater(before, after []health.DeviceState) {
	m.logLater(func() { logChanges(m.log, before, after) })
}

// logChanges logs the differences between two lists of devices.
func logChanges(log *zap.Logger, before, after []health.DeviceState) {
	for _, c := range health.Changes(before, after) {
		fields := []zap.Field{zap.String("device", string(c.Device.ID)), zap.Int("gpu", c.Device.Index)}
		switch c.Kind {
		case health.ChangeFound:
			log.Info("device found", append(fields, zap.String("model", c.Device.Model), zap.String("profile", c.Device.Profile),
				zap.String("pci", c.Device.PCI))...)
		case health.ChangeXID:
			log.Warn("XID", append(fields, zap.Int("xid", c.XID), zap.String("meaning", health.LookupXID(c.XID).Name),
				zap.Uint64("count", c.Count), zap.Uint64("new", c.New))...)
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
				zap.String("action", string(f.Action)), zap.String("advice", f.Action.Advice()), zap.Time("since", f.Since), zap.Stringer("clears", f.Clears))...)
		case health.ChangeRemoved:
			log.Info("device removed", fields...)
		}
	}
}
