package mps

import (
	"context"
	"errors"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// SetComputeMode sets whether one process only may use a GPU (EXCLUSIVE_PROCESS), and returns what it was.
type SetComputeMode func(gpu health.DeviceID, exclusive bool) (wasExclusive bool, err error)

// Supervisor runs the daemons that the Follower wants.
type Supervisor struct {
	Root        Root
	ComputeMode SetComputeMode // nil if the GPUs are simulated
	Log         *zap.Logger
}

// Run runs daemons until ctx ends, then stops them.
func (s *Supervisor) Run(context.Context) error { return errors.New("not implemented") }
