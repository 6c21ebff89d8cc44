package podresources

import (
	"cmp"
	"iter"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
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

// ClaimRef identifies what a container got by dynamic resource allocation. The namespace of the claim is the pod's.
type ClaimRef struct {
	Name, Driver, Pool string
	ShareID            string // of a share of a device; empty for a whole one
	CDI                string // the first CDI name that the driver gave the kubelet; it tells drivers of one name apart
}

// ByClaim reports whether the container got the device by a claim.
func (h Holder) ByClaim() bool { return h.Claim.Name != "" }

// What describes what the container got: "claim train-gpus" or "GPU-1::0 of nvidia.com/gpu".
func (h Holder) What() string {
	if h.ByClaim() {
		return "claim " + h.Claim.Name
	}
	return h.DeviceID + " of " + h.Resource
}

// Holders are the containers that hold each device, as of one answer of the kubelet. It is immutable once published.
//
// A pod whose containers name different requests of one claim holds all devices of the claim in each of these containers: the kubelet
// does not report requests.
type Holders struct {
	At  time.Time                    // when the kubelet was asked; zero before its first answer
	Err string                       // why the last query failed; empty if it succeeded
	By  map[health.DeviceID][]Holder // sorted; nil if unknown
	// Admin are the containers that can use a device by a claim with adminAccess, such as monitors. They take nothing from others, so
	// they are not in By.
	Admin map[health.DeviceID][]Holder

	Asked    time.Time // the last time, with or without an answer
	Silent   bool      // the kubelet does not tell: it has no API, or has refused for longer than a new one reads its pods
	Pending  bool      // the kubelet has not been asked yet
	Settling bool      // the kubelet is new and may not have read all pods yet
}

// MaxHoldersAge limits the age of the last answer. The client asks the kubelet every two seconds.
const MaxHoldersAge = 30 * time.Second

// Unknown returns why the holders are unknown at a time, "" if they are known. They are unknown while a new kubelet reads its pods: its
// first answers lack some.
func (h Holders) Unknown(now time.Time) string {
	if stale := h.Stale(now); stale != "" || !h.Settling {
		return stale
	}
	return "the kubelet may not have read all its pods yet"
}

// ClaimHeld reports whether a container can use a device by a claim.
func (h Holders) ClaimHeld(namespace, name string) bool {
	for _, by := range []map[health.DeviceID][]Holder{h.By, h.Admin} {
		for _, list := range by {
			if slices.ContainsFunc(list, func(h Holder) bool { return h.Namespace == namespace && h.Claim.Name == name }) {
				return true
			}
		}
	}
	return false
}

// Forgotten reports whether the kubelet has not answered for so long that its last answer is no longer kept.
func (h Holders) Forgotten() bool { return h.By == nil && !h.At.IsZero() }

// Stale returns why there is no recent answer of the kubelet, "" if there is one. That is for views: a decision asks Unknown.
func (h Holders) Stale(now time.Time) string {
	switch age := now.Sub(h.At); {
	case h.Err != "":
		return h.Err
	case h.By == nil:
		return "the kubelet has not been asked yet"
	case age > MaxHoldersAge:
		return "the kubelet's last response is " + duration.HumanDuration(age) + " old"
	}
	return ""
}

// Resolver returns the device behind a kubelet ID of a resource; ok is false if this
// node has no such GPU.
type Resolver func(resource, id string) (device health.DeviceID, ok bool)

// ClaimResolver returns the device behind a device of a claim, by the namespace of the claim and the name of the device in its pool; ok is
// false if it is of another driver, or if this node has no such device. admin reports whether the claim has adminAccess.
type ClaimResolver func(namespace, name string, claim ClaimRef) (device health.DeviceID, admin, ok bool)

// Resolvers find the devices of an answer.
type Resolvers struct {
	Resource Resolver
	Claim    ClaimResolver // nil: no device of a claim resolves
}

// NewHolders groups the containers of an answer by device. It omits what does not resolve.
func NewHolders(at time.Time, resp *podsapi.ListPodResourcesResponse, resolve Resolvers) Holders {
	h := Holders{At: at, Asked: at, By: make(map[health.DeviceID][]Holder), Admin: make(map[health.DeviceID][]Holder)}
	for _, pod := range resp.GetPodResources() {
		for _, c := range pod.GetContainers() {
			holder := Holder{Namespace: pod.GetNamespace(), Pod: pod.GetName(), Container: c.GetName()}
			for _, d := range c.GetDevices() {
				for _, id := range d.GetDeviceIds() {
					if device, ok := resolve.Resource(d.GetResourceName(), id); ok {
						holder.Resource, holder.DeviceID = d.GetResourceName(), id
						h.By[device] = append(h.By[device], holder)
					}
				}
			}
			if resolve.Claim != nil {
				h.addClaims(c.GetDynamicResources(), holder, resolve.Claim)
			}
		}
	}
	for _, by := range []map[health.DeviceID][]Holder{h.By, h.Admin} {
		for device, holders := range by {
			slices.SortFunc(holders, compareHolders)
			by[device] = slices.Compact(holders) // the kubelet repeats a device for each of its NUMA nodes
		}
	}
	return h
}

// ByClaims yields the holders that got a device by a claim, in no order: also those with adminAccess, and once for each device.
func (h *Holders) ByClaims() iter.Seq[Holder] {
	return func(yield func(Holder) bool) {
		for _, by := range []map[health.DeviceID][]Holder{h.By, h.Admin} {
			for _, holders := range by {
				for _, holder := range holders {
					if holder.ByClaim() && !yield(holder) {
						return
					}
				}
			}
		}
	}
}

// addClaims adds the devices of a container's claims.
func (h *Holders) addClaims(claims []*podsapi.DynamicResource, holder Holder, resolve ClaimResolver) {
	for _, claim := range claims {
		for _, r := range claim.GetClaimResources() {
			holder.Resource, holder.DeviceID = "", r.GetDeviceName()
			holder.Claim = ClaimRef{Name: claim.GetClaimName(), Driver: r.GetDriverName(), Pool: r.GetPoolName(), ShareID: r.GetShareId()}
			if names := r.GetCdiDevices(); len(names) > 0 {
				holder.Claim.CDI = names[0].GetName()
			}
			if !holder.ByClaim() {
				continue
			}
			device, admin, ok := resolve(claim.GetClaimNamespace(), holder.DeviceID, holder.Claim)
			switch {
			case ok && admin:
				h.Admin[device] = append(h.Admin[device], holder)
			case ok:
				h.By[device] = append(h.By[device], holder)
			}
		}
	}
}

func compareHolders(a, b Holder) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container),
		cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.DeviceID, b.DeviceID), cmp.Compare(a.Claim.Name, b.Claim.Name),
		cmp.Compare(a.Claim.Driver, b.Claim.Driver), cmp.Compare(a.Claim.Pool, b.Claim.Pool), cmp.Compare(a.Claim.ShareID, b.Claim.ShareID),
		cmp.Compare(a.Claim.CDI, b.Claim.CDI))
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
