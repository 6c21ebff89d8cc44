package devicemanager

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

// A GPU fails and recovers while the kubelet and the agent restart. At every step the kubelet and /metrics must agree.
func TestGPUFailure(t *testing.T) {
	n := newMachine(t)
	n.StartKubelet()
	n.StartAgent()
	n.Eventually("eight GPUs, all healthy", func() error { return n.checkDevices() })
	all := slices.Collect(maps.Keys(n.Kubelet.Healthy(node.GPU)))

	one := n.bind("one", 1)
	gpus := n.admit(one)
	if len(gpus) != 1 || !strings.HasPrefix(gpus[0], "GPU-") || !slices.Contains(all, gpus[0]) {
		t.Fatalf("pod one sees %v, want one of %v", gpus, all)
	}
	sick := gpus[0]

	four := n.bind("four", 4)
	group := n.admit(four)
	if len(group) != 4 || slices.Contains(group, sick) {
		t.Fatalf("pod four sees %v, want four others than %s", group, sick)
	}
	// A GPU of one NUMA node is taken, so only the other node has four. A random choice would pick them once in 35
	// runs: this checks the agent's preferred allocation.
	if numa := n.Kubelet.Healthy(node.GPU); !oneNUMANode(numa, group) {
		t.Errorf("pod four has GPUs of several NUMA nodes: %v of %v", group, numa)
	}

	p, err := n.Scrape()
	if err != nil {
		t.Fatal(err)
	}
	index := p.Index(sick)
	t.Logf("GPU %s, %s, which pod one has, falls off the bus", index, sick)
	n.Run("sim", "--socket", n.File("sim.sock"), fmt.Sprintf(`{gpu: %s, xid: 79}`, index)) // with the command that users run
	n.Inject(`{"gpu":%s,"lost":true}`, index)
	n.Eventually("the GPU is unhealthy to both", func() error { return n.checkDevices(sick) })
	n.awaitPodHealth(one, v1.ResourceHealthStatusUnhealthy, sick)
	n.awaitPodHealth(four, v1.ResourceHealthStatusHealthy, group...)

	n.StopKubelet()
	n.StartKubelet()
	n.checkPodDevices(one, sick) // restored from the kubelet's checkpoint
	n.Eventually("registered after the kubelet's restart", func() error { return n.checkDevices(sick) })
	n.awaitPodHealth(one, v1.ResourceHealthStatusUnhealthy, sick)
	n.awaitPodHealth(four, v1.ResourceHealthStatusHealthy, group...)
	if again := n.admit(four); !sameSet(again, group) {
		t.Errorf("pod four had %v and has %v after the kubelet's restart", group, again)
	}

	n.Inject(`{"gpu":%s,"lost":false}`, index)
	n.Eventually("eight healthy GPUs after the GPU returns", func() error { return n.checkDevices() })
	n.awaitPodHealth(one, v1.ResourceHealthStatusHealthy, sick)

	n.EndAgent()
	if left := n.agentSockets(); len(left) != 0 {
		t.Errorf("agent left sockets %v", left)
	}
	n.Eventually("no allocatable GPU without an agent", func() error { return n.KubeletHas(node.GPU, 8, 0) })

	n.StartAgent()
	n.Eventually("eight healthy GPUs with a new agent", func() error { return n.checkDevices() })
	n.awaitPodHealth(one, v1.ResourceHealthStatusHealthy, sick)
	taken := append(slices.Clone(group), sick)
	two := n.admit(n.bind("two", 2))
	if len(two) != 2 || slices.ContainsFunc(two, func(id string) bool { return slices.Contains(taken, id) }) {
		t.Errorf("pod two sees %v, while others have %v", two, taken)
	}
	n.EndAgent()
}

func oneNUMANode(numa map[string][]int, gpus []string) bool {
	for _, id := range gpus {
		if len(numa[id]) != 1 || numa[id][0] != numa[gpus[0]][0] {
			return false
		}
	}
	return true
}

// awaitPodHealth waits until a pod's status has exactly these devices with this health.
func (n machine) awaitPodHealth(pod *v1.Pod, health v1.ResourceHealthStatus, devices ...string) {
	n.T.Helper()
	n.Eventually(fmt.Sprintf("pod %s has its devices %s", pod.Name, strings.ToLower(string(health))), func() error {
		have := n.Kubelet.PodDevices(pod, node.GPU)
		if !sameSet(slices.Collect(maps.Keys(have)), devices) {
			return fmt.Errorf("it has %v, want %v", have, devices)
		}
		for id, h := range have {
			if h != health {
				return errors.New(id + " is " + string(h))
			}
		}
		return nil
	})
}

// checkPodDevices checks that the kubelet has exactly these devices for a pod.
func (n machine) checkPodDevices(pod *v1.Pod, devices ...string) {
	n.T.Helper()
	have := n.Kubelet.PodDevices(pod, node.GPU)
	if !sameSet(slices.Collect(maps.Keys(have)), devices) {
		n.T.Errorf("pod %s has %v, want %v", pod.Name, have, devices)
	}
}
