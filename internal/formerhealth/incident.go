package formerhealth

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// IncidentInfo describes a code of DCGM's health checks.
type IncidentInfo struct {
	Code   int
	Name   string // "DCGM_FR_NVLINK_DOWN"
	Effect Effect // of a FAIL; a WARN has at most EffectWarn
	Action Action
	Source string // DCGM's severity

	// DiffersFrom names the programs with another effect or action, and Deviation the reason; both are empty if there is none.
	DiffersFrom, Deviation string
}

// incidentRule is a row of the table.
type incidentRule struct {
	effect                 Effect
	action                 Action
	source                 string
	differsFrom, deviation string
	// limit lowers the effect for a device that the incident cannot apply to, or depending on its message; nil if nothing does.
	limit func(d Device, i Incident) Effect
}

// The sources of the rows, and why rows differ from DCGM.
const (
	incidentFail    = "DCGM 4.6 health: FAIL"
	incidentWarn    = "DCGM 4.6 health: never more than WARN"
	incidentUnknown = "not in the table"

	incidentSticky = "DCGM keeps it until its engine restarts; the agent judges the XID itself"
	incidentDriver = "the agent judges field 1523, the recovery action, itself"
	incidentClocks = "normal at full load; the agent judges temperature and clock events itself"
	incidentRates  = "the thresholds are DCGM's own and disputed"
)

