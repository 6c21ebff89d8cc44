//go:build !cgo || !linux

package nvml

import (
	"context"
	"errors"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
)

var errNoCGO = errors.New("built without NVML; build for Linux with CGO_ENABLED=1")

// Path fails: NVML needs Linux and cgo.
func Path() (string, error) { return "", errNoCGO }

// Events returns an event source that is down: NVML needs Linux and cgo.
func Events(*zap.Logger, func() []string) func(context.Context, health.EventReceiver) {
	return func(ctx context.Context, to health.EventReceiver) {
		to.SetEvents(errNoCGO)
		<-ctx.Done()
	}
}

// OpenProcesses fails: NVML needs Linux and cgo.
func OpenProcesses() (list driver.ProcessLister, release func(), err error) {
	return nil, nil, errNoCGO
}

// OpenMemoryLimits fails: NVML needs Linux and cgo.
func OpenMemoryLimits() (limits driver.MemoryLimiter, release func(), err error) {
	return nil, nil, errNoCGO
}

// RecoveryAction fails: NVML needs Linux and cgo.
func RecoveryAction(health.DeviceID) (health.RecoveryAction, error) { return 0, errNoCGO }

// ComputeMode fails: NVML needs Linux and cgo.
func ComputeMode(health.DeviceID) (driver.ComputeMode, error) { return 0, errNoCGO }

// SetComputeMode fails: NVML needs Linux and cgo.
func SetComputeMode(health.DeviceID, driver.ComputeMode) error { return errNoCGO }

// Properties returns a function that knows no properties: NVML needs Linux and cgo.
func Properties(*zap.Logger) func(context.Context, []health.Device) map[health.DeviceID]*health.Properties {
	return func(context.Context, []health.Device) map[health.DeviceID]*health.Properties { return nil }
}
