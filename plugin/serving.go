package plugin

import (
	"maps"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Serving is how the plugin serves the devices of a node, whatever their health is.
type Serving struct {
	MIGStrategy string         // MIGNone also if the plugin serves nothing: it is disabled, or the API is dynamic resource allocation
	Devices     []ServedDevice // all devices of the snapshot by index, each GPU followed by its MIG devices
}

// ServedDevice is a device and what a pod gets of it.
type ServedDevice struct {
	State    *health.DeviceState // part of the snapshot
	Profile  string              // of a MIG device, as NVIDIA names it
	Offered  bool                // under a resource
	Sharing  Sharing
	Replicas int  // of time-slicing and MPS; 1 for others
	Renamed  bool // the resource of the shared device has another name than the resource of whole devices
}

// Serving returns how the plugin serves the devices of a snapshot. While the other API still releases the devices, it is how the plugin
// is going to serve them. It may be called from any goroutine, and without Run.
func (p *Plugin) Serving(snap *health.Snapshot) Serving {
	s := Serving{MIGStrategy: MIGNone}
	if snap == nil {
		return s
	}
	all := candidates(snap)
	s.Devices = make([]ServedDevice, len(all))
	for i, c := range all {
		s.Devices[i] = ServedDevice{State: c.state, Profile: c.profile, Replicas: 1}
	}
	cfg := p.cfg.Load()
	if cfg == nil || !cfg.Enabled || cfg.API == APIDRA {
		return s
	}
	s.MIGStrategy = cfg.MIGStrategy
	offered := make(map[health.DeviceID]*Device)
	l := newLayout(layoutInput{cfg: cfg, snap: snap, before: p.layouts.current().uniform})
	for _, r := range l.resources {
		maps.Copy(offered, r.byID)
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		device := offered[d.State.Device.ID]
		if d.Offered = device != nil; device == nil || device.share == nil {
			continue
		}
		if d.Sharing, d.Renamed = device.share.kind, device.share.renamed; d.Sharing != SharingMemory {
			d.Replicas = device.share.units
		}
	}
	return s
}
