package plugin

import (
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// enforcement is what will keep the next container within the memory of its units.
type enforcement struct {
	by      memlimits.Enforcement
	reason  string // why it is not the configured one; empty if it is
	blocked string // why no container may get units for now; empty if one may
	pending bool   // blocked until the node is examined
}

// enforce returns the enforcement on a device. caps is nil before the node is examined, and examined false if nothing examines it.
func (m *MemorySharing) enforce(d *health.Device, caps *memlimits.Capabilities, examined bool) (e enforcement) {
	switch m.Enforcement {
	case EnforceMPS:
		return enforcement{by: memlimits.MPS}
	case EnforceNone:
		return enforcement{by: memlimits.None}
	}
	e.by, e.reason = memlimits.None, "nothing examines what the driver can limit"
	switch {
	case d.Kind == health.KindMIG:
		e.reason = "the driver does not limit the memory of MIG devices"
	case examined:
		reason, known := "", false
		if caps != nil {
			reason, known = caps.Driver[d.ID]
		}
		switch {
		case !known: // a container that starts now could be without limits for its whole life
			e.reason, e.pending = "the driver's memory limits are not examined yet", true
			e.blocked = e.reason
			return e
		case reason == "":
			return enforcement{by: memlimits.Driver}
		}
		e.reason = reason
	}
	if m.RequireEnforcement {
		e.blocked = "nothing enforces memory limits, and plugin.sharing.memory.requireEnforcement is true: " + e.reason
	}
	return e
}
