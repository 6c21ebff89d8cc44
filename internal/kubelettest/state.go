package kubelettest

import (
	"context"
	"fmt"
	"maps"
	"slices"
)

// Device is a device as the kubelet sees it.
type Device struct {
	ID      string
	Healthy bool
	NUMA    []int // empty if the plugin named none
}

// Resource is what the kubelet knows of one extended resource.
type Resource struct {
	Name      string
	Endpoint  string // the base name of the plugin's socket
	Preferred bool   // the plugin has GetPreferredAllocation
	Connected bool   // false: every device counts as unhealthy, as with the real one
	Devices   []Device
	Allocated []string // ids in use, sorted

	Registrations int // since this kubelet started
	Messages      int // ListAndWatch messages, of all registrations
}

// Capacity is the number of devices of the resource.
func (r Resource) Capacity() int { return len(r.Devices) }

// Allocatable is the number of healthy devices of the resource.
func (r Resource) Allocatable() int {
	n := 0
	for _, d := range r.Devices {
		if d.Healthy {
			n++
		}
	}
	return n
}

// Container is a container of a pod.
type Container struct {
	Namespace, Pod, Name string
}

// Holding is what a container has of one resource.
type Holding struct {
	Container Container
	Resource  string
	Devices   []string // ids
}

// allocated returns the ids of a resource that are in use, sorted.
func (s State) allocated(resource string) (ids []string) {
	for _, h := range s.Holdings {
		if h.Resource == resource {
			ids = append(ids, h.Devices...)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// State is what the kubelet knows at one moment. It is not modified once seen.
type State struct {
	Running   bool
	Starts    int
	Resources map[string]Resource // by name; of the running kubelet only
	Holdings  []Holding           // in the order they came; they outlive the kubelet, as pods do
}

// State returns what the kubelet knows now.
func (k *Kubelet) State() State { return *k.state.Load() }

// WaitFor waits until the state is as asked for and returns it. When ctx ends before, it returns the
// last state and an error that describes it.
func (k *Kubelet) WaitFor(ctx context.Context, ok func(State) bool) (State, error) {
	for {
		s, changed := k.state.Watch()
		if ok(*s) {
			return *s, nil
		}
		select {
		case <-ctx.Done():
			return *s, fmt.Errorf("the kubelet's state is still %+v: %w", *s, ctx.Err())
		case <-changed:
		}
	}
}

// Watch returns the state and a channel that closes when there is a newer one.
func (k *Kubelet) Watch() (State, <-chan struct{}) {
	s, changed := k.state.Watch()
	return *s, changed
}

// update stores a changed copy of the state. k.mu is held.
func (k *Kubelet) update(change func(*State)) {
	s := *k.state.Load()
	s.Resources = maps.Clone(s.Resources)
	change(&s)
	k.state.Store(&s)
}

// updateResource changes a copy of one resource. k.mu is held. It does nothing if the kubelet is stopped.
func (k *Kubelet) updateResource(name string, change func(*Resource)) {
	if k.server == nil {
		return
	}
	k.update(func(s *State) {
		r := s.Resources[name]
		r.Name, r.Devices = name, slices.Clone(r.Devices)
		change(&r)
		r.Allocated = s.allocated(name)
		s.Resources[name] = r
	})
}
