package statefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Saved is what outlives the process: the devices that have findings, have tripped lately, had an XID that the driver
// is to tell more of, or have a history of XIDs; while an operator's detach is in force, all devices. It is of one kind of
// source; the memories of other kinds are kept beside it.
type Saved struct {
	BootID     string // of the boot that it is about; "" if unknown
	Source     string // SourceID.Kind that it is about
	Inventory  string // SourceID.Inventory that it is about; "" if unknown: a file of before memoryMinor 1
	History    bool   // DeviceState.Seen is complete; false of a file of before memoryMinor 1
	Detachment health.Detachment
	DriverLoad string    // Source.DriverLoad
	Polled     time.Time // Snapshot.At
	Devices    []health.DeviceState

	others map[string]json.RawMessage // by kind of source: memories, as MarshalJSON writes them; not modified once stored
	newer  int                        // the version of a file that only a newer release understands in full, else 0
}

// The state file is one Saved in JSON.
//
// Readers of before memoryMinor 1 refuse a file that has a key they do not know, or another version, and they drop a device
// without findings, trips and follow. So that a downgrade to them loses no findings, all that they do not know is the
// text of one such device, extensionID. Later readers ignore keys that they do not know, in either place. A change that
// they may ignore raises memoryMinor; one that they would misunderstand raises memoryVersion.
const (
	memoryFormat  = "gpu-node-agent findings"
	memoryVersion = 1
	memoryMinor   = 1

	extensionID health.DeviceID = "gpu-node-agent:extension"
)

type savedFile struct {
	Format  string        `json:"format"`
	Version int           `json:"version"`
	BootID  string        `json:"bootID"`
	Source  string        `json:"source"`
	Devices []savedDevice `json:"devices"`
}

type savedDevice struct {
	ID      health.DeviceID `json:"id"`
	Parent  health.DeviceID `json:"parent,omitempty"`
	MIG     bool            `json:"mig,omitempty"`
	MIGMode bool            `json:"migMode,omitempty"`
	Index   int             `json:"index"`
	Minor   int             `json:"minor"`
	Model   string          `json:"model"` // of extensionID: savedExtension
	PCI     string          `json:"pci"`
	Memory  uint64          `json:"memory"`
	Profile string          `json:"profile,omitempty"`
	GI      int             `json:"gi"`
	CI      int             `json:"ci"`

	Since    time.Time      `json:"since"`
	Trips    []time.Time    `json:"trips,omitempty"`
	Follow   []savedXID     `json:"follow,omitempty"` // Verdict.Follow
	Findings []savedFinding `json:"findings,omitempty"`
}

type savedExtension struct {
	Minor     int                                 `json:"minor"`
	History   bool                                `json:"history"`
	Inventory string                              `json:"inventory"`
	Driver    string                              `json:"driverLoad,omitempty"`
	Polled    time.Time                           `json:"polled,omitzero"`
	Detach    *savedDetachment                    `json:"detach,omitempty"`
	Devices   map[health.DeviceID]json.RawMessage `json:"devices,omitempty"` // savedDetail
	Others    map[string]json.RawMessage          `json:"others,omitempty"`  // Memory.others
}

type savedDetail struct {
	Device health.Device `json:"device"`
	Seen   []savedXID    `json:"seen,omitempty"`   // DeviceState.Seen
	Common []string      `json:"common,omitempty"` // causes of the findings that are Finding.Common
}

type savedDetachment struct {
	Since   time.Time     `json:"since"`
	Until   time.Time     `json:"until"`
	For     time.Duration `json:"forNanoseconds"`
	Over    bool          `json:"over,omitempty"`
	Asking  bool          `json:"asking,omitempty"`
	Unasked bool          `json:"unasked,omitempty"`
}

type savedXID struct {
	Code int       `json:"code"`
	At   time.Time `json:"at"`
}

type savedFinding struct {
	Cause  string    `json:"cause"`
	State  string    `json:"state"`
	Reason string    `json:"reason"`
	Action string    `json:"action"`
	Since  time.Time `json:"since"`
	Last   time.Time `json:"last"`
	Reset  time.Time `json:"reset,omitzero"`
	Clears string    `json:"clears"`
}

