package health

import (
	"fmt"
	"strconv"
)

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

// xidPrefix begins the cause of every finding that is an XID.
const xidPrefix = "xid-"

func xidCause(code int) string { return xidPrefix + strconv.Itoa(code) }

// presenceFinding says what is wrong with a presence, if anything.
func presenceFinding(s Sample) (Finding, bool) {
	f := Finding{State: Unhealthy, Since: s.At, Last: s.At, Clears: ClearsItself}
	switch s.Presence {
	case Lost:
		f.Cause, f.Reason, f.Action = CauseLost, "the GPU is lost: the driver cannot reach it any more", ActionRebootNode
	case Inaccessible:
		f.Cause, f.Reason, f.Action = CauseInaccessible, "the GPU is hidden from the agent",
			ActionCheckDeviceAccess
	case Detached:
		f.Cause, f.Reason, f.Action = CauseDetached, "the driver is detached from the GPU",
			ActionBindDriver
	case Missing:
		f.Cause, f.Reason, f.Action = CauseMissing, "the GPU has left the driver's inventory", ActionRebootNode
	case PresenceUnknown, Present:
		return Finding{}, false
	}
	return f, true
}

// presence reports whether the finding is that a device cannot be reached.
func (f Finding) presence() bool {
	switch f.Cause {
	case CauseLost, CauseInaccessible, CauseDetached, CauseMissing:
		return true
	}
	return false
}

// staleFinding says that the source has no current value of a device while it measures others.
func staleFinding(s Sample) Finding {
	return Finding{
		Cause: CauseNotMeasured, State: Degraded, Reason: "the source has no current value of this GPU, though it measures others",
		Action: ActionCheckDCGM,
		Since:  s.At, Last: s.At, Clears: ClearsItself,
	}
}

// condition is something measured that is itself a finding while it stands.
type condition struct {
	cause  string
	state  State
	fields []Field // all must be told, or nothing is known
	// grade is the state where the values decide it; nil where state does.
	grade func(v []float64) State
	// says tells what is wrong with the values, in the order of fields, and what to do; "" if nothing is.
	says func(c Config, v []float64) (reason string, action Action)
}

// conditions is the table of them.
//
//nolint:gochecknoglobals // a table of constants
var conditions = []condition{
	// The driver's own verdict: recoveries has a state for each action.
	{CauseRecoveryAction, Unhealthy, []Field{FieldRecoveryAction}, recoveryState, recoveryWords},
	// DCGM 4.6 health, system memory: ROW_REMAP_FAILURE is FAIL, the suggestion is to replace the GPU.
	{CauseRemapFailed, Unhealthy, []Field{FieldRemapFailed}, nil, flag("a bad memory row could not be remapped", ActionReplaceGPU)},
	// DCGM 4.6 health, system memory: FAULTY_MEMORY is FAIL, severity ISOLATE.
	{CauseUnrepairable, Unhealthy, []Field{FieldUnrepairable}, nil, flag("the GPU's memory cannot be repaired", ActionReplaceGPU)},
	// DCGM 4.6 health, system memory: VOLATILE_DBE_DETECTED is FAIL, severity ISOLATE, for any count. A
	// reset or a driver reload sets the count back.
	{CauseDBE, Unhealthy, []Field{FieldDBEVolatile}, nil, func(_ Config, v []float64) (string, Action) {
		return when(v[0] > 0, "%.0f double-bit ECC errors since the last reset", v[0]), ActionResetGPU
	}},
	// DCGM 4.6 health, system memory: RETIRED_PAGES_LIMIT is FAIL from 63 pages on.
	{CauseRetiredPages, Unhealthy, []Field{FieldRetiredSBE, FieldRetiredDBE}, nil, func(_ Config, v []float64) (string, Action) {
		return when(v[0]+v[1] >= 63, "%.0f memory pages are retired, the limit is 63", v[0]+v[1]), ActionReplaceGPU
	}},
	// A remapped row or retired page takes effect with the next reset; until then the memory works (NVIDIA
	// GPU memory error management; dynamic page retirement).
	{CauseRemapPending, Degraded, []Field{FieldRemapPending}, nil, flag("a memory row waits to be remapped", ActionResetGPUAtDrain)},
	{CauseRetiredPending, Degraded, []Field{FieldRetiredPending}, nil, flag("a memory page waits to be retired", ActionResetGPUAtDrain)},
	{CauseTemperature, Degraded, []Field{FieldGPUTemp}, nil, func(c Config, v []float64) (string, Action) {
		return when(v[0] >= c.Temperature, "the GPU is at %.0f °C, the limit is %.0f °C", v[0], c.Temperature), ActionCheckCooling
	}},
	// nvml.h, nvmlClocksEventReasons: hardware slowdown 0x8, hardware thermal slowdown 0x40, power brake
	// 0x80. The software power cap, 0x4, is a GPU at full load and no fault.
	{CauseClocks, Degraded, []Field{FieldClocksEvents}, nil, func(_ Config, v []float64) (string, Action) {
		return when(uint64(v[0])&(0x8|0x40|0x80) != 0, "the hardware slows the clocks down (event bits %#x)", uint64(v[0])), ActionCheckCooling
	}},
}

