package formerhealth

import (
	"slices"
	"time"
)

// ChecksStatus tells whether DCGM's health checks work.
type ChecksStatus uint8

// The states of the health checks.
const (
	ChecksUnknown ChecksStatus = iota // not run yet, or there is no GPU to check
	ChecksOff                         // disabled by the configuration
	ChecksUp
	ChecksDown // they cannot be set or read; everything else is measured
)

//nolint:gochecknoglobals // a table of constants
var checksNames = [...]string{"unknown", "off", "up", "down"}

func (s ChecksStatus) String() string { return enumName(checksNames[:], int(s)) }

// Checks is the state of DCGM's health checks.
type Checks struct {
	Status ChecksStatus
	Err    string    // ChecksDown: why they do not work
	Since  time.Time // of Status; only the Monitor sets it
}

// keepIncidents returns the verdict with its incidents observed until now: while the checks do not work, an incident may
// last, and its end has to be observed for Config.RecoverAfter once they work again.
func (v Verdict) keepIncidents(now time.Time) Verdict {
	if !slices.ContainsFunc(v.Findings, Finding.ofIncident) {
		return v
	}
	v.Findings = slices.Clone(v.Findings)
	for i := range v.Findings {
		if v.Findings[i].ofIncident() {
			v.Findings[i].restartCondition(now)
		}
	}
	return v
}
