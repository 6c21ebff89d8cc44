package podresources

import (
	"reflect"
	"slices"
	"testing"
	"time"

	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// claimDevice is a device of a claim as the kubelet lists it.
func claimDevice(driver, name, share string) *podsapi.ClaimResource {
	r := &podsapi.ClaimResource{
		DriverName: driver, PoolName: "node-1", DeviceName: name,
		CdiDevices: []*podsapi.CDIDevice{{Name: cdiName(name)}, {Name: "other"}},
	}
	if share != "" {
		r.ShareId = &share
	}
	return r
}

func cdiName(device string) string { return "vendor/claim=" + device }

func containerWithClaim(name, claim string, devices ...*podsapi.ClaimResource) *podsapi.ContainerResources {
	return &podsapi.ContainerResources{Name: name, DynamicResources: []*podsapi.DynamicResource{
		{ClaimName: claim, ClaimNamespace: "ns", ClaimResources: devices},
	}}
}

// claimsOf resolves gpu-0 and gpu-1 of a driver. Claims named monitor have adminAccess.
func claimsOf(driver string) ClaimResolver {
	return func(_, name string, c ClaimRef) (health.DeviceID, bool, bool) {
		id, exists := map[string]health.DeviceID{"gpu-0": "GPU-a", "gpu-1": "GPU-b"}[name]
		return id, c.Name == "monitor", exists && c.Driver == driver
	}
}

func noResource(string, string) (health.DeviceID, bool) { return "", false }

func TestHoldersByClaim(t *testing.T) {
	const driver = "gpu.nvidia.com"
	pods := &podsapi.ListPodResourcesResponse{PodResources: []*podsapi.PodResources{
		{Namespace: "ns", Name: "train", Containers: []*podsapi.ContainerResources{
			// Each container that names a request of the claim has all its devices.
			containerWithClaim("side", "gpus", claimDevice(driver, "gpu-0", ""), claimDevice(driver, "gpu-1", "")),
			containerWithClaim("main", "gpus", claimDevice(driver, "gpu-0", ""), claimDevice(driver, "gpu-1", ""), claimDevice(driver, "gpu-9", "")),
		}},
		{Namespace: "ns", Name: "share", Containers: []*podsapi.ContainerResources{
			containerWithClaim("main", "memory", claimDevice(driver, "gpu-1", "s2"), claimDevice(driver, "gpu-1", "s1"),
				claimDevice(driver, "gpu-1", "s1")),
			containerWithClaim("nic", "network", claimDevice("nic.example.com", "gpu-0", "")),
		}},
		{
			Namespace: "ns", Name: "exporter",
			Containers: []*podsapi.ContainerResources{containerWithClaim("main", "monitor", claimDevice(driver, "gpu-0", ""))},
		},
	}}
	held := func(pod, container, claim, name, share string) Holder {
		return Holder{
			Namespace: "ns", Pod: pod, Container: container, DeviceID: name,
			Claim: ClaimRef{claim, driver, "node-1", share, cdiName(name)},
		}
	}
	got := NewHolders(time.Now(), pods, Resolvers{Resource: noResource, Claim: claimsOf(driver)})
	by := map[health.DeviceID][]Holder{
		"GPU-a": {held("train", "main", "gpus", "gpu-0", ""), held("train", "side", "gpus", "gpu-0", "")},
		"GPU-b": {
			held("share", "main", "memory", "gpu-1", "s1"), held("share", "main", "memory", "gpu-1", "s2"),
			held("train", "main", "gpus", "gpu-1", ""), held("train", "side", "gpus", "gpu-1", ""),
		},
	}
	if !reflect.DeepEqual(got.By, by) {
		t.Errorf("%v, want %v", got.By, by)
	}
	if admin := map[health.DeviceID][]Holder{"GPU-a": {held("exporter", "main", "monitor", "gpu-0", "")}}; !reflect.DeepEqual(got.Admin,
		admin) {
		t.Errorf("admin %v, want %v", got.Admin, admin)
	}
	if without := NewHolders(time.Now(), pods, Resolvers{Resource: noResource}); len(without.By)+len(without.Admin) > 0 {
		t.Errorf("without a resolver of claims: %v", without)
	}
}

// FuzzHoldersByClaim checks that each device of a claim that resolves has its containers once and sorted, and no other has any.
func FuzzHoldersByClaim(f *testing.F) {
	f.Add("gpus", "gpu.nvidia.com", "gpu-0", "", "monitor", "gpu-1", "share")
	f.Add("", "gpu.nvidia.com", "gpu-0", "s", "gpus", "gpu-0", "s")
	f.Add("monitor", "other", "gpu-1", "", "gpus", "gpu-\xff", "")
	f.Fuzz(func(t *testing.T, claim, driver, name, share, claim2, name2, share2 string) {
		list := []*podsapi.ContainerResources{
			containerWithClaim("b", claim, claimDevice(driver, name, share), nil, claimDevice("gpu.nvidia.com", name2, share2),
				claimDevice(driver, name, share)),
			containerWithClaim("a", claim2, claimDevice("gpu.nvidia.com", name2, share2)), nil,
		}
		resolve := claimsOf("gpu.nvidia.com")
		h := NewHolders(time.Now(), &podsapi.ListPodResourcesResponse{PodResources: []*podsapi.PodResources{nil, {Containers: list}}},
			Resolvers{noResource, resolve})
		found := checkClaimHolders(t, h, resolve)
		for _, held := range claimHoldersOf(list) {
			want := 0
			if _, _, ok := resolve("", held.DeviceID, held.Claim); ok && held.ByClaim() {
				want = 1
			}
			if found[held] != want {
				t.Errorf("%+v is listed %d times, want %d", held, found[held], want)
			}
		}
	})
}

// checkClaimHolders checks that each holder is sorted and listed with its device, and counts them.
func checkClaimHolders(t *testing.T, h Holders, resolve ClaimResolver) map[Holder]int {
	t.Helper()
	found := make(map[Holder]int)
	for admin, by := range map[bool]map[health.DeviceID][]Holder{false: h.By, true: h.Admin} {
		for device, holders := range by {
			if !slices.IsSortedFunc(holders, compareHolders) {
				t.Errorf("%s: %v is not sorted", device, holders)
			}
			for _, held := range holders {
				found[held]++
				if id, isAdmin, ok := resolve("", held.DeviceID, held.Claim); !ok || id != device || isAdmin != admin || !held.ByClaim() ||
					held.Resource != "" {
					t.Errorf("%s is held by %+v", device, held)
				}
			}
		}
	}
	return found
}

// claimHoldersOf returns a holder for each device of the containers' claims.
func claimHoldersOf(list []*podsapi.ContainerResources) (holders []Holder) {
	for _, c := range list {
		for _, r := range c.GetDynamicResources() {
			for _, d := range r.GetClaimResources() {
				held := Holder{
					Container: c.GetName(), DeviceID: d.GetDeviceName(),
					Claim: ClaimRef{r.GetClaimName(), d.GetDriverName(), d.GetPoolName(), d.GetShareId(), ""},
				}
				if d != nil {
					held.Claim.CDI = cdiName(d.GetDeviceName())
				}
				holders = append(holders, held)
			}
		}
	}
	return holders
}

// A new kubelet lists containers later. Until it has settled, containers that its predecessor listed keep their devices, also by
// adminAccess.
func TestClaimsOfANewKubelet(t *testing.T) {
	before := Holders{
		By:    map[health.DeviceID][]Holder{"GPU-a": {{Pod: "train"}}},
		Admin: map[health.DeviceID][]Holder{"GPU-b": {{Pod: "exporter"}}},
	}
	now := time.Now()
	for settled, want := range map[bool]int{false: 2, true: 0} {
		c := &Client{settledAt: now.Add(time.Second), resolver: func() Resolvers { return Resolvers{Resource: noResource} }}
		if settled {
			c.settledAt = now
		}
		c.Holders.Store(&before)
		c.storeHolders(now, &podsapi.ListPodResourcesResponse{}, nil)
		if h := c.Holders.Load(); len(h.By["GPU-a"])+len(h.Admin["GPU-b"]) != want {
			t.Errorf("settled %v: %+v", settled, *h)
		}
	}
}
