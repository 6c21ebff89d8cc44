package statefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The file of a state is one Saved in JSON. Readers ignore unknown keys. A change that they would misread raises formatVersion.
const (
	formatName    = "gpu-node-agent state"
	formatVersion = 1
)

type fileFormat struct {
	Format    string           `json:"format"`
	Version   int              `json:"version"`
	BootID    string           `json:"bootID"`
	Source    string           `json:"source"`
	Inventory string           `json:"inventory"`
	History   bool             `json:"history"`
	Driver    string           `json:"driverLoad,omitempty"`
	Polled    time.Time        `json:"polled,omitzero"`
	Detach    *savedDetachment `json:"detach,omitempty"`
	Devices   []savedDevice    `json:"devices,omitempty"`
	Bindings  json.RawMessage  `json:"bindings,omitempty"`
}

// savedDevice has the findings apart from the detail, so that they can be read even if a newer release describes the device in another way.
type savedDevice struct {
	ID       health.DeviceID `json:"id"`
	Parent   health.DeviceID `json:"parent,omitempty"` // of a MIG device
	Since    time.Time       `json:"since"`
	Trips    []time.Time     `json:"trips,omitempty"`
	Pending  []savedXID      `json:"pending,omitempty"` // Memory.PendingXIDs
	Findings []savedFinding  `json:"findings,omitempty"`
	Decided  []savedFinding  `json:"decided,omitempty"` // Verdict.Decisions
	Detail   json.RawMessage `json:"detail,omitempty"`  // savedDetail
}

type savedDetail struct {
	Device health.Device `json:"device"`
	Rows   []savedRow    `json:"rows,omitempty"` // Ledger.Rows
	Owed   []savedOwed   `json:"owed,omitempty"`
}

// savedRow is a row of the source's stream of XIDs, which its time identifies.
type savedRow struct {
	Code int   `json:"code"`
	At   int64 `json:"atMicroseconds"`
}

// savedOwed are XIDs that the source still has to report.
type savedOwed struct {
	Code  int           `json:"code"`
	Count int           `json:"count"`
	Left  time.Duration `json:"leftNanoseconds"`
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
	Cause    string    `json:"cause"`
	State    string    `json:"state"`
	Reason   string    `json:"reason"`
	Action   string    `json:"action"`
	Since    time.Time `json:"since"`
	Last     time.Time `json:"last"`
	Reset    time.Time `json:"reset,omitzero"`
	Clears   string    `json:"clears"`
	InOutage bool      `json:"inOutage,omitempty"`
}

// MarshalJSON writes the state file's format.
func (s Saved) MarshalJSON() ([]byte, error) {
	file := fileFormat{
		Format: formatName, Version: formatVersion, BootID: s.BootID, Source: s.Source, Inventory: s.Inventory, History: s.History,
		Driver: s.DriverLoad, Polled: savable(s.Polled),
	}
	if len(s.Bindings) > 0 {
		var err error
		if file.Bindings, err = json.Marshal(s.Bindings); err != nil {
			return nil, err
		}
	}
	if d := s.Detachment; d != (health.Detachment{}) {
		file.Detach = &savedDetachment{savable(d.Since), savable(d.Until), d.For, d.Over, d.Undecided, d.EngineUnasked}
	}
	for i := range s.Devices {
		d, err := newSavedDevice(&s.Devices[i])
		if err != nil {
			return nil, err
		}
		file.Devices = append(file.Devices, d)
	}
	return json.Marshal(file)
}

func newSavedDevice(d *health.DeviceState) (sd savedDevice, err error) {
	sd = savedDevice{
		ID: d.Device.ID, Parent: d.Device.Parent, Since: savable(d.Verdict.Since), Pending: savedXIDs(d.Memory.PendingXIDs),
	}
	for _, t := range d.Memory.Trips {
		sd.Trips = append(sd.Trips, savable(t))
	}
	sd.Findings, sd.Decided = savedFindings(d.Memory.Findings), savedFindings(d.Verdict.Decisions())
	detail := savedDetail{Device: d.Device}
	for _, r := range d.XIDs.Rows {
		detail.Rows = append(detail.Rows, savedRow{r.Code, r.At})
	}
	for _, o := range d.XIDs.Owed {
		detail.Owed = append(detail.Owed, savedOwed{o.Code, o.Count, health.OwedBySource + o.Seen})
	}
	sd.Detail, err = json.Marshal(detail)
	return sd, err
}

