package health

import (
	"cmp"
	"fmt"
	"strconv"

	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// DeviceID is the UUID by which the container runtime identifies a device: "GPU-…" or "MIG-…".
type DeviceID string

// Kind is the kind of a device: GPU or MIG device.
type Kind uint8

// The kinds of device.
const (
	KindGPU Kind = iota
	KindMIG
)

// Device holds the properties of a GPU or MIG device that stay fixed until it is removed or repartitioned.
type Device struct {
	ID     DeviceID
	Parent DeviceID // MIG: its GPU; empty for a GPU
	Kind   Kind
	Index  int    // the driver's index of the GPU (nvidia-smi -i); MIG: its parent's; -1 while the GPU is missing and another has its index
	Minor  int    // /dev/nvidia<Minor>; MIG: its parent's; -1 if unknown
	NUMA   []int  // the GPU's NUMA nodes; empty if unknown
	Model  string // "NVIDIA H100 80GB HBM3"; MIG: its parent's
	PCI    string // bus ID as the driver writes it, "00000000:1B:00.0"; MIG: its parent's
	Memory uint64 // framebuffer in bytes

	Reserved          uint64            // GPU: the part of Memory that the driver withholds, in bytes, as first measured; 0 if unknown
	ComputeCapability ComputeCapability // MIG: its parent's

	MIGMode bool   // GPU: MIG mode is enabled
	Profile string // MIG: "1g.10gb"
	GI, CI  int    // MIG: the driver's GPU instance and compute instance IDs; -1 for a GPU

	// MIGIndex is the MIG device's number on its GPU in the order of nvidia-smi -L: by GPU instance, then by compute instance.
	// With Index it forms the reference 3:0. It is -1 for a GPU, and for a MIG device whose number is unknown. The source
	// sets it, because the number also counts instances whose UUID is not known yet.
	MIGIndex int

	Links []Link // GPU: its links to other GPUs; an unlisted peer is unknown

	Properties *Properties // nil if the source does not have them; not modified once stored

	Texts map[Field]string // the configured text fields, such as serial number and VBIOS version; blanks are absent; MIG: its parent's
}

// ComputeCapability is the version of a GPU's architecture, such as 9.0; zero if unknown.
type ComputeCapability struct{ Major, Minor int }

// Name returns the index and the UUID, for texts.
func (d *Device) Name() string {
	switch {
	case d.Kind == KindMIG && d.MIGIndex >= 0 && d.Index >= 0:
		return fmt.Sprintf("MIG device %d:%d (%s)", d.Index, d.MIGIndex, d.ID)
	case d.Kind == KindMIG: // the driver does not list it
		return fmt.Sprintf("MIG device %s of %s", d.ID, d.GPUName())
	case d.Index < 0:
		return d.GPUName()
	}
	return fmt.Sprintf("%s (%s)", d.GPUName(), d.ID)
}

// GPUName returns a short name of the device's GPU: GPU 3, or its UUID if another GPU has its index.
func (d *Device) GPUName() string {
	if d.Index < 0 {
		return string(d.GPU())
	}
	return "GPU " + strconv.Itoa(d.Index)
}

// IndexText returns the index, empty if another GPU has it.
func (d *Device) IndexText() string {
	if d.Index < 0 {
		return ""
	}
	return strconv.Itoa(d.Index)
}

// CompareIndex orders devices by index; devices without one come last.
func CompareIndex(a, b *Device) int {
	return cmp.Or(-cmp.Compare(min(a.Index, 0), min(b.Index, 0)), cmp.Compare(a.Index, b.Index))
}

// GPU returns the ID of the GPU: the parent of a MIG device, or the GPU's own.
func (d *Device) GPU() DeviceID { return cmp.Or(d.Parent, d.ID) }

// Matches reports whether ref identifies the device or its parent GPU, and whether ref is a valid device reference at all.
// It does not allocate: every layout calls it for every device.
func (d *Device) Matches(ref string) (match, valid bool) {
	names := deviceref.Names{UUID: string(d.ID), Parent: string(d.Parent), Index: d.Index, MIG: d.MIGIndex, PCI: d.PCI}
	return names.Match(ref)
}

// Link is the connection from one GPU to another.
type Link struct {
	Peer    DeviceID
	NVLinks int  // number of NVLinks, 0 if none
	Path    Path // the PCIe path
}

// Path is the PCIe path between two GPUs. A greater Path is a better one.
type Path uint8

// The PCIe paths, with their names in `nvidia-smi topo -m`.
const (
	PathUnknown      Path = iota
	PathSystem            // SYS: across CPU sockets
	PathNode              // NODE: across host bridges of one NUMA node
	PathHostBridge        // PHB: through one host bridge
	PathMultiSwitch       // PXB: through several PCIe switches
	PathSingleSwitch      // PIX: through one PCIe switch
	PathBoard             // PSB: on one board
)

// Properties are what NVML knows of a device and DCGM does not. Like Device, they stay fixed until the device is removed or repartitioned.
type Properties struct {
	Brand          string // as NVML names it: Nvidia, Tesla, GeForce; empty if unknown
	AddressingMode string // HMM, ATS or None; empty if unknown
	Serial         string // of the GPU's board; empty if unknown

	// Clique names the GPUs that NVLinks connect across nodes, as CLUSTER.CLIQUE; empty if there is no such fabric, or while FabricPending.
	Clique        string
	FabricPending bool // the GPU has not joined its fabric yet, or the driver did not say whether it has

	MIG *MIGProperties // of a MIG device; nil for a GPU, and if unknown
}

// KnownProperties are the properties of the devices that NVML was asked for, nil of a device that has not answered. They are immutable.
type KnownProperties map[DeviceID]*Properties

// MIGProperties describe the GPU instance of a MIG device.
type MIGProperties struct {
	ProfileID      int // of the GPU instance's profile, as nvidia-smi mig -lgip prints it: 19 for 1g.10gb of an H100
	PlacementStart int // its first memory slice
	MemorySlices   int

	Multiprocessors, CopyEngines, Decoders, Encoders, JPEGEngines, OFAEngines int
}
