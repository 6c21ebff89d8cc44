package plugin

import (
	"regexp"
	"strings"
	"testing"

	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// FuzzDeviceID asks who is behind an id that the kubelet says somebody holds.
func FuzzDeviceID(f *testing.F) {
	for _, id := range []string{
		"GPU-1", "GPU-1::3", "GPU-", "GPU-::", "MIG-0-1", "MIG-0-1::0", "0", "1::2", "-1", "+1", "01", "9223372036854775808", "0x1",
		"nvidia0", "nvidia0/gi1", "nvidia0/gi7/vgpu2", "nvidia0/gi99999999999999999999", "nvidia0/gi7\n", "nvidia-1", "nvidia٣", "::", "",
	} {
		f.Add(gpu, id)
		f.Add("example.com/fpga", id)
	}
	snap := partitioned([]string{"1g.10gb", "2g.20gb"}, nil)
	gke := regexp.MustCompile(`^nvidia[0-9]+(/gi[0-9]+)?(/vgpu[0-9]+)?$`)
	number := regexp.MustCompile(`^[+-]?[0-9]+$`)
	f.Fuzz(func(t *testing.T, resource, id string) {
		for _, s := range []*health.Snapshot{nil, snap} {
			resolve := resolver(configured(func(c *Config) { c.MIGStrategy = MIGMixed }), s)
			device, ok := resolve(resource, id)
			if again, same := resolve(resource, id); again != device || same != ok {
				t.Fatalf("%q is %q, and then %q", id, device, again)
			}
			byUUID := strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-")
			base, _, _ := strings.Cut(id, replicaSep)
			switch {
			case !ok && (device != "" || byUUID):
				t.Errorf("%q is nobody, and %q", id, device)
			case byUUID && string(device) != base:
				t.Errorf("%q is %q", id, device)
			case ok && !byUUID:
				if _, here := search(snap, func(d health.Device) bool { return d.ID == device }); !here || s == nil {
					t.Errorf("%q is %q, which is not on this node", id, device)
				}
				if !strings.HasPrefix(resource, "nvidia.com/") {
					t.Errorf("%q of %q is taken for a GPU of ours", id, resource)
				}
				if !gke.MatchString(base) && !number.MatchString(base) {
					t.Errorf("%q is taken for the id of %q", id, device)
				}
			}
			if strings.HasSuffix(id, ":") {
				return // and no device has this name
			}
			// A replica of it is held by the same.
			if replica, same := resolve(resource, id+replicaSep+"0"); replica != device || same != ok {
				t.Errorf("%q is %q, and a replica of it %q", id, device, replica)
			}
			by := holdersOf(&podsapi.ListPodResourcesResponse{PodResources: []*podsapi.PodResources{{Containers: []*podsapi.ContainerResources{
				{Devices: []*podsapi.ContainerDevices{{ResourceName: resource, DeviceIds: []string{id, id}}}},
			}}}}, resolve)
			if holders := by[device]; ok && (len(by) != 1 || len(holders) != 1 || holders[0].DeviceID != id) || !ok && len(by) != 0 {
				t.Errorf("%q of %q is held by %v", id, resource, by)
			}
		}
	})
}

// FuzzReplicas checks that what is handed out is found again, whatever the devices are called.
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
		cfg := configured(func(c *Config) {
			c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: replicas}}
		})
		r := find(Layout(cfg, snap), gpu)
		if len(r.Devices) != 2*replicas {
			t.Fatalf("%d replicas of two devices, want %d of each", len(r.Devices), replicas)
		}
		seen := make(map[string]bool, len(r.Devices))
		for _, d := range r.Devices {
			if uuid != id(0) && seen[d.ID] {
				t.Fatalf("%q is there twice", d.ID)
			}
			seen[d.ID] = true
			if deviceOf(d.ID) != d.State.Device.ID {
				t.Errorf("%q is behind %q, and of %q", deviceOf(d.ID), d.ID, d.State.Device.ID)
			}
		}
	})
}

// FuzzGlob holds the matching of models and profiles against a regular expression that means the same.
func FuzzGlob(f *testing.F) {
	for _, p := range []string{"*H100*", "NVIDIA ????", "", "*", "**a*", "[a]", "a.c", `\*`, "*é?"} {
		f.Add(p, "NVIDIA H100 80GB HBM3")
	}
	f.Add("*ab*ab", "abab")
	f.Add("?", "é")
	f.Fuzz(func(t *testing.T, pattern, s string) {
		if len(pattern) > 100 || len(s) > 1000 {
			return
		}
		// Bytes as characters, and only A to Z have small letters.
		latin := func(s string) string {
			var b strings.Builder
			for i := range len(s) {
				b.WriteRune(rune(lower(s[i])))
			}
			return b.String()
		}
		expr := strings.NewReplacer(`\*`, `.*`, `\?`, `.`).Replace(regexp.QuoteMeta(latin(pattern)))
		if strings.Contains(pattern, `\`) {
			return // the replacer would take it for its own
		}
		if got, want := glob(pattern, s), regexp.MustCompile(`(?s)^`+expr+`$`).MatchString(latin(s)); got != want {
			t.Errorf("glob(%q, %q) = %v, and %s says %v", pattern, s, got, expr, want)
		}
	})
}

// FuzzSelectorIsValid checks that the configuration refuses what can choose nothing, and only that.
func FuzzSelectorIsValid(f *testing.F) {
	for _, s := range []string{"GPU-1", "MIG-0-1", "0", "0:1", "1b:00.0", "*H100*", "mig-1g.*", "", " ", "-1", "0:", "a:b", "GPU-:", "mig-1g:*"} {
		f.Add(s)
	}
	snap := partitioned([]string{"1g.10gb", "2g.20gb"}, nil)
	f.Fuzz(func(t *testing.T, selector string) {
		err := validateSelectors("include", []string{selector})
		if err != nil && !strings.HasPrefix(err.Error(), "include[0]: ") {
			t.Errorf("%v does not name the key", err)
		}
		if err == nil {
			return
		}
		for _, c := range candidates(snap) {
			if selects(selector, &c) {
				t.Errorf("%q chooses %s, and is refused: %v", selector, c.state.Device.ID, err)
			}
		}
	})
}
