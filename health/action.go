package health

import "cmp"

// Action is the stable code of an operator's response to a finding, an XID or an incident. It is a label value and
// part of the JSON and of the state file: add codes, do not change them. Its sentence is Advice.
type Action string

// The actions. Each has a row in actions.
const (
	ActionNone                = Action("none")
	ActionWatch               = Action("watch")
	ActionWatchNVLink         = Action("watch-nvlink")
	ActionWatchRecoveryAction = Action("watch-recovery-action")
	ActionContactSupport      = Action("contact-support")
	ActionRestartApp          = Action("restart-app")
	ActionRestartAppReset     = Action("restart-app-reset-gpu-at-drain")
	ActionFindCause           = Action("find-cause")
	ActionUpdateVGPU          = Action("update-vgpu")

	ActionResetGPU         = Action("reset-gpu")
	ActionResetGPUAtDrain  = Action("reset-gpu-at-drain")
	ActionResetGPUNow      = Action("reset-gpu-now")
	ActionResetGPUWhenFree = Action("reset-gpu-when-free")
	ActionResetPCIeBus     = Action("reset-pcie-bus")
	ActionRebootNode       = Action("reboot-node")
	ActionDrainP2P         = Action("drain-p2p")
	ActionRecoverIMEX      = Action("recover-imex")
	ActionReplaceGPU       = Action("replace-gpu")
	ActionPlanReplacement  = Action("plan-replacement")

	ActionCheckRecoveryAction = Action("check-recovery-action")
	ActionCheckCooling        = Action("check-cooling")
	ActionCheckPowerCables    = Action("check-power-cables")
	ActionCheckPCIe           = Action("check-pcie")
	ActionCheckNVLink         = Action("check-nvlink")
	ActionCheckFabricManager  = Action("check-fabric-manager")
	ActionCheckDCGM           = Action("check-dcgm")
	ActionCheckSource         = Action("check-source")
	ActionCheckDeviceAccess   = Action("check-device-access")
	ActionCheckMPSDaemon      = Action("check-mps-daemon")
	ActionEndMPSClients       = Action("end-mps-clients")
	ActionEndForeignMPS       = Action("end-foreign-mps")

	ActionBindDriver = Action("bind-driver")
	ActionAttach     = Action("attach")
	ActionUncordon   = Action("uncordon")

	// ActionUnknown is the action of a saved finding whose action this release does not know.
	ActionUnknown = Action("unknown")
)

// actions are all actions with their advice, the strongest first. A strong action makes a weaker one unnecessary, or must be taken anyway.
// A device shows the strongest action of its worst findings: see Verdict.Findings.
//
//nolint:gochecknoglobals // a table of constants
var actions = []struct {
	action Action
	advice string
}{
	{ActionReplaceGPU, "replace the GPU"},
	{ActionFindCause, "find the cause, then reboot the node or run gpu-node-agent clear"},
	{ActionRebootNode, "drain and reboot the node"},
	{ActionResetPCIeBus, "drain the node and reset the GPU's PCIe bus; if that is not possible, reboot the node"},
	{ActionResetGPU, "drain the node and reset the GPU"},
	{ActionResetGPUNow, "reset the GPU now: no pod holds it"},
	{ActionResetGPUWhenFree, "reset the GPU when the pod that holds it has ended"},
	{ActionResetGPUAtDrain, "reset the GPU at the next drain"},
	{ActionDrainP2P, "end all jobs that use this GPU together with other GPUs"},
	{ActionRestartAppReset, "restart the affected applications; reset the GPU at the next drain"},
	{ActionEndForeignMPS, "find out who started the process that the finding names, and end it with the command there; its clients end too"},
	{
		ActionEndMPSClients,
		"end the pods that hold shares of the device: the MPS daemon recovers, or is restarted, when its clients have exited",
	},
	{ActionRestartApp, "restart the application; if the error recurs, debug the application"},
	{ActionPlanReplacement, "plan to replace the GPU"},
	{ActionCheckRecoveryAction, "look up the number in NVIDIA's description of nvmlDeviceGpuRecoveryAction_t; drain the node meanwhile"},
	{ActionCheckPowerCables, "power the node off and check the GPU's power cables"},
	{ActionCheckPCIe, "check the GPU's seating, riser and slot"},
	{ActionCheckNVLink, "check the NVLink bridge, cables and baseboard; then drain the node and reset the GPU"},
	{ActionRecoverIMEX, "check the IMEX service on the nodes of the IMEX domain, and restart it there"},
	{ActionCheckFabricManager, "check the fabric manager"},
	{ActionCheckDCGM, "look for the GPU in the kernel log and in DCGM's log; if it persists, drain the node and restart the host engine"},
	{ActionCheckSource, "find out why the source is not up: gpu-node-agent status"},
	{ActionCheckDeviceAccess, "give the agent's container access to the GPU's device nodes"},
	{ActionBindDriver, "bind the driver to the GPU; if a host engine was detached, run gpu-node-agent attach"},
	{ActionAttach, "run gpu-node-agent attach when the GPU is ready"},
	{ActionCheckMPSDaemon, "check the pod and the log of mps-daemon on the node, and the daemon's logs; gpu-node-agent mps shows its state"},
	{ActionCheckCooling, "check cooling and power supply"},
	{ActionUpdateVGPU, "update the vGPU software to compatible versions"},
	{ActionUnknown, "another release of the agent recorded this finding; see its documentation"},
	{ActionContactSupport, "watch the device; if the error recurs, contact NVIDIA support"},
	{ActionWatchRecoveryAction, "watch the device; the driver's recovery action tells whether it needs a reset"},
	{ActionWatchNVLink, "watch the NVLink error counters"},
	{ActionWatch, "watch the device; look up the XID or the DCGM error code"},
	{ActionUncordon, "remove the entry from health.cordon to return the device to pods"},
	{ActionNone, "no action is needed"},
}

// order returns the action's place among all, the strongest first; an unknown code is the last.
func (a Action) order() int {
	for i := range actions {
		if actions[i].action == a {
			return i
		}
	}
	return len(actions)
}

// Compare returns a negative number if a is a stronger action than b, and a positive one if it is weaker.
func (a Action) Compare(b Action) int { return cmp.Compare(a.order(), b.order()) }

// Advice returns the action as an imperative sentence, "" for an unknown code.
func (a Action) Advice() string {
	if !a.Valid() {
		return ""
	}
	return actions[a.order()].advice
}

// Actions returns all actions, the strongest first.
func Actions() []Action {
	all := make([]Action, len(actions))
	for i := range actions {
		all[i] = actions[i].action
	}
	return all
}

// UnmarshalText reads an action. An unknown one is from a newer release.
func (a *Action) UnmarshalText(text []byte) error {
	if *a = Action(text); !a.Valid() {
		*a = ActionUnknown
	}
	return nil
}

// Valid reports whether a is one of the actions above.
func (a Action) Valid() bool { return a.order() < len(actions) }

// Advice returns the action as an imperative sentence, with what else ends the finding.
func (f Finding) Advice() string {
	text := f.Action.Advice()
	if f.Action == ActionRebootNode && (f.Clears == ClearsGPUReset || f.OfPresence()) { // XID 79, and the loss that it explains
		text += "; a reset that brings the GPU back clears it too"
	}
	return text
}
