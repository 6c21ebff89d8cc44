package formerhealth

import "strconv"

// Effect is the effect of an XID or a DCGM incident on the device that reported it.
type Effect uint8

// The effects, in the order of their severity.
const (
	EffectIgnore    Effect = iota // counted, nothing else
	EffectWarn                    // Degraded for a while
	EffectUnhealthy               // Unhealthy until there is evidence of a cure
)

//nolint:gochecknoglobals // a table of constants
var effectNames = [...]string{"ignore", "warn", "unhealthy"}

func (e Effect) String() string { return enumName(effectNames[:], int(e)) }

// state returns the state of a finding with that effect, Healthy if there is none.
func (e Effect) state() State {
	switch e {
	case EffectWarn:
		return Degraded
	case EffectUnhealthy:
		return Unhealthy
	case EffectIgnore:
	}
	return Healthy
}

// XIDInfo describes an XID: its meaning, default effect, action and what clears it.
type XIDInfo struct {
	Code   int
	Symbol string // NVIDIA's name, such as GPU_ECC_DBE; empty if it has none
	Name   string // its meaning
	Effect Effect
	Action Action
	Clears Clears
	Source string // the source of Effect

	// FollowsRecoveryAction means that the driver's recovery action decides how bad the XID is: if the driver asks for a reset,
	// the XID is Unhealthy until the GPU has been reset.
	FollowsRecoveryAction bool
	// WholeGPU means that an XID which a MIG device reports affects the whole GPU. Other XIDs affect only the MIG device.
	WholeGPU bool
	// DiffersFrom names the sources that judge the XID otherwise, such as "NVIDIA's catalogue, gpud", and Deviation the reason
	// for the difference. Both are empty if there is none. TestXIDDeviations compares them with the sources.
	DiffersFrom, Deviation string
}

// LookupXID returns the description of an XID. An XID that is not in the table is a warning.
func LookupXID(code int) XIDInfo {
	if code > 0 && code < len(xidTable) {
		info := xidTable[code]
		info.Code, info.Symbol = code, xidSymbols[code]
		return info
	}
	return XIDInfo{
		Code: code, Name: "XID " + strconv.Itoa(code), Effect: EffectWarn,
		Action: ActionWatch, Clears: ClearsItself, Source: "not in the table",
	}
}

