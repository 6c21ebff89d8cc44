package catalog

import (
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// IncidentInfo describes a code of DCGM's health checks.
type IncidentInfo struct {
	Code   int
	Name   string // "DCGM_FR_NVLINK_DOWN"
	Effect Effect // of a FAIL; a WARN has at most EffectWarn
	Action health.Action
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
			Code: code, Name: incidentNamePrefix + cells["name"], Effect: effectNamed(cells["effect"]), Action: health.Action(cells["action"]),
			System: cells["system"],
		}
		rows = append(rows, incidentRow{info, cells["only"], cells["repeats"] == "xid"})
	}
	return rows
})

// RepeatsXID reports whether an incident only repeats an XID. DCGM reports some XIDs with codes of their own, and others, such as
// 63 and 64, with the code of a check: "Row remap failure (triggered by XID 64: …)". It keeps all of them until its engine
// restarts (../dcgm/OBSERVED.md#xid-incidents), and the agent judges the XIDs themselves.
func RepeatsXID(i health.Incident) bool {
	return lookupIncident(i.Code).repeatsXID || triggeredByXID(i)
}

func triggeredByXID(i health.Incident) bool { return strings.Contains(i.Message, "triggered by XID") }

// appliesTo reports whether the incident can concern the device.
func (r incidentRow) appliesTo(d health.Device, i health.Incident) bool {
	if r.only == "" {
		return true
	}
	// Unconnected links are down too. DCGM itself checks no links in MIG mode.
	connected := slices.ContainsFunc(d.Links, func(l health.Link) bool { return l.NVLinks > 0 })
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
		Code: code, Name: "DCGM code " + strconv.Itoa(code), Effect: EffectWarn, Action: health.ActionWatch,
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
func (c IncidentConfig) Effect(d health.Device, i health.Incident) Effect {
	is := names(i.Code)
	r := lookupIncident(i.Code)
	effect := r.Effect
	switch {
	case triggeredByXID(i):
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
	if i.Severity != health.SeverityFail {
		effect = min(effect, EffectWarn)
	}
	return effect
}

// Overrides reports whether a code is in one of the lists.
func (c IncidentConfig) Overrides(code int) bool {
	return slices.ContainsFunc(slices.Concat(c.Unhealthy, c.Warn, c.Ignore), names(code))
}

// OfEveryGPU returns the incidents without a device that the configuration names. They count for every GPU. Any other incident without a
// device counts for none.
func (c IncidentConfig) OfEveryGPU(incidents []health.Incident) (named []health.Incident) {
	for _, i := range incidents {
		if c.Overrides(i.Code) {
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

// Cause returns the cause of findings of the code, DCGM's name in the style of the other causes: "dcgm-nvlink-down".
func (i IncidentInfo) Cause() string {
	name, known := strings.CutPrefix(i.Name, incidentNamePrefix)
	if !known {
		name = strconv.Itoa(i.Code)
	}
	return health.IncidentCausePrefix + strings.ToLower(strings.ReplaceAll(name, "_", "-"))
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

// ValidCause reports whether a finding can have the cause. Every XID and every code of DCGM has one.
func ValidCause(cause string) bool {
	if _, ok := health.XIDOfCause(cause); ok {
		return true
	}
	if name, ok := strings.CutPrefix(cause, health.IncidentCausePrefix); ok {
		code, ok := IncidentCode(strings.ReplaceAll(name, "-", "_"))
		return ok && LookupIncident(code).Cause() == cause
	}
	return slices.Contains(health.Causes(), cause)
}
