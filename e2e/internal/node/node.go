package node

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/kubelet"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

const (
	// GPU is the default resource of the agent.
	GPU v1.ResourceName = "nvidia.com/gpu"

	// Timeout is the longest wait for steps that take seconds, for a busy machine.
	Timeout = 90 * time.Second
)

// Node is the simulated node of a test.
type Node struct {
	T       *testing.T
	Dir     string
	Address string // of the agent's web server
	Journal *Journal
	Env     []string         // of the agent, added to this process's environment
	Kubelet *kubelet.Kubelet // nil if stopped
	Agent   *process.Process // nil if stopped

	mu   sync.Mutex // guards pods, which the kubelet reads concurrently
	pods []*v1.Pod
}

// nodes counts the nodes of this process, each of which has an address.
var nodes atomic.Int32 //nolint:gochecknoglobals // a process has one range of ports

// New returns a node without processes. Its configuration simulates eight GPUs.
func New(t *testing.T) *Node {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") // not t.TempDir: a unix socket's path has at most 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	n := &Node{T: t, Dir: dir, Address: fmt.Sprintf("%s:%d", Host(), 19400+nodes.Add(1)), Journal: newJournal(t)}
	n.Configure("source: {sim: {profile: h100-8}}\n")
	return n
}

// File returns the path of a file in the node's directory.
func (n *Node) File(name string) string { return filepath.Join(n.Dir, name) }

// Write writes a file atomically.
func (n *Node) Write(name, text string) {
	n.T.Helper()
	if err := os.WriteFile(n.File(name+".new"), []byte(text), 0o600); err != nil {
		n.T.Fatal(err)
	}
	if err := os.Rename(n.File(name+".new"), n.File(name)); err != nil {
		n.T.Fatal(err)
	}
}

// Start starts a program that ends with the test. Its output goes to the journal.
func (n *Node) Start(program string, args ...string) *process.Process {
	n.T.Helper()
	cmd := exec.Command(program, args...) //nolint:noctx // Kill ends it with all that it has started
	cmd.Dir, cmd.Env = n.Dir, append(os.Environ(), n.Env...)
	cmd.Stdout = n.Journal.writer(filepath.Base(program))
	cmd.Stderr = cmd.Stdout
	p, err := process.Start(cmd)
	if err != nil {
		n.T.Fatal(err)
	}
	n.T.Cleanup(p.Kill)
	return p
}

// Run runs a command of the agent, which must succeed.
func (n *Node) Run(args ...string) {
	n.T.Helper()
	if out, err := n.Command(args...); err != nil {
		n.T.Fatalf("%v: %v\n%s", args, err, out)
	}
}

// Command runs a command of the agent and returns its output.
func (n *Node) Command(args ...string) (string, error) {
	out, err := exec.CommandContext(n.T.Context(), binary, args...).CombinedOutput()
	n.Journal.add("command", bytes.TrimSpace(out))
	return string(out), err
}

// Output runs a command of the agent and returns what it writes to stdout.
func (n *Node) Output(args ...string) ([]byte, error) {
	cmd := exec.CommandContext(n.T.Context(), binary, args...)
	cmd.Stderr = n.Journal.writer("command")
	out, err := cmd.Output()
	n.Journal.add("command", bytes.TrimSpace(out))
	return out, err
}

// StartKubelet starts a kubelet without plugins.
func (n *Node) StartKubelet() {
	n.T.Helper()
	k, err := kubelet.Start(n.Dir, n.boundPods)
	if err != nil {
		n.T.Fatal(err)
	}
	n.Kubelet = k
	n.T.Cleanup(func() {
		if n.Kubelet == k {
			n.StopKubelet()
		}
	})
}

// StopKubelet stops the kubelet.
func (n *Node) StopKubelet() {
	n.T.Helper()
	if err := n.Kubelet.Stop(); err != nil {
		n.T.Error(err)
	}
	n.Kubelet = nil
}

// Pod returns a pod whose container requests count of a resource.
func Pod(namespace, name string, of v1.ResourceName, count int64) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(namespace + "-" + name)},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "work", Image: "work", Resources: v1.ResourceRequirements{
			Limits: v1.ResourceList{of: *resource.NewQuantity(count, resource.DecimalSI)},
		}}}},
	}
}

// Bind binds a pod to the node, as the scheduler does.
func (n *Node) Bind(pod *v1.Pod) *v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = append(n.pods, pod)
	return pod
}

// UnbindAll removes every pod from the node.
func (n *Node) UnbindAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods = nil
}

func (n *Node) boundPods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

// Admit admits a pod to the kubelet and returns the environment of its container.
func (n *Node) Admit(pod *v1.Pod) map[string]string {
	n.T.Helper()
	env, err := n.Kubelet.Admit(n.T.Context(), pod)
	if err != nil {
		n.T.Fatal(err)
	}
	return env
}

// KubeletHas checks the capacity and allocatable count of a resource.
func (n *Node) KubeletHas(of v1.ResourceName, capacity, allocatable int) error {
	if c, a := n.Kubelet.Count(of); c != capacity || a != allocatable {
		return fmt.Errorf("kubelet has capacity %d and allocatable %d of %s, want %d and %d", c, a, of, capacity, allocatable)
	}
	return nil
}

// Eventually waits until check returns nil. It fails if a running agent exits first.
func (n *Node) Eventually(what string, check func() error) {
	n.T.Helper()
	var need []*process.Process
	if n.Agent != nil {
		need = append(need, n.Agent)
	}
	took, err := process.Await(n.T.Context(), Timeout, func(context.Context) error { return check() }, need...)
	if err != nil {
		n.T.Fatalf("waiting for: %s: %v", what, err)
	}
	n.T.Logf("%-70s %5.2fs", what, took.Seconds())
}
