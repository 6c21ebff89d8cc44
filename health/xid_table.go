package health

// xidTable is what is known of every XID, by number. The catalogue is NVIDIA's, for Ampere and later
// (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, 2025-10-29). The rule:
//
//   - Unhealthy is what the catalogue wants a reset or a restart for, and what else takes the GPU away: a
//     row that says so itself has a Deviation.
//   - Ignored are the application errors that NVIDIA's own device plugin ignores, what the catalogue asks
//     nobody to look at, and good news.
//   - Everything else warns. That includes the numbers that the catalogue calls unused: older GPUs and
//     drivers do use some, and a number that should never come is worth a look.
//
// TestXIDTable holds the table against the catalogue.
//
//nolint:gochecknoglobals // a table of constants
var xidTable = [...]XIDInfo{
	1:  askSupport("invalid push buffer: bad method"),
	2:  askSupport("invalid push buffer: bad software method"),
	3:  askSupport("invalid push buffer: unknown method"),
	4:  askSupport("invalid push buffer: channel busy"),
	5:  askSupport("push buffer ran over"),
	6:  askSupport("invalid push buffer: cannot be parsed"),
	7:  askSupport("invalid push buffer address"),
	8:  appError("GPU stopped processing: a channel did not become idle"),
	9:  askSupport("driver error in programming the GPU"),
	10: askSupport("graphics engine stopped at a single step"),
	11: appError("push buffer asks for hardware that is missing"),
	12: askSupport("driver error in handling a GPU exception"),
	13: pluginIgnores("RESTART_APP", "graphics engine exception"),
	14: noted("fake error, for tests of the driver"),
	15: askSupport("timeout waiting for a scan line"),
	16: askSupport("display engine hung"),
	17: askSupport("parameter error"),
	18: askSupport("bus mastering is off in the PCI configuration"),
	19: askSupport("display engine error: missed notification"),
	20: askSupport("invalid push buffer of the MPEG engine"),
	21: askSupport("invalid push buffer of the motion estimation engine"),
	22: askSupport("invalid push buffer of the video processor"),
	23: askSupport("error log switched on"),
	24: askSupport("timeout of a GPU semaphore"),
	25: appError("illegal notification in a push buffer"),
	26: askSupport("timeout of the frame buffer"),
	27: askSupport("first video processor exception"),
	28: askSupport("second video processor exception"),
	29: askSupport("bitstream processor exception"),
	30: askSupport("access to a bad address"),
	31: pluginIgnores("RESTART_APP", "GPU memory page fault"),
	32: appError("invalid push buffer or its DMA failed"),
	33: askSupport("security engine error"),
	34: askSupport("video decoder exception: bitstream"),
	35: askSupport("video decoder exception: picture decoding"),
	36: askSupport("video decoder exception: post-processing"),
	37: noted("firmware does not know a method"),
	38: noted("firmware watchdog timeout"),
	39: appError("copy engine 0 exception"),
	40: appError("copy engine 1 exception"),
	41: appError("copy engine 2 exception"),
	42: askSupport("video image compositor exception"),
	43: pluginIgnores("IGNORE", "GPU stopped processing"),
	44: noted("graphics engine fault while switching contexts"),
	45: pluginIgnores("WORKFLOW_XID_45", "preemptive cleanup, due to previous errors"),
	46: resets("GPU timeout: it stopped processing"),
	47: askSupport("video encoder 0 exception"),
	48: takesAway("WORKFLOW_XID_48", "double-bit ECC error", ClearsGPUReset, ActionResetGPU, "").failsDCGM().ofInstance(),
	49: askSupport("silent running: level set by configuration"),
	50: askSupport("silent running: level changed by an error"),
	51: askSupport("silent running: stress test failed"),
	52: askSupport("silent running: level changed by temperature"),
	53: askSupport("silent running: clocks lowered by temperature"),
	// No cable is put in while the node runs, so a reboot is the evidence.
	54: takesAway("CHECK_MECHANICALS", "auxiliary power is not connected: clocks are lowered", ClearsReboot,
		ActionCheckPowerCables,
		"the catalogue names no state; the GPU cannot do its work without that power, and AWS calls it fatal"),
	55: askSupport("silent running: temperature cannot be read"),
	56: askSupport("display engine error"),
	57: askSupport("video memory link could not be trained"),
	58: askSupport("video memory is unstable"),
	59: askSupport("power management controller error"),
	60: appError("video processor or security engine 2 exception"),
	61: askSupport("power management controller breakpoint"),
	62: resets("internal micro-controller halt"),
	// The row works again after a reset; until then the finding of field 396, row remap pending, stands.
	63: warns("IGNORE", "memory row or page is set aside for errors", ActionResetGPUAtDrain).
		deviates("the catalogue asks nobody to look; the remap is only in force after a reset, which somebody has to plan").ofGPU(),
	64: resets("row remapper or page retirement failed to record"),
	65: askSupport("video encoder 1 exception"),
	66: noted("illegal register access by the driver"),
	67: noted("illegal access by the driver: verification failed"),
	68: pluginIgnores("RESTART_APP", "video processor exception"),
	69: appError("graphics engine class error"),
	70: appError("copy engine 3 exception"),
	71: appError("copy engine 4 exception"),
	72: appError("copy engine 5 exception"),
	73: askSupport("video encoder 2 exception"),
	74: takesAway("WORKFLOW_NVLINK_ERR", "NVLink error", ClearsGPUReset, ActionResetGPU, "").failsDCGM(),
	75: appError("copy engine 6 exception"),
	76: appError("copy engine 7 exception"),
	77: appError("copy engine 8 exception"),
	78: warns("UPDATE_SWFW", "vGPU could not start", ActionUpdateVGPU),
	// A GPU that is seen on the bus again has not fallen off it any more, so its return, which counts as a
	// reset, clears the finding too.
	79: takesAway("RESTART_BM", "GPU has fallen off the bus", ClearsGPUReset, ActionRebootNode,
		"the catalogue wants a reboot and nothing less; the GPU's return to the bus clears it here").failsDCGM(),
	80: appError("corrupted push buffer: checksum does not match"),
	81: askSupport("VGA subsystem error"),
	82: appError("JPEG engine 0 exception"),
	83: appError("video decoder 1 exception"),
	84: appError("video decoder 2 exception"),
	85: appError("copy engine 9 exception"),
	86: appError("optical flow engine 0 exception"),
	87: askSupport("report of the driver's telemetry"),
	88: appError("video decoder 3 exception"),
	89: appError("video decoder 4 exception"),
	90: askSupport("level 2 cache error"),
	91: askSupport("reserved"),
	92: noted("high rate of single-bit ECC errors"),
	93: noted("InfoROM is written more often than it is made for"),
	94: appError("contained memory error").does(ActionRestartAppReset),
	95: resets("uncontained memory error").failsDCGM(),
	96: appError("video decoder 5 exception"),
	97: appError("video decoder 6 exception"),
	98: appError("video decoder 7 exception"),
	99: appError("JPEG engine 1 exception"),

	100: appError("JPEG engine 2 exception"),
	101: appError("JPEG engine 3 exception"),
	102: appError("JPEG engine 4 exception"),
	103: appError("JPEG engine 5 exception"),
	104: appError("JPEG engine 6 exception"),
	105: appError("JPEG engine 7 exception"),
	106: ignored("IGNORE", "test message over SMBus"),
	107: ignored("IGNORE", "silent test message over SMBus"),
	108: noted("NVLink peer could not translate an address"),
	109: pluginIgnores("RESET_GPU", "context switch timeout").follows().
		deviates("the catalogue says RESET_GPU, NVIDIA's device plugin calls it an application error: the driver's recovery action settles it"),
	110: resets("security fault"),
	111: askSupport("display bundle error"),
	112: askSupport("display supervisor error"),
	113: askSupport("DisplayPort link could not be trained"),
	114: askSupport("display pipeline ran empty"),
	115: askSupport("display core channel error"),
	116: askSupport("display window channel error"),
	117: askSupport("display cursor channel error"),
	118: askSupport("display pixel pipeline error"),
	119: resets("GSP RPC timeout").failsDCGM(),
	120: resets("GSP error").failsDCGM(),
	121: noted("chip-to-chip link error"),
	122: askSupport("SPI read by the power management controller failed"),
	123: askSupport("SPI write by the power management controller failed"),
	124: askSupport("SPI erase by the power management controller failed"),
	125: askSupport("InfoROM file system error"),
	126: appError("copy engine 10 exception"),
	127: appError("copy engine 11 exception"),
	128: appError("copy engine 12 exception"),
	129: appError("copy engine 13 exception"),
	130: appError("copy engine 14 exception"),
	131: appError("copy engine 15 exception"),
	132: appError("copy engine 16 exception"),
	133: appError("copy engine 17 exception"),
	134: appError("copy engine 18 exception"),
	135: appError("copy engine 19 exception"),
	136: resets("NVLink training failed"),
	137: noted("NVLink access without the right to it"),
	138: askSupport("deep learning accelerator error"),
	139: appError("optical flow engine 1 exception"),
	140: resets("unrecovered ECC error").failsDCGM(),
	141: noted("CUDA fast path error"),
	142: askSupport("video encoder 3 exception"),
	143: resets("GPU could not be initialized"),
	144: nvlink5("NVLink 5 error: SAW"),
	145: nvlink5("NVLink 5 error: RLW"),
	146: nvlink5("NVLink 5 error: TLW"),
	147: nvlink5("NVLink 5 error: TREX"),
	148: nvlink5("NVLink 5 error: NVLPW_CTRL"),
	149: nvlink5("NVLink 5 error: NETIR"),
	150: nvlink5("NVLink 5 error: MSE"),
	151: takesAway("RESTART_VM", "encryption key could not be changed", ClearsReboot, ActionRebootNode, ""),
	152: noted("deep learning accelerator: memory management error"),
	153: noted("deep learning accelerator: timeout"),
	// It says that field 1523 has another value, and that field is judged by itself.
	154: warns("XID_154", "GPU recovery action changed", ActionWatchRecoveryAction).ofGPU(),
	155: resets("NVLink error that software defines"),
	156: resets("part of the GPU was set aside for errors"),
	157: noted("part of the GPU could not be set aside for errors"),
	158: resets("fatal GPU timeout"),
	159: warns("CHECK_UVM", "coherent interconnect error without data", ActionRestartApp).restarts(),
	160: noted("channel was set aside for errors"),
	161: noted("channel could not be set aside for errors"),
	// Good news: what 163 took away is back.
	162: ignored("", "power smoothing is in force again"),
	163: unresolved("power smoothing is out of force"),
	164: unresolved("power smoothing hardware is near the end of its life"),
	165: unresolved("power smoothing hardware is at the end of its life"),
	166: unresolved("NVLink traffic came before its encryption was ready"),
	167: takesAway("", "fatal PCIe timeout", ClearsReboot, ActionRebootNode,
		"the catalogue has no resolution; the driver calls it fatal").from("gpud: reboot"),
	168: unresolved("protected region of GPU memory has errors: less memory is usable"),
	169: takesAway("", "security engine 2 halt", ClearsReboot, ActionRebootNode,
		"the catalogue has no resolution; it resets the GPU for the halt of another micro-controller, 62").from("gpud: reboot"),
	170: unresolved("NVLink security interrupt in confidential computing"),
	171: takesAway("", "uncorrectable DRAM error", ClearsGPUReset, ActionResetGPU,
		"the catalogue has no resolution; it is the detail of a 48, which is unhealthy").ofInstance(),
	172: takesAway("", "uncorrectable SRAM error", ClearsGPUReset, ActionResetGPU,
		"the catalogue has no resolution; it is the detail of a 48, which is unhealthy").ofInstance(),
	173: takesAway("", "fatal chip-to-chip link failure", ClearsReboot, ActionRebootNode,
		"the catalogue does not have it yet; the driver calls it fatal").from("gpud: reboot"),
}

