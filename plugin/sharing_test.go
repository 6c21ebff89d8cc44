package plugin

import (
	"fmt"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
)

func TestLayoutOfSharing(t *testing.T) {
	share := func(resources ...SharedResource) func(*Config) {
		return func(c *Config) { c.Sharing.TimeSlicing.Resources = resources }
	}
	rename := func(c *Config) { c.Sharing.TimeSlicing.RenameByDefault = true }
	two := partitioned(whole, whole)
	const all = "GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1"
	checkLayouts(t, []layoutCase{
		{"all", configured(sharedBy(2)), two, "nvidia.com/gpu: " + all, nil},
		{"renamed by default", configured(rename, sharedBy(2)), two, "nvidia.com/gpu.shared: " + all, nil},
		{
			"shared and whole", configured(share(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}, Rename: "a.com/s"})), two,
			"a.com/s: GPU-0::0 GPU-0::1; nvidia.com/gpu: GPU-1", nil,
		},
		{
			"shared and whole under one name", configured(share(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"GPU-1"}})), two,
			"nvidia.com/gpu: GPU-0 GPU-1::0 GPU-1::1", nil,
		},
		{
			"first match applies",
			configured(share(SharedResource{Name: gpu, Replicas: 3, Devices: []string{"11:00.0"}}, SharedResource{Name: gpu, Replicas: 2})), two,
			"nvidia.com/gpu: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 GPU-1::2", nil,
		},
		{
			"MIG devices", configured(rename, share(SharedResource{Name: migResource, Replicas: 2}), func(c *Config) { c.MIGStrategy = MIGMixed }),
			partitioned("1g.10gb 3g.40gb", whole),
			"nvidia.com/gpu: GPU-1; nvidia.com/mig-1g.10gb.shared: MIG-0-0::0 MIG-0-0::1; nvidia.com/mig-3g.40gb: MIG-0-1", nil,
		},
		{
			"strategy single", configured(sharedBy(2), func(c *Config) { c.MIGStrategy = MIGSingle }), partitioned("1g.10gb"),
			"nvidia.com/gpu: MIG-0-0::0 MIG-0-0::1", nil,
		},
		{
			"resource by model", configured(share(SharedResource{Name: "a.com/h", Replicas: 2}), func(c *Config) {
				c.Resources = []ResourceRule{{"*h100*", "a.com/h"}}
			}), two, "a.com/h: " + all, nil,
		},
	})
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
		if want := fmt.Sprintf("GPU-%d::%d", parent, i%11); d.ID != want || deviceid.Parse(d.ID).Device() != health.DeviceID(id(parent)) {
			t.Errorf("%d is %s of %s, want %s", i, d.ID, deviceid.Parse(d.ID).Device(), want)
		}
		if (d.Health == "Healthy") != (parent == 0) || d.Topology.Nodes[0].ID != int64(parent) {
			t.Errorf("%s is %s on node %v", d.ID, d.Health, d.Topology)
		}
	}
	longest := "MIG-09ee17f8-f59d-55e2-a8b5-d8d2ee1b0a67" + "::" + fmt.Sprint(maxReplicas-1)
	if len(longest) > 63 { // the kubelet's limit
		t.Errorf("%s has %d bytes", longest, len(longest))
	}
}
