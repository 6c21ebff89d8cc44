package plugin

import (
	"cmp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Holders are written as RESOURCE ID, and the pod of the holder number n is ml/pod-n.
func TestUnschedulable(t *testing.T) {
	held := func(n int) (all []string) {
		for i := range n {
			all = append(all, gpu+" "+id(i))
		}
		return all
	}
	broken := func(s *health.Snapshot, devices ...int) *health.Snapshot {
		for _, i := range devices {
			s = with(s, i, health.Unhealthy)
		}
		return s
	}
	mixed := func(c *Config) { c.MIGStrategy = MIGMixed }
	unchanged := func(*Config) {}
	for name, c := range map[string]struct {
		change   func(*Config)
		snap     *health.Snapshot
		holders  []string
		resource string // gpu if empty
		want     int
		pods     string
	}{
		"no holders":                             {unchanged, broken(snapshot(8), 2), nil, "", 0, ""},
		"healthy GPUs held":                      {unchanged, snapshot(8), held(6), "", 0, ""},
		"degraded GPU held":                      {unchanged, with(snapshot(8), 2, health.Degraded), held(6), "", 0, ""},
		"unhealthy GPU free":                     {unchanged, broken(snapshot(8), 7), held(6), "", 0, ""},
		"unhealthy GPU held":                     {unchanged, broken(snapshot(8), 2), held(6), "", 1, "pod-2"},
		"unhealthy GPU held, all others held":    {unchanged, broken(snapshot(8), 2), held(8), "", 0, ""},
		"more unhealthy GPUs held than are free": {unchanged, broken(snapshot(8), 1, 2, 5), held(6), "", 2, "pod-1 pod-2 pod-5"},
		"one held and one free are unhealthy":    {unchanged, broken(snapshot(8), 2, 7), held(6), "", 1, "pod-2"},
		"all unhealthy":                          {unchanged, broken(snapshot(2), 0, 1), held(1), "", 0, ""},
		"shares of an unhealthy GPU": {
			sharedBy(4), broken(snapshot(2), 0),
			[]string{gpu + " GPU-0::0", gpu + " GPU-0::3", gpu + " GPU-1::0"},
			"", 2, "pod-0 pod-1",
		},
		"shares, fewer free": {
			sharedBy(2), broken(snapshot(2), 0),
			[]string{gpu + " GPU-0::0", gpu + " GPU-0::1", gpu + " GPU-1::0"},
			"", 1,
			"pod-0 pod-1",
		},
		"units of memory of an unhealthy GPU": {
			memoryShared("40Gi"), broken(withReserved(4), 0),
			[]string{memoryResource + " GPU-0::40960Mi::0", memoryResource + " GPU-1::40960Mi::0"},
			memoryResource, 1, "pod-0",
		},
		"units of another size held": {
			memoryShared("16Gi"), withReserved(2), // 4 of 8 units are withheld, 2 units of the other GPU are free
			[]string{
				memoryResource + " GPU-0::8192Mi::0", memoryResource + " GPU-0::8192Mi::7", memoryResource + " GPU-0::8192Mi::8",
				memoryResource + " GPU-1::16384Mi::0", memoryResource + " GPU-1::16384Mi::3",
			},
			memoryResource, 2, "pod-0 pod-1 pod-2",
		},
		"removed GPU held":            {unchanged, snapshot(2), []string{gpu + " GPU-7"}, "", 1, "pod-0"},
		"whole before, shared now":    {sharedBy(2), snapshot(2), []string{gpu + " GPU-0"}, "", 1, "pod-0"},
		"held under another resource": {unchanged, broken(snapshot(2), 0), []string{"nvidia.com/other GPU-0"}, "", 0, ""},
		"MIG devices count for their own": {
			mixed, broken(partitioned("1g.10gb 1g.10gb 3g.40gb"), 1),
			[]string{migResource + " MIG-0-0"},
			migResource, 1, "pod-0",
		},
		"MIG devices of another profile are free": {
			mixed, broken(partitioned("1g.10gb 3g.40gb"), 1),
			[]string{migResource + " MIG-0-0"},
			migResource, 0, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := configured(c.change)
			resource := cmp.Or(c.resource, gpu)
			l := newLayout(layoutInput{cfg: &cfg, snap: c.snap, facts: factsOf(holdersOf(c.snap, cfg, c.holders...))})
			u := findResource(l.resources, resource).Unschedulable
			if u == nil {
				t.Fatal("unknown")
			}
			var pods []string
			for _, p := range u.Pods {
				pods = append(pods, p.Name)
			}
			if u.Resource != resource || u.Devices != c.want || strings.Join(pods, " ") != c.pods {
				t.Errorf("%+v, want %d, ended by %s", *u, c.want, c.pods)
			}
			if r := findResource(newLayout(layoutInput{cfg: &cfg, snap: c.snap}).resources, resource); r.Unschedulable != nil {
				t.Errorf("%+v with unknown holders", *r.Unschedulable)
			}
		})
	}
}

// The containers of a pod can share a device, and a pod can hold several.
func TestUnschedulableCountsIDs(t *testing.T) {
	cfg, snap := configured(), with(with(snapshot(6), 0, health.Unhealthy), 1, health.Unhealthy)
	hold := func(device, container string) podresources.Holder {
		return podresources.Holder{Namespace: "ml", Pod: "train", Container: container, Resource: gpu, DeviceID: device}
	}
	holders := map[health.DeviceID][]podresources.Holder{
		"GPU-0": {hold("GPU-0", "a"), hold("GPU-0", "b")}, "GPU-1": {hold("GPU-1", "a")}, "GPU-2": {hold("GPU-2", "a")},
	}
	u := newLayout(layoutInput{cfg: &cfg, snap: snap, facts: factsOf(holders)}).resources[0].Unschedulable
	if u.Devices != 2 || !slices.Equal(u.Pods, []Pod{{"ml", "train"}}) {
		t.Errorf("%+v, want 2 devices and the pod once", *u)
	}
}

func TestUnschedulableNamesPods(t *testing.T) {
	u := Unschedulable{Resource: gpu}
	u.Devices = 7
	for n := range 8 {
		u.Pods = append(u.Pods, Pod{"ml", id(n)})
		named := strings.Count(u.String(), "ml/")
		if named != min(n+1, 5) || strings.Contains(u.String(), " more ") != (n >= 5) {
			t.Errorf("%d pods: %s", n+1, u)
		}
	}
}

func TestPodNames(t *testing.T) {
	pods := func(names string) (all []Pod) {
		for name := range strings.FieldsSeq(names) {
			namespace, name, _ := strings.Cut(name, "/")
			all = append(all, Pod{namespace, name})
		}
		return all
	}
	for names, want := range map[string]string{
		"":                            "pod ",
		"a/x":                         "pod a/x",
		"a/x a/x":                     "pod a/x",
		"b/x a/y a/x":                 "pods a/x, a/y and b/x",
		"a/y a/x":                     "pods a/x and a/y",
		"a/1 a/2 a/3 a/4 a/5":         "pods a/1, a/2, a/3, a/4 and a/5",
		"a/1 a/2 a/3 a/4 a/5 a/6 a/7": "pods a/1, a/2, a/3, a/4, a/5 and 2 more",
	} {
		if got := PodNames(pods(names)); got != want {
			t.Errorf("%s: %q, want %q", names, got, want)
		}
	}
}
