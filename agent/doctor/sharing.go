package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
)

// sharingSteps returns the checks of MPS and of memory sharing, if they are configured.
func (d doctor) sharingSteps(c config.Config) (steps []step) {
	if !c.Plugin.Enabled {
		return nil
	}
	sharing := c.Plugin.Sharing
	memory := sharing.Memory.Resource != ""
	if len(sharing.MPS.Resources) > 0 || memory && sharing.Memory.Enforcement == plugin.EnforceMPS {
		steps = append(steps, step{"MPS", func(ctx context.Context) []Check { return d.checkMPS(ctx, c) }})
	}
	if memory {
		steps = append(steps, step{"memory limits", func(ctx context.Context) []Check { return checkMemoryLimits(ctx, c) }})
	}
	return steps
}

// checkMPS checks mps-daemon and the MPS daemons that it runs.
func (d doctor) checkMPS(ctx context.Context, c config.Config) []Check {
	const run = "run gpu-node-agent mps-daemon on this node, which creates it; in a container, mount it at the same path (chart: mps.enabled)"
	root := mps.Root(c.Plugin.Sharing.MPS.Root)
	switch err := writable(string(root)); {
	case errors.Is(err, os.ErrNotExist):
		return fail(fmt.Sprintf("plugin.sharing.mps.root: no directory %s", root), run)
	case err != nil:
		return fail(fmt.Sprintf("plugin.sharing.mps.root: user %d cannot create files in %s: %v", os.Geteuid(), root, err),
			"run the agent as root, or mount the directory writable")
	}
	s, err := d.mpsStatus(ctx, root)
	if err != nil {
		return fail(fmt.Sprintf("mps-daemon does not answer at %s: %v", root.Socket(), rootCause(err)),
			"run gpu-node-agent mps-daemon on this node with the same plugin.sharing.mps.root (chart: mps.enabled)")
	}
	checks := d.mpsDaemonProcesses(c, s)
	if node, ok := runningAgent(ctx, c); ok {
		checks = append(checks, problemsOf(node, view.PartMPS)...)
		for _, g := range node.GPUs {
			for _, dev := range append([]status.Device{g}, g.MIG...) {
				if m := dev.MPS; m != nil && !m.Ready && !m.Leaving && m.PID > 0 {
					checks = append(checks, warn(fmt.Sprintf("%s: the MPS daemon is not ready: %s", dev.Name(), cmp.Or(m.Reason, "starting")),
						"see gpu-node-agent mps, and the finding of the device")...)
				}
			}
		}
	}
	if len(checks) == 0 {
		checks = pass(fmt.Sprintf("mps-daemon runs %s", status.Plural(len(s.Daemons), "daemon")))
	}
	return checks
}

// mpsDaemonProcesses checks what mps-daemon reports.
func (d doctor) mpsDaemonProcesses(c config.Config, s mps.Status) (checks []Check) {
	const log = "read the log of mps-daemon"
	if s.Version != d.version {
		checks = append(checks, warn(fmt.Sprintf("mps-daemon has version %s, this program %s", cmp.Or(s.Version, "unknown"), d.version),
			"update mps-daemon while no container uses MPS: its end ends all MPS clients")...)
	}
	if s.Shm != "" && c.Source.Resolved() != config.ModeSim {
		checks = append(checks, fail("MPS clients and daemons share no memory: "+s.Shm,
			"do that on this node; the chart runs mps-daemon with --mount-shm")...)
	}
	for _, p := range s.Daemons {
		if p.PID == 0 && !p.Stopping {
			checks = append(checks, warn(fmt.Sprintf("%s: no MPS daemon runs: %s", p.Device, cmp.Or(p.Error, "starting")), log)...)
		}
	}
	return checks
}

// checkMemoryLimits reports what the running agent enforces on the devices that are shared by memory.
func checkMemoryLimits(ctx context.Context, c config.Config) []Check {
	if c.Source.Resolved() == config.ModeSim {
		return simulated(ctx)
	}
	node, ok := runningAgent(ctx, c)
	if !ok {
		return info("only a running agent without a password knows what limits containers")
	}
	type group struct{ enforcement, reason string }
	var groups []group // in the order of their first device
	devices := make(map[group][]string)
	for _, gpu := range node.GPUs {
		for _, d := range append([]status.Device{gpu}, gpu.MIG...) {
			if d.Shares != nil && d.Shares.Sharing == string(plugin.SharingMemory) {
				g := group{d.Shares.Enforcement, d.Shares.EnforcementReason}
				if devices[g] == nil {
					groups = append(groups, g)
				}
				devices[g] = append(devices[g], d.Name())
			}
		}
	}
	if len(groups) == 0 {
		return info("the agent shares no device by memory")
	}
	var checks []Check
	for _, g := range groups {
		on := strings.Join(devices[g], ", ")
		switch {
		case g.enforcement != string(memlimits.None):
			checks = append(checks, pass(fmt.Sprintf("enforcement %s on %s", g.enforcement, on))...)
		case g.reason == "":
			checks = append(checks, info("plugin.sharing.memory.enforcement is none: nothing limits the containers on "+on)...)
		default:
			checks = append(checks, warn(fmt.Sprintf("nothing limits the containers on %s: %s", on, g.reason),
				"correct that, or set plugin.sharing.memory.enforcement to mps, or to none if applications limit themselves")...)
		}
	}
	if node.MemoryLimitsError != "" {
		checks = append(checks, warn("cannot set or read limits: "+node.MemoryLimitsError, "see the log of the agent")...)
	}
	return checks
}
