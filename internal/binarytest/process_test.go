// Package binarytest runs the built agent as a process, with a stand-in kubelet and simulated GPUs.
package binarytest

import (
	"cmp"
	"encoding/json"
	"errors"
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
)

// The tests run in parallel: each has its own directory, port and sockets.

var binary string

func TestMain(m *testing.M) {
	// The tests wait for the agent's timers most of the time, so more of them run at once than there are processors.
	flag.Parse()
	parallelErr := flag.Set("test.parallel", "12")
	dir, dirErr := os.MkdirTemp("", "gna")
	_, mainErr := os.ReadFile("../../main.go")
	if err := errors.Join(parallelErr, dirErr, mainErr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binary = filepath.Join(dir, "gpu-node-agent")
	ldflags := "-w"
	if *screenshots != "" {
		ldflags += " -X main.version=1.0.0"
	}
	info, _ := debug.ReadBuildInfo()
	race := slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) // the agent has the race detector if the tests have it
	build := exec.Command("go", "build", "-race="+strconv.FormatBool(race), "-ldflags", ldflags, "-o", binary, "github.com/gpu-node-agent/gpu-node-agent")
	build.Stderr = os.Stderr
	code := 1
	if err := build.Run(); err == nil {
		code = m.Run()
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

const (
	// awaitTimeout bounds each wait, with room for a busy machine.
	awaitTimeout = 30 * time.Second

	// shutdownTimeout is how long the agent may take to exit, whatever hangs: it promises 5 s, the rest is for a busy
	// machine. The kubelet kills after 30 s.
	shutdownTimeout = 10 * time.Second

	// raceOptions make a process with the race detector exit at once, and not only after a second. Its exit code still
	// reports a race.
	raceOptions = "GORACE=atexit_sleep_ms=0"

	resource  = "nvidia.com/gpu"
	simConfig = "source: {mode: sim, sim: {control: %[1]s/sim.sock}}"
)

// process is a running agent.
type process struct {
	t       *testing.T
	cmd     *exec.Cmd
	address string // metrics.listen
	dir     string // plugin.kubeletDir; also has the agent's sockets and its state file
	config  string // path of the configuration file
	logFile *os.File
	stderr  *os.File      // nil: logFile
	exited  chan struct{} // nil before the first launch
}

func (p *process) log() string { return readFile(p.logFile.Name()) }

// tempDir returns a directory whose path is short enough for a unix socket.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// start runs an agent with a configuration in which %[1]s is the kubelet's directory.
func start(t *testing.T, config string, env ...string) *process {
	t.Helper()
	p := newProcess(t, config)
	p.launch(env...)
	return p
}

// startRegistered runs an agent beside a kubelet and waits until the kubelet counts the simulation's 8 GPUs.
func startRegistered(t *testing.T, config string, env ...string) (*process, *kubelettest.Kubelet) {
	t.Helper()
	p := newProcess(t, config)
	k := p.startKubelet()
	p.launch(env...)
	p.awaitAllocatable(k, 8)
	return p, k
}

// newProcess prepares an agent for launch.
func newProcess(t *testing.T, config string) *process {
	t.Helper()
	dir := tempDir(t)
	logFile, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, dir: dir, address: freeAddress(t), config: filepath.Join(dir, "config.yaml"), logFile: logFile}
	p.write(config)
	t.Cleanup(func() {
		if p.exited != nil {
			p.kill()
		}
		if t.Failed() {
			t.Logf("the agent's log:\n%s", p.log())
		}
		if strings.Contains(p.log(), "DATA RACE") {
			t.Errorf("data race in the agent:\n%s", p.log())
		}
		_ = logFile.Close()
	})
	return p
}

// launch runs the agent, also again after it has exited.
func (p *process) launch(env ...string) {
	p.t.Helper()
	p.cmd = exec.Command(binary, "--config", p.config)
	p.cmd.Env = append(os.Environ(), raceOptions, "GPU_NODE_AGENT_HEALTH_STATE_FILE="+p.stateFile(), "GPU_NODE_AGENT_HEALTH_SOCKET="+p.dir+"/agent.sock")
	p.cmd.Env = append(p.cmd.Env, env...)
	p.cmd.Stderr, p.cmd.Stdout = cmp.Or(p.stderr, p.logFile), p.logFile
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	cmd, exited := p.cmd, make(chan struct{})
	p.exited = exited
	go func() { _ = cmd.Wait(); close(exited) }()
}

func (p *process) startKubelet() *kubelettest.Kubelet {
	p.t.Helper()
	k, err := kubelettest.Start(p.dir)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(k.Stop)
	return k
}

// write writes the configuration.
func (p *process) write(config string) {
	p.t.Helper()
	text := fmt.Sprintf(config+"\nplugin: {kubeletDir: %[1]s}\nmetrics: {listen: '%[2]s'}\n", p.dir, p.address)
	if err := os.WriteFile(p.config, []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// reload writes the configuration and makes the agent load it at once.
func (p *process) reload(config string) {
	p.t.Helper()
	p.write(config)
	p.signal(syscall.SIGHUP)
}

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// stop ends the agent with SIGTERM. It must exit with 0.
func (p *process) stop() {
	p.t.Helper()
	p.signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(shutdownTimeout):
		p.t.Fatalf("the agent still runs %v after SIGTERM", shutdownTimeout)
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		p.t.Errorf("exit code %d after SIGTERM", code)
	}
}

// kill ends the agent without a chance to clean up.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

func (p *process) stateFile() string { return p.dir + "/state.json" }

// get returns the status code and the body of a page, or zero values if no agent answers.
func (p *process) get(path string) (int, string) {
	client := http.Client{Timeout: awaitTimeout}
	res, err := client.Get("http://" + p.address + path)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, ""
	}
	return res.StatusCode, string(text)
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
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(awaitTimeout)
	for !condition() {
		select {
		case <-p.exited:
			p.t.Fatalf("the agent exited while the test waited for %s", what)
		case <-timeout:
			p.t.Fatalf("timed out waiting for %s", what)
		case <-tick.C:
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

// awaitState waits until the state file contains a text.
func (p *process) awaitState(part string) {
	p.t.Helper()
	p.await(part+" in the state file", func() bool { return strings.Contains(readFile(p.stateFile()), part) })
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
	p.awaitSocket(p.dir + "/sim.sock")
	if out, code := run(p.t, "sim", "--socket", p.dir+"/sim.sock", event); code != 0 {
		p.t.Fatalf("sim %s: %s", event, out)
	}
}

// command runs an operator's command, which must exit with a code, and returns its output.
func (p *process) command(code int, name string, args ...string) string {
	p.t.Helper()
	p.awaitSocket(p.dir + "/agent.sock")
	out, got := run(p.t, append([]string{name, "--socket", p.dir + "/agent.sock"}, args...)...)
	if got != code {
		p.t.Fatalf("%s %v: exit code %d, want %d: %s", name, args, got, code, out)
	}
	return out
}

// run runs the binary and returns its output and exit code.
func run(t *testing.T, args ...string) (string, int) {
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
