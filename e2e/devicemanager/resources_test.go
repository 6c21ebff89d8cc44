package devicemanager

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// configure writes the agent's configuration anew: a profile of the simulator, and keys of the plugin as
// the inside of a YAML map. An agent that runs takes it up.
func (n *node) configure(profile, plugin string) {
	n.t.Helper()
	config := fmt.Sprintf(`source:
  mode: sim
  sim: {profile: %[1]s, control: %[2]s}
health: {stateFile: %[3]s/state.json, socket: %[3]s/agent.sock}
plugin: {kubeletDir: %[3]s%[4]s}
metrics: {listen: %[5]s}
`, profile, n.control, n.dir, plugin, n.address)
	// As a whole, so that nobody reads the half of it.
	path := filepath.Join(n.dir, "config.yaml")
	if err := os.WriteFile(path+".new", []byte(config), 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		n.t.Fatal(err)
	}
}

// has checks the capacity and the allocatable number of several resources.
func (n *node) has(want map[v1.ResourceName][2]int) func() error {
	return func() error {
		for name, w := range want {
			if c, a := n.kubelet.Count(name); c != w[0] || a != w[1] {
				return fmt.Errorf("%s has capacity %d and allocatable %d, want %d and %d", name, c, a, w[0], w[1])
			}
		}
		return nil
	}
}

// bindFor makes a pod that asks for some of a resource.
func (n *node) bindFor(name string, of v1.ResourceName, count int64) *v1.Pod {
	pod := n.bind(name, 0)
	pod.Spec.Containers[0].Resources.Limits = v1.ResourceList{of: *resource.NewQuantity(count, resource.DecimalSI)}
	return pod
}

// admitTo admits such a pod, and returns the kubelet's device ids and what the container is shown.
func (n *node) admitTo(pod *v1.Pod, of v1.ResourceName) (booked, visible []string) {
	n.t.Helper()
	env, err := n.kubelet.Admit(n.t.Context(), pod)
	if err != nil {
		n.t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(n.kubelet.PodDevices(pod, of))), strings.Split(env["NVIDIA_VISIBLE_DEVICES"], ",")
}

func TestMIGMixed(t *testing.T) {
	const one, two, three = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-3g.40gb"
	n := newNode(t)
	n.configure("h100-8-mig", ", migStrategy: mixed")
	n.startKubelet()
	n.startAgent()
	// Six GPUs in seven parts, and two with a mix.
	n.eventually("a resource for each profile", n.has(map[v1.ResourceName][2]int{one: {46, 46}, two: {2, 2}, three: {2, 2}}))

	four := n.bindFor("four", one, 4)
	booked, visible := n.admitTo(four, one)
	if !sameSet(booked, visible) || len(booked) != 4 || !strings.HasPrefix(booked[0], "MIG-") {
		t.Errorf("the kubelet booked %v, the container sees %v", booked, visible)
	}
	big, seen := n.admitTo(n.bindFor("big", three, 1), three)
	if !slices.Equal(big, seen) {
		t.Errorf("the kubelet booked %v, the container sees %v", big, seen)
	}

	// One of the GPUs with the mix: it takes its parts out of every resource.
	n.inject(`{"gpu":7,"lost":true}`)
	n.eventually("a lost GPU's parts unhealthy in each", n.has(map[v1.ResourceName][2]int{one: {46, 44}, two: {2, 1}, three: {2, 1}}))
	n.stopKubelet()
	n.startKubelet()
	n.eventually("the same after a restart of the kubelet", n.has(map[v1.ResourceName][2]int{one: {46, 44}, two: {2, 1}, three: {2, 1}}))
	n.inject(`{"gpu":7,"lost":false}`)
	n.eventually("all healthy once it is back", n.has(map[v1.ResourceName][2]int{one: {46, 46}, two: {2, 2}, three: {2, 2}}))

	n.configure("h100-8-mig", ", migStrategy: none")
	n.eventually("whole GPUs, and no part left", n.has(map[v1.ResourceName][2]int{gpuResource: {8, 8}, one: {0, 0}, two: {0, 0}, three: {0, 0}}))
	n.endAgent()
}

