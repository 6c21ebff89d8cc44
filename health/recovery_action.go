package health

import (
	"fmt"
	"slices"
	"time"
)

// RecoveryAction is the recovery of a GPU that the driver asks for, the value of FieldRecoveryAction
// (DCGM_FI_DEV_GPU_RECOVERY_ACTION; nvmlDeviceGpuRecoveryAction_t).
type RecoveryAction int64

// The recovery actions, in the driver's numbers. Drivers before 595 report only the first five; 615 added the last two.
const (
	RecoveryNone RecoveryAction = iota
	RecoveryReset
	RecoveryReboot
	RecoveryDrainP2P
	RecoveryDrainAndReset
	RecoveryIMEXDomain
	RecoveryPCIeBusReset
	RecoverySystemReboot
)

// eventAction is a recovery action of an event.
type eventAction struct {
	at   time.Time     // of the event
	left time.Duration // how long readings must pass until the source's recovery action counts again
}

// awaitAction is how long readings must pass after an eventAction until the source's recovery action counts, because the values of DCGM's
// cache may be two seconds old. An older "none" would end the finding.
const awaitAction = 5 * time.Second

// recovery is the meaning of a recovery action.
type recovery struct {
	state  State
	reason string
	action Action
	resets bool // its end proves that the GPU was reset
}

// recoveries are the driver's recovery actions, nvmlDeviceGpuRecoveryAction_t, by number. The meanings are from NVIDIA's GPU memory error
// management, "error recovery and response flags", and from dcgm_errors.h, DCGM_FR_GPU_RECOVERY_*.
//
//   - Reset: a fault occurred that only a reset cures. What it broke shows elsewhere: an XID that needs a reset, double-bit
//     errors, a lost GPU. A GPU without such a finding works and should be reset.
//   - Reboot: the fault may have left the operating system inconsistent, which is worse than any one GPU.
//   - Drain P2P: peer-to-peer work must end before the driver can determine what the GPU needs. New work would prevent that, so it is
//     Unhealthy; DCGM 4.6 calls it a WARN.
//   - Drain and reset: the GPU works with a part of it disabled, running work may continue, and it should be reset.
//   - Recover the IMEX domain: memory that nodes share over NVLink failed. A reset of the GPU does not cure it.
//   - PCIe bus reset, system reboot: as reset and reboot, but the GPU does not work until then.
//
// Any other number comes from a newer driver, and is Unhealthy.
//
//nolint:gochecknoglobals // a table of constants
var recoveries = map[RecoveryAction]recovery{
	RecoveryReset:         {Degraded, "the driver asks for a GPU reset", ActionResetGPU, true},
	RecoveryReboot:        {Unhealthy, "the driver asks for a reboot of the node", ActionRebootNode, true},
	RecoveryDrainP2P:      {Unhealthy, "the driver asks to drain peer-to-peer work", ActionDrainP2P, false},
	RecoveryDrainAndReset: {Degraded, "the driver asks to drain and reset the GPU, which works at reduced capacity", ActionResetGPU, true},
	RecoveryIMEXDomain:    {Unhealthy, "the driver asks to recover the IMEX domain", ActionRecoverIMEX, false},
	RecoveryPCIeBusReset:  {Unhealthy, "the driver asks for a PCIe bus reset", ActionResetPCIeBus, true},
	RecoverySystemReboot:  {Unhealthy, "the driver asks for a reboot of the system", ActionRebootNode, true},
}

// recoveryOf returns the meaning of a recovery action. RecoveryNone has an empty one.
func recoveryOf(a RecoveryAction) recovery {
	if r, ok := recoveries[a]; ok || a == RecoveryNone {
		return r
	}
	return recovery{
		state: Unhealthy, reason: fmt.Sprintf("the driver asks for recovery action %d, which this agent does not know", a),
		action: ActionCheckRecoveryAction,
	}
}

// asksForReset reports whether the finding is a recovery action whose end proves a reset. For an unknown action it does not.
func (f Finding) asksForReset() bool {
	for _, r := range recoveries {
		if r.resets && r.action == f.Action {
			return true
		}
	}
	return false
}

// explainRecoveryAction sets unexplainedReset when the driver's first recovery action asks for a reset and no XID since the agent's start
// explains it: an engine inside the agent loses the XIDs from before the start. What is broken is then unknown, so the GPU does not count
// as working. The end of the recovery action clears it.
func (m *Memory) explainRecoveryAction(c Config, counted map[int]Tally, s Sample) {
	value, ok := s.Values[FieldRecoveryAction]
	if !ok {
		return
	}
	reset := recoveryOf(RecoveryAction(value)).action == ActionResetGPU
	// An ignored XID, such as an application's error, explains nothing.
	explains := func(code int) bool { return c.XID.Effect(code) != EffectIgnore }
	explained := slices.ContainsFunc(s.XIDs, func(x XID) bool { return explains(x.Code) })
	for code := range counted {
		explained = explained || explains(code)
	}
	m.unexplainedReset = reset && (m.unexplainedReset || m.awaitsAction && !explained)
	m.awaitsAction = false
}
