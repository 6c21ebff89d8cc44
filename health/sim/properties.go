package sim

import "github.com/gpu-node-agent/gpu-node-agent/health"

// properties returns what NVML has of a GPU. On x86 the open kernel modules address memory by HMM; they need Turing.
func (m model) properties() *health.Properties {
	p := &health.Properties{Brand: "Nvidia", AddressingMode: "HMM"}
	if m.capability.Major < 8 {
		p.Brand, p.AddressingMode = "Tesla", ""
	}
	return p
}

// migProperties returns what NVML has of a MIG device.
func (m model) migProperties(s slice) *health.Properties {
	p := m.properties()
	mig := migProfileProperties(s.profile)
	mig.PlacementStart = s.start
	p.MIG = &mig
	return p
}

// migProfileProperties returns the properties of a profile of an H100 80GB as nvidia-smi mig -lgip and -lgipp print them.
func migProfileProperties(profile string) health.MIGProperties {
	switch profile {
	case "1g.10gb":
		return health.MIGProperties{ProfileID: 19, MemorySlices: 1, Multiprocessors: 16, CopyEngines: 1, Decoders: 1, JPEGEngines: 1}
	case "2g.20gb":
		return health.MIGProperties{ProfileID: 14, MemorySlices: 2, Multiprocessors: 32, CopyEngines: 2, Decoders: 2, JPEGEngines: 2}
	case "3g.40gb":
		return health.MIGProperties{ProfileID: 9, MemorySlices: 4, Multiprocessors: 60, CopyEngines: 3, Decoders: 3, JPEGEngines: 3}
	}
	return health.MIGProperties{}
}
