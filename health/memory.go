package health

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Memory is what outlives the process: the devices that have findings, have tripped lately, or had an XID that the driver
// is to tell more of.
type Memory struct {
	BootID  string // of the boot that it is about; "" if unknown
	Source  string // MonitorSource.Kind that it is about
	Devices []DeviceState
}

// The head of the state file.
const (
	memoryFormat  = "gpu-node-agent findings"
	memoryVersion = 1
)

type savedMemory struct {
	Format  string        `json:"format"`
	Version int           `json:"version"`
	BootID  string        `json:"bootID"`
	Source  string        `json:"source"`
	Devices []savedDevice `json:"devices"`
}

type savedDevice struct {
	ID      DeviceID `json:"id"`
	Parent  DeviceID `json:"parent,omitempty"`
	MIG     bool     `json:"mig,omitempty"`
	MIGMode bool     `json:"migMode,omitempty"`
	Index   int      `json:"index"`
	Minor   int      `json:"minor"`
	Model   string   `json:"model"`
	PCI     string   `json:"pci"`
	Memory  uint64   `json:"memory"`
	Profile string   `json:"profile,omitempty"`
	GI      int      `json:"gi"`
	CI      int      `json:"ci"`

	Since    time.Time      `json:"since"`
	Trips    []time.Time    `json:"trips,omitempty"`
	Follow   []savedXID     `json:"follow,omitempty"` // Verdict.follow
	Findings []savedFinding `json:"findings,omitempty"`
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

// Remember returns what is worth keeping of a snapshot. Findings that a MIG device has from its GPU are
// the GPU's to keep.
func Remember(s *Snapshot, bootID string) Memory {
	m := Memory{BootID: bootID, Source: s.Source.Kind}
	for _, d := range s.Devices {
		v := d.Verdict
		v.Findings = slices.DeleteFunc(slices.Clone(v.Findings), func(f Finding) bool {
			return f.From != "" || f.Cause == CauseReleased // a process that starts has the driver
		})
		if len(v.Findings) > 0 || len(v.Trips) > 0 || len(v.follow) > 0 {
			m.Devices = append(m.Devices, DeviceState{Device: d.Device, Verdict: v})
		}
	}
	return m
}

// Recall returns what holds of the memory now. A reboot clears all but what a reboot does not cure. Only in
// the same boot is a GPU that has gone since still missed: otherwise it may have been taken out. What another source has
// shown is nothing here: a simulation's devices are no others'.
func (m Memory) Recall(bootID, source string, now time.Time) (devices []DeviceState, missed bool) {
	if m.Source != source {
		return nil, false
	}
	sameBoot := m.BootID == "" || bootID == "" || m.BootID == bootID
	for _, d := range m.Devices {
		v := d.Verdict
		if !sameBoot {
			v = v.without(now, func(f Finding) bool { return !outlivesBoot(f.Cause) })
			v.Trips, v.follow = nil, nil
		}
		v.Findings, v.Trips, v.follow = slices.Clone(v.Findings), slices.Clone(v.Trips), slices.Clone(v.follow)
		for i := range v.follow {
			v.follow[i].At = notAfter(v.follow[i].At, now)
		}
		// A clock that was ahead is not believed: what is of tomorrow would never be long ago.
		v.Since = notAfter(v.Since, now)
		for i := range v.Trips {
			v.Trips[i] = notAfter(v.Trips[i], now)
		}
		for i := range v.Findings {
			f := &v.Findings[i]
			f.Since, f.Last, f.Reset = notAfter(f.Since, now), notAfter(f.Last, now), notAfter(f.Reset, now)
			f.unseen(now)
		}
		if len(v.Findings) > 0 || len(v.Trips) > 0 || len(v.follow) > 0 {
			devices = append(devices, DeviceState{Device: d.Device, Verdict: v})
		}
	}
	return devices, sameBoot
}

func notAfter(t, now time.Time) time.Time {
	if t.After(now) {
		return now
	}
	return t
}

// unseen begins the time of a condition anew: nobody has looked until now, and for how long it has been gone is not
// known.
func (f *Finding) unseen(now time.Time) {
	if f.condition() {
		if f.Last.Before(f.Reset) {
			f.Reset = now // the reset was seen already, and is not to be seen twice
		}
		f.Last = now
	}
}

// condition tells of a finding that is renewed by each poll while it stands; an XID is not.
func (f Finding) condition() bool {
	return f.Clears == ClearsItself && !strings.HasPrefix(f.Cause, xidPrefix)
}

// outlivesBoot tells of what is written in the GPU itself (its InfoROM).
func outlivesBoot(cause string) bool {
	return cause == CauseRemapFailed || cause == CauseUnrepairable || cause == CauseRetiredPages
}

// MarshalJSON writes the state file's format.
func (m Memory) MarshalJSON() ([]byte, error) {
	saved := savedMemory{Format: memoryFormat, Version: memoryVersion, BootID: m.BootID, Source: m.Source, Devices: []savedDevice{}}
	for _, d := range m.Devices {
		sd := savedDevice{
			ID: d.Device.ID, Parent: d.Device.Parent, MIG: d.Device.Kind == KindMIG, MIGMode: d.Device.MIGMode,
			Index: d.Device.Index, Minor: d.Device.Minor, Model: d.Device.Model, PCI: d.Device.PCI, Memory: d.Device.Memory,
			Profile: d.Device.Profile, GI: d.Device.GI, CI: d.Device.CI,
			Since: d.Verdict.Since, Trips: d.Verdict.Trips,
		}
		for _, x := range d.Verdict.follow {
			sd.Follow = append(sd.Follow, savedXID(x))
		}
		for _, f := range d.Verdict.Findings {
			sd.Findings = append(sd.Findings, savedFinding{
				f.Cause, f.State.String(), f.Reason, f.Action, f.Since, f.Last, f.Reset, f.Clears.String(),
			})
		}
		saved.Devices = append(saved.Devices, sd)
	}
	return json.Marshal(saved)
}

// UnmarshalJSON reads the state file's format. It refuses what Judge could not have made.
func (m *Memory) UnmarshalJSON(text []byte) error {
	var saved savedMemory
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&saved); err != nil {
		return err
	}
	if saved.Format != memoryFormat || saved.Version != memoryVersion {
		return fmt.Errorf("format %q version %d is not %q version %d", saved.Format, saved.Version, memoryFormat, memoryVersion)
	}
	read := Memory{BootID: saved.BootID, Source: saved.Source}
	known := make(map[DeviceID]bool)
	for i, sd := range saved.Devices {
		if sd.ID == "" || known[sd.ID] {
			return fmt.Errorf("devices[%d].id: %q is empty or there twice", i, sd.ID)
		}
		known[sd.ID] = true
		d := DeviceState{
			Device: Device{
				ID: sd.ID, Parent: sd.Parent, MIGMode: sd.MIGMode, Index: sd.Index, Minor: sd.Minor, Model: sd.Model, PCI: sd.PCI,
				Memory: sd.Memory, Profile: sd.Profile, GI: sd.GI, CI: sd.CI, MIGIndex: -1, // not counted before the first reading
			},
			Verdict: Verdict{Since: sd.Since, Trips: sd.Trips},
		}
		if sd.MIG {
			d.Device.Kind = KindMIG
		}
		for _, x := range sd.Follow {
			d.Verdict.follow = append(d.Verdict.follow, XID(x))
		}
		for j, sf := range sd.Findings {
			f, err := sf.finding()
			if err != nil {
				return fmt.Errorf("devices[%d].findings[%d]: %w", i, j, err)
			}
			if d.Verdict.has(f.Cause) {
				return fmt.Errorf("devices[%d].findings[%d]: cause %q is there twice", i, j, f.Cause)
			}
			d.Verdict.Findings = append(d.Verdict.Findings, f)
			d.Verdict.State = max(d.Verdict.State, f.State)
		}
		read.Devices = append(read.Devices, d)
	}
	*m = read
	return nil
}

func (sf savedFinding) finding() (Finding, error) {
	state := slices.Index(stateNames[:], sf.State)
	clears := slices.Index(clearsNames[:], sf.Clears)
	switch {
	case sf.Cause == "":
		return Finding{}, errors.New("no cause")
	case State(state) != Degraded && State(state) != Unhealthy:
		return Finding{}, fmt.Errorf("state %q is not degraded or unhealthy", sf.State)
	case clears < 0:
		return Finding{}, fmt.Errorf("clears %q is not known", sf.Clears)
	}
	return Finding{
		Cause: sf.Cause, State: State(state), Reason: sf.Reason, Action: sf.Action,
		Since: sf.Since, Last: sf.Last, Reset: sf.Reset, Clears: Clears(clears),
	}, nil
}
