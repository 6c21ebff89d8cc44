package formerhealth

// Properties are what NVML knows of a device and DCGM does not. Like Device, they stay fixed until the device is removed or repartitioned.
type Properties struct {
	Brand          string // as NVML names it: Nvidia, Tesla, GeForce; empty if unknown
	AddressingMode string // HMM, ATS or None; empty if unknown
	Serial         string // of the GPU's board; empty if unknown

	// Clique names the GPUs that NVLinks connect across nodes, as CLUSTER.CLIQUE; empty if there is no such fabric, or while FabricPending.
	Clique        string
	FabricPending bool // the GPU has not joined its fabric yet, or the driver did not say whether it has

	MIG *MIGProperties // of a MIG device; nil for a GPU, and if unknown
}

// MIGProperties describe the GPU instance of a MIG device.
type MIGProperties struct {
	ProfileID      int // of the GPU instance's profile, as nvidia-smi mig -lgip prints it: 19 for 1g.10gb of an H100
	PlacementStart int // its first memory slice
	MemorySlices   int

	Multiprocessors, CopyEngines, Decoders, Encoders, JPEGEngines, OFAEngines int
}
