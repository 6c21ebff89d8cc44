package plugin

import (
	"fmt"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// A device is written as ID[:PROFILE], followed by "-" if it is not offered, else by its sharing and "x" with its replicas, and by "'" if
// its resource is not the resource of whole devices.
func TestServing(t *testing.T) {
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	snap := partitioned("1g.10gb", whole, whole, whole, whole)
	snap.Devices[4].Verdict = health.Verdict{State: health.Unhealthy} // does not matter
	const nothing = "none: GPU-0 - MIG-0-0:1g.10gb - GPU-1 - GPU-2 - GPU-3 - GPU-4 -"
	for name, c := range map[string]struct {
		cfg  *Config
		want string
	}{
		"no configuration": {nil, nothing},
		"disabled":         {new(configured(mixed, func(c *Config) { c.Enabled = false })), nothing},
		"DRA":              {new(configured(mixed, func(c *Config) { c.API = APIDRA })), nothing},
		"whole":            {new(DefaultConfig()), "none: GPU-0 x1 MIG-0-0:1g.10gb - GPU-1 x1 GPU-2 x1 GPU-3 x1 GPU-4 x1"},
		"shared": {
			new(configured(mixed, func(c *Config) { c.Exclude = []string{"4"} },
				timeSliced(SharedResource{Name: gpu, Replicas: 3, Devices: []string{"1"}}),
				mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"2"}, Rename: "a.com/mps"}), memoryShared("10Gi", "3"))),
			"mixed: GPU-0 - MIG-0-0:1g.10gb x1 GPU-1 timeSlicingx3 GPU-2 mpsx2' GPU-3 memoryx1' GPU-4 -",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var cfg health.Latest[Config]
			if c.cfg != nil {
				cfg.Store(c.cfg)
			}
			p := New(&cfg, &health.Latest[health.Snapshot]{}, zap.NewNop())
			s := p.Serving(snap)
			got := s.MIGStrategy + ":"
			for _, d := range s.Devices {
				got += " " + string(d.State.Device.ID)
				if d.Profile != "" {
					got += ":" + d.Profile
				}
				if !d.Offered {
					got += " -"
					continue
				}
				if got += fmt.Sprintf(" %sx%d", d.Sharing, d.Replicas); d.Renamed {
					got += "'"
				}
			}
			if got != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
			if s := p.Serving(nil); len(s.Devices) > 0 || s.MIGStrategy != MIGNone {
				t.Errorf("without a snapshot: %+v", s)
			}
		})
	}
}

func TestCheckDevices(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  Config
		want []string // parts of the error
	}{
		"fits": {configured(sharedBy(2)), nil},
		"two kinds": {
			configured(timeSliced(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}), memoryShared("1Gi", "GPU-0")),
			[]string{"both select these: GPU 0"},
		},
		"two faults": {
			configured(timeSliced(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}}), memoryShared("1Gi", "GPU-0"),
				mpsShared(MPSResource{Name: gpu, Replicas: 2, Devices: []string{"1"}, PinnedMemory: "64Gi"})),
			[]string{"both select these: GPU 0", "pinnedMemory: expected at most"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.cfg.CheckDevices(withReserved(2))
			if (err == nil) != (c.want == nil) {
				t.Fatal(err)
			}
			for _, part := range c.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%v, want %q", err, part)
				}
			}
		})
	}
}

func TestProfileSlices(t *testing.T) {
	for profile, want := range map[string]string{"1c.3g.40gb": "3 1", "3g.40gb": "3 3", "1g.10gb+me": "1 1", "7g.80gb": "7 7"} {
		if gi, ci, ok := ProfileSlices(profile); !ok || fmt.Sprint(gi, ci) != want {
			t.Errorf("%q: %d %d %v, want %s", profile, gi, ci, ok, want)
		}
	}
	for _, profile := range []string{"xc.3g.40gb", "3g", "g.40gb", "3g.xgb", ""} {
		if _, _, ok := ProfileSlices(profile); ok {
			t.Errorf("%q is a profile", profile)
		}
	}
}
