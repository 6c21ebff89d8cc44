package plugin

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"testing"

	"go.uber.org/zap"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// modelNode is a node with a plugin and a model of the kubelet: the kubelet allocates IDs that it considers free and healthy, asks
// the plugin which of them it prefers, and keeps them for a container until that ends.
type modelNode struct {
	*testing.T
	*rand.Rand
	layouts *layoutCache
	cfg     Config
	snap    *health.Snapshot
	healthy map[string]map[string]bool // by resource: the IDs of the newest list that the kubelet received, and whether they are healthy
	pods    []modelPod
	uuids   int // given to MIG devices so far
	stats   map[string]int
}

// modelPod is a pod of one container.
type modelPod struct {
	name, resource string
	ids            []string
	memory         map[health.DeviceID]uint64 // bytes that it may use; without replicas, which promise none
	mps, alone     bool                       // served by MPS; of one device
}

// modelConfigs are the configurations between which a node changes. Each has shares or memory.
func modelConfigs() []func(*Config) {
	return []func(*Config){
		memoryBy(memoryResource, EnforceNone),
		memoryBy(GPUShareResource, EnforceMPS),
		func(c *Config) {
			memoryBy(memoryResource, EnforceNone)(c)
			c.Sharing.Memory.Unit, c.Sharing.Memory.Reserve = "3Gi", "512Mi"
		},
		mpsBy(4),
		func(c *Config) { mpsBy(5)(c); severalShares(c) },
		func(c *Config) { // whole GPUs, and shares under the same name
			mpsBy(4, "0", "2")(c)
			severalShares(c)
			c.Sharing.MPS.Resources[0].Rename = gpu
		},
		func(c *Config) { // each kind
			mpsBy(3, "0")(c)
			severalShares(c)
			memoryBy(memoryResource, EnforceNone)(c)
			c.Sharing.Memory.Devices = []string{"1", "2"}
			c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 3, Devices: []string{"3"}}}
		},
	}
}

// mostMIG is the number of MIG devices of a partitioned GPU of the model at most.
const mostMIG = 3

// repartition replaces the MIG devices of the last GPU by n others.
func (m *modelNode) repartition(n int) {
	m.reportHolders() // nobody repartitions a GPU within seconds of an allocation
	next := *m.snap
	next.Devices = slices.DeleteFunc(slices.Clone(m.snap.Devices), func(d health.DeviceState) bool { return d.Device.Kind == health.KindMIG })
	parent := &next.Devices[len(next.Devices)-1]
	parent.Device.MIGMode = n > 0
	for i := range n {
		m.uuids++
		d := parent.Device
		d.Kind, d.ID, d.Parent, d.MIGMode = health.KindMIG, health.DeviceID(fmt.Sprintf("MIG-%d", m.uuids)), parent.Device.ID, false
		d.GI, d.CI, d.MIGIndex, d.Profile, d.Memory = i+7, 0, i, "1g.10gb", parent.Device.Memory/mostMIG
		next.Devices = append(next.Devices, health.DeviceState{Device: d, Verdict: health.Verdict{State: health.Healthy}})
	}
	m.store(&next)
}

func (m *modelNode) store(snap *health.Snapshot) {
	m.snap = snap
	m.layouts.snapshots.Store(snap)
}

func (m *modelNode) configure(change func(*Config)) {
	m.reportHolders() // the kubelet reports within seconds, and a change of the configuration is rare
	m.cfg = configured(change, func(c *Config) {
		c.MIGStrategy = MIGMixed
		if m.IntN(2) == 0 {
			c.AllocationPolicy = AllocationPacked
		}
	})
	if err := m.cfg.Validate(); err != nil {
		m.Fatal(err)
	}
	cfg := m.cfg
	m.layouts.cfg.Store(&cfg)
}

