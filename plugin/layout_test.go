package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// lines formats a layout with one line per resource: "nvidia.com/gpu: GPU-0 GPU-1".
func lines(resources []Resource) (out []string) {
	for _, r := range resources {
		out = append(out, r.Name+": "+strings.Join(all(r), " "))
	}
	return out
}

func TestLayoutDevices(t *testing.T) {
	mig := health.DeviceState{Device: health.Device{ID: "MIG-1", Parent: "GPU-0", Kind: health.KindMIG}}
	two := snapshot(2)
	two.Devices = []health.DeviceState{two.Devices[1], two.Devices[0], mig}
	two.Devices[1].Device.MIGMode = true
	two.Devices[1].Device.NUMA = []int{0, 1}
	two.Devices[0].Device.NUMA = []int{-1}
	device := func(id, health string, numa ...int64) *pluginapi.Device {
		d := &pluginapi.Device{ID: id, Health: health}
		for _, n := range numa {
			if d.Topology == nil {
				d.Topology = &pluginapi.TopologyInfo{}
			}
			d.Topology.Nodes = append(d.Topology.Nodes, &pluginapi.NUMANode{ID: n})
		}
		return d
	}
	never := snapshot(2)
	never.At = time.Time{}
	for _, c := range []struct {
		name string
		snap *health.Snapshot
		want []*pluginapi.Device // nil: no resource
	}{
		{"no snapshot", nil, nil},
		{"never polled", never, nil},
		{"no GPUs", snapshot(0), nil},
		{"by index, GPUs only, in any MIG mode", two, []*pluginapi.Device{device("GPU-0", "Healthy", 0, 1), device("GPU-1", "Healthy")}},
		{"unknown", with(snapshot(1), 0, health.Unknown), []*pluginapi.Device{device("GPU-0", "Healthy", 0)}},
		{"degraded", with(snapshot(1), 0, health.Degraded), []*pluginapi.Device{device("GPU-0", "Healthy", 0)}},
		{"unhealthy", with(snapshot(2), 1, health.Unhealthy), []*pluginapi.Device{device("GPU-0", "Healthy", 0), device("GPU-1", "Unhealthy", 1)}},
	} {
		resources := Layout(Config{Enabled: true, Resource: gpu, KubeletDir: "/k"}, c.snap)
		if c.want == nil {
			if len(resources) != 0 {
				t.Errorf("%s: %+v, want no resource", c.name, resources)
			}
			continue
		}
		if len(resources) != 1 || resources[0].Name != gpu || !sameMessage(resources[0].message(), c.want) {
			t.Errorf("%s: %v, want %v", c.name, resources, c.want)
		}
	}
}

func TestSameMessage(t *testing.T) {
	base := snapshot(2)
	list := func(s *health.Snapshot) []*pluginapi.Device {
		return findResource(Layout(DefaultConfig(), s), gpu).message()
	}
	numa := with(base, 1, health.Healthy)
	numa.Devices[1].Device.NUMA = []int{0}
	values := with(base, 1, health.Degraded)
	values.Devices[1].Sample.Values = map[health.Field]float64{health.FieldGPUTemp: 40}
	for name, c := range map[string]struct {
		snap *health.Snapshot
		same bool
	}{
		"values and degraded": {values, true},
		"unhealthy":           {with(base, 1, health.Unhealthy), false},
		"other NUMA node":     {numa, false},
		"one more":            {snapshot(3), false},
		"none":                {snapshot(0), false},
	} {
		if got := sameMessage(list(base), list(c.snap)); got != c.same {
			t.Errorf("%s: same = %v", name, got)
		}
	}
}

func TestLayoutIncludeAndExclude(t *testing.T) {
	snap := partitioned(nil, nil, nil)
	snap.Devices[2].Device.Model = "NVIDIA L4"
	for _, c := range []struct {
		include, exclude []string
		want             string
	}{
		{nil, nil, "nvidia.com/gpu: GPU-0 GPU-1 GPU-2"},
		{[]string{"*L4*", "0"}, nil, "nvidia.com/gpu: GPU-0 GPU-2"},
		{nil, []string{"11:00.0"}, "nvidia.com/gpu: GPU-0 GPU-2"},
		{[]string{"*H100*"}, []string{"GPU-0"}, "nvidia.com/gpu: GPU-1"},
		{[]string{"7"}, nil, ""},
	} {
		cfg := configured(func(cfg *Config) { cfg.Include, cfg.Exclude = c.include, c.exclude })
		l := newLayout(layoutInput{cfg: &cfg, snap: snap})
		if got := strings.Join(lines(l.resources), "\n"); got != c.want || (got == "") != (l.err != "") {
			t.Errorf("include %q, exclude %q: %q and %q, want %q", c.include, c.exclude, got, l.err, c.want)
		}
	}
}

func TestLayoutIsDeterministic(t *testing.T) {
	cfg := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
	snap := partitioned([]string{"3g.40gb", "1g.10gb", "1g.10gb"}, nil, []string{"1g.10gb", "2g.20gb"})
	want := lines(Layout(cfg, snap))
	reversed := *snap
	reversed.Devices = slices.Clone(snap.Devices)
	slices.Reverse(reversed.Devices)
	if got := lines(Layout(cfg, &reversed)); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func benchmarkLayout(b *testing.B, cfg Config, snap *health.Snapshot, devices int) {
	b.ReportAllocs()
	for b.Loop() {
		n := 0
		for _, r := range Layout(cfg, snap) {
			n += len(r.Devices)
		}
		if n != devices {
			b.Fatal(n)
		}
	}
}

func BenchmarkLayout8(b *testing.B) { benchmarkLayout(b, DefaultConfig(), snapshot(8), 8) }

func BenchmarkLayout8x10Replicas(b *testing.B) {
	benchmarkLayout(b, configured(sharedBy(10)), snapshot(8), 80)
}

func BenchmarkLayout8x7MIG(b *testing.B) {
	cfg := configured(func(c *Config) { c.MIGStrategy = MIGMixed })
	seven := slices.Repeat([]string{"1g.10gb"}, 7)
	benchmarkLayout(b, cfg, partitioned(seven, seven, seven, seven, seven, seven, seven, seven), 56)
}

// FuzzReplicas checks that the IDs of replicas resolve to their device.
func FuzzReplicas(f *testing.F) {
	f.Add("GPU-6f1a1b2c", uint16(2))
	f.Add("GPU-6f1a1b2c", uint16(1000))
	f.Add("MIG-a", uint16(11))
	f.Add("x", uint16(101))
	f.Fuzz(func(t *testing.T, uuid string, n uint16) {
		replicas := int(n)%maxReplicas + 1
		if uuid == "" || strings.Contains(uuid+":", replicaSep) {
			return // no driver has such a device
		}
		snap := snapshot(2)
		snap.Devices[1].Device.ID = health.DeviceID(uuid)
		r := findResource(Layout(configured(sharedBy(replicas)), snap), gpu)
		if len(r.Devices) != 2*replicas {
			t.Fatalf("%d replicas of two devices, want %d of each", len(r.Devices), replicas)
		}
		unique := make(map[string]bool, len(r.Devices))
		for _, d := range r.Devices {
			if uuid != id(0) && unique[d.ID] {
				t.Fatalf("duplicate %q", d.ID)
			}
			unique[d.ID] = true
			if deviceOf(d.ID) != d.State.Device.ID {
				t.Errorf("%q resolves to %q, want %q", d.ID, deviceOf(d.ID), d.State.Device.ID)
			}
		}
	})
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
			t.Errorf("%d IDs, want %d", len(got), n)
		}
	}
}
