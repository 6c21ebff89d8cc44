//go:build cgo && linux

package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// SetComputeMode sets the compute mode of a GPU to EXCLUSIVE_PROCESS, or from EXCLUSIVE_PROCESS back to DEFAULT, and returns
// whether it was EXCLUSIVE_PROCESS. It sets no mode that the GPU has already, and refuses to replace PROHIBITED, which an operator
// has set. A GPU in MIG mode has no EXCLUSIVE_PROCESS (MIG user guide). A reboot resets the mode (nvml.h).
func SetComputeMode(gpu health.DeviceID, exclusive bool) (wasExclusive bool, err error) {
	if isMIG(gpu) {
		return false, fmt.Errorf("%s: %w", gpu, errMIGDevice)
	}
	library, release, err := Use()
	if err != nil {
		return false, fmt.Errorf("%s: %w", gpu, err)
	}
	defer release()
	device, ret := library.DeviceGetHandleByUUID(string(gpu))
	if err := failure("nvmlDeviceGetHandleByUUID", ret); err != nil {
		return false, fmt.Errorf("%s: %w", gpu, err)
	}
	if mode, _, ret := device.GetMigMode(); ret == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE {
		if exclusive {
			return false, fmt.Errorf("%s: the GPU is in MIG mode, which has no compute mode EXCLUSIVE_PROCESS", gpu)
		}
		return false, nil
	}
	mode, ret := device.GetComputeMode()
	if err := failure("nvmlDeviceGetComputeMode", ret); err != nil {
		return false, fmt.Errorf("%s: %w", gpu, err)
	}
	wasExclusive = mode == nvml.COMPUTEMODE_EXCLUSIVE_PROCESS
	switch {
	case wasExclusive == exclusive:
		return wasExclusive, nil
	case mode == nvml.COMPUTEMODE_PROHIBITED:
		return false, fmt.Errorf("%s: the compute mode is PROHIBITED; set it to DEFAULT with: nvidia-smi -i %s -c DEFAULT", gpu, gpu)
	}
	mode = nvml.COMPUTEMODE_DEFAULT
	if exclusive {
		mode = nvml.COMPUTEMODE_EXCLUSIVE_PROCESS
	}
	ret = device.SetComputeMode(mode)
	if err := failure("nvmlDeviceSetComputeMode", ret); ret == nvml.ERROR_NO_PERMISSION {
		return wasExclusive, fmt.Errorf("%s: %w; %w", gpu, err, errNoAdmin)
	} else if err != nil {
		return wasExclusive, fmt.Errorf("%s: %w", gpu, err)
	}
	return wasExclusive, nil
}
