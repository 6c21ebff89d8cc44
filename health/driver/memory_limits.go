package driver

import (
	"errors"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// NoMemoryLimit is the hard limit of a cgroup without one (nvml.h, NVML_DEVICE_MEMORY_LIMIT_MAX).
const NoMemoryLimit = ^uint64(0)

// MemoryLimits are the driver's limits of framebuffer for the processes of a cgroup, in bytes.
type MemoryLimits struct {
	Soft uint64 // guaranteed
	Hard uint64 // the most that can be allocated
	Used uint64
}

// ErrNoMemoryLimits is the error of a cgroup without limits.
var ErrNoMemoryLimits = errors.New("no memory limits are set for the cgroup")

// MemoryLimiter sets and reads the driver's memory limits (driver 615 or newer). A call may hang for as long as the driver does.
type MemoryLimiter interface {
	// Supported returns why the driver cannot limit the memory of a device; nil if it can.
	Supported(id health.DeviceID) error
	// Limits returns the limits of the cgroup whose directory is at path, ErrNoMemoryLimits if it has none.
	Limits(id health.DeviceID, cgroup string) (MemoryLimits, error)
	SetLimits(id health.DeviceID, cgroup string, soft, hard uint64) error
}
