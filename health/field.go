package health

import "math"

// Field is the DCGM field identifier of a measured quantity (dcgm_fields.h). The numbers are NVIDIA's; this package does not
// depend on the bindings.
type Field uint16

// The fields that the agent itself uses. It passes others through by number.
const (
	FieldSerial          Field = 53   // text: serial number of the board
	FieldMIGMode         Field = 67   // 0 or 1
	FieldSMClock         Field = 100  // MHz
	FieldMemClock        Field = 101  // MHz
	FieldClocksEvents    Field = 112  // bits: why the clocks are below the requested ones
	FieldMemoryTemp      Field = 140  // °C
	FieldGPUTemp         Field = 150  // °C
	FieldPower           Field = 155  // W
	FieldEnergy          Field = 156  // mJ since the driver was loaded
	FieldPowerLimit      Field = 164  // W: the enforced one
	FieldPCIeReplays     Field = 202  // count
	FieldGPUUtil         Field = 203  // percent
	FieldMemCopyUtil     Field = 204  // percent
	FieldEncUtil         Field = 206  // percent
	FieldDecUtil         Field = 207  // percent
	FieldXID             Field = 230  // number of the last XID; 0: none
	FieldFBTotal         Field = 250  // MiB
	FieldFBFree          Field = 251  // MiB
	FieldFBUsed          Field = 252  // MiB
	FieldFBReserved      Field = 253  // MiB
	FieldDBEVolatile     Field = 311  // double-bit ECC errors since the last reset or driver load
	FieldRetiredSBE      Field = 390  // pages retired for single-bit errors
	FieldRetiredDBE      Field = 391  // pages retired for double-bit errors
	FieldRetiredPending  Field = 392  // pages pending retirement: 0 or 1
	FieldRemappedUncorr  Field = 393  // rows
	FieldRemappedCorr    Field = 394  // rows
	FieldRemapFailed     Field = 395  // 0 or 1
	FieldRemapPending    Field = 396  // 0 or 1
	FieldNVLinkBandwidth Field = 449  // as the driver counts it, all lanes
	FieldVGPULicense     Field = 526  // 0 or 1
	FieldEngineActive    Field = 1001 // ratio of time that the graphics engine is active
	FieldUnrepairable    Field = 1507 // memory that cannot be repaired: 0 or 1
	FieldRecoveryAction  Field = 1523 // a RecoveryAction
	FieldSMClockHertz    Field = 1603 // replaces FieldSMClock
	FieldFBUsedBytes     Field = 1627 // replaces FieldFBUsed
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

// EntityKind is the kind of an Entity.
type EntityKind uint8

// The kinds of entities that a source measures beside the devices.
const (
	EntityNVSwitch   EntityKind = iota
	EntitySwitchLink            // a port of an NVSwitch
	EntityGPULink               // an NVLink of a GPU
	EntityCPU
	EntityCPUCore
)

// Entity is hardware that the source measures beside the devices. It is measured for metrics only: it has no health.
type Entity struct {
	Kind   EntityKind
	ID     uint     // DCGM's number; of a link its number in the NVSwitch or GPU
	Parent uint     // DCGM's number of a link's NVSwitch or GPU, or of a core's CPU
	GPU    DeviceID // of an EntityGPULink; "" if the GPU is not listed

	Values map[Field]float64 // a blank is absent, never 0; not modified once returned
	Texts  map[Field]string  // the same for fields with a text
}

// Derivation derives a field in base units from the older field of DCGM that measures the same: value × Mul ÷ Div.
type Derivation struct {
	From     Field
	Mul, Div float64 // one of them is 1, so that the result is the nearest float64
	Floor    bool    // the field is an integer, but the quotient need not be
}

// Apply returns the value in base units of a value of From.
func (d Derivation) Apply(v float64) float64 {
	v = v * d.Mul / d.Div
	if d.Floor {
		return math.Floor(v)
	}
	return v
}

// DerivationOf returns how a field in base units follows from an older field, false if there is no exact way: the rates of
// NVLink are KiB x 1024 and KiB / 1000, for example.
func DerivationOf(id Field) (Derivation, bool) {
	d, ok := derivations[id]
	return d, ok
}

// LastBaseUnitField is the last of the fields in base units, which begin with 1600, of DCGM 4.7.
const LastBaseUnitField Field = 1650

// AddedIn returns the version of DCGM that added a field in base units, and "" for other fields: 1600 to 1612 are in the
// dcgm_fields.h of 4.6.1; the others, of 4.7, are second hand from NVIDIA's field reference.
func AddedIn(id Field) string {
	switch {
	case id >= 1600 && id <= 1612:
		return "4.6.1"
	case id >= 1613 && id <= LastBaseUnitField:
		return "4.7"
	}
	return ""
}

// derivations lists the fields in base units that follow from older ones, which DCGM keeps measuring.
//
//nolint:gochecknoglobals // a table of constants
var derivations = func() map[Field]Derivation {
	all := make(map[Field]Derivation)
	add := func(first Field, mul, div float64, from ...Field) {
		for i, f := range from {
			all[first+Field(i)] = Derivation{From: f, Mul: mul, Div: div}
		}
	}
	const mebi = 1 << 20
	add(1600, mebi, 1, 90, 92, 93)                                               // BAR1: MiB to bytes
	add(1603, 1e6, 1, FieldSMClock, FieldMemClock, 102, 110, 111, 113, 114, 115) // clocks: MHz to Hz
	all[1611] = Derivation{From: FieldEnergy, Mul: 1, Div: 1e3, Floor: true}     // mJ to J
	add(1612, 1, 100, 191)                                                       // fan speed: percent to ratio
	add(1613, 1, 100, FieldGPUUtil, FieldMemCopyUtil, FieldEncUtil, FieldDecUtil)
	add(1617, 1, 1e9, 240, 241, 242, 243, 244, 245, 246, 247) // throttling: ns to s
	add(1625, mebi, 1, FieldFBTotal, FieldFBFree, FieldFBUsed, FieldFBReserved)
	return all
}()
