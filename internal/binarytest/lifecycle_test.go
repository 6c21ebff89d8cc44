package binarytest

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestAgentServesKubeletAndPrometheus(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig)
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "plugin.kubeletDir: ")
	p.awaitPage("/livez", http.StatusOK)

	p.startKubelet()
	p.awaitPage("/readyz", http.StatusOK)
	p.awaitMetrics(`gpu_node_agent_plugin_registered{resource="nvidia.com/gpu"} 1`, "\nDCGM_FI_DEV_GPU_TEMP{", "gpu_node_agent_source_up 1")

	if out, code := run(t, "sim", "--config", p.config(), "{gpu: 3, xid: 79, lost: true}"); code != 0 {
		t.Fatal(out)
	}
	p.awaitMetrics(`gpu_node_agent_plugin_devices{health="unhealthy",resource="nvidia.com/gpu"} 1`, `gpu="3",hostname=`, `xid="79"} 1`,
		`cause="lost"`)
	if code, text := p.get("/readyz"); code != http.StatusOK {
		t.Errorf("/readyz is %d with an unhealthy GPU: %s; the agent itself works", code, text)
	}
	p.stop()
	left, err := filepath.Glob(p.Dir + "/device-plugins/gpu-node-agent*")
	if err != nil || len(left) != 0 {
		t.Errorf("sockets left behind: %v %v", left, err)
	}
	if _, err := os.Stat(p.simSocket()); err == nil {
		t.Error("control socket left behind")
	}
}

// Health checks that fail are visible everywhere and harmless: the agent is ready, other faults count, incidents stay.
func TestAgentWithoutHealthChecks(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	inject := func(event string) {
		t.Helper()
		if out, code := run(t, "sim", "--config", p.config(), event); code != 0 {
			t.Fatal(out)
		}
	}
	p.awaitMetrics("gpu_node_agent_source_checks_up 1")
	inject("{gpu: 3, incident: DCGM_FR_NVLINK_DOWN}")
	p.awaitAllocatable(k, 7)
	inject("{source: checksDown}")
	p.awaitMetrics("gpu_node_agent_source_checks_up 0", "gpu_node_agent_source_up 1", `cause="dcgm-nvlink-down"`)
	p.awaitPage("/readyz", http.StatusOK, "ok\nchecks: down for ")
	inject("{gpu: 3, incident: DCGM_FR_NVLINK_DOWN, severity: none}")
	inject("{gpu: 5, xid: 79}")
	p.awaitAllocatable(k, 6)
	if s := p.snapshot().Source.Checks; s.Status != "down" || s.Error == "" || s.Since.IsZero() {
		t.Errorf("status %+v", s)
	}
	for command, part := range map[string]string{"status": "health checks down", "doctor": "checks: down for "} {
		if out, _ := run(t, command, "--config", p.config()); !strings.Contains(out, part) {
			t.Errorf("%s lacks %q:\n%s", command, part, out)
		}
	}
	inject("{source: up}")
	p.awaitMetrics("gpu_node_agent_source_checks_up 1")
	p.awaitPage("/readyz", http.StatusOK)
	p.await("/readyz without a warning", func() bool { _, text := p.get("/readyz"); return text == "ok\n" })
}

// Without a working source the process stays up and reports why it is not ready.
func TestAgentStaysUpWithoutSource(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ config, status, err string }{
		"no libdcgm":                   {"source: {mode: embedded}", "down", "libdcgm.so.4"},
		"no libdcgm for a host engine": {"source: {address: '127.0.0.1:1'}", "down", "libdcgm.so.4"},
		"no GPUs":                      {"source: {mode: sim, sim: {profile: none}}", "up", ""},
		"source down":                  {"source: {mode: sim, sim: {scenario: [{at: 0s, source: down}]}}", "down", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, c.config, "LD_LIBRARY_PATH=/nonexistent") // hides an installed DCGM
			p.awaitSource(c.status)
			if s := p.snapshot().Source; !strings.Contains(s.Error, c.err) {
				t.Errorf("source error %q lacks %q", s.Error, c.err)
			}
			p.awaitPage("/livez", http.StatusOK)
			p.awaitMetrics("gpu_node_agent_source_up")
		})
	}
}

func TestShutdownWhileSourceStalled(t *testing.T) {
	t.Parallel()
	p := start(t, "source: {mode: sim, stallAfter: 1s, sim: {control: DIR/sim.sock}}")
	p.awaitMetrics("DCGM_FI_DEV_GPU_TEMP")
	p.sim("{source: stalled}")
	p.awaitSource("stalled")
	p.awaitMetrics("gpu_node_agent_source_stalled 1", "DCGM_FI_DEV_GPU_TEMP")
	p.stop()
}

// SIGHUP while the agent still starts reloads and does not end the process.
func TestSIGHUPDuringStartup(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig)
	p.await("the first log entry", func() bool { return p.log() != "" })
	p.signal(syscall.SIGHUP)
	p.await("the reload", func() bool { return strings.Contains(p.log(), "SIGHUP") })
}