// incidentRules are the rules for the codes of DCGM 4.6's health checks, by name. The source states the severity with which
// DCGM reports a code. Any other code warns, at any severity; most others come from dcgmi diag only. TestIncidentDeviations
// compares the rows with other programs.
//
// MONITOR, TRIAGE, RESET and ISOLATE are DCGM's advice in dcgm_errors.c.
//
//nolint:gochecknoglobals // a table of constants
var incidentRules = map[string]incidentRule{
	"PCI_REPLAY_RATE":          {EffectWarn, ActionCheckPCIe, incidentWarn, "", "", nil},
	"VOLATILE_DBE_DETECTED":    {EffectUnhealthy, ActionResetGPU, incidentFail + ", ISOLATE", "", "", nil},
	"PENDING_PAGE_RETIREMENTS": {EffectWarn, ActionResetGPUAtDrain, incidentWarn, "", "", nil},
	"RETIRED_PAGES_LIMIT":      {EffectUnhealthy, ActionReplaceGPU, incidentFail, "", "", nil},
	"RETIRED_PAGES_DBE_LIMIT":  {EffectUnhealthy, ActionReplaceGPU, incidentFail, "", "", nil},
	"CORRUPT_INFOROM":          {EffectWarn, ActionContactSupport, incidentWarn, "", "", nil},
	"CLOCKS_EVENT_THERMAL":     {EffectIgnore, ActionCheckCooling, incidentWarn, "DCGM", incidentClocks, nil},
	// On every GPU at once it is the only sign that DCGM measures nothing: after an XID 119 in the kernel log the engine no
	// longer calls the driver.
	"POWER_UNREADABLE":       {EffectWarn, ActionCheckDCGM, incidentWarn, "", "", nil},
	"CLOCKS_EVENT_POWER":     {EffectIgnore, ActionCheckCooling, incidentWarn, "DCGM", incidentClocks, nil},
	"NVLINK_ERROR_THRESHOLD": {EffectWarn, ActionWatchNVLink, incidentWarn, "", "", nil},
	"NVLINK_DOWN": {
		EffectUnhealthy, ActionCheckNVLink, incidentFail, "DCGM",
		"ignored on a GPU without NVLink to another GPU, as in MIG mode, where it is a false alarm (users of NVSentinel)", onlyNVLink,
	},
	"FAULTY_MEMORY":              {EffectUnhealthy, ActionReplaceGPU, incidentFail + ", ISOLATE", "", "", nil},
	"NVLINK_CRC_ERROR_THRESHOLD": {EffectUnhealthy, ActionCheckNVLink, incidentFail, "", "", nil},
	"NVLINK_ERROR_CRITICAL": {
		EffectWarn, ActionWatchNVLink, incidentFail + ", ISOLATE", "DCGM",
		"it counts replays and recoveries, which a link survives, on some GPUs since the driver was loaded, and NVSentinel takes no " +
			"action; a link that fails raises XID 74, one of 144 to 150, or DCGM_FR_NVLINK_DOWN",
		nil,
	},
	"ROW_REMAP_FAILURE": {
		EffectUnhealthy, ActionReplaceGPU, incidentFail, "NVSentinel",
		"NVSentinel resets the GPU; a reset does not repair a memory row that could not be remapped", nil,
	},
	"UNCONTAINED_ERROR": {EffectIgnore, ActionResetGPU, incidentFail, "DCGM", incidentSticky, nil}, // XID 95
	// any other XID, application errors too
	"XID_ERROR":                      {EffectIgnore, ActionWatch, incidentFail, "DCGM", incidentSticky, nil},
	"NVLINK_EFFECTIVE_BER_THRESHOLD": {EffectWarn, ActionCheckNVLink, incidentFail, "DCGM", incidentRates, nil},
	"FALLEN_OFF_BUS":                 {EffectIgnore, ActionRebootNode, incidentFail, "DCGM", incidentSticky, nil}, // XID 79
	"NVLINK_SYMBOL_BER_THRESHOLD":    {EffectWarn, ActionCheckNVLink, incidentFail, "DCGM", incidentRates, nil},
	"IMEX_UNHEALTHY": {
		EffectIgnore, ActionRecoverIMEX, incidentFail + ", ISOLATE", "DCGM, NVSentinel",
		"it names no GPU, and is a false alarm on nodes without IMEX (users of NVSentinel); only the nodes' administrators can recover IMEX", nil,
	},
	"FABRIC_PROBE_STATE": {
		EffectWarn, ActionCheckFabricManager, incidentFail + ", MONITOR", "DCGM",
		"DCGM's advice is to monitor it, and AWS eks-node-monitoring-agent warns; ignored on a GPU without NVLink and with an old driver",
		onlyFabric,
	},
	"GPU_RECOVERY_RESET":       {EffectIgnore, ActionResetGPU, incidentFail, "DCGM", incidentDriver, nil},
	"GPU_RECOVERY_REBOOT":      {EffectIgnore, ActionRebootNode, incidentFail, "DCGM", incidentDriver, nil},
	"GPU_RECOVERY_DRAIN_P2P":   {EffectIgnore, ActionDrainP2P, incidentWarn, "DCGM", incidentDriver, nil},
	"GPU_RECOVERY_DRAIN_RESET": {EffectIgnore, ActionResetGPU, incidentFail, "DCGM", incidentDriver, nil},
	"CONTAINED_ERROR":          {EffectIgnore, ActionWatch, incidentWarn, "DCGM", incidentSticky, nil}, // XID 94
	"UNCORRECTABLE_ROW_REMAP_LIMIT": {
		EffectWarn, ActionPlanReplacement, incidentWarn, "NVSentinel",
		"NVSentinel asks to contact support; the remapped rows work, so the replacement can be planned", nil,
	},
}

// ofXID reports whether the incident only repeats an XID. DCGM reports some XIDs with codes of their own, and others, such as
// 63 and 64, with the code of a check: "Row remap failure (triggered by XID 64: …)". It keeps all of them until its engine
// restarts (dcgm/OBSERVED.md#xid-incidents), and the agent judges the XIDs themselves.
func (i Incident) ofXID() bool {
	return ruleOf(i.Code).deviation == incidentSticky || i.triggeredByXID()
}

func (i Incident) triggeredByXID() bool { return strings.Contains(i.Message, "triggered by XID") }

// onlyNVLink ignores the incident on a GPU that reaches no other GPU over NVLink, because unconnected links are down too.
// DCGM itself checks no links in MIG mode.
func onlyNVLink(d Device, _ Incident) Effect {
	if slices.ContainsFunc(d.Links, func(l Link) bool { return l.NVLinks > 0 }) {
		return EffectUnhealthy
	}
	return EffectIgnore
}

// onlyFabric ignores the incident if the driver is too old to know the state of the fabric.
func onlyFabric(d Device, i Incident) Effect {
	if strings.Contains(i.Message, "NvmlTooOld") {
		return EffectIgnore
	}
	return onlyNVLink(d, i)
}

