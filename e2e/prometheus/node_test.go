package prometheus

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
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

const (
	gpuResource v1.ResourceName = "nvidia.com/gpu"

	// patience is the longest wait for what should take some seconds, on a machine that is busy.
	patience = 30 * time.Second
)

// node is a machine: the kubelet's device manager, an agent, and a Prometheus that scrapes it.
type node struct {
	t       *testing.T
	dir     string
	address string // the agent's web server
	prom    *api
	server  *process // Prometheus
	kubelet *devicemanager.Kubelet
	agent   *process

	mu   sync.Mutex // guards pods, which the kubelet reads when it likes
	pods []*v1.Pod
}

// process is a program that runs until the test ends.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{}
	said   bytes.Buffer // to be read when it has exited
}

func start(t *testing.T, dir, program string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(program, args...), exited: make(chan struct{})}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr, p.cmd.WaitDelay = dir, &p.said, &p.said, time.Second
	// A group of its own, so that whatever it starts ends with it; and it ends with the tests.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // what it said of its end is in p.said
		close(p.exited)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s said:\n%s", filepath.Base(program), p.said.String())
		}
	})
	return p
}

// kill ends the process, if it has not ended already, and waits until it is gone.
func (p *process) kill() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // an error: it is gone already
	<-p.exited
}

// newNode starts a kubelet, an agent and a Prometheus with the chart's rules.
func newNode(t *testing.T) *node {
	t.Helper()
	prometheus := tool(t, "prometheus")
	dir, err := os.MkdirTemp("", "node") // not t.TempDir: a socket's path has 108 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &node{t: t, dir: dir, address: freeAddress(t)}
	n.kubelet, err = devicemanager.StartKubelet(dir, n.boundPods)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n.kubelet != nil {
			n.stopKubelet()
		}
	})
	n.configure("info")
	n.agent = start(t, dir, agentBinary, "--config", filepath.Join(dir, "config.yaml"))

	n.write("prometheus.yaml", n.scrapeConfig())
	address := freeAddress(t)
	n.prom = &api{url: "http://" + address}
	n.server = start(t, dir, prometheus, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--web.listen-address="+address)
	n.eventually("Prometheus has scraped the agent", func(ctx context.Context) error {
		// Several times, since a counter's first value is no increase.
		return n.wants(ctx, `count_over_time(gpu_node_agent_source_up[1m]) >= 3`, 2)
	})
	return n
}

// configure writes the agent's configuration. Everything happens fast, every GPU counts as idle, and there is a
// field that is none.
func (n *node) configure(level string) {
	n.write("config.yaml", fmt.Sprintf(`log: {level: %[3]s}
source:
  mode: sim
  interval: 1s
  stallAfter: 1s
  sim: {profile: h100-8, control: %[1]s/sim.sock}
health:
  recoverAfter: 1s
  stateFile: %[1]s/state.json
  socket: %[1]s/agent.sock
plugin: {kubeletDir: %[1]s}
metrics:
  listen: %[2]s
  fields: [default, profiling, DCGM_FI_DEV_NO_SUCH_FIELD]
  idleBelow: 100
`, n.dir, n.address, level))
}

// scrapeConfig shows Prometheus the agent twice: as node-1 of no cluster, and as node-2 of one, with the labels of
// the agent's own pod on all that has none, as Prometheus's operator does it. So every query must work both ways,
// and what is counted across nodes is seen.
func (n *node) scrapeConfig() string {
	rules, err := filepath.Abs(filepath.Join(chart, "rules"))
	if err != nil {
		n.t.Fatal(err)
	}
	return fmt.Sprintf(`global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%[1]s/*.yaml]
scrape_configs:
- job_name: gpu-node-agent
  honor_labels: true
  static_configs: [{targets: [%[2]q]}]
  relabel_configs: [{target_label: instance, replacement: node-1}]
- job_name: gpus
  honor_labels: true
  static_configs: [{targets: [%[2]q], labels: {cluster: east, namespace: gpu, pod: agent, container: agent}}]
  relabel_configs: [{target_label: instance, replacement: node-2}]
`, rules, n.address)
}

func (n *node) write(name, text string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.dir, name), []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
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

func (n *node) stopKubelet() {
	n.t.Helper()
	if err := n.kubelet.Stop(); err != nil {
		n.t.Error(err)
	}
	n.kubelet = nil
}

func (n *node) boundPods() []*v1.Pod {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.pods)
}

// run has the kubelet admit a pod that asks for GPUs.
func (n *node) run(namespace, name string, gpus int64) {
	n.t.Helper()
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name)},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "work", Resources: v1.ResourceRequirements{
			Limits: v1.ResourceList{gpuResource: *resource.NewQuantity(gpus, resource.DecimalSI)},
		}}}},
	}
	n.mu.Lock()
	n.pods = append(n.pods, pod)
	n.mu.Unlock()
	if _, err := n.kubelet.Admit(n.t.Context(), pod); err != nil {
		n.t.Fatal(err)
	}
}

// inject sends events to the agent's simulator.
func (n *node) inject(events ...string) {
	n.t.Helper()
	for _, event := range events {
		conn, err := net.Dial("unix", filepath.Join(n.dir, "sim.sock"))
		if err != nil {
			n.t.Fatal(err)
		}
		fmt.Fprintln(conn, event) // an error: there is no answer
		answer, err := bufio.NewReader(conn).ReadString('\n')
		conn.Close()
		if err != nil || !strings.Contains(answer, `"ok":true`) {
			n.t.Fatalf("event %s: answer %q, %v", event, answer, err)
		}
	}
}

// eventually waits until the check passes.
func (n *node) eventually(what string, check func(context.Context) error) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	begin := time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	var why error
	for {
		err := check(ctx)
		if ctx.Err() == nil { // else it says only that
			why = err
		}
		if err == nil {
			n.t.Logf("%-70s %5.2fs", what, time.Since(begin).Seconds())
			return
		}
		select {
		case <-tick.C:
		case <-n.server.exited:
			n.t.Fatalf("waiting for: %s: Prometheus has ended", what)
		case <-ctx.Done():
			n.t.Fatalf("waited %v for: %s: %v", patience, what, why)
		}
	}
}

// wants checks that an expression has so many series.
func (n *node) wants(ctx context.Context, expr string, count int) error {
	got, err := n.prom.query(ctx, expr)
	if err == nil && len(got) != count {
		err = fmt.Errorf("%s has %d series, want %d: %v", expr, len(got), count, got)
	}
	return err
}
