//go:build cgo && linux

package nvml

import (
	"context"
	"errors"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

var errNotBuilt = errors.New("not built yet")

// Events returns an event source of NVML's events.
func Events(*zap.Logger) func(context.Context, health.EventReceiver) {
	return func(ctx context.Context, to health.EventReceiver) {
		_ = nvml.New
		to.SetEvents(errNotBuilt)
		<-ctx.Done()
	}
}

// OpenProcesses loads NVML and returns a lister of processes. The driver's files are open until release is called.
func OpenProcesses() (list health.ProcessLister, release func(), err error) {
	return nil, nil, errNotBuilt
}

// Library loads NVML's library, unless it is loaded already, and returns the path of its file.
func Library() (path string, err error) { return "", errNotBuilt }
