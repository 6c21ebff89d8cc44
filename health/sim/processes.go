package sim

import (
	"context"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// ListProcesses lists the simulated processes; it is a health.ProcessLister.
func (s *Source) ListProcesses(_ context.Context, devices []health.Device) (*health.ProcessReading, error) {
	r := &health.ProcessReading{At: time.Now()}
	for i := range devices {
		r.Measured = append(r.Measured, devices[i].ID)
	}
	return r, nil
}
