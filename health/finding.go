package health

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// State is a device's health. The device plugin reports only Unhealthy devices as unhealthy to the kubelet.
type State uint8

// The states, in the order of their severity.
const (
	Unknown State = iota
	Healthy
	Degraded
	Unhealthy
)

//nolint:gochecknoglobals // a table of constants
var stateNames = [...]string{"unknown", "healthy", "degraded", "unhealthy"}

func (s State) String() string { return EnumName(stateNames[:], int(s)) }

// States returns every state, least severe first.
func States() []State { return []State{Unknown, Healthy, Degraded, Unhealthy} }

// MarshalText returns the name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a name. An unknown one is from a newer release, and counts as Unhealthy.
func (s *State) UnmarshalText(text []byte) error {
	state, ok := ParseState(string(text))
	if *s = state; !ok {
		*s = Unhealthy
	}
	return nil
}

// ParseState returns the state with that name. If there is none, ok is false.
func ParseState(s string) (state State, ok bool) {
	i := slices.Index(stateNames[:], s)
	return State(max(i, 0)), i >= 0
}

// Clears is the positive evidence that ends a finding.
type Clears uint8

// What clears a finding.
const (
	ClearsItself   Clears = iota // the end of the condition that the finding reports
	ClearsGPUReset               // a reset of the GPU, or its return to the bus
	ClearsReboot                 // a reboot of the node
	ClearsOperator               // gpu-node-agent clear
	ClearsRestart                // a restart of the application; only XIDs, which then stop
)

//nolint:gochecknoglobals // a table of constants
var clearsNames = [...]string{"self", "gpu-reset", "reboot", "operator", "app-restart"}

// String returns the stable code, which the JSON and the logs contain.
func (c Clears) String() string { return EnumName(clearsNames[:], int(c)) }

// ParseClears is the inverse of String. ok is false for an unknown code.
func ParseClears(s string) (c Clears, ok bool) {
	i := slices.Index(clearsNames[:], s)
	return Clears(max(i, 0)), i >= 0
}

// MarshalText returns the code.
func (c Clears) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads a code. Unknown evidence is from a newer release: only an operator clears the finding.
func (c *Clears) UnmarshalText(text []byte) error {
	clears, ok := ParseClears(string(text))
	if *c = clears; !ok {
		*c = ClearsOperator
	}
	return nil
}

// Finding is a problem found on a device: its cause, severity, suggested action and how it clears.
type Finding struct {
	Cause  string    `json:"cause"`  // short and stable, a label value: "xid-79", "lost", "recovery-action"
	State  State     `json:"state"`  // Degraded or Unhealthy
	Reason string    `json:"reason"` // a clause for people
	Action Action    `json:"action"`
	Since  time.Time `json:"since"`
	Last   time.Time `json:"last"`           // the last observation
	Reset  time.Time `json:"reset,omitzero"` // the last reset of the GPU since the finding began; zero if there was none
	Clears Clears    `json:"clears"`
	From   DeviceID  `json:"-"` // the parent that has the finding; empty if it is the device's own

	InOutage        bool      `json:"inOutage,omitempty"` // the device is unreachable in an outage of all GPUs, so its return proves no reset
	OthersBackSince time.Time `json:"-"`                  // InOutage: when another GPU came back without this one; zero before
}

// UnmarshalJSON reads a saved finding. What it lacks counts like what only a newer release knows.
func (f *Finding) UnmarshalJSON(text []byte) error {
	type plain Finding
	read := plain{State: Unhealthy, Action: ActionUnknown, Clears: ClearsOperator}
	if err := json.Unmarshal(text, &read); err != nil {
		return err
	}
	*f = Finding(read)
	return nil
}

// Verdict is the state of a device with the findings behind it: its own, those of its GPU, and what is decided about it.
type Verdict struct {
	State    State     // the worst of the findings' states
	Findings []Finding // worst first
	Since    time.Time // since when State lasts

	Before *Verdict // while a detach is undecided: if it is given up, its State has lasted
}

// OwnFinding returns the first of the device's own findings that matches, nil if there is none.
func (v Verdict) OwnFinding(match func(Finding) bool) *Finding {
	i := slices.IndexFunc(v.Findings, func(f Finding) bool { return f.From == "" && match(f) })
	if i < 0 {
		return nil
	}
	return &v.Findings[i]
}

// HasCause returns a function that reports whether a finding has the cause.
func HasCause(cause string) func(Finding) bool {
	return func(f Finding) bool { return f.Cause == cause }
}

// Has reports whether one of the device's own findings has the cause.
func (v Verdict) Has(cause string) bool { return v.OwnFinding(HasCause(cause)) != nil }

// Decided reports whether the worst finding is a decision, not a fault.
func (v Verdict) Decided() bool { return len(v.Findings) > 0 && v.Findings[0].IsDecision() }

// Cause returns the cause of the worst finding, "" if there is none.
func (v Verdict) Cause() string {
	if len(v.Findings) == 0 {
		return ""
	}
	return v.Findings[0].Cause
}

// Causes returns the causes of all findings, worst first.
func (v Verdict) Causes() []string {
	var all []string
	for _, f := range v.Findings {
		all = append(all, f.Cause)
	}
	return all
}

// EnumName returns the name of an enumeration's value.
func EnumName(names []string, i int) string {
	if i < len(names) {
		return names[i]
	}
	return fmt.Sprintf("%%!(%d)", i)
}

// Decisions returns the decisions about the device that continue in the next process. A detach is saved apart: see Detachment.
func (v Verdict) Decisions() []Finding {
	return slices.DeleteFunc(slices.Clone(v.Findings), func(f Finding) bool {
		return f.From != "" || !f.IsDecision() || f.Cause == CauseReleased
	})
}

// LastXID returns the XID of the device's newest own finding of an XID, 0 if there is none.
func (v Verdict) LastXID() (code int) {
	var last time.Time
	for _, f := range v.Findings {
		if xid, ok := XIDOfCause(f.Cause); ok && f.From == "" && !f.Last.Before(last) {
			code, last = xid, f.Last
		}
	}
	return code
}