// UnmarshalJSON reads the state file's format. It ignores unknown keys and refuses what health.Judge cannot produce.
func (s *Saved) UnmarshalJSON(text []byte) error {
	var file fileFormat
	if err := json.Unmarshal(text, &file); err != nil {
		return err
	}
	newer, err := checkFormat(file.Format, formatName, file.Version)
	if err != nil {
		return err
	}
	read := Saved{
		BootID: file.BootID, Source: file.Source, Inventory: file.Inventory, History: file.History, DriverLoad: file.Driver, Polled: file.Polled,
		newer: newer,
	}
	if d := file.Detach; d != nil {
		read.Detachment = health.Detachment(*d)
	}
	if json.Unmarshal(file.Bindings, &read.Bindings) != nil {
		read.Bindings = nil // no reason to lose the findings
	}
	ids := make(map[health.DeviceID]bool)
	for i, sd := range file.Devices {
		if sd.ID == "" || ids[sd.ID] {
			return fmt.Errorf("devices[%d].id: %q is empty or repeated", i, sd.ID)
		}
		ids[sd.ID] = true
		d, err := sd.state()
		if err != nil {
			return fmt.Errorf("devices[%d].%w", i, err)
		}
		read.Devices = append(read.Devices, d)
	}
	*s = read
	return nil
}

// state returns the saved device. Without a readable description it has its findings.
func (sd savedDevice) state() (health.DeviceState, error) {
	var more savedDetail
	if json.Unmarshal(sd.Detail, &more) != nil {
		more = savedDetail{Device: health.Device{Index: -1, Minor: -1, GI: -1, CI: -1, MIGIndex: -1}}
	}
	d := health.DeviceState{Device: more.Device, Verdict: health.Verdict{Since: sd.Since}}
	d.Memory.Trips = append(d.Memory.Trips, sd.Trips...)
	d.Device.ID, d.Device.Parent, d.Device.Kind = sd.ID, sd.Parent, health.KindGPU
	if sd.Parent != "" {
		d.Device.Kind = health.KindMIG
	}
	for _, r := range more.Rows {
		d.XIDs.Rows = append(d.XIDs.Rows, health.LedgerRow{XIDRow: health.XIDRow{Code: r.Code, At: r.At}})
	}
	for _, a := range more.Owed {
		if a.Count > 0 && a.Left > 0 {
			seen := a.Left - health.OwedBySource
			d.XIDs.Owed = append(d.XIDs.Owed, health.OwedXIDs{Code: a.Code, Count: a.Count, Born: seen, Seen: seen})
		}
	}
	for _, x := range sd.Pending {
		d.Memory.PendingXIDs = append(d.Memory.PendingXIDs, health.XID{Code: x.Code, At: x.At})
	}
	var err error
	if d.Memory.Findings, err = findings("findings", sd.Findings); err != nil {
		return health.DeviceState{}, err
	}
	decided, err := findings("decided", sd.Decided)
	if err != nil {
		return health.DeviceState{}, err
	}
	d.Verdict.Findings = slices.Concat(d.Memory.Findings, decided)
	for _, f := range d.Verdict.Findings {
		d.Verdict.State = max(d.Verdict.State, f.State)
	}
	return d, nil
}

func savedFindings(all []health.Finding) (saved []savedFinding) {
	for _, f := range all {
		saved = append(saved, savedFinding{
			f.Cause, f.State.String(), f.Reason, string(f.Action), savable(f.Since), savable(f.Last), savable(f.Reset), f.Clears.String(),
			f.InOutage,
		})
	}
	return saved
}

// findings reads the findings of a key.
func findings(key string, saved []savedFinding) (all []health.Finding, err error) {
	for i, sf := range saved {
		f, err := sf.finding()
		if err == nil && slices.ContainsFunc(all, func(g health.Finding) bool { return g.Cause == f.Cause }) {
			err = fmt.Errorf("cause %q is repeated", f.Cause)
		}
		if err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", key, i, err)
		}
		all = append(all, f)
	}
	return all, nil
}

// finding reads a finding. Unknown values are from a newer release: an unknown state counts as unhealthy, and only an operator clears a
// finding with unknown evidence.
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
	action := health.Action(sf.Action)
	if !action.Valid() {
		action = health.ActionUnknown
	}
	clears, ok := health.ParseClears(sf.Clears)
	if !ok {
		clears = health.ClearsOperator
	}
	return health.Finding{
		Cause: sf.Cause, State: state, Reason: sf.Reason, Action: action, Since: sf.Since, Last: sf.Last, Reset: sf.Reset, Clears: clears,
		InOutage: sf.InOutage,
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
