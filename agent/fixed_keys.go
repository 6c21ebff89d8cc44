package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

// formerTimeout limits how long the start waits for the disk, which shows what pods have by a former configuration. The driver of DRA
// checks again before it serves.
const formerTimeout = 5 * time.Second

// checkFixed returns an error if a configuration differs from the one in force in a key that pods depend on for as long as they run. Only
// the driver of that name can unprepare their claims, and their mounts are below that directory.
func (a *Agent) checkFixed(c *plugin.Config) error {
	now := a.pluginConfig.Load()
	var errs []error
	for _, key := range []struct{ name, now, next string }{
		{"dra.driverName", now.DRA.DriverName, c.DRA.DriverName},
		{"kubeletDir", now.KubeletDir, c.KubeletDir},
		{"sharing.mps.root", now.Sharing.MPS.Root, c.Sharing.MPS.Root},
	} {
		if key.now != key.next {
			errs = append(errs, fmt.Errorf("plugin.%s: cannot change from %s to %s while the agent runs; it takes effect at a restart: drain the "+
				"node first if pods have claims or MPS shares", key.name, key.now, key.next))
		}
	}
	return errors.Join(errs...)
}

// start is a configuration to start with.
type start struct {
	config.Config
	*config.Rejection                // of the configuration on the disk; nil if it is that
	former            *plugin.Config // of the process before this one; nil if it is unknown
	keepLastGood      bool           // see Agent
}

// checkStart returns the configuration to start with: c, or the last good one if pods have what only that serves. If neither serves what
// they have, it returns c: the driver then says why it serves no devices.
func checkStart(ctx context.Context, loader config.Loader, c config.Config, boot string) start {
	s, err := health.CallOnce(ctx.Done(), formerTimeout, func() start { return chooseStart(loader, c, boot) })
	if err != nil { // the disk hangs, or the agent ends
		return start{Config: c, keepLastGood: true}
	}
	return s
}

func chooseStart(loader config.Loader, c config.Config, boot string) start {
	s := start{Config: c}
	last, rejection, _ := loader.LoadLastGood()
	if rejection != nil {
		s.former = &last.Plugin
	}
	err := dra.CheckFormer(&c.Plugin, s.former, boot)
	switch {
	case err == nil:
	case rejection != nil && dra.CheckFormer(&last.Plugin, s.former, boot) == nil:
		rejection.Err = err
		s.Config, s.Rejection = last, rejection
	default:
		s.keepLastGood = true
	}
	return s
}
