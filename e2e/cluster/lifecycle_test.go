//go:build cluster

package cluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// TestCluster checks an installation from helm install to helm uninstall.
func TestCluster(t *testing.T) {
	var holder, index string // device of pod one, and its index
	step(t, "the API server accepts the chart's objects for every values file", validateObjects)
	step(t, "helm install provides the node's GPUs", func(t *testing.T) {
		upgrade(t, oldTag)
		awaitAmounts(t, gpu, "8/8")
		checkConfined(t)
	})
	step(t, "a pod gets the GPU that it requests", func(t *testing.T) {
		startPod(t, "one", gpu, "1")
		holder = awaitRunning(t, "one")
		if !strings.HasPrefix(holder, "GPU-") || strings.Contains(holder, ",") {
			t.Errorf("pod sees %q, want one UUID", holder)
		}
		awaitDeviceHealth(t, "one", "Healthy")
		awaitSeries(t, "gpu_node_agent_device_allocated{", `pod="one"`, holder)
	})
	step(t, "commands in NOTES.txt", func(t *testing.T) {
		if output := inAgent(t, "status"); !strings.Contains(output, "default/one") {
			t.Errorf("status lacks pod one:\n%s", output)
		}
		t.Logf("%s", inAgent(t, "doctor"))
	})
	step(t, "eight pods use eight GPUs, and the ninth is pending", func(t *testing.T) {
		seen := []string{holder}
		for i := range 7 {
			startPod(t, fmt.Sprintf("more-%d", i), gpu, "1")
		}
		for i := range 7 {
			if d := awaitRunning(t, fmt.Sprintf("more-%d", i)); slices.Contains(seen, d) {
				t.Errorf("pod more-%d has %s, which another pod has", i, d)
			} else {
				seen = append(seen, d)
			}
		}
		startPod(t, "ninth", gpu, "1")
		awaitPending(t, "ninth", "Insufficient nvidia.com/gpu")
		deletePods(t, "ninth", "more-0", "more-1", "more-2", "more-3", "more-4", "more-5", "more-6")
	})
	prometheus := startPrometheus(t)
	step(t, "Prometheus has the holder of a GPU, and no holder of the others", func(t *testing.T) {
		prometheus.awaitCount(t, `DCGM_FI_DEV_GPU_TEMP{instance="`+nodeName+`", pod="one", namespace="default", container="work"}`, 1)
		prometheus.awaitCount(t, `DCGM_FI_DEV_GPU_TEMP{pod="", namespace="", container=""}`, 7)
	})
	step(t, "XID 79 makes a GPU unallocatable", func(t *testing.T) {
		page, err := scrape(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		line, err := findLine(page, "gpu_node_agent_device_state{", holder)
		if err != nil {
			t.Fatal(err)
		}
		index = label(line, "gpu")
		inject(t, "{gpu: %s, xid: 79}", index)
		awaitAmounts(t, gpu, "8/7")
		awaitDeviceHealth(t, "one", "Unhealthy")
		awaitSeries(t, "gpu_node_agent_device_finding{", holder, `cause="xid-79"`, `severity="unhealthy"`)
		awaitSeries(t, "gpu_node_agent_device_allocated{", holder, `pod="one"`, `namespace="default"`)
		awaitSeries(t, "DCGM_FI_DEV_GPU_TEMP{", holder, `pod="one"`)
		awaitCondition(t, v1.ConditionFalse, "Xid79")
		awaitPodEvent(t, "one", "XID")
	})
	step(t, "Prometheus fires alerts", func(t *testing.T) {
		defer measureUsage(t)()
		prometheus.awaitFiring(t, "GPUXID", "gpu", index)
		prometheus.awaitFiring(t, "GPUUnhealthy", "UUID", holder)
	})
	step(t, "a reset makes the GPU allocatable", func(t *testing.T) {
		inject(t, "{gpu: %s, lost: true}", index)
		awaitSeries(t, "gpu_node_agent_device_finding{", holder, `cause="lost"`)
		inject(t, "{gpu: %s, lost: false}", index)
		awaitAmounts(t, gpu, "8/8")
		awaitDeviceHealth(t, "one", "Healthy")
		awaitCondition(t, v1.ConditionTrue, "AllHealthy")
		prometheus.awaitResolved(t, "GPUUnhealthy")
	})
	step(t, "helm upgrade reloads the configuration without a restart", func(t *testing.T) {
		previous := mustAgentPod(t)
		upgrade(t, oldTag, `config.plugin.exclude=["7"]`)
		awaitAmounts(t, gpu, "7/7")
		checkSamePod(t, previous)
		t.Log("a configuration that only the agent refuses changes nothing")
		upgrade(t, oldTag, `config.plugin.exclude=["7"]`,
			`config.plugin.sharing.timeSlicing.resources=[{"name":"example.com/other","replicas":2}]`)
		awaitSeries(t, "gpu_node_agent_config_last_reload_successful 0")
		awaitAmounts(t, gpu, "7/7")
		checkSamePod(t, previous)
		t.Log("nor does a new pod use it")
		replaceAgentPod(t)
		previous = mustAgentPod(t)
		awaitSeries(t, "gpu_node_agent_config_last_reload_successful 0")
		awaitSeries(t, "gpu_node_agent_plugin_registered{", `"} 1`)
		awaitAmounts(t, gpu, "7/7")
		if out := inAgent(t, "status"); !strings.Contains(out, "plugin.sharing.timeSlicing.resources[0].name") {
			t.Errorf("status does not name the invalid key:\n%s", out)
		}
		upgrade(t, oldTag)
		awaitSeries(t, "gpu_node_agent_config_last_reload_successful 1")
		awaitAmounts(t, gpu, "8/8")
		checkSamePod(t, previous)
	})
	step(t, "a new version keeps registrations and pods", func(t *testing.T) {
		keepsContainer := containerOf(t, "one")
		for _, tag := range []string{newTag, oldTag, newTag, oldTag, newTag} {
			rollout(t, tag)
		}
		keepsContainer()
		awaitSeries(t, "gpu_node_agent_device_allocated{", holder, `pod="one"`)
	})
	step(t, "the agent and pods survive a restart of the kubelet", func(t *testing.T) { restartKubelet(t, holder) })
	step(t, "a new pod restores a finding, and an operator clears it", func(t *testing.T) {
		inject(t, "{gpu: %s, xid: 79}", index)
		awaitAmounts(t, gpu, "8/7")
		replaceAgentPod(t)
		awaitSeries(t, "gpu_node_agent_device_finding{", holder, `cause="xid-79"`) // from the state file on the node
		awaitAmounts(t, gpu, "8/7")
		eventually(t, "the new agent clears the finding", func(ctx context.Context) error { // its socket may come after its metrics
			_, err := tryInAgent(ctx, "clear", "--gpu", holder)
			return err
		})
		awaitAmounts(t, gpu, "8/8")
	})
	deletePods(t, "one")
	step(t, "helm uninstall leaves only the saved findings", func(t *testing.T) {
		uninstall(t)
		awaitAmounts(t, gpu, "8/0") // the kubelet removes the capacity after five minutes
	})
}

// rollout changes the version and waits until the node has its GPUs again. It logs how long the node had fewer.
func rollout(t *testing.T, tag string) {
	t.Helper()
	done := make(chan time.Duration)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		var without time.Duration
		last := time.Now()
		for ctx.Err() == nil {
			have, err := resourceAmounts(ctx, gpu)
			if err == nil && have != "8/8" {
				without += time.Since(last)
			}
			last = time.Now()
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
		done <- without
	}()
	upgrade(t, tag)
	awaitSeries(t, "gpu_node_agent_build_info{", `version="`+tag+`"`)
	awaitSeries(t, "gpu_node_agent_plugin_registered{", `resource="nvidia.com/gpu"} 1`)
	awaitAmounts(t, gpu, "8/8")
	cancel()
	t.Logf("%s: the node had fewer than 8 allocatable GPUs for %.1fs", tag, (<-done).Seconds())
}

// restartKubelet checks that a pod keeps its container and its device, and the node its GPUs.
func restartKubelet(t *testing.T, device string) {
	keepsContainer := containerOf(t, "one")
	agent := mustAgentPod(t)
	stopKubelet()
	awaitSeries(t, "gpu_node_agent_plugin_registered{", "} 0")
	startKubelet(t)
	awaitSeries(t, "gpu_node_agent_plugin_registered{", "} 1")
	awaitSeries(t, "gpu_node_agent_device_allocated{", device, `pod="one"`)
	awaitKubeletDevices(t, gpu, 8)
	awaitAmounts(t, gpu, "8/8")
	checkSamePod(t, agent)
	keepsContainer()
	startPod(t, "after", gpu, "1")
	if d := awaitRunning(t, "after"); d == device {
		t.Errorf("a new pod got %s, which pod one holds", d)
	}
	deletePods(t, "after")
}
