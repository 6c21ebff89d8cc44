package holders

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/sequence"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

const (
	nodeName  = "node1"
	namespace = "default"
	draDriver = sequence.GPUClass
	migClass  = sequence.MIGClass

	monitorClass = "monitor.nvidia.com"
)

// classes are the chart's DeviceClasses, and the class for monitors of docs/dra.md.
type classes struct{}

func (classes) List() (all []*resourceapi.DeviceClass, _ error) {
	for name, types := range map[string]string{draDriver: "['gpu']", migClass: "['mig']", monitorClass: "['gpu', 'mig-parent']"} {
		all = append(all, &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
				Expression: fmt.Sprintf("device.driver == %q && device.attributes[%q].type in %s", draDriver, draDriver, types),
			}}},
		}})
	}
	return all, nil
}

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	all, _ := c.List()
	if i := slices.IndexFunc(all, func(d *resourceapi.DeviceClass) bool { return d.Name == name }); i >= 0 {
		return all[i], nil
	}
	return nil, fmt.Errorf("no class %s", name)
}

// scheduler allocates claims with Kubernetes' own allocator, from the slices and claims on the API server.
type scheduler struct {
	api   *apiservertest.Server
	cache *cel.Cache

	mu   sync.Mutex // guards seen
	seen []seenSlices
}

// seenSlices are the slices at a time.
type seenSlices struct {
	at     time.Time
	slices []resourceapi.ResourceSlice
}

func newScheduler(api *apiservertest.Server) *scheduler {
	return &scheduler{api: api, cache: cel.NewCache(10, cel.Features{EnableConsumableCapacity: true})}
}

// watch keeps the slices of the last seconds.
func (s *scheduler) watch(keep time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	s.seen = append(s.seen, seenSlices{now, s.api.Slices()})
	for len(s.seen) > 1 && now.Sub(s.seen[1].at) > keep {
		s.seen = s.seen[1:]
	}
}

// slices returns the slices, or with stale the oldest that are kept.
func (s *scheduler) slices(stale bool) []resourceapi.ResourceSlice {
	s.mu.Lock()
	defer s.mu.Unlock()
	if stale && len(s.seen) > 0 {
		return s.seen[0].slices
	}
	return s.api.Slices()
}

// allocate allocates a claim and stores that; ok is false if it does not fit.
func (s *scheduler) allocate(ctx context.Context, claim *resourceapi.ResourceClaim, stale bool) (ok bool, err error) {
	state := structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}
	for _, other := range s.api.Claims() {
		if other.Status.Allocation == nil {
			continue
		}
		for _, r := range other.Status.Allocation.Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			switch {
			case r.AdminAccess != nil && *r.AdminAccess:
			case r.ShareID == nil:
				state.AllocatedDevices.Insert(id)
			default:
				state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
			}
		}
	}
	var list []*resourceapi.ResourceSlice
	all := s.slices(stale)
	for i := range all {
		list = append(list, &all[i])
	}
	features := structured.Features{
		AdminAccess: true, ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true,
		PrioritizedList: true,
	}
	allocator, err := structured.NewAllocator(ctx, features, state, classes{}, list, s.cache)
	if err != nil {
		return false, err
	}
	results, err := allocator.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, []*resourceapi.ResourceClaim{claim})
	if err != nil || len(results) == 0 {
		return false, err
	}
	claim.Status.Allocation = &results[0]
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: claim.Name, UID: "pod-" + claim.UID}}
	s.api.Put(claim)
	return true, nil
}

// newClaim returns a claim of a form.
func newClaim(name string, form int) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name)},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: sequence.Request(form)}},
		}},
	}
}

// A claim that tolerates every taint never gets a GPU in MIG mode without adminAccess, whatever class of NVIDIA's or of the chart it names.
// A monitor gets it while its MIG devices are held.
func TestGPUInMIGMode(t *testing.T) {
	t.Parallel()
	api := apiservertest.New(t, nodeName)
	cfg := plugin.DefaultConfig()
	cfg.API = plugin.APIDRA
	pool := dra.BuildPool(dra.PoolInput{Config: &cfg, Snapshot: gpus()})
	for i, s := range pool.Slices {
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("slice", i)}, Spec: resourceapi.ResourceSliceSpec{
			Driver: draDriver, NodeName: new(nodeName), Devices: s.Devices,
			Pool: resourceapi.ResourcePool{Name: nodeName, Generation: 1, ResourceSliceCount: int64(len(pool.Slices))},
		}}
		api.Put(slice)
	}
	s := newScheduler(api)
	allocate := func(name, class string, edit func(*resourceapi.ExactDeviceRequest)) (devices []string) {
		t.Helper()
		c := newClaim(name, sequence.ClaimGPU)
		request := c.Spec.Devices.Requests[0].Exactly
		request.DeviceClassName, request.Tolerations = class, []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
		edit(request)
		if _, err := s.allocate(t.Context(), c, false); err != nil {
			t.Fatal(err)
		}
		if c.Status.Allocation != nil {
			for _, r := range c.Status.Allocation.Devices.Results {
				devices = append(devices, r.Device)
			}
		}
		slices.Sort(devices)
		return devices
	}
	all := func(r *resourceapi.ExactDeviceRequest) {
		r.AllocationMode, r.Count = resourceapi.DeviceAllocationModeAll, 0
	}
	if got := allocate("all", draDriver, all); !slices.Equal(got, []string{"gpu-0", "gpu-1", "gpu-2"}) {
		t.Errorf("all GPUs are %v", got)
	}
	if got := allocate("more", draDriver, func(*resourceapi.ExactDeviceRequest) {}); len(got) > 0 {
		t.Errorf("one more is %v", got)
	}
	if got := allocate("mig", migClass, all); len(got) != 2 {
		t.Errorf("the MIG devices are %v", got)
	}
	monitor := func(r *resourceapi.ExactDeviceRequest) { all(r); r.AdminAccess = new(true) }
	if got := allocate("monitor", monitorClass, monitor); !slices.Equal(got, []string{"gpu-0", "gpu-1", "gpu-2", "gpu-3"}) {
		t.Errorf("a monitor gets %v", got)
	}
}
