package sim

import (
	"context"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Events reports the events of the simulated driver as NVML does, whatever the source's state.
func (s *Source) Events(ctx context.Context, to health.EventReceiver) {
	to.SetEvents(nil)
	<-ctx.Done()
}
