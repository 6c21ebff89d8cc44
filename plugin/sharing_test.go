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
	both := func(changes ...func(*Config)) Config {
		return configured(func(c *Config) {
			for _, change := range changes {
				change(c)
			}
		})
	}
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	rename := func(c *Config) { c.Sharing.TimeSlicing.RenameByDefault = true }
	whole := []string(nil)
	two := partitioned(whole, whole)
	for _, c := range []struct {
		name    string
		cfg     Config
		snap    *health.Snapshot
		want    []string
		warning string
	}{
		{
			"all", both(share(SharedResource{Name: gpu, Replicas: 2})), two,
			[]string{"nvidia.com/gpu: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1"},
			"",
		},
		{
			"renamed by default", both(rename, share(SharedResource{Name: gpu, Replicas: 2})), two,
			[]string{"nvidia.com/gpu.shared: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1"},
			"",
		},
		{
			"shared and whole", both(share(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"0"}, Rename: "a.com/s"})), two,
			[]string{"a.com/s: GPU-0::0 GPU-0::1", "nvidia.com/gpu: GPU-1"},
			"",
		},
		{
			"shared and whole under one name", both(share(SharedResource{Name: gpu, Replicas: 2, Devices: []string{"GPU-1"}})), two,
			[]string{"nvidia.com/gpu: GPU-0 GPU-1::0 GPU-1::1"},
			"nvidia.com/gpu has shared and whole devices",
		},
		{
			"the first that fits counts",
			both(share(SharedResource{Name: gpu, Replicas: 3, Devices: []string{"11:00.0"}}, SharedResource{Name: gpu, Replicas: 2})), two,
			[]string{"nvidia.com/gpu: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1 GPU-1::2"},
			"",
		},
		{
			"MIG devices", both(mixed, rename, share(SharedResource{Name: "nvidia.com/mig-1g.10gb", Replicas: 2})),
			partitioned([]string{"1g.10gb", "3g.40gb"}, whole),
			[]string{"nvidia.com/gpu: GPU-1", "nvidia.com/mig-1g.10gb.shared: MIG-0-0::0 MIG-0-0::1", "nvidia.com/mig-3g.40gb: MIG-0-1"},
			"",
		},
		{
			"MIG devices as GPUs", both(func(c *Config) { c.MIGStrategy = MIGSingle }, share(SharedResource{Name: gpu, Replicas: 2})),
			partitioned([]string{"1g.10gb"}),
			[]string{"nvidia.com/gpu: MIG-0-0::0 MIG-0-0::1"},
			"",
		},
		{
			"by a name given by model", both(share(SharedResource{Name: "a.com/h", Replicas: 2}), func(c *Config) {
				c.Resources = []ResourceRule{{"*h100*", "a.com/h"}}
			}), two, []string{"a.com/h: GPU-0::0 GPU-0::1 GPU-1::0 GPU-1::1"}, "",
		},
	} {
		if err := c.cfg.Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		a := arrange(layoutInput{cfg: &c.cfg, snap: c.snap})
		if got := said(a.Resources); !slices.Equal(got, c.want) {
			t.Errorf("%s:\ngot  %q\nwant %q", c.name, got, c.want)
		}
		if got := strings.Join(a.Warnings, ""); c.warning == "" && got != "" || !strings.Contains(got, c.warning) {
			t.Errorf("%s: warned of %q, want %q", c.name, got, c.warning)
		}
	}
}

// An entry that no device comes to is an error: it was written for some.
func TestSharedTwice(t *testing.T) {
	const first = "sharing.timeSlicing.resources[1].name: "
	for _, c := range []struct {
		one, other []string // devices of two entries for one resource
		want       string
	}{
		{nil, nil, first + "nvidia.com/gpu is there twice; name the devices of each, or take one out"},
		{nil, []string{"0"}, first + "sharing.timeSlicing.resources[0] takes all devices of nvidia.com/gpu; put this one before it"},
		{[]string{"0"}, nil, ""},
		{[]string{"0"}, []string{"1"}, ""},
	} {
		cfg := configured(func(cfg *Config) {
			cfg.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 2, Devices: c.one}, {Name: gpu, Replicas: 3, Devices: c.other}}
		})
		if err := cfg.Validate(); c.want == "" && err != nil || c.want != "" && (err == nil || err.Error() != c.want) {
			t.Errorf("%q and %q: %v, want %s", c.one, c.other, err, c.want)
		}
	}
}

// A fault of a GPU is a fault of every replica and of every MIG device, in one message, and NUMA comes with it.
func TestReplicasFollowTheirDevice(t *testing.T) {
	cfg := configured(func(c *Config) { c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 11}} })
	r := find(Layout(cfg, with(snapshot(2), 1, health.Unhealthy)), gpu)
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

func TestReplicaIDs(t *testing.T) {
	var buf []byte
	for _, n := range []int{0, 1, 9, 10, 11, 101} {
		got := slices.Collect(replicaIDs(&buf, "GPU-7", n))
		for i, s := range got {
			if want := fmt.Sprintf("GPU-7::%d", i); s != want {
				t.Errorf("%d of %d is %s", i, n, s)
			}
		}
		if len(got) != n {
			t.Errorf("%d ids, want %d", len(got), n)
		}
	}
}
