// Package prefer chooses the devices of a container for the kubelet's GetPreferredAllocation. It is pure.
package prefer

import (
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/deviceid"
)

// Device is a device of which the kubelet may allocate units.
type Device struct {
	State    *health.DeviceState
	Form     deviceid.Form // of the units' IDs
	Units    int           // 1 of a whole device
	Withheld bool          // not offered to new pods
	Alone    bool          // a container with a unit gets units of no other device: MPS or a part of the memory serves it
}

// Request is one container's question.
type Request struct {
	Available []string // the IDs that the kubelet may choose from
	Required  []string // the IDs that must be in the answer
	Size      int      // of the answer
	Packed    bool     // prefer the GPU that is used most, not the one that is used least; for replicas and MIG devices
	BestFit   bool     // for one ID of devices that are Alone: prefer the device with the fewest available, instead of Packed
}

// Allocator answers the requests for one resource. It keeps the topology of the GPUs from call to call, because that
// changes only with the inventory. The zero value is ready for use, from any goroutine.
type Allocator struct {
	mu       sync.Mutex // guards topology
	topology *topology
}

// Choose returns r.Size of the available IDs, including the required ones. An error would make the kubelet refuse the
// pod, so Choose has none: unknown devices come last, unknown links score 0, and if fewer than r.Size IDs are available
// it returns all of them. Equal requests have equal answers.
//
// Whole GPUs: healthy before degraded, then the best connected set, then the set that leaves the best connected rest. Among more than
// maxExact equally healthy GPUs, the first ones.
//
// Replicas and MIG devices: no device twice while another is free, then healthy before degraded, then from the GPU
// that is used least or most.
//
// Devices that are Alone: all IDs from one of them that has enough, healthy before degraded, then the one with the fewest
// available, which keeps large requests possible.
//
// Withheld and unhealthy devices are last in any case.
func (a *Allocator) Choose(devices []Device, r Request) []string {
	a.mu.Lock()
	if a.topology == nil || !a.topology.matches(devices) {
		a.topology = newTopology(devices)
	}
	t := a.topology
	a.mu.Unlock()

	c := newChoice(t, devices, r)
	switch {
	case c.remaining >= c.available:
		for i, s := range c.status {
			if s == available {
				c.choose(i)
			}
		}
	case c.remaining > 0 && c.chooseAlone(r.BestFit):
	case c.remaining > 0 && t.shared:
		c.chooseShared(r.Packed)
	case c.remaining > 0:
		c.chooseGPUs()
	}
	return c.answer(r.Size)
}

// choice is the state of one request. It refers to an ID by the number of its unit: there may be thousands of IDs, and
// each ID of the request is looked up once.
type choice struct {
	*topology
	layout    []Device
	status    []status // by unit
	rank      []int    // by device
	required  []string // known and unknown IDs, in the order of the request
	unknown   []string // available IDs that the layout lacks, without the required ones
	available int      // IDs that may still be chosen
	remaining int      // IDs to choose
}

// status is what a request says about a unit, and then what was decided.
type status uint8

const (
	unlisted  status = iota // in use, or not offered by the kubelet
	available               // may be chosen
	excluded                // available, but of a device that is Alone, and others are chosen
	required                // must be in the answer
	chosen
)

func newChoice(t *topology, devices []Device, r Request) *choice {
	c := &choice{topology: t, layout: devices, status: make([]status, t.units), rank: make([]int, len(devices))}
	for d := range devices {
		c.rank[d] = healthRank(devices[d].State.Verdict.State)
		if devices[d].Withheld {
			c.rank[d] = rankUnhealthy
		}
	}
	unknown := make(map[string]bool)
	for _, id := range r.Required {
		i, found := t.find(id)
		switch {
		case found && c.status[i] == unlisted:
			c.status[i] = required
		case !found && !unknown[id]:
			unknown[id] = true
		default: // a duplicate
			continue
		}
		c.required = append(c.required, id)
	}
	for _, id := range r.Available {
		switch i, found := t.find(id); {
		case found && c.status[i] == unlisted:
			c.status[i] = available
			c.available++
		case !found && !unknown[id]:
			unknown[id] = true
			c.unknown = append(c.unknown, id)
		}
	}
	c.remaining = max(0, r.Size-len(c.required))
	return c
}

func (c *choice) choose(unit int) {
	c.status[unit] = chosen
	c.remaining--
}

// unitsOf returns what was decided about the units of a device.
func (c *choice) unitsOf(device int) []status {
	return c.status[c.first[device]:][:c.layout[device].Units]
}

// count returns how many units of a device have a status.
func (c *choice) count(device int, s status) (n int) {
	for _, t := range c.unitsOf(device) {
		if t == s {
			n++
		}
	}
	return n
}

// answer returns the required IDs, then the chosen ones in the layout's order, then unknown ones.
func (c *choice) answer(size int) []string {
	size = max(0, min(size, len(c.required)+c.units+len(c.unknown)))
	ids := append(make([]string, 0, max(size, len(c.required))), c.required...)
	for d := range c.layout {
		for n, s := range c.unitsOf(d) {
			if s == chosen {
				ids = append(ids, c.layout[d].Form.ID(c.layout[d].State.Device.ID, n).String())
			}
		}
	}
	ids = append(ids, c.unknown...)
	return ids[:min(size, len(ids))]
}

// chooseGPUs completes the set with whole GPUs. Health alone decides the worst rank that is needed: all GPUs of better
// ranks are in the set, and connections decide among the GPUs of the worst rank.
func (c *choice) chooseGPUs() {
	var byRank [rankUnhealthy + 1][]int
	for i, s := range c.status {
		if s == available {
			byRank[c.rank[i]] = append(byRank[c.rank[i]], i)
		}
	}
	worst := 0
	for ; c.remaining > len(byRank[worst]); worst++ {
		for _, i := range byRank[worst] {
			c.choose(i)
		}
	}
	candidates := byRank[worst]
	if c.score == nil || c.remaining == len(candidates) || len(candidates) > maxExact {
		for _, i := range candidates[:c.remaining] {
			c.choose(i)
		}
		return
	}
	for _, n := range c.graph(candidates).best() {
		c.choose(candidates[n])
	}
}

// graph returns the candidates with their scores.
func (c *choice) graph(candidates []int) *graph {
	g := newGraph(len(candidates), c.remaining)
	for n, i := range candidates {
		score := c.score[c.gpu[i]]
		for m, j := range candidates {
			if n != m {
				g.score[n][m] = score[c.gpu[j]]
			}
		}
		for j, s := range c.status {
			if s == unlisted || j == i {
				continue
			}
			g.loss[n] += score[c.gpu[j]]
			if s != available {
				g.gain[n] += score[c.gpu[j]]
			}
		}
	}
	return g
}
