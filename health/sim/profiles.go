package sim

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// model is a GPU model. The powers are an idle board's and the limit. Values without a source below (reserved memory, lowSM, temperatures
// under load, nvlinkRate) are plausible guesses.
type model struct {
	name                 string
	total, reserved      int     // framebuffer in MiB (nvidia-smi -q -d MEMORY)
	restPower, maxPower  float64 // W
	restTemp, maxTemp    float64 // °C
	memTempOver          float64 // °C by which the memory is warmer; 0: NVML reads no sensor
	restSM, lowSM, topSM float64 // MHz: idle, at full load and power limit, boost
	restMem, topMem      float64 // MHz
	canMIG               bool
	repartitions         bool    // supports Event.MIG: sevenths and balanced fit it
	retires              bool    // retires pages for bad memory; since Ampere GPUs remap rows instead
	nvlinkRate           float64 // KiB per second over all NVLinks at full load; 0: no NVLink
	capability           health.ComputeCapability
	firmware             firmware
}

// profile is a simulated machine.
type profile struct {
	name   string
	models []model     // of each GPU, by index
	pci    []string    // bus address of each GPU
	numa   []int       // NUMA node of each GPU
	near   health.Path // between GPUs of one NUMA node; PathSystem between others
	links  int         // NVLinks between any two GPUs that have NVLink
	mig    [][]slice   // MIG devices of each GPU; nil: MIG is off

	switches int // NVSwitches
}

// slice is a MIG device: a GPU instance with compute instance 0.
type slice struct {
	profile string
	gi      int
	start   int // its first memory slice
	compute int // sevenths of the GPU
	memory  int // MiB
}

// h100: NVIDIA H100 SXM5. Memory, idle temperature and idle power (70 W) from nvidia-smi on a DGX H100 with
// driver 580, 700 W from the H100 datasheet; clocks from nvidia-smi -q -d CLOCK (1980 boost, 2619 memory).
func h100() model {
	return model{
		name: "NVIDIA H100 80GB HBM3", total: 81559, reserved: 551,
		restPower: 71, maxPower: 700, restTemp: 31, maxTemp: 66, memTempOver: 9,
		restSM: 345, lowSM: 1560, topSM: 1980, restMem: 2619, topMem: 2619,
		canMIG: true, repartitions: true, nvlinkRate: 180 << 20, capability: health.ComputeCapability{Major: 9},
		firmware: firmware{"NVIDIA", "96.00.99.00.01", "G520.0200.00.05", "2.1", "7.16"},
	}
}

// a100: NVIDIA A100-SXM4-80GB: 400 W, 1410 MHz (A100 datasheet); memory 1593 MHz and 61 W when idle from nvidia-smi.
func a100() model {
	return model{
		name: "NVIDIA A100-SXM4-80GB", total: 81920, reserved: 868,
		restPower: 61, maxPower: 400, restTemp: 33, maxTemp: 64, memTempOver: 7,
		restSM: 210, lowSM: 1185, topSM: 1410, restMem: 1593, topMem: 1593,
		canMIG: true, nvlinkRate: 110 << 20, capability: health.ComputeCapability{Major: 8},
		firmware: firmware{"NVIDIA", "92.00.A0.00.05", "G506.0210.00.04", "2.0", "6.16"},
	}
}

// l4: NVIDIA L4: 72 W, 2040 MHz (L4 datasheet); 11 to 13 W when idle in P8; GDDR6 without a temperature in NVML, no
// NVLink, no MIG.
func l4() model {
	return model{
		name: "NVIDIA L4", total: 23034, reserved: 435,
		restPower: 12, maxPower: 72, restTemp: 36, maxTemp: 77,
		restSM: 210, lowSM: 1230, topSM: 2040, restMem: 405, topMem: 6251,
		capability: health.ComputeCapability{Major: 8, Minor: 9},
		firmware:   firmware{"NVIDIA", "95.04.29.00.06", "G193.0200.00.01", "2.1", "6.16"},
	}
}

// v100: Tesla V100-SXM3-32GB: 350 W, 1597 MHz (DGX-2 datasheet); idle and memory clocks from nvidia-smi.
func v100() model {
	return model{
		name: "Tesla V100-SXM3-32GB", total: 32768, reserved: 258,
		restPower: 50, maxPower: 350, restTemp: 33, maxTemp: 62, memTempOver: 2,
		restSM: 135, lowSM: 1290, topSM: 1597, restMem: 958, topMem: 958,
		retires: true, nvlinkRate: 60 << 20, capability: health.ComputeCapability{Major: 7},
		firmware: firmware{"Tesla", "88.00.80.00.01", "G503.0204.00.02", "1.1", "5.0"},
	}
}

