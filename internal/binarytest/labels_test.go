package binarytest

import (
	"maps"
	"os"
	"strings"
	"syscall"
	"testing"
)

// printedLabels returns the labels that `labels` prints, by the configuration of the process.
func (p *process) printedLabels() map[string]string {
	p.t.Helper()
	out, code := p.offline("labels")
	if code != 0 {
		p.t.Fatalf("labels: exit code %d: %s", code, out)
	}
	return labelsIn(out)
}

// labelsIn returns the labels in the lines of a text.
func labelsIn(text string) map[string]string {
	labels := make(map[string]string)
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.ContainsAny(key, " #") {
			labels[key] = value
		}
	}
	return labels
}

// offline runs a command with the configuration, the state file and the socket of the process, whether or not it runs.
func (p *process) offline(args ...string) (string, int) {
	p.t.Helper()
	p.t.Setenv("GPU_NODE_AGENT_STATE_DIR", p.StateDir())
	p.t.Setenv("GPU_NODE_AGENT_HEALTH_SOCKET", p.agentSocket())
	return run(p.t, append(args, "--config", p.config())...)
}

const (
	healthyLabel = "gpu-node-agent/gpus-healthy"
	countLabel   = "nvidia.com/gpu.count"
)

// The labels without an agent.
func TestLabelsWithoutAgent(t *testing.T) { // not parallel, because it sets environment variables
	for name, c := range map[string]struct {
		sim  string
		want map[string]string
	}{
		"H100": {"{}", map[string]string{
			countLabel: "8", healthyLabel: "8", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559",
			"nvidia.com/gpu.replicas": "1",
		}},
		"lost GPU": {
			"{scenario: [{at: 0s, gpu: 3, lost: true}]}",
			map[string]string{countLabel: "8", healthyLabel: "7", "gpu-node-agent/gpus-unhealthy": "1"},
		},
		"failed check": {"{scenario: [{at: 0s, gpu: 3, incident: DCGM_FR_NVLINK_DOWN}]}", map[string]string{countLabel: "8", healthyLabel: "7"}},
		"source down":  {"{scenario: [{at: 0s, source: down}]}", map[string]string{countLabel: "8", healthyLabel: "8"}},
		"MIG": {"{profile: h100-8-mig}", map[string]string{
			countLabel: "8", "nvidia.com/gpu.replicas": "0",
			"nvidia.com/mig.capable": "true",
		}},
		"no GPU": {"{profile: none}", map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProcess(t, "source: {mode: sim, sim: "+c.sim+"}")
			labels := p.printedLabels()
			for key, want := range c.want {
				if labels[key] != want {
					t.Errorf("%s=%s, want %s", key, labels[key], want)
				}
			}
			if len(c.want) == 0 && len(labels) > 0 {
				t.Errorf("%v", labels)
			}
		})
	}
}

// The labels of a running agent, in their file: they follow the health, and stay while the source is away, over a kill and without an
// agent, until they are disabled.
func TestLabels(t *testing.T) { // not parallel, because it sets environment variables
	p := newProcess(t, "")
	dir := p.Dir + "/features.d"
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	file := dir + "/gpu-node-agent"
	config := func(sim, output string) string {
		return "source: {mode: sim, sim: {control: DIR/sim.sock" + sim + "}}\nplugin: {enabled: false}\n" +
			"node: {labels: {output: " + output + ", file: DIR/features.d/gpu-node-agent, removeOnExit: true}}"
	}
	p.write(config("", "file"))
	p.launch()
	await := func(what string, want map[string]string) {
		t.Helper()
		p.await(what, func() bool { return maps.Equal(labelsIn(readFile(file)), want) })
		p.awaitSocket(p.agentSocket())
		if got := p.printedLabels(); !maps.Equal(got, want) {
			t.Errorf("%s: printed %v, want %v", what, got, want)
		}
	}
	p.await("the file", func() bool { return labelsIn(readFile(file))[countLabel] == "8" })
	labels := labelsIn(readFile(file))
	await("labels", labels)
	p.sim("{gpu: 3, lost: true}")
	degraded := maps.Clone(labels)
	degraded[healthyLabel], degraded["gpu-node-agent/gpus-unhealthy"] = "7", "1"
	await("the lost GPU", degraded)
	p.sim("{source: down}")
	p.awaitSource("down")
	await("the source down", degraded)
	p.awaitState(`"state":"unhealthy"`) // unhealthy, in the saved inventory

	p.signal(syscall.SIGKILL)
	<-p.Exited()
	if got := p.printedLabels(); !maps.Equal(got, labels) { // of a simulation that starts anew
		t.Errorf("without an agent: %v", got)
	}
	p.write(config(", scenario: [{at: 0s, source: down}]", "file"))
	if got := p.printedLabels(); !maps.Equal(got, degraded) {
		t.Errorf("without an agent and source: %v", got)
	}
	p.launch()
	p.awaitSource("down")
	await("after a restart with the source down", degraded)
	p.reload(config("", "file"))
	await("with the source", labels)
	p.reload(config("", `"off"`))
	p.await("the file's end", func() bool { return readFile(file) == "" })
	if got := p.printedLabels(); !maps.Equal(got, labels) {
		t.Errorf("disabled: %v", got)
	}
	p.reload(config("", "file"))
	await("enabled again", labels)
	p.stop()
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("left after the exit: %v, %v", entries, err)
	}
}
