package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const (
	h100Memory = 81559 << 20 // bytes, nvidia-smi on an H100 80GB
	h100Model  = "NVIDIA H100 80GB HBM3"
)

// migMemory is what the driver says of the profiles of an H100 80GB, in MiB.
var migMemory = map[string]uint64{"1g.10gb": 9984, "1g.20gb": 20096, "2g.20gb": 20096, "3g.40gb": 40448, "7g.80gb": 81046}

// partitioned returns GPUs in MIG mode, each with MIG devices of those profiles, and whole ones where there are
// nil profiles. The MIG device n of GPU i is called MIG-i-n.
func partitioned(gpus ...[]string) *health.Snapshot {
	s := &health.Snapshot{Seq: 1, At: time.Unix(1, 0)}
	var parts []health.DeviceState
	for i, profiles := range gpus {
		d := health.Device{
			ID: health.DeviceID(id(i)), Index: i, Minor: i, GI: -1, CI: -1, MIGIndex: -1, Memory: h100Memory, Model: h100Model,
			PCI: fmt.Sprintf("00000000:%02X:00.0", 16+i), MIGMode: profiles != nil, NUMA: []int{i / 2},
		}
		s.Devices = append(s.Devices, health.DeviceState{Device: d, Verdict: health.Verdict{State: health.Healthy}})
		for n, p := range profiles {
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
	whole, empty := []string(nil), []string{}
	mixed := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
	single := configured(func(c *Config) { c.MIGStrategy = MIGSingle })
	for _, c := range []struct {
		name     string
		cfg      Config
		snap     *health.Snapshot
		want     []string
		err      string   // a part of it
		warnings []string // a part of each
	}{
		{
			"none: MIG mode makes no difference", DefaultConfig(),
			partitioned([]string{"1g.10gb"}, empty, whole),
			[]string{"nvidia.com/gpu: GPU-0 GPU-1 GPU-2"},
			"", nil,
		},
		{
			"mixed", mixed, partitioned([]string{"3g.40gb", "1g.10gb", "1g.10gb"}, whole, []string{"1g.10gb"}),
			[]string{"nvidia.com/gpu: GPU-1", "nvidia.com/mig-1g.10gb: MIG-0-1 MIG-0-2 MIG-2-0", "nvidia.com/mig-3g.40gb: MIG-0-0"},
			"", nil,
		},
		{"mixed without MIG", mixed, partitioned(whole, whole), []string{"nvidia.com/gpu: GPU-0 GPU-1"}, "", nil},
		{
			"mixed, an empty GPU", mixed, partitioned(empty, whole),
			[]string{"nvidia.com/gpu: GPU-1"},
			"",
			[]string{"GPU 0 is in MIG mode and has no MIG devices"},
		},
		{
			"mixed, attributes", mixed, partitioned([]string{"1g.10gb+me", "1g.24gb-me"}),
			[]string{"nvidia.com/mig-1g.10gb.me: MIG-0-0", "nvidia.com/mig-1g.24gb-me: MIG-0-1"},
			"", nil,
		},
		{
			"mixed, attributes of one size", mixed, partitioned([]string{"1g.24gb", "1g.24gb+gfx", "1g.24gb+me.all", "1c.2g.48gb+gfx"}),
			[]string{"nvidia.com/mig-1g.24gb: MIG-0-0", "nvidia.com/mig-1g.24gb.gfx: MIG-0-1", "nvidia.com/mig-1g.24gb.me.all: MIG-0-2"},
			"",
			[]string{"MIG-0-3 (1c.2g.48gb+gfx)"},
		},
		{
			"mixed, shared GPU instances", mixed, partitioned([]string{"1c.3g.40gb", "2c.3g.40gb", "3c.3g.40gb", "what"}),
			[]string{"nvidia.com/mig-3g.40gb: MIG-0-2"},
			"",
			[]string{"MIG-0-0 (1c.3g.40gb)", "MIG-0-1", `MIG-0-3 has the profile "what"`},
		},
		{
			"mixed, in a domain of one's own", configured(func(c *Config) { c.MIGStrategy, c.Resource = MIGMixed, "example.com/gpu" }),
			partitioned([]string{"1g.10gb"}, whole),
			[]string{"example.com/gpu: GPU-1", "example.com/mig-1g.10gb: MIG-0-0"},
			"", nil,
		},
		{"single", single, partitioned([]string{"1g.10gb", "1g.10gb"}, []string{"1g.10gb"}), []string{"nvidia.com/gpu: MIG-0-0 MIG-0-1 MIG-1-0"}, "", nil},
		{"single without MIG", single, partitioned(whole, whole), []string{"nvidia.com/gpu: GPU-0 GPU-1"}, "", nil},
		{"single, one GPU whole", single, partitioned([]string{"1g.10gb"}, whole), nil, "GPU 1 is not in MIG mode, and others are", nil},
		{"single, one GPU empty", single, partitioned([]string{"1g.10gb"}, empty), nil, "GPU 1 is in MIG mode and has no MIG devices", nil},
		{"single, all empty", single, partitioned(empty, empty), nil, "GPU 1 is in MIG mode and has no MIG devices", nil},
		{
			"single, two profiles", single, partitioned([]string{"1g.10gb"}, []string{"2g.20gb"}), nil,
			"1g.10gb on GPU 0 and 2g.20gb on GPU 1 are of different profiles", nil,
		},
		{
			"single, an attribute", single, partitioned([]string{"1g.10gb", "1g.10gb+me"}), nil,
			"1g.10gb on GPU 0 and 1g.10gb+me on GPU 0 are of different profiles", nil,
		},
		{
			"single, what differs left out", configured(func(c *Config) { c.MIGStrategy, c.Exclude = MIGSingle, []string{"1"} }),
			partitioned([]string{"1g.10gb"}, whole),
			[]string{"nvidia.com/gpu: MIG-0-0"},
			"", nil,
		},
		{
			"include by profile", configured(func(c *Config) { c.MIGStrategy, c.Include = MIGMixed, []string{"mig-3g.*", "0:1"} }),
			partitioned([]string{"3g.40gb", "1g.10gb", "1g.10gb"}, whole, []string{"3g.40gb"}),
			[]string{"nvidia.com/mig-1g.10gb: MIG-0-1", "nvidia.com/mig-3g.40gb: MIG-0-0 MIG-2-0"},
			"", nil,
		},
		{
			"names by profile", configured(func(c *Config) {
				c.MIGStrategy = MIGMixed
				c.Resources = []ResourceRule{{"*", "a.com/whole"}, {"mig-1g*", "a.com/small"}, {"mig-*", "a.com/big"}}
			}),
			partitioned([]string{"3g.40gb", "1g.10gb"}, whole, []string{"1g.10gb+me"}),
			[]string{"a.com/big: MIG-0-0", "a.com/small: MIG-0-1 MIG-2-0", "a.com/whole: GPU-1"},
			"", nil,
		},
	} {
		a := arrange(layoutInput{cfg: &c.cfg, snap: c.snap})
		if err := c.cfg.Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if got := said(a.Resources); !slices.Equal(got, c.want) {
			t.Errorf("%s:\ngot  %q\nwant %q", c.name, got, c.want)
		}
		if c.err == "" && a.Err != "" || !strings.Contains(a.Err, c.err) {
			t.Errorf("%s: %q, want %q", c.name, a.Err, c.err)
		}
		if !slices.EqualFunc(a.Warnings, c.warnings, strings.Contains) {
			t.Errorf("%s: warned of %q, want %q", c.name, a.Warnings, c.warnings)
		}
	}
}

func TestProfiles(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		said        string // by DCGM
		mig, whole  uint64 // MiB
		want        string
		description string
	}{
		{"1g.11gb", 11008, 95830, "1g.12gb", "H100 NVL, NVIDIA/dcgm-exporter#544"},
		{"7g.79gb", 81069, 81920, "7g.80gb", "A100 80GB, NVIDIA/dcgm-exporter#713"},
		{"1g.10gb", 9984, 81559, "1g.10gb", "H100"},
		{"1g.20gb", 20096, 81559, "1g.20gb", "H100"},
		{"3g.39gb", 40448, 81559, "3g.40gb", "H100"},
		{"1g.5gb", 4864, 40960, "1g.5gb", "A100 40GB"},
		{"1g.6gb", 5952, 24576, "1g.6gb", "A30, which has four slices"},
		{"1g.10gb+me", 9984, 81559, "1g.10gb+me", "attributes stay"},
		{"1c.3g.40gb", 40448, 81559, "1c.3g.40gb", "a part of a GPU instance"},
		{"1c.1g.10gb", 9984, 81559, "1g.10gb", "the whole of one"},
		{"1g.10gb", 81559, 81559, "1g.10gb", "the memory is the whole GPU's: not believed"},
		{"1g.10gb", 0, 81559, "1g.10gb", "not known"},
		{"1g.10gb", 9984, 0, "1g.10gb", "nor the GPU's"},
		{"", 9984, 81559, "", "no profile"},
		{"g.gb", 9984, 81559, "g.gb", "nonsense"},
	} {
		d := &health.Device{Profile: c.said, Memory: c.mig * mib}
		if got := profileOf(d, c.whole*mib); got != c.want {
			t.Errorf("%s: %s, want %s", c.description, got, c.want)
		}
	}
}
