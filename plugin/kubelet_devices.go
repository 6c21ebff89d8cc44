package plugin

import (
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
)

// KubeletDevices returns the devices that the plugin offers to new pods, and the devices that the kubelet counts. Both have a shared device
// once per unit. known is false while the plugin serves nothing, or the kubelet's devices are unknown. It may be called from any goroutine.
func (p *Plugin) KubeletDevices() (offered, counted []health.DeviceID, known bool) {
	layout, answer := p.layouts.current(), p.pods.Allocatable.Load()
	if len(layout.resources) == 0 || answer == nil || answer.Err != "" {
		return nil, nil, false
	}
	for _, r := range layout.resources {
		for _, d := range r.Devices {
			offered = append(offered, slices.Repeat([]health.DeviceID{d.State.Device.ID}, d.countHealthy())...)
		}
		for _, id := range answer.IDs[r.Name] {
			counted = append(counted, deviceid.Parse(id).Device())
		}
	}
	return offered, counted, true
}