// xidTable describes every XID, by number. The catalogue is NVIDIA's, for Ampere and later
// (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, 2025-10-29). The rule:
//
//   - An XID for which the catalogue requires a reset or a restart is unhealthy. Any other unhealthy row has a Deviation.
//   - The application errors that NVIDIA's device plugin ignores, the XIDs for which the catalogue requires no action at all,
//     and reports of a recovery or of the recovery action are ignored.
//   - All other XIDs warn. That includes the numbers that the catalogue calls unused: older GPUs and drivers use some of them.
//     If the sources disagree and the XID may be a fault, the driver's recovery action decides.
//
// TestXIDTable compares the table with the catalogue, and TestXIDDeviations with what other programs do.
//
//nolint:gochecknoglobals // a table of constants
var xidTable = [...]XIDInfo{
	1:  askSupport("invalid push buffer: bad method"),
	2:  askSupport("invalid push buffer: bad software method"),
	3:  askSupport("invalid push buffer: unknown method"),
	4:  askSupport("invalid push buffer: channel busy"),
	5:  askSupport("push buffer overflow"),
	6:  askSupport("invalid push buffer: cannot be parsed"),
	7:  askSupport("invalid push buffer address"),
	8:  appError("GPU stopped processing: a channel did not become idle"),
	9:  unused("gpud", "driver error while programming the GPU"),
	10: askSupport("graphics engine stopped by single-stepping"),
	11: appError("push buffer requires missing hardware"),
	12: unused("gpud", "driver error while handling a GPU exception"),
	13: pluginIgnores("RESTART_APP", "graphics engine exception"),
	14: noted("fake error for driver tests"),
	15: askSupport("timeout waiting for a scan line"),
	16: unused("gpud", "display engine hung"),
	17: askSupport("parameter error"),
	18: unused("gpud", "PCI bus mastering is disabled"),
	19: unused("gpud", "display engine error: missed notification"),
	20: askSupport("invalid push buffer of the MPEG engine"),
	21: askSupport("invalid push buffer of the motion estimation engine"),
	22: askSupport("invalid push buffer of the video processor"),
	23: askSupport("error logging enabled"),
	24: askSupport("GPU semaphore timeout"),
	25: appError("illegal notification in a push buffer"),
	26: unused("gpud", "frame buffer timeout"),
	27: unused("gpud", "first video processor exception"),
	28: unused("gpud", "second video processor exception"),
	29: unused("gpud", "bitstream processor exception"),
	30: unused("gpud", "access to a bad address"),
	31: pluginIgnores("RESTART_APP", "GPU memory page fault"),
	32: appError("invalid or corrupted push buffer stream").differs("gpud", onlyApplication),
	33: unused("gpud", "security engine error"),
	34: unused("gpud", "video decoder exception: bitstream"),
	35: unused("gpud", "video decoder exception: picture decoding"),
	36: unused("gpud", "video decoder exception: post-processing"),
	37: noted("unknown firmware method"),
	38: disputed("IGNORE", "firmware watchdog timeout"),
	39: appError("copy engine 0 exception"),
	40: appError("copy engine 1 exception"),
	41: appError("copy engine 2 exception"),
	42: unused("gpud", "video image compositor exception"),
	43: pluginIgnores("IGNORE", "GPU stopped processing"),
	44: disputed("IGNORE", "graphics engine fault during a context switch"),
	45: pluginIgnores("WORKFLOW_XID_45", "preemptive cleanup, due to previous errors"),
	46: resets("GPU stopped processing: timeout"),
	47: unused("gpud", "video encoder 0 exception"),
	48: unhealthy("WORKFLOW_XID_48", "double-bit ECC error", ClearsGPUReset, ActionResetGPU).failsDCGM().ofInstance(),
	49: askSupport("silent running: level set by configuration"),
	50: askSupport("silent running: level changed by an error"),
	51: askSupport("silent running: stress test failed"),
	52: askSupport("silent running: level changed by temperature"),
	53: askSupport("silent running: clocks reduced by temperature"),
	// Cables are only connected while the node is off, so a reboot is the evidence.
	54: unhealthy("CHECK_MECHANICALS", "auxiliary power is not connected: clocks are reduced", ClearsReboot, ActionCheckPowerCables).
		differs("NVIDIA's catalogue, gpud", "the GPU cannot work as specified without this power, and AWS calls the XID fatal"),
	55: askSupport("silent running: temperature cannot be read"),
	56: unused("Azure", "display engine error"),
	57: unused("Azure", "video memory link training failed"),
	58: unused("Azure", "video memory is unstable"),
	59: unused("gpud", "power management controller error"),
	60: appError("video processor or security engine 2 exception").differs("gpud", onlyApplication),
	61: askSupport("power management controller breakpoint").differs("gpud", "the driver's header nverror.h calls it non-fatal"),
	62: resets("internal micro-controller halt"),
	// The row works again after a reset; until then field 396, row remap pending, has a finding of its own.
	63: warns("IGNORE", "memory row remapped or page retired after errors", ActionResetGPUAtDrain).ofGPU().
		differs("NVIDIA's catalogue, gpud, Azure, AWS, GKE",
			"the memory works, but the remap takes effect only after a reset, which an operator must plan; a failed remap is unhealthy"),
	64: resets("row remap or page retirement could not be recorded"),
	65: unused("gpud, Azure", "video encoder 1 exception"),
	66: noted("illegal register access by the driver"),
	67: noted("illegal access by the driver: verification failed"),
	68: pluginIgnores("RESTART_APP", "video processor exception").differs("gpud, Azure", onlyApplication),
	69: appError("graphics engine class error").differs("gpud, Azure", onlyApplication),
	70: appError("copy engine 3 exception"),
	71: appError("copy engine 4 exception"),
	72: appError("copy engine 5 exception"),
	73: unused("Azure", "video encoder 2 exception"),
	74: unhealthy("WORKFLOW_NVLINK_ERR", "NVLink error", ClearsGPUReset, ActionResetGPU).failsDCGM(),
	75: appError("copy engine 6 exception"),
	76: appError("copy engine 7 exception"),
	77: appError("copy engine 8 exception"),
	78: warns("UPDATE_SWFW", "vGPU failed to start", ActionUpdateVGPU).
		differs("gpud", "the catalogue requires other versions of the software, and a reset does not change them"),
	// The GPU's return to the bus counts as a reset, so it also clears the finding.
	79: unhealthy("RESTART_BM", "GPU has fallen off the bus", ClearsGPUReset, ActionRebootNode).failsDCGM().
		differs("NVIDIA's catalogue", "the catalogue requires a reboot; here the GPU's return to the bus also clears the finding"),
	80: appError("corrupted push buffer: checksum mismatch").differs("Azure", onlyApplication),
	81: unused("gpud, Azure", "VGA subsystem error"),
	82: appError("JPEG engine 0 exception"),
	83: appError("video decoder 1 exception"),
	84: appError("video decoder 2 exception"),
	85: appError("copy engine 9 exception"),
	86: appError("optical flow engine 0 exception"),
	87: askSupport("driver telemetry report"),
	88: appError("video decoder 3 exception"),
	89: appError("video decoder 4 exception"),
	90: askSupport("level 2 cache error"),
	91: askSupport("reserved"),
	92: noted("high rate of single-bit ECC errors").
		differs("Azure", "the errors are corrected, and a remap or a page retirement that they cause has a finding of its own"),
	93: noted("InfoROM exceeded its number of erase cycles"),
	94: appError("contained memory error").withAction(ActionRestartAppReset).
		differs("gpud", "the error ends only the applications that use the memory; a row remap that it causes has a finding of its own"),
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
	108: noted("NVLink peer failed to translate an address"),
	109: pluginIgnores("RESET_GPU", "context switch timeout").follows().
		differs("NVIDIA's catalogue, AWS", "NVIDIA's device plugin calls it an application error; the driver's recovery action decides"),
	110: resets("security fault"),
	111: askSupport("display bundle error"),
	112: askSupport("display supervisor error"),
	113: askSupport("DisplayPort link training failed"),
	114: askSupport("display pipeline underflow"),
	115: askSupport("display core channel error"),
	116: askSupport("display window channel error"),
	117: askSupport("display cursor channel error"),
	118: askSupport("display pixel pipeline error"),
	119: resets("GSP RPC timeout").failsDCGM(),
	120: resets("GSP error").failsDCGM(),
	121: disputed("IGNORE", "chip-to-chip link error").ofGPU(), // 173 is the fatal one
	122: askSupport("SPI read by the power management controller failed"),
	123: askSupport("SPI write by the power management controller failed").
		differs("gpud, GKE", "NVIDIA does not use the number since Ampere; a row remap that could not be recorded raises XID 64"),
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
	136: resets("NVLink training failed").differs("gpud",
		"the catalogue requires a reset, and AWS calls the XID fatal; gpud calls the number reserved"),
	137: noted("NVLink privilege error"),
	138: askSupport("deep learning accelerator error"),
	139: appError("optical flow engine 1 exception"),
	140: resets("unrecovered ECC error").failsDCGM(),
	141: noted("CUDA fast path error"),
	142: askSupport("video encoder 3 exception").
		differs("AWS", "the catalogue names a video encoder; older lists have an ECC error under this number"),
	143: resets("GPU initialization failed"),
	144: nvlink5("NVLink 5 error: SAW"),
	145: nvlink5("NVLink 5 error: RLW"),
	146: nvlink5("NVLink 5 error: TLW"),
	147: nvlink5("NVLink 5 error: TREX"),
	148: nvlink5("NVLink 5 error: NVLPW_CTRL"),
	149: nvlink5("NVLink 5 error: NETIR"),
	150: nvlink5("NVLink 5 error: MSE"),
	151: unhealthy("RESTART_VM", "encryption key rotation failed", ClearsReboot, ActionRebootNode),
	152: noted("deep learning accelerator: memory management error"),
	153: noted("deep learning accelerator: timeout"),
	// It reports every change of field 1523, also the end of the recovery action. The field has a finding of its own.
	154: ignored("XID_154", "GPU recovery action changed").withAction(ActionWatchRecoveryAction).ofGPU().from("Health Validation: INFO"),
	155: resets("software-defined NVLink error"),
	156: resets("part of the GPU retired after errors"),
	157: noted("part of the GPU could not be retired"),
	158: resets("fatal GPU timeout"),
	159: warns("CHECK_UVM", "coherent interconnect error without data", ActionRestartApp).restarts(),
	160: noted("channel retired after errors"),
	161: noted("channel could not be retired"),
	// The end of XID 163.
	162: ignored("", "power smoothing re-engaged").from("driver 595: ISINK_REENGAGED"),
	163: unresolved("power smoothing disengaged").from("driver 595: ISINK_DISENGAGED").
		differs("gpud", "the GPU computes as before; power smoothing limits changes of its power consumption"),
	164: unresolved("power smoothing hardware is near the end of its life").withAction(ActionContactSupport).from(
		"driver 595: ISINK_LOW_LIFETIME"),
	165: unresolved("power smoothing hardware is at the end of its life").withAction(ActionContactSupport).from(
		"driver 595: ISINK_ZERO_LIFETIME"),
	166: disputed("", "NVLink traffic before encryption was ready").ofGPU(),
	167: unhealthy("", "fatal PCIe timeout", ClearsReboot, ActionRebootNode).from("gpud: reboot").
		differs("NVIDIA's catalogue", "the catalogue has no resolution; the driver calls the XID fatal"),
	168: unresolved("GPU memory capacity reduced: errors in a protected region"),
	169: unhealthy("", "security engine 2 halt", ClearsReboot, ActionRebootNode).from("gpud: reboot").differs("NVIDIA's catalogue",
		"the catalogue has no resolution; it requires a GPU reset for the halt of another micro-controller, XID 62"),
	170: unresolved("NVLink security interrupt in confidential computing"),
	171: unhealthy("", "uncorrectable DRAM error", ClearsGPUReset, ActionResetGPU).ofInstance().
		differs("NVIDIA's catalogue, gpud", "it details an XID 48, which is unhealthy"),
	172: unhealthy("", "uncorrectable SRAM error", ClearsGPUReset, ActionResetGPU).ofInstance().
		differs("NVIDIA's catalogue", "it details an XID 48, which is unhealthy"),
	173: unhealthy("", "fatal chip-to-chip link failure", ClearsReboot, ActionRebootNode).from("gpud: reboot").
		differs("NVIDIA's catalogue", "the catalogue does not list the XID yet; the driver calls it fatal"),
	// No catalogue lists these yet; their names are all that is public.
	174: unresolved("process ended by the driver").withAction(ActionRestartApp).restarts().from(driverHeader),
	175: unresolved("memory subsystem error").withAction(ActionWatchRecoveryAction).follows().ofGPU().from(driverHeader),
	176: unresolved("PCIe correctable error fault").withAction(ActionCheckPCIe).ofGPU().from(driverHeader),
}

