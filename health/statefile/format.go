package statefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The state file is one Saved in JSON.
//
// Readers from before formatMinor 1 refuse a file with an unknown key or another version, and drop a device without
// findings, trips and follow. To lose no findings in a downgrade to them, everything that they do not know is in the text of
// one such device, extensionID. Later readers ignore unknown keys in both places. A change that they may ignore raises
// formatMinor; a change that they would misread raises formatVersion.
const (
	formatName    = "gpu-node-agent findings"
	formatVersion = 1
	formatMinor   = 2

	extensionID health.DeviceID = "gpu-node-agent:extension"
)

type fileFormat struct {
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
	Follow   []savedXID     `json:"follow,omitempty"` // Verdict.PendingXIDs
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
	Others    map[string]json.RawMessage          `json:"others,omitempty"`  // Saved.others
	Sections  map[string]json.RawMessage          `json:"sections,omitempty"`
}

type savedDetail struct {
	Device  health.Device     `json:"device"`
	Seen    []savedXID        `json:"seen,omitempty"`   // DeviceState.XIDHistory
	Common  []string          `json:"common,omitempty"` // causes of the findings that are Finding.InOutage
	Awaited []savedAwaited    `json:"awaited,omitempty"`
	Action  *savedEventAction `json:"eventAction,omitempty"`
}

// savedAwaited are XIDs that the source still has to report.
type savedAwaited struct {
	Code  int           `json:"code"`
	Count int           `json:"count"`
	Left  time.Duration `json:"leftNanoseconds"`
}

type savedEventAction struct {
	Action health.RecoveryAction `json:"action"`
	Left   time.Duration         `json:"leftNanoseconds"`
}

