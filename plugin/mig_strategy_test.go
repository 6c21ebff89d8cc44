package plugin

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	h100Memory = 81559 << 20 // bytes, nvidia-smi on an H100 80GB
	h100Model  = "NVIDIA H100 80GB HBM3"
)

// migMemory is the memory of the profiles of an H100 80GB in MiB, as the driver reports it.
var migMemory = map[string]uint64{"1g.10gb": 9984, "1g.20gb": 20096, "2g.20gb": 20096, "3g.40gb": 40448, "7g.80gb": 81046}

// whole and empty are a GPU that is not in MIG mode, and one without MIG devices, for partitioned.
const whole, empty = "whole", ""

// partitioned returns GPUs in MIG mode, each with MIG devices of these profiles. The ID of MIG device n of GPU i is MIG-i-n.
func partitioned(gpus ...string) *health.Snapshot {
	s := &health.Snapshot{Seq: 1, At: time.Unix(1, 0)}
	var parts []health.DeviceState
	for i, profiles := range gpus {
		d := health.Device{
			ID: health.DeviceID(id(i)), Index: i, Minor: i, GI: -1, CI: -1, MIGIndex: -1, Memory: h100Memory, Model: h100Model,
			PCI: fmt.Sprintf("00000000:%02X:00.0", 16+i), MIGMode: profiles != whole, NUMA: []int{i / 2},
		}
		s.Devices = append(s.Devices, health.DeviceState{Device: d, Verdict: health.Verdict{State: health.Healthy}})
		if profiles == whole {
			continue
		}
		for n, p := range strings.Fields(profiles) {
			m := d
			m.ID, m.Parent, m.Kind, m.MIGMode = health.DeviceID(fmt.Sprintf("MIG-%d-%d", i, n)), d.ID, health.KindMIG, false
			m.Profile, m.Memory, m.GI, m.CI, m.MIGIndex = p, migMemory[p]<<20, 7+n, 0, n
			parts = append(parts, health.DeviceState{Device: m, Verdict: health.Verdict{State: health.Healthy}})
		}
	}
	s.Devices = append(s.Devices, parts...)
	return s
}

