package plugin

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	podsapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/deviceref"
)

// Holder is a container that has a device.
type Holder struct {
	Namespace string
	Pod       string
	Container string
	Resource  string // the extended resource that it came from
	DeviceID  string // what the kubelet calls the device: GPU-…, GPU-…::3, MIG-…, nvidia0/gi1
}

// Holders is who has which device, as the kubelet's pod-resources API says. It is not modified once seen.
type Holders struct {
	At  time.Time                    // when the kubelet was asked; zero if it has never answered
	Err string                       // why there is no newer answer, in words; empty if there is none to miss
	By  map[health.DeviceID][]Holder // by the device behind the id, each list sorted; nil if nothing is known
}

// holdersOf turns the kubelet's answer around. What the resolver does not know is left out: it is not a
// GPU of this node.
func holdersOf(resp *podsapi.ListPodResourcesResponse, resolve func(resource, id string) (health.DeviceID, bool)) map[health.DeviceID][]Holder {
	by := make(map[health.DeviceID][]Holder)
	for _, pod := range resp.GetPodResources() {
		for _, c := range pod.GetContainers() {
			for _, d := range c.GetDevices() {
				for _, id := range d.GetDeviceIds() {
					if device, ok := resolve(d.GetResourceName(), id); ok {
						by[device] = append(by[device], Holder{pod.GetNamespace(), pod.GetName(), c.GetName(), d.GetResourceName(), id})
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
		by[device] = slices.Compact(holders) // the kubelet names a device once for each of its NUMA nodes
	}
	return by
}

// resolver returns what finds the device behind an id of the kubelet's. The ids are those of whatever
// plugin registered the resource: a UUID (GPU-…, MIG-…) with or without a replica (::n), or, if the
// resource is for GPUs, an index ("0", of a MIG device "0:1" as in idOf) or GKE's names (nvidia0, nvidia0/gi1,
// nvidia0/gi1/vgpu2; see pkg/gpu/nvidia in container-engine-accelerators).
func resolver(cfg Config, snap *health.Snapshot) func(resource, id string) (health.DeviceID, bool) {
	ours := make(map[string]bool)
	cfg.Enabled = true // the names count also when it is another plugin that serves them
	for _, r := range Layout(cfg, snap) {
		ours[r.Name] = true
	}
	gke := regexp.MustCompile(`^nvidia(\d+)(?:/gi(\d+))?(?:/vgpu\d+)?$`)
	return func(resource, id string) (health.DeviceID, bool) {
		device := deviceOf(id)
		if strings.HasPrefix(id, "GPU-") || strings.HasPrefix(id, "MIG-") {
			return device, true
		}
		if !ours[resource] && !strings.HasPrefix(resource, "nvidia.com/") || snap == nil {
			return "", false
		}
		if index, err := strconv.Atoi(string(device)); err == nil {
			return search(snap, func(d health.Device) bool { return d.Kind == health.KindGPU && d.Index == index })
		}
		if gpu, mig, found := strings.Cut(string(device), ":"); found {
			return searchMIG(snap, gpu, mig)
		}
		m := gke.FindStringSubmatch(string(device))
		if m == nil {
			return "", false
		}
		minor, err := strconv.Atoi(m[1])
		if err != nil {
			return "", false
		}
		if m[2] == "" {
			return search(snap, func(d health.Device) bool { return d.Kind == health.KindGPU && d.Minor == minor })
		}
		gi, err := strconv.Atoi(m[2])
		if err != nil {
			return "", false
		}
		return search(snap, func(d health.Device) bool { return d.Kind == health.KindMIG && d.Minor == minor && d.GI == gi })
	}
}

func search(snap *health.Snapshot, is func(health.Device) bool) (health.DeviceID, bool) {
	for i := range snap.Devices {
		if is(snap.Devices[i].Device) {
			return snap.Devices[i].Device.ID, true
		}
	}
	return "", false
}

// searchMIG finds a MIG device by the driver's index of its GPU and its own on it.
func searchMIG(snap *health.Snapshot, gpu, mig string) (health.DeviceID, bool) {
	index, ok := deviceref.ParseDigits(gpu)
	place, okMIG := deviceref.ParseDigits(mig)
	if !ok || !okMIG {
		return "", false
	}
	return search(snap, func(d health.Device) bool { return d.Kind == health.KindMIG && d.Index == index && d.MIGIndex == place })
}