// followMPS starts and stops MPS daemons as the Follower does: a device keeps its daemon while a container holds a share of it.
func (m *modelNode) followMPS() {
	next := with(m.snap, 0, m.snap.Devices[0].Verdict.State)
	specs := m.layouts.current().mpsSpecs()
	for i := range next.Devices {
		d := &next.Devices[i]
		desired := slices.ContainsFunc(specs, func(s mps.Spec) bool { return s.Device == d.Device.ID })
		held := slices.ContainsFunc(m.pods, func(p modelPod) bool { return p.mps && p.memory[d.Device.ID] > 0 })
		switch {
		case desired && d.MPS == nil:
			d.MPS = readyDaemon()
		case !desired && !held:
			d.MPS = nil
		}
	}
	m.store(next)
}

// reportHolders passes on who holds what, as the kubelet reports it.
func (m *modelNode) reportHolders() {
	by := make(map[health.DeviceID][]podresources.Holder)
	for _, p := range m.pods {
		for _, id := range p.ids {
			by[deviceid.Parse(id).Device()] = append(by[deviceid.Parse(id).Device()], podresources.Holder{
				Namespace: "default", Pod: p.name, Container: "main",
				Resource: p.resource, DeviceID: id,
			})
		}
	}
	m.layouts.holders.Store(&podresources.Holders{By: by})
}

// sendLists sends the newest list of each resource to the kubelet.
func (m *modelNode) sendLists() {
	clear(m.healthy)
	for _, r := range m.layouts.current().resources {
		m.healthy[r.Name] = make(map[string]bool)
		for _, d := range r.message() {
			m.healthy[r.Name][d.ID] = d.Health == pluginapi.Healthy
		}
	}
}

// available returns the IDs of a resource that the kubelet may allocate.
func (m *modelNode) available(resource string) (ids []string) {
	held := make(map[string]bool)
	for _, p := range m.pods {
		for _, id := range p.ids {
			if p.resource == resource {
				held[id] = true
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(m.healthy[resource])) {
		if m.healthy[resource][id] && !held[id] {
			ids = append(ids, id)
		}
	}
	return ids
}

// leftByInitContainer returns, now and then, the IDs of a pod whose next container must use what its init container leaves.
func (m *modelNode) leftByInitContainer(resource string) []string {
	n := len(m.pods)
	if n == 0 || m.IntN(10) > 0 {
		return nil
	}
	p := m.pods[m.IntN(n)]
	if p.resource != resource || slices.ContainsFunc(p.ids, func(id string) bool { return !m.healthy[resource][id] }) {
		return nil
	}
	return p.ids
}

// admit requests IDs for a container as the kubelet does.
func (m *modelNode) admit() {
	if len(m.healthy) == 0 {
		return
	}
	names := slices.Sorted(maps.Keys(m.healthy))
	s := newServer(names[m.IntN(len(names))], m.layouts, zap.NewNop())
	available := m.available(s.name)
	if len(available) == 0 {
		return
	}
	required := m.leftByInitContainer(s.name)
	size := len(required) + 1 + m.IntN(min(len(available), 12))
	size = min(size, len(required)+len(available))
	var ids []string
	preferred := m.IntN(4) > 0
	if preferred {
		resp, err := s.GetPreferredAllocation(m.Context(),
			&pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: slices.Concat(available, required), MustIncludeDeviceIDs: required, AllocationSize: int32(size)},
				//nolint:gosec // small
			}})
		if err != nil {
			m.Fatal(err)
		}
		ids = resp.ContainerResponses[0].DeviceIDs
		for _, id := range ids {
			if !slices.Contains(available, id) && !slices.Contains(required, id) {
				m.Fatalf("%s is preferred, but not available", id)
			}
		}
	} else { // an older kubelet, or one that aligns by NUMA node
		m.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
		ids = slices.Concat(required, available[:size-len(required)])
	}
	if len(ids) != size || len(required) > 0 && !isSubset(required, ids) {
		m.Fatalf("%v, want %d with %v", ids, size, required)
	}
	fits := m.fits(s.resource(), available, required, size)
	before := s.layouts.current()
	resp, err := s.Allocate(m.Context(), request(ids))
	again, errAgain := newServer(s.name, m.layouts, zap.NewNop()).Allocate(m.Context(), request(ids))
	if fmt.Sprint(err) != fmt.Sprint(errAgain) || !reflect.DeepEqual(resp, again) || s.layouts.current() != before {
		m.Fatalf("a call changed something: %v %v, then %v %v", resp, err, again, errAgain)
	}
	if err != nil {
		checkRefusal(m.T, request(ids), err)
		if fits && preferred {
			m.Fatalf("%d of %s fit on one GPU, and preferred allocation was followed: %v", size, s.name, err)
		}
		m.stats[refusalReason(err)]++
		return
	}
	m.stats["allocated"]++
	p := modelPod{name: fmt.Sprintf("pod-%d", m.Int()), resource: s.name, ids: ids, memory: make(map[health.DeviceID]uint64)}
	r := s.resource()
	checkAnswer(m.T, r, m.cfg, ids, resp.ContainerResponses[0])
	for _, id := range ids {
		switch d, _ := r.unit(id); {
		case d.share == nil:
			p.memory[d.State.Device.ID] = d.State.Device.Memory - d.State.Device.Reserved
		case d.share.kind != SharingTimeSlicing:
			p.mps, p.alone = d.share.mps, true
			p.memory[d.State.Device.ID] = limitOf(m.T, d.share.kind, resp.ContainerResponses[0].Envs)
		}
	}
	if len(required) > 0 { // the pod's next container has these IDs now, too
		m.pods = slices.DeleteFunc(m.pods, func(q modelPod) bool { return q.resource == s.name && slices.Equal(q.ids, required) })
	}
	m.pods = append(m.pods, p)
}

