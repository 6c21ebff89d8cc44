package plugin

import (
	"cmp"
	"slices"
)

// share completes the set with replicas and MIG devices, one by one.
func (c *choice) share(packed bool) {
	s := newShares(c)
	for _, i := range c.set {
		s.take(c, i)
	}
	for len(c.set) < c.size {
		best := -1
		for d := range s.free {
			if len(s.free[d]) > 0 && (best < 0 || s.compare(d, best, packed) < 0) {
				best = d
			}
		}
		i := s.free[best][0]
		s.free[best] = s.free[best][1:]
		s.take(c, i)
		c.set = append(c.set, i)
	}
}

// shares is how the devices behind replicas are used, those of one question. Devices are numbered by
// the layout's order.
type shares struct {
	device []int   // by place in the pool: the device behind it
	free   [][]int // by device: what of it can still be taken, by the layout's order
	rank   []int   // by device
	gpu    []int   // by device; a device that nobody knows has a GPU of its own
	taken  []int   // by device: in this question
	used   []int   // by device: in this question and before
	onGPU  []int   // by GPU: the same
	near   []int32 // by GPU: how well it is connected with those taken from
}

func newShares(c *choice) *shares {
	s := &shares{device: make([]int, len(c.pool)), onGPU: slices.Clone(c.t.units), near: make([]int32, len(c.t.units))}
	number := make([]int, len(c.t.of)) // by number in the wiring: one more than ours, 0 if it is not in the pool
	sorted := c.sorted()
	for _, i := range sorted {
		at := c.known[i]
		if at < 0 {
			s.onGPU, s.near = append(s.onGPU, 1), append(s.near, 0)
			s.device[i] = s.add(c.rank[i], len(s.onGPU)-1)
		} else {
			if number[c.t.device[at]] == 0 {
				number[c.t.device[at]] = s.add(c.rank[i], c.gpu(i)) + 1
			}
			s.device[i] = number[c.t.device[at]] - 1
		}
		// What is in the pool is not in use.
		s.onGPU[s.gpu[s.device[i]]]--
		s.used[s.device[i]]--
	}
	for _, device := range c.t.device {
		if d := number[device] - 1; d >= 0 {
			s.used[d]++
		}
	}
	chosen := make([]bool, len(c.pool))
	for _, i := range c.set {
		chosen[i] = true
	}
	for _, i := range sorted {
		if !chosen[i] {
			s.free[s.device[i]] = append(s.free[s.device[i]], i)
		}
	}
	return s
}

func (s *shares) add(rank, gpu int) int {
	s.free, s.rank, s.gpu = append(s.free, nil), append(s.rank, rank), append(s.gpu, gpu)
	s.taken, s.used = append(s.taken, 0), append(s.used, 0)
	return len(s.free) - 1
}

// take notes that a place of the pool is in the set.
func (s *shares) take(c *choice, i int) {
	d := s.device[i]
	if s.taken[d] == 0 && c.known[i] >= 0 && c.t.score != nil {
		for g, score := range c.t.score[s.gpu[d]] {
			s.near[g] += score
		}
	}
	s.taken[d]++
	s.used[d]++
	s.onGPU[s.gpu[d]]++
}

// compare reports which of two devices is the better one to take from: negative for a.
func (s *shares) compare(a, b int, packed bool) int {
	usable := func(d int) int { return max(s.rank[d], rankUnhealthy-1) }
	use := cmp.Or(cmp.Compare(s.onGPU[s.gpu[a]], s.onGPU[s.gpu[b]]), cmp.Compare(s.used[a], s.used[b]))
	if packed {
		use = -use
	}
	return cmp.Or(
		cmp.Compare(usable(a), usable(b)), // what Allocate would refuse is the very last
		cmp.Compare(s.taken[a], s.taken[b]),
		cmp.Compare(s.rank[a], s.rank[b]),
		use,
		cmp.Compare(s.near[s.gpu[b]], s.near[s.gpu[a]]),
		cmp.Compare(a, b),
	)
}