// catalogue names the source of a row: the catalogue and its immediate action.
func catalogue(resolution string) string {
	if resolution == "" {
		return "NVIDIA XID catalogue: no resolution"
	}
	return "NVIDIA XID catalogue: " + resolution
}

// warns is a row that tells an operator something.
func warns(resolution, name string, action Action) XIDInfo {
	return XIDInfo{Name: name, Effect: EffectWarn, Action: action, Clears: ClearsItself, Source: catalogue(resolution)}
}

// appError is an application's error that ended the application.
func appError(name string) XIDInfo { return warns("RESTART_APP", name, ActionRestartApp).restarts() }

// askSupport is one that only NVIDIA can make sense of; most are unused since Ampere.
func askSupport(name string) XIDInfo { return warns("CONTACT_SUPPORT", name, ActionContactSupport) }

// noted needs nothing now, and somebody's attention if it comes again.
func noted(name string) XIDInfo { return warns("IGNORE", name, ActionWatch) }

// unresolved is one for which the catalogue has no resolution yet.
func unresolved(name string) XIDInfo { return warns("", name, ActionWatch) }

// nvlink5 is one of which the number alone does not tell whether it is fatal: that takes bits that only
// the kernel's log has. The driver knows them, and its recovery action says so.
func nvlink5(name string) XIDInfo {
	return warns("WORKFLOW_NVLINK5_ERR", name, ActionWatchRecoveryAction).follows().ofGPU()
}

