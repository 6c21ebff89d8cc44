package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestLayoutOfSharing(t *testing.T) {
	share := func(resources ...SharedResource) func(*Config) {
		return func(c *Config) { c.Sharing.TimeSlicing.Resources = resources }
	}
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	rename := func(c *Config) { c.Sharing.TimeSlicing.RenameByDefault = true }
	whole := []string(nil)
	two := partitioned(whole, whole)
	for _, c := range []struct {
		name   string
		cfg    Config
		snap   *health.Snapshot
		want   []string
		warned string // data in the warning
	}{
		{
			"all", configured(share(SharedResource{Name: gpu, Replicas: 2})), two,
			[]string{"nvidia.com/gpu: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1"},
			"",
		},
		{
			"renamed by default", configured(rename, share(SharedResource{Name: gpu, Replicas: 2})), two,
			[]string{"nvidia.com/gpu.shared: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1"},
			"",
		},
		{
			"shared and whole", configured(share(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}, Rename: "a.com/s"})), two,
			[]string{"a.com/s: GPU-0::0 GPU-0::1", "nvidia.com/gpu: GPU-1"},
			"",
		},
		{
			"shared and whole under one name", configured(share(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"GPU-1"}})), two,
			[]string{"nvidia.com/gpu: GPU-0 GPU-1::0 GPU-1::1"},
			"nvidia.com/gpu ",
		},
		{
			"first match applies",
			configured(share(SharedResource{Name: gpu, Replicas: 3, Devices: []string{"11:00.0"}}, SharedResource{Name: gpu, Replicas: 2})), two,
			[]string{"nvidia.com/gpu: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 GPU-1::2"},
			"",
		},
		{
			"MIG devices", configured(mixed, rename, share(SharedResource{Name: "nvidia.com/mig-1g.10gb", Replicas: 2})),
			partitioned([]string{"1g.10gb", "3g.40gb"}, whole),
			[]string{"nvidia.com/gpu: GPU-1", "nvidia.com/mig-1g.10gb.shared: MIG-0-0::0 MIG-0-0::1", "nvidia.com/mig-3g.40gb: MIG-0-1"},
			"",
		},
		{
			"strategy single", configured(func(c *Config) { c.MIGStrategy = MIGSingle }, share(SharedResource{Name: gpu, Replicas: 2})),
			partitioned([]string{"1g.10gb"}),
			[]string{"nvidia.com/gpu: MIG-0-0::0 MIG-0-0::1"},
			"",
		},
		{
			"resource by model", configured(share(SharedResource{Name: "a.com/h", Replicas: 2}), func(c *Config) {
				c.Resources = []ResourceRule{{"*h100*", "a.com/h"}}
			}), two, []string{"a.com/h: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1"}, "",
		},
	} {
		if err := c.cfg.Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		l := newLayout(layoutInput{cfg: &c.cfg, snap: c.snap})
		if got := lines(l.resources); !slices.Equal(got, c.want) {
			t.Errorf("%s:\ngot  %q\nwant %q", c.name, got, c.want)
		}
		if got := strings.Join(l.warnings, ""); (c.warned == "") != (got == "") || !strings.Contains(got, c.warned) {
			t.Errorf("%s: warnings %q, want %q", c.name, got, c.warned)
		}
	}
}

// Replicas have the health and the NUMA nodes of their device.
func TestReplicasFollowDevice(t *testing.T) {
	r := findResource(Layout(configured(sharedBy(11)), with(snapshot(2), 1, health.Unhealthy)), gpu)
	list := r.message()
	if len(list) != 22 || r.healthy() != 11 {
		t.Fatalf("%d devices, %d healthy", len(list), r.healthy())
	}
	for i, d := range list {
		parent := i / 11
		if want := fmt.Sprintf("GPU-%d::%d", parent, i%11); d.ID != want || deviceOf(d.ID) != health.DeviceID(id(parent)) {
			t.Errorf("%d is %s of %s, want %s", i, d.ID, deviceOf(d.ID), want)
		}
		if (d.Health == "Healthy") != (parent == 0) || d.Topology.Nodes[0].ID != int64(parent) {
			t.Errorf("%s is %s on node %v", d.ID, d.Health, d.Topology)
		}
	}
	longest := "MIG-09ee17f8-f59d-55e2-a8b5-d8d2ee1b0a67" + replicaSep + fmt.Sprint(maxReplicas-1)
	if len(longest) > 63 { // the kubelet's limit
		t.Errorf("%s has %d bytes", longest, len(longest))
	}
}