func TestLayoutOfMIG(t *testing.T) {
	with := func(strategy string, change func(*Config)) Config {
		return configured(func(c *Config) { c.MIGStrategy = strategy }, change)
	}
	unchanged := func(*Config) {}
	mixed, single := with(MIGMixed, unchanged), with(MIGSingle, unchanged)
	checkLayouts(t, []layoutCase{
		{"none ignores MIG mode", DefaultConfig(), partitioned("1g.10gb", empty, whole), "nvidia.com/gpu: GPU-0 GPU-1 GPU-2", nil},
		{
			"mixed", mixed, partitioned("3g.40gb 1g.10gb 1g.10gb", whole, "1g.10gb"),
			"nvidia.com/gpu: GPU-1; nvidia.com/mig-1g.10gb: MIG-0-1 MIG-0-2 MIG-2-0; nvidia.com/mig-3g.40gb: MIG-0-0", nil,
		},
		{"mixed without MIG", mixed, partitioned(whole, whole), "nvidia.com/gpu: GPU-0 GPU-1", nil},
		{"mixed, empty GPU", mixed, partitioned(empty, whole), "nvidia.com/gpu: GPU-1", []string{"GPU 0 "}},
		{
			"mixed, attributes", mixed, partitioned("1g.10gb+me 1g.24gb-me"),
			"nvidia.com/mig-1g.10gb.me: MIG-0-0; nvidia.com/mig-1g.24gb-me: MIG-0-1", nil,
		},
		{
			"mixed, attributes of one size", mixed, partitioned("1g.24gb 1g.24gb+gfx 1g.24gb+me.all 1c.2g.48gb+gfx"),
			"nvidia.com/mig-1g.24gb: MIG-0-0; nvidia.com/mig-1g.24gb.gfx: MIG-0-1; nvidia.com/mig-1g.24gb.me.all: MIG-0-2",
			[]string{"GPU 0: MIG devices 1c.2g.48gb+gfx "},
		},
		{
			"mixed, shared GPU instances", mixed, partitioned("1c.3g.40gb 1c.3g.40gb 2c.3g.40gb 3c.3g.40gb invalid"),
			"nvidia.com/mig-3g.40gb: MIG-0-3",
			[]string{"GPU 0: MIG devices 1c.3g.40gb ", "2c.3g.40gb ", `"invalid"`},
		},
		{
			"mixed, other domain", with(MIGMixed, func(c *Config) { c.Resource = "example.com/gpu" }), partitioned("1g.10gb", whole),
			"example.com/gpu: GPU-1; example.com/mig-1g.10gb: MIG-0-0", nil,
		},
		{"single", single, partitioned("1g.10gb 1g.10gb", "1g.10gb"), "nvidia.com/gpu: MIG-0-0 MIG-0-1 MIG-1-0", nil},
		{"single without MIG", single, partitioned(whole, whole), "nvidia.com/gpu: GPU-0 GPU-1", nil},
		{"single, one GPU whole", single, partitioned("1g.10gb", whole), "", []string{"GPU 1 "}},
		{"single, one GPU empty", single, partitioned("1g.10gb", empty), "", []string{"GPU 1 "}},
		{"single, all empty", single, partitioned(empty, empty), "", []string{"GPU 1 "}},
		{"single, two profiles", single, partitioned("1g.10gb", "2g.20gb"), "", []string{"2g.20gb"}},
		{"single, attribute", single, partitioned("1g.10gb 1g.10gb+me"), "", []string{"1g.10gb+me"}},
		{
			"single, differing GPU excluded", with(MIGSingle, func(c *Config) { c.Exclude = []string{"1"} }), partitioned("1g.10gb", whole),
			"nvidia.com/gpu: MIG-0-0", nil,
		},
		{
			"include by profile", with(MIGMixed, func(c *Config) { c.Include = []string{"mig-3g.*", "0:1"} }),
			partitioned("3g.40gb 1g.10gb 1g.10gb", whole, "3g.40gb"),
			"nvidia.com/mig-1g.10gb: MIG-0-1; nvidia.com/mig-3g.40gb: MIG-0-0 MIG-2-0", nil,
		},
		{
			"resources by profile", with(MIGMixed, func(c *Config) {
				c.Resources = []ResourceRule{{"*", "a.com/whole"}, {"mig-1g*", "a.com/small"}, {"mig-*", "a.com/big"}}
			}),
			partitioned("3g.40gb 1g.10gb", whole, "1g.10gb+me"), "a.com/big: MIG-0-0; a.com/small: MIG-0-1 MIG-2-0; a.com/whole: GPU-1", nil,
		},
	})
}

func TestProfileOf(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		profile  string // of DCGM
		mig, gpu uint64 // MiB
		want     string
		name     string
	}{
		{"1g.11gb", 11008, 95830, "1g.12gb", "H100 NVL, NVIDIA/dcgm-exporter#544"},
		{"7g.79gb", 81069, 81920, "7g.80gb", "A100 80GB, NVIDIA/dcgm-exporter#713"},
		{"1g.10gb", 9984, 81559, "1g.10gb", "H100"},
		{"1g.20gb", 20096, 81559, "1g.20gb", "H100"},
		{"3g.39gb", 40448, 81559, "3g.40gb", "H100"},
		{"1g.5gb", 4864, 40960, "1g.5gb", "A100 40GB"},
		{"1g.6gb", 5952, 24576, "1g.6gb", "A30, which has four slices"},
		{"1g.10gb+me", 9984, 81559, "1g.10gb+me", "attributes"},
		{"1c.3g.40gb", 40448, 81559, "1c.3g.40gb", "part of a GPU instance"},
		{"1c.1g.10gb", 9984, 81559, "1g.10gb", "complete GPU instance"},
		{"1g.10gb", 81559, 81559, "1g.10gb", "implausible memory, that of the GPU"},
		{"1g.10gb", 0, 81559, "1g.10gb", "unknown memory"},
		{"1g.10gb", 9984, 0, "1g.10gb", "unknown memory of the GPU"},
		{"", 9984, 81559, "", "no profile"},
		{"g.gb", 9984, 81559, "g.gb", "invalid profile"},
	} {
		d := &health.Device{Profile: c.profile, Memory: c.mig * mib}
		if got := profileOf(d, c.gpu*mib); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}
