package kubelettest

import (
	"context"
	"maps"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// podResources serves the kubelet's pod-resources API.
type podResources struct {
	podsapi.UnimplementedPodResourcesListerServer
	kubelet *Kubelet
}

// List returns the pods that hold devices.
func (p podResources) List(context.Context, *podsapi.ListPodResourcesRequest) (*podsapi.ListPodResourcesResponse, error) {
	fault := p.kubelet.currentFault()
	if fault.ListError != "" {
		return nil, status.Error(codes.Unknown, fault.ListError)
	}
	resp := &podsapi.ListPodResourcesResponse{}
	if fault.NoPods {
		return resp, nil
	}
	s := p.kubelet.State()
	pods := make(map[[2]string]*podsapi.PodResources)
	container := func(c Container) *podsapi.ContainerResources {
		name := [2]string{c.Namespace, c.Pod}
		pod := pods[name]
		if pod == nil {
			pod = &podsapi.PodResources{Namespace: name[0], Name: name[1]}
			pods[name] = pod
			resp.PodResources = append(resp.PodResources, pod)
		}
		at := slices.IndexFunc(pod.Containers, func(r *podsapi.ContainerResources) bool { return r.GetName() == c.Name })
		if at < 0 {
			at = len(pod.Containers)
			pod.Containers = append(pod.Containers, &podsapi.ContainerResources{Name: c.Name})
		}
		return pod.Containers[at]
	}
	for _, a := range s.Allocations {
		to := container(a.Container)
		devices := s.Resources[a.Resource].Devices
		for _, id := range a.Devices {
			d := Device{ID: id}
			if i := slices.IndexFunc(devices, func(d Device) bool { return d.ID == id }); i >= 0 {
				d = devices[i]
			}
			to.Devices = append(to.Devices, entriesOf(a.Resource, d)...)
		}
	}
	for _, h := range s.Claims {
		claim := &podsapi.DynamicResource{ClaimName: h.Claim, ClaimNamespace: h.Container.Namespace}
		for _, d := range h.Devices {
			r := &podsapi.ClaimResource{DriverName: h.Driver, PoolName: h.Pool, DeviceName: d.Name}
			for _, name := range d.CDI {
				r.CdiDevices = append(r.CdiDevices, &podsapi.CDIDevice{Name: name})
			}
			if d.ShareID != "" {
				r.ShareId = &d.ShareID
			}
			claim.ClaimResources = append(claim.ClaimResources, r)
		}
		to := container(h.Container)
		to.DynamicResources = append(to.DynamicResources, claim)
	}
	return resp, nil
}

// GetAllocatableResources returns the healthy devices.
func (p podResources) GetAllocatableResources(context.Context, *podsapi.AllocatableResourcesRequest) (*podsapi.AllocatableResourcesResponse,
	error,
) {
	if fault := p.kubelet.currentFault(); fault.AllocatableError != "" {
		return nil, status.Error(codes.Unknown, fault.AllocatableError)
	}
	s, resp := p.kubelet.State(), &podsapi.AllocatableResourcesResponse{}
	for _, name := range slices.Sorted(maps.Keys(s.Resources)) {
		for _, d := range s.Resources[name].Devices {
			if d.Healthy {
				resp.Devices = append(resp.Devices, entriesOf(name, d)...)
			}
		}
	}
	return resp, nil
}

// entriesOf returns the entries of a device. Like the real kubelet, it returns one for each NUMA node.
func entriesOf(resource string, d Device) (entries []*podsapi.ContainerDevices) {
	for _, n := range d.NUMA {
		entries = append(entries, &podsapi.ContainerDevices{
			ResourceName: resource, DeviceIds: []string{d.ID},
			Topology: &podsapi.TopologyInfo{Nodes: []*podsapi.NUMANode{{ID: int64(n)}}},
		})
	}
	if entries == nil {
		entries = []*podsapi.ContainerDevices{{ResourceName: resource, DeviceIds: []string{d.ID}}}
	}
	return entries
}
