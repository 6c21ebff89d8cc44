package plugin

import (
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// MemoryLimits returns what a memlimits.Follower follows of the configuration. podLogs is the kubelet's directory of container logs.
func (c *Config) MemoryLimits(podLogs string) memlimits.Config {
	switch m := &c.Sharing.Memory; {
	case !c.Enabled || m.Resource == "":
		return memlimits.Config{}
	case m.usesDriver():
		return memlimits.Config{Enforcement: memlimits.Driver, PodLogs: podLogs}
	case m.Enforcement == EnforceMPS:
		return memlimits.Config{Enforcement: memlimits.MPS}
	default:
		return memlimits.Config{Enforcement: memlimits.None}
	}
}

// MemoryLimitHooks returns the devices for which the CDI specs that containers get have a hook that sets the driver's memory limits. It
// may be called from any goroutine.
func (p *Plugin) MemoryLimitHooks() map[health.DeviceID]bool {
	cfg, snap := p.cfg.Load(), p.snapshots.Load()
	if cfg == nil || snap == nil || !cfg.UsesCDI() && !cfg.ServesDRA() {
		return nil
	}
	name := cfg.runtimeID
	if cfg.ServesDRA() { // claims name devices by their UUIDs
		name = func(d *health.Device) string { return string(d.ID) }
	}
	gpus := p.limitHooks.GPUs(cfg.CDI)
	hooks := make(map[health.DeviceID]bool)
	for i := range snap.Devices {
		if d := &snap.Devices[i].Device; slices.Contains(gpus[name(d)], string(d.ID)) {
			hooks[d.ID] = true
		}
	}
	return hooks
}
