package health

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// IncidentInfo is what is known of one code of DCGM's health checks.
type IncidentInfo struct {
	Code   int
	Name   string // "DCGM_FR_NVLINK_DOWN"
	Effect Effect // of a FAIL; a WARN warns at most
	Action Action // what an operator should do
	Source string // who says so
}

// incidentRule is a row of the table.
type incidentRule struct {
	effect Effect
	action Action
	source string
	// weigh lowers the effect for a device that the incident cannot mean, or by what the message tells;
	// nil if nothing does.
	weigh func(d Device, i Incident) Effect
}

// Where the rows are from, and why some are ignored.
const (
	incidentFail    = "DCGM 4.6 health: FAIL"
	incidentWarn    = "DCGM 4.6 health: never more than WARN"
	incidentSticky  = "our choice: DCGM keeps it until its engine restarts; XIDs are judged by themselves"
	incidentDriver  = "our choice: field 1523, the recovery action, is judged by itself"
	incidentClocks  = "our choice: GPUs at full load do that; temperature and clock events are judged by themselves"
	incidentUnknown = "not in the table"
)

// incidentRules are the codes that we have a word on, by name. DCGM 4.6's health checks give them with the
// severity that the source names. What is not here warns, whatever its severity; most of those come from
// dcgmi diag only.
//
// DCGM's MONITOR, TRIAGE, RESET and ISOLATE are its advice in dcgm_errors.c.
//
//nolint:gochecknoglobals // a table of constants
var incidentRules = map[string]incidentRule{
	"PCI_REPLAY_RATE":          {EffectWarn, ActionCheckPCIe, incidentWarn, nil},
	"VOLATILE_DBE_DETECTED":    {EffectUnhealthy, ActionResetGPU, incidentFail + ", ISOLATE", nil},
	"PENDING_PAGE_RETIREMENTS": {EffectWarn, ActionResetGPUAtDrain, incidentWarn, nil},
	"RETIRED_PAGES_LIMIT":      {EffectUnhealthy, ActionReplaceGPU, incidentFail, nil},
	"RETIRED_PAGES_DBE_LIMIT":  {EffectUnhealthy, ActionReplaceGPU, incidentFail, nil},
	"CORRUPT_INFOROM":          {EffectWarn, ActionContactSupport, incidentWarn, nil},
	"CLOCKS_EVENT_THERMAL":     {EffectIgnore, ActionCheckCooling, incidentClocks, nil},
	// On every GPU at once it is the only sign that DCGM is blind: after an XID 119 in the kernel's log the
	// engine calls the driver no more.
	"POWER_UNREADABLE":           {EffectWarn, ActionCheckDCGM, incidentWarn, nil},
	"CLOCKS_EVENT_POWER":         {EffectIgnore, ActionCheckCooling, incidentClocks, nil},
	"NVLINK_ERROR_THRESHOLD":     {EffectWarn, ActionWatchNVLink, incidentWarn, nil},
	"NVLINK_DOWN":                {EffectUnhealthy, ActionCheckNVLink, incidentFail + "; false on cards without NVLink, as users of NVSentinel report", onlyNVLink},
	"FAULTY_MEMORY":              {EffectUnhealthy, ActionReplaceGPU, incidentFail + ", ISOLATE", nil},
	"NVLINK_CRC_ERROR_THRESHOLD": {EffectUnhealthy, ActionCheckNVLink, incidentFail, nil},
	"NVLINK_ERROR_CRITICAL":      {EffectUnhealthy, ActionCheckNVLink, incidentFail + ", ISOLATE; AWS eks-node-monitoring-agent: what was counted long ago warns", newNVLinkErrors},
	"ROW_REMAP_FAILURE":          {EffectUnhealthy, ActionReplaceGPU, incidentFail, nil},
	"UNCONTAINED_ERROR":          {EffectIgnore, ActionResetGPU, incidentSticky, nil}, // XID 95
	"XID_ERROR":                  {EffectIgnore, ActionWatch, incidentSticky, nil},    // any other XID, application errors too
	// The thresholds are DCGM's own and disputed.
	"NVLINK_EFFECTIVE_BER_THRESHOLD": {EffectWarn, ActionCheckNVLink, "our choice: the thresholds are DCGM's own and disputed; DCGM 4.6 health: FAIL", nil},
	"FALLEN_OFF_BUS":                 {EffectIgnore, ActionRebootNode, incidentSticky, nil}, // XID 79
	"NVLINK_SYMBOL_BER_THRESHOLD":    {EffectWarn, ActionCheckNVLink, "our choice: the thresholds are DCGM's own and disputed; DCGM 4.6 health: FAIL", nil},
	"IMEX_UNHEALTHY":                 {EffectIgnore, ActionRecoverIMEX, "our choice: false on nodes without IMEX, as users of NVSentinel report", nil},
	"FABRIC_PROBE_STATE":             {EffectWarn, ActionCheckFabricManager, "DCGM 4.6 health: FAIL, MONITOR; AWS eks-node-monitoring-agent: a warning", onlyFabric},
	"GPU_RECOVERY_RESET":             {EffectIgnore, ActionResetGPU, incidentDriver, nil},
	"GPU_RECOVERY_REBOOT":            {EffectIgnore, ActionRebootNode, incidentDriver, nil},
	"GPU_RECOVERY_DRAIN_P2P":         {EffectIgnore, ActionResetGPU, incidentDriver, nil},
	"GPU_RECOVERY_DRAIN_RESET":       {EffectIgnore, ActionResetGPU, incidentDriver, nil},
	"CONTAINED_ERROR":                {EffectIgnore, ActionWatch, incidentSticky, nil}, // XID 94
	"UNCORRECTABLE_ROW_REMAP_LIMIT":  {EffectWarn, ActionPlanReplacement, incidentWarn, nil},
}

