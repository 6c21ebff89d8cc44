package binarytest

import (
	"strings"
	"syscall"
	"testing"
)

func TestReload(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig)
	p.awaitMetrics(`state="healthy"} 1`, "gpu_node_agent_config_last_reload_successful 1")

	p.write("health: {temperature: hot}") // without a signal: the agent sees that the file changed
	p.awaitMetrics(`state="healthy"} 1`, "gpu_node_agent_config_last_reload_successful 0")
	p.await("the invalid key in the log", func() bool { return strings.Contains(p.log(), "health.temperature") })

	p.write(simConfig + "\nhealth: {temperature: 1}") // °C: every GPU is warmer
	p.awaitMetrics(`cause="temperature"`, "gpu_node_agent_config_last_reload_successful 1")

	_, port, _ := strings.Cut(strings.TrimPrefix(p.URL, "http://"), ":")
	p.URL = "http://127.0.0.2:" + port
	p.write(simConfig + "\nhealth: {recoverAfter: 0s}")
	p.signal(syscall.SIGHUP)
	p.awaitMetrics(`state="healthy"} 1`)

	before := p.snapshot().Config.Since
	p.signal(syscall.SIGHUP)
	p.await("a reload at SIGHUP", func() bool { return p.snapshot().Config.Since.After(before) })
}

// After a change from the simulation to DCGM, the kubelet no longer counts simulated GPUs, even if DCGM does not answer.
func TestReloadFromSimulationToDCGM(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	p.reload("source: {address: '127.0.0.1:1'}")
	p.awaitSource("down")
	p.awaitAllocatable(k, 0)
	if _, page := p.get("/metrics"); strings.Contains(page, "gpu_node_agent_device_state{") {
		t.Errorf("simulated devices are left:\n%s", page)
	}
	p.reload(simConfig)
	p.awaitAllocatable(k, 8)
}