// profiles returns all profiles.
//
// h100-8 is a DGX H100: bus IDs, NUMA nodes, NV18 between all GPUs and NODE over PCIe within a socket, as nvidia-smi and
// nvidia-smi topo -m print them; every GPU has its own PCIe switch, and four NVSwitches connect them (DGX H100 user guide).
//
// a100-8 is a DGX A100 (DGX A100 user guide; nvidia-smi topo -m; the NCCL topology in NVIDIA/nccl#1505): NV12, six NVSwitches,
// four NUMA nodes per socket (NPS4), and two GPUs behind the switches of each of four nodes.
//
// h100-8-mig is h100-8 with MIG: six GPUs with seven MIG devices, two with the mix that mig-parted calls all-balanced.
// In MIG mode no GPU reaches another over NVLink (MIG user guide, "no GPU to GPU P2P").
//
// v100-16 is a DGX-2: sixteen GPUs behind twelve NVSwitches, NV6 between all, eight per socket (DGX-2 user guide;
// nvidia-smi topo -m).
//
// h100-16-mig is no real machine: sixteen H100 with seven MIG devices each on the buses of v100-16, for the largest list of
// devices.
//
// mixed-4 is no real machine: two H100 and two L4, for resources whose GPUs differ. Its H100 are connected by NVLink without
// a switch.
//
// l4-1 is a cloud instance with one L4 (g2-standard on Google Cloud: bus 00:03.0).
func profiles() []profile {
	dgxH100 := profile{
		name: "h100-8", models: slices.Repeat([]model{h100()}, 8),
		pci:  []string{"1B:00.0", "43:00.0", "52:00.0", "61:00.0", "9D:00.0", "C3:00.0", "D1:00.0", "DF:00.0"},
		numa: []int{0, 0, 0, 0, 1, 1, 1, 1},
		near: health.PathNode, links: 18, switches: 4,
	}
	mig := dgxH100
	mig.name = "h100-8-mig"
	mig.mig = [][]slice{sevenths(), sevenths(), sevenths(), sevenths(), sevenths(), sevenths(), balanced(), balanced()}

	dgx2 := profile{
		name: "v100-16", models: slices.Repeat([]model{v100()}, 16),
		pci: []string{
			"34:00.0", "36:00.0", "39:00.0", "3B:00.0", "57:00.0", "59:00.0", "5C:00.0", "5E:00.0",
			"B7:00.0", "B9:00.0", "BC:00.0", "BE:00.0", "E0:00.0", "E2:00.0", "E5:00.0", "E7:00.0",
		},
		numa: []int{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
		near: health.PathNode, links: 6, switches: 12,
	}
	largest := profile{
		name: "h100-16-mig", models: slices.Repeat([]model{h100()}, 16), pci: dgx2.pci, numa: dgx2.numa,
		near: health.PathNode, links: 18, mig: slices.Repeat([][]slice{sevenths()}, len(dgx2.pci)),
	}

	return []profile{
		dgxH100,
		{
			name: "a100-8", models: slices.Repeat([]model{a100()}, 8),
			pci:  []string{"07:00.0", "0F:00.0", "47:00.0", "4E:00.0", "87:00.0", "90:00.0", "B7:00.0", "BD:00.0"},
			numa: []int{3, 3, 1, 1, 7, 7, 5, 5},
			near: health.PathMultiSwitch, links: 12, switches: 6,
		},
		mig,
		largest,
		dgx2,
		{
			name: "mixed-4", models: []model{h100(), h100(), l4(), l4()},
			pci:  []string{"1B:00.0", "43:00.0", "9D:00.0", "C3:00.0"},
			numa: []int{0, 0, 1, 1},
			near: health.PathNode, links: 18,
		},
		{name: "l4-1", models: []model{l4()}, pci: []string{"00:03.0"}, numa: []int{0}},
		{name: "none"},
	}
}

// sevenths is 7x 1g.10gb. Here and in balanced, memory sizes are as nvidia-smi lists them on an H100 80GB, and GPU instance IDs as after
// mig-parted has created the partition. The driver's IDs imply the placements of balanced; the placements of sevenths are in the order of
// the IDs instead.
func sevenths() []slice {
	out := make([]slice, 7)
	for i := range out {
		out[i] = slice{"1g.10gb", 7 + i, i, 1, 9984}
	}
	return out
}

func balanced() []slice {
	return []slice{{"3g.40gb", 1, 4, 3, 40448}, {"2g.20gb", 5, 0, 2, 20096}, {"1g.10gb", 13, 2, 1, 9984}, {"1g.10gb", 14, 3, 1, 9984}}
}

func profileNames() []string {
	var out []string
	for _, p := range profiles() {
		out = append(out, p.name)
	}
	return out
}

func profileByName(name string) (*profile, error) {
	all := profiles()
	if i := slices.IndexFunc(all, func(p profile) bool { return p.name == name }); i >= 0 {
		return &all[i], nil
	}
	return nil, keyErrorf("", "%q is not known; use one of %s", name, strings.Join(profileNames(), ", "))
}

// devices returns the profile's devices, each GPU followed by its MIG devices.
func (p profile) devices(seed int64) []health.Device {
	var out []health.Device
	for i, bus := range p.pci {
		m := &p.models[i]
		d := health.Device{
			ID: p.uuid("GPU", seed, i, 0), Kind: health.KindGPU, Index: i, Minor: i, NUMA: []int{p.numa[i]},
			Model: m.name, PCI: "00000000:" + bus, Memory: mib(m.total), Reserved: mib(m.reserved), ComputeCapability: m.capability,
			MIGMode: p.partitioned(i), GI: -1, CI: -1, MIGIndex: -1,
		}
		d.Texts, d.Properties = m.texts(d.ID), m.properties()
		for peer := range p.pci {
			if peer == i {
				continue
			}
			path := health.PathSystem
			if p.numa[peer] == p.numa[i] {
				path = p.near
			}
			links := 0
			if p.hasNVLink(i) && p.hasNVLink(peer) {
				links = p.links
			}
			d.Links = append(d.Links, health.Link{Peer: p.uuid("GPU", seed, peer, 0), NVLinks: links, Path: path})
		}
		out = append(out, d)
		if !p.partitioned(i) {
			continue
		}
		for _, s := range p.mig[i] {
			instance := d
			instance.ID, instance.Parent, instance.Kind = p.uuid("MIG", seed, i, s.gi), d.ID, health.KindMIG
			instance.MIGIndex = 0
			instance.Profile, instance.GI, instance.CI = s.profile, s.gi, 0
			instance.Memory, instance.Reserved = mib(s.memory), 0
			instance.MIGMode, instance.Links, instance.Properties = false, nil, m.migProperties(s)
			for _, other := range p.mig[i] {
				if other.gi < s.gi {
					instance.MIGIndex++
				}
			}
			out = append(out, instance)
		}
	}
	return out
}

// hasNVLink reports whether a GPU reaches others over NVLink.
func (p profile) hasNVLink(gpu int) bool { return p.models[gpu].nvlinkRate > 0 && !p.partitioned(gpu) }

func mib(n int) uint64 { return uint64(n) << 20 }

// uuid returns a UUID that depends on the profile, the seed and the position only.
func (p profile) uuid(kind string, seed int64, index, gi int) health.DeviceID {
	b := sha256.Sum256(fmt.Appendf(nil, "%s %s %d %d %d", kind, p.name, seed, index, gi))
	if kind == "MIG" {
		b[6], b[8] = b[6]&0x0f|0x50, b[8]&0x3f|0x80 // the driver's MIG UUIDs have version 5
	}
	return health.DeviceID(fmt.Sprintf("%s-%x-%x-%x-%x-%x", kind, b[0:4], b[4:6], b[6:8], b[8:10], b[10:16]))
}

// seedOf returns the seed of a device's random numbers.
func seedOf(id health.DeviceID) uint64 {
	b := sha256.Sum256([]byte(id))
	return binary.BigEndian.Uint64(b[:])
}

// firmware holds the versions of a board's firmware, as nvidia-smi -q prints them.
type firmware struct {
	brand    string
	vbios    string
	image    string // inforom version
	oem, ecc string // objects of the inforom; empty: missing
}

// The driver is from the production branch of 2025. NVML's version starts with its API's.
const (
	driverVersion = "580.95.05"
	nvmlVersion   = "13." + driverVersion
)

// texts returns the text fields of a GPU, by DCGM's numbers (dcgm_fields.h). Absent fields are blank in DCGM: the inforom
// of these boards has no power object.
func (m model) texts(id health.DeviceID) map[health.Field]string {
	all := map[health.Field]string{
		2:  nvmlVersion,
		51: m.firmware.brand,
		53: fmt.Sprintf("165%010d", seedOf(id)%1e10), // thirteen digits
		56: m.firmware.oem,
		80: m.firmware.ecc,
		82: m.firmware.image,
		85: m.firmware.vbios,
	}
	maps.DeleteFunc(all, func(_ health.Field, text string) bool { return text == "" })
	return all
}

// properties returns what NVML has of a GPU. On x86 the open kernel modules address memory by HMM; they need Turing.
func (m model) properties() *health.Properties {
	p := &health.Properties{Brand: "Nvidia", AddressingMode: "HMM"}
	if m.capability.Major < 8 {
		p.Brand, p.AddressingMode = "Tesla", ""
	}
	return p
}

// migProperties returns what NVML has of a MIG device.
func (m model) migProperties(s slice) *health.Properties {
	p := m.properties()
	mig := migProfileProperties(s.profile)
	mig.PlacementStart = s.start
	p.MIG = &mig
	return p
}

// migProfileProperties returns the properties of a profile of an H100 80GB as nvidia-smi mig -lgip and -lgipp print them.
func migProfileProperties(profile string) health.MIGProperties {
	switch profile {
	case "1g.10gb":
		return health.MIGProperties{ProfileID: 19, MemorySlices: 1, Multiprocessors: 16, CopyEngines: 1, Decoders: 1, JPEGEngines: 1}
	case "2g.20gb":
		return health.MIGProperties{ProfileID: 14, MemorySlices: 2, Multiprocessors: 32, CopyEngines: 2, Decoders: 2, JPEGEngines: 2}
	case "3g.40gb":
		return health.MIGProperties{ProfileID: 9, MemorySlices: 4, Multiprocessors: 60, CopyEngines: 3, Decoders: 3, JPEGEngines: 3}
	}
	return health.MIGProperties{}
}
