package doctor

import (
	"errors"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
)

func TestCheckNVML(t *testing.T) {
	const path = "/usr/lib/libnvidia-ml.so.1"
	for name, c := range map[string]struct {
		source    config.SourceConfig
		processes bool
		err       error
		want      want
	}{
		"embedded engine": {config.SourceConfig{Mode: "auto", Events: "auto"}, false, nil, want{CheckOK, path, ""}},
		"host engine": {
			config.SourceConfig{Mode: "auto", Address: "a:1", Events: "auto"},
			false, nil,
			want{CheckOK, "if the driver lists the host engine's GPUs; " + path, ""},
		},
		"host engine, no library": {
			config.SourceConfig{Mode: "auto", Address: "a:1", Events: "auto"},
			false,
			errors.New("cannot load libnvidia-ml.so.1"),
			want{CheckWarn, "XIDs are lost while the host engine is away: cannot load", "driver"},
		},
		"host engine, off": {
			config.SourceConfig{Mode: "auto", Address: "a:1", Events: "off"},
			false, errors.New("not used"),
			want{CheckInfo, "source.events is off", ""},
		},
		"host engine, asked for":      {config.SourceConfig{Mode: "auto", Address: "a:1", Events: "nvml"}, false, nil, want{CheckOK, path, ""}},
		"host engine, with processes": {config.SourceConfig{Mode: "auto", Address: "a:1", Events: "auto"}, true, nil, want{CheckOK, path, ""}},
		"off": {
			config.SourceConfig{Mode: "auto", Events: "off"},
			false, errors.New("not used"),
			want{CheckInfo, "source.events is off", ""},
		},
		"simulation": {config.SourceConfig{Mode: "sim", Events: "nvml"}, true, errors.New("not used"), want{CheckInfo, "simulated", ""}},
		"no library": {
			config.SourceConfig{Mode: "auto", Events: "auto"},
			false, errors.New("cannot load libnvidia-ml.so.1"),
			want{CheckWarn, "cannot load libnvidia-ml.so.1", "driver"},
		},
		"advice in the error": {
			config.SourceConfig{Mode: "auto", Events: "auto"},
			false, errors.New("no library; build with cgo"),
			want{CheckWarn, "no library", "build with cgo"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			all := config.Config{Source: c.source}
			all.Metrics.Processes.Enabled = c.processes
			expect(t, doctor{nvml: func() (string, error) { return path, c.err }}.checkNVML(all), c.want)
		})
	}
}

func TestCheckKernelLog(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		on   bool
		path string
		want want
	}{
		"off":                   {false, "/nonexistent", want{CheckInfo, "source.kernelLog", ""}},
		"file":                  {true, agenttest.WriteFile(t, dir, "kmsg", ""), want{CheckWarn, "regular file", "source.kernelLogPath"}},
		"pipe without a writer": {true, pipe, want{CheckOK, pipe, ""}},
		"missing":               {true, filepath.Join(dir, "missing"), want{CheckWarn, "missing", "/dev/kmsg"}},
		"directory":             {true, dir, want{CheckWarn, dir, "source.kernelLogPath"}},
		"below a file":          {true, "/proc/self/mem/x", want{CheckWarn, "/proc/self/mem/x", "source.kernelLogPath"}},
	} {
		t.Run(name, func(t *testing.T) {
			expect(t, checkKernelLog(config.SourceConfig{KernelLog: c.on, KernelLogPath: c.path}), c.want)
		})
	}
}

func TestCheckProcesses(t *testing.T) {
	host := files{"/proc/2/comm": "kthreadd\n", "/pods/ns_pod_uid": "/", "/pods/ns_other_uid": "/"}
	for name, c := range map[string]struct {
		files         files
		off, sim, ns  bool
		proc, podLogs string
		want          []want
	}{
		"off":          {host, true, false, true, "/proc", "/pods", []want{{CheckInfo, "metrics.processes.enabled", ""}}},
		"node's files": {host, false, false, true, "/proc", "/pods", []want{{CheckOK, "/proc", ""}, {CheckOK, "2 pods", ""}}},
		"container's processes": {
			host.with(files{"/proc/2/comm": "sh\n"}), false, false, true, "/proc", "/pods",
			[]want{{CheckWarn, "/proc", "metrics.processes.proc"}, {CheckOK, "2 pods", ""}},
		},
		"nothing mounted": {
			nil, false, false, true, "/proc", "/pods",
			[]want{{CheckWarn, "/proc", "metrics.processes.proc"}, {CheckWarn, "/pods", "metrics.processes.podLogs"}},
		},
		"no logs": {host, false, false, true, "/proc", "", []want{{CheckOK, "/proc", ""}, {CheckInfo, "API server", ""}}},
		"other PID namespace": {
			host, false, false, false, "/proc", "",
			[]want{{CheckWarn, "PID namespace", "hostPID"}, {CheckInfo, "API server", ""}},
		},
		"simulated processes": {nil, false, true, false, "/proc", "", []want{{CheckInfo, "simulated", ""}, {CheckInfo, "API server", ""}}},
	} {
		t.Run(name, func(t *testing.T) {
			root := c.files.root(t)
			p := processes.Config{Enabled: !c.off, Proc: root.path(c.proc)}
			if c.podLogs != "" {
				p.PodLogs = root.path(c.podLogs)
			}
			expect(t, checkProcesses(p, c.sim, c.ns), c.want...)
		})
	}
}
