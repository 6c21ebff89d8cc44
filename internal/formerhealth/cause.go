package formerhealth

import (
	"slices"
	"strconv"
	"strings"
)

// causes are the causes of findings that are neither XIDs nor incidents.
//
//nolint:gochecknoglobals // a table of constants
var causes = []string{
	CauseLost, CauseInaccessible, CauseDetached, CauseMissing, CauseRecoveryAction, CauseRemapFailed, CauseRemapPending, CauseUnrepairable,
	CauseDBE, CauseRetiredPending, CauseRetiredPages, CauseTemperature, CauseClocks, CauseNotMeasured, CauseFlapping, CauseCordoned,
	CauseIsolated, CauseReleased, CauseMPSForeign, CauseMPSDown, CauseMPSHung, CauseMPSFault, CauseMPSLimits, CauseMPSNotReady,
}

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
	return slices.Contains(causes, cause)
}
