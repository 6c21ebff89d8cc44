package plugin

import (
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// prefer chooses size of the available devices, the required ones among them. It cannot fail, because
// the kubelet refuses the pod if it does: devices and links it does not know count as the worst, and if
// there are fewer than size devices it returns all. The same question always has the same answer.
//
// Whole GPUs: healthy before degraded ones, then the set that is best connected, then the one that
// leaves the best connected others. See connect.
//
// Shared and MIG devices: never the same device twice while another is free, then healthy before
// degraded ones, then from the GPU that is used least or most, as the policy says. See share.
//
// A device that is withheld is the last of all, whatever the kubelet has heard of it.
func prefer(t *wiring, r Resource, policy string, available, required []string, size int) []string {
	c := newChoice(t, r, available, required, size)
	switch {
	case c.left >= c.free:
		c.all()
	case c.left > 0 && t.shared:
		c.share(policy == AllocationPacked)
	case c.left > 0:
		c.connect()
	}
	return c.answer(size)
}

// choice is one question of the kubelet's. A device is a number: its place in the layout, who goes first
// among equals. Nothing here is looked up by name but an id of the question, once: there may be thousands,
// and the kubelet lists them in any order.
type choice struct {
	t         *wiring
	r         Resource
	at        []standing      // by place
	rank      []int           // by device, as the wiring numbers them: how ill it is, 0 for well
	musts     []string        // what is required, in the order asked for
	free      int             // how many places are available
	left      int             // how many devices are still to be chosen
	strangers []string        // available, and in no layout: the last to be chosen; some may be there twice
	met       map[string]bool // the strangers that are required
}

// standing is what a question says of a place, and then what is decided about it.
type standing uint8

const (
	absent    standing = iota
	available          // may be chosen
	required           // must be
	chosen             // by us
)

func newChoice(t *wiring, r Resource, may, must []string, size int) *choice {
	c := &choice{t: t, r: r, at: make([]standing, len(t.of)), rank: make([]int, len(t.parts))}
	for device, places := range t.parts {
		c.rank[device] = rank(r.Devices[places[0]].State.Verdict.State)
		if slices.ContainsFunc(places, func(place int) bool { return r.Devices[place].withheld != "" }) {
			c.rank[device] = rankUnhealthy
		}
	}
	for _, id := range must {
		if place := t.place(id); place >= 0 && c.at[place] == absent {
			c.at[place] = required
			c.musts = append(c.musts, id)
		} else if place < 0 && !c.met[id] {
			if c.met == nil {
				c.met = make(map[string]bool)
			}
			c.met[id] = true
			c.musts = append(c.musts, id)
		}
	}
	for _, id := range may {
		if place := t.place(id); place < 0 {
			c.strangers = append(c.strangers, id)
		} else if c.at[place] == absent {
			c.at[place] = available
			c.free++
		}
	}
	c.left = max(0, size-len(c.musts))
	return c
}

// The rank from which Allocate would refuse a device.
const rankUnhealthy = 3

func rank(s health.State) int {
	switch s {
	case health.Healthy:
		return 0
	case health.Unknown:
		return 1
	case health.Degraded:
		return 2
	default:
		return rankUnhealthy
	}
}

// choose puts a place into the set.
func (c *choice) choose(place int) {
	c.at[place] = chosen
	c.left--
}

// all chooses whatever is available.
func (c *choice) all() {
	for place, is := range c.at {
		if is == available {
			c.choose(place)
		}
	}
}

// answer returns the ids: what is required first, then the rest in the layout's order, however it was found.
func (c *choice) answer(size int) []string {
	if size <= len(c.musts) {
		return c.musts[:max(0, size)]
	}
	ids := append(make([]string, 0, min(size, len(c.musts)+len(c.at)+len(c.strangers))), c.musts...)
	for place, is := range c.at {
		if is == chosen {
			ids = append(ids, c.r.Devices[place].ID)
		}
	}
	for _, id := range c.strangers {
		if len(ids) == size {
			break
		}
		if !c.met[id] {
			if c.met == nil {
				c.met = make(map[string]bool)
			}
			c.met[id] = true
			ids = append(ids, id)
		}
	}
	return ids
}

// connect completes the set with whole GPUs. Health decides alone which rank is the last that is
// needed: all better ones are in the set, and connections only decide between those of that rank.
func (c *choice) connect() {
	var of [rankUnhealthy + 1][]int // by rank: what is available
	for place, is := range c.at {
		if is == available {
			rank := c.rank[c.t.device[place]]
			of[rank] = append(of[rank], place)
		}
	}
	last := 0
	for ; c.left > len(of[last]); last++ {
		for _, place := range of[last] {
			c.choose(place)
		}
	}
	candidates := of[last]
	if c.t.score != nil && c.left < len(candidates) {
		for _, n := range c.problem(candidates).solve() {
			c.choose(candidates[n])
		}
		return
	}
	for _, place := range candidates[:c.left] {
		c.choose(place)
	}
}

// problem puts the question to connect.go: which of the candidates go with the set.
func (c *choice) problem(candidates []int) *problem {
	p := newProblem(len(candidates), c.left)
	for n, place := range candidates {
		score := c.t.score[c.t.gpu[place]]
		for m, other := range candidates {
			if n != m {
				p.score[n][m] = score[c.t.gpu[other]]
			}
		}
		for other, is := range c.at {
			if is == absent || other == place {
				continue
			}
			with := score[c.t.gpu[other]]
			p.loss[n] += with
			if is != available {
				p.gain[n] += with
			}
		}
	}
	return p
}
