package devicemanager

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

// configure writes the agent's configuration anew: a profile of the simulator, and keys of the plugin as
// the inside of a YAML map. An agent that runs takes it up.
func (n machine) configure(profile, plugin string) {
	n.T.Helper()
	n.Configure(fmt.Sprintf("source: {sim: {profile: %s}}\nplugin: {%s}\n", profile, plugin))
}

// has checks the capacity and the allocatable number of several resources.
func (n machine) has(want map[v1.ResourceName][2]int) func() error {
	return func() error {
		for name, w := range want {
			if err := n.KubeletHas(name, w[0], w[1]); err != nil {
				return err
			}
		}
		return nil
	}
}

func TestMIGMixed(t *testing.T) {
	const one, two, three = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb", "nvidia.com/mig-3g.40gb"
	n := newMachine(t)
	n.configure("h100-8-mig", "migStrategy: mixed")
	n.StartKubelet()
	n.StartAgent()
	// Six GPUs in seven parts, and two with a mix.
	n.Eventually("a resource for each profile", n.has(map[v1.ResourceName][2]int{one: {46, 46}, two: {2, 2}, three: {2, 2}}))

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
	n.Inject(`{"gpu":7,"lost":true}`)
	n.Eventually("a lost GPU's parts unhealthy in each", n.has(map[v1.ResourceName][2]int{one: {46, 44}, two: {2, 1}, three: {2, 1}}))
	n.StopKubelet()
	n.StartKubelet()
	n.Eventually("the same after a restart of the kubelet", n.has(map[v1.ResourceName][2]int{one: {46, 44}, two: {2, 1}, three: {2, 1}}))
	n.Inject(`{"gpu":7,"lost":false}`)
	n.Eventually("all healthy once it is back", n.has(map[v1.ResourceName][2]int{one: {46, 46}, two: {2, 2}, three: {2, 2}}))

	// A GPU of which a pod has a part is not given to another as a whole before it is free.
	n.configure("h100-8-mig", "migStrategy: none")
	n.Eventually("whole GPUs, and not those that pods have parts of", n.has(map[v1.ResourceName][2]int{node.GPU: {8, 3}, one: {0, 0}, two: {0, 0}, three: {0, 0}}))
	n.UnbindAll()
	n.Eventually("whole GPUs, and no part left", n.has(map[v1.ResourceName][2]int{node.GPU: {8, 8}, one: {0, 0}, two: {0, 0}, three: {0, 0}}))
	n.EndAgent()
}

func TestSharing(t *testing.T) {
	const shared v1.ResourceName = "nvidia.com/gpu.shared"
	sharing := func(more string) string {
		return "sharing: {timeSlicing: {" + more + "resources: [{name: nvidia.com/gpu, replicas: 10}]}}"
	}
	n := newMachine(t)
	n.configure("h100-8", sharing(""))
	n.StartKubelet()
	n.StartAgent()
	n.Eventually("ten of each GPU", func() error { return n.KubeletHas(node.GPU, 80, 80) })

	// The first eight pods have a GPU each.
	seen := map[string]bool{}
	for i := range 8 {
		booked, visible := n.admitTo(n.bindFor(fmt.Sprintf("pod-%d", i), node.GPU, 1), node.GPU)
		if len(booked) != 1 || len(visible) != 1 || !strings.HasPrefix(booked[0], visible[0]+"::") {
			t.Fatalf("the kubelet booked %v, the container sees %v", booked, visible)
		}
		seen[visible[0]] = true
	}
	if len(seen) != 8 {
		t.Errorf("eight pods share %d GPUs, want one each", len(seen))
	}
	greedy := n.bindFor("greedy", node.GPU, 2)
	if _, err := n.Kubelet.Admit(t.Context(), greedy); err == nil {
		t.Error("a pod got two replicas")
	} else {
		t.Logf("two replicas: %v", err)
	}
	n.Inject(`{"gpu":3,"lost":true}`)
	n.Eventually("a lost GPU takes its ten", func() error { return n.KubeletHas(node.GPU, 80, 70) })
	n.Inject(`{"gpu":3,"lost":false}`)
	n.Eventually("and brings them back", func() error { return n.KubeletHas(node.GPU, 80, 80) })

	// Nor is one that a pod has under another name.
	n.configure("h100-8", sharing("renameByDefault: true, "))
	n.Eventually("under another name, and none that a pod has under the old one",
		n.has(map[v1.ResourceName][2]int{node.GPU: {0, 0}, shared: {80, 0}}))
	n.UnbindAll()
	n.Eventually("under another name, and nothing under the old one",
		n.has(map[v1.ResourceName][2]int{node.GPU: {0, 0}, shared: {80, 80}}))
	n.admitTo(n.bindFor("renamed", shared, 1), shared)
	n.EndAgent()
}

// What the kubelet has of us when the agent has ended is plugin.onStop.
func TestWithdraw(t *testing.T) {
	n := newMachine(t)
	n.configure("h100-8", "onStop: withdraw")
	n.StartKubelet()
	for range 5 {
		n.StartAgent()
		n.Eventually("eight GPUs", func() error { return n.KubeletHas(node.GPU, 8, 8) })
		n.EndAgent()
		n.Eventually("none once the agent has ended", func() error { return n.KubeletHas(node.GPU, 0, 0) })
	}
}

// One agent takes over from another in every way that a DaemonSet knows. Whatever the kubelet loses in
// its race (kubernetes#127803), the newest agent has all GPUs in the end.
func TestAgentRestarts(t *testing.T) {
	n := newMachine(t)
	n.StartKubelet()
	n.StartAgent()
	n.Eventually("eight GPUs", func() error { return n.allSee() })
	for i := range 12 {
		switch i % 3 {
		case 0: // the next one starts when this one has ended
			n.EndAgent()
			n.StartAgent()
		case 1: // killed, its socket left behind
			n.KillAgent()
			n.StartAgent()
		case 2: // both run for a while, and the page is the new one's once it can have the port
			const key = `"key":"metrics.listen"` // of the error that the address is in use
			old, logged := n.Agent, len(n.Journal.Lines(key))
			n.StartAgent()
			n.Eventually("the new agent waits for the address", func() error {
				if len(n.Journal.Lines(key)) == logged {
					return errors.New("no error about metrics.listen is logged")
				}
				return nil
			})
			if err := old.Stop(); err != nil {
				t.Fatal(err)
			}
		}
		n.Eventually(fmt.Sprintf("eight GPUs with agent %d", i+2), func() error { return n.allSee() })
		n.admitInTheEnd(n.bind(fmt.Sprintf("pod-%d", i), 1))
		n.UnbindAll()
	}
	n.EndAgent()
}