// ofXID tells whether an incident is no more than DCGM's word for an XID: it files some as incidents of their own, and others,
// such as 63 and 64, under a check of its own, "Row remap failure (triggered by XID 64: …)". It takes none of them back while
// its engine lives (dcgm/OBSERVED.md#xid-incidents), and XIDs are judged by themselves.
func (i Incident) ofXID() bool {
	return ruleOf(i.Code).source == incidentSticky || i.triggeredByXID()
}

func (i Incident) triggeredByXID() bool { return strings.Contains(i.Message, "triggered by XID") }

// onlyNVLink: links that nothing is plugged into are down too, so a GPU counts only if it reaches another
// one over NVLink. DCGM itself looks at no links under MIG.
func onlyNVLink(d Device, _ Incident) Effect {
	if slices.ContainsFunc(d.Links, func(l Link) bool { return l.NVLinks > 0 }) {
		return EffectUnhealthy
	}
	return EffectIgnore
}

// onlyFabric: a driver that is too old to be asked for the state of the fabric says nothing about the GPU.
func onlyFabric(d Device, i Incident) Effect {
	if strings.Contains(i.Message, "NvmlTooOld") {
		return EffectIgnore
	}
	return onlyNVLink(d, i)
}

// newNVLinkErrors: before Blackwell, DCGM calls a FAIL also what was counted since the driver was loaded, and
// one error of a month ago is one for ever. Its messages name those counters "datalink layer".
func newNVLinkErrors(_ Device, i Incident) Effect {
	if strings.Contains(i.Message, "datalink layer") {
		return EffectWarn
	}
	return EffectUnhealthy
}

// LookupIncident returns what is known of a code. One that is not in the table is a warning.
func LookupIncident(code int) IncidentInfo {
	r := ruleOf(code)
	return IncidentInfo{Code: code, Name: incidentName(code), Effect: r.effect, Action: r.action, Source: r.source}
}

func ruleOf(code int) incidentRule {
	r, ok := incidentRules[strings.TrimPrefix(incidentName(code), incidentNamePrefix)]
	if !ok {
		return incidentRule{effect: EffectWarn, action: ActionWatch, source: incidentUnknown}
	}
	return r
}

