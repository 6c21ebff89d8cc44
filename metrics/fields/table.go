package fields

import "github.com/gpu-node-agent/gpu-node-agent/health"

// The sets of fields. metrics.fields accepts the name of a set for all fields in it.
const (
	SetDefault   = "default"   // dcgm-exporter's default fields without the profiling fields
	SetProfiling = "profiling" // the profiling fields of dcgm-exporter's default set
	SetOptional  = "optional"  // fields that dcgm-exporter's default list contains as comments
	setNone      = ""          // in the table, but in no set
)

// The types of a field.
const (
	TypeGauge   = "gauge"
	TypeCounter = "counter"
	TypeLabel   = "label" // not a metric of its own, but a label of all other fields
)

// dcgm-exporter's metrics that are not fields of DCGM. The agent computes them from the snapshot.
const (
	XIDErrorsCount   = "DCGM_EXP_XID_ERRORS_COUNT"
	XIDErrorsTotal   = "DCGM_EXP_XID_ERRORS_TOTAL"
	ClockEventsCount = "DCGM_EXP_CLOCK_EVENTS_COUNT"
	ClockEventsTotal = "DCGM_EXP_CLOCK_EVENTS_TOTAL"
	GPUHealthStatus  = "DCGM_EXP_GPU_HEALTH_STATUS"
	P2PStatus        = "DCGM_EXP_P2P_STATUS"
)

// Text fields that every source provides, by DCGM's number.
const (
	fieldDriverVersion health.Field = 1
	fieldDeviceName    health.Field = 50
	fieldDeviceUUID    health.Field = 54
	fieldDevicePCI     health.Field = 57
)

// row describes a field.
type row struct {
	id      health.Field // 0: computed by the agent
	name    string       // dcgm-exporter 4.8's; 4.9's of a field in base units
	renamed string       // dcgm-exporter 4.9's name of the same field; "" if there is none
	since49 evidence     // of the name and the unit in dcgm-exporter 4.9
	set     string
	typ     string
	unit    string
	help    string
}

// evidence is how a name of dcgm-exporter 4.9 is known. Its list of fields has not been seen; in particular all of its help texts,
// and the type gauge of the rates of NVLink, are inferred.
type evidence byte

const (
	unchanged evidence = iota // 4.8's
	noted                     // the release notes of 4.9 give the name, or the unit of DCGM 4.7's field for the one that it replaces
	inferred                  // DCGM 4.7's name for the field
)

const (
	dev  = "DCGM_FI_DEV_"
	prof = "DCGM_FI_PROF_"
)