// ignored is nobody's business.
func ignored(resolution, name string) XIDInfo {
	return XIDInfo{Name: name, Effect: EffectIgnore, Action: ActionNone, Clears: ClearsItself, Source: catalogue(resolution)}
}

// pluginIgnores is an application's error that leaves the GPU healthy.
func pluginIgnores(resolution, name string) XIDInfo {
	return ignored(resolution, name).does(ActionRestartApp).restarts().from("NVIDIA k8s-device-plugin ignores it")
}

// takesAway is a row that takes the GPU away, as a whole unless ofInstance says otherwise: what stops the driver, a
// micro-controller or a link stops every instance (NVIDIA MIG user guide: instances have memory and engines of their own,
// and share the rest).
func takesAway(resolution, name string, clears Clears, action Action, deviation string) XIDInfo {
	return XIDInfo{
		Name: name, Effect: EffectUnhealthy, Action: action, Clears: clears, Source: catalogue(resolution), Deviation: deviation,
		WholeGPU: true,
	}
}

// resets is what the catalogue wants a GPU reset for.
func resets(name string) XIDInfo {
	return takesAway("RESET_GPU", name, ClearsGPUReset, ActionResetGPU, "")
}

// failsDCGM: DCGM's own health checks call it a failure of the whole GPU.
func (x XIDInfo) failsDCGM() XIDInfo { return x.from("DCGM 4.6 health: FAIL") }

func (x XIDInfo) from(source string) XIDInfo {
	x.Source += "; " + source
	return x
}

// restarts: an application's restart is all that it takes.
func (x XIDInfo) restarts() XIDInfo {
	x.Clears = ClearsRestart
	return x
}

func (x XIDInfo) ofGPU() XIDInfo {
	x.WholeGPU = true
	return x
}

// ofInstance: reported of a MIG device, it is of that instance's memory or engines alone.
func (x XIDInfo) ofInstance() XIDInfo {
	x.WholeGPU = false
	return x
}

func (x XIDInfo) follows() XIDInfo {
	x.FollowsRecoveryAction = true
	return x
}

func (x XIDInfo) deviates(why string) XIDInfo {
	x.Deviation = why
	return x
}

func (x XIDInfo) does(action Action) XIDInfo {
	x.Action = action
	return x
}
