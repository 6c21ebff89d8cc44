//go:build cluster

package cluster

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// deletedStateDir is the state directory of TestDeletedDirectories: it can be removed, because it is no mount of the machine.
const deletedStateDir = "/run/gpu-node-agent-state"

// TestDeletedDirectories removes directories of the node that the agent's container mounts, as kubeadm reset and clean-up scripts do.
func TestDeletedDirectories(t *testing.T) {
	values := []string{
		withdrawOnStop, neverFlaps, `stateDir="` + deletedStateDir + `"`, `config.health.recovery="never"`,
		`config.health.cordon=["5"]`,
	}
	step(t, "an agent with a cordoned and an unhealthy GPU", func(t *testing.T) {
		upgrade(t, oldTag, values...)
		inject(t, "{gpu: 3, xid: 79}")
		awaitAmounts(t, gpu, "8/6")
		startPod(t, "one", gpu, "1")
		awaitRunning(t, "one")
	})
	step(t, "device-plugins is removed, and the kubelet makes it again", func(t *testing.T) {
		keeps := containerOf(t, "one")
		awaitOneRestart(t, "/var/lib/kubelet/device-plugins")
		replaceKubelet(t)
		awaitSeries(t, "gpu_node_agent_plugin_registered{", "} 1")
		awaitAmounts(t, gpu, "8/6")
		awaitSeries(t, "gpu_node_agent_device_finding{", `cause="xid-79"`)
		awaitSeries(t, "gpu_node_agent_device_finding{", `cause="cordoned"`)
		awaitSeries(t, "gpu_node_agent_device_allocated{", `pod="one"`)
		if page, err := scrapePath(t.Context(), "/readyz"); err != nil || strings.Contains(page, "deleted") {
			t.Errorf("/readyz, although nothing is lost: %v\n%s", err, page)
		}
		if n := mustAgentPod(t).Status.ContainerStatuses[0].RestartCount; n != 1 {
			t.Errorf("the container was restarted %d times, want once", n)
		}
		keeps()
		deletePods(t, "one")
	})
	step(t, "the state directory is removed", func(t *testing.T) {
		replaceAgentPod(t) // the kubelet delays the second restart of a container by 10 s
		awaitSeries(t, "gpu_node_agent_device_finding{", `cause="xid-79"`)
		awaitOneRestart(t, deletedStateDir)
		awaitReadyz(t, "", "state: the directory mounted at /var/lib/gpu-node-agent was deleted on the host at ")
		awaitEventIn(t, metav1.NamespaceDefault, nodeName, "GPUStateLost", "/var/lib/gpu-node-agent was deleted")
		awaitAmounts(t, gpu, "8/7") // the cordon is in the configuration
	})
	step(t, "the driver's directories are removed, and the kubelet makes one again", func(t *testing.T) {
		upgrade(t, oldTag, append(values, `dra.enabled=true`)...)
		awaitDevices(t, 8)
		startClaimPod(t, "default", "claims", claim(several(2, request(gpuClass)), ""))
		awaitClaimed(t, "default", "claims")
		keeps := containerOf(t, "claims")
		awaitOneRestart(t, "/var/lib/kubelet/plugins_registry", draDir)
		replaceKubelet(t)
		awaitReadyz(t, "ok\n")
		awaitDevices(t, 8)
		awaitSeries(t, "gpu_node_agent_device_allocated{", `pod="claims"`) // the pod's claim was in the directory of the driver
		keeps()
		deletePods(t, "claims")
	})
	step(t, "helm uninstall", uninstall)
}

// awaitOneRestart removes directories of the node and waits until the agent's container has ended with exit code 1 and a message, and runs
// again.
func awaitOneRestart(t *testing.T, dirs ...string) {
	t.Helper()
	pod := mustAgentPod(t)
	restarts := pod.Status.ContainerStatuses[0].RestartCount
	for _, dir := range dirs { // the agent may write a file meanwhile
		eventually(t, dir+" is removed", func(context.Context) error { return os.RemoveAll(dir) })
	}
	eventually(t, fmt.Sprintf("the agent's container is restarted without %v", dirs), func(ctx context.Context) error {
		is, err := theCluster.client.CoreV1().Pods(namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		s := is.Status.ContainerStatuses[0]
		if s.RestartCount == restarts || s.State.Running == nil {
			return fmt.Errorf("it has restarted %d times, and is %+v", s.RestartCount-restarts, s.State)
		}
		if end := s.LastTerminationState.Terminated; end == nil || end.ExitCode != 1 || s.RestartCount != restarts+1 {
			t.Errorf("%d restarts, the last after %+v; want one after exit code 1", s.RestartCount-restarts, end)
		}
		return nil
	})
	log, err := theCluster.client.CoreV1().Pods(namespace).GetLogs(pod.Name, &v1.PodLogOptions{Previous: true}).DoRaw(t.Context())
	if err != nil || !strings.Contains(string(log), ": the mounted directory was deleted on the host") {
		t.Errorf("the log of the container that ended: %v\n%s", err, log)
	}
	for _, dir := range dirs { // containerd has made what was missing
		if info, err := os.Stat(dir); err != nil || !info.IsDir() {
			t.Errorf("%s: %v", dir, err)
		}
	}
}
