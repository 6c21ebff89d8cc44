package plugin

import (
	"cmp"
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
func prefer(t *wiring, r Resource, policy string, available, required []string, size int) []string {
	c := newChoice(t, r, required, available, size)
	if len(c.set) == c.size || c.size == len(c.pool) {
		return c.pool[:c.size]
	}
	musts := len(c.set)
	if t.shared {
		c.share(policy == AllocationPacked)
	} else {
		c.connect()
	}
	// What was not asked for comes in the layout's order, however it was found.
	slices.SortFunc(c.set[musts:], func(a, b int) int { return cmp.Compare(c.order[a], c.order[b]) })
	ids := make([]string, len(c.set))
	for n, i := range c.set {
		ids[n] = c.pool[i]
	}
	return ids
}

// choice is one question of the kubelet's. Devices are numbers: places in the pool.
type choice struct {
	t     *wiring
	pool  []string // the required ids, then the others, each once
	set   []int    // what is chosen; at first what is required
	size  int      // how many there must be
	order []int    // by device: its place in the layout, who goes first among equals
	rank  []int    // by device: how ill it is, 0 for well
	known []int    // by device: its place in the wiring, -1 if it has none
}

func newChoice(t *wiring, r Resource, required, available []string, size int) *choice {
	n := len(required) + len(available)
	cells := make([]int, 3*n)
	c := &choice{t: t, pool: make([]string, 0, n), order: cells[:0:n], rank: cells[n : n : 2*n], known: cells[2*n : 2*n : 3*n]}
	seen, strangers := make([]bool, len(t.of)), make(map[string]bool)
	add := func(id string) {
		at, known := t.at[id]
		switch {
		case known && !seen[at]:
			seen[at] = true
			c.pool, c.order, c.known = append(c.pool, id), append(c.order, at), append(c.known, at)
			c.rank = append(c.rank, rank(r.Devices[at].State.Verdict.State))
		case !known && !strangers[id]:
			strangers[id] = true
			c.order, c.known = append(c.order, len(t.of)+len(c.pool)), append(c.known, -1)
			c.pool, c.rank = append(c.pool, id), append(c.rank, rankUnknownDevice)
		}
	}
	for _, id := range required {
		add(id)
	}
	musts := len(c.pool)
	for _, id := range available {
		add(id)
	}
	c.size = max(0, min(size, len(c.pool)))
	for i := range min(musts, c.size) {
		c.set = append(c.set, i)
	}
	return c
}

// The ranks from which Allocate would refuse a device.
const (
	rankUnhealthy     = 3
	rankUnknownDevice = 4 // in no layout
)

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

// sorted returns all devices by the layout's order.
func (c *choice) sorted() []int {
	at := make([]int, len(c.t.of)+len(c.pool)) // one more than the device at that place, 0 if there is none
	for i, place := range c.order {
		at[place] = i + 1
	}
	all := make([]int, 0, len(c.pool))
	for _, i := range at {
		if i > 0 {
			all = append(all, i-1)
		}
	}
	return all
}

// rest returns the devices that are not chosen yet, by the layout's order.
func (c *choice) rest() []int {
	return slices.DeleteFunc(c.sorted(), func(i int) bool { return slices.Contains(c.set, i) })
}

func (c *choice) gpu(i int) int {
	if c.known[i] < 0 {
		return -1
	}
	return c.t.gpu[c.known[i]]
}

// connect completes the set with whole GPUs. Health decides alone which rank is the last that is
// needed: all better ones are in the set, and connections only decide between those of that rank.
func (c *choice) connect() {
	rest := c.rest()
	slices.SortStableFunc(rest, func(a, b int) int { return cmp.Compare(c.rank[a], c.rank[b]) })
	last := c.rank[rest[c.size-len(c.set)-1]]
	candidates := rest[:0:0]
	for _, i := range rest {
		switch {
		case c.rank[i] < last:
			c.set = append(c.set, i)
		case c.rank[i] == last:
			candidates = append(candidates, i)
		}
	}
	k := c.size - len(c.set)
	if k == len(candidates) || len(c.order) > maxConnected {
		c.set = append(c.set, candidates[:k]...)
		return
	}
	for _, n := range c.problem(candidates, k).solve() {
		c.set = append(c.set, candidates[n])
	}
}

// problem puts the question to connect.go: which k of the candidates go with the set.
func (c *choice) problem(candidates []int, k int) *problem {
	p := newProblem(len(candidates), k)
	for n, i := range candidates {
		for m, j := range candidates {
			if n != m {
				p.score[n][m] = c.t.between(c.gpu(i), c.gpu(j))
			}
		}
		for _, j := range c.set {
			p.gain[n] += c.t.between(c.gpu(i), c.gpu(j))
		}
		for j := range c.order {
			if i != j {
				p.loss[n] += c.t.between(c.gpu(i), c.gpu(j))
			}
		}
	}
	return p
}
