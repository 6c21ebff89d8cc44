package health

import (
	"maps"
	"slices"
)

// ChangeKind is the kind of a Change.
type ChangeKind uint8

// The kinds of change.
const (
	ChangeFound   ChangeKind = iota // a new device
	ChangeXID                       // the device reported an XID
	ChangeState                     // the device's state or the causes of its findings changed
	ChangeRemoved                   // the device disappeared from the list
)

// Change is one difference between two lists of devices.
type Change struct {
	Kind   ChangeKind
	Device Device

	XID        int    // ChangeXID: the number
	Count, New uint64 // ChangeXID: how often since the agent started, and since the first list
	Was, Now   Verdict
}

// Changes returns the differences between two lists of devices: new and removed devices, XIDs, changed verdicts. Everything
// that reports changes, such as logs and events, uses it. A new device that is healthy has no ChangeState.
func Changes(before, after []DeviceState) []Change {
	removed := make(map[DeviceID]*DeviceState, len(before))
	for i := range before {
		removed[before[i].Device.ID] = &before[i]
	}
	var all []Change
	for i := range after {
		d := &after[i]
		old, known := removed[d.Device.ID]
		delete(removed, d.Device.ID)
		if !known {
			old = &DeviceState{}
		}
		c := Change{Device: d.Device, Was: old.Verdict, Now: d.Verdict}
		if !known {
			c.Kind = ChangeFound
			all = append(all, c)
		}
		for _, code := range slices.Sorted(maps.Keys(d.XIDCounts)) {
			if n, was := d.XIDCounts[code], old.XIDCounts[code]; n > was {
				x := c
				x.Kind, x.XID, x.Count, x.New = ChangeXID, code, n, n-was
				all = append(all, x)
			}
		}
		same := c.Now.State == c.Was.State && slices.Equal(c.Now.Causes(), c.Was.Causes())
		if !same && (known || c.Now.State > Healthy) {
			c.Kind = ChangeState
			all = append(all, c)
		}
	}
	for i := range before {
		if d := removed[before[i].Device.ID]; d != nil {
			all = append(all, Change{Kind: ChangeRemoved, Device: d.Device, Was: d.Verdict})
		}
	}
	return all
}

// Cleared returns the causes of the findings that have cleared.
func (c Change) Cleared() []string {
	now := c.Now.Causes()
	return slices.DeleteFunc(c.Was.Causes(), func(cause string) bool { return slices.Contains(now, cause) })
}
