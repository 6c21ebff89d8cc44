package dra

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// randomCluster is a scheduler and a kubelet beside a node.
type randomCluster struct {
	*claimNode
	rng    *rand.Rand
	number int
	exist  []*resourceapi.ResourceClaim             // on the API server
	used   map[types.UID]*resourceapi.ResourceClaim // the kubelet has called for them, and unprepares them
	undone map[types.UID]bool                       // of these, claims that were never prepared, or whose last call to unprepare failed
	steps  []string
}

func (c *randomCluster) note(format string, args ...any) {
	c.steps = append(c.steps, fmt.Sprintf(format, args...))
}

// schedule makes a claim for devices that no claim of the API server has or, as a scheduler that has lost its cache, for any.
func (c *randomCluster) schedule() {
	free := map[string]uint64{"gpu-0": 79 * gib, "gpu-1": 79 * gib, "gpu-2": 79 * gib, mig0: 1, "gpu-3-mig-1g10gb-19-1": 1}
	twice := c.rng.IntN(5) == 0
	for _, other := range c.exist {
		if twice {
			break
		}
		for _, r := range other.Status.Allocation.Devices.Results {
			if isAdmin(&r) {
				continue
			}
			if memory, shared := consumedMemory(&r); shared {
				free[r.Device] -= memory
			} else {
				free[r.Device] = 0
			}
		}
	}
	c.number++
	name := fmt.Sprintf("c%d", c.number)
	var results []resourceapi.DeviceRequestAllocationResult
	add := func(device string, edits ...func(*resourceapi.DeviceRequestAllocationResult)) {
		results = append(results, result(device, append(edits, byRequest(fmt.Sprintf("r%d", len(results))))...))
	}
	for _, device := range []string{"gpu-0", "gpu-1", "gpu-2", mig0, "gpu-3-mig-1g10gb-19-1"} {
		shared := device == "gpu-0" || device == "gpu-1"
		switch kind := c.rng.IntN(6); {
		case kind == 0:
			add(device, asAdmin)
		case kind == 1 && shared:
			if memory := gib * uint64(1+c.rng.IntN(60)); memory <= free[device] {
				add(device, share(types.UID(fmt.Sprintf("s%d", c.number)), memory))
			}
		case kind == 2 && (!shared && free[device] > 0):
			add(device)
		}
	}
	if len(results) == 0 {
		return
	}
	next := claim(name, results...)
	if c.rng.IntN(3) == 0 && slices.ContainsFunc(results,
		func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Device == "gpu-2" && !isAdmin(&r) }) {
		i := slices.IndexFunc(results, func(r resourceapi.DeviceRequestAllocationResult) bool { return r.Device == "gpu-2" })
		withConfig(next, "FromClaim", gpuConfigMPS, results[i].Request)
	}
	c.create(next)
	c.exist = append(c.exist, next)
	for _, r := range results {
		memory, _ := consumedMemory(&r)
		c.note("schedule %s: %s admin=%t %d", name, r.Device, isAdmin(&r), memory>>30)
	}
}

// faulty reports whether calls may fail.
func (c *randomCluster) faulty() bool {
	full, dead := c.faults.state()
	return full || dead
}

// taken reports whether a claim that exists, or that may have a container, has a device of another one.
func (c *randomCluster) taken(one *resourceapi.ResourceClaim) bool {
	all := c.prepare.state.Load().Claims
	return slices.ContainsFunc(slices.Collect(maps.Values(c.used)), func(other *resourceapi.ResourceClaim) bool {
		known := all[other.UID]
		return other != one && known.UID != "" && (slices.Contains(c.exist, other) || known.hasSpec()) &&
			slices.ContainsFunc(other.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
				return !isAdmin(&r) && slices.ContainsFunc(one.Status.Allocation.Devices.Results,
					func(o resourceapi.DeviceRequestAllocationResult) bool {
						return !isAdmin(&o) && o.Device == r.Device
					})
			})
	})
}

