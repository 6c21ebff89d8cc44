package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// A selected device is written as ID[=OFFERED/UNIT ENFORCEMENT], with sizes in GiB and "!" after a blocked one.
func TestSelectDevices(t *testing.T) {
	unpolled := snapshot(2)
	unpolled.Source.Status, unpolled.At = health.SourceStarting, health.Snapshot{}.At
	sizes := withReserved(3)
	sizes.Devices[1].Device.Memory, sizes.Devices[2].Device.Memory = 0, 8<<30
	enforced := func(by string, change ...func(*Config)) Config {
		return configured(slices.Concat([]func(*Config){memoryShared("10Gi"), func(c *Config) { c.Sharing.Memory.Enforcement = by }}, change)...)
	}
	require := func(c *Config) { c.Sharing.Memory.RequireEnforcement = true }
	caps := func(reason string) *memlimits.Capabilities {
		return &memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": reason}}
	}
	for name, c := range map[string]struct {
		cfg      Config
		snap     *health.Snapshot
		caps     *memlimits.Capabilities
		examined bool
		want     string
		warnings []string // parts
		reason   string   // of the memory of the first device: a part
	}{
		"no snapshot": {cfg: DefaultConfig()},
		"no poll":     {cfg: DefaultConfig(), snap: unpolled},
		"no GPUs":     {cfg: configured(func(c *Config) { c.Include = []string{"5"} }), snap: snapshot(0)},
		"whole":       {cfg: DefaultConfig(), snap: snapshot(2), want: "GPU-0 GPU-1"},
		"exclude":     {cfg: configured(func(c *Config) { c.Exclude = []string{"0"} }), snap: snapshot(3), want: "GPU-1 GPU-2"},
		"include selects none": {
			cfg: configured(func(c *Config) { c.Include = []string{"5"} }), snap: snapshot(3),
			warnings: []string{"none of the 3 devices"},
		},
		"MIG": {
			cfg: DefaultConfig(), snap: partitioned("3g.40gb 1c.3g.40gb 1c.3g.40gb x", empty, whole), want: "GPU-0 MIG-0-0:3g.40gb GPU-1 GPU-2",
			warnings: []string{"1c.3g.40gb are not offered", `"x"`, "GPU 1 cannot be allocated: it is in MIG mode and has no MIG devices"},
		},
		"memory": {
			cfg: configured(memoryShared("10Gi")), snap: sizes, want: "GPU-0=70/10 none",
			warnings: []string{"whose memory size is unknown are not offered: GPU 1", "less memory than one unit of 10240Mi are not offered: GPU 2"},
		},
		"memory of some, with MIG": {
			cfg: configured(memoryShared("10Gi", "0", "1")), snap: partitioned(whole, "3g.40gb", whole),
			want: "GPU-0=70/10 none GPU-1 MIG-1-0:3g.40gb=30/10 none GPU-2",
		},
		"no memory of other kinds": {cfg: configured(sharedBy(2)), snap: snapshot(1), want: "GPU-0"},
		"by MPS":                   {cfg: enforced(EnforceMPS), snap: withReserved(1), want: "GPU-0=70/10 mps"},
		"by the driver": {
			cfg: enforced(EnforceAuto), snap: withReserved(1), caps: caps(""), examined: true,
			want: "GPU-0=70/10 driver",
		},
		"not by the driver": {
			cfg: enforced(EnforceDriver), snap: withReserved(1), caps: caps("too old"), examined: true,
			want: "GPU-0=70/10 none", reason: "too old",
		},
		"required": {
			cfg: enforced(EnforceDriver, require), snap: withReserved(1), caps: caps("too old"), examined: true,
			want: "GPU-0=70/10 none!", reason: "too old",
		},
		"not examined yet": {
			cfg: enforced(EnforceAuto), snap: withReserved(1), examined: true, want: "GPU-0=70/10 none!",
			reason: "not examined yet",
		},
		"nothing examines": {cfg: enforced(EnforceAuto), snap: withReserved(1), want: "GPU-0=70/10 none", reason: "nothing examines"},
		"MIG devices by the driver": {
			cfg: enforced(EnforceAuto), snap: partitioned("3g.40gb"), examined: true,
			want: "GPU-0 MIG-0-0:3g.40gb=30/10 none",
		},
	} {
		t.Run(name, func(t *testing.T) {
			selected, warnings := c.cfg.SelectDevices(c.snap, c.caps, c.examined)
			var got []string
			for _, s := range selected {
				text := string(s.State.Device.ID)
				if s.Profile != "" {
					text += ":" + s.Profile
				}
				if m := s.Memory; m != nil {
					text += fmt.Sprintf("=%d/%d %s", m.Offered>>30, m.Unit>>30, m.Enforcement)
					if m.Blocked != "" {
						text += "!"
					}
					if len(got) == 0 && (!strings.Contains(m.Reason, c.reason) || (m.Reason == "") != (c.reason == "")) {
						t.Errorf("reason %q, want %q", m.Reason, c.reason)
					}
				}
				got = append(got, text)
			}
			if text := strings.Join(got, " "); text != c.want {
				t.Errorf("got  %s\nwant %s", text, c.want)
			}
			if !slices.EqualFunc(warnings, c.warnings, strings.Contains) {
				t.Errorf("warnings %q, want %q", warnings, c.warnings)
			}
		})
	}
}
