package health

import (
	"maps"
	"slices"
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

// Family groups causes whose findings begin and end alike.
type Family uint8

// The families. Of one severity, faults of the device come first, then faults of its MPS daemon, which often follow from them, then
// decisions.
const (
	FamilyOther     Family = iota // flapping, and a saved cause that this release does not know
	FamilyPresence                // the driver cannot reach the device
	FamilyStaleness               // the source has no current value of the device
	FamilyCondition               // measured values show it
	FamilyXID
	FamilyIncident

	// judge.View adds the findings of the families from here on, and judge.Measure all others. Each poll decides again, so they end with
	// their reason in every recovery mode. They do not count as a trip, because the device itself works, and an operator cannot clear them.

	FamilyMPS      // about the device's MPS daemon; not saved
	FamilyDecision // decided, not measured: the device is cordoned, its driver is detached, or it is kept free for a reset
)

// causeInfo describes a cause.
type causeInfo struct {
	family         Family
	endProvesReset bool // only a reset, or a reload of the driver, ends it (DCGM 4.6 health, what a GPU reset clears)
	waitsForReset  bool // if Degraded, the GPU works and waits for a reset
	outlivesBoot   bool // the GPU stores it, in its InfoROM
}

// causes are all causes but those of XIDs and incidents.
//
//nolint:gochecknoglobals // a table of constants
var causes = map[string]causeInfo{
	CauseLost:           {family: FamilyPresence},
	CauseInaccessible:   {family: FamilyPresence},
	CauseDetached:       {family: FamilyPresence},
	CauseMissing:        {family: FamilyPresence},
	CauseNotMeasured:    {family: FamilyStaleness},
	CauseRecoveryAction: {family: FamilyCondition, waitsForReset: true},
	CauseRemapFailed:    {family: FamilyCondition, outlivesBoot: true},
	CauseRemapPending:   {family: FamilyCondition, endProvesReset: true, waitsForReset: true},
	CauseUnrepairable:   {family: FamilyCondition, outlivesBoot: true},
	CauseDBE:            {family: FamilyCondition, endProvesReset: true},
	CauseRetiredPending: {family: FamilyCondition, endProvesReset: true, waitsForReset: true},
	CauseRetiredPages:   {family: FamilyCondition, outlivesBoot: true},
	CauseTemperature:    {family: FamilyCondition},
	CauseClocks:         {family: FamilyCondition},
	CauseFlapping:       {family: FamilyOther},

	CauseMPSForeign:  {family: FamilyMPS},
	CauseMPSDown:     {family: FamilyMPS},
	CauseMPSHung:     {family: FamilyMPS},
	CauseMPSFault:    {family: FamilyMPS},
	CauseMPSLimits:   {family: FamilyMPS},
	CauseMPSNotReady: {family: FamilyMPS},

	CauseCordoned: {family: FamilyDecision},
	CauseIsolated: {family: FamilyDecision},
	CauseReleased: {family: FamilyDecision},
}

// causeOf returns the description of a cause. XIDs and incidents are known by their prefixes, because another release may have saved the
// finding of a code for which this one has no name.
func causeOf(cause string) causeInfo {
	switch {
	case strings.HasPrefix(cause, xidPrefix):
		return causeInfo{family: FamilyXID}
	case strings.HasPrefix(cause, IncidentCausePrefix):
		return causeInfo{family: FamilyIncident}
	}
	return causes[cause]
}

// Family returns the family of the finding's cause.
func (f Finding) Family() Family { return causeOf(f.Cause).family }

// OfXID reports whether an XID is the cause.
func (f Finding) OfXID() bool { return f.Family() == FamilyXID }

// OfIncident reports whether an incident of DCGM's health checks is the cause.
func (f Finding) OfIncident() bool { return f.Family() == FamilyIncident }

// OfPresence reports whether the driver cannot reach the device.
func (f Finding) OfPresence() bool { return f.Family() == FamilyPresence }

// IsCondition reports whether each poll renews the finding while it lasts. No poll renews an XID.
func (f Finding) IsCondition() bool { return f.Clears == ClearsItself && !f.OfXID() }

// OfMPS reports whether the finding is about the device's MPS daemon.
func (f Finding) OfMPS() bool { return f.Family() == FamilyMPS }

// IsDecision reports whether the finding is decided, not measured.
func (f Finding) IsDecision() bool { return f.Family() == FamilyDecision }

// OutlivesBoot reports whether the GPU has the cause after a reboot too, because it stores it itself.
func (f Finding) OutlivesBoot() bool { return causeOf(f.Cause).outlivesBoot }

// AddedByView reports whether judge.View adds the finding, and not judge.Measure.
func (f Finding) AddedByView() bool { return f.Family() >= FamilyMPS }

// xidPrefix begins the cause of every finding of an XID.
const xidPrefix = "xid-"

// IncidentCausePrefix begins the cause of every finding of an incident.
const IncidentCausePrefix = "dcgm-"

// XIDCause returns the cause of findings of an XID.
func XIDCause(code int) string { return xidPrefix + strconv.Itoa(code) }

// XIDOfCause returns the XID of a cause; ok is false if it is another one.
func XIDOfCause(cause string) (xid int, ok bool) {
	number, ok := strings.CutPrefix(cause, xidPrefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(number)
	return n, err == nil && n > 0 && XIDCause(n) == cause
}

// EndProvesReset reports whether the end of a condition proves a reset.
func EndProvesReset(cause string) bool { return causeOf(cause).endProvesReset }

// WaitsForReset reports whether a GPU that is Degraded by the cause works and waits for a reset.
func WaitsForReset(cause string) bool { return causeOf(cause).waitsForReset }

// Causes returns the causes above.
func Causes() []string { return slices.Sorted(maps.Keys(causes)) }