// driverHeader is the source of the XIDs that only the driver's header lists.
const driverHeader = "driver 595: nverror.h"

// The reasons that several rows share.
const (
	notUsed         = "NVIDIA does not use the number since Ampere; on an older GPU the XID alone does not prove a fault"
	onlyApplication = "the catalogue requires only a restart of the application"
)

// catalogue returns the source of a row: the catalogue and its immediate action.
func catalogue(resolution string) string {
	if resolution == "" {
		return "NVIDIA XID catalogue: no resolution"
	}
	return "NVIDIA XID catalogue: " + resolution
}

// warns returns a row with a warning.
func warns(resolution, name string, action Action) XIDInfo {
	return XIDInfo{Name: name, Effect: EffectWarn, Action: action, Clears: ClearsItself, Source: catalogue(resolution)}
}

// appError returns the row of an application error that ended the application.
func appError(name string) XIDInfo { return warns("RESTART_APP", name, ActionRestartApp).restarts() }

// askSupport returns the row of an XID that only NVIDIA can interpret; most are unused since Ampere.
func askSupport(name string) XIDInfo { return warns("CONTACT_SUPPORT", name, ActionContactSupport) }

// unused returns the row of an XID that only NVIDIA can interpret, unused since Ampere, and that other sources call fatal.
func unused(differsFrom, name string) XIDInfo { return askSupport(name).differs(differsFrom, notUsed) }

