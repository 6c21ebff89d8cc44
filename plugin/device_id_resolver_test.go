package plugin

import (
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestResolver(t *testing.T) {
	snap := snapshot(2)
	snap.Devices[0].Device.Minor, snap.Devices[1].Device.Minor = 1, 0 // not the index
	for gi := 1; gi < 3; gi++ {
		snap.Devices = append(snap.Devices, health.DeviceState{Device: health.Device{
			ID: health.DeviceID("MIG-" + id(gi)), Parent: "GPU-0", Kind: health.KindMIG, Index: 0, Minor: 1, GI: gi, MIGIndex: gi - 1,
		}})
	}
	slices.Reverse(snap.Devices) // in any order
	cfg := DefaultConfig()
	cfg.Resource = "example.com/card"
	disabled := cfg
	disabled.Enabled = false // another plugin serves the resource
	for _, c := range []struct {
		resource, id string
		want         health.DeviceID // empty: no GPU
	}{
		{gpu, "GPU-0", "GPU-0"},
		{gpu, "GPU-1::7", "GPU-1"},
		{gpu, "GPU-gone", "GPU-gone"},
		{"nvidia.com/mig-1g.10gb", "MIG-GPU-1", "MIG-GPU-1"},
		{"nvidia.com/mig-1g.10gb.shared", "MIG-GPU-2::0", "MIG-GPU-2"},
		{"other.com/anything", "GPU-0", "GPU-0"},
		{gpu, "0", "GPU-0"},
		{gpu, "1::3", "GPU-1"},
		{gpu, "7", ""},
		{gpu, "0:0", "MIG-GPU-1"}, // as runtimeID counts
		{gpu, "0:1", "MIG-GPU-2"},
		{"nvidia.com/mig-1g.10gb.shared", "0:1::3", "MIG-GPU-2"},
		{gpu, "0:2", ""},
		{gpu, "1:0", ""},
		{gpu, "0:", ""},
		{gpu, ":1", ""},
		{gpu, "0:-1", ""},
		{gpu, "0:1:0", ""},
		{"intel.com/qat", "0:1", ""},
		{gpu, "nvidia0", "GPU-1"},
		{gpu, "nvidia1", "GPU-0"},
		{gpu, "nvidia1/vgpu3", "GPU-0"},
		{gpu, "nvidia1/gi2", "MIG-GPU-2"},
		{gpu, "nvidia1/gi1/vgpu0", "MIG-GPU-1"},
		{gpu, "nvidia0/gi1", ""},
		{gpu, "nvidia9", ""},
		{gpu, "nvidia99999999999999999999", ""},
		{gpu, "nvidia1/gi99999999999999999999", ""},
		{gpu, "nvidiactl", ""},
		{"example.com/card", "1", "GPU-1"}, // configured
		{"intel.com/qat", "0", ""},
		{gpu, "", ""},
	} {
		resp := &podsapi.ListPodResourcesResponse{PodResources: []*podsapi.PodResources{{
			Namespace: "ns", Name: "pod", Containers: []*podsapi.ContainerResources{{Name: "c", Devices: []*podsapi.ContainerDevices{
				// One entry for each NUMA node.
				{ResourceName: c.resource, DeviceIds: []string{c.id}}, {ResourceName: c.resource, DeviceIds: []string{c.id}},
			}}},
		}}}
		want := map[health.DeviceID][]podresources.Holder{}
		if c.want != "" {
			want[c.want] = []podresources.Holder{{Namespace: "ns", Pod: "pod", Container: "c", Resource: c.resource, DeviceID: c.id}}
		}
		for _, cfg := range []Config{cfg, disabled} {
			if got := podresources.NewHolders(time.Time{}, resp, podresources.Resolvers{Resource: newResolver(cfg, snap)}).By; !reflect.DeepEqual(
				got, want) {
				t.Errorf("%s %q: %v, want %v", c.resource, c.id, got, want)
			}
		}
	}
	if got := podresources.NewHolders(time.Time{}, nil, podresources.Resolvers{Resource: newResolver(cfg, nil)}).By; got == nil ||
		len(got) != 0 {
		t.Errorf("without an answer: %v", got)
	}
	if _, ok := newResolver(cfg, nil)(gpu, "0"); ok {
		t.Error("an index resolves without a snapshot")
	}
}

// FuzzResolver checks the devices behind the IDs of a pod-resources response.
func FuzzResolver(f *testing.F) {
	for _, id := range []string{
		"GPU-1", "GPU-1::3", "GPU-", "GPU-::", "MIG-0-1", "MIG-0-1::0", "0", "1::2", "-1", "+1", "01", "9223372036854775808", "0x1", "0:0",
		"nvidia0", "nvidia0/gi1", "nvidia0/gi7/vgpu2", "nvidia0/gi99999999999999999999", "nvidia0/gi7\n", "nvidia-1", "nvidia٣", "::", "",
	} {
		f.Add(gpu, id)
		f.Add("example.com/fpga", id)
	}
	snap := partitioned("1g.10gb 2g.20gb", whole)
	f.Fuzz(func(t *testing.T, resource, id string) {
		for _, s := range []*health.Snapshot{nil, snap} {
			resolve := newResolver(configured(func(c *Config) { c.MIGStrategy = MIGMixed }), s)
			device, ok := resolve(resource, id)
			if again, same := resolve(resource, id); again != device || same != ok {
				t.Fatalf("%q resolves to %q, then to %q", id, device, again)
			}
			checkResolved(t, s, resource, id, device, ok)
			if strings.HasSuffix(id, ":") {
				return // no device has such an ID
			}
			if replica, same := resolve(resource, id+"::"+"0"); replica != device || same != ok {
				t.Errorf("%q resolves to %q, and its replica to %q", id, device, replica)
			}
			by := podresources.NewHolders(time.Time{},
				&podsapi.ListPodResourcesResponse{PodResources: []*podsapi.PodResources{{Containers: []*podsapi.ContainerResources{
					{Devices: []*podsapi.ContainerDevices{{ResourceName: resource, DeviceIds: []string{id, id}}}},
				}}}}, podresources.Resolvers{Resource: resolve}).By
			if holders := by[device]; ok && (len(by) != 1 || len(holders) != 1 || holders[0].DeviceID != id) || !ok && len(by) != 0 {
				t.Errorf("%q of %q has the holders %v", id, resource, by)
			}
		}
	})
}

var (
	gkeID   = regexp.MustCompile(`^nvidia[0-9]+(/gi[0-9]+)?(/vgpu[0-9]+)?$`)
	indexID = regexp.MustCompile(`^([+-]?[0-9]+|[0-9]+:[0-9]+)$`)
)

// checkResolved checks the device behind an ID: a UUID resolves to itself, another ID only to a device of the snapshot.
func checkResolved(t *testing.T, snap *health.Snapshot, resource, id string, device health.DeviceID, ok bool) {
	t.Helper()
	byUUID := strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-")
	base, _, _ := strings.Cut(id, "::")
	switch {
	case !ok && (device != "" || byUUID):
		t.Errorf("%q does not resolve, but returns %q", id, device)
	case byUUID && string(device) != base:
		t.Errorf("%q resolves to %q", id, device)
	case ok && !byUUID:
		if snap == nil || !slices.Contains(snap.DeviceIDs(), device) {
			t.Errorf("%q resolves to %q, which this node lacks", id, device)
		}
		if !strings.HasPrefix(resource, "nvidia.com/") {
			t.Errorf("%q of %q resolves to a GPU", id, resource)
		}
		if !gkeID.MatchString(base) && !indexID.MatchString(base) {
			t.Errorf("%q resolves to %q", id, device)
		}
	}
}
