package formerhealth

import "fmt"

// The causes that are neither XIDs nor DCGM's incidents. They are label values: do not change them.
const (
	CauseLost           = "lost"
	CauseInaccessible   = "inaccessible"
	CauseDetached       = "detached"
	CauseMissing        = "missing"
	CauseRecoveryAction = "recovery-action"
	CauseRemapFailed    = "row-remap-failed"
	CauseRemapPending   = "row-remap-pending"
	CauseUnrepairable   = "memory-unrepairable"
	CauseDBE            = "double-bit-ecc"
	CauseRetiredPending = "page-retirement-pending"
	CauseRetiredPages   = "too-many-retired-pages"
	CauseTemperature    = "temperature"
	CauseClocks         = "clocks-slowed-by-hardware"
	CauseNotMeasured    = "not-measured"
	CauseFlapping       = "flapping"
	CauseCordoned       = "cordoned"
	CauseIsolated       = "isolated"
	CauseReleased       = "driver-released"
)

// conditionFindings returns the findings that follow from the sample's presence and values.
func conditionFindings(c Config, s Sample) []Finding {
	var all []Finding
	if f, bad := presenceFinding(s); bad {
		all = append(all, f)
	}
	if s.Stale {
		all = append(all, Finding{
			Cause: CauseNotMeasured, State: Degraded, Reason: "the source measures other GPUs but has no current value of this one",
			Action: ActionCheckDCGM, Since: s.At, Last: s.At, Clears: ClearsItself,
		})
	}
	for _, cond := range conditions {
		v, ok := cond.values(s)
		if !ok {
			continue
		}
		reason := cond.reason(c, v)
		if reason == "" {
			continue
		}
		f := Finding{Cause: cond.cause, State: cond.state, Reason: reason, Action: cond.action, Since: s.At, Last: s.At, Clears: ClearsItself}
		if cond.cause == CauseRecoveryAction {
			r := recoveryOf(RecoveryAction(v[0]))
			f.State, f.Action = r.state, r.action
		}
		all = append(all, f)
	}
	return all
}

// presenceFinding returns the finding of a device that the driver cannot reach, and false for any other device.
func presenceFinding(s Sample) (Finding, bool) {
	f := Finding{State: Unhealthy, Since: s.At, Last: s.At, Clears: ClearsItself}
	switch s.Presence {
	case Lost:
		f.Cause, f.Reason, f.Action = CauseLost, "the driver can no longer reach the GPU", ActionRebootNode
	case Inaccessible:
		f.Cause, f.Reason, f.Action = CauseInaccessible, "the GPU is hidden from the agent", ActionCheckDeviceAccess
	case Detached:
		f.Cause, f.Reason, f.Action = CauseDetached, "the driver is detached from the GPU", ActionBindDriver
	case Missing:
		f.Cause, f.Reason, f.Action = CauseMissing, "the GPU disappeared from the driver's inventory", ActionRebootNode
	case PresenceUnknown, Present:
		return Finding{}, false
	}
	return f, true
}

// condition describes a finding that follows from measured values and lasts as long as they show it.
type condition struct {
	cause  string
	state  State
	action Action
	fields []Field // if a sample lacks one of them, the condition is unknown
	// reason describes the condition from the fields' values, in the order of fields; "" if the condition does not hold.
	reason func(c Config, v []float64) string
}

// conditions lists every condition.
//
//nolint:gochecknoglobals // a table of constants
var conditions = []condition{
	// Its state and action are in the table recoveries.
	{CauseRecoveryAction, Unhealthy, ActionNone, []Field{FieldRecoveryAction}, func(_ Config, v []float64) string {
		return recoveryOf(RecoveryAction(v[0])).reason
	}},
	// DCGM 4.6 health, system memory: ROW_REMAP_FAILURE is FAIL, the suggestion is to replace the GPU.
	{CauseRemapFailed, Unhealthy, ActionReplaceGPU, []Field{FieldRemapFailed}, ifSet("a faulty memory row could not be remapped")},
	// DCGM 4.6 health, system memory: FAULTY_MEMORY is FAIL, severity ISOLATE.
	{CauseUnrepairable, Unhealthy, ActionReplaceGPU, []Field{FieldUnrepairable}, ifSet("the GPU's memory cannot be repaired")},
	// DCGM 4.6 health, system memory: VOLATILE_DBE_DETECTED is FAIL, severity ISOLATE, for any count. A
	// reset or a driver reload clears the count.
	{CauseDBE, Unhealthy, ActionResetGPU, []Field{FieldDBEVolatile}, func(_ Config, v []float64) string {
		return textIf(v[0] > 0, "%.0f double-bit ECC errors since the last reset", v[0])
	}},
	// DCGM 4.6 health, system memory: RETIRED_PAGES_LIMIT is FAIL from 63 pages on.
	{CauseRetiredPages, Unhealthy, ActionReplaceGPU, []Field{FieldRetiredSBE, FieldRetiredDBE}, func(_ Config, v []float64) string {
		return textIf(v[0]+v[1] >= 63, "%.0f memory pages are retired, the limit is 63", v[0]+v[1])
	}},
	// A remapped row or retired page takes effect with the next reset; until then the memory works (NVIDIA
	// GPU memory error management; dynamic page retirement).
	{CauseRemapPending, Degraded, ActionResetGPUAtDrain, []Field{FieldRemapPending}, ifSet("a memory row is pending a remap")},
	{CauseRetiredPending, Degraded, ActionResetGPUAtDrain, []Field{FieldRetiredPending}, ifSet("a memory page is pending retirement")},
	{CauseTemperature, Degraded, ActionCheckCooling, []Field{FieldGPUTemp}, func(c Config, v []float64) string {
		return textIf(v[0] >= c.Temperature, "the GPU is at %.0f °C, the limit is %.0f °C", v[0], c.Temperature)
	}},
	// nvml.h, nvmlClocksEventReasons: hardware slowdown 0x8, hardware thermal slowdown 0x40, power brake
	// 0x80. The software power cap, 0x4, is normal for a GPU at full load.
	{CauseClocks, Degraded, ActionCheckCooling, []Field{FieldClocksEvents}, func(_ Config, v []float64) string {
		return textIf(uint64(v[0])&(0x8|0x40|0x80) != 0, "the hardware slows the clocks down (event bits %#x)", uint64(v[0]))
	}},
}

// conditionOf returns the condition with that cause, nil if there is none.
func conditionOf(cause string) *condition {
	for i := range conditions {
		if conditions[i].cause == cause {
			return &conditions[i]
		}
	}
	return nil
}

// ifSet returns the reason function of a field that is 0 or 1.
func ifSet(reason string) func(Config, []float64) string {
	return func(_ Config, v []float64) string { return textIf(v[0] != 0, "%s", reason) }
}

func textIf(bad bool, format string, args ...any) string {
	if !bad {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

// values returns the values of the condition's fields, and false if the sample lacks one.
func (c *condition) values(s Sample) ([]float64, bool) {
	vs := make([]float64, len(c.fields))
	for i, f := range c.fields {
		v, ok := s.Values[f]
		if !ok {
			return nil, false
		}
		vs[i] = v
	}
	return vs, true
}

// JudgedFields returns the fields that verdicts depend on. A source must measure them at every poll.
func JudgedFields() []Field {
	var all []Field
	for _, c := range conditions {
		all = append(all, c.fields...)
	}
	return all
}