// IncidentConfig is the `health.incidents` section: overrides of what a FAIL of DCGM's health checks does,
// by name, such as DCGM_FR_NVLINK_DOWN, or number.
type IncidentConfig struct {
	Unhealthy []string `yaml:"unhealthy"`
	Warn      []string `yaml:"warn"`
	Ignore    []string `yaml:"ignore"`
}

// DefaultIncidentConfig returns the section as it is when config.yaml says nothing.
func DefaultIncidentConfig() IncidentConfig {
	return IncidentConfig{Unhealthy: []string{}, Warn: []string{}, Ignore: []string{}}
}

// Validate returns every fault, each with its key below health.incidents.
func (c IncidentConfig) Validate() error {
	var errs []error
	lists := []effectList[int]{{effect: EffectUnhealthy}, {effect: EffectWarn}, {effect: EffectIgnore}}
	for i, words := range [][]string{c.Unhealthy, c.Warn, c.Ignore} {
		for _, word := range words {
			code, ok := IncidentCode(word)
			if !ok {
				errs = append(errs, fmt.Errorf("%v: %q is no incident of DCGM's; use a name such as DCGM_FR_NVLINK_DOWN or its number",
					lists[i].effect, word))
				continue
			}
			lists[i].of = append(lists[i].of, code)
		}
	}
	for _, t := range twice(lists) {
		errs = append(errs, fmt.Errorf("%v: %s is in %v too; an incident has one effect", t.effect, incidentName(t.what), t.also))
	}
	return errors.Join(errs...)
}

// Effect returns what an incident does to the device that it is of. An override is the last word, but a
// WARN never makes a device Unhealthy.
func (c IncidentConfig) Effect(d Device, i Incident) Effect {
	is := named(i.Code)
	r := ruleOf(i.Code)
	effect := r.effect
	switch {
	case i.triggeredByXID():
		return EffectIgnore // an override is of the check, not of the XID, and the incident would stand for ever
	case slices.ContainsFunc(c.Unhealthy, is):
		effect = EffectUnhealthy
	case slices.ContainsFunc(c.Warn, is):
		effect = EffectWarn
	case slices.ContainsFunc(c.Ignore, is):
		effect = EffectIgnore
	case r.weigh != nil:
		effect = min(effect, r.weigh(d, i))
	}
	if i.Severity != SeverityFail {
		effect = min(effect, EffectWarn)
	}
	return effect
}

// overrides reports whether a code is in one of the lists.
func (c IncidentConfig) overrides(code int) bool {
	return slices.ContainsFunc(slices.Concat(c.Unhealthy, c.Warn, c.Ignore), named(code))
}

// named returns what reports whether a word of the lists means a code.
func named(code int) func(word string) bool {
	return func(word string) bool {
		got, ok := IncidentCode(word)
		return ok && got == code
	}
}

const incidentNamePrefix = "DCGM_FR_"

// incidentName returns DCGM's name of a code.
func incidentName(code int) string {
	if code >= 0 && code < len(incidentNames) {
		return incidentNamePrefix + incidentNames[code]
	}
	return "DCGM code " + strconv.Itoa(code)
}

// IncidentCode reads a name, with or without its prefix and in any case, or a number. Numbers that are not
// in the table are fine: DCGM may be newer than the table.
func IncidentCode(word string) (code int, ok bool) {
	word = strings.ToUpper(strings.TrimSpace(word))
	code = slices.Index(incidentNames[:], strings.TrimPrefix(word, incidentNamePrefix))
	if code < 0 {
		n, err := strconv.ParseUint(word, 10, 31)
		if err != nil {
			return 0, false
		}
		code = int(n)
	}
	return code, code > 0 // 0 is DCGM_FR_OK
}

// incidentNames are the names of dcgm_errors.h, by number, without their prefix.
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
	"UNCORRECTABLE_ROW_REMAP_LIMIT",
}
