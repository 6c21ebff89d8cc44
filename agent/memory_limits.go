package agent

import (
	"errors"
	"fmt"

	"github.com/prometheus/procfs"
	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health/driver"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// cgroupRoot is where the host's control groups are mounted, also in a container of the chart.
const cgroupRoot = "/sys/fs/cgroup"

func (a *Agent) newMemoryLimits(log *zap.Logger) *memlimits.Follower {
	return memlimits.New(memlimits.Options{
		Config: &a.memoryLimitsConfig, Snapshots: &a.snapshots, Holders: a.plugin.LatestHolders(), Claimed: a.dra.Memory,
		Hooks: a.plugin.MemoryLimitHooks, CgroupRoot: cgroupRoot, Admin: hasSysAdmin(), Log: log,
	})
}

// shares returns how the units of shared devices are used. Only one of both APIs serves a device.
func (a *Agent) shares() []plugin.ShareUnits { return append(a.plugin.Shares(), a.dra.Shares()...) }

// openMemoryLimits returns what opens the driver's memory limits for the GPUs of a source.
func openMemoryLimits(c config.SourceConfig) memlimits.Open {
	unavailable := func(err error) memlimits.Open {
		return func() (driver.MemoryLimiter, func(), error) { return nil, nil, err }
	}
	switch {
	case c.Resolved() == config.ModeSim:
		return unavailable(errors.New("source.mode: the GPUs are simulated; no driver limits their memory"))
	case !isLocal(c):
		return unavailable(fmt.Errorf("source.address: the GPUs of %s are on another host; their memory is limited on this one only", c.Address))
	}
	return nvml.OpenMemoryLimits
}

// capSysAdmin is the number of CAP_SYS_ADMIN in linux/capability.h.
const capSysAdmin = 21

// hasSysAdmin reports whether the process has CAP_SYS_ADMIN.
func hasSysAdmin() bool {
	self, err := procfs.Self()
	if err != nil {
		return false
	}
	s, err := self.NewStatus()
	return err == nil && s.CapEff&(1<<capSysAdmin) != 0
}
