package dra

import (
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Memory returns the memory that a container has by a prepared claim, and whether MPS limits the container to it; 0 if the claim is not
// prepared, and for a whole device.
func (d *Driver) Memory(h podresources.Holder) (bytes uint64, byMPS bool) {
	prepared := d.prepared(h.Namespace, h.DeviceID, h.Claim)
	if prepared == nil || prepared.Admin {
		return 0, false
	}
	return prepared.Memory, prepared.MPS
}

// Shares returns the memory of the devices that are published as shared, by index; none while the driver does not serve. The memory of a
// claim counts once the claim is prepared. It may be called from any goroutine.
func (d *Driver) Shares() (all []plugin.ShareUnits) {
	cfg, pool := d.Config.Load(), d.pool.Load()
	d.mu.Lock()
	session := d.session
	d.mu.Unlock()
	if cfg == nil || pool == nil || session == nil || !cfg.ServesDRA() {
		return nil
	}
	shared := pool.shared()
	if len(shared) == 0 {
		return nil
	}
	held := d.claims.Load().heldMemory()
	selected, _ := cfg.SelectDevices(d.Snapshots.Load(), d.preparer.memoryCapabilities(), d.capabilities != nil)
	for _, s := range selected {
		id, m := s.State.Device.ID, s.Memory
		if m == nil || !shared[id] {
			continue
		}
		u := plugin.ShareUnits{
			Device: id, Sharing: plugin.SharingMemory, Unit: m.Unit, Total: int(m.Offered / m.Unit), //nolint:gosec // few
			Enforcement: m.Enforcement, Reason: m.Reason,
		}
		if h := held[id]; !h.whole && h.bytes < m.Offered {
			u.Free = int((m.Offered - h.bytes) / m.Unit) //nolint:gosec // few
		}
		if s.State.Verdict.State != health.Unhealthy && m.Blocked == "" {
			u.Largest = u.Free
		}
		all = append(all, u)
	}
	return all
}

// shared returns the devices of which several claims can have a part.
func (p *Pool) shared() map[health.DeviceID]bool {
	shared := make(map[health.DeviceID]bool)
	for _, s := range p.Slices {
		for i := range s.Devices {
			if multiple := s.Devices[i].AllowMultipleAllocations; multiple != nil && *multiple {
				shared[p.ByName[s.Devices[i].Name]] = true
			}
		}
	}
	return shared
}

// heldMemory is what claims have of the memory of a device.
type heldMemory struct {
	bytes uint64
	whole bool // a claim has the whole device, from before it was shared
}

// heldMemory returns what the claims have of each device.
func (c *Claims) heldMemory() map[health.DeviceID]heldMemory {
	held := make(map[health.DeviceID]heldMemory)
	if c == nil {
		return held
	}
	for _, claim := range c.ByUID {
		for i := range claim.Devices {
			d := &claim.Devices[i]
			if d.Admin {
				continue
			}
			h := held[d.Device]
			h.bytes += d.Memory
			h.whole = h.whole || d.Memory == 0
			held[d.Device] = h
		}
	}
	return held
}
