package health

import (
	"maps"
	"slices"
	"strings"
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

	XID        int       // ChangeXID: the number
	Detail     XIDDetail // ChangeXID: of the newest with the number; zero if unknown
	Count, New uint64    // ChangeXID: how often since the agent started, and since the first list; New is 0 if only Detail is new
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
		for _, code := range slices.Sorted(maps.Keys(d.XIDs.Codes)) {
			is, was := d.XIDs.Codes[code], old.XIDs.Codes[code]
			late := is.Newest.Detail != XIDDetail{} && was.Newest.Detail == XIDDetail{}
			if is.Total > was.Total || is.Total == was.Total && late {
				x := c
				x.Kind, x.XID, x.Detail, x.Count, x.New = ChangeXID, code, is.Newest.Detail, is.Total, is.Total-was.Total
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

// Reported returns the XID of a ChangeXID.
func (c Change) Reported() XID { return XID{Code: c.XID, Detail: c.Detail} }

// Added returns the findings that are new or worse, worst first.
func (c Change) Added() []Finding {
	return slices.DeleteFunc(slices.Clone(c.Now.Findings), func(f Finding) bool {
		return slices.ContainsFunc(c.Was.Findings, func(was Finding) bool { return was.Cause == f.Cause && was.State >= f.State })
	})
}

// News returns the finding that a report of the change is about: the worst new one, or the worst that remains; nil if there is none.
func (c Change) News() *Finding {
	for _, findings := range [][]Finding{c.Added(), c.Now.Findings} {
		if len(findings) > 0 {
			return &findings[0]
		}
	}
	return nil
}

// Cleared returns the causes of the findings that have cleared.
func (c Change) Cleared() []string {
	now := c.Now.Causes()
	return slices.DeleteFunc(c.Was.Causes(), func(cause string) bool { return slices.Contains(now, cause) })
}

// ChangeGroup is a change of a GPU with the same change of its MIG devices, or of MIG devices of one GPU. It is one event for
// people: a fault of a GPU with seven MIG devices is one fault.
type ChangeGroup struct {
	Change              // of the GPU, or of the first MIG device if the GPU itself has not changed
	MIGDevices []Change // of the MIG devices, with the first
	Inherited  bool     // the MIG devices changed only by findings of their GPU, which has no such change itself
}

// Single reports whether one device has changed.
func (g *ChangeGroup) Single() bool {
	return len(g.MIGDevices) == 0 || len(g.MIGDevices) == 1 && g.Device.Kind == KindMIG
}

// GroupChanges returns the differences between two lists of devices like Changes, by GPU. The changed verdict of a MIG device joins its
// GPU's if the findings that the GPU lacks are the same before and after.
func GroupChanges(before, after []DeviceState) []ChangeGroup {
	changes := Changes(before, after)
	if len(changes) == 0 {
		return nil
	}
	type groupKey struct {
		kind     ChangeKind
		gpu      DeviceID
		xid      int
		was, now string // changed findings of MIG devices that the GPU lacks
	}
	was, now := verdicts(before), verdicts(after)
	groups := make([]ChangeGroup, 0, len(changes))
	index := make(map[groupKey]int, len(changes))
	for _, c := range changes { // a GPU comes before its MIG devices
		mig := c.Device.Kind == KindMIG
		key := groupKey{kind: c.Kind, gpu: c.Device.GPU(), xid: c.XID}
		inherited := false
		if c.Kind == ChangeState && mig {
			own, ownNow := summary(c.Was.FindingsBeyond(was[key.gpu])), summary(c.Now.FindingsBeyond(now[key.gpu]))
			if inherited = own == ownNow; !inherited {
				key.was, key.now = own, ownNow
			}
		}
		i, exists := index[key]
		switch {
		case !exists:
			i = len(groups)
			index[key] = i
			groups = append(groups, ChangeGroup{Change: c, Inherited: inherited})
		case groups[i].Device.Kind == KindMIG: // XIDs of several MIG devices
			groups[i].Count += c.Count
			groups[i].New += c.New
		}
		if mig {
			groups[i].MIGDevices = append(groups[i].MIGDevices, c)
		}
	}
	return groups
}

func verdicts(devices []DeviceState) map[DeviceID]Verdict {
	all := make(map[DeviceID]Verdict, len(devices))
	for i := range devices {
		all[devices[i].Device.ID] = devices[i].Verdict
	}
	return all
}

// FindingsBeyond returns the own findings of a MIG device that its GPU lacks, or has with a lower severity.
func (v Verdict) FindingsBeyond(gpu Verdict) []Finding {
	return slices.DeleteFunc(slices.Clone(v.Findings), func(f Finding) bool {
		return f.From != "" || gpu.OwnFinding(func(g Finding) bool { return g.Cause == f.Cause && g.State >= f.State }) != nil
	})
}

// summary identifies the causes and their severity.
func summary(findings []Finding) string {
	var text strings.Builder
	for _, f := range findings {
		text.WriteString(f.Cause + " " + f.State.String() + " ")
	}
	return text.String()
}
