package node

import (
	"cmp"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// update returns the inventory of a snapshot. What the snapshot does not have stays as it was: a GPU that cannot be reached has no
// values. A source that lists no GPU at all is not believed if it had some.
func (n *inventory) update(snap *health.Snapshot, serving plugin.Serving, found *host) *inventory {
	next := &inventory{
		Source: sourceOf(snap), Machine: cmp.Or(found.machine, n.Machine), MIGStrategy: serving.MIGStrategy,
		Driver: cmp.Or(snap.Source.Versions.Driver, n.Driver), CUDA: cmp.Or(snap.Source.Versions.CUDA, n.CUDA),
	}
	before := n
	if n.Source != next.Source || n.OtherBoot {
		before = &inventory{}
	}
	for i := range serving.Devices {
		s := &serving.Devices[i]
		id := s.State.Device.ID
		next.Devices = append(next.Devices, before.device(id, i).update(s, found.devices[id], found.known[id]))
	}
	if len(next.Devices) == 0 {
		next.Devices = before.Devices
	}
	return next
}

// inputs are everything that an inventory depends on, so that it is made only when one of them has changed. Most polls change none.
type inputs struct {
	source   health.SourceID
	versions health.Versions
	config   *plugin.Config
	found    *host
	devices  []deviceInputs
}

// deviceInputs is the part of health.DeviceState that an inventory depends on.
type deviceInputs struct {
	id, parent  health.DeviceID
	index       int
	model, pci  string
	profile     string
	memory      uint64
	capability  health.ComputeCapability
	migMode     bool
	migMeasured bool
	gi, ci, mig int
	presence    health.Presence
	state       health.State
	properties  *health.Properties
}

// inputsOf returns the inputs. It uses the memory of devices.
func inputsOf(snap *health.Snapshot, config *plugin.Config, found *host, devices []deviceInputs) inputs {
	devices = devices[:0]
	for i := range snap.Devices {
		s := &snap.Devices[i]
		d := &s.Device
		_, measured := s.Sample.Values[health.FieldMIGMode]
		devices = append(devices, deviceInputs{
			d.ID, d.Parent, d.Index, d.Model, d.PCI, d.Profile, d.Memory, d.ComputeCapability, d.MIGMode, measured, d.GI, d.CI, d.MIGIndex,
			s.Sample.Presence, s.Verdict.State, d.Properties,
		})
	}
	return inputs{sourceOf(snap), snap.Source.Versions, config, found, devices}
}

func (in *inputs) equal(other *inputs) bool {
	return in.source == other.source && in.versions == other.versions && in.config == other.config && in.found == other.found &&
		slices.Equal(in.devices, other.devices)
}

// sourceOf returns the set of devices that a snapshot is of.
func sourceOf(snap *health.Snapshot) health.SourceID {
	return health.SourceID{Kind: snap.Source.Kind, Inventory: snap.Source.Inventory}
}

// device returns a device, the zero one if there is none. It is usually at the index.
func (n *inventory) device(id health.DeviceID, index int) device {
	if index >= len(n.Devices) || n.Devices[index].ID != id {
		index = slices.IndexFunc(n.Devices, func(d device) bool { return d.ID == id })
	}
	if index < 0 {
		return device{}
	}
	return n.Devices[index]
}

// update returns the device as it is in a snapshot and in the host.
func (d device) update(s *plugin.ServedDevice, found hostDevice, known *health.Properties) device {
	now, sample := &s.State.Device, &s.State.Sample
	d.ID, d.Parent, d.MIGMode = now.ID, now.Parent, now.MIGMode
	d.Model, d.Memory = cmp.Or(now.Model, d.Model), cmp.Or(now.Memory, d.Memory)
	d.Capability = cmp.Or(now.ComputeCapability, d.Capability)
	d.Profile = cmp.Or(s.Profile, d.Profile)
	d.Offered, d.Sharing, d.Replicas, d.Renamed = s.Offered, s.Sharing, s.Replicas, s.Renamed
	if s.State.Verdict.State != health.Unknown {
		d.State = s.State.Verdict.State
	}
	if _, measured := sample.Values[health.FieldMIGMode]; measured || now.MIGMode { // blank if the GPU cannot be partitioned
		d.MIGCapable = true
	}
	if properties := cmp.Or(now.Properties, known); properties != nil {
		d.Instance = cmp.Or(properties.MIG, d.Instance)
		if !properties.FabricPending {
			d.Clique = properties.Clique
		}
	}
	d.Class = cmp.Or(found.class, d.Class)
	d.VGPU = cmp.Or(found.vgpu, d.VGPU)
	return d
}
