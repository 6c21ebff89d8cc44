package health

import (
	"slices"
	"time"
)

// Memory is what Measure keeps of a device from one reading to the next, beside its XIDs. Its findings are the device's own: View adds what a
// MIG device inherits from its GPU, and what is decided about a device. The state file has the exported fields.
type Memory struct {
	Findings []Finding   `json:"findings,omitempty"` // in the order of sortFindings
	Trips    []time.Time `json:"trips,omitempty"`    // when the device became unhealthy, within Config.Flap.Within

	unconfirmed map[string]confirmation // FAILs that too few checks have shown, by cause; not modified once stored
	PendingXIDs []XID                   `json:"pending,omitempty"` // recent, whose severity the recovery action decides; immutable
	measured    bool                    // at least one sample had a known presence, so no finding means healthy

	awaitsAction     bool // this process has no value of the recovery action yet, and there was none before
	awaitsCheck      bool // this process has no result of DCGM's checks yet, and the device has no saved state
	unexplainedReset bool // the first recovery action asked for a reset that no XID explains, and still does
	eventAction      eventAction
}

// confirmation counts the checks that have shown a fault which is not confirmed yet.
type confirmation struct {
	checks int
	last   time.Time
}

// find returns the first finding that matches, nil if there is none.
func (m *Memory) find(match func(Finding) bool) *Finding {
	if i := slices.IndexFunc(m.Findings, match); i >= 0 {
		return &m.Findings[i]
	}
	return nil
}

func (m *Memory) has(cause string) bool { return m.find(hasCause(cause)) != nil }

// unhealthyBy reports whether a finding with the cause makes the device Unhealthy.
func (m *Memory) unhealthyBy(cause string) bool {
	f := m.find(hasCause(cause))
	return f != nil && f.State == Unhealthy
}

// without returns the memory without the findings for which drop returns true.
func (m Memory) without(drop func(Finding) bool) Memory {
	m.Findings = slices.DeleteFunc(slices.Clone(m.Findings), drop)
	return m
}
