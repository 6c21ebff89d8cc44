package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
)

// layoutCase is a configuration and a snapshot with their layout.
type layoutCase struct {
	name     string
	cfg      Config
	snap     *health.Snapshot
	want     string   // "nvidia.com/gpu: GPU-0 GPU-1; a.com/b: GPU-2"
	problems []string // data in each warning, and then in the error
}

// checkLayouts checks each layout, for the devices in order and in reverse order.
func checkLayouts(t *testing.T, cases []layoutCase) {
	t.Helper()
	for _, c := range cases {
		if err := c.cfg.Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		reversed := *c.snap
		reversed.Devices = slices.Clone(c.snap.Devices)
		slices.Reverse(reversed.Devices)
		for _, snap := range []*health.Snapshot{c.snap, &reversed} {
			l := newLayout(layoutInput{cfg: &c.cfg, snap: snap})
			var resources []string
			for _, r := range l.resources {
				resources = append(resources, r.Name+": "+strings.Join(all(r), " "))
			}
			if got := strings.Join(resources, "; "); got != c.want {
				t.Errorf("%s:\ngot  %s\nwant %s", c.name, got, c.want)
			}
			problems := l.warnings
			if l.err != "" {
				problems = append(problems, l.err)
			}
			if !slices.EqualFunc(problems, c.problems, strings.Contains) {
				t.Errorf("%s: problems %q, want %q", c.name, problems, c.problems)
			}
		}
	}
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
		{"unhealthy", with(snapshot(2), 1, health.Unhealthy), []*pluginapi.Device{
			device("GPU-0", "Healthy", 0),
			device("GPU-1", "Unhealthy", 1),
		}},
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

func TestLayoutIncludeAndExclude(t *testing.T) {
	snap := partitioned(whole, whole, whole)
	snap.Devices[2].Device.Model = "NVIDIA L4"
	selected := func(include, exclude []string) Config {
		return configured(func(c *Config) { c.Include, c.Exclude = include, exclude })
	}
	checkLayouts(t, []layoutCase{
		{"all", selected(nil, nil), snap, "nvidia.com/gpu: GPU-0 GPU-1 GPU-2", nil},
		{"include", selected([]string{"*L4*", "0"}, nil), snap, "nvidia.com/gpu: GPU-0 GPU-2", nil},
		{"exclude", selected(nil, []string{"11:00.0"}), snap, "nvidia.com/gpu: GPU-0 GPU-2", nil},
		{"both", selected([]string{"*H100*"}, []string{"GPU-0"}), snap, "nvidia.com/gpu: GPU-1", nil},
		{"none", selected([]string{"7"}, nil), snap, "", []string{"plugin.include"}},
	})
}

func benchmarkLayout(b *testing.B, cfg Config, snap *health.Snapshot, devices int) {
	b.ReportAllocs()
	for b.Loop() {
		n := 0
		for _, r := range Layout(cfg, snap) {
			n += r.units()
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
	seven := strings.Repeat("1g.10gb ", 7)
	benchmarkLayout(b, cfg, partitioned(seven, seven, seven, seven, seven, seven, seven, seven), 56)
}

// FuzzReplicas checks that the IDs of replicas are numbered and resolve to their device.
func FuzzReplicas(f *testing.F) {
	for _, n := range []uint16{0, 1, 8, 9, 10, 11, 100, 999, 1000} {
		f.Add("GPU-6f1a1b2c", n)
	}
	f.Add("x", uint16(101))
	f.Fuzz(func(t *testing.T, uuid string, n uint16) {
		replicas := int(n)%maxReplicas + 1
		if uuid == "" || strings.Contains(uuid+":", "::") {
			return // no driver has such a device
		}
		snap := snapshot(2)
		snap.Devices[1].Device.ID = health.DeviceID(uuid)
		r := findResource(Layout(configured(sharedBy(replicas)), snap), gpu)
		if r.units() != 2*replicas {
			t.Fatalf("%d replicas of two devices, want %d of each", r.units(), replicas)
		}
		for i, u := range unitsOf(r) {
			device := snap.Devices[i/replicas].Device.ID
			if want := fmt.Sprintf("%s::%d", device, i%replicas); u.text() != want || u.State.Device.ID != device ||
				deviceid.Parse(u.text()).Device() != device {
				t.Errorf("%q of %s resolves to %q, want %q", u.text(), u.State.Device.ID, deviceid.Parse(u.text()).Device(), want)
			}
			if same, ok := r.unit(u.text()); !ok || same != u {
				t.Errorf("%q is found as %+v", u.text(), same)
			}
		}
	})
}
