package dra

import (
	"maps"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// PublishedDevices returns the devices that the API server has; known is false while it may have others, while none is to be published,
// and while the kubelet does not have the driver. It may be called from any goroutine.
func (d *Driver) PublishedDevices() (devices []health.DeviceID, known bool) {
	s, pool := d.Status(), d.pool.Load()
	if !s.Enabled || !s.Registered || s.Behind || s.Published.IsZero() || s.Slices == 0 || pool == nil {
		return nil, false
	}
	return slices.Collect(maps.Values(pool.ByName)), true
}