// FromSnapshot returns what is worth keeping of a snapshot. Findings that a MIG device has from its GPU are
// the GPU's to keep.
func FromSnapshot(s *health.Snapshot, bootID string) Saved {
	m := Saved{
		BootID: bootID, Source: s.Source.Kind, Inventory: s.Source.Inventory, History: s.Polled(), Detachment: s.Source.Detachment, Polled: s.At,
		DriverLoad: s.Source.DriverLoad,
	}
	for _, d := range s.Devices {
		v := d.Verdict
		v.Findings = slices.DeleteFunc(slices.Clone(v.Findings), func(f health.Finding) bool {
			return f.From != "" || f.Cause == health.CauseReleased // Detachment is in its place
		})
		kept := health.DeviceState{Device: d.Device, Verdict: v, Seen: d.Seen}
		if kept.Memorable() || m.Detachment.InForce() || hasMemorablePart(s.Devices, d.Device.ID) {
			m.Devices = append(m.Devices, kept)
		}
	}
	return m
}

func hasMemorablePart(all []health.DeviceState, gpu health.DeviceID) bool {
	return slices.ContainsFunc(all, func(d health.DeviceState) bool { return d.Device.Parent == gpu && d.Memorable() })
}

// Restored is what holds of a Saved now. The zero Restored is that nothing is known.
type Restored struct {
	Devices    []health.DeviceState
	SameBoot   bool // the memory is of this boot, as far as is known
	Missed     bool // a device that the first reading lacks is missed: it is of this boot and of this inventory
	History    bool // Seen of the devices holds all XIDs of this source's stream in this boot that were delivered before
	Detachment health.Detachment
	DriverLoad string    // Source.DriverLoad of this boot
	Polled     time.Time // when the devices were last measured
	Source     string    // SourceID.Kind and Inventory
	Inventory  string

	memory Saved // of the other kinds of source
	bootID string
}

// Exchange returns what holds for another source, and keeps what a snapshot shows for the time when its source comes back. If
// history is set, the snapshot's XIDs are complete.
func (r Restored) Exchange(s *health.Snapshot, history bool, src health.SourceID, now time.Time) Restored {
	was := FromSnapshot(s, r.bootID)
	was.Detachment = health.Detachment{} // it goes on with the new source
	was.History = was.History || history
	return was.with(r.memory).Restore(r.bootID, src, now)
}

// Restore returns what holds of the memory for a source now. A reboot clears all but what a reboot does not cure. Only in
// the same boot is a GPU that has gone since still missed: otherwise it may have been taken out. The devices of another
// kind of source, or of another simulation, are not this source's.
//
// The times of what is returned are ages on this process's monotonic clock, so a later step of the wall clock neither
// prolongs nor ends a finding. One that is ahead of now is now. The times in Seen stay as the source has said them: they
// identify its rows.
func (m Saved) Restore(bootID string, src health.SourceID, now time.Time) Restored {
	all := m
	if m.Source != src.Kind {
		text, ok := m.others[src.Kind]
		if m = (Saved{}); !ok || json.Unmarshal(text, &m) != nil {
			return Restored{Source: src.Kind, Inventory: src.Inventory, memory: all, bootID: bootID}
		}
	}
	r := Restored{Source: src.Kind, Inventory: src.Inventory, memory: all, bootID: bootID}
	sameInventory := m.Inventory == "" || m.Inventory == src.Inventory
	if src.Simulated && !sameInventory {
		return r
	}
	r.SameBoot = m.BootID == "" || bootID == "" || m.BootID == bootID
	r.Missed = r.SameBoot && sameInventory
	// Another address may be another engine, whose stream has the same events at other times.
	r.History = r.SameBoot && m.History && m.Inventory == src.Inventory
	r.Polled = health.Rebase(m.Polled, now)
	if r.SameBoot {
		r.Detachment, r.DriverLoad = restoreDetachment(m.Detachment, now), m.DriverLoad
	}
	for _, d := range m.Devices {
		if !r.SameBoot {
			d.Verdict = d.Verdict.Without(now, func(f health.Finding) bool { return !outlivesBoot(f.Cause) })
			d.Verdict.Trips, d.Verdict.Follow = nil, nil
		}
		if d.Verdict = d.Verdict.Restored(now); !r.History {
			d.Seen = nil
		}
		if d.Memorable() || r.Detachment.InForce() || hasMemorablePart(m.Devices, d.Device.ID) {
			r.Devices = append(r.Devices, d)
		}
	}
	return r
}

// with returns a memory that holds m and, beside it, what this one holds of other kinds of source.
func (m Saved) with(others Saved) Saved {
	m.others = maps.Clone(others.others)
	if m.others == nil {
		m.others = make(map[string]json.RawMessage)
	}
	if others.Source != "" {
		others.others = nil
		if text, err := json.Marshal(others); err == nil {
			m.others[others.Source] = text
		}
	}
	delete(m.others, m.Source)
	return m
}

