//go:build cluster

package cluster

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// setNodeLabel sets a label of the node; "" removes it.
func setNodeLabel(t *testing.T, label, value string) {
	t.Helper()
	text := "null"
	if value != "" {
		text = fmt.Sprintf("%q", value)
	}
	patch := fmt.Appendf(nil, `{"metadata": {"labels": {%q: %s}}}`, label, text)
	if _, err := theCluster.client.CoreV1().Nodes().Patch(t.Context(), nodeName, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// withdrawOnStop makes the agent withdraw its resources when it stops.
const withdrawOnStop = `config.plugin.onStop="withdraw"`

// TestNodeConfigs selects configurations by a label of the node: time-slicing, MIG, none.
func TestNodeConfigs(t *testing.T) {
	const shared, small, large v1.ResourceName = "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
	values := []string{
		withdrawOnStop,
		`nodeConfigs.shared={"plugin": {"sharing": {"timeSlicing": {"resources": [` +
			`{"name": "nvidia.com/gpu", "replicas": 4, "rename": "nvidia.com/gpu.shared"}]}}}}`,
		`nodeConfigs.mig={"source": {"sim": {"profile": "h100-8-mig"}}, "plugin": {"migStrategy": "mixed"}}`,
	}
	step(t, "a node without the label has the default configuration", func(t *testing.T) {
		upgrade(t, oldTag, values...)
		awaitAmounts(t, gpu, "8/8")
	})
	overlap := watchOverlap(t)
	step(t, "label selects time-slicing", func(t *testing.T) {
		setNodeLabel(t, "gpu-node-agent/config", "shared")
		awaitAmounts(t, shared, "32/32")
		awaitAmounts(t, gpu, "0/0")
		startPod(t, "share", shared, "1")
		if devices := awaitRunning(t, "share"); !strings.HasPrefix(devices, "GPU-") {
			t.Errorf("the pod has %q", devices)
		}
		awaitSeries(t, "gpu_node_agent_device_allocated{", `pod="share"`, `resource="nvidia.com/gpu.shared"`)
		deletePods(t, "share")
	})
	step(t, "label selects MIG with strategy mixed", func(t *testing.T) {
		setNodeLabel(t, "gpu-node-agent/config", "mig")
		awaitAmounts(t, small, "46/46")
		awaitAmounts(t, large, "2/2")
		awaitAmounts(t, shared, "0/0")
		startPod(t, "slice", large, "1")
		if devices := awaitRunning(t, "slice"); !strings.HasPrefix(devices, "MIG-") {
			t.Errorf("the pod has %q", devices)
		}
		startPod(t, "too-many", large, "2")
		awaitPending(t, "too-many", "Insufficient nvidia.com/mig-3g.40gb")
		deletePods(t, "slice", "too-many")
	})
	step(t, "an unknown configuration selects the default", func(t *testing.T) {
		setNodeLabel(t, "gpu-node-agent/config", "nobody")
		awaitAmounts(t, gpu, "8/8")
		awaitAmounts(t, small, "0/0")
		setNodeLabel(t, "gpu-node-agent/config", "")
	})
	step(t, "never two agents on the node", overlap)
	step(t, "helm uninstall", uninstall)
	awaitAmounts(t, gpu, "0/0")
}

// watchOverlap counts the agents' processes until the returned function is called.
func watchOverlap(t *testing.T) func(*testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	most := make(chan int)
	go func() {
		n := 0
		for ctx.Err() == nil {
			n = max(n, len(agentProcesses()))
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
		most <- n
	}()
	return func(t *testing.T) {
		cancel()
		if n := <-most; n != 1 {
			t.Errorf("up to %d agents ran at the same time, want 1", n)
		}
	}
}

// TestGPUOperator installs the chart as on a node of the GPU Operator, whose label and files the test creates.
func TestGPUOperator(t *testing.T) {
	class := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "nvidia"}
	if _, err := theCluster.client.NodeV1().RuntimeClasses().Create(t.Context(), class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	const validations = "/run/nvidia/validations"
	step(t, "no agent where the operator deploys no plugin", func(t *testing.T) {
		helm(t, append(upgradeArgs(oldTag, withdrawOnStop), "-f", "../../charts/gpu-node-agent/ci/gpu-operator-values.yaml")...)
		awaitNoPod(t)
	})
	step(t, "the operator's label starts the agent, which waits for the toolkit", func(t *testing.T) {
		setNodeLabel(t, "nvidia.com/gpu.deploy.device-plugin", "true")
		eventually(t, "the agent waits", func(ctx context.Context) error {
			all, err := agentPods(ctx)
			if err != nil || len(all) != 1 || len(all[0].Status.InitContainerStatuses) != 1 {
				return fmt.Errorf("%d pods: %w", len(all), err)
			}
			if all[0].Status.InitContainerStatuses[0].State.Running == nil {
				return fmt.Errorf("init container is %v", all[0].Status.InitContainerStatuses[0].State)
			}
			return nil
		})
		if err := os.WriteFile(validations+"/toolkit-ready", nil, 0o644); err != nil {
			t.Fatal(err)
		}
		awaitAmounts(t, gpu, "8/8")
	})
	step(t, "the operator removes the label to repartition a GPU", func(t *testing.T) {
		setNodeLabel(t, "nvidia.com/gpu.deploy.device-plugin", "paused-for-mig-change")
		eventually(t, "no agent", func(ctx context.Context) error {
			if all, err := agentPods(ctx); err != nil || len(all) > 0 {
				return fmt.Errorf("%d pods: %w", len(all), err)
			}
			return nil
		})
		awaitAmounts(t, gpu, "0/0")
		setNodeLabel(t, "nvidia.com/gpu.deploy.device-plugin", "")
	})
	step(t, "helm uninstall", uninstall)
}

// awaitNoPod waits until the DaemonSet is processed and selects no node.
func awaitNoPod(t *testing.T) {
	t.Helper()
	eventually(t, "DaemonSet selects no node", func(ctx context.Context) error {
		ds, err := theCluster.client.AppsV1().DaemonSets(namespace).Get(ctx, release+"-gpu-node-agent", metav1.GetOptions{})
		if err == nil && (ds.Status.ObservedGeneration == 0 || ds.Status.DesiredNumberScheduled != 0) {
			err = fmt.Errorf("it selects %d", ds.Status.DesiredNumberScheduled)
		}
		return err
	})
}

// TestWithoutDriver installs the chart's defaults on a node with a GPU's label, but without GPU and DCGM.
func TestWithoutDriver(t *testing.T) {
	args := upgradeArgs(oldTag, `config.source={"mode": "auto"}`, `minReadySeconds=0`)
	step(t, "no agent on nodes without a GPU's label", func(t *testing.T) {
		setNodeLabel(t, "nvidia.com/gpu.present", "false") // set before the DaemonSet is created
		helm(t, args...)
		awaitNoPod(t)
	})
	step(t, "the label starts the agent, which runs without being ready and reports why", func(t *testing.T) {
		setNodeLabel(t, "nvidia.com/gpu.present", "true")
		eventually(t, "not ready", func(ctx context.Context) error {
			pod, err := agentPod(ctx)
			if err != nil {
				return err
			}
			c := pod.Status.ContainerStatuses[0]
			if c.Started == nil || !*c.Started || c.Ready || c.RestartCount > 0 {
				return fmt.Errorf("started %v, ready %v, restarts %d", c.Started, c.Ready, c.RestartCount)
			}
			return nil
		})
		awaitSeries(t, "gpu_node_agent_source_up 0")
		eventually(t, "/readyz names the missing library", func(ctx context.Context) error {
			output, err := scrapePath(ctx, "/readyz")
			if err == nil && !strings.Contains(output, "libdcgm.so.4") {
				err = fmt.Errorf("/readyz responds %q", output)
			}
			return err
		})
		setNodeLabel(t, "nvidia.com/gpu.present", "")
	})
	step(t, "helm uninstall", uninstall)
}

// TestTLS checks probes and metrics with TLS and a password.
func TestTLS(t *testing.T) {
	makeNamespace(t)
	file := func(name string) []byte {
		text, err := os.ReadFile(theCluster.pki.File(name))
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	secret := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Data: map[string][]byte{
		"tls.crt": file("server.crt"), "tls.key": file("server.key"),
		// The password is "secret".
		"web-config.yaml": []byte(`tls_server_config: {cert_file: tls.crt, key_file: tls.key}
basic_auth_users: {prometheus: $2y$10$abcdefghijklmnopqrstuuqflPDzB6gcMhKa1rZqKiun2YGL5sa2u}
`),
	}}
	if _, err := theCluster.client.CoreV1().Secrets(namespace).Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	step(t, "probes pass without a password", func(t *testing.T) {
		upgrade(t, oldTag, withdrawOnStop, `web.secretName="web"`)
		awaitAmounts(t, gpu, "8/8")
	})
	step(t, "the metrics require it", func(t *testing.T) {
		pod := mustAgentPod(t)
		for password, want := range map[string]int{"": http.StatusUnauthorized, "wrong": http.StatusUnauthorized, "secret": http.StatusOK} {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+pod.Status.PodIP+":9400/metrics", nil)
			if err != nil {
				t.Fatal(err)
			}
			if password != "" {
				request.SetBasicAuth("prometheus", password)
			}
			// The certificate does not have the pod's address, which is not known in advance.
			client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
			r, err := client.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			_ = r.Body.Close()
			if r.StatusCode != want {
				t.Errorf("with password %q: %s, want %d", password, r.Status, want)
			}
		}
	})
	step(t, "helm uninstall", uninstall)
	awaitAmounts(t, gpu, "0/0")
}
