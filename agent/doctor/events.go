package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/health/kernellog"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

// eventSteps returns the checks of what the agent uses beside the source.
func (d doctor) eventSteps(c config.Config) []step {
	sim := c.Source.Resolved() == config.ModeSim
	return []step{
		{"NVML", func(context.Context) []Check { return d.checkNVML(c) }},
		{"kernel log", func(context.Context) []Check { return checkKernelLog(c.Source) }},
		{"processes", func(context.Context) []Check {
			return checkProcesses(c.Metrics.Processes, sim, processes.InHostPIDNamespace())
		}},
	}
}

// checkNVML reports whether XIDs come by NVML's events, and whether the library that events and processes need can be loaded.
func (d doctor) checkNVML(c config.Config) []Check {
	events := "events on: source.events is " + c.Source.Events
	if off := c.Source.EventsReason(); off != "" {
		events = "events off: " + off
		if !c.Metrics.Processes.Enabled {
			return info(events)
		}
	} else if c.Source.EventsIfListed() {
		events += ", and used if the driver lists the host engine's GPUs"
	}
	if c.Source.Resolved() == config.ModeSim {
		return info(events + "; simulated")
	}
	path, err := d.nvml()
	if err != nil {
		if c.Source.EventsIfListed() {
			events = "events off, so XIDs are lost while the host engine is away"
		}
		return warning(events+": "+err.Error(), "install the driver's libraries")
	}
	return pass(events + "; " + path)
}

// checkKernelLog reports whether the kernel log can be read.
func checkKernelLog(c config.SourceConfig) []Check {
	if !c.KernelLog {
		return info("off: source.kernelLog is false")
	}
	if err := kernellog.Check(c.KernelLogPath); err != nil {
		return warning(err.Error(), "correct source.kernelLogPath")
	}
	return pass(c.KernelLogPath + " can be read")
}

// warning returns a warning for an error text, with its fix as in failure.
func warning(text, defaultFix string) []Check {
	c := failure("", text, defaultFix)
	c.Status = CheckWarn
	return []Check{c}
}

// checkProcesses reports whether the processes of the devices are listed, and whether their pods can be found.
func checkProcesses(c processes.Config, sim, inHostPIDNamespace bool) []Check {
	if !c.Enabled {
		return info("off: metrics.processes.enabled is false")
	}
	var checks []Check
	kthreadd, err := os.ReadFile(filepath.Join(c.Proc, "2", "comm")) // the second process of every Linux kernel
	switch {
	case sim: // its process IDs are invented
		checks = info("simulated; their containers are read from " + c.Proc)
	case !inHostPIDNamespace:
		checks = warn("the agent is not in the node's PID namespace: the driver does not list the processes of other containers",
			"set hostPID in the chart, or run the agent on the node")
	case err == nil && strings.TrimSpace(string(kthreadd)) == "kthreadd":
		checks = pass(c.Proc + " lists the node's processes")
	default:
		checks = warn(c.Proc+" does not list the node's processes: process 2 is not kthreadd",
			"mount the node's /proc read-only, and set metrics.processes.proc to its path; the chart does so with metrics.processes.enabled")
	}
	if c.PodLogs == "" {
		return append(checks, info("metrics.processes.podLogs is empty: only the API server names the pods")...)
	}
	pods, err := os.ReadDir(c.PodLogs)
	if err != nil {
		return append(checks, warn(err.Error(),
			"mount the node's /var/log/pods read-only, and set metrics.processes.podLogs to its path, or to \"\" for none")...)
	}
	return append(checks, pass(fmt.Sprintf("%s names %s", c.PodLogs, status.Plural(len(pods), "pod")))...)
}
