package dra

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// The attributes that NVIDIA's driver does not have.
const (
	AttributeIsland resourceapi.QualifiedName = Domain + "/nvlinkIsland" // GPU: the UUID of the first of the GPUs that NVLink connects
	AttributeSerial resourceapi.QualifiedName = Domain + "/serial"       // of the GPU's board
	AttributeState  resourceapi.QualifiedName = Domain + "/state"        // healthy, degraded or unhealthy
)

// The values of the attribute type. NVIDIA's driver has the first two, and its DeviceClasses select them. It publishes no GPU in MIG mode
// beside static MIG devices: a claim that tolerates every taint would get it, and its pod would wait for ever.
const (
	typeGPU       = "gpu"
	typeMIG       = "mig"
	typeMIGParent = "mig-parent" // a GPU in MIG mode: only its MIG devices can be used, and monitors see it
)

// Capacities of NVIDIA's driver.
const (
	capacityMemory  = "memory"
	capacitySlice   = "memorySlice" // followed by its number
	maxMemorySlices = 64            // more than any GPU has
)

type (
	attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute
	capacities = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity
)

// attributes returns the attributes of a device. Those without a domain have the name, type and form of NVIDIA's driver
// (kubernetes-sigs/dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin/deviceinfo.go and mig.go), so that DeviceClasses and claims for it
// work. What is unknown, or not valid, is absent.
func (b *builder) attributes(s *plugin.SelectedDevice) attributes {
	d := &s.State.Device
	all := make(attributes, 18)
	text := func(name resourceapi.QualifiedName, value string) {
		if value == "" {
			return
		}
		if len(value) > resourceapi.DeviceAttributeMaxValueLength || !utf8.ValidString(value) {
			b.warnings.Addf(d.Name(), "attribute %s is left out: expected at most %d bytes of text, got %.80q", name,
				resourceapi.DeviceAttributeMaxValueLength, value)
			return
		}
		all[name] = resourceapi.DeviceAttribute{StringValue: &value}
	}
	version := func(name resourceapi.QualifiedName, value string) {
		if value == "" {
			return
		}
		v, ok := semanticVersion(value)
		if !ok {
			b.warnings.Addf(d.Name(), "attribute %s is left out: expected a version such as 580.95.05, got %.80q", name, value)
			return
		}
		all[name] = resourceapi.DeviceAttribute{VersionValue: &v}
	}

	text("uuid", string(d.ID))
	if d.Kind == health.KindMIG {
		text("type", typeMIG)
		text("parentUUID", string(d.Parent))
		text("profile", s.Profile)
	} else {
		kind := typeGPU
		if d.MIGMode {
			kind = typeMIGParent
		}
		text("type", kind)
		text(AttributeIsland, string(b.islands[d.ID]))
	}
	text("productName", d.Model)
	text("architecture", architecture(d.ComputeCapability))
	serial := d.Texts[health.FieldSerial]
	if p := b.properties(d.GPU()); p != nil {
		text("brand", p.Brand)
		text("addressingMode", p.AddressingMode)
		serial = cmp.Or(serial, p.Serial)
	}
	text(AttributeSerial, strings.TrimSpace(serial))
	if c := d.ComputeCapability; c.Major > 0 {
		version("cudaComputeCapability", strconv.Itoa(c.Major)+"."+strconv.Itoa(c.Minor))
	}
	version("driverVersion", b.Snapshot.Source.Versions.Driver)
	version("cudaDriverVersion", b.Snapshot.Source.Versions.CUDA)
	if pci, ok := pciBusID(d.PCI); ok {
		text(deviceattribute.StandardDeviceAttributePCIBusID, pci)
		text(deviceattribute.StandardDeviceAttributePCIeRoot, b.PCIeRoots[d.PCI])
	}
	if len(d.NUMA) == 1 {
		if a, err := deviceattribute.GetNUMANodeAttribute(d.NUMA[0], deviceattribute.ScalarAttribute); err == nil {
			all[a.Name] = a.Value
		}
	}
	if state := s.State.Verdict.State; state != health.Unknown {
		text(AttributeState, state.String())
	}
	return all
}

// capacity returns the capacities of a device, and whether several claims can share it.
func (b *builder) capacity(s *plugin.SelectedDevice) (all capacities, shared *bool) {
	d := &s.State.Device
	all = make(capacities, 16)
	set := func(name resourceapi.QualifiedName, n int) {
		if n >= 0 {
			all[name] = quantity(uint64(n))
		}
	}
	if m := s.Memory; m != nil && !b.NoShares && m.Offered <= math.MaxInt64 {
		c := quantity(m.Offered)
		whole := c.Value
		// A claim without a request gets the whole device.
		c.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: &whole}
		if unit := quantity(m.Unit).Value; m.Offered >= 2*m.Unit {
			c.RequestPolicy.ValidRange = &resourceapi.CapacityRequestPolicyRange{Min: &unit, Step: &unit}
		} else { // the API server expects room for a step
			c.RequestPolicy.ValidValues = []resource.Quantity{whole}
		}
		yes := true
		all[capacityMemory], shared = c, &yes
	} else {
		if m != nil && b.NoShares {
			b.warnings.Addf(d.Name(), "plugin.sharing.memory: the API server has no shares of devices, so these are allocated as a whole")
		}
		if d.Memory > 0 && d.Memory <= math.MaxInt64 {
			all[capacityMemory] = quantity(d.Memory)
		}
	}
	if p := b.migProperties(d); p != nil {
		set("multiprocessors", p.Multiprocessors)
		set("copyEngines", p.CopyEngines)
		set("decoders", p.Decoders)
		set("encoders", p.Encoders)
		set("jpegEngines", p.JPEGEngines)
		set("ofaEngines", p.OFAEngines)
		if p.PlacementStart >= 0 && p.PlacementStart < maxMemorySlices && p.MemorySlices <= maxMemorySlices {
			for i := range p.MemorySlices {
				set(resourceapi.QualifiedName(capacitySlice+strconv.Itoa(p.PlacementStart+i)), 1)
			}
		}
	}
	return all, shared
}