// table lists the commonly used fields; dcgm_fields.txt lists the rest. The sets have the names, types and help of dcgm-exporter 4.8
// (default-counters.csv, dcp-metrics-included.csv), so that existing dashboards and alerts keep working; a test compares them with
// testdata/dcgm-exporter.csv. If dcgm-exporter 4.9 has a field in another unit, that field follows it and has another number (see
// newerField). Other fields may have another name there. Numbers and names come from dcgm_fields.txt.
//
//nolint:gochecknoglobals // a table of constants
var table = []row{
	{health.FieldSMClock, dev + "SM_CLOCK", "", unchanged, SetDefault, TypeGauge, "MHz", "SM clock frequency (in MHz)."},
	{health.FieldSMClockHertz, dev + "SM_CLOCK_HERTZ", "", noted, SetDefault, TypeGauge, "Hz", "SM clock frequency (in Hz)."},
	{health.FieldMemClock, dev + "MEM_CLOCK", "", unchanged, SetDefault, TypeGauge, "MHz", "Memory clock frequency (in MHz)."},
	{1604, dev + "MEMORY_CLOCK_HERTZ", "", noted, SetDefault, TypeGauge, "Hz", "Memory clock frequency (in Hz)."},
	{health.FieldMemoryTemp, dev + "MEMORY_TEMP", dev + "MEMORY_TEMP_CELSIUS", inferred, SetDefault, TypeGauge, "°C", "Memory temperature (in C)."},
	{health.FieldGPUTemp, dev + "GPU_TEMP", dev + "GPU_TEMP_CELSIUS", inferred, SetDefault, TypeGauge, "°C", "GPU temperature (in C)."},
	{health.FieldPower, dev + "POWER_USAGE", dev + "BOARD_POWER_WATTS", inferred, SetDefault, TypeGauge, "W", "Power draw (in W)."},
	{health.FieldEnergy, dev + "TOTAL_ENERGY_CONSUMPTION", "", unchanged, SetDefault, TypeCounter, "mJ", "Total energy consumption since boot (in mJ)."},
	{1611, dev + "GPU_ENERGY_JOULES_TOTAL", "", noted, SetDefault, TypeCounter, "J", "Total energy consumption since boot (in J)."},
	{health.FieldPCIeReplays, dev + "PCIE_REPLAY_COUNTER", dev + "PCIE_REPLAY_TOTAL", inferred, SetDefault, TypeCounter, "", "Total number of PCIe retries."},
	{health.FieldGPUUtil, dev + "GPU_UTIL", "", unchanged, SetDefault, TypeGauge, "%", "GPU utilization (in %)."},
	{1613, dev + "GPU_UTIL_RATIO", "", noted, SetDefault, TypeGauge, "0 to 1", "GPU utilization (0 to 1)."},
	{health.FieldMemCopyUtil, dev + "MEM_COPY_UTIL", "", unchanged, SetDefault, TypeGauge, "%", "Memory utilization (in %)."},
	{1614, dev + "MEMORY_UTIL_RATIO", "", noted, SetDefault, TypeGauge, "0 to 1", "Memory utilization (0 to 1)."},
	{health.FieldEncUtil, dev + "ENC_UTIL", "", unchanged, SetDefault, TypeGauge, "%", "Encoder utilization (in %)."},
	{1615, dev + "ENC_UTIL_RATIO", "", noted, SetDefault, TypeGauge, "0 to 1", "Encoder utilization (0 to 1)."},
	{health.FieldDecUtil, dev + "DEC_UTIL", "", unchanged, SetDefault, TypeGauge, "%", "Decoder utilization (in %)."},
	{1616, dev + "DEC_UTIL_RATIO", "", noted, SetDefault, TypeGauge, "0 to 1", "Decoder utilization (0 to 1)."},
	{health.FieldXID, dev + "XID_ERRORS", dev + "XID_ERROR", inferred, SetDefault, TypeGauge, "", "Value of the last XID error encountered."},
	{health.FieldFBFree, dev + "FB_FREE", "", unchanged, SetDefault, TypeGauge, "MiB", "Framebuffer memory free (in MiB)."},
	{1626, dev + "FB_FREE_BYTES", "", noted, SetDefault, TypeGauge, "B", "Framebuffer memory free (in bytes)."},
	{health.FieldFBUsed, dev + "FB_USED", "", unchanged, SetDefault, TypeGauge, "MiB", "Framebuffer memory used (in MiB)."},
	{health.FieldFBUsedBytes, dev + "FB_USED_BYTES", "", noted, SetDefault, TypeGauge, "B", "Framebuffer memory used (in bytes)."},
	{health.FieldFBReserved, dev + "FB_RESERVED", "", unchanged, SetDefault, TypeGauge, "MiB", "Framebuffer memory reserved (in MiB)."},
	{1628, dev + "FB_RESERVED_BYTES", "", noted, SetDefault, TypeGauge, "B", "Framebuffer memory reserved (in bytes)."},
	{health.FieldNVLinkBandwidth, dev + "NVLINK_BANDWIDTH_TOTAL", "", unchanged, SetDefault, TypeCounter, "MB/s", "Total number of NVLink bandwidth counters for all lanes."},
	{1648, dev + "NVLINK_THROUGHPUT_BYTES_PER_SECOND", "", noted, SetDefault, TypeGauge, "B/s", "NVLink throughput of all links, in bytes per second."},
	{health.FieldVGPULicense, dev + "VGPU_LICENSE_STATUS", "", unchanged, SetDefault, TypeGauge, "0 or 1", "vGPU License status"},
	{health.FieldRemappedUncorr, dev + "UNCORRECTABLE_REMAPPED_ROWS", dev + "ROW_REMAP_UNCORRECTABLE_TOTAL", inferred, SetDefault, TypeCounter, "", "Number of remapped rows for uncorrectable errors"},
	{health.FieldRemappedCorr, dev + "CORRECTABLE_REMAPPED_ROWS", dev + "ROW_REMAP_CORRECTABLE_TOTAL", inferred, SetDefault, TypeCounter, "", "Number of remapped rows for correctable errors"},
	{health.FieldRemapFailed, dev + "ROW_REMAP_FAILURE", dev + "ROW_REMAP_FAILED", inferred, SetDefault, TypeGauge, "0 or 1", "Whether remapping of rows has failed"},
	{fieldDriverVersion, "DCGM_FI_DRIVER_VERSION", "DCGM_FI_SYSTEM_DRIVER_VERSION", noted, SetDefault, TypeLabel, "", "Driver Version"},

	// The profiling module needs CAP_SYS_ADMIN, and occupies counters that a profiler may need.
	{1001, prof + "GR_ENGINE_ACTIVE", prof + "GR_ENGINE_UTIL_RATIO", inferred, SetProfiling, TypeGauge, "0 to 1", "Ratio of time the graphics engine is active."},
	{1004, prof + "PIPE_TENSOR_ACTIVE", prof + "TENSOR_UTIL_RATIO", inferred, SetProfiling, TypeGauge, "0 to 1", "Ratio of cycles the tensor (HMMA) pipe is active."},
	{1005, prof + "DRAM_ACTIVE", prof + "DRAM_UTIL_RATIO", inferred, SetProfiling, TypeGauge, "0 to 1", "Ratio of cycles the device memory interface is active sending or receiving data."},
	{1009, prof + "PCIE_TX_BYTES", "", unchanged, SetProfiling, TypeGauge, "B/s", "The rate of data transmitted over the PCIe bus - including both protocol headers and data payloads - in bytes per second."},
	{1010, prof + "PCIE_RX_BYTES", "", unchanged, SetProfiling, TypeGauge, "B/s", "The rate of data received over the PCIe bus - including both protocol headers and data payloads - in bytes per second."},

	{240, dev + "POWER_VIOLATION", "", unchanged, SetOptional, TypeCounter, "ns", "Throttling duration due to power constraints (in ns)."},
	{1617, dev + "GPU_POWER_THROTTLE_SECONDS_TOTAL", "", inferred, SetOptional, TypeCounter, "s", "Throttling duration due to power constraints (in s)."},
	{241, dev + "THERMAL_VIOLATION", "", unchanged, SetOptional, TypeCounter, "ns", "Throttling duration due to thermal constraints (in ns)."},
	{1618, dev + "GPU_THERMAL_THROTTLE_SECONDS_TOTAL", "", inferred, SetOptional, TypeCounter, "s", "Throttling duration due to thermal constraints (in s)."},
	{242, dev + "SYNC_BOOST_VIOLATION", "", unchanged, SetOptional, TypeCounter, "ns", "Throttling duration due to sync-boost constraints (in ns)."},
	{1619, dev + "GPU_SYNC_BOOST_THROTTLE_SECONDS_TOTAL", "", inferred, SetOptional, TypeCounter, "s", "Throttling duration due to sync-boost constraints (in s)."},
	{243, dev + "BOARD_LIMIT_VIOLATION", "", unchanged, SetOptional, TypeCounter, "ns", "Throttling duration due to board limit constraints (in ns)."},
	{1620, dev + "GPU_LIMIT_THROTTLE_SECONDS_TOTAL", "", inferred, SetOptional, TypeCounter, "s", "Throttling duration due to board limit constraints (in s)."},
	{244, dev + "LOW_UTIL_VIOLATION", "", unchanged, SetOptional, TypeCounter, "ns", "Throttling duration due to low utilization (in ns)."},
	{1621, dev + "GPU_LOW_UTIL_THROTTLE_SECONDS_TOTAL", "", inferred, SetOptional, TypeCounter, "s", "Throttling duration due to low utilization (in s)."},
	{245, dev + "RELIABILITY_VIOLATION", "", unchanged, SetOptional, TypeCounter, "ns", "Throttling duration due to reliability constraints (in ns)."},
	{1622, dev + "GPU_RELIABILITY_THROTTLE_SECONDS_TOTAL", "", inferred, SetOptional, TypeCounter, "s", "Throttling duration due to reliability constraints (in s)."},
	{0, ClockEventsCount, "", unchanged, SetOptional, TypeGauge, "", "Clock events observed during the configured time window."},
	{0, XIDErrorsCount, "", unchanged, SetOptional, TypeGauge, "", "XID errors observed during the configured time window."},
	{0, ClockEventsTotal, "", unchanged, SetOptional, TypeCounter, "", "Total clock events observed since exporter start (edge-counted)."},
	{0, XIDErrorsTotal, "", unchanged, SetOptional, TypeCounter, "", "Total XID errors observed since exporter start."},
	{0, GPUHealthStatus, "", unchanged, SetOptional, TypeGauge, "0, 10 or 20", "Current DCGM-reported GPU health status."},
	{0, P2PStatus, "", unchanged, SetOptional, TypeGauge, "", "Current NVLink P2P status per peer link."},
	{310, dev + "ECC_SBE_VOL_TOTAL", "", unchanged, SetOptional, TypeCounter, "", "Total number of single-bit volatile ECC errors."},
	{health.FieldDBEVolatile, dev + "ECC_DBE_VOL_TOTAL", "", unchanged, SetOptional, TypeCounter, "", "Total number of double-bit volatile ECC errors."},
	{312, dev + "ECC_SBE_AGG_TOTAL", "", unchanged, SetOptional, TypeCounter, "", "Total number of single-bit persistent ECC errors."},
	{313, dev + "ECC_DBE_AGG_TOTAL", "", unchanged, SetOptional, TypeCounter, "", "Total number of double-bit persistent ECC errors."},
	{health.FieldRetiredSBE, dev + "RETIRED_SBE", dev + "PAGE_RETIRED_SBE_TOTAL", inferred, SetOptional, TypeCounter, "", "Total number of retired pages due to single-bit errors."},
	{health.FieldRetiredDBE, dev + "RETIRED_DBE", dev + "PAGE_RETIRED_DBE_TOTAL", inferred, SetOptional, TypeCounter, "", "Total number of retired pages due to double-bit errors."},
	{health.FieldRetiredPending, dev + "RETIRED_PENDING", dev + "PAGE_RETIRED_PENDING", inferred, SetOptional, TypeCounter, "", "Total number of pages pending retirement."},
	{409, dev + "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", dev + "NVLINK_CRC_FLIT_ERROR_TOTAL", inferred, SetOptional, TypeCounter, "", "Total number of NVLink flow-control CRC errors."},
	{419, dev + "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", dev + "NVLINK_CRC_DATA_ERROR_TOTAL", inferred, SetOptional, TypeCounter, "", "Total number of NVLink data CRC errors."},
	{429, dev + "NVLINK_REPLAY_ERROR_COUNT_TOTAL", dev + "NVLINK_REPLAY_ERROR_TOTAL", inferred, SetOptional, TypeCounter, "", "Total number of NVLink retries."},
	{439, dev + "NVLINK_RECOVERY_ERROR_COUNT_TOTAL", dev + "NVLINK_RECOVERY_ERROR_TOTAL", inferred, SetOptional, TypeCounter, "", "Total number of NVLink recovery errors."},
	{440, dev + "NVLINK_BANDWIDTH_L0", "", unchanged, SetOptional, TypeCounter, "MB/s", "The number of bytes of active NVLink rx or tx data including both header and payload."},
	{1630, dev + "NVLINK_THROUGHPUT_L0_BYTES_PER_SECOND", "", inferred, SetOptional, TypeGauge, "B/s", "NVLink throughput of link 0, in bytes per second."},
	{2, "DCGM_FI_NVML_VERSION", "DCGM_FI_SYSTEM_NVML_VERSION", inferred, SetOptional, TypeLabel, "", "NVML Version"},
	{51, dev + "BRAND", dev + "GPU_BRAND", inferred, SetOptional, TypeLabel, "", "Device Brand"},
	{53, dev + "SERIAL", dev + "BOARD_SERIAL", inferred, SetOptional, TypeLabel, "", "Device Serial Number"},
	{56, dev + "OEM_INFOROM_VER", dev + "INFOROM_OEM_VERSION", inferred, SetOptional, TypeLabel, "", "OEM inforom version"},
	{80, dev + "ECC_INFOROM_VER", dev + "INFOROM_ECC_VERSION", inferred, SetOptional, TypeLabel, "", "ECC inforom version"},
	{81, dev + "POWER_INFOROM_VER", dev + "INFOROM_POWER_VERSION", inferred, SetOptional, TypeLabel, "", "Power management object inforom version"},
	{82, dev + "INFOROM_IMAGE_VER", dev + "INFOROM_IMAGE_VERSION", inferred, SetOptional, TypeLabel, "", "Inforom image version"},
	{85, dev + "VBIOS_VERSION", "", unchanged, SetOptional, TypeLabel, "", "VBIOS version of the device"},
	{1002, prof + "SM_ACTIVE", prof + "SM_UTIL_RATIO", inferred, SetOptional, TypeGauge, "0 to 1", "The ratio of cycles an SM has at least 1 warp assigned."},
	{1003, prof + "SM_OCCUPANCY", prof + "SM_OCCUPANCY_RATIO", inferred, SetOptional, TypeGauge, "0 to 1", "The ratio of number of warps resident on an SM."},
	{1006, prof + "PIPE_FP64_ACTIVE", prof + "FP64_UTIL_RATIO", inferred, SetOptional, TypeGauge, "0 to 1", "Ratio of cycles the fp64 pipes are active."},
	{1007, prof + "PIPE_FP32_ACTIVE", prof + "FP32_UTIL_RATIO", inferred, SetOptional, TypeGauge, "0 to 1", "Ratio of cycles the fp32 pipes are active."},
	{1008, prof + "PIPE_FP16_ACTIVE", prof + "FP16_UTIL_RATIO", inferred, SetOptional, TypeGauge, "0 to 1", "Ratio of cycles the fp16 pipes are active."},

	// Fields that users often add. dcgm-exporter has no help text for them.
	{fieldDeviceName, dev + "NAME", dev + "GPU_NAME", inferred, setNone, TypeLabel, "", "Name of the device"},
	{fieldDeviceUUID, dev + "UUID", dev + "GPU_UUID", inferred, setNone, TypeLabel, "", "UUID of the device"},
	{fieldDevicePCI, dev + "PCI_BUSID", dev + "PCI_BUS_ID", inferred, setNone, TypeLabel, "", "PCI bus id of the device"},
	{65, dev + "COMPUTE_MODE", dev + "GPU_COMPUTE_MODE", inferred, setNone, TypeGauge, "", "Compute mode."},
	{66, dev + "PERSISTENCE_MODE", dev + "GPU_PERSISTENCE_MODE", inferred, setNone, TypeGauge, "0 or 1", "Persistence mode."},
	{health.FieldMIGMode, dev + "MIG_MODE", "", unchanged, setNone, TypeGauge, "0 or 1", "MIG mode."},
	{90, dev + "BAR1_TOTAL", "", unchanged, setNone, TypeGauge, "MiB", "Total BAR1 memory (in MiB)."},
	{1600, dev + "BAR1_CAPACITY_BYTES", "", inferred, setNone, TypeGauge, "B", "Total BAR1 memory (in bytes)."},
	{92, dev + "BAR1_USED", "", unchanged, setNone, TypeGauge, "MiB", "BAR1 memory used (in MiB)."},
	{1601, dev + "BAR1_USED_BYTES", "", inferred, setNone, TypeGauge, "B", "BAR1 memory used (in bytes)."},
	{93, dev + "BAR1_FREE", "", unchanged, setNone, TypeGauge, "MiB", "BAR1 memory free (in MiB)."},
	{1602, dev + "BAR1_FREE_BYTES", "", inferred, setNone, TypeGauge, "B", "BAR1 memory free (in bytes)."},
	{102, dev + "VIDEO_CLOCK", "", unchanged, setNone, TypeGauge, "MHz", "Video encoder and decoder clock frequency (in MHz)."},
	{1605, dev + "VIDEO_CLOCK_HERTZ", "", inferred, setNone, TypeGauge, "Hz", "Video encoder and decoder clock frequency (in Hz)."},
	{110, dev + "APP_SM_CLOCK", "", unchanged, setNone, TypeGauge, "MHz", "SM application clock (in MHz)."},
	{1606, dev + "SM_APP_CLOCK_HERTZ", "", inferred, setNone, TypeGauge, "Hz", "SM application clock (in Hz)."},
	{111, dev + "APP_MEM_CLOCK", "", unchanged, setNone, TypeGauge, "MHz", "Memory application clock (in MHz)."},
	{1607, dev + "MEMORY_APP_CLOCK_HERTZ", "", inferred, setNone, TypeGauge, "Hz", "Memory application clock (in Hz)."},
	{health.FieldClocksEvents, dev + "CLOCKS_EVENT_REASONS", "", unchanged, setNone, TypeGauge, "bits", "Reasons for reduced clocks (bit mask)."},
	{113, dev + "MAX_SM_CLOCK", "", unchanged, setNone, TypeGauge, "MHz", "Maximum SM clock (in MHz)."},
	{1608, dev + "SM_MAX_CLOCK_HERTZ", "", inferred, setNone, TypeGauge, "Hz", "Maximum SM clock (in Hz)."},
	{114, dev + "MAX_MEM_CLOCK", "", unchanged, setNone, TypeGauge, "MHz", "Maximum memory clock (in MHz)."},
	{1609, dev + "MEMORY_MAX_CLOCK_HERTZ", "", inferred, setNone, TypeGauge, "Hz", "Maximum memory clock (in Hz)."},
	{115, dev + "MAX_VIDEO_CLOCK", "", unchanged, setNone, TypeGauge, "MHz", "Maximum video encoder and decoder clock (in MHz)."},
	{1610, dev + "VIDEO_MAX_CLOCK_HERTZ", "", inferred, setNone, TypeGauge, "Hz", "Maximum video encoder and decoder clock (in Hz)."},
	{151, dev + "MEM_MAX_OP_TEMP", dev + "MEMORY_MAX_OP_TEMP_CELSIUS", inferred, setNone, TypeGauge, "°C", "Maximum operating temperature of the memory (in C)."},
	{152, dev + "GPU_MAX_OP_TEMP", dev + "GPU_MAX_OP_TEMP_CELSIUS", inferred, setNone, TypeGauge, "°C", "Maximum operating temperature of the GPU (in C)."},
	{153, dev + "GPU_TEMP_LIMIT", dev + "GPU_TEMP_MARGIN_CELSIUS", inferred, setNone, TypeGauge, "°C", "Thermal margin to slowdown (in C)."},
	{157, dev + "POWER_USAGE_INSTANT", dev + "BOARD_POWER_RAW_WATTS", inferred, setNone, TypeGauge, "W", "Instantaneous power draw (in W)."},
	{158, dev + "SLOWDOWN_TEMP", dev + "GPU_TEMP_SLOWDOWN_CELSIUS", inferred, setNone, TypeGauge, "°C", "Slowdown temperature (in C)."},
	{159, dev + "SHUTDOWN_TEMP", dev + "GPU_TEMP_SHUTDOWN_CELSIUS", inferred, setNone, TypeGauge, "°C", "Shutdown temperature (in C)."},
	{160, dev + "POWER_MGMT_LIMIT", dev + "BOARD_POWER_LIMIT_REQUESTED_WATTS", inferred, setNone, TypeGauge, "W", "Requested power limit (in W)."},
	{161, dev + "POWER_MGMT_LIMIT_MIN", dev + "BOARD_POWER_LIMIT_MIN_WATTS", inferred, setNone, TypeGauge, "W", "Minimum power limit (in W)."},
	{162, dev + "POWER_MGMT_LIMIT_MAX", dev + "BOARD_POWER_LIMIT_MAX_WATTS", inferred, setNone, TypeGauge, "W", "Maximum power limit (in W)."},
	{163, dev + "POWER_MGMT_LIMIT_DEF", dev + "BOARD_POWER_LIMIT_DEFAULT_WATTS", inferred, setNone, TypeGauge, "W", "Default power limit (in W)."},
	{164, dev + "ENFORCED_POWER_LIMIT", dev + "BOARD_POWER_LIMIT_ENFORCED_WATTS", inferred, setNone, TypeGauge, "W", "Enforced power limit (in W)."},
	{170, dev + "FABRIC_MANAGER_STATUS", "", unchanged, setNone, TypeGauge, "", "Fabric manager status."},
	{190, dev + "PSTATE", dev + "GPU_PSTATE", inferred, setNone, TypeGauge, "", "Performance state."},
	{191, dev + "FAN_SPEED", "", unchanged, setNone, TypeGauge, "%", "Fan speed (in %)."},
	{1612, dev + "FAN_SPEED_RATIO", "", inferred, setNone, TypeGauge, "0 to 1", "Fan speed (0 to 1; more than 1 is possible)."},
	{200, dev + "PCIE_TX_THROUGHPUT", "", unchanged, setNone, TypeCounter, "KB", "Total number of bytes transmitted through PCIe TX (in KB) via NVML."},
	{201, dev + "PCIE_RX_THROUGHPUT", "", unchanged, setNone, TypeCounter, "KB", "Total number of bytes received through PCIe RX (in KB) via NVML."},
	{235, dev + "PCIE_MAX_LINK_GEN", "", unchanged, setNone, TypeGauge, "", "Maximum PCIe link generation of the device."},
	{236, dev + "PCIE_MAX_LINK_WIDTH", "", unchanged, setNone, TypeGauge, "", "Maximum PCIe link width of the device."},
	{237, dev + "PCIE_LINK_GEN", "", unchanged, setNone, TypeGauge, "", "Current PCIe link generation."},
	{238, dev + "PCIE_LINK_WIDTH", "", unchanged, setNone, TypeGauge, "", "Current PCIe link width."},
	{246, dev + "TOTAL_APP_CLOCKS_VIOLATION", "", unchanged, setNone, TypeCounter, "ns", "Throttling duration below the application clocks (in ns)."},
	{1623, dev + "GPU_APP_THROTTLE_SECONDS_TOTAL", "", inferred, setNone, TypeCounter, "s", "Throttling duration below the application clocks (in s)."},
	{247, dev + "TOTAL_BASE_CLOCKS_VIOLATION", "", unchanged, setNone, TypeCounter, "ns", "Throttling duration below the base clocks (in ns)."},
	{1624, dev + "GPU_BASE_THROTTLE_SECONDS_TOTAL", "", inferred, setNone, TypeCounter, "s", "Throttling duration below the base clocks (in s)."},
	{health.FieldFBTotal, dev + "FB_TOTAL", "", unchanged, setNone, TypeGauge, "MiB", "Total framebuffer memory (in MiB)."},
	{1625, dev + "FB_CAPACITY_BYTES", "", noted, SetDefault, TypeGauge, "B", "Total framebuffer memory (in bytes)."},
	{254, dev + "FB_USED_PERCENT", dev + "FB_USED_RATIO", inferred, setNone, TypeGauge, "0 to 1", "Used fraction of the framebuffer memory that is not reserved (0 to 1)."},
	{300, dev + "ECC_CURRENT", dev + "ECC_MODE", inferred, setNone, TypeGauge, "0 or 1", "ECC mode."},
	{health.FieldRemapPending, dev + "ROW_REMAP_PENDING", "", unchanged, setNone, TypeGauge, "0 or 1", "Whether remapping of rows is pending"},
	{health.FieldUnrepairable, dev + "MEMORY_UNREPAIRABLE_FLAG", dev + "MEMORY_UNREPAIRABLE", inferred, setNone, TypeGauge, "0 or 1", "Whether memory cannot be repaired."},
	{health.FieldRecoveryAction, dev + "GET_GPU_RECOVERY_ACTION", dev + "GPU_RECOVERY_ACTION", inferred, setNone, TypeGauge, "0 to 7", "Recovery action that the driver requests."},
	{1011, prof + "NVLINK_TX_BYTES", "", unchanged, setNone, TypeGauge, "B/s", "The rate of data transmitted over NVLink, not including protocol headers, in bytes per second."},
	{1012, prof + "NVLINK_RX_BYTES", "", unchanged, setNone, TypeGauge, "B/s", "The rate of data received over NVLink, not including protocol headers, in bytes per second."},
	{1013, prof + "PIPE_TENSOR_IMMA_ACTIVE", prof + "IMMA_UTIL_RATIO", inferred, setNone, TypeGauge, "0 to 1", "Ratio of cycles the tensor (IMMA) pipe is active."},
	{1014, prof + "PIPE_TENSOR_HMMA_ACTIVE", prof + "HMMA_UTIL_RATIO", inferred, setNone, TypeGauge, "0 to 1", "Ratio of cycles the tensor (HMMA) pipe is active."},
	{1015, prof + "PIPE_TENSOR_DFMA_ACTIVE", prof + "DFMA_UTIL_RATIO", inferred, setNone, TypeGauge, "0 to 1", "Ratio of cycles the tensor (DFMA) pipe is active."},
	{1016, prof + "PIPE_INT_ACTIVE", prof + "INT_UTIL_RATIO", inferred, setNone, TypeGauge, "0 to 1", "Ratio of cycles the integer pipe is active."},
}