// recovery is what one of the driver's recovery actions means.
type recovery struct {
	state  State
	reason string
	action Action
	resets bool // its end is evidence that the GPU was reset
}

// recoveries are the driver's recovery actions, nvmlDeviceGpuRecoveryAction_t, by number. The meanings are
// those of NVIDIA's GPU memory error management, "error recovery and response flags", and of dcgm_errors.h,
// DCGM_FR_GPU_RECOVERY_*.
//
//   - Reset: there was a fault that only a reset cures. What it has broken shows by itself: an XID that needs a
//     reset, double-bit errors, a GPU that is gone. A GPU that shows nothing of the kind works, and a reset is
//     wanted of it.
//   - Reboot: the fault may have left the operating system inconsistent. That is worse than any one GPU.
//   - Drain P2P: peer-to-peer work must end, and the driver says only then what it needs. That never comes while
//     new work lands, so it is Unhealthy; DCGM 4.6 calls it a WARN.
//   - Drain and reset: the GPU works with a part of it switched off, what runs may go on, and it wants a reset.
//   - Recover the IMEX domain: memory that nodes share over NVLink is out of order. A reset of the GPU does not cure it.
//   - PCIe bus reset, system reboot: as reset and reboot, and the GPU is out of order until then.
//
// Another number comes from a driver that is newer than this table, and is Unhealthy.
//
//nolint:gochecknoglobals // a table of constants
var recoveries = map[RecoveryAction]recovery{
	RecoveryReset:         {Degraded, "the driver asks for a GPU reset", ActionResetGPU, true},
	RecoveryReboot:        {Unhealthy, "the driver asks for a reboot of the node", ActionRebootNode, true},
	RecoveryDrainP2P:      {Unhealthy, "the driver asks to drain peer-to-peer work", ActionDrainP2P, false},
	RecoveryDrainAndReset: {Degraded, "the driver asks to drain and reset the GPU, which works at less than its capacity", ActionResetGPU, true},
	RecoveryIMEXDomain:    {Unhealthy, "the driver asks to recover the IMEX domain", ActionRecoverIMEX, false},
	RecoveryPCIeBusReset:  {Unhealthy, "the driver asks for a PCIe bus reset", ActionResetPCIeBus, true},
	RecoverySystemReboot:  {Unhealthy, "the driver asks for a reboot of the system", ActionRebootNode, true},
}

func recoveryState(v []float64) State {
	if r, known := recoveries[RecoveryAction(v[0])]; known {
		return r.state
	}
	return Unhealthy
}

func recoveryWords(_ Config, v []float64) (reason string, action Action) {
	a := RecoveryAction(v[0])
	if a == RecoveryNone {
		return "", ""
	}
	if r, known := recoveries[a]; known {
		return r.reason, r.action
	}
	return fmt.Sprintf("the driver asks for recovery action %d, which this agent does not know", a), ActionCheckRecoveryAction
}

// flag is what a field says that is 0 or 1.
func flag(reason string, action Action) func(Config, []float64) (string, Action) {
	return func(_ Config, v []float64) (string, Action) { return when(v[0] != 0, "%s", reason), action }
}

func when(bad bool, format string, args ...any) string {
	if !bad {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

// values returns the condition's values, and false if the sample does not tell them all.
func (c condition) values(s Sample) ([]float64, bool) {
	vs := make([]float64, len(c.fields))
	for i, f := range c.fields {
		v, told := s.Values[f]
		if !told {
			return nil, false
		}
		vs[i] = v
	}
	return vs, true
}

// JudgedFields returns the fields that verdicts are made of, which a source must measure at every poll.
func JudgedFields() []Field {
	var all []Field
	for _, c := range conditions {
		all = append(all, c.fields...)
	}
	return all
}
