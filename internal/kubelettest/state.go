package kubelettest

import (
	"context"
	"fmt"
	"maps"
	"slices"
)

// Device is a device as the plugin sent it.
type Device struct {
	ID      string
	Healthy bool
	NUMA    []int // empty if the plugin sent none
}

// Resource is the kubelet's state of an extended resource.
type Resource struct {
	Name      string
	Endpoint  string   // the base name of the socket of the newest plugin
	Endpoints []string // of all plugins that the kubelet keeps, even if their streams have ended
	Preferred bool     // the plugin implements GetPreferredAllocation
	Connected bool     // has endpoints; when the last one ends, all devices become unhealthy
	Devices   []Device
	Allocated []string // sorted IDs

	Registrations int // since this kubelet started
	Messages      int // ListAndWatch messages of all registrations
}

// Capacity returns the number of devices of the resource.
func (r Resource) Capacity() int { return len(r.Devices) }

// Allocatable returns the number of healthy devices of the resource.
func (r Resource) Allocatable() int {
	n := 0
	for _, d := range r.Devices {
		if d.Healthy {
			n++
		}
	}
	return n
}

// Container identifies a container of a pod.
type Container struct {
	Namespace, Pod, Name string
}

// State is the kubelet's state at one moment. It is immutable.
type State struct {
	Running     bool
	Resources   map[string]Resource // by name; of the running kubelet only
	Allocations []Allocation        // in order of creation; like pods, they survive a restart of the kubelet
	Claims      []HeldClaim         // the same
}

// HeldClaim is a claim that a container uses.
type HeldClaim struct {
	Container    Container
	Claim        string // name, in the container's namespace
	Driver, Pool string
	Devices      []HeldDevice
}

// HeldDevice is a device of a claim.
type HeldDevice struct {
	Name, ShareID string
	CDI           []string
}

// allocated returns the sorted IDs of the allocated devices of a resource.
func (s State) allocated(resource string) (ids []string) {
	for _, a := range s.Allocations {
		if a.Resource == resource {
			ids = append(ids, a.Devices...)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// State returns the current state.
func (k *Kubelet) State() State { return *k.state.Load() }

// WaitFor waits until ok accepts the state and returns it. If ctx ends before, it returns the last state and an error
// that contains it.
func (k *Kubelet) WaitFor(ctx context.Context, ok func(State) bool) (State, error) {
	for {
		s, changed := k.state.Watch()
		if ok(*s) {
			return *s, nil
		}
		select {
		case <-ctx.Done():
			return *s, fmt.Errorf("waiting for another state of the kubelet than %+v: %w", *s, ctx.Err())
		case <-changed:
		}
	}
}

// Watch returns the state and a channel that is closed when the state changes.
func (k *Kubelet) Watch() (State, <-chan struct{}) {
	s, changed := k.state.Watch()
	return *s, changed
}

// update stores a modified copy of the state. k.mu must be held.
func (k *Kubelet) update(change func(*State)) {
	s := *k.state.Load()
	s.Resources = maps.Clone(s.Resources)
	change(&s)
	k.state.Store(&s)
}

// updateResource stores a modified copy of a resource unless the kubelet is stopped. k.mu must be held.
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
