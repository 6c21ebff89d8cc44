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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestCluster checks an installation from helm install to helm uninstall.
func TestCluster(t *testing.T) {
	var holder, index string // device of pod one, and its index
	step(t, "the API server accepts the chart's objects for every values file", everyObjectIsValid)
	step(t, "helm install provides the node's GPUs", func(t *testing.T) {
		upgrade(t, oldTag)
		nodeHas(t, gpu, "8/8")
		confined(t)
	})
	step(t, "a pod gets the GPU that it requests", func(t *testing.T) {
		start(t, "one", gpu, "1")
		holder = running(t, "one")
		if !strings.HasPrefix(holder, "GPU-") || strings.Contains(holder, ",") {
			t.Errorf("pod sees %q, want one UUID", holder)
		}
		deviceHealth(t, "one", "Healthy")
		shows(t, "gpu_node_agent_device_allocated{", `pod="one"`, holder)
	})
	step(t, "commands in NOTES.txt", func(t *testing.T) {
		if said := inAgent(t, "status"); !strings.Contains(said, "default/one") {
			t.Errorf("status lacks pod one:\n%s", said)
		}
		t.Logf("%s", inAgent(t, "doctor"))
	})
	step(t, "eight pods use eight GPUs, and the ninth is pending", func(t *testing.T) {
		seen := []string{holder}
		for i := range 7 {
			start(t, fmt.Sprintf("more-%d", i), gpu, "1")
		}
		for i := range 7 {
			if d := running(t, fmt.Sprintf("more-%d", i)); slices.Contains(seen, d) {
				t.Errorf("pod more-%d has %s, which another pod has", i, d)
			} else {
				seen = append(seen, d)
			}
		}
		start(t, "ninth", gpu, "1")
		pending(t, "ninth", "Insufficient nvidia.com/gpu")
		end(t, "ninth", "more-0", "more-1", "more-2", "more-3", "more-4", "more-5", "more-6")
	})
	prometheus := startPrometheus(t)
	step(t, "Prometheus has the holder of a GPU, and no holder of the others", func(t *testing.T) {
		prometheus.counts(t, `DCGM_FI_DEV_GPU_TEMP{instance="`+nodeName+`", pod="one", namespace="default", container="work"}`, 1)
		prometheus.counts(t, `DCGM_FI_DEV_GPU_TEMP{pod="", namespace="", container=""}`, 7)
	})
	step(t, "XID 79 makes a GPU unallocatable", func(t *testing.T) {
		page, err := scrape(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		line, err := lineOf(page, "gpu_node_agent_device_state{", holder)
		if err != nil {
			t.Fatal(err)
		}
		index = label(line, "gpu")
		inject(t, "{gpu: %s, xid: 79}", index)
		nodeHas(t, gpu, "8/7")
		deviceHealth(t, "one", "Unhealthy")
		shows(t, "gpu_node_agent_device_finding{", holder, `cause="xid-79"`, `severity="unhealthy"`)
		shows(t, "gpu_node_agent_device_allocated{", holder, `pod="one"`, `namespace="default"`)
		shows(t, "DCGM_FI_DEV_GPU_TEMP{", holder, `pod="one"`)
		nodeSays(t, v1.ConditionFalse, "Xid79")
		podHasEvent(t, "one", "XID")
	})
	step(t, "Prometheus fires alerts", func(t *testing.T) {
		defer busy(t)()
		prometheus.fires(t, "GPUXID", "gpu", index)
		prometheus.fires(t, "GPUUnhealthy", "UUID", holder)
	})
	step(t, "a reset makes the GPU allocatable", func(t *testing.T) {
		inject(t, "{gpu: %s, lost: true}", index)
		shows(t, "gpu_node_agent_device_finding{", holder, `cause="lost"`)
		inject(t, "{gpu: %s, lost: false}", index)
		nodeHas(t, gpu, "8/8")
		deviceHealth(t, "one", "Healthy")
		nodeSays(t, v1.ConditionTrue, "AllHealthy")
		prometheus.silent(t, "GPUUnhealthy")
	})
	step(t, "helm upgrade reloads the configuration without a restart", func(t *testing.T) {
		was := mustAgentPod(t)
		upgrade(t, oldTag, `config.plugin.exclude=["7"]`)
		nodeHas(t, gpu, "7/7")
		same(t, was)
		t.Log("a configuration that only the agent refuses changes nothing")
		upgrade(t, oldTag, `config.plugin.exclude=["7"]`, `config.plugin.resource="gpu"`)
		shows(t, "gpu_node_agent_config_last_reload_successful 0")
		nodeHas(t, gpu, "7/7")
		same(t, was)
		upgrade(t, oldTag)
		shows(t, "gpu_node_agent_config_last_reload_successful 1")
		nodeHas(t, gpu, "8/8")
		same(t, was)
	})
	step(t, "a new version keeps registrations and pods", func(t *testing.T) {
		keepsContainer := containerOf(t, "one")
		for _, tag := range []string{newTag, oldTag, newTag, oldTag, newTag} {
			rollout(t, tag)
		}
		keepsContainer()
		shows(t, "gpu_node_agent_device_allocated{", holder, `pod="one"`)
	})
	step(t, "the agent and pods survive a restart of the kubelet", func(t *testing.T) { restartKubelet(t, holder) })
	step(t, "a new pod restores a finding, and an operator clears it", func(t *testing.T) {
		inject(t, "{gpu: %s, xid: 79}", index)
		nodeHas(t, gpu, "8/7")
		was := mustAgentPod(t)
		if err := theCluster.client.CoreV1().Pods(namespace).Delete(t.Context(), was.Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if is := mustAgentPod(t); is.UID == was.UID {
			t.Fatal("the agent's pod was not replaced")
		}
		shows(t, "gpu_node_agent_device_finding{", holder, `cause="xid-79"`) // from the state file on the node
		nodeHas(t, gpu, "8/7")
		eventually(t, "the new agent clears the finding", func(ctx context.Context) error { // its socket may come after its metrics
			_, err := tryInAgent(ctx, "clear", "--gpu", holder)
			return err
		})
		nodeHas(t, gpu, "8/8")
	})
	end(t, "one")
	step(t, "helm uninstall leaves only the saved findings", func(t *testing.T) {
		uninstall(t)
		nodeHas(t, gpu, "8/0") // the kubelet removes the capacity after five minutes
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
			have, err := amounts(ctx, gpu)
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
	shows(t, "gpu_node_agent_build_info{", `version="`+tag+`"`)
	shows(t, "gpu_node_agent_plugin_registered{", `resource="nvidia.com/gpu"} 1`)
	nodeHas(t, gpu, "8/8")
	cancel()
	t.Logf("%s: the node had fewer than 8 allocatable GPUs for %.1fs", tag, (<-done).Seconds())
}

// restartKubelet checks that a pod keeps its container and its device, and the node its GPUs.
func restartKubelet(t *testing.T, device string) {
	keepsContainer := containerOf(t, "one")
	agent := mustAgentPod(t)
	_ = theCluster.kubelet.Stop() // its exit status does not matter
	shows(t, "gpu_node_agent_plugin_registered{", "} 0")
	if err := theCluster.startKubelet(); err != nil {
		t.Fatal(err)
	}
	shows(t, "gpu_node_agent_plugin_registered{", "} 1")
	shows(t, "gpu_node_agent_device_allocated{", device, `pod="one"`)
	kubeletGives(t, 8)
	nodeHas(t, gpu, "8/8")
	same(t, agent)
	keepsContainer()
	start(t, "after", gpu, "1")
	if d := running(t, "after"); d == device {
		t.Errorf("a new pod got %s, which pod one holds", d)
	}
	end(t, "after")
}
