package health

import (
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// IncidentInfo describes a code of DCGM's health checks.
type IncidentInfo struct {
	Code   int
	Name   string // "DCGM_FR_NVLINK_DOWN"
	Effect Effect // of a FAIL; a WARN has at most EffectWarn
	Action Action
	System string // DCGM's health system that reports it; empty: only dcgmi diag does
}

// incidentRow is a row of incidents.csv without what only people read.
type incidentRow struct {
	IncidentInfo
	only       string
	repeatsXID bool
}

// incidentTable describes the codes of dcgm_errors.h, by number. A code without a severity warns; most of them come from dcgmi diag only.
// docs/health.md shows the others, and TestIncidentDeviations compares them with other programs. The columns:
//
//   - name: DCGM's name without DCGM_FR_.
//   - effect: of a FAIL. action: of a finding.
//   - only: nvlink if the incident applies only to a GPU with NVLink to another GPU; fabric if the driver must also know the state of the
//     fabric. It is ignored on any other GPU.
//   - repeats: xid if it only repeats an XID, which the agent judges itself.
//   - system: DCGM's health system that reports the code, as in source.healthSystems; xid: with all systems (dcgm_structs.h:
//     dcgmHealthSystems_t).
//   - severity: the worst with which DCGM 4.6's health checks report the code. advice: DCGM's own, MONITOR or ISOLATE, in dcgm_errors.c.
//   - differs: the programs with another effect or action; reason: why the row differs from them.
//
//go:embed incidents.csv
var incidentTable string

//nolint:gochecknoglobals // a table of constants
var incidentRows = sync.OnceValue(func() (rows []incidentRow) {
	for code, cells := range tableRows(incidentTable) {
		info := IncidentInfo{
			Code: code, Name: incidentNamePrefix + cells["name"], Effect: effectNamed(cells["effect"]), Action: Action(cells["action"]),
			System: cells["system"],
		}
		rows = append(rows, incidentRow{info, cells["only"], cells["repeats"] == "xid"})
	}
	return rows
})

// ofXID reports whether the incident only repeats an XID. DCGM reports some XIDs with codes of their own, and others, such as
// 63 and 64, with the code of a check: "Row remap failure (triggered by XID 64: …)". It keeps all of them until its engine
// restarts (dcgm/OBSERVED.md#xid-incidents), and the agent judges the XIDs themselves.
func (i Incident) ofXID() bool {
	return lookupIncident(i.Code).repeatsXID || i.triggeredByXID()
}

func (i Incident) triggeredByXID() bool { return strings.Contains(i.Message, "triggered by XID") }

// appliesTo reports whether the incident can concern the device.
func (r incidentRow) appliesTo(d Device, i Incident) bool {
	if r.only == "" {
		return true
	}
	// Unconnected links are down too. DCGM itself checks no links in MIG mode.
	connected := slices.ContainsFunc(d.Links, func(l Link) bool { return l.NVLinks > 0 })
	tooOld := r.only == "fabric" && strings.Contains(i.Message, "NvmlTooOld")
	return connected && !tooOld
}

// LookupIncident returns the description of a code. A code that is not in the table is a warning.
func LookupIncident(code int) IncidentInfo { return lookupIncident(code).IncidentInfo }

func lookupIncident(code int) incidentRow {
	if rows := incidentRows(); code >= 0 && code < len(rows) {
		return rows[code]
	}
	return incidentRow{IncidentInfo: IncidentInfo{
		Code: code, Name: "DCGM code " + strconv.Itoa(code), Effect: EffectWarn, Action: ActionWatch,
	}}
}

// IncidentConfig is the `health.incidents` section: overrides for the effect of a FAIL of DCGM's health checks, by name, such
// as DCGM_FR_NVLINK_DOWN, or by number.
type IncidentConfig struct {
	Unhealthy []string `yaml:"unhealthy"`
	Warn      []string `yaml:"warn"`
	Ignore    []string `yaml:"ignore"`
}

// DefaultIncidentConfig returns the defaults of the section.
func DefaultIncidentConfig() IncidentConfig {
	return IncidentConfig{Unhealthy: []string{}, Warn: []string{}, Ignore: []string{}}
}

// Validate returns every error, each with its key below health.incidents.
func (c IncidentConfig) Validate() error {
	var errs []error
	var lists [len(overrideLists)][]int
	for i, names := range [][]string{c.Unhealthy, c.Warn, c.Ignore} {
		for j, name := range names {
			code, ok := IncidentCode(name)
			if !ok {
				errs = append(errs, fmt.Errorf("%v[%d]: expected a DCGM incident such as DCGM_FR_NVLINK_DOWN or its number, got %q",
					overrideLists[i], j, name))
				continue
			}
			lists[i] = append(lists[i], code)
		}
	}
	name := func(code int) string { return LookupIncident(code).Name }
	return errors.Join(append(errs, overlaps(lists, name)...)...)
}

// Effect returns the effect of an incident on its device. Overrides take precedence, but a WARN never makes a device
// Unhealthy.
func (c IncidentConfig) Effect(d Device, i Incident) Effect {
	is := names(i.Code)
	r := lookupIncident(i.Code)
	effect := r.Effect
	switch {
	case i.triggeredByXID():
		return EffectIgnore // an override means the check, not the XID, and this incident would never clear
	case slices.ContainsFunc(c.Unhealthy, is):
		effect = EffectUnhealthy
	case slices.ContainsFunc(c.Warn, is):
		effect = EffectWarn
	case slices.ContainsFunc(c.Ignore, is):
		effect = EffectIgnore
	case !r.appliesTo(d, i):
		return EffectIgnore
	}
	if i.Severity != SeverityFail {
		effect = min(effect, EffectWarn)
	}
	return effect
}

// overrides reports whether a code is in one of the lists.
func (c IncidentConfig) overrides(code int) bool {
	return slices.ContainsFunc(slices.Concat(c.Unhealthy, c.Warn, c.Ignore), names(code))
}

// ofEveryGPU returns the incidents without a device that the configuration names. They count for every GPU. Any other incident without a
// device counts for none.
func (c IncidentConfig) ofEveryGPU(incidents []Incident) (named []Incident) {
	for _, i := range incidents {
		if c.overrides(i.Code) {
			named = append(named, i)
		}
	}
	return named
}

// names returns a function that reports whether a name in the lists names the code.
func names(code int) func(name string) bool {
	return func(name string) bool {
		got, ok := IncidentCode(name)
		return ok && got == code
	}
}

// incidentPrefix begins the cause of every finding of an incident.
const incidentPrefix = "dcgm-"

// incidentCause is DCGM's name of the code in the style of the other causes: "dcgm-nvlink-down".
func incidentCause(i IncidentInfo) string {
	name, known := strings.CutPrefix(i.Name, incidentNamePrefix)
	if !known {
		name = strconv.Itoa(i.Code)
	}
	return incidentPrefix + strings.ToLower(strings.ReplaceAll(name, "_", "-"))
}

// incidentFinding returns the finding of an incident. It returns false if the incident is ignored.
func incidentFinding(c Config, d Device, i Incident, now time.Time) (Finding, bool) {
	info := LookupIncident(i.Code)
	f := Finding{
		Cause: incidentCause(info), State: c.Incidents.Effect(d, i).state(), Reason: i.Message, Action: info.Action,
		Since: now, Last: now, Clears: ClearsItself,
	}
	return f, f.State > Healthy
}

// confirm returns findings for the sample's incidents that count, and the state of incidents that are not confirmed yet. A WARN counts at
// once. A FAIL counts after Config.Confirm consecutive checks. Polls less than half an interval apart, which an event triggered, are one
// check. A sample without a check does not end the sequence.
func confirm(c Config, d Device, old Memory, s Sample) ([]Finding, map[string]confirmation) {
	if !s.Checked {
		return nil, old.unconfirmed
	}
	var found []Finding
	for _, i := range s.Incidents {
		f, bad := incidentFinding(c, d, i, s.At)
		j := slices.IndexFunc(found, hasCause(f.Cause))
		switch {
		case !bad:
		case j < 0:
			found = append(found, f)
		case f.State > found[j].State: // a WARN never hides a FAIL
			found[j] = f
		}
	}
	var unconfirmed map[string]confirmation
	confirmed := slices.DeleteFunc(found, func(f Finding) bool {
		if f.State != Unhealthy {
			return false
		}
		x := old.unconfirmed[f.Cause]
		if x.checks == 0 || s.At.Sub(x.last) >= c.Interval/2 {
			x = confirmation{x.checks + 1, s.At}
		}
		if unconfirmed == nil {
			unconfirmed = make(map[string]confirmation)
		}
		unconfirmed[f.Cause] = x
		return x.checks < c.Confirm && !old.unhealthyBy(f.Cause) // an existing finding needs no second confirmation
	})
	return confirmed, unconfirmed
}

// incidentsOfPastXIDs returns findings of the XIDs before the agent's start that only DCGM's checks still show. DCGM keeps
// such an incident until its engine restarts, so the fault may be cured: the device is at most Degraded.
func incidentsOfPastXIDs(c Config, s Sample) []Finding {
	var all []Finding
	for _, i := range s.Incidents {
		if i.Severity != SeverityFail || !i.ofXID() || c.Incidents.overrides(i.Code) {
			continue
		}
		info := LookupIncident(i.Code)
		all = append(all, Finding{
			Cause: incidentCause(info), State: Degraded, Reason: i.Message + " (before the agent's start, without a reset since)",
			Action: info.Action, Since: s.At, Last: s.At, Clears: ClearsGPUReset,
		})
	}
	return all
}

const incidentNamePrefix = "DCGM_FR_"

// IncidentCode parses a name, with or without its prefix and in any case, or a number. Numbers outside the table are valid,
// because DCGM may be newer than the table.
func IncidentCode(name string) (code int, ok bool) {
	name = strings.ToUpper(strings.TrimSpace(name))
	full := incidentNamePrefix + strings.TrimPrefix(name, incidentNamePrefix)
	code = slices.IndexFunc(incidentRows(), func(r incidentRow) bool { return r.Name == full })
	if n, err := strconv.ParseUint(name, 10, 31); err == nil {
		code = int(n)
	}
	return code, code > 0 // 0 is DCGM_FR_OK
}
