package sim

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// model is a kind of GPU. The powers are those of a board at rest and at its limit. What no source below
// states (the reserved memory, lowSM, the temperatures under load, nvlinkRate) is a believable guess.
type model struct {
	name                 string
	total, reserved      int     // framebuffer in MiB, as nvidia-smi -q -d MEMORY has it
	restPower, maxPower  float64 // W
	restTemp, maxTemp    float64 // °C
	memTempOver          float64 // °C by which the memory is warmer; 0: it has no sensor that NVML reads
	restSM, lowSM, topSM float64 // MHz: idle, throttled by power at full load, boost
	restMem, topMem      float64 // MHz
	canMIG               bool
	retires              bool    // it retires pages for bad memory; since Ampere rows are remapped instead
	nvlinkRate           float64 // what all NVLinks count in a second at full load, KiB; 0: no NVLink
}

// profile is a machine.
type profile struct {
	name  string
	model model
	pci   []string    // bus of each GPU, by index
	numa  []int       // NUMA node of each GPU
	near  health.Path // between two GPUs of one NUMA node; all others are PathSystem
	links int         // NVLinks from any GPU to any other
	mig   [][]slice   // how each GPU is partitioned; nil: MIG is off

	layouts bool // sevenths and balanced fit its GPUs
}

// slice is a MIG device: a GPU instance with one compute instance, 0.
type slice struct {
	profile string
	gi      int
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
		canMIG: true, nvlinkRate: 180 << 20,
	}
}

// a100: NVIDIA A100-SXM4-80GB: 400 W, 1410 MHz (A100 datasheet); memory 1593 MHz and 61 W at rest from nvidia-smi.
func a100() model {
	return model{
		name: "NVIDIA A100-SXM4-80GB", total: 81920, reserved: 868,
		restPower: 61, maxPower: 400, restTemp: 33, maxTemp: 64, memTempOver: 7,
		restSM: 210, lowSM: 1185, topSM: 1410, restMem: 1593, topMem: 1593,
		canMIG: true, nvlinkRate: 110 << 20,
	}
}

// l4: NVIDIA L4: 72 W, 2040 MHz (L4 datasheet); at rest in P8 11 to 13 W; GDDR6 without a temperature that
// NVML reads, no NVLink, no MIG.
func l4() model {
	return model{
		name: "NVIDIA L4", total: 23034, reserved: 435,
		restPower: 12, maxPower: 72, restTemp: 36, maxTemp: 77,
		restSM: 210, lowSM: 1230, topSM: 2040, restMem: 405, topMem: 6251,
	}
}

// v100: Tesla V100-SXM3-32GB: 350 W, 1597 MHz (DGX-2 datasheet); clocks at rest and of the memory from nvidia-smi.
func v100() model {
	return model{
		name: "Tesla V100-SXM3-32GB", total: 32768, reserved: 258,
		restPower: 50, maxPower: 350, restTemp: 33, maxTemp: 62, memTempOver: 2,
		restSM: 135, lowSM: 1290, topSM: 1597, restMem: 958, topMem: 958,
		retires: true, nvlinkRate: 60 << 20,
	}
}

