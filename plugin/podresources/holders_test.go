package podresources

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestHoldersByDevice(t *testing.T) {
	pod := func(name, resource string, ids ...string) *podsapi.PodResources {
		return &podsapi.PodResources{Namespace: "ns", Name: name, Containers: []*podsapi.ContainerResources{{
			Name: "c", Devices: []*podsapi.ContainerDevices{{ResourceName: resource, DeviceIds: ids}},
		}}}
	}
	holder := func(pod, id string) Holder {
		return Holder{Namespace: "ns", Pod: pod, Container: "c", Resource: "nvidia.com/gpu", DeviceID: id}
	}
	got := NewHolders(time.Now(), &podsapi.ListPodResourcesResponse{PodResources: []*podsapi.PodResources{
		pod("b", "nvidia.com/gpu", "GPU-0::1", "GPU-1"),
		pod("a", "nvidia.com/gpu", "GPU-0::0", "GPU-0::0"), // once for each NUMA node
		pod("a", "example.com/fpga", "GPU-0"),
	}}, Resolvers{Resource: func(resource, id string) (health.DeviceID, bool) {
		device, _, _ := strings.Cut(id, "::")
		return health.DeviceID(device), resource == "nvidia.com/gpu"
	}}).By
	want := map[health.DeviceID][]Holder{"GPU-0": {holder("a", "GPU-0::0"), holder("b", "GPU-0::1")}, "GPU-1": {holder("b", "GPU-1")}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestAllocatableIDs(t *testing.T) {
	got := allocatableIDs(&podsapi.AllocatableResourcesResponse{Devices: []*podsapi.ContainerDevices{
		{ResourceName: "a/b", DeviceIds: []string{"2"}},
		{ResourceName: "a/b", DeviceIds: []string{"1"}},
		{ResourceName: "a/b", DeviceIds: []string{"2"}},
		{ResourceName: "a/c", DeviceIds: []string{"1"}},
	}})
	if want := map[string][]string{"a/b": {"1", "2"}, "a/c": {"1"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// The kubelet counts as asked after its first answer, or an error.
func TestHoldersPending(t *testing.T) {
	c := New(nil, func() Resolvers {
		return Resolvers{Resource: func(string, string) (health.DeviceID, bool) { return "", false }}
	}, Timing{}, nil)
	if !c.Holders.Load().Pending {
		t.Error("not pending before the first query")
	}
	c.storeHolders(time.Now(), nil, errors.New("no such file"))
	if h := c.Holders.Load(); h.Pending || h.By != nil {
		t.Errorf("after an error: %+v", h)
	}
	c.Holders.Store(&Holders{Pending: true})
	c.storeHolders(time.Now(), &podsapi.ListPodResourcesResponse{}, nil)
	if h := c.Holders.Load(); h.Pending || h.By == nil {
		t.Errorf("after an answer: %+v", h)
	}
}
