package sequence

import (
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// The DeviceClasses of the chart. The first one is also the name of the driver.
const (
	GPUClass = "gpu.nvidia.com"
	MIGClass = "mig.nvidia.com"
)

// The forms of claims.
const (
	ClaimGPU = iota
	ClaimTwoGPUs
	ClaimMIG
	ClaimShare
	ClaimAdmin
	ClaimForms // their number
)

// Request returns the request of a claim of a form.
func Request(form int) *resourceapi.ExactDeviceRequest {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: GPUClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1}
	switch form {
	case ClaimTwoGPUs:
		exactly.Count = 2
	case ClaimMIG:
		exactly.DeviceClassName = MIGClass
	case ClaimShare:
		exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			"memory": resource.MustParse("8Gi"),
		}}
	case ClaimAdmin:
		exactly.AdminAccess = new(true)
		exactly.Tolerations = []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	}
	return exactly
}

// devicesOf returns the devices that slices publish, and their IDs by the names in slices.
func devicesOf(published []resourceapi.ResourceSlice) (devices Node, byName map[string]string) {
	byName = make(map[string]string)
	for _, s := range published {
		for _, d := range s.Spec.Devices {
			memory := d.Capacity["memory"].Value
			v := Device{ID: *d.Attributes["uuid"].StringValue, Memory: uint64(memory.Value())} //nolint:gosec // positive
			if parent := d.Attributes["parentUUID"].StringValue; parent != nil {
				v.Parent = *parent
			}
			v.MIGMode = *d.Attributes["type"].StringValue == "mig-parent"
			devices = append(devices, v)
			byName[d.Name] = v.ID
		}
	}
	return devices, byName
}

// IDHold returns what the ID of a resource of the device plugin means.
func IDHold(of, id string) Hold {
	device, rest, shared := strings.Cut(id, "::")
	h := Hold{Device: device, Mode: Whole, Way: of}
	if !shared {
		return h
	}
	h.Mode = Replica
	if form, _, more := strings.Cut(rest, "::"); more {
		h.Way += " " + form
		if mib, isUnit := strings.CutSuffix(strings.TrimSuffix(form, "-mps"), "Mi"); isUnit && !strings.HasPrefix(form, "mps") {
			size, _ := strconv.ParseUint(mib, 10, 64)
			h.Mode, h.Bytes = Unit, size<<20
		}
	}
	return h
}

// ResultHold returns what a result of a claim's allocation means.
func ResultHold(pod, device string, r resourceapi.DeviceRequestAllocationResult) Hold {
	h := Hold{Pod: pod, Device: device, Mode: Whole, Way: DRA}
	switch {
	case r.AdminAccess != nil && *r.AdminAccess:
		h.Mode = Admin
	case r.ShareID != nil:
		q := r.ConsumedCapacity["memory"]
		h.Mode, h.Bytes = Share, uint64(q.Value()) //nolint:gosec // positive
	}
	return h
}

// Allocated returns what the scheduler has given to claims, whether a container has it or not.
func Allocated(claims []resourceapi.ResourceClaim, byName map[string]string) (all []Hold) {
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, r := range claim.Status.Allocation.Devices.Results {
			all = append(all, ResultHold(claim.Name, byName[r.Device], r))
		}
	}
	return all
}

// Offered returns what a new claim can get of what slices publish: the scheduler keeps it from what is tainted and allocated.
func Offered(published []resourceapi.ResourceSlice, allocated []Hold) (all []Hold) {
	taken := make(map[string]Mode)
	for _, h := range allocated {
		if h.Mode == Whole || h.Mode == Share && taken[h.Device] == "" {
			taken[h.Device] = h.Mode
		}
	}
	for _, slice := range published {
		for _, d := range slice.Spec.Devices {
			h := Hold{Device: *d.Attributes["uuid"].StringValue, Mode: Whole, Way: DRA}
			if d.AllowMultipleAllocations != nil && *d.AllowMultipleAllocations {
				h.Mode = Share
			}
			tainted := slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone })
			if by := taken[h.Device]; !tainted && by != Whole && (by == "" || h.Mode != Whole) {
				all = append(all, h)
			}
		}
	}
	return all
}
