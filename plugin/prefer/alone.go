package prefer

import (
	"cmp"
	"slices"
)

// others is the group of all devices that are not Alone. Each device that is Alone is a group of its own.
const others = -1

// group returns the group of a device. All IDs of a container are of one group.
func (c *choice) group(device int) int {
	if c.layout[device].Alone {
		return device
	}
	return others
}

// chooseAlone completes the set from a device that is Alone, and reports whether it did. If it did not, the caller chooses from
// the devices that are not: the IDs of the others are excluded then, unless a single ID is to be chosen, which may be of any.
func (c *choice) chooseAlone(bestFit bool) bool {
	if !slices.ContainsFunc(c.layout, func(d Device) bool { return d.Alone }) {
		return false
	}
	free := make([]int, len(c.layout))      // by device: available IDs
	var othersByRank [rankUnhealthy + 1]int // of others: available IDs
	requiredGroups := make(map[int]bool)
	for d := range c.layout {
		free[d] = c.count(d, available)
		if c.group(d) == others {
			othersByRank[c.rank[d]] += free[d]
		}
		if c.count(d, required) > 0 {
			requiredGroups[c.group(d)] = true
		}
	}
	if len(requiredGroups) == 0 && c.remaining == 1 && !bestFit {
		return false
	}
	// allowed reports whether the required IDs permit a group.
	allowed := func(group int) bool {
		return len(requiredGroups) == 0 || len(requiredGroups) == 1 && requiredGroups[group]
	}
	best := others
	for d := range c.layout {
		if c.group(d) == d && free[d] >= c.remaining && allowed(d) &&
			(best == others || cmp.Or(cmp.Compare(c.rank[d], c.rank[best]), cmp.Compare(free[d], free[best])) < 0) {
			best = d
		}
	}
	worst, n := 0, othersByRank[0] // the rank up to which others have enough
	for worst < rankUnhealthy && n < c.remaining {
		worst++
		n += othersByRank[worst]
	}
	switch {
	case n >= c.remaining && allowed(others) && (best == others || worst <= c.rank[best]):
		c.excludeAlone()
		return false
	case best != others:
		c.takeFrom(best)
		return true
	}
	// No answer can be allocated. This one is of few devices, so that the text of the refusal is short.
	most := make([]int, len(c.layout))
	for d := range most {
		most[d] = d
	}
	slices.SortStableFunc(most, func(a, b int) int {
		return cmp.Or(cmp.Compare(c.rank[a], c.rank[b]), cmp.Compare(free[b], free[a]))
	})
	for _, d := range most {
		c.takeFrom(d)
	}
	return true
}

// excludeAlone leaves the available IDs of the others.
func (c *choice) excludeAlone() {
	for d := range c.layout {
		if c.group(d) == others {
			continue
		}
		for i, s := range c.unitsOf(d) {
			if s == available {
				c.unitsOf(d)[i] = excluded
			}
		}
	}
}

// takeFrom chooses available IDs of a device, in their order, until there are none or the set is complete.
func (c *choice) takeFrom(device int) {
	for n, s := range c.unitsOf(device) {
		if c.remaining > 0 && s == available {
			c.choose(c.first[device] + n)
		}
	}
}
