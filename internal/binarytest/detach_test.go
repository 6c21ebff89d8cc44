package binarytest

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

func TestDetachRefusedWhilePodHoldsGPU(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	job := p.allocate(k)
	if out := p.command(1, "detach"); !strings.Contains(out, job.Devices[0]) || !strings.Contains(out, job.Container.Pod) {
		t.Errorf("detach does not name GPU %s and its holder %s: %s", job.Devices[0], job.Container.Pod, out)
	}
	p.awaitAllocatable(k, 8)
	k.Free(resource, job.Devices...)
	p.await("the end of the pod", func() bool { return p.countHolders(job.Container.Pod) == 0 })
	p.command(0, "detach")
	p.awaitAllocatable(k, 0)
}

// Detach, reset a GPU, attach: the finding that needed the reset has cleared.
func TestDetachAndAttach(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	p.sim("{gpu: 5, xid: 95, recoveryAction: reset}")
	p.awaitAllocatable(k, 7)
	p.command(0, "detach", "--for", "1h")
	p.awaitAllocatable(k, 0)
	p.awaitSource("detached")
	p.awaitPage("/livez", http.StatusOK)
	p.awaitMetrics("gpu_node_agent_source_detached 1", `cause="driver-released"`, `cause="xid-95"`)
	p.command(0, "detach")
	p.reload(simConfig + "\nhealth: {cordon: ['2']}")
	p.awaitMetrics("gpu_node_agent_source_detached 1", `cause="cordoned"`)
	p.sim("{gpu: 5, recoveryAction: none}") // as after nvidia-smi -r

	p.command(0, "attach")
	p.awaitAllocatable(k, 7) // all but the cordoned one
	p.awaitPage("/readyz", http.StatusOK)
	p.awaitMetrics("gpu_node_agent_source_detached 0")
	if n := p.findings("xid-95"); n != 0 {
		t.Errorf("%d GPUs have xid-95 after the reset", n)
	}
	p.command(0, "attach")
}

// Neither a restart nor a kill of the agent ends a detach: the GPUs stay withheld until attach.
func TestDetachSurvivesRestart(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*process){"stop": (*process).stop, "kill": func(p *process) { p.Kill() }} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, k := startRegistered(t, simConfig)
			p.command(0, "detach", "--for", "10m", "--force")
			end(p)
			ctx, cancel := context.WithTimeout(t.Context(), 2*awaitTimeout)
			defer cancel()
			lost, err := k.WaitFor(ctx, func(s kubelettest.State) bool { return !s.Resources[resource].Connected })
			if err != nil {
				t.Fatal(err)
			}
			p.launch()
			p.awaitMetrics("gpu_node_agent_source_detached 1")
			if n := p.findings("driver-released"); n != 8 {
				t.Errorf("%d GPUs are withheld, want 8", n)
			}
			p.awaitSource("detached")
			p.awaitPage("/livez", http.StatusOK)
			state, err := k.WaitFor(ctx, func(s kubelettest.State) bool {
				return s.Resources[resource].Messages > lost.Resources[resource].Messages
			})
			if err != nil {
				t.Fatal(err)
			}
			if r := state.Resources[resource]; r.Capacity() != 8 || r.Allocatable() != 0 {
				t.Errorf("the kubelet counts %d healthy GPUs of %d", r.Allocatable(), r.Capacity())
			}
			p.command(0, "attach")
			p.awaitAllocatable(k, 8)
			p.awaitMetrics("gpu_node_agent_source_up 1")
			if n := p.findings("driver-released"); n != 0 {
				t.Errorf("%d GPUs are withheld after attach", n)
			}
		})
	}
}
