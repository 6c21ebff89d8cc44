package kubelettest

import (
	"context"
	"maps"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// podResources is the pod-resources API of the kubelet.
type podResources struct {
	podsapi.UnimplementedPodResourcesListerServer
	kubelet *Kubelet
}

func (p podResources) fault() Fault {
	p.kubelet.mu.Lock()
	defer p.kubelet.mu.Unlock()
	return p.kubelet.fault
}

// List returns the pods that have devices.
func (p podResources) List(context.Context, *podsapi.ListPodResourcesRequest) (*podsapi.ListPodResourcesResponse, error) {
	fault := p.fault()
	if fault.DenyPods != "" {
		return nil, status.Error(codes.Unknown, fault.DenyPods)
	}
	resp := &podsapi.ListPodResourcesResponse{}
	if fault.NoPods {
		return resp, nil
	}
	s := p.kubelet.State()
	pods := make(map[[2]string]*podsapi.PodResources)
	for _, h := range s.Holdings {
		name := [2]string{h.Container.Namespace, h.Container.Pod}
		pod := pods[name]
		if pod == nil {
			pod = &podsapi.PodResources{Namespace: name[0], Name: name[1]}
			pods[name] = pod
			resp.PodResources = append(resp.PodResources, pod)
		}
		at := slices.IndexFunc(pod.Containers, func(c *podsapi.ContainerResources) bool { return c.GetName() == h.Container.Name })
		if at < 0 {
			at = len(pod.Containers)
			pod.Containers = append(pod.Containers, &podsapi.ContainerResources{Name: h.Container.Name})
		}
		for _, id := range h.Devices {
			d := Device{ID: id}
			if i := slices.IndexFunc(s.Resources[h.Resource].Devices, func(d Device) bool { return d.ID == id }); i >= 0 {
				d = s.Resources[h.Resource].Devices[i]
			}
			pod.Containers[at].Devices = append(pod.Containers[at].Devices, entries(h.Resource, d)...)
		}
	}
	return resp, nil
}

// GetAllocatableResources returns the healthy devices.
func (p podResources) GetAllocatableResources(context.Context, *podsapi.AllocatableResourcesRequest) (*podsapi.AllocatableResourcesResponse, error) {
	if fault := p.fault(); fault.DenyAllocatable != "" {
		return nil, status.Error(codes.Unknown, fault.DenyAllocatable)
	}
	s, resp := p.kubelet.State(), &podsapi.AllocatableResourcesResponse{}
	for _, name := range slices.Sorted(maps.Keys(s.Resources)) {
		for _, d := range s.Resources[name].Devices {
			if d.Healthy {
				resp.Devices = append(resp.Devices, entries(name, d)...)
			}
		}
	}
	return resp, nil
}

// entries is how the real one writes a device: once for each of its NUMA nodes.
func entries(resource string, d Device) (out []*podsapi.ContainerDevices) {
	for _, n := range d.NUMA {
		out = append(out, &podsapi.ContainerDevices{
			ResourceName: resource, DeviceIds: []string{d.ID},
			Topology: &podsapi.TopologyInfo{Nodes: []*podsapi.NUMANode{{ID: int64(n)}}},
		})
	}
	if out == nil {
		out = []*podsapi.ContainerDevices{{ResourceName: resource, DeviceIds: []string{d.ID}}}
	}
	return out
}
