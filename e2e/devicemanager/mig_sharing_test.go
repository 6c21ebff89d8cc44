package devicemanager

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

// configure writes the agent's configuration: a simulation profile, and keys of plugin in YAML flow style. A running
// agent reloads it.
func (n machine) configure(profile, plugin string) {
	n.T.Helper()
	n.Configure(fmt.Sprintf("source: {sim: {profile: %s}}\nplugin: {%s}\n", profile, plugin))
}

// checkCounts checks the capacity and allocatable count of several resources.
func (n machine) checkCounts(want map[v1.ResourceName][2]int) func() error {
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
	// Six GPUs have seven 1g.10gb devices each; two have a mix.
	n.Eventually("a resource for each profile", n.checkCounts(map[v1.ResourceName][2]int{one: {46, 46}, two: {2, 2}, three: {2, 2}}))

	four := n.bindFor("four", one, 4)
	booked, visible := n.admitFor(four, one)
	if !sameSet(booked, visible) || len(booked) != 4 || !strings.HasPrefix(booked[0], "MIG-") {
		t.Errorf("kubelet assigned %v, container sees %v", booked, visible)
	}
	big, seen := n.admitFor(n.bindFor("big", three, 1), three)
	if !slices.Equal(big, seen) {
		t.Errorf("kubelet assigned %v, container sees %v", big, seen)
	}

	// GPU 7 has the mix, so each resource loses devices.
	n.Inject(`{"gpu":7,"lost":true}`)
	n.Eventually("MIG devices of a lost GPU are unhealthy",
		n.checkCounts(map[v1.ResourceName][2]int{one: {46, 44}, two: {2, 1}, three: {2, 1}}))
	n.StopKubelet()
	n.StartKubelet()
	n.Eventually("unchanged after a restart of the kubelet",
		n.checkCounts(map[v1.ResourceName][2]int{one: {46, 44}, two: {2, 1}, three: {2, 1}}))
	n.removeSockets()
	n.Eventually("the agent listens for each resource again", func() error {
		if sockets := n.pluginSockets(); len(sockets) < 3 {
			return fmt.Errorf("sockets are %v, want one per resource", sockets)
		}
		return nil
	})
	n.AwaitStatus("each resource is registered again", "/readyz", http.StatusOK)
	n.Inject(`{"gpu":7,"lost":false}`)
	n.Eventually("all healthy after the GPU returns", n.checkCounts(map[v1.ResourceName][2]int{one: {46, 46}, two: {2, 2}, three: {2, 2}}))

	// A GPU is offered as a whole only after pods release its MIG devices.
	n.configure("h100-8-mig", "migStrategy: none")
	n.Eventually("whole GPUs, but not where pods hold a MIG device",
		n.checkCounts(map[v1.ResourceName][2]int{node.GPU: {8, 3}, one: {0, 0}, two: {0, 0}, three: {0, 0}}))
	n.UnbindAll()
	n.Eventually("whole GPUs only", n.checkCounts(map[v1.ResourceName][2]int{node.GPU: {8, 8}, one: {0, 0}, two: {0, 0}, three: {0, 0}}))
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
	n.Eventually("ten replicas of each GPU", func() error { return n.KubeletHas(node.GPU, 80, 80) })

	// The first eight pods get different GPUs.
	seen := map[string]bool{}
	for i := range 8 {
		booked, visible := n.admitFor(n.bindFor(fmt.Sprintf("pod-%d", i), node.GPU, 1), node.GPU)
		if len(booked) != 1 || len(visible) != 1 || !strings.HasPrefix(booked[0], visible[0]+"::") {
			t.Fatalf("kubelet assigned %v, container sees %v", booked, visible)
		}
		seen[visible[0]] = true
	}
	if len(seen) != 8 {
		t.Errorf("eight pods share %d GPUs, want 8", len(seen))
	}
	greedy := n.bindFor("greedy", node.GPU, 2)
	if _, err := n.Kubelet.Admit(t.Context(), greedy); err == nil {
		t.Error("a pod got two replicas")
	} else {
		t.Logf("two replicas: %v", err)
	}
	n.Inject(`{"gpu":3,"lost":true}`)
	n.Eventually("ten replicas of a lost GPU are unhealthy", func() error { return n.KubeletHas(node.GPU, 80, 70) })
	n.Inject(`{"gpu":3,"lost":false}`)
	n.Eventually("and healthy again", func() error { return n.KubeletHas(node.GPU, 80, 80) })

	// A renamed resource excludes GPUs that pods hold under the old name.
	n.configure("h100-8", sharing("renameByDefault: true, "))
	n.Eventually("renamed, without GPUs that a pod holds under the old name",
		n.checkCounts(map[v1.ResourceName][2]int{node.GPU: {0, 0}, shared: {80, 0}}))
	n.UnbindAll()
	n.Eventually("renamed, with all GPUs",
		n.checkCounts(map[v1.ResourceName][2]int{node.GPU: {0, 0}, shared: {80, 80}}))
	n.admitFor(n.bindFor("renamed", shared, 1), shared)
	n.EndAgent()
}

