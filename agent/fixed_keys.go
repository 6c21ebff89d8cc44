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
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
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
			errs = append(errs, fmt.Errorf("plugin.%s: cannot change from %s to %s while the agent runs; drain the node, then restart the agent",
				key.name, key.now, key.next))
		}
	}
	return errors.Join(errs...)
}

// start is a configuration to start with.
type start struct {
	config.Config
	*config.Rejection       // why the configuration is not the one on the disk; nil if it is
	err               error // why there is no configuration to start with
}

// checkStart returns the configuration to start with. It is c, or the last good one if pods need a value of that one which c lacks. If pods
// need what neither has, checkStart returns an error.
func checkStart(ctx context.Context, loader config.Loader, c config.Config, boot string) start {
	guard := health.Guard[struct{}, start]{Limit: formerTimeout}
	s, err := guard.Call(ctx.Done(), struct{}{}, func() start { return chooseStart(loader, c, boot) }, nil)
	if err != nil { // the disk hangs, or the agent ends
		return start{Config: c}
	}
	return s
}

func chooseStart(loader config.Loader, c config.Config, boot string) start {
	last, rejection, _ := loader.LoadLastGood(c.Health.StateFile)
	if rejection == nil {
		return start{Config: c, err: checkFormer(&c.Plugin, nil, boot)}
	}
	err := checkFormer(&c.Plugin, &last.Plugin, boot)
	if err == nil || checkFormer(&last.Plugin, &last.Plugin, boot) != nil {
		return start{Config: c, err: err}
	}
	rejection.Err = err
	return start{Config: last, Rejection: rejection}
}

// checkFormer returns an error if pods have claims or MPS daemons that only the former configuration serves; former is nil if it is
// unknown.
func checkFormer(c, former *plugin.Config, boot string) error {
	err := dra.CheckFormer(c, former, boot)
	if former != nil {
		err = errors.Join(err, mps.CheckFormer(mps.Root(c.Sharing.MPS.Root), mps.Root(former.Sharing.MPS.Root)))
	}
	return err
}
