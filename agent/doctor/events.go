package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

// eventSteps returns the checks of what the agent uses beside the source.
func (d doctor) eventSteps(c config.Config) []step {
	sim := c.Source.Resolved() == config.ModeSim
	return []step{
		{"NVML", func(context.Context) []Check { return d.checkNVML(c) }},
		{"kernel log", func(context.Context) []Check { return checkKernelLog(c.Source) }},
		{"processes", func(context.Context) []Check { return checkProcesses(c.Metrics.Processes, sim, inHostPIDNamespace()) }},
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
	} else if c.Source.Events == config.EventsAuto {
		events += ", and DCGM is embedded"
	}
	if c.Source.Resolved() == config.ModeSim {
		return info(events + "; simulated")
	}
	path, err := d.nvml()
	if err != nil {
		found, fix, _ := strings.Cut(err.Error(), "; ")
		if fix == "" {
			fix = "install the driver's libraries; in a container, use the NVIDIA runtime and NVIDIA_DRIVER_CAPABILITIES with utility"
		}
		return warn(events+"; "+found, fix)
	}
	return pass(events + "; " + path)
}

// checkKernelLog reports whether the kernel log can be opened. It reads nothing: a pipe has each record for one reader.
func checkKernelLog(c config.SourceConfig) []Check {
	if !c.KernelLog {
		return info("off: source.kernelLog is false")
	}
	f, err := os.OpenFile(c.KernelLogPath, os.O_RDONLY|syscall.O_NONBLOCK, 0) // opening a pipe must not wait for its writer
	if err == nil {
		defer func() { _ = f.Close() }()
		var stat os.FileInfo
		if stat, err = f.Stat(); err == nil && stat.IsDir() {
			err = &os.PathError{Op: "read", Path: c.KernelLogPath, Err: syscall.EISDIR}
		}
	}
	if err != nil {
		return warn(err.Error(), kernelLogFix(err, c.KernelLogPath))
	}
	return pass(c.KernelLogPath + " can be opened")
}

func kernelLogFix(err error, path string) string {
	if errors.Is(err, os.ErrPermission) {
		return "give the agent CAP_SYSLOG and access to " + path + "; a container needs to be privileged (kernelLog.enabled in the chart)"
	}
	return "correct source.kernelLogPath; in a container, mount the node's " + path + " (kernelLog.enabled in the chart)"
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
		return append(checks, warn(err.Error(), "mount the node's /var/log/pods read-only, and set metrics.processes.podLogs to its path, or to \"\" for none")...)
	}
	return append(checks, pass(fmt.Sprintf("%s names %s", c.PodLogs, status.Plural(len(pods), "pod")))...)
}

// inHostPIDNamespace reports whether the agent is in the initial PID namespace, whose number is fixed in Linux.
func inHostPIDNamespace() bool {
	link, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && link == "pid:[4026531836]"
}