// noted returns the row of an XID that matters only if it recurs.
func noted(name string) XIDInfo { return warns("IGNORE", name, ActionWatch) }

// unresolved returns the row of an XID for which the catalogue has no resolution yet.
func unresolved(name string) XIDInfo { return warns("", name, ActionWatch) }

// disputed returns the row of an XID after which gpud reboots the node, although the catalogue requires no reset.
func disputed(resolution, name string) XIDInfo {
	return warns(resolution, name, ActionWatchRecoveryAction).follows().differs("gpud",
		"the XID reports faults and also events that the GPU survives; the driver's recovery action decides")
}

// nvlink5 returns the row of an XID that is fatal depending on bits which only the kernel log contains: see nvlinkRules. The
// driver's recovery action reflects them.
func nvlink5(name string) XIDInfo {
	return warns("WORKFLOW_NVLINK5_ERR", name, ActionWatchRecoveryAction).follows().ofGPU().
		differs("gpud", "which errors are fatal depends on bits that only the kernel log has; without source.kernelLog the driver's recovery "+
			"action decides")
}

// ignored returns the row of an XID that needs no attention.
func ignored(resolution, name string) XIDInfo {
	return XIDInfo{Name: name, Effect: EffectIgnore, Action: ActionNone, Clears: ClearsItself, Source: catalogue(resolution)}
}

