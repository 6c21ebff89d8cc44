package monitor

import (
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// logChanges says what a poll has changed.
func logChanges(log *zap.Logger, before, after []health.DeviceState) {
	for _, c := range health.Changes(before, after) {
		id := []zap.Field{zap.String("device", string(c.Device.ID)), zap.Int("gpu", c.Device.Index)}
		switch c.Kind {
		case health.ChangeFound:
			log.Info("device found", append(id, zap.String("model", c.Device.Model), zap.String("profile", c.Device.Profile),
				zap.String("pci", c.Device.PCI))...)
		case health.ChangeXID:
			log.Warn("XID", append(id, zap.Int("xid", c.XID), zap.String("meaning", health.LookupXID(c.XID).Name),
				zap.Uint64("count", c.Count), zap.Uint64("new", c.New))...)
		case health.ChangeState:
			id = append(id, zap.Stringer("state", c.Now.State), zap.Stringer("was", c.Was.State))
			if cleared := c.Cleared(); len(cleared) > 0 {
				id = append(id, zap.Strings("cleared", cleared))
			}
			if len(c.Now.Findings) == 0 {
				log.Info("device state", id...)
				continue
			}
			if more := c.Now.Causes()[1:]; len(more) > 0 {
				id = append(id, zap.Strings("also", more))
			}
			f := c.Now.Findings[0]
			log.Warn("device state", append(id, zap.String("cause", f.Cause), zap.String("reason", f.Reason),
				zap.String("action", string(f.Action)), zap.String("advice", f.Action.Advice()), zap.Time("since", f.Since), zap.Stringer("clears", f.Clears))...)
		case health.ChangeGone:
			log.Info("device gone", id...)
		}
	}
}