// limitOf returns the memory in bytes that the environment of a container promises.
func limitOf(t *testing.T, kind Sharing, env map[string]string) uint64 {
	t.Helper()
	text := env[envMemoryLimit]
	if kind == SharingMPS {
		if _, err := fmt.Sscanf(env[envMPSMemory], "0=%s", &text); err != nil {
			t.Fatal(err)
		}
		text = text[:len(text)-1] // M
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n << 20
}

func isSubset(of, ids []string) bool {
	return !slices.ContainsFunc(of, func(id string) bool { return !slices.Contains(ids, id) })
}

// fits reports whether a request can be served: one device has enough, or the devices that a container may combine have. It is false if the
// kubelet's list is out of date for an ID that counts.
func (m *modelNode) fits(r Resource, available, required []string, size int) bool {
	group := func(id string) (health.DeviceID, bool) {
		u, ok := r.unit(id)
		switch {
		case !ok || !u.isHealthy():
			return "", false
		case u.alone():
			return u.State.Device.ID, true
		}
		return "others", true
	}
	free := make(map[health.DeviceID]int)
	for _, id := range available {
		g, ok := group(id)
		if !ok {
			return false
		}
		free[g]++
	}
	if d := r.Devices[0].share; d != nil && d.single {
		return size == 1
	}
	for _, id := range required {
		if g, ok := group(id); !ok {
			return false
		} else if first, _ := group(required[0]); g != first {
			return false
		}
	}
	if len(required) > 0 {
		first, _ := group(required[0])
		return free[first] >= size-len(required)
	}
	for _, n := range free {
		if n >= size {
			return true
		}
	}
	return false
}

// check checks what must hold after each step.
func (m *modelNode) check() {
	m.Helper()
	owner := make(map[[2]string]string)
	memory := make(map[health.DeviceID]uint64)
	for _, p := range m.pods {
		for _, id := range p.ids {
			key := [2]string{p.resource, id}
			if other := owner[key]; other != "" {
				m.Fatalf("%s of %s is held by %s and %s", id, p.resource, other, p.name)
			}
			owner[key] = p.name
		}
		for device, n := range p.memory {
			memory[device] += n
		}
		if p.alone && len(p.memory) != 1 {
			m.Fatalf("%s has %v of several GPUs", p.name, p.ids)
		}
	}
	for i := range m.snap.Devices {
		d := &m.snap.Devices[i].Device
		total := memory[d.ID]
		for _, part := range m.snap.Devices {
			if part.Device.Parent == d.ID {
				total += memory[part.Device.ID]
			}
		}
		if total > d.Memory-d.Reserved {
			m.Fatalf("%s has %d MiB for containers, and %d MiB are allocated: %+v", d.ID, (d.Memory-d.Reserved)>>20, total>>20, m.pods)
		}
	}
}

// step does one thing at random.
func (m *modelNode) step() {
	i := m.IntN(len(m.snap.Devices))
	switch n := m.IntN(100); {
	case n < 55:
		m.admit()
		if m.IntN(4) > 0 {
			m.reportHolders()
		}
	case n < 75:
		if len(m.pods) > 0 {
			p := m.IntN(len(m.pods))
			m.pods = slices.Delete(m.pods, p, p+1)
			m.reportHolders()
		}
	case n < 80: // a fault, or its end
		state := health.Unhealthy
		if m.snap.Devices[i].Verdict.State == health.Unhealthy {
			state = health.Healthy
		}
		m.store(with(m.snap, i, state))
	case n < 86:
		switch daemon := m.snap.Devices[i].MPS; {
		case daemon == nil:
		case daemon.Ready:
			m.store(mpsStopped(m.snap, i, []string{"", health.CauseMPSDown}[m.IntN(2)]))
		default:
			m.store(served(with(m.snap, i, health.Healthy), i))
		}
	case n < 90:
		m.repartition(m.IntN(mostMIG + 1))
	case n < 92:
		m.configure(modelConfigs()[m.IntN(len(modelConfigs()))])
	case n < 97:
		m.followMPS()
	default:
		m.reportHolders()
	}
	if m.IntN(3) > 0 {
		m.sendLists()
	}
	if len(m.layouts.current().withheld) > 0 {
		m.stats["withheld"]++
	}
	m.check()
	if m.IntN(5) == 0 {
		m.checkLargest()
	}
}

// checkLargest checks the largest request that each device can serve, once the kubelet and the plugin know the same.
func (m *modelNode) checkLargest() {
	m.reportHolders()
	m.sendLists()
	for _, r := range m.layouts.current().resources {
		free := make(map[health.DeviceID]int)
		for _, id := range m.available(r.Name) {
			free[deviceid.Parse(id).Device()]++
		}
		for _, d := range r.Devices {
			if d.share == nil {
				continue
			}
			id := d.State.Device.ID
			want := free[id]
			if d.share.single {
				want = min(want, 1)
			}
			if d.largest() != want {
				m.Fatalf("%s of %s: the largest request is %d, want %d", id, r.Name, d.largest(), want)
			}
		}
	}
}

// Random sequences of allocations, ends of pods, faults, repartitions, changes of the configuration and late reports.
func TestRandomAllocations(t *testing.T) {
	stats := make(map[string]int)
	for seed := range uint64(150) {
		m := &modelNode{
			T: t, Rand: rand.New(rand.NewPCG(seed, 0)), healthy: make(map[string]map[string]bool), stats: stats,
			layouts: newLayoutCache(&health.Latest[Config]{}, &health.Latest[health.Snapshot]{}, &health.Latest[podresources.Holders]{}),
		}
		m.store(sized(24, 24, 12, 40))
		m.configure(modelConfigs()[seed%uint64(len(modelConfigs()))])
		for n := range 100 {
			if m.step(); t.Failed() {
				t.Fatalf("seed %d, step %d", seed, n)
			}
		}
	}
	for _, what := range []string{
		"allocated", reasonSeveralDevices, reasonMPSNotReady, reasonUnhealthyDevice, reasonTooManyReplicas,
		"withheld",
	} {
		if stats[what] < 5 {
			t.Errorf("%s: %d times, too few to test anything: %v", what, stats[what], stats)
		}
	}
}
