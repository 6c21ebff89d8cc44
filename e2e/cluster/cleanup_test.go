//go:build cluster

package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestCleanup drops what agents write of their node, while the node has their taint: by an upgrade, a rollback and helm uninstall.
func TestCleanup(t *testing.T) {
	base := []string{withdrawOnStop, neverFlaps, `minReadySeconds=0`, `config.health.kubernetes.enabled=false`, `rbac.cleanupHook=true`}
	var faults []string
	for i := range 8 {
		faults = append(faults, fmt.Sprintf(`{"at": "0s", "gpu": %d, "xid": 79}`, i))
	}
	with := append(slices.Clone(base), `config.source.sim.scenario=[`+strings.Join(faults, ", ")+`]`,
		`config.node={"labels": {"output": "api"}, `+
			`"taints": [{"when": "allUnhealthy", "key": "gpu-node-agent/unhealthy", "effect": "NoSchedule"}]}`)
	t.Cleanup(func() {
		if err := os.Remove(stateDir + "/state.sim.json"); err != nil { // other tests need GPUs without XID 79
			t.Error(err)
		}
	})
	step(t, "default agents", func(t *testing.T) {
		upgrade(t, oldTag, base...) // revision 1
		if account := mustAgentPod(t).Spec.AutomountServiceAccountToken; account == nil || *account {
			t.Fatalf("the agent has a token: %v", account)
		}
	})
	step(t, "a fault of all GPUs taints the node", func(t *testing.T) {
		helm(t, upgradeArgs(oldTag, with...)...)
		awaitNodeTaints(t, unhealthyTaint)
		awaitLabels(t, map[string]string{"gpu-node-agent/gpus-unhealthy": "8", "nvidia.com/gpu.count": "8"})
		startPod(t, "cpu", "cpu", "10m")
		awaitPending(t, "cpu", "untolerated taint")
	})
	step(t, "an upgrade without config.node", func(t *testing.T) {
		helm(t, upgradeArgs(oldTag, base...)...)
		awaitClean(t, "cpu")
	})
	step(t, "the agent learns that nothing is left", func(t *testing.T) {
		at := mustAgentPod(t).Annotations["gpu-node-agent/cleaned"]
		if at == "" {
			t.Fatal("the pod has no annotation")
		}
		eventually(t, "the state file has the time of the annotation", func(context.Context) error {
			text, err := os.ReadFile(stateDir + "/node.json")
			if err == nil && !strings.Contains(string(text), at) {
				err = fmt.Errorf("no %s in:\n%s", at, text)
			}
			return err
		})
		awaitNoLeftovers(t)
	})
	step(t, "a rollback to a revision without config.node", func(t *testing.T) {
		helm(t, upgradeArgs(oldTag, with...)...)
		awaitNodeTaints(t, unhealthyTaint)
		startPod(t, "cpu", "cpu", "10m")
		awaitPending(t, "cpu", "untolerated taint")
		helm(t, "rollback", release, "1", "-n", namespace)
		awaitClean(t, "cpu")
	})
	step(t, "without the hook, the agent names what is left and the command that removes it", func(t *testing.T) {
		helm(t, upgradeArgs(oldTag, with...)...)
		awaitNodeTaints(t, unhealthyTaint)
		helm(t, upgradeArgs(oldTag, append(base, `rbac.cleanupHook=false`)...)...)
		awaitSeries(t, `gpu_node_agent_node_leftovers{kind="labels"} 1`)
		awaitSeries(t, `gpu_node_agent_node_leftovers{kind="taints"} 1`)
		page, err := scrapePath(t.Context(), "/readyz")
		if err != nil || !strings.Contains(page, "gpu-node-agent cleanup --context NAME --apply") {
			t.Errorf("%v\n%s", err, page)
		}
		awaitNodeTaints(t, unhealthyTaint)
		cleanUp(t)
		awaitNodeTaints(t)
		awaitNoLeftovers(t)
	})
	step(t, "helm uninstall", func(t *testing.T) {
		helm(t, upgradeArgs(oldTag, with...)...)
		awaitNodeTaints(t, unhealthyTaint)
		uninstall(t)
		awaitClean(t)
	})
}

// cleanUp runs the command that /readyz and the notes name.
func cleanUp(t *testing.T) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), theCluster.file("gpu-node-agent-"+oldTag), "cleanup", "--kubeconfig",
		theCluster.pki.Kubeconfig(admin), "--apply").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// awaitNoLeftovers waits until the agent names nothing that is left.
func awaitNoLeftovers(t *testing.T) {
	t.Helper()
	eventually(t, "no series of leftovers", func(ctx context.Context) error {
		page, err := scrape(ctx)
		if err == nil && strings.Contains(page, "gpu_node_agent_node_leftovers") {
			err = fmt.Errorf("the agent has something to remove")
		}
		return err
	})
}

// awaitClean waits until pods that no GPU concerns run, and the node has nothing of agents. Objects of the hook are gone.
func awaitClean(t *testing.T, pods ...string) {
	t.Helper()
	for _, name := range pods {
		eventuallyWithin(t, time.Minute, "pod "+name+" runs", func(ctx context.Context) error {
			pod, err := getPod(ctx, name)
			if err == nil && pod.Status.Phase != v1.PodRunning {
				err = fmt.Errorf("pod is %s: %v", pod.Status.Phase, pod.Status.Conditions)
			}
			return err
		})
	}
	awaitNodeTaints(t)
	eventually(t, "no labels, no annotation, no hook", func(ctx context.Context) error {
		node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		labels, err := agentLabels(ctx)
		if err != nil || len(labels) > 0 || node.Annotations["gpu-node-agent/taints"] != "" {
			return fmt.Errorf("labels %v, annotations %v, %w", labels, node.Annotations, err)
		}
		jobs, err := theCluster.client.BatchV1().Jobs(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		accounts, err := theCluster.client.CoreV1().ServiceAccounts(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		roles, err := theCluster.client.RbacV1().ClusterRoles().List(ctx,
			metav1.ListOptions{LabelSelector: "app.kubernetes.io/instance=" + release})
		if err != nil {
			return err
		}
		if len(jobs.Items) > 0 || len(roles.Items) > 0 {
			return fmt.Errorf("%d Jobs and %d cluster roles", len(jobs.Items), len(roles.Items))
		}
		for _, account := range accounts.Items {
			if strings.HasSuffix(account.Name, "-cleanup") {
				return fmt.Errorf("account %s", account.Name)
			}
		}
		return nil
	})
	deletePods(t, pods...)
}