// LookupIncident returns the description of a code. A code that is not in the table is a warning.
func LookupIncident(code int) IncidentInfo {
	r := ruleOf(code)
	return IncidentInfo{
		Code: code, Name: incidentName(code), Effect: r.effect, Action: r.action, Source: r.source,
		DiffersFrom: r.differsFrom, Deviation: r.deviation,
	}
}

func ruleOf(code int) incidentRule {
	r, ok := incidentRules[strings.TrimPrefix(incidentName(code), incidentNamePrefix)]
	if !ok {
		return incidentRule{effect: EffectWarn, action: ActionWatch, source: incidentUnknown}
	}
	return r
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
	return errors.Join(append(errs, overlaps(lists, incidentName)...)...)
}

// Effect returns the effect of an incident on its device. Overrides take precedence, but a WARN never makes a device
// Unhealthy.
func (c IncidentConfig) Effect(d Device, i Incident) Effect {
	is := names(i.Code)
	r := ruleOf(i.Code)
	effect := r.effect
	switch {
	case i.triggeredByXID():
		return EffectIgnore // an override means the check, not the XID, and this incident would never clear
	case slices.ContainsFunc(c.Unhealthy, is):
		effect = EffectUnhealthy
	case slices.ContainsFunc(c.Warn, is):
		effect = EffectWarn
	case slices.ContainsFunc(c.Ignore, is):
		effect = EffectIgnore
	case r.limit != nil:
		effect = min(effect, r.limit(d, i))
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
func confirm(c Config, d Device, old Verdict, s Sample) ([]Finding, map[string]confirmation) {
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

// incidentName returns DCGM's name of a code.
func incidentName(code int) string {
	if code >= 0 && code < len(incidentNames) {
		return incidentNamePrefix + incidentNames[code]
	}
	return "DCGM code " + strconv.Itoa(code)
}

// IncidentCode parses a name, with or without its prefix and in any case, or a number. Numbers outside the table are valid,
// because DCGM may be newer than the table.
func IncidentCode(name string) (code int, ok bool) {
	name = strings.ToUpper(strings.TrimSpace(name))
	code = slices.Index(incidentNames[:], strings.TrimPrefix(name, incidentNamePrefix))
	if code < 0 {
		n, err := strconv.ParseUint(name, 10, 31)
		if err != nil {
			return 0, false
		}
		code = int(n)
	}
	return code, code > 0 // 0 is DCGM_FR_OK
}

// incidentNames are the names in dcgm_errors.h, by number, without their prefix.
//
//nolint:gochecknoglobals // a table of constants
var incidentNames = [...]string{
	"OK", "UNKNOWN", "UNRECOGNIZED", "PCI_REPLAY_RATE", "VOLATILE_DBE_DETECTED", "VOLATILE_SBE_DETECTED",
	"PENDING_PAGE_RETIREMENTS", "RETIRED_PAGES_LIMIT", "RETIRED_PAGES_DBE_LIMIT", "CORRUPT_INFOROM",
	"CLOCKS_EVENT_THERMAL", "POWER_UNREADABLE", "CLOCKS_EVENT_POWER", "NVLINK_ERROR_THRESHOLD", "NVLINK_DOWN",
	"NVSWITCH_FATAL_ERROR", "NVSWITCH_NON_FATAL_ERROR", "NVSWITCH_DOWN", "NO_ACCESS_TO_FILE", "NVML_API",
	"DEVICE_COUNT_MISMATCH", "BAD_PARAMETER", "CANNOT_OPEN_LIB", "DENYLISTED_DRIVER", "NVML_LIB_BAD",
	"GRAPHICS_PROCESSES", "HOSTENGINE_CONN", "FIELD_QUERY", "BAD_CUDA_ENV", "PERSISTENCE_MODE", "LOW_BANDWIDTH",
	"HIGH_LATENCY", "CANNOT_GET_FIELD_TAG", "FIELD_VIOLATION", "FIELD_THRESHOLD", "FIELD_VIOLATION_DBL",
	"FIELD_THRESHOLD_DBL", "UNSUPPORTED_FIELD_TYPE", "FIELD_THRESHOLD_TS", "FIELD_THRESHOLD_TS_DBL",
	"THERMAL_VIOLATIONS", "THERMAL_VIOLATIONS_TS", "TEMP_VIOLATION", "CLOCKS_EVENT_VIOLATION", "INTERNAL",
	"PCIE_GENERATION", "PCIE_WIDTH", "ABORTED", "TEST_DISABLED", "CANNOT_GET_STAT", "STRESS_LEVEL", "CUDA_API",
	"FAULTY_MEMORY", "CANNOT_SET_WATCHES", "CUDA_UNBOUND", "ECC_DISABLED", "MEMORY_ALLOC", "CUDA_DBE",
	"MEMORY_MISMATCH", "CUDA_DEVICE", "ECC_UNSUPPORTED", "ECC_PENDING", "MEMORY_BANDWIDTH", "TARGET_POWER",
	"API_FAIL", "API_FAIL_GPU", "CUDA_CONTEXT", "DCGM_API", "CONCURRENT_GPUS", "TOO_MANY_ERRORS",
	"NVLINK_CRC_ERROR_THRESHOLD", "NVLINK_ERROR_CRITICAL", "ENFORCED_POWER_LIMIT", "MEMORY_ALLOC_HOST",
	"GPU_OP_MODE", "NO_MEMORY_CLOCKS", "NO_GRAPHICS_CLOCKS", "HAD_TO_RESTORE_STATE", "L1TAG_UNSUPPORTED",
	"L1TAG_MISCOMPARE", "ROW_REMAP_FAILURE", "UNCONTAINED_ERROR", "EMPTY_GPU_LIST",
	"DBE_PENDING_PAGE_RETIREMENTS", "UNCORRECTABLE_ROW_REMAP", "PENDING_ROW_REMAP", "BROKEN_P2P_MEMORY_DEVICE",
	"BROKEN_P2P_WRITER_DEVICE", "NVSWITCH_NVLINK_DOWN", "EUD_BINARY_PERMISSIONS", "EUD_NON_ROOT_USER",
	"EUD_SPAWN_FAILURE", "EUD_TIMEOUT", "EUD_ZOMBIE", "EUD_NON_ZERO_EXIT_CODE", "EUD_TEST_FAILED",
	"FILE_CREATE_PERMISSIONS", "PAUSE_RESUME_FAILED", "PCIE_H_REPLAY_VIOLATION", "GPU_EXPECTED_NVLINKS_UP",
	"NVSWITCH_EXPECTED_NVLINKS_UP", "XID_ERROR", "SBE_VIOLATION", "DBE_VIOLATION", "PCIE_REPLAY_VIOLATION",
	"SBE_THRESHOLD_VIOLATION", "DBE_THRESHOLD_VIOLATION", "PCIE_REPLAY_THRESHOLD_VIOLATION",
	"CUDA_FM_NOT_INITIALIZED", "SXID_ERROR", "GFLOPS_THRESHOLD_VIOLATION", "NAN_VALUE",
	"FABRIC_MANAGER_TRAINING_ERROR", "BROKEN_P2P_PCIE_MEMORY_DEVICE", "BROKEN_P2P_PCIE_WRITER_DEVICE",
	"BROKEN_P2P_NVLINK_MEMORY_DEVICE", "BROKEN_P2P_NVLINK_WRITER_DEVICE", "TEST_SKIPPED", "SRAM_THRESHOLD",
	"NVLINK_EFFECTIVE_BER_THRESHOLD", "FALLEN_OFF_BUS", "NVLINK_SYMBOL_BER_THRESHOLD", "IMEX_UNHEALTHY",
	"FABRIC_PROBE_STATE", "BINARY_PERMISSIONS", "GPU_RECOVERY_RESET", "GPU_RECOVERY_REBOOT",
	"GPU_RECOVERY_DRAIN_P2P", "GPU_RECOVERY_DRAIN_RESET", "NCCL_ERROR", "RETEST_REQUESTED", "CONTAINED_ERROR",
	"UNCORRECTABLE_ROW_REMAP_LIMIT", "CPU_SDC_TEST_FAILED",
}