type savedDetachment struct {
	Since         time.Time     `json:"since"`
	Until         time.Time     `json:"until"`
	For           time.Duration `json:"forNanoseconds"`
	Over          bool          `json:"over,omitempty"`
	Undecided     bool          `json:"asking,omitempty"`
	EngineUnasked bool          `json:"unasked,omitempty"`
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

// MarshalJSON writes the state file's format.
func (s Saved) MarshalJSON() ([]byte, error) {
	file := fileFormat{Format: formatName, Version: formatVersion, BootID: s.BootID, Source: s.Source}
	details := make(map[health.DeviceID]json.RawMessage)
	for _, d := range s.Devices {
		sd := savedDevice{
			ID: d.Device.ID, Parent: d.Device.Parent, MIG: d.Device.Kind == health.KindMIG, MIGMode: d.Device.MIGMode,
			Index: d.Device.Index, Minor: d.Device.Minor, Model: d.Device.Model, PCI: d.Device.PCI, Memory: d.Device.Memory,
			Profile: d.Device.Profile, GI: d.Device.GI, CI: d.Device.CI,
			Since: savable(d.Verdict.Since),
		}
		for _, t := range d.Verdict.Trips {
			sd.Trips = append(sd.Trips, savable(t))
		}
		sd.Follow = savedXIDs(d.Verdict.PendingXIDs)
		for _, f := range d.Verdict.Findings {
			sd.Findings = append(sd.Findings, savedFinding{
				f.Cause, f.State.String(), f.Reason, string(f.Action), savable(f.Since), savable(f.Last), savable(f.Reset), clearsToken(f.Clears),
			})
		}
		file.Devices = append(file.Devices, sd)
		var common []string
		for _, f := range d.Verdict.Findings {
			if f.InOutage {
				common = append(common, f.Cause)
			}
		}
		detail := savedDetail{Device: d.Device, Seen: savedXIDs(d.XIDHistory), Common: common}
		for _, a := range d.Awaited {
			detail.Awaited = append(detail.Awaited, savedAwaited{a.Code, a.Count, a.Left})
		}
		if a := d.EventAction; a.Left > 0 {
			detail.Action = &savedEventAction{a.Action, a.Left}
		}
		text, err := json.Marshal(detail)
		if err != nil {
			return nil, err
		}
		details[d.Device.ID] = text
	}
	more := savedExtension{
		Minor: formatMinor, History: s.History, Inventory: s.Inventory, Polled: savable(s.Polled), Devices: details, Others: s.others,
		Driver: s.DriverLoad, Sections: s.Sections,
	}
	if d := s.Detachment; d != (health.Detachment{}) {
		more.Detach = &savedDetachment{savable(d.Since), savable(d.Until), d.For, d.Over, d.Undecided, d.EngineUnasked}
	}
	text, err := json.Marshal(more)
	if err != nil {
		return nil, err
	}
	file.Devices = append(file.Devices, savedDevice{ID: extensionID, Model: string(text)})
	return json.Marshal(file)
}

// UnmarshalJSON reads the state file's format. It ignores unknown keys and refuses what health.Judge cannot produce.
func (s *Saved) UnmarshalJSON(text []byte) error {
	var file fileFormat
	if err := json.Unmarshal(text, &file); err != nil {
		return err
	}
	if file.Format != formatName || file.Version < formatVersion {
		return fmt.Errorf("format %q version %d is not %q version %d", file.Format, file.Version, formatName, formatVersion)
	}
	read := Saved{BootID: file.BootID, Source: file.Source}
	if file.Version > formatVersion {
		read.newer = file.Version
	}
	details, err := read.extend(&file)
	if err != nil {
		return err
	}
	ids := make(map[health.DeviceID]bool)
	for i, sd := range file.Devices {
		if sd.ID == "" || ids[sd.ID] {
			return fmt.Errorf("devices[%d].id: %q is empty or repeated", i, sd.ID)
		}
		ids[sd.ID] = true
		d, err := sd.state(details[sd.ID])
		if err != nil {
			return fmt.Errorf("devices[%d].%w", i, err)
		}
		read.Devices = append(read.Devices, d)
	}
	*s = read
	return nil
}

// extend removes the extension from the file's devices and reads it. It returns the details of the other devices.
func (s *Saved) extend(file *fileFormat) (details map[health.DeviceID]json.RawMessage, err error) {
	i := slices.IndexFunc(file.Devices, func(d savedDevice) bool { return d.ID == extensionID })
	if i < 0 {
		return nil, nil
	}
	var more savedExtension
	if err := json.Unmarshal([]byte(file.Devices[i].Model), &more); err != nil {
		return nil, fmt.Errorf("devices[%d].model: %w", i, err)
	}
	file.Devices = slices.Delete(file.Devices, i, i+1)
	s.History, s.Inventory, s.Polled, s.DriverLoad = more.History, more.Inventory, more.Polled, more.Driver
	if d := more.Detach; d != nil {
		s.Detachment = health.Detachment(*d)
	}
	if s.others, err = compact(more.Others); err != nil {
		return nil, err
	}
	if s.Sections, err = compact(more.Sections); err != nil {
		return nil, err
	}
	return more.Devices, nil
}

// compact returns the texts as MarshalJSON writes them. Unknown keys stay.
func compact(texts map[string]json.RawMessage) (all map[string]json.RawMessage, err error) {
	for name, text := range texts {
		if all == nil {
			all = make(map[string]json.RawMessage, len(texts))
		}
		if all[name], err = json.Marshal(text); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// state returns the saved device. The detail, if there is one, adds what readers from before formatMinor 1 do not know.
func (sd savedDevice) state(detail json.RawMessage) (health.DeviceState, error) {
	var more savedDetail
	if len(detail) > 0 && json.Unmarshal(detail, &more) != nil {
		more, detail = savedDetail{}, nil // keep the findings although the description is unreadable
	}
	d := health.DeviceState{Device: more.Device, Verdict: health.Verdict{Since: sd.Since, Trips: append([]time.Time(nil), sd.Trips...)}}
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
		d.XIDHistory = append(d.XIDHistory, health.XID{Code: x.Code, At: x.At})
	}
	for _, a := range more.Awaited {
		if a.Count > 0 && a.Left > 0 {
			d.Awaited = append(d.Awaited, health.AwaitedXIDs{Code: a.Code, Witness: health.WitnessSource, Count: a.Count, Left: a.Left})
		}
	}
	if a := more.Action; a != nil && a.Left > 0 {
		d.EventAction = health.EventAction{Action: a.Action, Left: a.Left}
	}
	for _, x := range sd.Follow {
		d.Verdict.PendingXIDs = append(d.Verdict.PendingXIDs, health.XID{Code: x.Code, At: x.At})
	}
	for i, sf := range sd.Findings {
		f, err := sf.finding()
		if err != nil {
			return health.DeviceState{}, fmt.Errorf("findings[%d]: %w", i, err)
		}
		if d.Verdict.Has(f.Cause) {
			return health.DeviceState{}, fmt.Errorf("findings[%d]: cause %q is repeated", i, f.Cause)
		}
		f.InOutage = slices.Contains(more.Common, f.Cause)
		d.Verdict.Findings = append(d.Verdict.Findings, f)
		d.Verdict.State = max(d.Verdict.State, f.State)
	}
	return d, nil
}

// finding reads a finding. An unknown state is of a newer release and counts as unhealthy.
func (sf savedFinding) finding() (health.Finding, error) {
	if sf.Cause == "" {
		return health.Finding{}, errors.New("cause is empty")
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

// savable returns the nearest time that JSON can hold. A source's clock may be far off, and one such time must not prevent
// the write.
func savable(t time.Time) time.Time {
	switch y := t.Year(); {
	case y < 0:
		return time.Time{}
	case y > 9999:
		return time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	}
	return t
}
