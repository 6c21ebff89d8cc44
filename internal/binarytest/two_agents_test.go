package binarytest

import (
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
)

// Two agents with different resources, state files and paths to the kubelet's directory: one serves, the other waits, names the first, and
// exports no device. When the first ends, however it does, the second serves the devices at once.
func TestTwoAgents(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(first *process){
		"terminated": func(first *process) { first.stop() },
		"killed":     func(first *process) { first.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const other = "example.com/gpu"
			first, k := startRegistered(t, simConfig)
			second := newProcess(t, "")
			link := filepath.Join(second.Dir, "kubelet")
			if err := os.Symlink(first.Dir, link); err != nil {
				t.Fatal(err)
			}
			second.write(simConfig + "\nplugin: {kubeletDir: " + link + ", resource: " + other + "}")
			second.launch()
			host, err := os.Hostname()
			if err != nil {
				t.Fatal(err)
			}
			holder := nodelock.Holder{Pod: host, Config: first.config(), PID: first.Pid()}
			second.awaitPage("/readyz", http.StatusServiceUnavailable, "another agent serves this node: "+holder.String())
			second.awaitMetrics("\ngpu_node_agent_waits_for_holder 1\n", `gpu_node_agent_holder_info{holder="`+host+`"} 1`)
			second.await("the measurements", func() bool { s := second.snapshot(); return len(s.GPUs) == 8 && s.Source.Status == "up" })
			if w := second.snapshot().Kubelet.WaitsFor; w == nil || *w != holder {
				t.Errorf("waits for %+v, want %+v", w, holder)
			}
			if err := k.Restart(); err != nil { // which wipes the sockets
				t.Fatal(err)
			}
			first.awaitAllocatable(k, 8)
			second.awaitPage("/readyz", http.StatusServiceUnavailable, strconv.Itoa(first.Pid()))
			for line := range strings.Lines(page(second)) {
				if strings.HasPrefix(line, "DCGM_") || strings.HasPrefix(line, "gpu_node_agent_device_") ||
					strings.HasPrefix(line, "gpu_node_agent_plugin_") {
					t.Errorf("the second agent exports %s", line)
				}
			}
			if r, registered := k.State().Resources[other]; registered {
				t.Errorf("the second agent has registered %+v", r)
			}

			second.await("settled holders", func() bool { return second.snapshot().Kubelet.HoldersError == "" })
			ended := time.Now()
			end(first)
			second.await("the devices of the second", func() bool { return k.State().Resources[other].Allocatable() == 8 })
			t.Logf("served again after %v", time.Since(ended).Round(time.Millisecond))
			second.awaitMetrics("\ngpu_node_agent_waits_for_holder 0\n", "gpu_node_agent_device_info")
			second.awaitPage("/readyz", http.StatusOK)
		})
	}
}

func page(p *process) string {
	_, text := p.get("/metrics")
	return text
}

// An agent whose plugin is off measures beside one that serves, and waits for nothing.
func TestMonitorBesideServingAgent(t *testing.T) {
	t.Parallel()
	first, k := startRegistered(t, simConfig)
	monitor := start(t, simConfig+"\nplugin: {enabled: false, kubeletDir: "+first.Dir+"}")
	monitor.awaitPage("/readyz", http.StatusOK)
	monitor.awaitMetrics("\ngpu_node_agent_waits_for_holder 0\n", "gpu_node_agent_device_info")
	if r := k.State().Resources[resource]; r.Allocatable() != 8 {
		t.Errorf("the serving agent's devices: %+v", r)
	}
}

// If the plugin of a waiting agent is switched off, the agent measures as if its plugin had never been on. It leaves the node to the other
// agent, also while the other one restarts.
func TestWaitingAgentSwitchedOff(t *testing.T) {
	t.Parallel()
	first, k := startRegistered(t, simConfig)
	second := start(t, simConfig+"\nplugin: {kubeletDir: "+first.Dir+"}")
	second.awaitMetrics("\ngpu_node_agent_waits_for_holder 1\n")
	second.reload(simConfig + "\nplugin: {enabled: false, kubeletDir: " + first.Dir + "}")
	second.awaitPage("/readyz", http.StatusOK)
	second.awaitMetrics("\ngpu_node_agent_waits_for_holder 0\n", "gpu_node_agent_device_info")
	first.stop()
	registrations := k.State().Resources[resource].Registrations
	first.launch()
	first.await("the devices again", func() bool {
		r := k.State().Resources[resource]
		return r.Registrations > registrations && r.Allocatable() == 8
	})
}
