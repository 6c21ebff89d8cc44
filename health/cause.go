package health

import (
	"strconv"
	"strings"
)

// The causes of findings that are neither of an XID ("xid-79") nor of DCGM's incidents ("dcgm-nvlink-down"). They are label values: do not
// change them. Each has a row in causes.
const (
	CauseLost           = "lost"
	CauseInaccessible   = "inaccessible"
	CauseDetached       = "detached"
	CauseMissing        = "missing"
	CauseNotMeasured    = "not-measured"
	CauseRecoveryAction = "recovery-action"
	CauseRemapFailed    = "row-remap-failed"
	CauseRemapPending   = "row-remap-pending"
	CauseUnrepairable   = "memory-unrepairable"
	CauseDBE            = "double-bit-ecc"
	CauseRetiredPending = "page-retirement-pending"
	CauseRetiredPages   = "too-many-retired-pages"
	CauseTemperature    = "temperature"
	CauseClocks         = "clocks-slowed-by-hardware"
	CauseFlapping       = "flapping"

	CauseMPSForeign  = "mps-foreign"   // a daemon that mps-daemon has not started serves the device
	CauseMPSDown     = "mps-down"      // the daemon does not run, or mps-daemon itself does not
	CauseMPSHung     = "mps-hung"      // the daemon does not answer
	CauseMPSFault    = "mps-fault"     // a fatal fault of a client; the server refuses new clients until the affected ones have exited
	CauseMPSLimits   = "mps-limits"    // the limits could not be set, or the daemon reports others
	CauseMPSNotReady = "mps-not-ready" // what containers mount is missing, or the daemon has been starting for too long

	CauseCordoned = "cordoned"
	CauseIsolated = "isolated"
	CauseReleased = "driver-released"
)

// family groups causes whose findings begin and end alike.
type family uint8

// The families. Of one severity, faults of the device come first, then faults of its MPS daemon, which often follow from them, then
// decisions.
const (
	familyOther     family = iota // flapping, and a saved cause that this release does not know
	familyPresence                // the driver cannot reach the device
	familyStaleness               // the source has no current value of the device
	familyCondition               // measured values show it: see conditions
	familyXID
	familyIncident

	// View adds the findings of the families from here on, and Measure all others. Each poll decides again, so they end with their reason in
	// every recovery mode. They do not count as a trip, because the device itself works, and an operator cannot clear them.

	familyMPS      // about the device's MPS daemon; not saved
	familyDecision // decided, not measured: the device is cordoned, its driver is detached, or it is kept free for a reset
)

// causeInfo describes a cause.
type causeInfo struct {
	family         family
	endProvesReset bool // only a reset, or a reload of the driver, ends it (DCGM 4.6 health, what a GPU reset clears); see also recoveries
	waitsForReset  bool // if Degraded, the GPU works and waits for a reset
	outlivesBoot   bool // the GPU stores it, in its InfoROM
}

// causes are all causes but those of XIDs and incidents.
//
//nolint:gochecknoglobals // a table of constants
var causes = map[string]causeInfo{
	CauseLost:           {family: familyPresence},
	CauseInaccessible:   {family: familyPresence},
	CauseDetached:       {family: familyPresence},
	CauseMissing:        {family: familyPresence},
	CauseNotMeasured:    {family: familyStaleness},
	CauseRecoveryAction: {family: familyCondition, waitsForReset: true},
	CauseRemapFailed:    {family: familyCondition, outlivesBoot: true},
	CauseRemapPending:   {family: familyCondition, endProvesReset: true, waitsForReset: true},
	CauseUnrepairable:   {family: familyCondition, outlivesBoot: true},
	CauseDBE:            {family: familyCondition, endProvesReset: true},
	CauseRetiredPending: {family: familyCondition, endProvesReset: true, waitsForReset: true},
	CauseRetiredPages:   {family: familyCondition, outlivesBoot: true},
	CauseTemperature:    {family: familyCondition},
	CauseClocks:         {family: familyCondition},
	CauseFlapping:       {family: familyOther},

	CauseMPSForeign:  {family: familyMPS},
	CauseMPSDown:     {family: familyMPS},
	CauseMPSHung:     {family: familyMPS},
	CauseMPSFault:    {family: familyMPS},
	CauseMPSLimits:   {family: familyMPS},
	CauseMPSNotReady: {family: familyMPS},

	CauseCordoned: {family: familyDecision},
	CauseIsolated: {family: familyDecision},
	CauseReleased: {family: familyDecision},
}

// causeOf returns the description of a cause. XIDs and incidents are known by their prefixes, because another release may have saved the
// finding of a code for which this one has no name.
func causeOf(cause string) causeInfo {
	switch {
	case strings.HasPrefix(cause, xidPrefix):
		return causeInfo{family: familyXID}
	case strings.HasPrefix(cause, incidentPrefix):
		return causeInfo{family: familyIncident}
	}
	return causes[cause]
}

func (f Finding) family() family { return causeOf(f.Cause).family }

// rank orders findings of one severity. Faults of the device are equal.
func (f Finding) rank() family { return max(f.family(), familyIncident) }

func (f Finding) ofXID() bool { return f.family() == familyXID }

func (f Finding) ofIncident() bool { return f.family() == familyIncident }

func (f Finding) ofPresence() bool { return f.family() == familyPresence }

// condition reports whether each poll renews the finding while it lasts. No poll renews an XID.
func (f Finding) condition() bool { return f.Clears == ClearsItself && !f.ofXID() }

// OfMPS reports whether the finding is about the device's MPS daemon.
func (f Finding) OfMPS() bool { return f.family() == familyMPS }

func (f Finding) decision() bool { return f.family() == familyDecision }

// OutlivesBoot reports whether the GPU has the cause after a reboot too, because it stores it itself.
func (f Finding) OutlivesBoot() bool { return causeOf(f.Cause).outlivesBoot }

// addedByView reports whether View adds the finding, and not Measure.
func (f Finding) addedByView() bool { return f.family() >= familyMPS }

// XIDOfCause returns the XID of a cause; ok is false if it is another one.
func XIDOfCause(cause string) (xid int, ok bool) {
	number, ok := strings.CutPrefix(cause, xidPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(number)
	return n, err == nil && n > 0 && xidCause(n) == cause
}

// ValidCause reports whether a finding can have the cause. Every XID and every code of DCGM has one.
func ValidCause(cause string) bool {
	if _, ok := XIDOfCause(cause); ok {
		return true
	}
	if name, ok := strings.CutPrefix(cause, incidentPrefix); ok {
		code, ok := IncidentCode(strings.ReplaceAll(name, "-", "_"))
		return ok && incidentCause(LookupIncident(code)) == cause
	}
	_, ok := causes[cause]
	return ok
}
