package statefile

import (
	"fmt"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// clearsTokens are the tokens of version 1 for health.Clears, by number. They differ from the codes of Clears.String: readers
// from before formatMinor 1 refuse a file with another token, and later ones keep such a finding until an operator clears it.
//
//nolint:gochecknoglobals // a table of constants
var clearsTokens = [...]string{"by itself", "gpu reset", "reboot", "operator", "application restart"}

func clearsToken(c health.Clears) string {
	if int(c) < len(clearsTokens) {
		return clearsTokens[c]
	}
	return fmt.Sprint(c)
}

// parseClears reads a token. An unknown one is of a newer release: only an operator can clear that finding.
func parseClears(token string) health.Clears {
	if i := slices.Index(clearsTokens[:], token); i >= 0 {
		return health.Clears(i)
	}
	return health.ClearsOperator
}

// proseActions are the sentences that releases without codes wrote as a finding's action.
//
//nolint:gochecknoglobals // a table of constants
var proseActions = map[string]health.Action{
	"none: restart the application":                                                                                  health.ActionRestartApp,
	"restart the application; if it comes again, look for the cause in it":                                           health.ActionRestartApp,
	"watch the device; if it comes again, ask NVIDIA's support":                                                      health.ActionContactSupport,
	"drain the node and reset the GPU":                                                                               health.ActionResetGPU,
	"drain and reboot the node":                                                                                      health.ActionRebootNode,
	"watch the device; look the XID up in NVIDIA's catalogue":                                                        health.ActionWatch,
	"watch the device; look the code up in dcgm_errors.h":                                                            health.ActionWatch,
	"watch the device; the driver's recovery action says if it needs a reset":                                        health.ActionWatchRecoveryAction,
	"check NVLink bridge, cables and baseboard; then drain the node and reset the GPU":                               health.ActionCheckNVLink,
	"check the GPU's seat, riser and slot":                                                                           health.ActionCheckPCIe,
	"check that DCGM reads the GPU; if it reads none, restart its engine":                                            health.ActionCheckDCGM,
	"watch the NVLink error counters":                                                                                health.ActionWatchNVLink,
	"check the IMEX daemon":                                                                                          health.ActionRecoverIMEX,
	"check the fabric manager":                                                                                       health.ActionCheckFabricManager,
	"plan to replace the GPU":                                                                                        health.ActionPlanReplacement,
	"power the node off and check the GPU's power cables":                                                            health.ActionCheckPowerCables,
	"reset the GPU at the next drain":                                                                                health.ActionResetGPUAtDrain,
	"update the vGPU software to versions that go together":                                                          health.ActionUpdateVGPU,
	"restart the applications that were hit; reset the GPU at the next drain":                                        health.ActionRestartAppReset,
	"give the agent's container access to the GPU's device nodes":                                                    health.ActionCheckDeviceAccess,
	"bind the driver to the GPU again; if a host engine has let go of it, say gpu-node-agent attach":                 health.ActionBindDriver,
	"look for the GPU in the kernel log and in DCGM's log; if it stays so, drain the node and restart DCGM's engine": health.ActionCheckDCGM,
	"replace the GPU": health.ActionReplaceGPU,
	"end all jobs that use this GPU with others":                                                            health.ActionDrainP2P,
	"restart the IMEX service on the nodes of the IMEX domain":                                              health.ActionRecoverIMEX,
	"drain the node and reset the GPU's PCIe bus; if that is not possible, reboot the node":                 health.ActionResetPCIeBus,
	"look the number up in NVIDIA's description of nvmlDeviceGpuRecoveryAction_t; drain the node meanwhile": health.ActionCheckRecoveryAction,
	"check cooling and power supply":                                                                        health.ActionCheckCooling,
	"find the cause, then reboot the node or say gpu-node-agent clear":                                      health.ActionFindCause,
}

// parseAction reads a code or such a sentence. The table lacks the sentences of cordoned, isolated and detached devices,
// because every poll replaces these findings.
func parseAction(text string) health.Action {
	if a := health.Action(text); a.Valid() {
		return a
	}
	if a, ok := proseActions[text]; ok {
		return a
	}
	return health.ActionUnknown
}