// limit leaves out what exceeds the number of attributes and capacities of a device: first the memory slices, which no claim needs.
func (b *builder) limit(d *health.Device, device *resourceapi.Device) {
	if len(device.Attributes)+len(device.Capacity) <= resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		return
	}
	b.warnings.Addf(d.Name(), "capacities %s are left out: a device has at most %d attributes and capacities", capacitySlice,
		resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice)
	for name := range device.Capacity {
		if strings.HasPrefix(string(name), capacitySlice) {
			delete(device.Capacity, name)
		}
	}
}

// quantity returns a capacity. It is formatted already, because formatting a quantity writes to it.
func quantity(n uint64) resourceapi.DeviceCapacity {
	c := resourceapi.DeviceCapacity{Value: *resource.NewQuantity(int64(n), resource.BinarySI)} //nolint:gosec // the callers check the size
	_ = c.Value.String()
	return c
}

func (b *builder) properties(id health.DeviceID) *health.Properties {
	if state := b.devices[id]; state != nil && state.Device.Properties != nil {
		return state.Device.Properties
	}
	return b.Properties[id]
}

// migProperties returns nil if they are unknown.
func (b *builder) migProperties(d *health.Device) *health.MIGProperties {
	if p := b.properties(d.ID); p != nil && d.Kind == health.KindMIG {
		return p.MIG
	}
	return nil
}

// semanticVersion returns a version as semver.org defines it: the driver's 535.54.03 is 535.54.3, CUDA's 13.0 is 13.0.0.
func semanticVersion(s string) (string, bool) {
	parts := strings.Split(s, ".")
	if len(parts) > 3 {
		return "", false
	}
	for i, part := range parts {
		n, ok := deviceref.ParseDigits(part)
		if !ok {
			return "", false
		}
		parts[i] = strconv.Itoa(n)
	}
	for len(parts) < 3 {
		parts = append(parts, "0")
	}
	return strings.Join(parts, "."), true
}

// pciBusID returns a PCI bus ID as the standard attribute has it, 0000:1b:00.0; ok is false for a domain of more than four digits.
func pciBusID(driver string) (id string, ok bool) {
	address, ok := deviceref.ParsePCI(driver)
	if !ok {
		return "", false
	}
	id = address.String()
	return id, len(id) == len("0000:1b:00.0")
}

// architecture returns the name of an architecture as NVIDIA's driver writes it (NVIDIA/go-nvlib, pkg/nvlib/device/device.go), by compute
// capability (https://developer.nvidia.com/cuda-gpus and the CUDA C++ programming guide); empty if it is unknown.
func architecture(c health.ComputeCapability) string {
	switch c.Major {
	case 3:
		return "Kepler"
	case 5:
		return "Maxwell"
	case 6:
		return "Pascal"
	case 7:
		if c.Minor < 5 {
			return "Volta"
		}
		return "Turing"
	case 8:
		if c.Minor < 9 {
			return "Ampere"
		}
		return "Ada Lovelace"
	case 9:
		return "Hopper"
	case 10, 11, 12:
		return "Blackwell"
	}
	return ""
}

// islandsOf returns the island of each GPU that NVLink connects to another: the UUID of the island's GPU with the lowest index.
func islandsOf(snap *health.Snapshot) map[health.DeviceID]health.DeviceID {
	var gpus []*health.Device
	for i := range snap.Devices {
		if d := &snap.Devices[i].Device; d.Kind == health.KindGPU {
			gpus = append(gpus, d)
		}
	}
	slices.SortStableFunc(gpus, health.CompareIndex)
	islands := make(map[health.DeviceID]health.DeviceID, len(gpus))
	linked := func(x, y *health.Device) bool {
		return slices.ContainsFunc(x.Links, func(l health.Link) bool { return l.Peer == y.ID && l.NVLinks > 0 })
	}
	for _, first := range gpus {
		if _, done := islands[first.ID]; done {
			continue
		}
		island := []*health.Device{first}
		for n := 0; n < len(island); n++ {
			for _, peer := range gpus {
				if !slices.Contains(island, peer) && (linked(island[n], peer) || linked(peer, island[n])) {
					island = append(island, peer)
				}
			}
		}
		for _, member := range island {
			if islands[member.ID] = first.ID; len(island) == 1 {
				delete(islands, first.ID)
			}
		}
	}
	return islands
}
