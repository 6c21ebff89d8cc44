// Package driver is the vocabulary of what the agent asks the driver beside DCGM: processes, memory limits and the compute mode.
package driver

import (
	"context"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// ProcessKind is what a process uses a device for.
type ProcessKind uint8

// The kinds of process (nvml.h: the lists of compute, graphics and MPS processes).
const (
	ProcessCompute ProcessKind = iota
	ProcessGraphics
	ProcessMPS // a client of the MPS server
)

//nolint:gochecknoglobals // a table of constants
var processKindNames = [...]string{"compute", "graphics", "mps"}

func (k ProcessKind) String() string { return health.EnumName(processKindNames[:], int(k)) }

// Process is a process with a context on a device.
type Process struct {
	Device health.DeviceID // the MIG device, if the driver names one
	PID    int             // in the host's PID namespace
	Kind   ProcessKind

	// What the driver does not report is absent.
	Memory, SM       float64 // framebuffer in bytes; share of the time in which its kernels ran, 0 to 1
	HasMemory, HasSM bool
}

// ProcessReading is one measurement of the processes of all devices.
type ProcessReading struct {
	At        time.Time
	Processes []Process
	Measured  []health.DeviceID // the devices whose processes are all in Processes; other devices' processes are unknown
}

// ProcessLister lists the processes of the devices. A call may hang for as long as the driver does.
type ProcessLister func(ctx context.Context, devices []health.Device) (*ProcessReading, error)