func TestSharing(t *testing.T) {
	const shared v1.ResourceName = "nvidia.com/gpu.shared"
	sharing := func(more string) string {
		return ", sharing: {timeSlicing: {" + more + "resources: [{name: nvidia.com/gpu, replicas: 10}]}}"
	}
	n := newNode(t)
	n.configure("h100-8", sharing(""))
	n.startKubelet()
	n.startAgent()
	n.eventually("ten of each GPU", func() error { return n.kubeletHas(80, 80) })

	// The first eight pods have a GPU each.
	seen := map[string]bool{}
	for i := range 8 {
		booked, visible := n.admitTo(n.bindFor(fmt.Sprintf("pod-%d", i), gpuResource, 1), gpuResource)
		if len(booked) != 1 || len(visible) != 1 || !strings.HasPrefix(booked[0], visible[0]+"::") {
			t.Fatalf("the kubelet booked %v, the container sees %v", booked, visible)
		}
		seen[visible[0]] = true
	}
	if len(seen) != 8 {
		t.Errorf("eight pods share %d GPUs, want one each", len(seen))
	}
	greedy := n.bindFor("greedy", gpuResource, 2)
	if _, err := n.kubelet.Admit(t.Context(), greedy); err == nil {
		t.Error("a pod got two replicas")
	} else {
		t.Logf("two replicas: %v", err)
	}
	n.inject(`{"gpu":3,"lost":true}`)
	n.eventually("a lost GPU takes its ten", func() error { return n.kubeletHas(80, 70) })
	n.inject(`{"gpu":3,"lost":false}`)
	n.eventually("and brings them back", func() error { return n.kubeletHas(80, 80) })

	n.configure("h100-8", sharing("renameByDefault: true, "))
	n.eventually("under another name, and nothing under the old one",
		n.has(map[v1.ResourceName][2]int{gpuResource: {0, 0}, shared: {80, 80}}))
	n.admitTo(n.bindFor("renamed", shared, 1), shared)
	n.endAgent()
}

// What the kubelet has of us when the agent has ended is plugin.onStop.
func TestWithdraw(t *testing.T) {
	n := newNode(t)
	n.configure("h100-8", ", onStop: withdraw")
	n.startKubelet()
	for range 5 {
		n.startAgent()
		n.eventually("eight GPUs", func() error { return n.kubeletHas(8, 8) })
		n.endAgent()
		n.eventually("none once the agent has ended", func() error { return n.kubeletHas(0, 0) })
	}
}

// One agent takes over from another in every way that a DaemonSet knows. Whatever the kubelet loses in
// its race (kubernetes#127803), the newest agent has all GPUs in the end.
func TestAgentRestarts(t *testing.T) {
	n := newNode(t)
	n.startKubelet()
	n.startAgent()
	n.eventually("eight GPUs", func() error { return n.allSee() })
	for i := range 12 {
		switch i % 3 {
		case 0: // the next one starts when this one has ended
			n.endAgent()
			n.startAgent()
		case 1: // killed, its socket left behind
			old := n.agent
			if err := old.cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			<-old.exited
			n.startAgent()
		case 2: // both run for a while, and the page is the new one's once it can have the port
			const words = "another process serves"
			old, said := n.agent, n.journal.count(words)
			n.startAgent()
			fresh := n.agent
			n.eventually("the next one waits for its turn", func() error {
				select {
				case <-fresh.exited:
					return fresh.err
				default:
				}
				if n.journal.count(words) == said {
					return errors.New("it has not said so")
				}
				return nil
			})
			n.agent = old
			n.endAgent()
			n.agent = fresh
		}
		n.eventually(fmt.Sprintf("eight GPUs with agent %d", i+2), func() error { return n.allSee() })
		n.admit(n.bind(fmt.Sprintf("pod-%d", i), 1))
		n.unbindAll()
	}
	n.endAgent()
}

// unbindAll ends every pod.
func (n *node) unbindAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = nil
}
