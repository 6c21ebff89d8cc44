package binarytest

import (
	"fmt"
	"html"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

func TestCordon(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	p.reload(simConfig + "\nhealth: {recoverAfter: 0s, cordon: ['2', GPU-of-another-node]}")
	p.awaitAllocatable(k, 7)
	p.awaitMetrics(`cause="cordoned"`)
	p.await("the reference without a device in the log", func() bool { return strings.Contains(p.log(), `["GPU-of-another-node"]`) })
	p.reload(simConfig + "\nhealth: {recoverAfter: 0s}")
	p.awaitAllocatable(k, 8)
}

// A reference without a device and a setting without effect are shown wherever an operator looks.
func TestRefsWithoutDevice(t *testing.T) {
	t.Parallel()
	config := strings.Replace(simConfig, "sim, ", "sim, address: localhost, ", 1) +
		"\nhealth: {cordon: ['2', '9', GPU-111]}\nplugin: {kubeletDir: DIR, exclude: ['3:0', '*L4*']}"
	p := start(t, config)
	cordon, exclude := `health.cordon: no device of this node matches "9", "GPU-111"`, `plugin.exclude: no device of this node matches "3:0"`
	const address = "source.address: localhost:5555 has no effect: source.mode is sim"
	p.awaitMetrics("gpu_node_agent_unmatched_refs 3\n")
	p.awaitPage("/", http.StatusOK, html.EscapeString(cordon), html.EscapeString(exclude), address)
	for _, args := range [][]string{{"status"}, {"status", "-o", "wide"}, {"check-config"}, {"doctor"}} {
		out, _ := run(t, append(args, "--config", p.config())...)
		for _, want := range []string{cordon, exclude, address} {
			if text := strings.Join(strings.Fields(out), " "); !strings.Contains(text, want) {
				t.Errorf("%q lacks %q:\n%s", args, want, out)
			}
		}
	}
	if n := len(p.snapshot().Config.Notes); n != 3 {
		t.Errorf("notes %q", p.snapshot().Config.Notes)
	}
	p.reload(strings.ReplaceAll(strings.ReplaceAll(config, "'9', GPU-111", "'0'"), "'3:0', ", ""))
	p.awaitMetrics("gpu_node_agent_unmatched_refs 0\n")

	p.write(strings.Replace(config, "sim: {", "sim: {scenario: [{source: down}], ", 1))
	if out, code := run(t, "check-config", "--config", p.config()); code != 0 ||
		!strings.Contains(out, "note: health.cordon, plugin.exclude: not compared with the devices of this node: ") {
		t.Errorf("without a source: %d: %s", code, out)
	}
}

// With health.isolatePending, a GPU that waits for a reset gets no new pod after its pod ended.
func TestIsolatePending(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig+"\nhealth: {isolatePending: true, recoverAfter: 0s}")
	job := p.allocate(k)
	index := slices.IndexFunc(p.snapshot().GPUs, func(d status.Device) bool { return string(d.UUID) == job.Devices[0] })
	p.sim(fmt.Sprintf("{gpu: %d, rowRemapPending: true}", index))
	p.awaitMetrics(`cause="row-remap-pending"`, `state="degraded"} 1`)
	p.awaitAllocatable(k, 8)
	k.Free(resource, job.Devices...)
	p.awaitAllocatable(k, 7)
	p.awaitMetrics(`cause="isolated"`)
	p.sim(fmt.Sprintf("{gpu: %d, rowRemapPending: false}", index))
	p.awaitAllocatable(k, 8)
}