// profiles returns the machines.
//
// h100-8 is a DGX H100: bus ids, NUMA nodes, NV18 between all, and NODE over PCIe within a socket, as
// nvidia-smi and nvidia-smi topo -m print them there; every GPU has a PCIe switch of its own.
//
// a100-8 is a DGX A100 (DGX A100 user guide; nvidia-smi topo -m; the NCCL topology in NVIDIA/nccl#1505): NV12,
// four NUMA nodes a socket (NPS4), and two GPUs behind the switches of each of four.
//
// h100-8-mig is the first machine partitioned: six GPUs in seven, two with the mix that mig-parted calls
// all-balanced. No GPU reaches another over NVLink then (MIG user guide, "no GPU to GPU P2P").
//
// v100-16 is a DGX-2: sixteen GPUs behind NVSwitches, NV6 between all, eight at each socket (DGX-2 user guide;
// nvidia-smi topo -m).
//
// l4-1 is a cloud instance of one L4 (g2-standard on Google Cloud: bus 00:03.0).
func profiles() []profile {
	dgxH100 := profile{
		name: "h100-8", model: h100(),
		pci:  []string{"1B:00.0", "43:00.0", "52:00.0", "61:00.0", "9D:00.0", "C3:00.0", "D1:00.0", "DF:00.0"},
		numa: []int{0, 0, 0, 0, 1, 1, 1, 1},
		near: health.PathNode, links: 18, layouts: true,
	}
	mig := dgxH100
	mig.name = "h100-8-mig"
	mig.mig = [][]slice{sevenths(), sevenths(), sevenths(), sevenths(), sevenths(), sevenths(), balanced(), balanced()}

	return []profile{
		dgxH100,
		{
			name: "a100-8", model: a100(),
			pci:  []string{"07:00.0", "0F:00.0", "47:00.0", "4E:00.0", "87:00.0", "90:00.0", "B7:00.0", "BD:00.0"},
			numa: []int{3, 3, 1, 1, 7, 7, 5, 5},
			near: health.PathMultiSwitch, links: 12,
		},
		mig,
		{
			name: "v100-16", model: v100(),
			pci: []string{
				"34:00.0", "36:00.0", "39:00.0", "3B:00.0", "57:00.0", "59:00.0", "5C:00.0", "5E:00.0",
				"B7:00.0", "B9:00.0", "BC:00.0", "BE:00.0", "E0:00.0", "E2:00.0", "E5:00.0", "E7:00.0",
			},
			numa: []int{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
			near: health.PathNode, links: 6,
		},
		{name: "l4-1", model: l4(), pci: []string{"00:03.0"}, numa: []int{0}},
		{name: "none"},
	}
}

// sevenths is 7x 1g.10gb. The memory sizes and the GPU instance ids here and in balanced are those that
// nvidia-smi lists on an H100 80GB and, for the ids, after mig-parted has made the layout.
func sevenths() []slice {
	out := make([]slice, 7)
	for i := range out {
		out[i] = slice{"1g.10gb", 7 + i, 1, 9984}
	}
	return out
}

func balanced() []slice {
	return []slice{{"3g.40gb", 1, 3, 40448}, {"2g.20gb", 5, 2, 20096}, {"1g.10gb", 13, 1, 9984}, {"1g.10gb", 14, 1, 9984}}
}

func profileNames() []string {
	var out []string
	for _, p := range profiles() {
		out = append(out, p.name)
	}
	return out
}

func profileNamed(name string) (profile, bool) {
	for _, p := range profiles() {
		if p.name == name {
			return p, true
		}
	}
	return profile{}, false
}

// devices are the machine's, each GPU followed by its MIG devices.
func (p profile) devices(seed int64) []health.Device {
	var out []health.Device
	for i, bus := range p.pci {
		d := health.Device{
			ID: p.uuid("GPU", seed, i, 0), Kind: health.KindGPU, Index: i, Minor: i, NUMA: []int{p.numa[i]},
			Model: p.model.name, PCI: "00000000:" + bus, Memory: mib(p.model.total),
			MIGMode: p.partitioned(i), GI: -1, CI: -1, MIGIndex: -1,
		}
		d.Texts = p.model.texts(d.ID)
		for peer := range p.pci {
			if peer == i {
				continue
			}
			path := health.PathSystem
			if p.numa[peer] == p.numa[i] {
				path = p.near
			}
			links := p.links
			if p.partitioned(i) || p.partitioned(peer) {
				links = 0
			}
			d.Links = append(d.Links, health.Link{Peer: p.uuid("GPU", seed, peer, 0), NVLinks: links, Path: path})
		}
		out = append(out, d)
		if !p.partitioned(i) {
			continue
		}
		for _, s := range p.mig[i] {
			m := d
			m.ID, m.Parent, m.Kind = p.uuid("MIG", seed, i, s.gi), d.ID, health.KindMIG
			m.MIGIndex = 0
			m.Profile, m.GI, m.CI, m.Memory = s.profile, s.gi, 0, mib(s.memory)
			m.MIGMode, m.Links = false, nil
			for _, other := range p.mig[i] {
				if other.gi < s.gi {
					m.MIGIndex++
				}
			}
			out = append(out, m)
		}
	}
	return out
}

func mib(n int) uint64 { return uint64(n) << 20 }

// uuid is as random as the driver's, but the same for the same profile, seed and place.
func (p profile) uuid(kind string, seed int64, index, gi int) health.DeviceID {
	b := sha256.Sum256(fmt.Appendf(nil, "%s %s %d %d %d", kind, p.name, seed, index, gi))
	if kind == "MIG" {
		b[6], b[8] = b[6]&0x0f|0x50, b[8]&0x3f|0x80 // the driver's MIG UUIDs are of version 5
	}
	return health.DeviceID(fmt.Sprintf("%s-%x-%x-%x-%x-%x", kind, b[0:4], b[4:6], b[6:8], b[8:10], b[10:16]))
}

// seedOf starts the random numbers of one device.
func seedOf(id health.DeviceID) uint64 {
	b := sha256.Sum256([]byte(id))
	return binary.BigEndian.Uint64(b[:])
}
