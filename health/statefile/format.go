package statefile

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

// The file of a state is one Saved in JSON. Readers ignore unknown keys. A change that they would misread raises formatVersion.
const (
	formatName    = "gpu-node-agent state"
	formatVersion = 1
)

type fileFormat struct {
	Format    string            `json:"format"`
	Version   int               `json:"version"`
	BootID    string            `json:"bootID"`
	Source    string            `json:"source"`
	Inventory string            `json:"inventory"`
	History   bool              `json:"history"`
	Driver    string            `json:"driverLoad,omitempty"`
	Polled    time.Time         `json:"polled,omitzero"`
	Detach    health.Detachment `json:"detach,omitzero"`
	Bindings  json.RawMessage   `json:"bindings,omitempty"`
	Devices   []savedDevice     `json:"devices,omitempty"`
}

// savedDevice has the memory apart from the detail, so that it can be read even if a newer release describes the device in another way.
type savedDevice struct {
	ID     health.DeviceID `json:"id"`
	Parent health.DeviceID `json:"parent,omitempty"` // of a MIG device
	Since  time.Time       `json:"since"`
	health.Memory
	Decided []health.Finding `json:"decided,omitempty"` // Verdict.Decisions
	Detail  json.RawMessage  `json:"detail,omitempty"`  // savedDetail
}

type savedDetail struct {
	Device health.Device `json:"device"`
	Rows   []savedRow    `json:"rows,omitempty"` // Ledger.Rows
	Owed   []savedOwed   `json:"owed,omitempty"`
}

// savedRow is a row of the source's stream of XIDs, which its time identifies.
type savedRow struct {
	Code        int   `json:"code"`
	At          int64 `json:"atMicroseconds"`
	Predecessor bool  `json:"predecessor,omitempty"` // LedgerRow.Predecessor
}

// savedOwed are XIDs that the source still has to report.
type savedOwed struct {
	Code  int           `json:"code"`
	Count int           `json:"count"`
	Left  time.Duration `json:"leftNanoseconds"`
}

// MarshalJSON writes the state file's format.
func (s Saved) MarshalJSON() ([]byte, error) {
	file := fileFormat{
		Format: formatName, Version: formatVersion, BootID: s.BootID, Source: s.Source, Inventory: s.Inventory, History: s.History,
		Driver: s.DriverLoad, Polled: savable(s.Polled), Detach: s.Detachment,
	}
	var err error
	if len(s.Bindings) > 0 {
		if file.Bindings, err = json.Marshal(s.Bindings); err != nil {
			return nil, err
		}
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		sd := savedDevice{
			ID: d.Device.ID, Parent: d.Device.Parent, Since: savable(d.Verdict.Since), Memory: d.Memory,
			Decided: savedFindings(d.Verdict.Decisions()),
		}
		sd.Findings, sd.PendingXIDs = savedFindings(d.Memory.Findings), savedXIDs(d.Memory.PendingXIDs)
		detail := savedDetail{Device: d.Device}
		for _, r := range d.XIDs.Rows {
			detail.Rows = append(detail.Rows, savedRow{r.Code, r.At, r.Predecessor})
		}
		for _, o := range d.XIDs.Owed {
			detail.Owed = append(detail.Owed, savedOwed{o.Code, o.Count, health.OwedBySource + o.Seen})
		}
		if sd.Detail, err = json.Marshal(detail); err != nil {
			return nil, err
		}
		file.Devices = append(file.Devices, sd)
	}
	return json.Marshal(file)
}

// UnmarshalJSON reads the state file's format. It ignores unknown keys and refuses what health/judge cannot produce.
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
		Detachment: file.Detach, newer: newer,
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
		for key, findings := range map[string][]health.Finding{"findings": sd.Findings, "decided": sd.Decided} {
			if err := checkFindings(findings); err != nil {
				return fmt.Errorf("devices[%d].%s%w", i, key, err)
			}
		}
		read.Devices = append(read.Devices, sd.state())
	}
	*s = read
	return nil
}

// state returns the saved device. Without a readable description it has its findings.
func (sd savedDevice) state() health.DeviceState {
	var more savedDetail
	if json.Unmarshal(sd.Detail, &more) != nil {
		more = savedDetail{Device: health.Device{Index: -1, Minor: -1, GI: -1, CI: -1, MIGIndex: -1}}
	}
	d := judge.SavedState(more.Device, sd.Memory, sd.Decided, sd.Since)
	d.Device.ID, d.Device.Parent, d.Device.Kind = sd.ID, sd.Parent, health.KindGPU
	if sd.Parent != "" {
		d.Device.Kind = health.KindMIG
	}
	for _, r := range more.Rows {
		d.XIDs.Rows = append(d.XIDs.Rows, health.LedgerRow{XIDRow: health.XIDRow{Code: r.Code, At: r.At}, Predecessor: r.Predecessor})
	}
	for _, a := range more.Owed {
		if a.Count > 0 && a.Left > 0 {
			seen := a.Left - health.OwedBySource
			d.XIDs.Owed = append(d.XIDs.Owed, health.OwedXIDs{Code: a.Code, Count: a.Count, Born: seen, Seen: seen})
		}
	}
	return d
}

// checkFindings returns what is wrong with the findings of a key.
func checkFindings(all []health.Finding) error {
	causes := make(map[string]bool)
	for i, f := range all {
		switch {
		case f.Cause == "":
			return fmt.Errorf("[%d]: cause is empty", i)
		case causes[f.Cause]:
			return fmt.Errorf("[%d]: cause %q is repeated", i, f.Cause)
		case f.State < health.Degraded:
			return fmt.Errorf("[%d]: state %v is not degraded or unhealthy", i, f.State)
		}
		causes[f.Cause] = true
	}
	return nil
}

func savedFindings(all []health.Finding) []health.Finding {
	all = slices.Clone(all)
	for i := range all {
		f := &all[i]
		f.Since, f.Last, f.Reset = savable(f.Since), savable(f.Last), savable(f.Reset)
	}
	return all
}

func savedXIDs(all []health.XID) []health.XID {
	all = slices.Clone(all)
	for i := range all {
		all[i].At = savable(all[i].At)
	}
	return all
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