// undecidedFor is how long a restart keeps the devices of a detach that nobody has granted or refused. The process before
// may have told a host engine to let go and not come to save it, so the engine is asked to attach afterwards.
const undecidedFor = 30 * time.Second

// restoreDetachment returns the detachment on the clock of now, and as over if its time is up. A wall clock that was set back does not
// prolong it beyond what was asked for.
func restoreDetachment(d health.Detachment, now time.Time) health.Detachment {
	if d == (health.Detachment{}) {
		return d
	}
	left := min(d.Until.Sub(now), d.For)
	if d.Asking {
		left = min(left, undecidedFor)
	}
	if d.Over || left <= 0 {
		return health.Detachment{Over: true}
	}
	d.Since, d.Until = health.Rebase(d.Since, now), now.Add(left)
	return d
}

// outlivesBoot tells of what is written in the GPU itself (its InfoROM).
func outlivesBoot(cause string) bool {
	return cause == health.CauseRemapFailed || cause == health.CauseUnrepairable || cause == health.CauseRetiredPages
}

// MarshalJSON writes the state file's format.
func (m Saved) MarshalJSON() ([]byte, error) {
	saved := savedFile{Format: memoryFormat, Version: memoryVersion, BootID: m.BootID, Source: m.Source, Devices: []savedDevice{}}
	details := make(map[health.DeviceID]json.RawMessage)
	for _, d := range m.Devices {
		sd := savedDevice{
			ID: d.Device.ID, Parent: d.Device.Parent, MIG: d.Device.Kind == health.KindMIG, MIGMode: d.Device.MIGMode,
			Index: d.Device.Index, Minor: d.Device.Minor, Model: d.Device.Model, PCI: d.Device.PCI, Memory: d.Device.Memory,
			Profile: d.Device.Profile, GI: d.Device.GI, CI: d.Device.CI,
			Since: savable(d.Verdict.Since),
		}
		for _, t := range d.Verdict.Trips {
			sd.Trips = append(sd.Trips, savable(t))
		}
		sd.Follow = savedXIDs(d.Verdict.Follow)
		for _, f := range d.Verdict.Findings {
			sd.Findings = append(sd.Findings, savedFinding{
				f.Cause, f.State.String(), f.Reason, string(f.Action), savable(f.Since), savable(f.Last), savable(f.Reset), clearsToken(f.Clears),
			})
		}
		saved.Devices = append(saved.Devices, sd)
		var common []string
		for _, f := range d.Verdict.Findings {
			if f.Common {
				common = append(common, f.Cause)
			}
		}
		text, err := json.Marshal(savedDetail{d.Device, savedXIDs(d.Seen), common})
		if err != nil {
			return nil, err
		}
		details[d.Device.ID] = text
	}
	more := savedExtension{
		Minor: memoryMinor, History: m.History, Inventory: m.Inventory, Polled: savable(m.Polled), Devices: details, Others: m.others,
		Driver: m.DriverLoad,
	}
	if d := m.Detachment; d != (health.Detachment{}) {
		more.Detach = &savedDetachment{savable(d.Since), savable(d.Until), d.For, d.Over, d.Asking, d.Unasked}
	}
	text, err := json.Marshal(more)
	if err != nil {
		return nil, err
	}
	saved.Devices = append(saved.Devices, savedDevice{ID: extensionID, Model: string(text)})
	return json.Marshal(saved)
}

// UnmarshalJSON reads the state file's format. It ignores keys that it does not know, and refuses what Judge could not
// have made.
func (m *Saved) UnmarshalJSON(text []byte) error {
	var saved savedFile
	if err := json.Unmarshal(text, &saved); err != nil {
		return err
	}
	if saved.Format != memoryFormat || saved.Version < memoryVersion {
		return fmt.Errorf("format %q version %d is not %q version %d", saved.Format, saved.Version, memoryFormat, memoryVersion)
	}
	read := Saved{BootID: saved.BootID, Source: saved.Source}
	if saved.Version > memoryVersion {
		read.newer = saved.Version
	}
	details, err := read.extend(&saved)
	if err != nil {
		return err
	}
	known := make(map[health.DeviceID]bool)
	for i, sd := range saved.Devices {
		if sd.ID == "" || known[sd.ID] {
			return fmt.Errorf("devices[%d].id: %q is empty or there twice", i, sd.ID)
		}
		known[sd.ID] = true
		d, err := sd.state(details[sd.ID])
		if err != nil {
			return fmt.Errorf("devices[%d].%w", i, err)
		}
		read.Devices = append(read.Devices, d)
	}
	*m = read
	return nil
}

