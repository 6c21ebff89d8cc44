//go:build cgo && linux

package nvml

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

// memoryLimitsDriver is the first driver with memory limits (NVML's change log from v610 to v615).
const memoryLimitsDriver = "615"

// cgroupRoot is a cgroup that exists on every node.
const cgroupRoot = "/sys/fs/cgroup"

const (
	getMemoryLimits = "nvmlDeviceGetMemoryLimits_v1"
	setMemoryLimits = "nvmlDeviceSetMemoryLimits_v1"
)

var (
	errMIGDevice = errors.New("a MIG device; the driver supports this on whole GPUs only")
	errNoAdmin   = errors.New("the driver allows this with CAP_SYS_ADMIN only, as in a privileged container")
)

// OpenMemoryLimits loads NVML and returns the driver's memory limits. The driver's files are open until release is called. Both
// belong to one goroutine.
func OpenMemoryLimits() (limits driver.MemoryLimiter, release func(), err error) {
	u, err := openUse()
	if err != nil {
		return nil, nil, err
	}
	return memoryLimiter{u}, u.end, nil
}

type memoryLimiter struct{ *use }

// Supported returns why the driver cannot limit the memory of a device. It reads limits and sets none.
func (m memoryLimiter) Supported(id health.DeviceID) error {
	_, err := m.Limits(id, cgroupRoot)
	if errors.Is(err, driver.ErrNoMemoryLimits) {
		return nil
	}
	return err
}

// Limits returns the limits of a cgroup. With ErrNoMemoryLimits, Used may be set.
func (m memoryLimiter) Limits(id health.DeviceID, cgroup string) (limits driver.MemoryLimits, err error) {
	err = m.call(id, cgroup, getMemoryLimits, func(device nvml.Device) nvml.Return {
		got, ret := device.GetMemoryLimits_v1(cgroup)
		limits = driver.MemoryLimits{Soft: got.SoftLimit, Hard: got.HardLimit, Used: got.CurrentUsed}
		return ret
	})
	switch {
	case err != nil:
		return driver.MemoryLimits{}, err
	case limits.Soft == 0 && limits.Hard == driver.NoMemoryLimit:
		return limits, fmt.Errorf("%s: %s: %w", id, cgroup, driver.ErrNoMemoryLimits)
	}
	return limits, nil
}

// SetLimits sets the limits of a cgroup; 0 and driver.NoMemoryLimit remove them.
func (m memoryLimiter) SetLimits(id health.DeviceID, cgroup string, soft, hard uint64) error {
	return m.call(id, cgroup, setMemoryLimits, func(device nvml.Device) nvml.Return {
		return device.SetMemoryLimits_v1(cgroup, soft, hard)
	})
}

// call calls a function of a GPU. Its errors name the device, the cgroup, what failed and, where it is known, what is needed.
func (m memoryLimiter) call(id health.DeviceID, cgroup, name string, function func(nvml.Device) nvml.Return) error {
	if isMIG(id) {
		return fmt.Errorf("%s: %w", id, errMIGDevice)
	}
	library, err := m.get()
	if err != nil {
		return fmt.Errorf("%s: %w", id, err)
	}
	device, ret := library.DeviceGetHandleByUUID(string(id))
	if ret == nvml.SUCCESS {
		ret = function(device)
	} else {
		name = "nvmlDeviceGetHandleByUUID"
	}
	err = failure(name, ret)
	m.endAfter(err)
	switch {
	case err == nil:
		return nil
	case ret == nvml.ERROR_FUNCTION_NOT_FOUND:
		version, _ := library.SystemGetDriverVersion()
		return fmt.Errorf("%s: driver %s or newer is needed, this is %s: %w", id, memoryLimitsDriver, cmp.Or(version, "unknown"), err)
	case ret == nvml.ERROR_NOT_SUPPORTED:
		return fmt.Errorf("%s: the driver cannot limit the memory of this GPU: %w", id, err)
	case ret == nvml.ERROR_NOT_FOUND && name == getMemoryLimits:
		return fmt.Errorf("%s: %s: %w", id, cgroup, driver.ErrNoMemoryLimits)
	case ret == nvml.ERROR_NO_PERMISSION:
		return fmt.Errorf("%s: %s: %w; %w", id, cgroup, err, errNoAdmin)
	}
	return fmt.Errorf("%s: %s: %w", id, cgroup, err)
}

func isMIG(id health.DeviceID) bool { return strings.HasPrefix(string(id), "MIG-") }
