//go:build cluster

package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/sequence"
)

// node is the node as it is from outside: what its containers have, what it offers, and what is left on it.
type node struct {
	devices   sequence.Node
	byName    map[string]string // devices by their names in slices
	gpus      []string          // IDs by index
	before    *v1.Node          // the sequence
	unhealthy map[int]bool
	returned  time.Time // when helm has returned in this step; zero if it was not called

	mu        sync.Mutex // guards the fields below
	pods      map[string]*sequencePod
	violation error // the first
}

// sequencePod is a pod of the sequence that has not ended.
type sequencePod struct {
	deleted, forced bool
	pid             int             // of its container; 0 if it does not run
	holds           []sequence.Hold // nil if they are not known
	unknown         error           // why
}

// newNode returns the node without an agent, and watches it until the end of the test.
func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{before: getNode(t), unhealthy: make(map[int]bool), pods: make(map[string]*sequencePod)}
	n.publish(t)
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { // what containers have must be right at every moment
		for ctx.Err() == nil {
			n.observe(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		watching.Wait()
	})
	return n
}

// publish reads the devices of the simulation.
func (n *node) publish(t *testing.T) {
	t.Helper()
	var err error
	n.devices, n.byName, err = sequence.Simulated(t.Context(), theCluster.file("gpu-node-agent-"+oldTag), "{"+simProfile+"}")
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; n.byName[fmt.Sprint("gpu-", i)] != ""; i++ {
		n.gpus = append(n.gpus, n.byName[fmt.Sprint("gpu-", i)])
	}
	if len(n.gpus) != 4 {
		t.Fatalf("GPUs: %v", n.byName)
	}
}

func getNode(t *testing.T) *v1.Node {
	t.Helper()
	node, err := theCluster.client.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return node
}

// nodeAmounts returns the allocatable amounts of extended resources in the node's status.
func nodeAmounts(node *v1.Node) map[string]int {
	amounts := make(map[string]int)
	for name, q := range node.Status.Allocatable {
		if strings.Contains(string(name), "/") {
			amounts[string(name)] = int(q.Value())
		}
	}
	return amounts
}

func (n *node) helmReturned() { n.returned = time.Now() }

func (n *node) add(pod string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods[pod] = &sequencePod{}
}

func (n *node) noteDeleted(pod string, force bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[pod]
	p.deleted, p.forced = true, force
	for i := range p.holds {
		p.holds[i].Orphan = force
	}
}

func (n *node) running(pod string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pods[pod] != nil && n.pods[pod].pid != 0
}

// groupOf returns the group of a pod. The caller holds mu.
func groupOf(p *sequencePod) sequence.Group {
	switch {
	case len(p.holds) == 0:
		return sequence.PendingPods
	case p.holds[0].Way == sequence.DRA:
		return sequence.ClaimPods
	}
	return sequence.PluginPods
}

