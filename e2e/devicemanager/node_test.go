package devicemanager

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	gpuResource v1.ResourceName = "nvidia.com/gpu"

	// patience is the longest wait for what should take a second or two, on a machine that is busy.
	patience = 15 * time.Second
)

// node is one test's machine: a directory in place of /var/lib/kubelet, a kubelet and an agent that
// come and go.
type node struct {
	t       *testing.T
	dir     string
	control string // the simulator's socket
	address string // the agent's web server
	client  *http.Client
	journal *journal
	kubelet *Kubelet // nil while there is none
	agent   *agent   // nil while there is none

	mu   sync.Mutex // guards pods, which the kubelet reads when it likes
	pods []*v1.Pod
}

func newNode(t *testing.T) *node {
	t.Helper()
	// Not t.TempDir: a socket's path has 108 bytes at most.
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{
		t: t, dir: dir,
		control: filepath.Join(dir, "sim.sock"),
		address: freeAddress(t),
		client:  &http.Client{Timeout: 5 * time.Second},
		journal: newJournal(t),
	}
	n.journal.kubeletSpeaks(t)
	config := fmt.Sprintf(`source:
  mode: sim
  sim: {profile: h100-8, control: %[1]s}
health: {stateFile: %[2]s/state.json, socket: %[2]s/agent.sock}
plugin: {kubeletDir: %[2]s}
metrics: {listen: %[3]s}
`, n.control, dir, n.address)
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return n
}

// freeAddress is one that nobody listened on a moment ago.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (n *node) startKubelet() {
	n.t.Helper()
	k, err := StartKubelet(n.dir, n.boundPods)
	if err != nil {
		n.t.Fatal(err)
	}
	n.kubelet = k
	n.t.Cleanup(func() {
		if n.kubelet == k {
			n.stopKubelet()
		}
	})
}

func (n *node) stopKubelet() {
	n.t.Helper()
	if err := n.kubelet.Stop(); err != nil {
		n.t.Error(err)
	}
	n.kubelet = nil
}

// leaveDeadSocket puts kubelet.sock where a kubelet that was killed leaves it, with nobody behind it.
func (n *node) leaveDeadSocket() {
	n.t.Helper()
	socket := filepath.Join(n.dir, "device-plugins", "kubelet.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: socket})
	if err != nil {
		n.t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		n.t.Fatal(err)
	}
}

// agentSockets are the sockets in device-plugins that are not the kubelet's.
func (n *node) agentSockets() []string {
	n.t.Helper()
	entries, err := os.ReadDir(filepath.Join(n.dir, "device-plugins"))
	if err != nil {
		n.t.Fatal(err)
	}
	var sockets []string
	for _, e := range entries {
		if e.Type() == os.ModeSocket && e.Name() != "kubelet.sock" {
			sockets = append(sockets, filepath.Join(n.dir, "device-plugins", e.Name()))
		}
	}
	return sockets
}

func (n *node) boundPods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

// bind makes a pod that asks for GPUs and binds it to the node, as the scheduler would.
func (n *node) bind(name string, gpus int64) *v1.Pod {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "work", Resources: v1.ResourceRequirements{
			Limits: v1.ResourceList{gpuResource: *resource.NewQuantity(gpus, resource.DecimalSI)},
		}}}},
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = append(n.pods, pod)
	return pod
}

// admit admits a pod and returns the GPUs that its container runtime is told to show it, which must be
// those that the kubelet booked for it.
func (n *node) admit(pod *v1.Pod) []string {
	n.t.Helper()
	env, err := n.kubelet.Admit(n.t.Context(), pod)
	if err != nil {
		n.t.Fatal(err)
	}
	visible := strings.Split(env["NVIDIA_VISIBLE_DEVICES"], ",")
	booked := slices.Collect(maps.Keys(n.kubelet.PodDevices(pod, gpuResource)))
	if !sameSet(visible, booked) {
		n.t.Fatalf("pod %s: environment %v, but the kubelet booked %v", pod.Name, env, booked)
	}
	return visible
}

// eventually waits until the check passes.
func (n *node) eventually(what string, check func() error) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	var exited chan struct{} // nil, which never fires, while no agent is to run
	if n.agent != nil {
		exited = n.agent.exited
	}
	start := time.Now()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := check()
		if err == nil {
			n.t.Logf("%-60s %5.2fs", what, time.Since(start).Seconds())
			return
		}
		select {
		case <-tick.C:
		case <-exited:
			n.t.Fatalf("waiting for: %s: the agent ended: %v", what, n.agent.err)
		case <-ctx.Done():
			n.t.Fatalf("waited %v for: %s: %v", patience, what, err)
		}
	}
}

// kubeletHas checks the node's status.
func (n *node) kubeletHas(capacity, allocatable int) error {
	if c, a := n.kubelet.Count(gpuResource); c != capacity || a != allocatable {
		return fmt.Errorf("the kubelet has capacity %d and allocatable %d, want %d and %d", c, a, capacity, allocatable)
	}
	return nil
}

// allSee checks that the kubelet and Prometheus are told the same of each of the eight GPUs, namely that
// all are healthy but the sick ones.
func (n *node) allSee(sick ...string) error {
	if err := n.kubeletHas(8, 8-len(sick)); err != nil {
		return err
	}
	page, err := n.scrape()
	if err != nil {
		return err
	}
	var healthy []string
	for id, state := range page.states() {
		switch {
		case state == "healthy":
			healthy = append(healthy, id)
		case state != "unhealthy" || !slices.Contains(sick, id):
			return fmt.Errorf("/metrics has %s %s", id, state)
		}
	}
	if usable := slices.Collect(maps.Keys(n.kubelet.Healthy(gpuResource))); !sameSet(healthy, usable) {
		return fmt.Errorf("healthy on /metrics: %v; to the kubelet: %v", healthy, usable)
	}
	if len(page.states()) != 8 {
		return fmt.Errorf("/metrics has %d GPUs, want 8", len(page.states()))
	}
	return nil
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// probe returns a page of the agent, which must have this status.
func (n *node) probe(path string, status int) (string, error) {
	r, err := n.get(path)
	if err != nil {
		return "", err
	}
	text, err := readAll(r)
	if err != nil {
		return "", err
	}
	if r.StatusCode != status {
		return "", errors.New(path + ": " + r.Status + ": " + text)
	}
	return text, nil
}
