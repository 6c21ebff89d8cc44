package statefile

import (
	"maps"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// Contents is what a state directory has.
type Contents struct {
	States map[string]Saved // by SourceID.Kind; not modified
	Node   Node

	left *health.Latest[Saved] // Dir.left; nil if no Dir runs
}

// with returns the contents with another state of a kind of source.
func (c Contents) with(kind string, s Saved) Contents {
	states := make(map[string]Saved)
	maps.Copy(states, c.States)
	states[kind] = s
	c.States = states
	return c
}

// Restore is Saved.Restore for the state of a source.
func (c Contents) Restore(bootID string, src health.SourceID, now time.Time) Restored {
	r := c.States[src.Kind].Restore(bootID, src, now)
	r.contents = c
	return r
}

// Saved is the saved state of one kind of source. It holds the devices that have findings, recent trips, XIDs that the recovery action may
// still escalate, and listed or owed XIDs; during a detach, all devices.
type Saved struct {
	BootID     string // "" if unknown
	Source     string // SourceID.Kind
	Inventory  string // SourceID.Inventory
	History    bool   // Ledger.Rows are complete
	Detachment health.Detachment
	DriverLoad string          // Source.DriverLoad
	Polled     time.Time       // Snapshot.At
	Bindings   health.Bindings // of entries that have a GPU; they outlive a boot, which may renumber the GPUs
	Devices    []health.DeviceState

	newer int // the file's version if a newer release wrote it, else 0
}

func (s *Saved) newerVersion() int { return s.newer }

// FromSnapshot returns the state of a snapshot to save.
func FromSnapshot(s *health.Snapshot, bootID string) Saved {
	saved := Saved{
		BootID: bootID, Source: s.Source.Kind, Inventory: s.Source.Inventory, History: s.Polled(), Detachment: s.Source.Detachment, Polled: s.At,
		DriverLoad: s.Source.DriverLoad,
	}
	for _, b := range s.Bindings {
		if b.Warning = (health.BindingWarning{}); b.GPU != "" {
			saved.Bindings = append(saved.Bindings, b)
		}
	}
	var devices []health.DeviceState
	for _, d := range s.Devices {
		device := judge.SavedState(d.Device, d.Memory, d.Verdict.Decisions(), d.Verdict.Since)
		device.XIDs = d.XIDs.Restarted()
		devices = append(devices, device)
	}
	saved.Devices = devicesToSave(devices, saved.Detachment)
	return saved
}

// devicesToSave returns the devices to save. A GPU is saved with its MIG devices.
func devicesToSave(devices []health.DeviceState, d health.Detachment) (all []health.DeviceState) {
	parents := make(map[health.DeviceID]bool)
	for _, d := range devices {
		if d.Device.Parent != "" && judge.NeedsSaving(d) {
			parents[d.Device.Parent] = true
		}
	}
	for _, device := range devices {
		if judge.NeedsSaving(device) || d.InForce() || parents[device.Device.ID] {
			all = append(all, device)
		}
	}
	return all
}

// Restored is the saved state as it applies to a source now. The zero Restored holds nothing.
type Restored struct {
	Devices    []health.DeviceState
	Missed     bool // a device that the first reading lacks is missing, because boot and inventory are the same
	History    bool // Ledger.Rows are all that this source listed in this boot, or still lists
	Detachment health.Detachment
	DriverLoad string    // Source.DriverLoad in this boot
	Polled     time.Time // when the devices were measured last
	Source     string    // SourceID.Kind
	Inventory  string    // SourceID.Inventory
	Bindings   health.Bindings

	contents Contents // from which it was restored
	bootID   string
}

// Exchange keeps the state of a snapshot for the time when its source returns, and returns what applies to another source. If history is
// set, the snapshot has every row of XIDs.
func (r Restored) Exchange(s *health.Snapshot, history bool, to health.SourceID, now time.Time) Restored {
	saved := FromSnapshot(s, r.bootID)
	saved.Detachment = health.Detachment{} // it continues with the new source
	saved.History = saved.History || history
	c := r.contents.with(saved.Source, saved)
	if c.left != nil {
		c.left.Store(&saved)
	}
	return c.Restore(r.bootID, to, now)
}

// Restore returns what applies to a source now. A reboot clears every finding that it can clear. Only within a boot is a GPU
// missing that disappeared in between: after a reboot it may have been removed. Devices of another kind of source, or of
// another simulation, do not apply.
//
// Restored times are ages on this process's monotonic clock, so that a step of the wall clock neither extends nor ends a
// finding. A time that is ahead becomes now: a finding recorded while the clock was ahead still expires. The times of
// rows of XIDs stay as the source reported them, because they identify the rows.
func (s Saved) Restore(bootID string, src health.SourceID, now time.Time) Restored {
	r := Restored{Source: src.Kind, Inventory: src.Inventory, bootID: bootID}
	sameInventory := s.Inventory == src.Inventory
	if s.Source != src.Kind || src.Simulated && !sameInventory {
		return r
	}
	sameBoot := sameBoot(s.BootID, bootID)
	r.Missed = sameBoot && sameInventory
	// Another address may be another engine, which lists the same XIDs with other times.
	r.History = sameBoot && s.History && sameInventory
	r.Polled, r.Bindings = judge.Rebase(s.Polled, now), s.Bindings
	if sameBoot {
		r.Detachment, r.DriverLoad = restoreDetachment(s.Detachment, now), s.DriverLoad
	}
	devices := slices.Clone(s.Devices)
	for i := range devices {
		d := &devices[i]
		if !sameBoot {
			*d = judge.AfterReboot(*d, now)
		}
		if *d = judge.Restored(*d, now); !r.History {
			d.XIDs.Rows = nil
		}
	}
	r.Devices = devicesToSave(devices, r.Detachment)
	return r
}

// sameBoot reports whether two boot IDs may name one boot. "" is unknown.
func sameBoot(a, b string) bool { return a == "" || b == "" || a == b }

// undecidedLimit limits how long a restart withholds devices for a detach that was neither started nor given up. The earlier
// process may have asked a host engine to detach before it could save that, so the engine is asked to attach afterwards.
const undecidedLimit = 30 * time.Second

// restoreDetachment returns a detach on the clock of now. It is over if its time limit was reached. A wall clock that was set
// back does not extend it beyond the requested time.
func restoreDetachment(d health.Detachment, now time.Time) health.Detachment {
	if d == (health.Detachment{}) {
		return d
	}
	left := min(d.Until.Sub(now), d.For)
	if d.Undecided {
		left = min(left, undecidedLimit)
	}
	if d.Over || left <= 0 {
		return health.Detachment{Over: true}
	}
	d.Since, d.Until = judge.Rebase(d.Since, now), now.Add(left)
	return d
}
