package health

import (
	"fmt"
	"strconv"
)

// The causes that are not XIDs. They are label values: do not change them.
const (
	CauseLost           = "lost"
	CauseInaccessible   = "inaccessible"
	CauseDetached       = "detached"
	CauseMissing        = "missing"
	CauseRecoveryAction = "recovery-action"
	CauseRemapFailed    = "row-remap-failed"
	CauseRemapPending   = "row-remap-pending"
	CauseUnrepairable   = "memory-unrepairable"
	CauseTemperature    = "temperature"
)

func xidCause(code int) string { return "xid-" + strconv.Itoa(code) }

// presenceFinding says what is wrong with a presence, if anything.
func presenceFinding(s Sample) (Finding, bool) {
	f := Finding{State: Unhealthy, Since: s.At, Last: s.At, Clears: ClearsItself}
	switch s.Presence {
	case Lost:
		f.Cause, f.Reason, f.Action = CauseLost, "the GPU is lost: the driver cannot reach it any more", actionReboot
	case Inaccessible:
		f.Cause, f.Reason, f.Action = CauseInaccessible, "the GPU is hidden from the agent",
			"give the agent's container access to the GPU's device nodes"
	case Detached:
		f.Cause, f.Reason, f.Action = CauseDetached, "the driver is detached from the GPU", "bind the driver to the GPU again"
	case Missing:
		f.Cause, f.Reason, f.Action = CauseMissing, "the GPU has left the driver's inventory", actionReboot
	case PresenceUnknown, Present:
		return Finding{}, false
	}
	return f, true
}

// condition is a measured value that is itself a finding while it stands.
type condition struct {
	cause string
	field Field
	check func(c Config, v float64) (f Finding, bad bool) // State, Reason and Action
}

// conditions is the table of them.
//
//nolint:gochecknoglobals // a table of constants
var conditions = []condition{
	// The driver's own verdict: nvmlDeviceGpuRecoveryAction_t. Draining means that no new work may land,
	// so every action but none is Unhealthy.
	{CauseRecoveryAction, FieldRecoveryAction, func(_ Config, v float64) (Finding, bool) {
		f := Finding{State: Unhealthy}
		switch RecoveryAction(v) {
		case RecoveryNone:
			return f, false
		case RecoveryReset:
			f.Reason, f.Action = "the driver asks for a GPU reset", actionReset
		case RecoveryReboot:
			f.Reason, f.Action = "the driver asks for a reboot of the node", actionReboot
		case RecoveryDrainP2P:
			f.Reason, f.Action = "the driver asks to drain peer-to-peer work", "end all jobs that use this GPU with others"
		case RecoveryDrainAndReset:
			f.Reason, f.Action = "the driver asks to drain and reset the GPU", actionReset
		default:
			f.Reason, f.Action = fmt.Sprintf("the driver asks for recovery action %v", v), actionReset
		}
		return f, true
	}},
	// DCGM 4.6 health, system memory: ROW_REMAP_FAILURE is FAIL, the suggestion is RMA.
	{CauseRemapFailed, FieldRemapFailed, func(_ Config, v float64) (Finding, bool) {
		return Finding{State: Unhealthy, Reason: "a bad memory row could not be remapped", Action: "replace the GPU"}, v != 0
	}},
	// A remapped row takes effect with the next reset; until then the memory works (NVIDIA GPU memory
	// error management, row remapping).
	{CauseRemapPending, FieldRemapPending, func(_ Config, v float64) (Finding, bool) {
		return Finding{State: Degraded, Reason: "a memory row waits to be remapped", Action: "reset the GPU at the next drain"}, v != 0
	}},
	// DCGM 4.6 health, system memory: FAULTY_MEMORY is FAIL, severity ISOLATE.
	{CauseUnrepairable, FieldUnrepairable, func(_ Config, v float64) (Finding, bool) {
		return Finding{State: Unhealthy, Reason: "the GPU's memory cannot be repaired", Action: "replace the GPU"}, v != 0
	}},
	{CauseTemperature, FieldGPUTemp, func(c Config, v float64) (Finding, bool) {
		return Finding{
			State: Degraded, Reason: fmt.Sprintf("the GPU is at %.0f °C, the limit is %.0f °C", v, c.Temperature),
			Action: "check fans, air flow and room temperature",
		}, v >= c.Temperature
	}},
}

// xidFinding says what an XID means for the device that reported it, if anything.
func xidFinding(x XID) (Finding, bool) {
	info := LookupXID(x.Code)
	f := Finding{
		Cause: xidCause(x.Code), Reason: fmt.Sprintf("XID %d: %s", x.Code, info.Name), Action: info.Action,
		Since: x.At, Last: x.At, Clears: info.Clears,
	}
	switch info.Effect {
	case EffectIgnore:
		return Finding{}, false
	case EffectWarn:
		f.State = Degraded
	case EffectUnhealthy:
		f.State = Unhealthy
	}
	return f, true
}
