package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"slices"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Allocation is the assignment of devices of a resource to a container.
type Allocation struct {
	Container Container
	Resource  string
	Devices   []string // IDs
	Response  *pluginapi.ContainerAllocateResponse
}

// Allocate allocates n devices of a resource to the container of a new pod.
func (k *Kubelet) Allocate(ctx context.Context, resource string, n int) (Allocation, error) {
	return k.AllocateTo(ctx, k.newPod(), resource, n)
}

// newPod returns the container of a pod with a new name.
func (k *Kubelet) newPod() Container {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.podCount++
	return Container{Namespace: "default", Pod: fmt.Sprintf("pod-%d", k.podCount), Name: "main"}
}

// AllocateTo allocates n devices of a resource to a container. As the kubelet does, it asks the plugin which of the
// available devices it prefers. The devices stay allocated until Free.
func (k *Kubelet) AllocateTo(ctx context.Context, to Container, resource string, n int) (Allocation, error) {
	r, c, err := k.plugin(resource)
	if err != nil {
		return Allocation{}, err
	}
	var available []string
	for _, d := range r.Devices {
		if d.Healthy && !slices.Contains(r.Allocated, d.ID) {
			available = append(available, d.ID)
		}
	}
	if n < 1 || len(available) < n {
		return Allocation{}, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d", resource, n,
			len(available))
	}
	ids := available
	if r.Preferred {
		preferred, err := c.PreferredAllocation(ctx, available, n)
		if err != nil && !errors.Is(err, errContainerCount) {
			return Allocation{}, fmt.Errorf("GetPreferredAllocation: %w", err)
		}
		// The preference is only a hint: unavailable devices are ignored, and other available ones fill the rest.
		preferred = slices.DeleteFunc(slices.Clone(preferred), func(id string) bool { return !slices.Contains(available, id) })
		rest := slices.DeleteFunc(slices.Clone(available), func(id string) bool { return slices.Contains(preferred, id) })
		ids = slices.Concat(preferred, rest)
	}
	return k.allocate(ctx, to, resource, c, ids[:n])
}

// AllocateIDs allocates these devices to the container of a new pod. It does not check whether they exist or are
// available.
func (k *Kubelet) AllocateIDs(ctx context.Context, resource string, ids ...string) (Allocation, error) {
	_, c, err := k.plugin(resource)
	if err != nil {
		return Allocation{}, err
	}
	return k.allocate(ctx, k.newPod(), resource, c, ids)
}

func (k *Kubelet) allocate(ctx context.Context, to Container, resource string, c *Client, ids []string) (Allocation, error) {
	resp, err := c.Allocate(ctx, ids...)
	if err != nil {
		return Allocation{}, err
	}
	a := Allocation{Container: to, Resource: resource, Devices: slices.Clone(ids), Response: resp}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.update(func(s *State) { s.Allocations = append(slices.Clone(s.Allocations), a) })
	k.updateResource(resource, func(*Resource) {})
	return a, nil
}

// Free ends the allocation of devices, as the end of a pod does.
func (k *Kubelet) Free(resource string, ids ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.update(func(s *State) {
		var remaining []Allocation
		for _, a := range s.Allocations {
			if a.Resource == resource {
				a.Devices = slices.DeleteFunc(slices.Clone(a.Devices), func(id string) bool { return slices.Contains(ids, id) })
			}
			if len(a.Devices) > 0 {
				remaining = append(remaining, a)
			}
		}
		s.Allocations = remaining
	})
	k.updateResource(resource, func(*Resource) {})
}

// HoldClaim lists a claim under its container in the pod-resources API until FreeClaims of that container. See DRA for the calls of the
// driver.
func (k *Kubelet) HoldClaim(c HeldClaim) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.update(func(s *State) { s.Claims = append(slices.Clone(s.Claims), c) })
}

// FreeClaims ends the use of the claims of a container, as the end of a pod does.
func (k *Kubelet) FreeClaims(c Container) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.update(func(s *State) {
		s.Claims = slices.DeleteFunc(slices.Clone(s.Claims), func(h HeldClaim) bool { return h.Container == c })
	})
}

// plugin returns a resource and the connection to its plugin.
func (k *Kubelet) plugin(resource string) (Resource, *Client, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := k.connected[resource]
	if len(all) == 0 {
		return Resource{}, nil, fmt.Errorf("no plugin is registered for %s", resource)
	}
	return k.state.Load().Resources[resource], all[len(all)-1].client, nil
}
