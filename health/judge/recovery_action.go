package judge

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
)

// awaitAction is how long readings must pass after a health.EventAction until the source's recovery action counts, because the values of
// DCGM's cache may be two seconds old. An older "none" would end the finding.
const awaitAction = 5 * time.Second

// recovery is the meaning of a recovery action.
type recovery struct {
	state  health.State
	reason string
	action health.Action
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
var recoveries = map[health.RecoveryAction]recovery{
	health.RecoveryReset:    {health.Degraded, "the driver asks for a GPU reset", health.ActionResetGPU, true},
	health.RecoveryReboot:   {health.Unhealthy, "the driver asks for a reboot of the node", health.ActionRebootNode, true},
	health.RecoveryDrainP2P: {health.Unhealthy, "the driver asks to drain peer-to-peer work", health.ActionDrainP2P, false},
	health.RecoveryDrainAndReset: {
		health.Degraded, "the driver asks to drain and reset the GPU, which works at reduced capacity", health.ActionResetGPU, true,
	},
	health.RecoveryIMEXDomain:   {health.Unhealthy, "the driver asks to recover the IMEX domain", health.ActionRecoverIMEX, false},
	health.RecoveryPCIeBusReset: {health.Unhealthy, "the driver asks for a PCIe bus reset", health.ActionResetPCIeBus, true},
	health.RecoverySystemReboot: {health.Unhealthy, "the driver asks for a reboot of the system", health.ActionRebootNode, true},
}

// recoveryOf returns the meaning of a recovery action. RecoveryNone has an empty one.
func recoveryOf(a health.RecoveryAction) recovery {
	if r, ok := recoveries[a]; ok || a == health.RecoveryNone {
		return r
	}
	return recovery{
		state: health.Unhealthy, reason: fmt.Sprintf("the driver asks for recovery action %d, which this agent does not know", a),
		action: health.ActionCheckRecoveryAction,
	}
}

// asksForReset reports whether a finding is a recovery action whose end proves a reset. For an unknown action it does not.
func asksForReset(f health.Finding) bool {
	for _, r := range recoveries {
		if r.resets && r.action == f.Action {
			return true
		}
	}
	return false
}

// explainRecoveryAction sets UnexplainedReset when the driver's first recovery action asks for a reset and no XID since the agent's start
// explains it: an engine inside the agent loses the XIDs from before the start. What is broken is then unknown, so the GPU does not count
// as working. The end of the recovery action clears it.
func explainRecoveryAction(m *health.Memory, c Config, counted map[int]health.Tally, s health.Sample) {
	value, ok := s.Values[health.FieldRecoveryAction]
	if !ok {
		return
	}
	reset := recoveryOf(health.RecoveryAction(value)).action == health.ActionResetGPU
	// An ignored XID, such as an application's error, explains nothing.
	explains := func(code int) bool { return c.XID.Effect(code) != catalog.EffectIgnore }
	explained := slices.ContainsFunc(s.XIDs, func(x health.XID) bool { return explains(x.Code) })
	for code := range counted {
		explained = explained || explains(code)
	}
	m.UnexplainedReset = reset && (m.UnexplainedReset || m.AwaitsAction && !explained)
	m.AwaitsAction = false
}
