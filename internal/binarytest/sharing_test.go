package binarytest

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
)

// A lost GPU is one fault in the log, whatever the number of its MIG devices and their replicas.
func TestLogOfLostSharedGPU(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ profile, resource string }{
		"GPUs":        {"h100-8", resource},
		"MIG devices": {"h100-8-mig", "nvidia.com/mig-1g.10gb"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newProcess(t, fmt.Sprintf("source: {mode: sim, sim: {profile: %s, control: DIR/sim.sock}}\n"+
				"plugin: {kubeletDir: DIR, migStrategy: mixed, sharing: {timeSlicing: {resources: [{name: %s, replicas: 10}]}}}", c.profile,
				c.resource))
			p.startKubelet()
			p.launch()
			p.awaitPage("/readyz", http.StatusOK)
			p.awaitLog("registered with the kubelet")
			before := len(p.log())
			p.sim("{gpu: 3, lost: true}")
			p.awaitLog("device reported unhealthy to the kubelet")
			p.stop() // writes the whole log
			lines := regexp.MustCompile(`.*"level":"(warn|error)".*`).FindAllString(p.log()[before:], -1)
			if len(lines) > 3 {
				t.Errorf("%d lines:\n%s", len(lines), strings.Join(lines, "\n"))
			}
		})
	}
}

// Replicas that exceed a message to the kubelet are not registered, and the agent names the largest number that fits.
func TestTooManyReplicas(t *testing.T) { // not parallel: beside other tests, a list of 32,704 devices reaches the kubelet after the audit
	config := func(replicas int) string {
		return fmt.Sprintf("source: {mode: sim, sim: {profile: h100-16-mig}}\n"+
			"plugin: {kubeletDir: DIR, migStrategy: mixed, sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: %d}]}}}",
			replicas)
	}
	p := newProcess(t, config(1000))
	k := p.startKubelet()
	p.launch()
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "plugin.sharing.timeSlicing.resources[0].replicas", "292", "1000", "112 devices")
	if r := k.State().Resources; len(r) != 0 {
		t.Errorf("registered: %v", r)
	}
	p.reload(config(292))
	p.awaitPage("/readyz", http.StatusOK)
	all := func() bool { return k.State().Resources["nvidia.com/mig-1g.10gb"].Allocatable() == 112*292 }
	p.await("all replicas", all)
	saved := p.awaitLastGood("")

	// What is registered stays: also after a restart, and until a number fits.
	for range 2 {
		p.write(config(293))
		p.awaitMetrics("gpu_node_agent_config_last_reload_successful 0")
		p.awaitPage("/readyz", http.StatusOK, "plugin.sharing.timeSlicing.resources[0].replicas", "292", "293")
		p.await("all replicas", all)
		p.stop()
		p.launch()
	}
	p.awaitMetrics("gpu_node_agent_config_last_reload_successful 0")
	if got := readFile(p.lastGood()); got != saved {
		t.Errorf("saved %s, want %s", got, saved)
	}
	p.reload(config(2))
	p.await("fewer replicas", func() bool { return k.State().Resources["nvidia.com/mig-1g.10gb"].Allocatable() == 112*2 })
	p.awaitLastGood(saved)
}
