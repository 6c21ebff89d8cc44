package health

import (
	"maps"
	"slices"

	"go.uber.org/zap"
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
		same := c.Now.State == c.Was.State && slices.Equal(c.Now.causes(), c.Was.causes())
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
	now := c.Now.causes()
	return slices.DeleteFunc(c.Was.causes(), func(cause string) bool { return slices.Contains(now, cause) })
}

// logChanges says what a poll has changed.
func logChanges(log *zap.Logger, before, after []DeviceState) {
	for _, c := range Changes(before, after) {
		id := []zap.Field{zap.String("device", string(c.Device.ID)), zap.Int("gpu", c.Device.Index)}
		switch c.Kind {
		case ChangeFound:
			log.Info("device found", append(id, zap.String("model", c.Device.Model), zap.String("profile", c.Device.Profile),
				zap.String("pci", c.Device.PCI))...)
		case ChangeXID:
			log.Warn("XID", append(id, zap.Int("xid", c.XID), zap.String("meaning", LookupXID(c.XID).Name),
				zap.Uint64("count", c.Count), zap.Uint64("new", c.New))...)
		case ChangeState:
			id = append(id, zap.Stringer("state", c.Now.State), zap.Stringer("was", c.Was.State))
			if cleared := c.Cleared(); len(cleared) > 0 {
				id = append(id, zap.Strings("cleared", cleared))
			}
			if len(c.Now.Findings) == 0 {
				log.Info("device state", id...)
				continue
			}
			if more := c.Now.causes()[1:]; len(more) > 0 {
				id = append(id, zap.Strings("also", more))
			}
			f := c.Now.Findings[0]
			log.Warn("device state", append(id, zap.String("cause", f.Cause), zap.String("reason", f.Reason),
				zap.String("action", f.Action), zap.Time("since", f.Since), zap.Stringer("clears", f.Clears))...)
		case ChangeGone:
			log.Info("device gone", id...)
		}
	}
}
