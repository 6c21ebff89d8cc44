// Package binarytest runs the built agent as a process, with a stand-in kubelet and simulated GPUs.
package binarytest

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	// go test caches results by imports and by the files that a test reads. The built binary is neither, so the test imports
	// its packages and reads main.go.
	_ "github.com/gpu-node-agent/gpu-node-agent/agent"
	_ "github.com/gpu-node-agent/gpu-node-agent/agent/doctor"
	_ "github.com/gpu-node-agent/gpu-node-agent/agent/operator"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
	"github.com/gpu-node-agent/gpu-node-agent/internal/mpstest"
)

// The tests run in parallel: each has its own directory, address and sockets.

var (
	binary string
	raced  bool // the binary has the race detector
)

func TestMain(m *testing.M) {
	flag.Parse()
	code := 1
	dir, err := os.MkdirTemp("", "gna")
	if err == nil {
		err = build(dir)
	}
	if err == nil {
		code = mpstest.Main(m)
	} else {
		fmt.Fprintln(os.Stderr, err)
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// build writes the binary into a directory.
func build(dir string) error {
	// The tests wait for the agent's timers most of the time, so more of them run at once than there are processors.
	if err := flag.Set("test.parallel", "12"); err != nil {
		return err
	}
	if _, err := os.ReadFile("../../main.go"); err != nil {
		return err
	}
	binary = filepath.Join(dir, "gpu-node-agent")
	info, _ := debug.ReadBuildInfo()
	// the agent has the race detector if the tests have it
	raced = slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
	build := exec.Command("go", "build", "-race="+strconv.FormatBool(raced), "-ldflags", "-w", "-o", binary,
		"github.com/gpu-node-agent/gpu-node-agent")
	build.Stderr = os.Stderr
	return build.Run()
}

const (
	// awaitTimeout bounds each wait, with room for a busy machine.
	awaitTimeout = 30 * time.Second

	// raceOptions make a process with the race detector exit at once, and not only after a second. Its exit code still
	// reports a race.
	raceOptions = "GORACE=atexit_sleep_ms=0"

	resource  = "nvidia.com/gpu"
	simConfig = "source: {mode: sim, sim: {control: DIR/sim.sock}}"
)

// process is an agent on a node of its own.
type process struct {
	*node.Node
	t testing.TB

	mu  sync.Mutex // guards out
	out bytes.Buffer
}

// Write appends to the process's log.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *process) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// start runs an agent with a configuration in which DIR is the node's directory.
func start(t testing.TB, config string, env ...string) *process {
	t.Helper()
	p := newProcess(t, config)
	p.launch(env...)
	return p
}

// startRegistered runs an agent beside a kubelet and waits until the kubelet counts the simulation's 8 GPUs.
func startRegistered(t testing.TB, config string, env ...string) (*process, *kubelettest.Kubelet) {
	t.Helper()
	p := newProcess(t, config)
	return p, p.launchRegistered(env...)
}

// launchRegistered is startRegistered for a process that is prepared.
func (p *process) launchRegistered(env ...string) *kubelettest.Kubelet {
	p.t.Helper()
	k := p.startKubelet()
	if err := k.Age(time.Hour); err != nil { // otherwise the agent waits until it has read its pods
		p.t.Fatal(err)
	}
	p.launch(env...)
	p.awaitAllocatable(k, 8)
	return k
}

// newProcess prepares an agent for launch. When the test ends, a running agent must exit with 0 at SIGTERM.
func newProcess(t testing.TB, config string) *process {
	t.Helper()
	return newProcessOf(t, binary, config)
}

// newProcessOf prepares an agent that a program starts.
func newProcessOf(t testing.TB, program, config string) *process {
	t.Helper()
	n, err := node.New(t.Context(), program)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Node: n, t: t}
	t.Cleanup(func() {
		if err := p.Remove(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("the agent's log:\n%s", p.log())
		}
		if strings.Contains(p.log(), "DATA RACE") {
			t.Errorf("data race in the agent:\n%s", p.log())
		}
	})
	p.write(config)
	return p
}

// launch starts the agent, or starts it again after its exit.
func (p *process) launch(env ...string) { p.launchWithLog(p, env...) }

func (p *process) launchWithLog(log io.Writer, env ...string) {
	p.t.Helper()
	defaults := []string{raceOptions, "GPU_NODE_AGENT_HEALTH_SOCKET=" + p.agentSocket()}
	if err := p.Start(log, append(defaults, env...)...); err != nil {
		p.t.Fatal(err)
	}
}

func (p *process) startKubelet() *kubelettest.Kubelet {
	p.t.Helper()
	k, err := kubelettest.Start(p.Dir)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(k.Stop)
	return k
}

// write writes the configuration. A plugin section of its own has kubeletDir: DIR.
func (p *process) write(config string) {
	p.t.Helper()
	if !strings.Contains(config, "plugin:") {
		config += "\nplugin: {kubeletDir: DIR}"
	}
	if err := p.Node.Write(config + "\nmetrics: {listen: ADDRESS}\n"); err != nil {
		p.t.Fatal(err)
	}
}

// reload writes the configuration and makes the agent load it at once. It waits for an agent that starts: SIGHUP ends a process that does
// not handle it yet.
func (p *process) reload(config string) {
	p.t.Helper()
	p.await("the web server", func() bool { code, _ := p.get("/livez"); return code != 0 })
	p.write(config)
	p.signal(syscall.SIGHUP)
}

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// stop ends the agent with SIGTERM. It must exit with 0.
func (p *process) stop() {
	p.t.Helper()
	if err := p.Stop(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *process) config() string      { return p.Dir + "/config.yaml" }
func (p *process) stateFile() string   { return p.StateDir() + "/state.sim.json" }
func (p *process) nodeFile() string    { return p.StateDir() + "/node.json" }
func (p *process) simSocket() string   { return p.Dir + "/sim.sock" }
func (p *process) agentSocket() string { return p.Dir + "/agent.sock" }

// get returns the status code and the body of a page, or zero values if no agent answers.
func (p *process) get(path string) (int, string) {
	ctx, cancel := context.WithTimeout(p.t.Context(), awaitTimeout)
	defer cancel()
	code, text, err := p.Get(ctx, path)
	if err != nil {
		return 0, ""
	}
	return code, string(text)
}

// snapshot returns the node's status, an empty one if no agent answers.
func (p *process) snapshot() status.Node {
	p.t.Helper()
	var s status.Node
	if _, text := p.get("/api/v1/snapshot"); text != "" {
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			p.t.Fatalf("%v: %s", err, text)
		}
	}
	return s
}

// countHolders returns how many GPUs the agent shows as held by a pod.
func (p *process) countHolders(pod string) int {
	n := 0
	for _, gpu := range p.snapshot().GPUs {
		if slices.ContainsFunc(gpu.Holders, func(h status.Holder) bool { return h.Pod == pod }) {
			n++
		}
	}
	return n
}

// findings returns how many devices have a finding of a cause.
func (p *process) findings(cause string) int {
	_, page := p.get("/metrics")
	return len(regexp.MustCompile(`(?m)^gpu_node_agent_device_finding\{.*cause="`+cause+`".*\} 1$`).FindAllString(page, -1))
}

// await waits until the condition holds.
func (p *process) await(what string, condition func() bool) {
	p.t.Helper()
	timeout := time.After(awaitTimeout)
	for !condition() {
		select {
		case <-p.Exited():
			p.t.Fatalf("the agent exited while the test waited for %s", what)
		case <-timeout:
			p.t.Fatalf("timed out waiting for %s", what)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// awaitPage waits until a page has a status code and contains all parts.
func (p *process) awaitPage(path string, code int, parts ...string) {
	p.t.Helper()
	p.await(fmt.Sprintf("%s with %d and %q", path, code, parts), func() bool {
		got, text := p.get(path)
		for _, part := range parts {
			if !strings.Contains(text, part) {
				return false
			}
		}
		return got == code
	})
}

func (p *process) awaitMetrics(parts ...string) {
	p.t.Helper()
	p.awaitPage("/metrics", http.StatusOK, parts...)
}

// awaitSource waits until the source has a status, which makes the agent ready or not.
func (p *process) awaitSource(status string) {
	p.t.Helper()
	p.await("source "+status, func() bool { return p.snapshot().Source.Status == status })
	if code, text := p.get("/readyz"); code != http.StatusServiceUnavailable {
		p.t.Errorf("/readyz is %d with source %s: %s", code, status, text)
	}
}

// awaitAllocatable waits until the kubelet counts n healthy GPUs.
func (p *process) awaitAllocatable(k *kubelettest.Kubelet, n int) {
	p.t.Helper()
	p.await(fmt.Sprintf("%d allocatable GPUs", n), func() bool { return k.State().Resources[resource].Allocatable() == n })
}

// awaitLoss waits until the kubelet has noticed the end of the agent, which is a little later, and counts no healthy device.
func awaitLoss(t testing.TB, k *kubelettest.Kubelet) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), awaitTimeout)
	defer cancel()
	if _, err := k.WaitFor(ctx, func(s kubelettest.State) bool {
		for _, r := range s.Resources {
			if r.Allocatable() > 0 {
				return false
			}
		}
		return true
	}); err != nil {
		t.Fatal("the kubelet does not notice the end of the agent: ", err)
	}
}

func (p *process) awaitLog(part string) {
	p.t.Helper()
	p.await(part+" in the log", func() bool { return strings.Contains(p.log(), part) })
}

// awaitState waits until the state directory has a text.
func (p *process) awaitState(part string) {
	p.t.Helper()
	p.await(part+" in the state", func() bool { return strings.Contains(readFile(p.stateFile())+readFile(p.nodeFile()), part) })
}

// allocate gives a GPU to a new pod and waits until the agent shows the pod as its holder.
func (p *process) allocate(k *kubelettest.Kubelet) kubelettest.Allocation {
	p.t.Helper()
	a, err := k.Allocate(p.t.Context(), resource, 1)
	if err != nil {
		p.t.Fatal(err)
	}
	p.await("the holder "+a.Container.Pod, func() bool { return p.countHolders(a.Container.Pod) == 1 })
	return a
}

// awaitSocket waits until the agent listens on a socket. After a kill it takes the place of the old socket with a delay.
func (p *process) awaitSocket(path string) {
	p.t.Helper()
	p.await(path, func() bool {
		conn, err := net.Dial("unix", path)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
}

// sim injects an event into the agent's simulation.
func (p *process) sim(event string) {
	p.t.Helper()
	p.awaitSocket(p.simSocket())
	if out, code := run(p.t, "sim", "--socket", p.simSocket(), event); code != 0 {
		p.t.Fatalf("sim %s: %s", event, out)
	}
}

// command runs an operator's command, which must exit with a code, and returns its output.
func (p *process) command(code int, name string, args ...string) string {
	p.t.Helper()
	p.awaitSocket(p.agentSocket())
	out, got := run(p.t, append([]string{name, "--socket", p.agentSocket()}, args...)...)
	if got != code {
		p.t.Fatalf("%s %v: exit code %d, want %d: %s", name, args, got, code, out)
	}
	return out
}

// run runs the binary and returns its output and exit code.
func run(t testing.TB, args ...string) (string, int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = append(os.Environ(), raceOptions)
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// readFile returns a file's text, "" if it cannot be read.
func readFile(path string) string {
	text, _ := os.ReadFile(path)
	return string(text)
}