// Units of memory are of one GPU, by best fit. The kubelet counts them over all GPUs: a request that no GPU can serve is refused, and
// leaves no unit allocated.
func TestMemory(t *testing.T) {
	const memory = "nvidia.com/gpu-memory"
	n := newMachine(t)
	n.configure("mixed-4", "sharing: {memory: {resource: "+memory+", enforcement: none}}")
	n.StartKubelet()
	n.StartAgent()
	all := func() error { return n.KubeletHas(memory, 198, 198) } // 78 of each H100 and 21 of each L4
	n.Eventually("units of 1 GiB", all)

	owner := map[string]string{} // by unit
	admit := func(name string, units int64) string {
		t.Helper()
		booked, visible := n.admitFor(n.bindFor(name, memory, units), memory)
		if len(booked) != int(units) || len(visible) != 1 {
			t.Fatalf("%s: kubelet assigned %v, container sees %v", name, booked, visible)
		}
		for _, id := range booked {
			if !strings.HasPrefix(id, visible[0]+"::") || owner[id] != "" {
				t.Fatalf("%s has %s, sees %s; the unit was assigned to %q before", name, id, visible[0], owner[id])
			}
			owner[id] = name
		}
		return visible[0]
	}
	refuse := func(when string) {
		t.Helper()
		pod := node.Pod("default", "too-large", memory, 22)
		n.Eventually("a request that no GPU can serve is refused "+when, func() error {
			_, _, err := n.tryAdmit(pod, memory)
			if err == nil || !strings.Contains(err.Error(), "the largest request that fits is 21") {
				return fmt.Errorf("admitted, or refused for another reason: %w", err)
			}
			return nil
		})
		for range 10 {
			if booked, _, err := n.tryAdmit(pod, memory); err == nil || len(booked) > 0 {
				t.Fatalf("%s: %v, with %v", when, err, booked)
			}
		}
	}
	if a, b := admit("small", 5), admit("exact", 16); a != b {
		t.Errorf("5 units of %s, then 16 of %s, want the rest of the same L4", a, b)
	}
	if a, b := admit("large-0", 70), admit("large-1", 70); a == b {
		t.Errorf("twice 70 units of %s", a)
	}
	refuse("with units free on three GPUs") // 8, 8 and 21
	n.StopKubelet()
	n.StartKubelet()
	n.Eventually("units after a restart of the kubelet", all)
	refuse("after a restart of the kubelet")
	n.KillAgent()
	n.StartAgent()
	n.Eventually("units after a restart of the agent", all)
	refuse("after a restart of the agent")

	// Every unit that is not held can be allocated.
	for name, units := range map[string]int64{"rest-0": 8, "rest-1": 8, "rest-2": 21} {
		admit(name, units)
	}
	if len(owner) != 198 {
		t.Errorf("%d of 198 units are assigned", len(owner))
	}
	n.UnbindAll()
	clear(owner)
	for i := range 2 {
		admit(fmt.Sprintf("whole-%d", i), 78)
	}
	n.EndAgent()
}

// TestWithdraw checks that plugin.onStop: withdraw removes the devices from the kubelet when the agent stops.
func TestWithdraw(t *testing.T) {
	n := newMachine(t)
	n.configure("h100-8", "onStop: withdraw")
	n.StartKubelet()
	for range 5 {
		n.StartAgent()
		n.Eventually("eight GPUs", func() error { return n.KubeletHas(node.GPU, 8, 8) })
		n.EndAgent()
		n.Eventually("none after the agent stops", func() error { return n.KubeletHas(node.GPU, 0, 0) })
	}
}

// The kubelet receives the largest list that the agent sends, with every device unhealthy, which makes it longest. One more
// replica of each device is a configuration error, which changes nothing.
func TestLargestList(t *testing.T) {
	const one, most = "nvidia.com/mig-1g.10gb", 292
	sharing := func(replicas int) string {
		return fmt.Sprintf("migStrategy: mixed, sharing: {timeSlicing: {resources: [{name: %s, replicas: %d}]}}", one, replicas)
	}
	n := newMachine(t)
	n.configure("h100-16-mig", sharing(most))
	n.StartKubelet()
	n.StartAgent()
	n.Eventually("all replicas", func() error { return n.KubeletHas(one, 112*most, 112*most) })
	for i := range 16 {
		n.Inject(`{"gpu":%d,"xid":79}`, i)
	}
	n.Eventually("all replicas unhealthy", func() error { return n.KubeletHas(one, 112*most, 0) })
	n.configure("h100-16-mig", sharing(most+1))
	n.Eventually("the agent refuses one more replica", func() error {
		if len(n.Journal.Lines("expected at most 292, found 293")) == 0 {
			return errors.New("no error is logged")
		}
		return nil
	})
	if err := n.KubeletHas(one, 112*most, 0); err != nil {
		t.Error(err)
	}
	n.EndAgent()
}
