package judge

import (
	"fmt"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// conditionFindings returns the findings that follow from the sample's presence and values.
func conditionFindings(c Config, s health.Sample) []health.Finding {
	var all []health.Finding
	if f, bad := presenceFinding(s); bad {
		all = append(all, f)
	}
	if s.Stale {
		all = append(all, health.Finding{
			Cause: health.CauseNotMeasured, State: health.Degraded, Reason: "the source measures other GPUs but has no current value of this one",
			Action: health.ActionCheckDCGM, Since: s.At, Last: s.At, Clears: health.ClearsItself,
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
		f := health.Finding{
			Cause: cond.cause, State: cond.state, Reason: reason, Action: cond.action, Since: s.At, Last: s.At, Clears: health.ClearsItself,
		}
		if cond.cause == health.CauseRecoveryAction {
			r := recoveryOf(health.RecoveryAction(v[0]))
			f.State, f.Action = r.state, r.action
		}
		all = append(all, f)
	}
	return all
}

// presenceFinding returns the finding of a device that the driver cannot reach, and false for any other device.
func presenceFinding(s health.Sample) (health.Finding, bool) {
	f := health.Finding{State: health.Unhealthy, Since: s.At, Last: s.At, Clears: health.ClearsItself}
	switch s.Presence {
	case health.Lost:
		f.Cause, f.Reason, f.Action = health.CauseLost, "the driver can no longer reach the GPU", health.ActionRebootNode
	case health.Inaccessible:
		f.Cause, f.Reason, f.Action = health.CauseInaccessible, "the GPU is hidden from the agent", health.ActionCheckDeviceAccess
	case health.Detached:
		f.Cause, f.Reason, f.Action = health.CauseDetached, "the driver is detached from the GPU", health.ActionBindDriver
	case health.Missing:
		f.Cause, f.Reason, f.Action = health.CauseMissing, "the GPU disappeared from the driver's inventory", health.ActionRebootNode
	case health.PresenceUnknown, health.Present:
		return health.Finding{}, false
	}
	return f, true
}

// condition describes a finding that follows from measured values and lasts as long as they show it.
type condition struct {
	cause  string
	state  health.State
	action health.Action
	fields []health.Field // if a sample lacks one of them, the condition is unknown
	// reason describes the condition from the fields' values, in the order of fields; "" if the condition does not hold.
	reason func(c Config, v []float64) string
}

// conditions lists every condition.
//
//nolint:gochecknoglobals // a table of constants
var conditions = []condition{
	// Its state and action are in the table recoveries.
	{
		health.CauseRecoveryAction, health.Unhealthy, health.ActionNone,
		[]health.Field{health.FieldRecoveryAction},
		func(_ Config, v []float64) string {
			return recoveryOf(health.RecoveryAction(v[0])).reason
		},
	},
	// DCGM 4.6 health, system memory: ROW_REMAP_FAILURE is FAIL, the suggestion is to replace the GPU.
	{
		health.CauseRemapFailed, health.Unhealthy, health.ActionReplaceGPU,
		[]health.Field{health.FieldRemapFailed},
		ifSet("a faulty memory row could not be remapped"),
	},
	// DCGM 4.6 health, system memory: FAULTY_MEMORY is FAIL, severity ISOLATE.
	{
		health.CauseUnrepairable, health.Unhealthy, health.ActionReplaceGPU,
		[]health.Field{health.FieldUnrepairable},
		ifSet("the GPU's memory cannot be repaired"),
	},
	// DCGM 4.6 health, system memory: VOLATILE_DBE_DETECTED is FAIL, severity ISOLATE, for any count. A
	// reset or a driver reload clears the count.
	{health.CauseDBE, health.Unhealthy, health.ActionResetGPU, []health.Field{health.FieldDBEVolatile}, func(_ Config, v []float64) string {
		return textIf(v[0] > 0, "%.0f double-bit ECC errors since the last reset", v[0])
	}},
	// DCGM 4.6 health, system memory: RETIRED_PAGES_LIMIT is FAIL from 63 pages on.
	{
		health.CauseRetiredPages, health.Unhealthy, health.ActionReplaceGPU,
		[]health.Field{health.FieldRetiredSBE, health.FieldRetiredDBE},
		func(_ Config, v []float64) string {
			return textIf(v[0]+v[1] >= 63, "%.0f memory pages are retired, the limit is 63", v[0]+v[1])
		},
	},
	// A remapped row or retired page takes effect with the next reset; until then the memory works (NVIDIA
	// GPU memory error management; dynamic page retirement).
	{
		health.CauseRemapPending, health.Degraded, health.ActionResetGPUAtDrain,
		[]health.Field{health.FieldRemapPending},
		ifSet("a memory row is pending a remap"),
	},
	{
		health.CauseRetiredPending, health.Degraded, health.ActionResetGPUAtDrain,
		[]health.Field{health.FieldRetiredPending},
		ifSet("a memory page is pending retirement"),
	},
	{
		health.CauseTemperature, health.Degraded, health.ActionCheckCooling,
		[]health.Field{health.FieldGPUTemp},
		func(c Config, v []float64) string {
			return textIf(v[0] >= c.Temperature, "the GPU is at %.0f °C, the limit is %.0f °C", v[0], c.Temperature)
		},
	},
	// nvml.h, nvmlClocksEventReasons: hardware slowdown 0x8, hardware thermal slowdown 0x40, power brake
	// 0x80. The software power cap, 0x4, is normal for a GPU at full load.
	{
		health.CauseClocks, health.Degraded, health.ActionCheckCooling,
		[]health.Field{health.FieldClocksEvents},
		func(_ Config, v []float64) string {
			return textIf(uint64(v[0])&(0x8|0x40|0x80) != 0, "the hardware slows the clocks down (event bits %#x)", uint64(v[0]))
		},
	},
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
func (c *condition) values(s health.Sample) ([]float64, bool) {
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
func JudgedFields() []health.Field {
	var all []health.Field
	for _, c := range conditions {
		all = append(all, c.fields...)
	}
	return all
}