// pluginIgnores returns the row of an application error that leaves the GPU healthy.
func pluginIgnores(resolution, name string) XIDInfo {
	return ignored(resolution, name).withAction(ActionRestartApp).restarts().from("NVIDIA k8s-device-plugin ignores it")
}

// unhealthy returns the row of an XID that makes the GPU unhealthy, as a whole unless ofInstance is added: a failure of the
// driver, a micro-controller or a link affects every instance (NVIDIA MIG user guide: instances have their own memory and
// engines, and share the rest).
func unhealthy(resolution, name string, clears Clears, action Action) XIDInfo {
	return XIDInfo{Name: name, Effect: EffectUnhealthy, Action: action, Clears: clears, Source: catalogue(resolution), WholeGPU: true}
}

// resets returns the row of an XID for which the catalogue requires a GPU reset.
func resets(name string) XIDInfo {
	return unhealthy("RESET_GPU", name, ClearsGPUReset, ActionResetGPU)
}

// failsDCGM adds that DCGM's own health checks call the XID a failure of the whole GPU.
func (x XIDInfo) failsDCGM() XIDInfo { return x.from("DCGM 4.6 health: FAIL") }

func (x XIDInfo) from(source string) XIDInfo {
	x.Source += "; " + source
	return x
}

// restarts sets that a restart of the application clears the XID.
func (x XIDInfo) restarts() XIDInfo {
	x.Clears = ClearsRestart
	return x
}

// ofGPU sets that the XID concerns the whole GPU, also when a MIG device reports it.
func (x XIDInfo) ofGPU() XIDInfo {
	x.WholeGPU = true
	return x
}

// ofInstance sets that the XID concerns only the memory or engines of the MIG device that reports it.
func (x XIDInfo) ofInstance() XIDInfo {
	x.WholeGPU = false
	return x
}

// follows sets that the recovery action decides the effect.
func (x XIDInfo) follows() XIDInfo {
	x.FollowsRecoveryAction = true
	return x
}

// differs sets which sources judge the XID otherwise, and why the row differs from them.
func (x XIDInfo) differs(from, reason string) XIDInfo {
	x.DiffersFrom, x.Deviation = from, reason
	return x
}

