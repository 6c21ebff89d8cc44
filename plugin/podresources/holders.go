package podresources

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Holder is a container that holds a device.
type Holder struct {
	Namespace string
	Pod       string
	Container string
	Resource  string // the extended resource of the allocation; empty for a claim
	DeviceID  string // the kubelet's ID of the device: GPU-…, GPU-…::3, MIG-…, nvidia0/gi1; for a claim the name in its slice: gpu-3

	Claim ClaimRef // zero for an extended resource of a device plugin
}

// ClaimRef identifies what a container got by dynamic resource allocation. The namespace of the claim is that of the pod.
type ClaimRef struct {
	Name, Driver, Pool string
	ShareID            string // of a share of a device; empty for a whole one
}

// Holders are the containers that hold each device, as of one answer of the kubelet. It is immutable once published.
type Holders struct {
	At  time.Time                    // when the kubelet was asked; zero before its first answer
	Err string                       // why the last query failed; empty if it succeeded
	By  map[health.DeviceID][]Holder // sorted; nil if unknown

	Pending  bool // the kubelet has not been asked yet
	Settling bool // the kubelet may be new and may not have read all pods yet
}

// MaxHoldersAge limits the age of the last answer. The client asks the kubelet every two seconds.
const MaxHoldersAge = 30 * time.Second

// Unknown returns why the holders are unknown at a time, "" if they are known.
func (h Holders) Unknown(now time.Time) string {
	switch age := now.Sub(h.At); {
	case h.Err != "":
		return h.Err
	case h.By == nil:
		return "the kubelet has not been asked yet"
	case age > MaxHoldersAge:
		return fmt.Sprintf("the kubelet's last response is %v old", age.Round(time.Second))
	}
	return ""
}

// Resolver returns the device behind a kubelet ID of a resource; ok is false if this
// node has no such GPU.
type Resolver func(resource, id string) (device health.DeviceID, ok bool)

// HoldersByDevice groups the containers of an answer by device. It omits IDs that do not resolve.
func HoldersByDevice(resp *podsapi.ListPodResourcesResponse, resolve Resolver) map[health.DeviceID][]Holder {
	by := make(map[health.DeviceID][]Holder)
	for _, pod := range resp.GetPodResources() {
		for _, c := range pod.GetContainers() {
			for _, d := range c.GetDevices() {
				for _, id := range d.GetDeviceIds() {
					if device, ok := resolve(d.GetResourceName(), id); ok {
						by[device] = append(by[device], Holder{
							Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: c.GetName(), Resource: d.GetResourceName(), DeviceID: id,
						})
					}
				}
			}
		}
	}
	for device, holders := range by {
		slices.SortFunc(holders, func(a, b Holder) int {
			return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container),
				cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.DeviceID, b.DeviceID))
		})
		by[device] = slices.Compact(holders) // the kubelet repeats a device for each of its NUMA nodes
	}
	return by
}

// Allocatable is the kubelet's list of the device IDs that it may allocate.
type Allocatable struct {
	At  time.Time           // when the kubelet was asked
	IDs map[string][]string // by resource, sorted
	Err string              // why the list is unknown; empty if it is known
}

// allocatableIDs groups the IDs by resource.
func allocatableIDs(resp *podsapi.AllocatableResourcesResponse) map[string][]string {
	ids := make(map[string][]string)
	for _, d := range resp.GetDevices() {
		ids[d.GetResourceName()] = append(ids[d.GetResourceName()], d.GetDeviceIds()...)
	}
	for resource, list := range ids {
		slices.Sort(list)
		ids[resource] = slices.Compact(list) // the kubelet repeats a device for each of its NUMA nodes
	}
	return ids
}
