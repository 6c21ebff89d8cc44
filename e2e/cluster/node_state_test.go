//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	notReadyTaint  = "gpu-node-agent/not-ready:NoSchedule"
	unhealthyTaint = "gpu-node-agent/unhealthy:NoSchedule"
	foreignTaint   = "example.com/maintenance:PreferNoSchedule"
	foreignLabel   = "example.com/rack"
)

// asTaint returns the taint KEY:EFFECT.
func asTaint(text string) v1.Taint {
	key, effect, _ := strings.Cut(text, ":")
	return v1.Taint{Key: key, Effect: v1.TaintEffect(effect)}
}

// nodeTaints returns the taints of the node as KEY:EFFECT, in their order.
func nodeTaints(node *v1.Node) []string {
	var taints []string
	for _, t := range node.Spec.Taints {
		taints = append(taints, t.ToString())
	}
	return taints
}

// awaitNodeTaints waits until the node has exactly these taints, in this order.
func awaitNodeTaints(t *testing.T, want ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("the node has the taints %v", want), func(ctx context.Context) error {
		node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err == nil && !slices.Equal(nodeTaints(node), want) {
			err = fmt.Errorf("it has %v", nodeTaints(node))
		}
		return err
	})
}

// agentLabels returns the labels of the node that the agent can write.
func agentLabels(ctx context.Context) (map[string]string, error) {
	node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	labels := make(map[string]string)
	for key, value := range node.Labels {
		if prefix, _, _ := strings.Cut(key, "/"); prefix == "nvidia.com" || prefix == "gpu-node-agent" {
			labels[key] = value
		}
	}
	return labels, nil
}

// printedLabels returns the labels that `gpu-node-agent labels` prints.
func printedLabels(ctx context.Context) (map[string]string, error) {
	out, err := tryInAgent(ctx, "labels")
	if err != nil {
		return nil, err
	}
	labels := make(map[string]string)
	for line := range strings.Lines(out) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			labels[key] = value
		}
	}
	return labels, nil
}

// allocatableAtRemoval watches the node until it lacks a taint, and returns how many devices of nvidia.com/gpu the kubelet has then.
func allocatableAtRemoval(t *testing.T, taint string) <-chan int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	watch, err := theCluster.watcher.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + nodeName})
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	kubelet := podResources(t)
	found := make(chan int, 1)
	go func() {
		defer close(found)
		defer cancel()
		defer watch.Stop()
		for e := range watch.ResultChan() {
			node, ok := e.Object.(*v1.Node)
			if !ok || slices.Contains(nodeTaints(node), taint) {
				continue
			}
			all, err := kubelet.GetAllocatableResources(ctx, &podresourcesapi.AllocatableResourcesRequest{})
			if err != nil {
				return
			}
			n := 0
			for _, d := range all.Devices {
				if d.ResourceName == gpu {
					n += len(d.DeviceIds)
				}
			}
			found <- n
			return
		}
	}()
	return found
}

// TestNodeState has the agent write labels and taints of its node.
func TestNodeState(t *testing.T) {
	const taints = `{"when": "anyUnhealthy", "key": "gpu-node-agent/unhealthy", "effect": "NoSchedule"}`
	values := []string{
		withdrawOnStop, neverFlaps, `config.node.startupTaint="` + notReadyTaint + `"`, `config.node.labels.output="api"`,
		`config.node.taints=[` + taints + `]`,
	}
	addTaint(t, nodeName, asTaint(notReadyTaint))
	removeForeign := addTaint(t, nodeName, asTaint(foreignTaint))
	setNodeLabel(t, foreignLabel, "r1")
	other := otherNode(t)
	step(t, "the startup taint stays while no GPU is offered", func(t *testing.T) {
		startPod(t, "waits", gpu, "8")
		helm(t, upgradeArgs(oldTag, append(values, `config.source.sim.scenario=[{"at": "0s", "source": "down"}]`)...)...)
		awaitSeries(t, "gpu_node_agent_source_up 0")
		awaitPending(t, "waits", "untolerated taint")
		awaitNodeTaints(t, notReadyTaint, foreignTaint)
	})
	step(t, "the agent removes it when the kubelet has all GPUs", func(t *testing.T) {
		removed := allocatableAtRemoval(t, notReadyTaint)
		inject(t, "{source: up}")
		if n := <-removed; n != 8 {
			t.Errorf("the kubelet has %d GPUs when the taint is removed, want 8", n)
		}
		awaitNodeTaints(t, foreignTaint)
		awaitRunning(t, "waits")
		deletePods(t, "waits")
	})
	step(t, "the node has the labels of its GPUs", func(t *testing.T) {
		awaitLabels(t, map[string]string{
			"nvidia.com/gpu.count": "8", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559",
			"nvidia.com/gpu.family":   "hopper",
			"nvidia.com/gpu.replicas": "1", "nvidia.com/gpu.sharing-strategy": "none", "nvidia.com/mig.capable": "true",
			"nvidia.com/gfd.timestamp":    "",
			"gpu-node-agent/gpus-healthy": "8", "gpu-node-agent/gpus-degraded": "0", "gpu-node-agent/gpus-unhealthy": "0", foreignLabel: "r1",
		})
		eventually(t, "the node has the labels that the command prints", func(ctx context.Context) error {
			have, err := agentLabels(ctx)
			want, printErr := printedLabels(ctx)
			if err := errors.Join(err, printErr); err != nil || len(want) < 10 || !maps.Equal(have, want) {
				return fmt.Errorf("the node has %v, the command prints %v; %w", have, want, err)
			}
			return nil
		})
	})
	step(t, "an unhealthy GPU is a label and a taint", func(t *testing.T) {
		inject(t, "{gpu: 3, xid: 79, lost: true}")
		awaitNodeTaints(t, foreignTaint, unhealthyTaint)
		awaitLabels(t, map[string]string{"gpu-node-agent/gpus-unhealthy": "1", "gpu-node-agent/gpus-healthy": "7", "nvidia.com/gpu.count": "8"})
		startPod(t, "waits", gpu, "1")
		awaitPending(t, "waits", "untolerated taint")
	})
	step(t, "the taint is removed when the GPU is back", func(t *testing.T) {
		inject(t, "{gpu: 3, lost: false}")
		awaitNodeTaints(t, foreignTaint)
		awaitLabels(t, map[string]string{"gpu-node-agent/gpus-unhealthy": "0"})
		awaitRunning(t, "waits")
		deletePods(t, "waits")
	})
	step(t, "the account changes only these labels and taints, of its own node", func(t *testing.T) {
		checkNodePolicy(t, withToken(t, mustAgentPod(t)), other)
		if err := refusedByPolicy(patchNode(t.Context(), withToken(t, nil), nodeName,
			`{"metadata": {"labels": {"nvidia.com/gpu.count": "1"}}}`)); err != nil {
			t.Errorf("a token without a pod: %v", err)
		}
		awaitNodeTaints(t, foreignTaint)
	})
	step(t, "off removes what the agent wrote", func(t *testing.T) {
		inject(t, "{gpu: 3, lost: true}")
		awaitNodeTaints(t, foreignTaint, unhealthyTaint)
		helm(t, upgradeArgs(oldTag, withdrawOnStop, neverFlaps, `config.node.labels.output="off"`, `config.node.taints=[]`)...)
		awaitNodeTaints(t, foreignTaint)
		eventually(t, "no labels", func(ctx context.Context) error {
			have, err := agentLabels(ctx)
			if err == nil && len(have) > 0 {
				err = fmt.Errorf("the node has %v", have)
			}
			return err
		})
		awaitLabels(t, map[string]string{foreignLabel: "r1"})
	})
	removeForeign()
	setNodeLabel(t, foreignLabel, "")
	step(t, "helm uninstall", uninstall)
}

