package agent

import (
	"context"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
)

type readProperties func(context.Context, []health.Device) map[health.DeviceID]*health.Properties

// propertiesOf returns read for the devices of the source. It reads nothing of simulated GPUs and of GPUs on another host. Nor does it
// while the source is not up: during a detach, NVML must not open the driver's files.
func propertiesOf(source *health.Latest[sourceConfig], snapshots *health.Latest[health.Snapshot], read readProperties) readProperties {
	return func(ctx context.Context, devices []health.Device) map[health.DeviceID]*health.Properties {
		c, snap := source.Load(), snapshots.Load()
		if c.Resolved() == config.ModeSim || !isLocal(c.SourceConfig) || snap == nil || snap.Source.Status != health.SourceUp ||
			snap.Source.Detachment.InForce() {
			return nil
		}
		return read(ctx, devices)
	}
}