// endable returns the pods of a group that are not deleted.
func (n *node) endable(g sequence.Group) (names []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, p := range n.pods {
		if !p.deleted && groupOf(p) == g {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// containers returns the environments of the processes in the sequence's containers, by pod.
func (n *node) containers() (pids map[string]int, environments map[string]string) {
	pids, environments = make(map[string]int), make(map[string]string)
	files, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, file := range files {
		if comm, err := os.ReadFile(file); err != nil || string(comm) != "workload\n" {
			continue
		}
		text, err := os.ReadFile(filepath.Join(filepath.Dir(file), "environ"))
		if err != nil {
			continue
		}
		env := strings.ReplaceAll(string(text), "\x00", "\n")
		pod := variable(env, "HOSTNAME")
		if n.pods[pod] == nil || variable(env, "KUBERNETES_SERVICE_HOST") == "" { // of no pod of the sequence, or the sandbox's
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(file, "/proc/%d/", &pid); err == nil {
			pids[pod], environments[pod] = pid, env
		}
	}
	return pids, environments
}

// variable returns a variable of an environment, or "".
func variable(env, name string) string {
	for line := range strings.Lines(env) {
		if value, ok := strings.CutPrefix(line, name+"="); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// observe looks at the containers, and notes what must never be.
func (n *node) observe(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	n.mu.Lock()
	defer n.mu.Unlock()
	violate := func(format string, args ...any) {
		if n.violation == nil {
			n.violation = fmt.Errorf(format, args...)
		}
	}
	pids, environments := n.containers()
	for name, p := range n.pods {
		pid := pids[name]
		switch {
		case pid == p.pid:
		case pid == 0 && p.deleted:
			delete(n.pods, name)
		case p.pid != 0:
			violate("the container of pod %s, with %v, has ended or was restarted, and nobody deleted the pod", name, p.holds)
		}
		if p.pid = pid; pid == 0 || p.holds != nil {
			continue
		}
		if p.holds, p.unknown = n.holdsOf(ctx, name, environments[name]); p.unknown != nil {
			p.holds = nil
		}
	}
	if err := n.devices.CheckHeld(n.heldLocked()); err != nil {
		violate("%w", err)
	}
}

func (n *node) heldLocked() (all []sequence.Hold) {
	for _, p := range n.pods {
		all = append(all, p.holds...)
	}
	return all
}

// holdsOf returns what a container has by the kubelet or by its claims. The devices in its environment must be the same.
func (n *node) holdsOf(ctx context.Context, name, env string) (holds []sequence.Hold, err error) {
	sees := make(map[string]bool)
	if variables := deviceVariables(env); len(variables) > 0 {
		holds, err = n.claimHolds(ctx, name)
		for device := range maps.Values(variables) {
			sees[device] = true
		}
	} else {
		holds, err = kubeletHolds(ctx, name)
		for device := range strings.SplitSeq(variable(env, "NVIDIA_VISIBLE_DEVICES"), ",") {
			sees[device] = true
		}
	}
	if err != nil {
		return nil, err
	}
	has := make(map[string]bool)
	for _, h := range holds {
		has[h.Device] = true
	}
	if len(holds) == 0 || !maps.Equal(has, sees) {
		return nil, fmt.Errorf("pod %s sees %v, and has %v", name, slices.Sorted(maps.Keys(sees)), holds)
	}
	return holds, nil
}

// claimHolds returns what a pod has by its claims.
func (n *node) claimHolds(ctx context.Context, name string) (holds []sequence.Hold, err error) {
	pod, err := getPod(ctx, sequenceNamespace+"/"+name)
	if err != nil {
		return nil, err
	}
	claims, err := claimsOf(ctx, pod)
	if err != nil {
		return nil, err
	}
	for _, c := range claims {
		if c.Status.Allocation == nil {
			return nil, fmt.Errorf("pod %s runs, and its claim is not allocated", name)
		}
		for _, r := range c.Status.Allocation.Devices.Results {
			holds = append(holds, sequence.ResultHold(name, n.byName[r.Device], r))
		}
	}
	return holds, nil
}

// kubeletHolds returns what a pod has by the kubelet's pod resources.
func kubeletHolds(ctx context.Context, name string) (holds []sequence.Hold, err error) {
	_, list, err := askKubelet(ctx)
	if err != nil {
		return nil, err
	}
	for _, pod := range list.PodResources {
		if pod.Namespace != sequenceNamespace || pod.Name != name {
			continue
		}
		for _, d := range pod.Containers[0].Devices {
			for _, id := range d.DeviceIds {
				h := sequence.IDHold(d.ResourceName, id)
				h.Pod = name
				holds = append(holds, h)
			}
		}
	}
	return holds, nil
}

// held returns what containers have.
func (n *node) held() []sequence.Hold {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.heldLocked()
}

// observed returns the first violation, or why it is not known what a container has.
func (n *node) observed(ctx context.Context) (violation, unknown error) {
	n.observe(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, p := range n.pods {
		if p.pid != 0 && !p.deleted && p.unknown != nil {
			unknown = errors.Join(unknown, p.unknown)
		}
	}
	return n.violation, unknown
}

// askKubelet returns what the kubelet can allocate, and what pods have. Each call has its own connection, because the kubelet restarts.
func askKubelet(ctx context.Context) (*podresourcesapi.AllocatableResourcesResponse, *podresourcesapi.ListPodResourcesResponse, error) {
	conn, err := grpc.NewClient("unix:///var/lib/kubelet/pod-resources/kubelet.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = conn.Close() }()
	client := podresourcesapi.NewPodResourcesListerClient(conn)
	allocatable, err := client.GetAllocatableResources(ctx, &podresourcesapi.AllocatableResourcesRequest{})
	if err != nil {
		return nil, nil, err
	}
	list, err := client.List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	return allocatable, list, err
}

// kubeletDevices returns the number of the kubelet's allocatable devices by resource, and how many no pod has.
func kubeletDevices(ctx context.Context) (all map[string]int, free []sequence.Hold, err error) {
	allocatable, list, err := askKubelet(ctx)
	if err != nil {
		return nil, nil, err
	}
	used := make(map[string]bool)
	for _, pod := range list.PodResources {
		for _, c := range pod.Containers {
			for _, d := range c.Devices {
				for _, id := range d.DeviceIds {
					used[d.ResourceName+" "+id] = true
				}
			}
		}
	}
	all = make(map[string]int)
	for _, d := range allocatable.Devices {
		all[d.ResourceName] += len(d.DeviceIds)
		for _, id := range d.DeviceIds {
			if !used[d.ResourceName+" "+id] {
				free = append(free, sequence.IDHold(d.ResourceName, id))
			}
		}
	}
	return all, free, nil
}

// check waits until what must be true of the player's node is true, and notes how many pods have devices.
func (p *player) check(t *testing.T) {
	t.Helper()
	if !p.returned.IsZero() {
		eventuallyWithin(t, nodePatience-time.Since(p.returned), "the node has what an agent is to set, and nothing else of the agents",
			p.checkNode)
		p.returned = time.Time{}
	}
	var said string
	eventually(t, "each device has one holder, and what is free is offered", func(ctx context.Context) error {
		violation, unknown := p.observed(ctx)
		if violation != nil {
			t.Fatal(violation)
		}
		held := p.held()
		offers, err := p.checkOffers(ctx, held)
		said = fmt.Sprintf("held: %s; offered: %s", p.summary(held), p.summary(offers))
		if err = errors.Join(unknown, err); err != nil {
			return fmt.Errorf("%w; %s", err, said)
		}
		return nil
	})
	t.Log(said)
	p.state.Plugin, p.state.Claims = len(p.endable(sequence.PluginPods)), len(p.endable(sequence.ClaimPods))
	p.state.Pending, p.state.Unhealthy = len(p.endable(sequence.PendingPods)), len(p.unhealthy)
}

// summary lists holds, each once, with the names of devices in slices.
func (n *node) summary(holds []sequence.Hold) string {
	counts := make(map[string]int)
	for _, h := range holds {
		for name, id := range n.byName {
			if id == h.Device {
				h.Device = name
				break
			}
		}
		counts[h.String()]++
	}
	var words []string
	for text, n := range counts {
		if n > 1 {
			text += fmt.Sprintf(" (%d times)", n)
		}
		words = append(words, text)
	}
	slices.Sort(words)
	return "[" + strings.Join(words, ", ") + "]"
}

// checkOffers returns what is offered, and an error if it must not be offered, or something else must.
func (p *player) checkOffers(ctx context.Context, held []sequence.Hold) (offers []sequence.Hold, err error) {
	claims, err := theCluster.client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	published, err := nodeSlices(ctx)
	if err != nil {
		return nil, err
	}
	allocated := sequence.Allocated(claims.Items, p.byName)
	offers = sequence.Offered(published, allocated)
	if p.state.KubeletDown {
		return offers, p.devices.CheckOffers(offers, held)
	}
	amounts, free, err := kubeletDevices(ctx)
	if err != nil {
		return offers, err
	}
	offers = append(offers, free...)
	if err := errors.Join(p.devices.CheckOffers(offers, held), p.removeFailed(ctx)); err != nil {
		return offers, err
	}
	node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return offers, err
	}
	have := nodeAmounts(node)
	maps.DeleteFunc(have, func(name string, n int) bool { return n == 0 && amounts[name] == 0 })
	if !maps.Equal(have, amounts) {
		return offers, fmt.Errorf("the node's status has %v, the kubelet %v", have, amounts)
	}
	if err := p.checkNode(ctx); err != nil {
		return offers, err
	}
	byPlugin := slices.ContainsFunc(held, func(h sequence.Hold) bool { return h.Way != sequence.DRA })
	byClaim := len(allocated) > 0 || slices.ContainsFunc(held, func(h sequence.Hold) bool { return h.Way == sequence.DRA })
	if !p.state.Installed || p.state.Values.DRA && byPlugin || !p.state.Values.DRA && byClaim {
		return offers, nil // no agent, or one that waits for the pods of the other API
	}
	cannot := make(map[string]bool)
	for gpu := range p.unhealthy {
		cannot[p.gpus[gpu]] = true
	}
	return offers, p.devices.CheckFree(offers, append(held, allocated...), cannot)
}

// removeFailed removes pods that the kubelet did not admit, as their owners do.
func (n *node) removeFailed(ctx context.Context) error {
	pods := theCluster.client.CoreV1().Pods(sequenceNamespace)
	list, err := pods.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, pod := range list.Items {
		if pod.Status.Phase != v1.PodFailed || pod.DeletionTimestamp != nil {
			continue
		}
		fmt.Printf("pod %s failed: %s %s\n", pod.Name, pod.Status.Reason, pod.Status.Message)
		if err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{}); err != nil {
			return err
		}
		n.mu.Lock()
		delete(n.pods, pod.Name)
		n.mu.Unlock()
	}
	return nil
}

// checkNode returns an error if the node lacks a taint, the labels or the condition of the values, or has one that they do not have.
// Without the hook such labels and taints may stay if a series of the agent names them; no series names a condition.
func (p *player) checkNode(ctx context.Context) error {
	node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	v := p.state.Values
	if !p.state.Installed {
		v = sequence.Values{}
	}
	hasTaint, hasLabels, hasCondition, others := p.ofAgents(node)
	var errs []error
	for _, part := range []struct {
		what     string
		has, may bool
		series   string
	}{
		{"taint", hasTaint, v.Taints && len(p.unhealthy) > 0, `gpu_node_agent_node_leftovers{kind="taints"} 1`},
		{"labels", hasLabels, v.Labels, `gpu_node_agent_node_leftovers{kind="labels"} 1`},
		{"condition", hasCondition, v.Labels, ""},
	} {
		if part.has == part.may {
			continue
		}
		err := fmt.Errorf("the node has the agents' %s: %t, want %t with %v", part.what, part.has, part.may, v)
		if part.has && v.NoHook && p.state.Installed {
			if err = findSeries(ctx, part.series); err == nil {
				continue
			}
		}
		errs = append(errs, err)
	}
	if len(others) > 0 {
		errs = append(errs, fmt.Errorf("the node has %v", others))
	}
	return errors.Join(errs...)
}

// findSeries returns an error unless the agent's metrics have a series. Every page has "".
func findSeries(ctx context.Context, series string) error {
	page, err := scrape(ctx)
	if err == nil {
		_, err = findLine(page, series)
	}
	return err
}

// ofAgents returns what agents have written of the node since the start of the sequence. The others are what nobody should have written,
// and an annotation of taints that are not there.
func (n *node) ofAgents(node *v1.Node) (taint, labels, condition bool, others []string) {
	before := nodeTaints(n.before)
	for _, t := range nodeTaints(node) {
		if t == unhealthyTaint {
			taint = true
		} else if !slices.Contains(before, t) {
			others = append(others, "taint "+t)
		}
	}
	for key := range node.Labels {
		if prefix, _, _ := strings.Cut(key, "/"); n.before.Labels[key] == "" && (prefix == "nvidia.com" || prefix == "gpu-node-agent") {
			labels = true
		}
	}
	for key := range node.Annotations {
		if _, had := n.before.Annotations[key]; !had && strings.HasPrefix(key, "gpu-node-agent/") && !taint {
			others = append(others, "annotation "+key)
		}
	}
	for _, c := range node.Status.Conditions {
		condition = condition || c.Type == "GPUHealthy"
	}
	return taint, labels, condition, others
}

// claimSpecs returns which CDI specs stay: for the claims of pods that run.
func (p *player) claimSpecs(t *testing.T) func(dir, name string) bool {
	t.Helper()
	prepared, err := checkpointClaims()
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	claims := p.state.Claims > 0
	return func(dir, name string) bool {
		return dir == cdiDir && claims && slices.ContainsFunc(prepared, func(uid string) bool { return strings.Contains(name, uid) })
	}
}

// checkFresh removes what docs/install.md says stays, and checks that the node is as it was.
func (p *player) checkFresh(t *testing.T) {
	t.Helper()
	for dir, names := range agentFiles(t) {
		for _, name := range names {
			if dir == stateDir || dir == draDir {
				if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			} else if dir != kubeletPluginDir {
				t.Errorf("%s is left in %s", name, dir)
			}
		}
	}
	eventually(t, "the cluster is as before", func(ctx context.Context) error {
		published, err := nodeSlices(ctx)
		if err != nil {
			return err
		}
		if len(published) > 0 { // the kubelet deletes them after 30 seconds
			return fmt.Errorf("%d slices", len(published))
		}
		node, err := theCluster.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		amounts := nodeAmounts(node)
		maps.DeleteFunc(amounts, func(_ string, n int) bool { return n == 0 }) // the kubelet removes them after five minutes
		if len(amounts) > 0 {
			return fmt.Errorf("allocatable: %v", amounts)
		}
		return p.checkNode(ctx)
	})
}
