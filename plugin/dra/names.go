package dra

import (
	"fmt"
	"maps"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// nameDevices sets the names of the selected devices. A device keeps the name that it was published under. Otherwise it gets its name in
// NVIDIA's driver, so that a program that derives the GPU from the name works, or its UUID if another device has that name.
func (b *builder) nameDevices() {
	b.names = make(map[health.DeviceID]string, len(b.selected))
	used := make(map[string]bool, len(b.selected))
	set := func(id health.DeviceID, name string) {
		if b.names[id] == "" && !used[name] && len(validation.IsDNS1123Label(name)) == 0 {
			b.names[id], used[name] = name, true
		}
	}
	for i := range b.selected {
		id := b.selected[i].State.Device.ID
		set(id, b.Names[id])
	}
	for i := range b.selected {
		s := &b.selected[i]
		d := &s.State.Device
		if b.names[d.ID] != "" {
			continue
		}
		if d.Minor >= 0 {
			set(d.ID, driverName(d, s.Profile, b.migProperties(d)))
		}
		set(d.ID, dnsLabel(string(d.ID)))
		for n := 0; b.names[d.ID] == ""; n++ { // no UUID of the driver
			set(d.ID, fmt.Sprintf("device-%d", n))
		}
	}
}

// driverName returns the name of a device in NVIDIA's driver, gpu-0 or gpu-0-mig-1g10gb-19-0. Without the properties of a MIG device it
// has the driver's instance IDs instead: gpu-0-mig-1g10gb-gi7-ci0.
func driverName(d *health.Device, profile string, p *health.MIGProperties) string {
	gpu := fmt.Sprintf("gpu-%d", d.Minor)
	if d.Kind == health.KindGPU {
		return gpu
	}
	profile = dnsLabel(strings.ReplaceAll(profile, ".", ""))
	if p == nil {
		return fmt.Sprintf("%s-mig-%s-gi%d-ci%d", gpu, profile, d.GI, d.CI)
	}
	return fmt.Sprintf("%s-mig-%s-%d-%d", gpu, profile, p.ProfileID, p.PlacementStart)
}

// dnsLabel replaces the characters that a DNS label cannot have.
func dnsLabel(s string) string {
	s = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, strings.ToLower(s))
	return strings.Trim(s, "-")
}

// named returns the devices of a pool that have these names.
func (p *Pool) named(names map[health.DeviceID]string) Pool {
	next := Pool{ByName: make(map[string]health.DeviceID, len(p.ByName)), Warnings: p.Warnings}
	for _, s := range p.Slices {
		var kept Slice
		for _, d := range s.Devices {
			if id := p.ByName[d.Name]; names[id] == d.Name {
				kept.Devices, next.ByName[d.Name] = append(kept.Devices, d), id
			}
		}
		next.add(kept)
	}
	return next
}

// RememberNames returns the names that devices have been published under, once a pool is published: those before it, except of devices
// whose name the pool gives to another. The result is a new map, or before if nothing changes.
func (p *Pool) RememberNames(before map[health.DeviceID]string) map[health.DeviceID]string {
	changed := false
	for name, id := range p.ByName {
		changed = changed || before[id] != name
	}
	if !changed {
		return before
	}
	after := maps.Clone(before)
	if after == nil {
		after = make(map[health.DeviceID]string, len(p.ByName))
	}
	maps.DeleteFunc(after, func(_ health.DeviceID, name string) bool { _, published := p.ByName[name]; return published })
	for name, id := range p.ByName {
		after[id] = name
	}
	return after
}
