package plugin

import (
	"maps"
	"sync"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// allocationTimes has the time of the last allocation of each device ID.
type allocationTimes struct {
	mu sync.Mutex // guards at
	at map[string]time.Time
}

// allocationMemory limits how long an allocation is remembered. Until then the kubelet has reported the new holder many times.
const allocationMemory = time.Hour

func (a *allocationTimes) add(req *pluginapi.AllocateRequest, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.at, func(_ string, at time.Time) bool { return now.Sub(at) > allocationMemory })
	if a.at == nil {
		a.at = make(map[string]time.Time)
	}
	for _, c := range req.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			a.at[id] = now
		}
	}
}

// last returns the last allocation of a device ID, or the zero time.
func (a *allocationTimes) last(id string) time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.at[id]
}

// recentAllocations are the IDs that Allocate has given, or is about to give, and that the kubelet may not list yet. They matter only to a
// layout that lacks these IDs. A refused ID is forgotten like a given one.
type recentAllocations struct {
	settle time.Duration // from an allocation until the kubelet lists it
	maxAge time.Duration // of an allocation that the kubelet cannot confirm, because it does not answer

	mu sync.Mutex // guards at
	at map[podresources.Holder]time.Time
}

// add adds the requested IDs that the resource has. Call it before reading the layout that decides about them: then every later layout
// withholds them.
func (a *recentAllocations) add(r Resource, req *pluginapi.AllocateRequest, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.at == nil {
		a.at = make(map[podresources.Holder]time.Time)
	}
	for _, c := range req.GetContainerRequests() {
		for _, id := range c.GetDevicesIds() {
			if r.has(id) {
				a.at[podresources.Holder{Resource: r.Name, DeviceID: id}] = now
			}
		}
	}
}

// holders returns the allocations that an answer of the kubelet may lack, by device, and forgets the others.
func (a *recentAllocations) holders(answer *podresources.Holders) (by map[health.DeviceID][]podresources.Holder) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for h, at := range a.at {
		if listed := !answer.Settling && answer.At.After(at.Add(a.settle)); listed || answer.Asked.After(at.Add(a.maxAge)) {
			delete(a.at, h)
			continue
		}
		if by == nil {
			by = make(map[health.DeviceID][]podresources.Holder)
		}
		device := deviceid.Parse(h.DeviceID).Device()
		by[device] = append(by[device], h)
	}
	return by
}
