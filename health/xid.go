package health

import (
	"slices"
	"strconv"
)

// Effect is what an XID does to the device that reported it.
type Effect uint8

// The effects of an XID.
const (
	EffectIgnore    Effect = iota // an application's error: counted, nothing else
	EffectWarn                    // Degraded for a while
	EffectUnhealthy               // Unhealthy until there is evidence that it is cured
)

// XIDInfo is what is known of an XID number.
type XIDInfo struct {
	Code   int
	Name   string // in words
	Effect Effect
	Action string // what a person should do
	Clears Clears
	Source string // who says so
}

// Actions that several rows share.
const (
	actionNone     = "none: restart the application"
	actionReset    = "drain the node and reset the GPU"
	actionReboot   = "drain and reboot the node"
	actionWatch    = "watch the device; look the XID up in NVIDIA's catalogue"
	sourceNVIDIA   = "NVIDIA XID catalogue (docs.nvidia.com/deploy/xid-errors)"
	sourcePlugin   = "NVIDIA k8s-device-plugin, internal/rm/health.go: application errors"
	sourceDCGM     = "DCGM 4.6 health checks: FAIL on any system"
	sourceBoth     = sourceNVIDIA + "; " + sourceDCGM
	sourceUnlisted = "not in the table"
)

// xidTable is the beginning of the XID catalogue: what is certain to be fatal and what is certain not to be.
//
//nolint:gochecknoglobals // a table of constants
var xidTable = []XIDInfo{
	{13, "graphics engine exception", EffectIgnore, actionNone, ClearsItself, sourcePlugin},
	{31, "GPU memory page fault", EffectIgnore, actionNone, ClearsItself, sourcePlugin},
	{43, "GPU stopped processing", EffectIgnore, actionNone, ClearsItself, sourcePlugin},
	{45, "preemptive cleanup, due to previous errors", EffectIgnore, actionNone, ClearsItself, sourcePlugin},
	{48, "double-bit ECC error", EffectUnhealthy, actionReset, ClearsGPUReset, sourceBoth},
	{62, "internal micro-controller halt", EffectUnhealthy, actionReset, ClearsGPUReset, sourceNVIDIA},
	{64, "row remapper or page retirement failed to record", EffectUnhealthy, actionReset, ClearsGPUReset, sourceNVIDIA},
	{68, "video processor exception", EffectIgnore, actionNone, ClearsItself, sourcePlugin},
	{74, "NVLink error", EffectUnhealthy, actionReset, ClearsGPUReset, sourceBoth},
	// The catalogue wants a reboot. A GPU that is seen on the bus again has not fallen off it any more,
	// so its return, which counts as a reset, clears the finding too.
	{79, "GPU has fallen off the bus", EffectUnhealthy, actionReboot, ClearsGPUReset, sourceBoth},
	{95, "uncontained ECC error", EffectUnhealthy, actionReset, ClearsGPUReset, sourceBoth},
	// The catalogue says RESET_GPU, the device plugin calls it an application error. The driver's own
	// recovery action settles it: if a reset is needed, that finding says so.
	{109, "context switch timeout", EffectIgnore, actionNone, ClearsItself, sourcePlugin},
	{119, "GSP RPC timeout", EffectUnhealthy, actionReset, ClearsGPUReset, sourceBoth},
	{120, "GSP error", EffectUnhealthy, actionReset, ClearsGPUReset, sourceBoth},
	{140, "unrecovered ECC error", EffectUnhealthy, actionReset, ClearsGPUReset, sourceBoth},
}

// LookupXID returns what is known of an XID. One that is not in the table is a warning.
func LookupXID(code int) XIDInfo {
	i, ok := slices.BinarySearchFunc(xidTable, code, func(x XIDInfo, code int) int { return x.Code - code })
	if ok {
		return xidTable[i]
	}
	return XIDInfo{
		Code: code, Name: "XID " + strconv.Itoa(code), Effect: EffectWarn,
		Action: actionWatch, Clears: ClearsItself, Source: sourceUnlisted,
	}
}