// step does something, and checks that nothing is given twice.
func (c *randomCluster) step() {
	switch action := c.rng.IntN(14); {
	case action < 3 || len(c.exist) == 0:
		c.schedule()
	case action < 8:
		one := c.exist[c.rng.IntN(len(c.exist))]
		err := c.call(one).Err
		c.note("prepare %s: %v", one.Name, err)
		if err == nil {
			delete(c.undone, one.UID)
		} else if !c.faulty() && !c.taken(one) { // every other claim for its devices has ended
			c.t.Fatalf("%q", c.steps)
		} else if c.used[one.UID] == nil {
			c.undone[one.UID] = true
		}
		c.used[one.UID] = one
	case action < 10 && len(c.used) > 0:
		c.unprepareOne()
	case action < 11: // by force: the kubelet unprepares later
		i := c.rng.IntN(len(c.exist))
		c.note("delete %s", c.exist[i].Name)
		c.remove(c.exist[i])
		c.exist = slices.Delete(c.exist, i, i+1)
	case action < 12:
		at, after := 1+c.rng.IntN(4), c.rng.IntN(2) == 0
		c.faults.set(func(f *diskFaults) { f.killAt, f.after = at, after })
		c.note("kill at %d, after: %t", at, after)
	case action < 13:
		full, _ := c.faults.state()
		c.faults.setFull(!full)
		c.note("disk full: %t", !full)
	default:
		boot := c.boot
		if c.rng.IntN(4) == 0 {
			boot += "x"
			clear(c.used)
		}
		c.note("restart in %s", boot)
		c.restart(boot)
	}
	if _, dead := c.faults.state(); dead {
		c.note("killed")
		c.restart(c.boot)
	}
	c.check()
}

func (c *randomCluster) unprepareOne() {
	for uid, one := range c.used {
		err := c.unprepare(one)
		c.note("unprepare %s: %v", one.Name, err)
		c.undone[uid] = err != nil
		if err == nil {
			delete(c.used, uid)
			i := slices.IndexFunc(c.exist, func(other *resourceapi.ResourceClaim) bool { return other.UID == uid })
			if i >= 0 {
				c.remove(one)
				c.exist = slices.Delete(c.exist, i, i+1)
			}
		} else if !c.faulty() {
			c.t.Fatalf("%q", c.steps)
		}
		return
	}
}

// check compares what the checkpoint gives with what there is, and with what the kubelet uses.
func (c *randomCluster) check() {
	c.t.Helper()
	c.prepared() // the file is what is in memory
	memory := make(map[health.DeviceID]uint64)
	all := c.prepare.state.Load().Claims
	for uid, one := range all {
		for _, d := range one.Devices {
			switch {
			case d.Admin:
			case d.Memory > 0:
				memory[d.Device] += d.Memory
			default:
				memory[d.Device] += 79 * gib
			}
			if memory[d.Device] > 79*gib {
				c.t.Fatalf("%s is given twice, to %s too: %q", d.Device, uid, c.steps)
			}
		}
	}
	for uid, one := range c.used {
		if prepared := all[uid]; !c.undone[uid] && !prepared.hasSpec() {
			c.t.Fatalf("%s is not prepared: %q", one.Name, c.steps)
		}
	}
}

// Whatever is prepared, unprepared, deleted by force, killed at a write, restarted and rebooted in whatever order: no device and no memory
// is in two claims, and nothing remains.
func TestPrepareRandomSequences(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			c := &randomCluster{
				claimNode: newClaimNode(t, shareMemory), rng: rand.New(rand.NewPCG(seed, 18)),
				used: make(map[types.UID]*resourceapi.ResourceClaim), undone: make(map[types.UID]bool),
			} //nolint:gosec // a test
			for range 120 {
				c.step()
			}
			c.faults.setFull(false)
			c.restart(c.boot)
			for len(c.used) > 0 {
				c.unprepareOne()
			}
			for _, one := range c.exist {
				c.remove(one)
			}
			c.prepare.sweep(t.Context())
			if len(c.prepared())+len(c.specs()) > 0 {
				t.Errorf("left: %v, %v: %q", c.prepared(), c.specs(), c.steps)
			}
			for _, pattern := range []string{c.cfg.CDI.Dir + "/.*.tmp", filepath.Join(c.pluginDir(), "*tmp*")} {
				if left, _ := filepath.Glob(pattern); len(left) > 0 {
					t.Errorf("left: %v", left)
				}
			}
			c.wantNoMPS()
		})
	}
}