// extend takes the extension out of the saved devices, and returns what it tells of the others.
func (m *Saved) extend(saved *savedFile) (details map[health.DeviceID]json.RawMessage, err error) {
	i := slices.IndexFunc(saved.Devices, func(d savedDevice) bool { return d.ID == extensionID })
	if i < 0 {
		return nil, nil
	}
	var more savedExtension
	if err := json.Unmarshal([]byte(saved.Devices[i].Model), &more); err != nil {
		return nil, fmt.Errorf("devices[%d].model: %w", i, err)
	}
	saved.Devices = slices.Delete(saved.Devices, i, i+1)
	m.History, m.Inventory, m.Polled, m.DriverLoad = more.History, more.Inventory, more.Polled, more.Driver
	if d := more.Detach; d != nil {
		m.Detachment = health.Detachment(*d)
	}
	for kind, text := range more.Others {
		if m.others == nil {
			m.others = make(map[string]json.RawMessage, len(more.Others))
		}
		// As it will be written: the text stays what it is, unknown keys too.
		if m.others[kind], err = json.Marshal(text); err != nil {
			return nil, err
		}
	}
	return more.Devices, nil
}

// state returns the device as it was. The detail, if any, completes what every reader understands.
func (sd savedDevice) state(detail json.RawMessage) (health.DeviceState, error) {
	var more savedDetail
	if len(detail) > 0 && json.Unmarshal(detail, &more) != nil {
		more, detail = savedDetail{}, nil // findings are worth more than what only describes the device
	}
	d := health.DeviceState{Device: more.Device, Verdict: health.Verdict{Since: sd.Since, Trips: sd.Trips}}
	d.Device.ID, d.Device.Parent, d.Device.MIGMode, d.Device.Index, d.Device.Minor = sd.ID, sd.Parent, sd.MIGMode, sd.Index, sd.Minor
	d.Device.Model, d.Device.PCI, d.Device.Memory, d.Device.Profile = sd.Model, sd.PCI, sd.Memory, sd.Profile
	d.Device.GI, d.Device.CI, d.Device.Kind = sd.GI, sd.CI, health.KindGPU
	if len(detail) == 0 {
		d.Device.MIGIndex = -1
	}
	if sd.MIG {
		d.Device.Kind = health.KindMIG
	}
	for _, x := range more.Seen {
		d.Seen = append(d.Seen, health.XID(x))
	}
	for _, x := range sd.Follow {
		d.Verdict.Follow = append(d.Verdict.Follow, health.XID(x))
	}
	for i, sf := range sd.Findings {
		f, err := sf.finding()
		if err != nil {
			return health.DeviceState{}, fmt.Errorf("findings[%d]: %w", i, err)
		}
		if d.Verdict.Has(f.Cause) {
			return health.DeviceState{}, fmt.Errorf("findings[%d]: cause %q is there twice", i, f.Cause)
		}
		f.Common = slices.Contains(more.Common, f.Cause)
		d.Verdict.Findings = append(d.Verdict.Findings, f)
		d.Verdict.State = max(d.Verdict.State, f.State)
	}
	return d, nil
}

// finding reads a finding. A state or a clears that is not known comes from a newer release: the finding then stands as
// unhealthy, or until an operator clears it.
func (sf savedFinding) finding() (health.Finding, error) {
	if sf.Cause == "" {
		return health.Finding{}, errors.New("no cause")
	}
	state, ok := health.ParseState(sf.State)
	switch {
	case !ok:
		state = health.Unhealthy
	case state < health.Degraded:
		return health.Finding{}, fmt.Errorf("state %q is not degraded or unhealthy", sf.State)
	}
	return health.Finding{
		Cause: sf.Cause, State: state, Reason: sf.Reason, Action: parseAction(sf.Action),
		Since: sf.Since, Last: sf.Last, Reset: sf.Reset, Clears: parseClears(sf.Clears),
	}, nil
}

func savedXIDs(all []health.XID) (saved []savedXID) {
	for _, x := range all {
		saved = append(saved, savedXID{x.Code, savable(x.At)})
	}
	return saved
}

// savable returns the nearest time that JSON can hold: a source's clock may be anywhere, and one row of it must not keep
// the file from being written.
func savable(t time.Time) time.Time {
	switch y := t.Year(); {
	case y < 0:
		return time.Time{}
	case y > 9999:
		return time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	}
	return t
}