func patchNode(ctx context.Context, client *kubernetes.Clientset, node, patch string) error {
	_, err := client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// checkNodePolicy checks which changes of nodes an agent's token can make. It leaves the node as it is.
func checkNodePolicy(t *testing.T, agent *kubernetes.Clientset, other string) {
	t.Helper()
	const foreign = `{"key": "example.com/maintenance", "effect": "PreferNoSchedule"}`
	for name, c := range map[string]struct {
		node, patch string
		admitted    bool
	}{
		"a label of the agent": {nodeName, `{"metadata": {"labels": {"gpu-node-agent/gpus-degraded": "0"}}}`, true},
		"a label of the GPUs":  {nodeName, `{"metadata": {"labels": {"nvidia.com/gpu.count": "8"}}}`, true},
		"its taint": {
			nodeName, `{"spec": {"taints": [` + foreign + `, {"key": "gpu-node-agent/unhealthy", "effect": "NoSchedule"}]}}`,
			true,
		},
		"another node's label": {other, `{"metadata": {"labels": {"nvidia.com/gpu.count": "8"}}}`, false},
		"another node's taint": {other, `{"spec": {"taints": []}}`, false},
		"another label":        {nodeName, `{"metadata": {"labels": {"a": "b"}}}`, false},
		"a label of a role":    {nodeName, `{"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}`, false},
		"a label less":         {nodeName, `{"metadata": {"labels": {"` + foreignLabel + `": null}}}`, false},
		"another taint":        {nodeName, `{"spec": {"taints": [` + foreign + `, {"key": "example.com/other", "effect": "NoExecute"}]}}`, false},
		"its taint with NoExecute": {nodeName, `{"spec": {"taints": [` + foreign +
			`, {"key": "gpu-node-agent/unhealthy", "effect": "NoExecute"}]}}`, false},
		"a taint less":           {nodeName, `{"spec": {"taints": []}}`, false},
		"another taint's effect": {nodeName, `{"spec": {"taints": [{"key": "example.com/maintenance", "effect": "NoSchedule"}]}}`, false},
		"unschedulable":          {nodeName, `{"spec": {"unschedulable": true}}`, false},
		"the provider's ID":      {nodeName, `{"spec": {"providerID": "x"}}`, false},
		"an annotation":          {nodeName, `{"metadata": {"annotations": {"a": "b"}}}`, false},
		"a finalizer":            {nodeName, `{"metadata": {"finalizers": ["example.com/x"]}}`, false},
		"an owner": {
			nodeName,
			`{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "x"}]}}`, false,
		},
		"its label and another label": {nodeName, `{"metadata": {"labels": {"nvidia.com/gpu.count": "8", "a": "b"}}}`, false},
	} {
		err := patchNode(t.Context(), agent, c.node, c.patch)
		if !c.admitted {
			err = refusedByPolicy(err)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := patchNode(t.Context(), agent, nodeName, `{"spec": {"taints": [`+foreign+`]}}`); err != nil {
		t.Errorf("none of its taints: %v", err)
	}
}
