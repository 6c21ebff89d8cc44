package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Allocation is what a container got.
type Allocation struct {
	Container Container
	Devices   []string // ids
	Response  *pluginapi.ContainerAllocateResponse
}

// Allocate gives the container of a new pod n devices of a resource.
func (k *Kubelet) Allocate(ctx context.Context, resource string, n int) (Allocation, error) {
	return k.AllocateTo(ctx, k.newPod(), resource, n)
}

// newPod names a pod.
func (k *Kubelet) newPod() Container {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.named++
	return Container{Namespace: "default", Pod: fmt.Sprintf("pod-%d", k.named), Name: "main"}
}

// AllocateTo gives a container n devices of a resource: as the kubelet does, it asks the plugin which of
// the free ones it prefers, and then allocates those. The devices stay in use until Free.
func (k *Kubelet) AllocateTo(ctx context.Context, to Container, resource string, n int) (Allocation, error) {
	r, c, err := k.plugin(resource)
	if err != nil {
		return Allocation{}, err
	}
	var free []string
	for _, d := range r.Devices {
		if d.Healthy && !slices.Contains(r.Allocated, d.ID) {
			free = append(free, d.ID)
		}
	}
	if n < 1 || len(free) < n {
		return Allocation{}, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d", resource, n, len(free))
	}
	ids := free
	if r.Preferred {
		resp, err := c.api.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: free, AllocationSize: int32(min(n, 1<<30))}},
		})
		if err != nil {
			return Allocation{}, fmt.Errorf("the pod is refused, because GetPreferredAllocation failed: %w", err)
		}
		if len(resp.GetContainerResponses()) == 1 {
			// The plugin only gives an opinion: what it names too much or wrongly is passed over, what it
			// leaves out is filled up.
			preferred := slices.DeleteFunc(slices.Clone(resp.GetContainerResponses()[0].GetDeviceIDs()), func(id string) bool {
				return !slices.Contains(free, id)
			})
			rest := slices.DeleteFunc(slices.Clone(free), func(id string) bool { return slices.Contains(preferred, id) })
			ids = slices.Concat(preferred, rest)
		}
	}
	return k.allocate(ctx, to, resource, c, ids[:n])
}

// AllocateIDs gives the container of a new pod these devices, without asking what the plugin prefers and without
// looking whether they exist or are free.
func (k *Kubelet) AllocateIDs(ctx context.Context, resource string, ids ...string) (Allocation, error) {
	_, c, err := k.plugin(resource)
	if err != nil {
		return Allocation{}, err
	}
	return k.allocate(ctx, k.newPod(), resource, c, ids)
}

func (k *Kubelet) allocate(ctx context.Context, to Container, resource string, c *client, ids []string) (Allocation, error) {
	resp, err := c.api.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return Allocation{}, err
	}
	if len(resp.GetContainerResponses()) == 0 {
		return Allocation{}, errors.New("no containers return in allocation response")
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.update(func(s *State) {
		s.Holdings = append(slices.Clone(s.Holdings), Holding{Container: to, Resource: resource, Devices: slices.Clone(ids)})
	})
	k.updateResource(resource, func(*Resource) {})
	return Allocation{Container: to, Devices: ids, Response: resp.GetContainerResponses()[0]}, nil
}

// Free ends the use of devices, as the end of a pod does.
func (k *Kubelet) Free(resource string, ids ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.update(func(s *State) {
		var kept []Holding
		for _, h := range s.Holdings {
			if h.Resource == resource {
				h.Devices = slices.DeleteFunc(slices.Clone(h.Devices), func(id string) bool { return slices.Contains(ids, id) })
			}
			if len(h.Devices) > 0 {
				kept = append(kept, h)
			}
		}
		s.Holdings = kept
	})
	k.updateResource(resource, func(*Resource) {})
}

// plugin returns a resource and the connection to its plugin.
func (k *Kubelet) plugin(resource string) (Resource, *client, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.clients[resource]
	if c == nil {
		return Resource{}, nil, fmt.Errorf("no plugin is registered for %s", resource)
	}
	return k.state.Load().Resources[resource], c, nil
}
