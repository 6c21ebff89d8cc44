package apiserver

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/devicemanager"
)

const gpuResource v1.ResourceName = "nvidia.com/gpu"

// node is one test's machine: a Node object, a kubelet's device manager, and an agent.
type node struct {
	t       *testing.T
	name    string
	dir     string
	address string // the agent's web server
	kubelet *devicemanager.Kubelet
	agent   *exec.Cmd
	exited  chan struct{} // closed when the agent has ended
	said    output

	mu   sync.Mutex // guards pods, which the kubelet reads when it likes
	pods []*v1.Pod
}

// output is all that the agents have logged.
type output struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// count returns how many lines hold a text.
func (o *output) count(text string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := 0
	for line := range strings.Lines(o.text.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// newNode makes a Node and a kubelet; the agent speaks to the API server as a user.
func newNode(t *testing.T, name, user string) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "node") // not t.TempDir: a socket's path has 108 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, name: name, dir: dir, address: fmt.Sprintf("127.0.0.1:%d", port)}
	t.Cleanup(func() {
		if t.Failed() {
			n.said.mu.Lock()
			defer n.said.mu.Unlock()
			t.Logf("the agent said:\n%s", n.said.text.String())
		}
	})
	ready := v1.NodeCondition{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "KubeletReady"}
	object := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1.NodeStatus{Conditions: []v1.NodeCondition{ready}}}
	if object, err = theCluster.client.CoreV1().Nodes().Create(t.Context(), object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	object.Status.Conditions = []v1.NodeCondition{ready}
	if _, err := theCluster.client.CoreV1().Nodes().UpdateStatus(t.Context(), object, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	n.kubelet, err = devicemanager.StartKubelet(dir, n.boundPods)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.kubelet.Stop(); err != nil {
			t.Error(err)
		}
	})
	n.configure(user, true)
	return n
}

// configure writes the agent's configuration.
func (n *node) configure(user string, enabled bool) {
	n.t.Helper()
	config := fmt.Sprintf(`source:
  mode: sim
  sim: {profile: h100-8, control: %[1]s/sim.sock}
health:
  stateFile: %[1]s/state.json
  socket: %[1]s/agent.sock
  kubernetes: {enabled: %[4]v, kubeconfig: %[2]s}
plugin: {kubeletDir: %[1]s}
metrics: {listen: %[3]s}
`, n.dir, theCluster.kubeconfig(user), n.address, enabled)
	if err := os.WriteFile(filepath.Join(n.dir, "config.yaml"), []byte(config), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) boundPods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

// run makes a pod on this node, as the scheduler would bind it, and returns the GPU that the kubelet gives it.
func (n *node) run(namespace, name string) (gpu string, uid types.UID) {
	n.t.Helper()
	ns := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := theCluster.client.CoreV1().Namespaces().Create(n.t.Context(), ns, metav1.CreateOptions{}); err != nil {
		n.t.Fatal(err)
	}
	pod, err := theCluster.client.CoreV1().Pods(namespace).Create(n.t.Context(), n.pod(namespace, name), metav1.CreateOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	return n.admit(pod), pod.UID
}

func (n *node) pod(namespace, name string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1.PodSpec{NodeName: n.name, Containers: []v1.Container{{Name: "work", Image: "work", Resources: v1.ResourceRequirements{
			Limits: v1.ResourceList{gpuResource: resource.MustParse("1")},
		}}}},
	}
}

// admit has the kubelet admit a pod, and returns the GPU that it gives it.
func (n *node) admit(pod *v1.Pod) string {
	n.t.Helper()
	n.mu.Lock()
	n.pods = append(n.pods, pod)
	n.mu.Unlock()
	if _, err := n.kubelet.Admit(n.t.Context(), pod); err != nil {
		n.t.Fatal(err)
	}
	for id := range n.kubelet.PodDevices(pod, gpuResource) {
		return id
	}
	n.t.Fatalf("pod %s has no GPU", pod.Name)
	return ""
}

// startAgent waits until the kubelet has so many GPUs to give.
func (n *node) startAgent(gpus int) {
	n.t.Helper()
	cmd := exec.Command(agentBinary, "--config", filepath.Join(n.dir, "config.yaml"))
	cmd.Env = append(os.Environ(), "NODE_NAME="+n.name)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Dir, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = n.dir, &n.said, &n.said, time.Second
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait() // what it said of its end is in n.said
		close(exited)
	}()
	n.agent, n.exited = cmd, exited
	n.t.Cleanup(func() {
		_ = cmd.Process.Kill() // an error: it has ended already
		<-exited
	})
	n.eventually(fmt.Sprintf("the kubelet has %d GPUs", gpus), func() error { return n.allocatable(gpus) })
}

func (n *node) endAgent() {
	n.t.Helper()
	if err := n.agent.Process.Signal(syscall.SIGTERM); err != nil {
		n.t.Fatal(err)
	}
	select {
	case <-n.exited:
	case <-time.After(10 * time.Second):
		n.t.Fatal("the agent still runs 10s after SIGTERM")
	}
}

// allocatable checks how many GPUs the kubelet would give to pods.
func (n *node) allocatable(want int) error {
	if _, have := n.kubelet.Count(gpuResource); have != want {
		return fmt.Errorf("the kubelet has %d allocatable GPUs, want %d", have, want)
	}
	return nil
}

// inject sends an event to the agent's simulator.
func (n *node) inject(format string, args ...any) {
	n.t.Helper()
	n.tell("sim.sock", format, args...)
}

// clear is the operator's word that a GPU is well again.
func (n *node) clear(gpu string) {
	n.t.Helper()
	n.tell("agent.sock", `{"clear":{"device":%q}}`, gpu)
}

// tell sends a line to one of the agent's sockets.
func (n *node) tell(socket, format string, args ...any) {
	n.t.Helper()
	conn, err := net.Dial("unix", filepath.Join(n.dir, socket))
	if err != nil {
		n.t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, format+"\n", args...); err != nil {
		n.t.Fatal(err)
	}
	if answer, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(answer, `"ok":true`) {
		n.t.Fatalf(format+": %q, %v", append(args, answer, err)...)
	}
}

// index returns the index of a GPU, from the agent's metrics.
func (n *node) index(gpu string) string {
	n.t.Helper()
	page, err := n.get("/metrics")
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(page) {
		if strings.Contains(line, `UUID="`+gpu+`"`) {
			if _, rest, ok := strings.Cut(line, `gpu="`); ok {
				index, _, _ := strings.Cut(rest, `"`)
				return index
			}
		}
	}
	n.t.Fatalf("GPU %s is not in /metrics", gpu)
	return ""
}

// get returns a page of the agent, which must have status 200.
func (n *node) get(path string) (string, error) {
	client := http.Client{Timeout: 5 * time.Second}
	r, err := client.Get("http://" + n.address + path)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if r.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s: %s", path, r.Status, text)
	}
	return string(text), err
}

// ready checks that the agent says that it does its whole job.
func (n *node) ready() error {
	_, err := n.get("/readyz")
	return err
}
