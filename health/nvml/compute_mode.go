//go:build cgo && linux

package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// ComputeMode returns the compute mode of a GPU. In MIG mode that is the default (MIG user guide).
func ComputeMode(gpu health.DeviceID) (mode driver.ComputeMode, err error) {
	err = withGPU(gpu, func(device nvml.Device) error {
		if inMIGMode(device) {
			return nil
		}
		m, ret := device.GetComputeMode()
		mode = driver.ComputeMode(m)
		return failure("nvmlDeviceGetComputeMode", ret)
	})
	return mode, err
}

// SetComputeMode sets the compute mode of a GPU. A reboot resets the mode (nvml.h).
func SetComputeMode(gpu health.DeviceID, mode driver.ComputeMode) error {
	return withGPU(gpu, func(device nvml.Device) error {
		if inMIGMode(device) {
			return fmt.Errorf("the GPU is in MIG mode, which has no compute mode %s", mode)
		}
		ret := device.SetComputeMode(nvml.ComputeMode(mode))
		err := failure("nvmlDeviceSetComputeMode", ret)
		if ret == nvml.ERROR_NO_PERMISSION {
			err = fmt.Errorf("%w; %w", err, errNoAdmin)
		}
		return err
	})
}

func inMIGMode(device nvml.Device) bool {
	mode, _, ret := device.GetMigMode()
	return ret == nvml.SUCCESS && mode == nvml.DEVICE_MIG_ENABLE
}

// withGPU calls f with a GPU while NVML is in use. Errors name the GPU.
func withGPU(gpu health.DeviceID, f func(nvml.Device) error) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", gpu, err)
		}
	}()
	if isMIG(gpu) {
		return errMIGDevice
	}
	library, release, err := Use()
	if err != nil {
		return err
	}
	defer release()
	device, ret := library.DeviceGetHandleByUUID(string(gpu))
	if err := failure("nvmlDeviceGetHandleByUUID", ret); err != nil {
		return err
	}
	return f(device)
}
