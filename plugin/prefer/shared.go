package prefer

import (
	"cmp"
	"slices"
)

// chooseShared completes the set with replicas and MIG devices in rounds, so that no device is taken again while another
// is free.
func (c *choice) chooseShared(packed bool) {
	u := newUsage(c)
	for c.remaining > 0 {
		round := u.round()
		if len(round) > c.remaining {
			u.takeBest(round, packed)
			return
		}
		for _, d := range round { // all are taken, so their order does not matter
			u.take(d)
		}
	}
}

// usage counts how the devices behind the IDs are used, for one request.
type usage struct {
	*choice
	open  []int   // devices that may have a free ID
	next  []int   // by device: units already examined
	free  []int   // by device: available IDs
	taken []int   // by device: IDs required or chosen in this request
	used  []int   // by device: taken, and those in use before
	onGPU []int   // by GPU: used
	near  []int32 // by GPU: score with the GPUs taken from
}

func newUsage(c *choice) *usage {
	n := len(c.layout)
	u := &usage{
		choice: c, next: make([]int, n), free: make([]int, n), taken: make([]int, n), used: make([]int, n),
		onGPU: make([]int, c.gpus), near: make([]int32, c.gpus),
	}
	for d := range c.layout {
		for _, s := range c.unitsOf(d) {
			switch s {
			case available:
				u.free[d]++
			case required:
				u.add(d)
			case excluded:
			default: // an ID that the kubelet does not offer is in use
				u.used[d]++
				u.onGPU[c.gpu[d]]++
			}
		}
		if u.free[d] > 0 {
			u.open = append(u.open, d)
		}
	}
	return u
}

// add counts an ID of the device as taken.
func (u *usage) add(device int) {
	gpu := u.gpu[device]
	if u.taken[device] == 0 && u.score != nil {
		for g, score := range u.score[gpu] {
			u.near[g] += score
		}
	}
	u.taken[device]++
	u.used[device]++
	u.onGPU[gpu]++
}

// take chooses the first available ID of a device.
func (u *usage) take(device int) {
	for {
		unit := u.first[device] + u.next[device]
		u.next[device]++
		if u.status[unit] == available {
			u.choose(unit)
			u.free[device]--
			u.add(device)
			return
		}
	}
}

// round returns the devices that this request has taken from least, unhealthy ones only if no other is left. It is not
// empty as long as an ID is available.
func (u *usage) round() []int {
	u.open = slices.DeleteFunc(u.open, func(d int) bool { return u.free[d] == 0 })
	turn := func(d int) int {
		if u.rank[d] >= rankUnhealthy {
			return len(u.status) + u.taken[d] // beyond every turn of the others
		}
		return u.taken[d]
	}
	var round []int
	for _, d := range u.open {
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

// takeBest takes the remaining IDs from the best devices of a round, one at a time, because each choice changes the use
// of a GPU and what is near. Both are equal for all devices of one GPU, so their order stays and only the first device of
// each GPU is compared.
func (u *usage) takeBest(round []int, packed bool) {
	compare := func(a, b int) int { return u.compare(a, b, packed) }
	queues := make([][]int, len(u.onGPU)) // by GPU
	for _, d := range round {
		queues[u.gpu[d]] = append(queues[u.gpu[d]], d)
	}
	queues = slices.DeleteFunc(queues, func(q []int) bool { return len(q) == 0 })
	for _, q := range queues {
		slices.SortFunc(q, compare)
	}
	for u.remaining > 0 {
		first := 0
		for i, q := range queues {
			if i > 0 && compare(q[0], queues[first][0]) < 0 {
				first = i
			}
		}
		u.take(queues[first][0])
		if queues[first] = queues[first][1:]; len(queues[first]) == 0 {
			queues = slices.Delete(queues, first, first+1)
		}
	}
}

// compare returns a negative number if a is the better device to take from. Most calls end at the first two values.
func (u *usage) compare(a, b int, packed bool) int {
	if c := cmp.Compare(u.rank[a], u.rank[b]); c != 0 {
		return c
	}
	x, y := u.gpu[a], u.gpu[b]
	use := cmp.Compare(u.onGPU[x], u.onGPU[y])
	if use == 0 {
		use = cmp.Compare(u.used[a], u.used[b])
	}
	if packed {
		use = -use
	}
	if use != 0 {
		return use
	}
	return cmp.Or(cmp.Compare(u.near[y], u.near[x]), cmp.Compare(a, b))
}
