package dra

import (
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// PCIeRoots reads the PCIe root of each GPU from sysfs, for PoolInput. It leaves out GPUs that sysfs lacks, such as simulated ones.
func PCIeRoots(devices []health.DeviceState, sysfs ...deviceattribute.MachineModifier) map[string]string {
	roots := make(map[string]string)
	for i := range devices {
		d := &devices[i].Device
		id, ok := pciBusID(d.PCI)
		if !ok || d.Kind != health.KindGPU {
			continue
		}
		if a, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(id, sysfs...); err == nil {
			roots[d.PCI] = *a.Value.StringValue
		}
	}
	return roots
}
