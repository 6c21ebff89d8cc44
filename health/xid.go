package health

import "strconv"

// Effect is what an XID, or an incident of DCGM's, does to the device that reported it.
type Effect uint8

// The effects, in the order of their severity.
const (
	EffectIgnore    Effect = iota // counted, nothing else
	EffectWarn                    // Degraded for a while
	EffectUnhealthy               // Unhealthy until there is evidence that it is cured
)

//nolint:gochecknoglobals // a table of constants
var effectNames = [...]string{"ignore", "warn", "unhealthy"}

func (e Effect) String() string { return name(effectNames[:], int(e)) }

// XIDInfo is what is known of an XID number.
type XIDInfo struct {
	Code   int
	Symbol string // NVIDIA's name, such as GPU_ECC_DBE; empty if it has none
	Name   string // its meaning in words
	Effect Effect
	Action Action // what an operator should do
	Clears Clears
	Source string // who says so

	// FollowsRecoveryAction: the number alone does not tell how bad it is, and the driver's recovery action
	// does. If that wants a reset too, the XID is Unhealthy until one was seen.
	FollowsRecoveryAction bool
	// WholeGPU: reported of a MIG device, the XID is of its whole GPU all the same. Of others only the instance is meant.
	WholeGPU bool
	// Deviation tells where we differ from NVIDIA's catalogue, and why; empty if we do not.
	Deviation string
}

// LookupXID returns what is known of an XID. One that is not in the table is a warning.
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
