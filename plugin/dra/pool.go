package dra

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/grouped"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
)

// Pool is what a node publishes. It is immutable once published.
type Pool struct {
	Slices   []Slice
	ByName   map[string]health.DeviceID // by the name of a published device
	Warnings []string                   // devices or values that are left out, with the reason
}

// Slice is the part of a pool that is published as one ResourceSlice. A GPU and its MIG devices are in one slice, because they get their
// taints together.
type Slice struct {
	Devices []resourceapi.Device
}

// PoolInput is everything that a pool depends on. It is not modified, and a pool refers to nothing in it that may be.
type PoolInput struct {
	Config     *plugin.Config
	Snapshot   *health.Snapshot
	Properties map[health.DeviceID]*health.Properties // of devices that have none in the snapshot
	Names      map[health.DeviceID]string             // of devices that have been published before; a name never changes
	PCIeRoots  map[string]string                      // by PCI bus ID as the driver writes it
	// What can limit the memory of containers: nil before the node is examined, and Examined false if nothing examines it.
	Capabilities *memlimits.Capabilities
	Examined     bool
	// Whether devices may be offered. Before has the taints on the API server, by the name of the device, for devices of which that is
	// unknown. Such a device is not added, and its taints are not cleared. nil: no container has a device.
	Offers map[health.DeviceID]offer.Answer
	Before map[string][]resourceapi.DeviceTaint
	// What the API server has. Without taints, unhealthy devices are not published; without shares, the memory of GPUs is not shared.
	NoTaints, NoShares bool
}

// maxDevices is the most devices of a slice: fewer than without taints, so that the first taint does not change the layout.
const maxDevices = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// BuildPool decides what is published. It is pure. Before the first poll the devices are unknown, and the pool is empty: do not
// publish that, because it removes the devices from the API server.
//
// The pool obeys every limit of the API server, which refuses a slice with one invalid value as a whole.
func BuildPool(in PoolInput) Pool {
	pool := Pool{ByName: map[string]health.DeviceID{}}
	if in.Config == nil || !in.Snapshot.Polled() {
		return pool
	}
	selected, warnings := in.Config.SelectDevices(in.Snapshot, in.Capabilities, in.Examined)
	b := newBuilder(&in, selected)
	b.nameDevices()
	slice := Slice{}
	for len(selected) > 0 {
		n := 1 // the GPU and its MIG devices
		for n < len(selected) && n < maxDevices && selected[n].State.Device.GPU() == selected[0].State.Device.GPU() {
			n++
		}
		// Devices that are not published have a place as well, so that they do not move the others.
		if b.placed+n > maxDevices {
			pool.add(slice)
			slice, b.placed = Slice{}, 0
		}
		b.placed += n
		for i := range selected[:n] {
			if device, ok := b.build(&selected[i]); ok {
				slice.Devices = append(slice.Devices, device)
				pool.ByName[device.Name] = selected[i].State.Device.ID
			}
		}
		selected = selected[n:]
	}
	pool.add(slice)
	pool.Warnings = slices.Concat(warnings, b.warnings.Strings(), b.withheld)
	return pool
}

// add adds a slice, unless it has no devices.
func (p *Pool) add(s Slice) {
	if len(s.Devices) > 0 {
		p.Slices = append(p.Slices, s)
	}
}

// builder builds the devices of a pool.
type builder struct {
	*PoolInput
	selected []plugin.SelectedDevice
	devices  map[health.DeviceID]*health.DeviceState // of the snapshot
	islands  map[health.DeviceID]health.DeviceID     // of GPUs with NVLinks
	names    map[health.DeviceID]string
	placed   int           // devices of the slice in work, published or not
	warnings grouped.Texts // what is left out, with the devices
	withheld []string
}

func newBuilder(in *PoolInput, selected []plugin.SelectedDevice) *builder {
	b := &builder{
		PoolInput: in, selected: selected, islands: islandsOf(in.Snapshot),
		devices: make(map[health.DeviceID]*health.DeviceState, len(in.Snapshot.Devices)),
	}
	for i := range in.Snapshot.Devices {
		state := &in.Snapshot.Devices[i]
		b.devices[state.Device.ID] = state
	}
	return b
}

// build returns a device as it is published; ok is false if it is not.
func (b *builder) build(s *plugin.SelectedDevice) (device resourceapi.Device, ok bool) {
	d := &s.State.Device
	taints := b.taints(s)
	if answer := b.Offers[d.ID]; b.Offers != nil && answer.Code() == offer.Unknown {
		before, published := b.Before[b.names[d.ID]]
		if !published {
			return device, false
		}
		taints = addTaints(taints, before)
	}
	switch {
	case !b.NoTaints:
	case slices.ContainsFunc(taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone }):
		if key := worstTaint(taints); key != TaintMIGMode { // no claim could get that GPU anyway
			b.warnings.Addf(d.Name(), "the API server has no taints of devices, so devices with %s are not published", key)
		}
		return device, false
	default:
		taints = nil
	}
	device = resourceapi.Device{Name: b.names[d.ID], Attributes: b.attributes(s), Taints: taints}
	device.Capacity, device.AllowMultipleAllocations = b.capacity(s)
	b.limit(d, &device)
	return device, true
}
