package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// largestNode returns 16 GPUs with seven MIG devices each. The UUIDs are as long as the driver's.
func largestNode() *health.Snapshot {
	seven := strings.TrimSpace(strings.Repeat("1g.10gb ", 7))
	snap := partitioned(slices.Repeat([]string{seven}, 16)...)
	uuid := func(id health.DeviceID) health.DeviceID {
		if id == "" {
			return ""
		}
		kind, rest, _ := strings.Cut(string(id), "-")
		return health.DeviceID(fmt.Sprintf("%s-09ee17f8-f59d-55e2-a8b5-%012s", kind, strings.ReplaceAll(rest, "-", "c")))
	}
	for i := range snap.Devices {
		d := &snap.Devices[i].Device
		d.ID, d.Parent, d.NUMA = uuid(d.ID), uuid(d.Parent), []int{d.Index / 8}
	}
	return snap
}

// unhealthyCopy returns the snapshot with all devices unhealthy.
func unhealthyCopy(snap *health.Snapshot) *health.Snapshot {
	bad := *snap
	bad.Devices = slices.Clone(snap.Devices)
	for i := range bad.Devices {
		bad.Devices[i].Verdict.State = health.Unhealthy
	}
	return &bad
}

// entries returns a configuration in which each entry without a number of replicas has n.
func entries(all ...SharedResource) func(n int) Config {
	return func(n int) Config {
		return configured(func(c *Config) {
			c.MIGStrategy = MIGMixed
			c.Sharing.TimeSlicing.Resources = slices.Clone(all)
			for i := range all {
				if r := &c.Sharing.TimeSlicing.Resources[i]; r.Replicas == 0 {
					r.Replicas = n
				}
			}
		})
	}
}

// largestList returns the number of replicas that an error of the layout suggests. The error must have one text per key.
func largestList(t *testing.T, err, resource string, keys []string) (largest int) {
	t.Helper()
	texts := strings.Split(err, "; ")
	for i, text := range texts {
		key, rest, _ := strings.Cut(text, ".replicas: ")
		if _, scanErr := fmt.Sscanf(rest, "expected at most %d,", &largest); scanErr != nil || len(texts) != len(keys) ||
			key != "plugin.sharing.timeSlicing.resources"+keys[i] || !strings.Contains(rest, "found 1000") ||
			!strings.Contains(rest, "at most 32768 device IDs of "+resource) {
			t.Fatalf("%q, want the keys %v: %v", err, keys, scanErr)
		}
	}
	return largest
}

// maxListBytes is the largest list that the kubelet receives: see maxIDs.
const maxListBytes = 4 << 20

// The number in the error fits, with every device unhealthy. The next does not, if all entries have that number.
func TestLayoutRefusesTooLargeList(t *testing.T) {
	const mig1, mig3 = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
	withOther := largestNode()
	withOther.Devices[len(withOther.Devices)-1].Device.Profile = "3g.40gb"
	withOther.Devices[len(withOther.Devices)-1].Device.Memory = migMemory["3g.40gb"] << 20
	manyNodes := largestNode()
	for i := range manyNodes.Devices {
		manyNodes.Devices[i].Device.NUMA = []int{0, 1, 2, 3, 4, 5, 6, 7, 200, -1}
	}
	for _, c := range []struct {
		name string
		cfg  func(n int) Config
		snap *health.Snapshot
		keys []string // in the error
		left []string // resources that are offered nevertheless
	}{
		{"all devices", entries(SharedResource{Name: mig1}), largestNode(), []string{"[0]"}, nil},
		{"other resource", entries(SharedResource{Name: mig1}), withOther, []string{"[0]"}, []string{mig3}},
		{"many NUMA nodes", entries(SharedResource{Name: mig1}), manyNodes, []string{"[0]"}, nil},
		{
			"a few of the devices", entries(SharedResource{Name: mig1, Replicas: 3, Devices: []string{"0:0", "1"}}, SharedResource{Name: mig1}),
			largestNode(),
			[]string{"[1]"},
			nil,
		},
		{
			"some not shared", entries(SharedResource{Name: mig1, Devices: strings.Fields("0 1 2 3 4 5 6 7 8 9 10")}), largestNode(),
			[]string{"[0]"},
			nil,
		},
		{
			"several entries of one resource", entries(SharedResource{Name: mig1, Devices: []string{"0", "1", "2"}}, SharedResource{Name: mig1}),
			largestNode(),
			[]string{"[0]", "[1]"},
			nil,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := c.cfg(maxReplicas)
			if err := cfg.Validate(); err != nil {
				t.Fatal(err)
			}
			l := newLayout(layoutInput{cfg: &cfg, snap: c.snap})
			var names []string
			for _, r := range l.resources {
				names = append(names, r.Name)
			}
			if !slices.Equal(names, c.left) {
				t.Errorf("offered %v, want %v", names, c.left)
			}
			largest := largestList(t, l.err, mig1, c.keys)
			for n, fits := range map[int]bool{largest: true, largest + 1: len(c.keys) < len(cfg.Sharing.TimeSlicing.Resources)} {
				cfg := c.cfg(n)
				r := findResource(newLayout(layoutInput{cfg: &cfg, snap: unhealthyCopy(c.snap)}).resources, mig1)
				size := proto.Size(&pluginapi.ListAndWatchResponse{Devices: r.message()})
				if (r.units() > 0) != fits || size > maxListBytes {
					t.Errorf("%d replicas: %d devices with %d bytes", n, r.units(), size)
				}
				if fits && r.units() < maxIDs*9/10 && len(c.keys) == len(cfg.Sharing.TimeSlicing.Resources) {
					t.Errorf("%d replicas have only %d IDs", n, r.units())
				}
			}
		})
	}
}

// A list that the kubelet could not receive is not registered; the other resources are. A fitting number takes effect at
// once, and the next one that does not fit withdraws the resource.
func TestTooLargeListIsNotRegistered(t *testing.T) {
	t.Parallel()
	snap := largestNode()
	last := &snap.Devices[len(snap.Devices)-1].Device
	last.Profile, last.Memory = "3g.40gb", migMemory["3g.40gb"]<<20
	h := newHarness(t, snap)
	replicas := func(n int) func(*Config) {
		return func(c *Config) {
			c.MIGStrategy, c.Sharing.TimeSlicing.Resources = MIGMixed, []SharedResource{{Name: migResource, Replicas: n}}
		}
	}
	tooLarge := func(s Status) bool {
		return strings.Contains(s.Err, "plugin.sharing.timeSlicing.resources[0].replicas") && len(s.Resources) == 1 && s.Resources[0].Registered
	}
	h.setConfig(replicas(1000))
	k := h.kubelet()
	h.run()
	s := h.waitPlugin(tooLarge)
	if s.Resources[0].Name != "nvidia.com/mig-3g.40gb" {
		t.Errorf("%+v", s)
	}
	h.setConfig(replicas(2))
	h.waitResource(k, migResource, listed(222, 222))
	h.waitPlugin(func(s Status) bool { return s.Err == "" })
	h.setConfig(replicas(1000))
	h.waitResource(k, migResource, disconnected)
	h.waitPlugin(tooLarge)
	h.waitLog(msgNothing, "plugin.sharing", 2)
}
