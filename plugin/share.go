package plugin

import (
	"cmp"
	"slices"
)

// share completes the set with replicas and MIG devices: in rounds, so that no device is taken from again
// while another is free. What Allocate would refuse is the very last.
func (c *choice) share(packed bool) {
	s := newShares(c)
	for c.left > 0 {
		round := s.round()
		if len(round) > c.left {
			s.pick(round, packed)
			return
		}
		for _, d := range round { // in whichever order, it comes to the same
			s.take(d)
		}
	}
}

// shares is how the devices behind replicas are used, those of one question.
type shares struct {
	*choice
	gpu   []int   // by device: the GPU that it is, or is a part of
	open  []int   // the devices of which something may be free
	next  []int   // by device: how many of its places were looked at
	free  []int   // by device: how many of its places are available
	taken []int   // by device: in this question
	used  []int   // by device: in this question and before
	onGPU []int   // by GPU: the same
	near  []int32 // by GPU: how well it is connected with those taken from
}

func newShares(c *choice) *shares {
	n := len(c.t.parts)
	s := &shares{
		choice: c, gpu: make([]int, n), next: make([]int, n), free: make([]int, n), taken: make([]int, n), used: make([]int, n),
		onGPU: make([]int, len(c.t.units)), near: make([]int32, len(c.t.units)),
	}
	for d, places := range c.t.parts {
		s.gpu[d] = c.t.gpu[places[0]]
	}
	for place, is := range c.at {
		switch d := c.t.device[place]; is {
		case available:
			s.free[d]++
		case required:
			s.use(d)
		default: // a place that nobody offers is in use
			s.used[d]++
			s.onGPU[c.t.gpu[place]]++
		}
	}
	for d, free := range s.free {
		if free > 0 {
			s.open = append(s.open, d)
		}
	}
	return s
}

// use notes that a device is taken from.
func (s *shares) use(d int) {
	gpu := s.gpu[d]
	if s.taken[d] == 0 && s.t.score != nil {
		for g, score := range s.t.score[gpu] {
			s.near[g] += score
		}
	}
	s.taken[d]++
	s.used[d]++
	s.onGPU[gpu]++
}

// take takes the first of what is free of a device.
func (s *shares) take(d int) {
	for {
		place := s.t.parts[d][s.next[d]]
		s.next[d]++
		if s.at[place] == available {
			s.choose(place)
			s.free[d]--
			s.use(d)
			return
		}
	}
}

// round returns the devices whose turn it is: the usable ones taken from least in this question. There is
// one as long as anything is available.
func (s *shares) round() []int {
	s.open = slices.DeleteFunc(s.open, func(d int) bool { return s.free[d] == 0 })
	turn := func(d int) int {
		if s.rank[d] >= rankUnhealthy {
			return len(s.at) + s.taken[d] // after as many turns as there can be of the others
		}
		return s.taken[d]
	}
	var round []int
	for _, d := range s.open {
		if len(round) > 0 && turn(d) > turn(round[0]) {
			continue
		}
		if len(round) > 0 && turn(d) < turn(round[0]) {
			round = round[:0]
		}
		round = append(round, d)
	}
	return round
}

// pick takes from as many devices of a round as are left to be chosen, one by one: each choice tells which
// GPU is used most, and which is near. Devices of one GPU have all of that in common, so that their order
// stands, and only the first of each GPU need be compared.
func (s *shares) pick(round []int, packed bool) {
	byUse := func(a, b int) int { return s.byUse(a, b, packed) }
	queues := make([][]int, len(s.onGPU))
	for _, d := range round {
		queues[s.gpu[d]] = append(queues[s.gpu[d]], d)
	}
	queues = slices.DeleteFunc(queues, func(q []int) bool { return len(q) == 0 })
	for _, q := range queues {
		slices.SortFunc(q, byUse)
	}
	for s.left > 0 {
		first := 0
		for i, q := range queues {
			if i > 0 && byUse(q[0], queues[first][0]) < 0 {
				first = i
			}
		}
		s.take(queues[first][0])
		if queues[first] = queues[first][1:]; len(queues[first]) == 0 {
			queues = slices.Delete(queues, first, first+1)
		}
	}
}

// byUse compares two devices: negative if a is the better one to take from. It is called often, and seldom gets
// far.
func (s *shares) byUse(a, b int, packed bool) int {
	if c := cmp.Compare(s.rank[a], s.rank[b]); c != 0 {
		return c
	}
	x, y := s.gpu[a], s.gpu[b]
	use := cmp.Compare(s.onGPU[x], s.onGPU[y])
	if use == 0 {
		use = cmp.Compare(s.used[a], s.used[b])
	}
	switch {
	case use != 0 && packed:
		return -use
	case use != 0:
		return use
	case s.near[x] != s.near[y]:
		return cmp.Compare(s.near[y], s.near[x])
	}
	return cmp.Compare(a, b)
}
