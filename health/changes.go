package health

import (
	"maps"
	"slices"
)

// ChangeKind is what sort of thing a Change tells.
type ChangeKind uint8

// The kinds of change.
const (
	ChangeFound ChangeKind = iota // a device is there that was not
	ChangeXID                     // it has reported an XID
	ChangeState                   // its state, or what is wrong with it, is another
	ChangeGone                    // it is there no more
)

// Change is one thing that is news between two looks at the devices.
type Change struct {
	Kind   ChangeKind
	Device Device

	XID        int    // ChangeXID: the number
	Count, New uint64 // ChangeXID: how often since the start, and since the look before
	Was, Now   Verdict
}

// Changes returns what has changed: devices that came and went, XIDs, verdicts. A device that comes and is
// healthy is no change of state.
func Changes(before, after []DeviceState) []Change {
	known := make(map[DeviceID]*DeviceState, len(before))
	for i := range before {
		known[before[i].Device.ID] = &before[i]
	}
	var all []Change
	for i := range after {
		d := &after[i]
		was, ok := known[d.Device.ID]
		delete(known, d.Device.ID)
		if !ok {
			was = &DeviceState{}
		}
		c := Change{Device: d.Device, Was: was.Verdict, Now: d.Verdict}
		add := func(kind ChangeKind) {
			c.Kind = kind
			all = append(all, c)
		}
		if !ok {
			add(ChangeFound)
		}
		if len(d.XIDCounts) > 0 {
			for _, code := range slices.Sorted(maps.Keys(d.XIDCounts)) {
				if n := d.XIDCounts[code]; n > was.XIDCounts[code] {
					c.XID, c.Count, c.New = code, n, n-was.XIDCounts[code]
					add(ChangeXID)
				}
			}
			c.XID, c.Count, c.New = 0, 0, 0
		}
		same := c.Now.State == c.Was.State && slices.Equal(c.Now.Causes(), c.Was.Causes())
		if !same && (ok || c.Now.State > Healthy) {
			add(ChangeState)
		}
	}
	for i := range before {
		if d := known[before[i].Device.ID]; d != nil {
			all = append(all, Change{Kind: ChangeGone, Device: d.Device, Was: d.Verdict})
		}
	}
	return all
}

// Cleared returns the causes that stood and stand no more.
func (c Change) Cleared() []string {
	now := c.Now.Causes()
	return slices.DeleteFunc(c.Was.Causes(), func(cause string) bool { return slices.Contains(now, cause) })
}