func (x XIDInfo) withAction(action Action) XIDInfo {
	x.Action = action
	return x
}

// xidSymbols are the names in NVIDIA's catalogue, by number, without ROBUST_CHANNEL_. TestXIDTable compares them with it. The catalogue
// lists neither 173 nor the last three; their names are from the driver's header.
//
//nolint:gochecknoglobals // a table of constants
var xidSymbols = [...]string{
	"", "FIFO_ERROR_FIFO_METHOD", "FIFO_ERROR_SW_METHOD", "FIFO_ERROR_UNK_METHOD", "FIFO_ERROR_CHANNEL_BUSY",
	"FIFO_ERROR_RUNOUT_OVERFLOW", "FIFO_ERROR_PARSE_ERR", "FIFO_ERROR_PTE_ERR", "FIFO_ERROR_IDLE_TIMEOUT",
	"GR_ERROR_INSTANCE", "GR_ERROR_SINGLE_STEP", "GR_ERROR_MISSING_HW", "GR_ERROR_SW_METHOD", "GR_EXCEPTION",
	"FAKE_ERROR", "SCANLINE_TIMEOUT", "VBLANK_CALLBACK_TIMEOUT", "PARAMETER_ERROR", "BUS_MASTER_TIMEOUT_ERROR",
	"DISP_MISSED_NOTIFIER", "MPEG_ERROR_SW_METHOD", "ME_ERROR_SW_METHOD", "VP_ERROR_SW_METHOD", "RC_LOGGING_ENABLED",
	"GR_SEMAPHORE_TIMEOUT", "GR_ILLEGAL_NOTIFY", "FIFO_ERROR_FBISTATE_TIMEOUT", "VP_ERROR", "VP2_ERROR", "BSP_ERROR",
	"BAD_ADDR_ACCESS", "FIFO_ERROR_MMU_ERR_FLT", "PBDMA_ERROR", "SEC_ERROR", "MSVLD_ERROR", "MSPDEC_ERROR",
	"MSPPP_ERROR", "FECS_ERR_UNIMP_FIRMWARE_METHOD", "FECS_ERR_WATCHDOG_TIMEOUT", "CE0_ERROR", "CE1_ERROR",
	"CE2_ERROR", "VIC_ERROR", "RESETCHANNEL_VERIF_ERROR", "GR_FAULT_DURING_CTXSW", "PREEMPTIVE_REMOVAL",
	"GPU_TIMEOUT_ERROR", "NVENC0_ERROR", "GPU_ECC_DBE", "SILENT_RUNNING_CONSTANT_LEVEL_SET_BY_REGISTRY",
	"SILENT_RUNNING_LEVEL_TRANSITION_DUE_TO_RC_ERROR", "SILENT_RUNNING_STRESS_TEST_FAILURE",
	"SILENT_RUNNING_LEVEL_TRANS_DUE_TO_TEMP_RISE", "SILENT_RUNNING_TEMP_REDUCED_CLOCKING",
	"SILENT_RUNNING_PWR_REDUCED_CLOCKING", "SILENT_RUNNING_TEMPERATURE_READ_ERROR", "DISPLAY_CHANNEL_EXCEPTION",
	"FB_LINK_TRAINING_FAILURE_ERROR", "FB_MEMORY_ERROR", "PMU_ERROR", "SEC2_ERROR", "PMU_BREAKPOINT",
	"PMU_HALT_ERROR", "INFOROM_DRAM_RETIREMENT_EVENT", "INFOROM_DRAM_RETIREMENT_FAILURE", "NVENC1_ERROR",
	"FECS_ERR_REG_ACCESS_VIOLATION", "FECS_ERR_VERIF_VIOLATION", "NVDEC0_ERROR", "GR_CLASS_ERROR", "CE3_ERROR",
	"CE4_ERROR", "CE5_ERROR", "NVENC2_ERROR", "NVLINK_ERROR", "CE6_ERROR", "CE7_ERROR", "CE8_ERROR",
	"VGPU_START_ERROR", "GPU_HAS_FALLEN_OFF_THE_BUS", "PBDMA_PUSHBUFFER_CRC_MISMATCH", "VGA_SUBSYSTEM_ERROR",
	"NVJPG0_ERROR", "NVDEC1_ERROR", "NVDEC2_ERROR", "CE9_ERROR", "OFA0_ERROR", "NVTELEMETRY_DRIVER_REPORT",
	"NVDEC3_ERROR", "NVDEC4_ERROR", "LTC_ERROR", "RESERVED_XID", "EXCESSIVE_SBE_INTERRUPTS",
	"INFOROM_ERASE_LIMIT_EXCEEDED", "CONTAINED_ERROR", "UNCONTAINED_ERROR", "NVDEC5_ERROR", "NVDEC6_ERROR",
	"NVDEC7_ERROR", "NVJPG1_ERROR", "NVJPG2_ERROR", "NVJPG3_ERROR", "NVJPG4_ERROR", "NVJPG5_ERROR", "NVJPG6_ERROR",
	"NVJPG7_ERROR", "SMBPBI_TEST_MESSAGE", "SMBPBI_TEST_MESSAGE_SILENT", "NVLINK_REMOTE_TRANSLATION_ERROR",
	"CTXSW_TIMEOUT_ERROR", "SEC_FAULT_ERROR", "BUNDLE_ERROR_EVENT", "DISP_SUPERVISOR_ERROR", "DP_LT_FAILURE",
	"HEAD_RG_UNDERFLOW", "CORE_CHANNEL_REGS", "WINDOW_CHANNEL_REGS", "CURSOR_CHANNEL_REGS", "HEAD_REGS",
	"GSP_RPC_TIMEOUT", "GSP_ERROR", "C2C_ERROR", "SPI_PMU_RPC_READ_FAIL", "SPI_PMU_RPC_WRITE_FAIL",
	"SPI_PMU_RPC_ERASE_FAIL", "INFOROM_FS_ERROR", "CE10_ERROR", "CE11_ERROR", "CE12_ERROR", "CE13_ERROR",
	"CE14_ERROR", "CE15_ERROR", "CE16_ERROR", "CE17_ERROR", "CE18_ERROR", "CE19_ERROR", "ALI_TRAINING_FAIL",
	"NVLINK_PRIV_ERR", "DLA_ERROR", "OFA1_ERROR", "UNRECOVERABLE_ECC_ERROR_ESCAPE", "FAST_PATH_ERROR",
	"NVENC3_ERROR", "GPU_INIT_ERROR", "NVLINK_SAW_ERROR", "NVLINK_RLW_ERROR", "NVLINK_TLW_ERROR",
	"NVLINK_TREX_ERROR", "NVLINK_NVLPW_CTRL_ERROR", "NVLINK_NETIR_ERROR", "NVLINK_MSE_ERROR", "KEY_ROTATION_ERROR",
	"DLA_SMMU_ERROR", "DLA_TIMEOUT", "GPU_RECOVERY_ACTION_CHANGED", "NVLINK_SW_DEFINED_ERROR",
	"RESOURCE_RETIREMENT_EVENT", "RESOURCE_RETIREMENT_FAILURE", "GPU_FATAL_TIMEOUT", "CHI_NON_DATA_ERROR",
	"CHANNEL_RETIREMENT_EVENT", "CHANNEL_RETIREMENT_FAILURE", "PSHC_REENGAGED", "PSHC_DISENGAGED",
	"PSHC_LOW_LIFETIME", "PSHC_ZERO_LIFETIME", "NVLINK_SECURE_CRYPTO_ERR", "PCIE_FATAL_TIMEOUT",
	"REDUCED_GPU_MEMORY_CAPACITY", "SEC2_HALT_ERROR", "NVLINK_SECURE_OTHER", "UNCORRECTABLE_DRAM_ERROR",
	"UNCORRECTABLE_SRAM_ERROR", "", "RESETCHANNEL_KILL_PROCESS_SILENT", "MEMORY_SUBSYSTEM_ERROR", "PCIE_CORRECTABLE_ERROR_FAULT",
}
