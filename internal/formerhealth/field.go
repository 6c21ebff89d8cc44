package formerhealth

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
