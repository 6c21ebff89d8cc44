package binarytest

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// The metrics follow the driver: what it publishes, the claims that it prepares or refuses, the pods that hold them, and a handover.
func TestDRAMetrics(t *testing.T) {
	t.Parallel()
	n := newDRANode(t, kubelettest.V137)
	n.write(n.config("dra"))
	n.launch("NODE_NAME="+draNodeName, "GPU_NODE_AGENT_METRICS_CLAIM_LABELS=true")
	n.awaitServing()
	n.awaitMetrics(
		"gpu_node_agent_dra_registered 1\n", "gpu_node_agent_dra_published 1\n", "gpu_node_agent_dra_handover 0\n",
		"gpu_node_agent_dra_devices 8\n",
		"gpu_node_agent_dra_tainted_devices 0\n", "gpu_node_agent_dra_prepared_claims 0\n",
		`gpu_node_agent_dra_publish_errors_total{reason="forbidden"} 0`,
		"gpu_node_agent_dra_prepare_duration_seconds_count 0\n", "gpu_node_agent_plugin_enabled 0\n",
	)

	c := n.claim("train", "gpu-3")
	n.prepare(c)
	free := n.hold(c, "gpu-3")
	labels := `dra_claim_name="train",dra_claim_namespace="default",dra_device_name="gpu-3",` +
		`dra_driver_name="gpu.nvidia.com",dra_pool_name="node1"`
	n.awaitMetrics("gpu_node_agent_dra_prepared_claims 1\n", labels)
	_, page := n.get("/metrics")
	for line := range strings.Lines(page) {
		metric, _, _ := strings.Cut(line, "{")
		has := strings.Contains(line, labels)
		if want := strings.Contains(line, `gpu="3"`) && (strings.HasPrefix(metric, "DCGM_") ||
			metric == "gpu_node_agent_device_allocated"); has != want {
			t.Errorf("labels of the claim: %t, want %t: %s", has, want, line)
		}
	}

	n.api.Deny("create resourceslices", "update resourceslices")
	n.sim("{gpu: 5, xid: 79}")
	n.awaitMetrics("gpu_node_agent_dra_published 0\n", "gpu_node_agent_dra_tainted_devices 1\n")
	n.await("a counted refusal", func() bool {
		_, page := n.get("/metrics")
		return !strings.Contains(page, `gpu_node_agent_dra_publish_errors_total{reason="forbidden"} 0`)
	})
	n.api.Deny()
	n.awaitMetrics("gpu_node_agent_dra_published 1\n")
	for _, device := range []string{"gpu-3", "gpu-5"} {
		if _, err := n.dra.Prepare(t.Context(), draDriver, n.claim("of-"+device, device)); err == nil {
			t.Errorf("a claim of %s was prepared", device)
		}
	}
	n.awaitMetrics(
		`gpu_node_agent_dra_prepare_errors_total{reason="in_use"} 1`, `gpu_node_agent_dra_prepare_errors_total{reason="unhealthy_device"} 1`,
		"gpu_node_agent_dra_prepare_duration_seconds_count 3\n",
	)

	n.reload(n.config("devicePlugin"))
	n.awaitMetrics("gpu_node_agent_dra_handover 1\n", "gpu_node_agent_dra_devices 0\n", "gpu_node_agent_dra_published 1\n",
		"gpu_node_agent_plugin_enabled 1\n")
	free()
	n.unprepare(c)
	n.awaitAllocatable(n.kubelet, 7)
	n.await("no series of the driver", func() bool {
		_, page := n.get("/metrics")
		return !strings.Contains(page, "gpu_node_agent_dra_")
	})

	held := n.allocate(n.kubelet)
	n.reload(n.config("dra"))
	n.awaitMetrics("gpu_node_agent_dra_handover 1\n", "gpu_node_agent_dra_registered 0\n", "gpu_node_agent_dra_published 0\n")
	n.kubelet.Free(resource, held.Devices...)
	n.awaitMetrics("gpu_node_agent_dra_handover 0\n", "gpu_node_agent_dra_registered 1\n", "gpu_node_agent_dra_published 1\n")
}
