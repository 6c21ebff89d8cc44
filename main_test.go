package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// These tests run the built binary as its user does.

var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	binary = filepath.Join(dir, "gpu-node-agent")
	build := exec.Command("go", "build", "-race", "-o", binary, ".")
	build.Stderr = os.Stderr
	code := 1
	if err := build.Run(); err == nil {
		code = m.Run()
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// patience is how long a thing is waited for on a busy machine. Nothing takes that long.
const patience = 30 * time.Second

// process is a running agent.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	url    string
	dir    string // the kubelet's
	config string
	stderr *os.File // nil: the log is kept in out
	exited chan struct{}

	mu  sync.Mutex // guards out
	out bytes.Buffer
}

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

// tempDir is short enough for a unix socket's path.
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
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

// start runs the agent with a configuration in which %[1]s is the kubelet's directory.
func start(t *testing.T, config string, env ...string) *process {
	t.Helper()
	p := prepare(t, config)
	p.launch(env...)
	return p
}

// prepare is start up to the launch.
func prepare(t *testing.T, config string) *process {
	t.Helper()
	p := &process{t: t, dir: tempDir(t), exited: make(chan struct{})}
	address := freeAddress(t)
	p.url = "http://" + address
	p.config = filepath.Join(p.dir, "config.yaml")
	p.write(config, address)
	return p
}

// again starts an agent anew where one has ended.
func (p *process) again() *process {
	p.t.Helper()
	q := &process{t: p.t, url: p.url, dir: p.dir, config: p.config, exited: make(chan struct{})}
	q.launch()
	return q
}

func (p *process) launch(env ...string) {
	t := p.t
	t.Helper()
	p.cmd = exec.Command(binary, "--config", p.config)
	p.cmd.Env = append(os.Environ(), "GPU_NODE_AGENT_HEALTH_STATE_FILE="+p.dir+"/state.json", "GPU_NODE_AGENT_HEALTH_SOCKET="+p.dir+"/agent.sock")
	p.cmd.Env = append(p.cmd.Env, env...)
	p.cmd.Stderr, p.cmd.Stdout = p, p
	if p.stderr != nil {
		p.cmd.Stderr = p.stderr
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = p.cmd.Wait(); close(p.exited) }()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if t.Failed() {
			t.Logf("the agent's log:\n%s", p.log())
		}
		if strings.Contains(p.log(), "DATA RACE") {
			t.Errorf("a race in the agent:\n%s", p.log())
		}
	})
}

// write writes the configuration.
func (p *process) write(config, address string) {
	p.t.Helper()
	text := fmt.Sprintf(config+"\nplugin: {kubeletDir: %[1]s}\nmetrics: {listen: '%[2]s'}\n", p.dir, address)
	if err := os.WriteFile(p.config, []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// get returns a page's status and text, or nothing if nobody serves.
func (p *process) get(path string) (int, string) {
	ctx, cancel := context.WithTimeout(p.t.Context(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+path, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
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

// await waits for something to become so.
func (p *process) await(what string, is func() bool) {
	p.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	end := time.After(patience)
	for !is() {
		select {
		case <-p.exited:
			p.t.Fatalf("the agent has ended while waiting for %s", what)
		case <-end:
			p.t.Fatalf("waited in vain for %s", what)
		case <-tick.C:
		}
	}
}

func (p *process) awaitPage(path string, status int, parts ...string) {
	p.t.Helper()
	p.await(fmt.Sprintf("%s with %d and %q", path, status, parts), func() bool {
		code, text := p.get(path)
		for _, part := range parts {
			if !strings.Contains(text, part) {
				return false
			}
		}
		return code == status
	})
}

// endsWithin is how long the agent may take to end, whatever hangs: 5 s is the promise, the rest is for a machine
// that is busy with other tests. The kubelet kills after 30 s.
const endsWithin = 10 * time.Second

// end ends the agent by a signal and returns its exit code.
func (p *process) end(s os.Signal) int {
	p.t.Helper()
	begin := time.Now()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
	select {
	case <-p.exited:
	case <-time.After(endsWithin):
		p.t.Fatalf("the agent still runs %v after %v", endsWithin, s)
	}
	p.t.Logf("ended in %v", time.Since(begin).Round(time.Millisecond))
	return p.cmd.ProcessState.ExitCode()
}

const simConfig = "source: {mode: sim, sim: {control: %[1]s/sim.sock}}"

func TestJob(t *testing.T) {
	p := start(t, simConfig)
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "plugin nvidia.com/gpu: ")
	p.awaitPage("/livez", http.StatusOK, "ok")

	k, err := kubelettest.Start(p.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	p.awaitPage("/readyz", http.StatusOK, "ok")
	p.awaitPage("/metrics", http.StatusOK,
		`gpu_node_agent_plugin_registered{resource="nvidia.com/gpu"} 1`, "\nDCGM_FI_DEV_GPU_TEMP{", "gpu_node_agent_source_up 1")

	if out, err := exec.Command(binary, "sim", "--config", p.config, "{gpu: 3, xid: 79, lost: true}").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p.awaitPage("/metrics", http.StatusOK, `gpu_node_agent_plugin_devices{health="unhealthy",resource="nvidia.com/gpu"} 1`,
		`gpu="3",hostname=`, `xid="79"} 1`, `cause="lost"`)
	if code, text := p.get("/readyz"); code != http.StatusOK {
		t.Errorf("/readyz is %d with a broken GPU: %s: the agent itself is well", code, text)
	}
	if code := p.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	left, err := filepath.Glob(p.dir + "/device-plugins/gpu-node-agent*")
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
	if _, err := os.Stat(p.dir + "/sim.sock"); err == nil {
		t.Error("the control socket was left behind")
	}
}

// A restart neither forgets a bad GPU nor invents one, and an operator's word ends what nothing else does.
func TestRestartAndClear(t *testing.T) {
	p := start(t, simConfig)
	p.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`)
	if out, code := run(t, "sim", "--socket", p.dir+"/sim.sock", "{gpu: 2, xid: 48}"); code != 0 {
		t.Fatal(out)
	}
	p.awaitPage("/metrics", http.StatusOK, `cause="xid-48"`)
	gpu := regexp.MustCompile(`UUID="(GPU-[^"]*)".*cause="xid-48"`)
	_, page := p.get("/metrics")
	found := gpu.FindStringSubmatch(page)
	if found == nil {
		t.Fatal(page)
	}
	p.await("the state file", func() bool {
		text, err := os.ReadFile(p.dir + "/state.json")
		return err == nil && strings.Contains(string(text), "xid-48")
	})
	_ = p.cmd.Process.Kill() // not even a chance to say goodbye
	<-p.exited

	again := p.again()
	again.awaitPage("/metrics", http.StatusOK, `cause="xid-48"`, `state="healthy"} 1`)
	if _, page := again.get("/metrics"); strings.Count(page, `state="unhealthy"} 1`) != 1 {
		t.Errorf("not just one GPU is unhealthy:\n%s", page)
	}
	if out, code := run(t, "clear", "--socket", p.dir+"/agent.sock", "--gpu", found[1], "--cause", "xid-1"); code != 1 || !strings.Contains(out, "xid-48") {
		t.Errorf("a wrong cause: %d %s", code, out)
	}
	if out, code := run(t, "clear", "--socket", p.dir+"/agent.sock", "--gpu", found[1]); code != 0 || out != "cleared xid-48\n" {
		t.Errorf("clear: %d %s", code, out)
	}
	if _, page := again.get("/metrics"); strings.Contains(page, `cause="xid-48"`) {
		t.Error("the finding stands after it was cleared")
	}
	if code := again.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// allocatable waits until the kubelet has so many healthy GPUs.
func (p *process) allocatable(k *kubelettest.Kubelet, n int) {
	p.t.Helper()
	p.await(fmt.Sprintf("%d GPUs that can be scheduled", n), func() bool {
		return k.State().Resources["nvidia.com/gpu"].Allocatable() == n
	})
}

// An operator takes a GPU away and gives it back, and one that waits for a reset is kept free between two jobs.
func TestCordonAndIsolation(t *testing.T) {
	config := func(cordon string) string {
		return simConfig + "\nhealth: {isolatePending: true, recoverAfter: 0s, cordon: [" + cordon + "]}"
	}
	p := start(t, config(""))
	address := strings.TrimPrefix(p.url, "http://")
	k, err := kubelettest.Start(p.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	p.allocatable(k, 8)
	p.write(config("'2', GPU-of-another-node"), address)
	p.allocatable(k, 7)
	p.awaitPage("/metrics", http.StatusOK, `cause="cordoned"`)
	p.await("a word on what means no GPU", func() bool { return strings.Contains(p.log(), `["GPU-of-another-node"]`) })
	p.write(config(""), address)
	p.allocatable(k, 8)

	job, err := k.Allocate(t.Context(), "nvidia.com/gpu", 1)
	if err != nil {
		t.Fatal(err)
	}
	p.awaitPage("/api/v1/snapshot", http.StatusOK, `"pod":"`+job.Container.Pod+`"`)
	_, page := p.get("/api/v1/snapshot")
	index := regexp.MustCompile(`"uuid":"` + job.Devices[0] + `","index":(\d)`).FindStringSubmatch(page)
	if index == nil {
		t.Fatalf("%s is not in %s", job.Devices[0], page)
	}
	inject := func(event string) {
		t.Helper()
		if out, code := run(t, "sim", "--socket", p.dir+"/sim.sock", fmt.Sprintf(event, index[1])); code != 0 {
			t.Fatal(out)
		}
	}
	inject("{gpu: %s, rowRemapPending: true}")
	p.awaitPage("/metrics", http.StatusOK, `cause="row-remap-pending"`, `state="degraded"} 1`)
	p.allocatable(k, 8)
	k.Free("nvidia.com/gpu", job.Devices...)
	p.allocatable(k, 7)
	p.awaitPage("/metrics", http.StatusOK, `cause="isolated"`, `action="reset the GPU now: no pod holds it"`)
	inject("{gpu: %s, rowRemapPending: false}")
	p.allocatable(k, 8)
	if code := p.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// The driver is let go of, a GPU is reset, and the driver is taken back.
func TestDetach(t *testing.T) {
	p := start(t, simConfig)
	k, err := kubelettest.Start(p.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	p.allocatable(k, 8)
	say := func(code int, args ...string) string {
		t.Helper()
		out, got := run(t, append([]string{args[0], "--socket", p.dir + "/" + map[bool]string{true: "sim.sock", false: "agent.sock"}[args[0] == "sim"]}, args[1:]...)...)
		if got != code {
			t.Fatalf("%v: exit code %d: %s", args, got, out)
		}
		return out
	}
	say(0, "sim", "{gpu: 5, xid: 95, recoveryAction: reset}")
	p.allocatable(k, 7)

	job, err := k.Allocate(t.Context(), "nvidia.com/gpu", 1)
	if err != nil {
		t.Fatal(err)
	}
	p.awaitPage("/api/v1/snapshot", http.StatusOK, `"pod":"`+job.Container.Pod+`"`)
	if out := say(1, "detach"); !strings.Contains(out, job.Devices[0]+") is held by ") || !strings.Contains(out, job.Container.Pod) {
		t.Errorf("a pod holds %v, and detach says %s", job.Devices, out)
	}
	if out := say(1, "detach", "--for", "soon"); out != "--for: \"soon\" is not a time of 1s to 24h; use such as 30m\n" {
		t.Errorf("%s", out)
	}
	p.allocatable(k, 7)
	k.Free("nvidia.com/gpu", job.Devices...)
	p.await("a word that the pod has ended", func() bool { _, page := p.get("/api/v1/snapshot"); return !strings.Contains(page, job.Container.Pod) })

	out := say(0, "detach", "--for", "1h")
	if !strings.HasPrefix(out, "the driver is let go of since ") || !strings.Contains(out, "the agent has no file of it open\n") || !strings.Contains(out, "gpu-node-agent attach\n") {
		t.Errorf("detach says %s", out)
	}
	p.allocatable(k, 0)
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "source detached: the driver is let go of on request")
	p.awaitPage("/livez", http.StatusOK)
	p.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_source_detached 1", `cause="driver-released"`, `cause="xid-95"`)
	if out := say(0, "detach"); !strings.HasPrefix(out, "the driver was let go of already, since ") {
		t.Errorf("a second detach says %s", out)
	}
	p.write(simConfig+"\nhealth: {cordon: ['2']}", strings.TrimPrefix(p.url, "http://"))
	p.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_source_detached 1", `cause="cordoned"`)
	say(0, "sim", "{gpu: 5, recoveryAction: none}") // as after nvidia-smi -r

	if out := say(0, "attach"); out != "the driver is back, and the GPUs are measured\n" {
		t.Errorf("attach says %s", out)
	}
	p.allocatable(k, 7) // all but the cordoned one
	p.awaitPage("/readyz", http.StatusOK)
	if _, page := p.get("/metrics"); strings.Contains(page, `cause="xid-95"`) || !strings.Contains(page, "gpu_node_agent_source_detached 0") {
		t.Errorf("after attach:\n%s", page)
	}
	if out := say(0, "attach"); !strings.HasPrefix(out, "the driver was not let go of") {
		t.Errorf("a second attach says %s", out)
	}

	say(0, "detach", "--for", "1s") // and it comes back by itself
	p.await("a word that the time is up", func() bool { return strings.Contains(p.log(), `"because":"the time is up"`) })
	p.awaitPage("/readyz", http.StatusOK)
	say(0, "detach")
	if code := p.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	again := p.again() // has not the driver, and an operator goes on as before
	again.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_source_detached 1", `cause="cordoned"`, `cause="driver-released"`)
	again.allocatable(k, 0)
	if out := say(0, "attach"); out != "the driver is back, and the GPUs are measured\n" {
		t.Errorf("attach says %s", out)
	}
	again.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_source_up 1", `cause="cordoned"`)
	if _, page := again.get("/metrics"); strings.Contains(page, "driver-released") {
		t.Error("attach has not ended what the process before has begun")
	}
}

// released is how many GPUs the page shows as withheld for a detach.
func (p *process) released() int {
	_, page := p.get("/metrics")
	return len(regexp.MustCompile(`(?m)^gpu_node_agent_device_finding\{.*cause="driver-released".*\} 1$`).FindAllString(page, -1))
}

// Not even a kill, and the start after it, give out a GPU whose driver an operator has had let go of.
func TestDetachOutlivesAKill(t *testing.T) {
	p := start(t, simConfig)
	k, err := kubelettest.Start(p.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	p.allocatable(k, 8)
	if out, code := run(t, "detach", "--socket", p.dir+"/agent.sock", "--for", "10m", "--force"); code != 0 {
		t.Fatal(out)
	}
	_ = p.cmd.Process.Kill()
	<-p.exited
	again := p.again()
	again.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_source_detached 1")
	if n := again.released(); n != 8 {
		t.Errorf("%d GPUs are withheld, want 8", n)
	}
	again.awaitPage("/readyz", http.StatusServiceUnavailable, "source detached: ")
	again.awaitPage("/livez", http.StatusOK)
	state, err := k.WaitFor(t.Context(), func(s kubelettest.State) bool { return len(s.Resources["nvidia.com/gpu"].Devices) == 8 })
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range state.Resources["nvidia.com/gpu"].Devices {
		if d.Healthy {
			t.Errorf("the kubelet may give out %s", d.ID)
		}
	}
	if out, code := run(t, "attach", "--socket", p.dir+"/agent.sock"); code != 0 {
		t.Errorf("attach: %s", out)
	}
	again.allocatable(k, 8)
}

// Of two agents with one state file one writes it, the other says which, and goes on when that one has ended.
func TestTwoAgentsWithOneStateFile(t *testing.T) {
	dir := tempDir(t)
	env := "GPU_NODE_AGENT_HEALTH_STATE_FILE=" + dir + "/state.json"
	holds := func(what string) func() bool {
		return func() bool {
			text, err := os.ReadFile(dir + "/state.json")
			return err == nil && strings.Contains(string(text), what)
		}
	}
	first := start(t, simConfig, env)
	first.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`)
	if out, code := run(t, "sim", "--socket", first.dir+"/sim.sock", "{gpu: 2, xid: 48}"); code != 0 {
		t.Fatal(out)
	}
	first.await("the first agent's finding", holds("xid-48"))

	second := start(t, simConfig, env)
	second.awaitPage("/metrics", http.StatusOK, `cause="xid-48"`, `state="healthy"} 1`, "gpu_node_agent_state_file_up 0")
	second.awaitPage("/api/v1/snapshot", http.StatusOK, fmt.Sprintf("locked by another agent (pid %d on ", first.cmd.Process.Pid))
	if out, code := run(t, "sim", "--socket", second.dir+"/sim.sock", "{gpu: 3, xid: 95}"); code != 0 {
		t.Fatal(out)
	}
	second.awaitPage("/metrics", http.StatusOK, `cause="xid-95"`)
	if holds("xid-95")() {
		t.Error("both agents write the file")
	}
	first.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_state_file_up 1")
	_ = first.cmd.Process.Kill()
	<-first.exited
	second.await("the file to be the second agent's", holds("xid-95"))
	second.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_state_file_up 1")
	if code := second.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// A start with another simulation shows nothing of the one before, and a start with another source wipes nothing.
func TestStateFileOfAnotherSource(t *testing.T) {
	p := start(t, simConfig)
	p.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`)
	if out, code := run(t, "sim", "--socket", p.dir+"/sim.sock", "{gpu: 2, xid: 48}"); code != 0 {
		t.Fatal(out)
	}
	text := func() string {
		text, _ := os.ReadFile(p.dir + "/state.json")
		return string(text)
	}
	p.await("the state file", func() bool { return strings.Contains(text(), "xid-48") })
	_ = p.cmd.Process.Kill()
	<-p.exited

	// No DCGM is there, so that nothing is ever measured; what was known of it stays.
	dcgm := strings.NewReplacer(`"source":"sim"`, `"source":"dcgm"`).Replace(text())
	if err := os.WriteFile(p.dir+"/state.json", []byte(dcgm), 0o600); err != nil {
		t.Fatal(err)
	}
	sim := p.again()
	sim.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`)
	if _, page := sim.get("/metrics"); strings.Contains(page, "xid-48") {
		t.Error("a simulation shows what another source has found")
	}
	sim.await("the state file", func() bool { return strings.Contains(text(), `"source":"sim"`) })
	if !strings.Contains(text(), "xid-48") {
		t.Errorf("one start with another source has wiped the findings: %s", text())
	}
	if out, code := run(t, "sim", "--socket", p.dir+"/sim.sock", "{gpu: 1, xid: 95}"); code != 0 {
		t.Fatal(out)
	}
	sim.await("the state file", func() bool { return strings.Contains(text(), "xid-95") })
	_ = sim.cmd.Process.Kill()
	<-sim.exited

	p.write("source: {mode: sim, sim: {profile: a100-8, control: %[1]s/sim.sock}}", strings.TrimPrefix(p.url, "http://"))
	other := p.again()
	other.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`)
	if _, page := other.get("/metrics"); strings.Count(page, `state="healthy"} 1`) != 8 || strings.Contains(page, "xid-95") || strings.Contains(page, `cause="missing"`) {
		t.Errorf("another simulation has more than its own GPUs:\n%s", page)
	}
}

// A state file that cannot be read is said, stays as it is, and is no reason to stop.
func TestAStateFileInTheWay(t *testing.T) {
	dir := tempDir(t)
	if err := os.MkdirAll(dir+"/state.json/theirs", 0o750); err != nil {
		t.Fatal(err)
	}
	p := start(t, simConfig, "GPU_NODE_AGENT_HEALTH_STATE_FILE="+dir+"/state.json")
	p.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`)
	p.awaitPage("/api/v1/snapshot", http.StatusOK, `"memory":{"file":"`+dir+`/state.json","error":"`, "nothing is written there")
	if out, code := run(t, "status", "--config", p.config); code != 0 || !strings.Contains(out, "a restart of the agent would forget findings: ") {
		t.Errorf("status: %d\n%s", code, out)
	}
	if code := p.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	left, err := filepath.Glob(dir + "/*")
	if err != nil || len(left) != 2 { // it and the lock
		t.Errorf("%v %v", left, err)
	}
	if _, err := os.Stat(dir + "/state.json/theirs"); err != nil {
		t.Error(err)
	}
}

// Whatever is missing, the process stays up and says what.
func TestStaysUpAndSaysWhy(t *testing.T) {
	for name, c := range map[string]struct{ config, ready string }{
		"no libdcgm":                   {"source: {mode: embedded}", "libdcgm.so.4"},
		"no libdcgm for a host engine": {"source: {address: '127.0.0.1:1'}", "libdcgm.so.4"},
		"no GPUs":                      {"source: {mode: sim, sim: {profile: none}}", "no GPUs"},
		"a source that is down":        {"source: {mode: sim, sim: {scenario: [{at: 0s, source: down}]}}", "source down"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Where DCGM is installed it must not be found here.
			p := start(t, c.config, "LD_LIBRARY_PATH=/nonexistent")
			p.awaitPage("/readyz", http.StatusServiceUnavailable, c.ready)
			p.awaitPage("/livez", http.StatusOK)
			p.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_source_up")
			if code := p.end(syscall.SIGTERM); code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

// The page, the JSON and the command say the same.
func TestStatus(t *testing.T) {
	p := start(t, simConfig, "NODE_NAME=node-7")
	k, err := kubelettest.Start(p.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	p.allocatable(k, 8) // ready is said when the kubelet listens, and that is before it has the list
	held, err := k.Allocate(t.Context(), "nvidia.com/gpu", 1)
	if err != nil {
		t.Fatal(err)
	}
	if out, code := run(t, "sim", "--config", p.config, "{gpu: 3, lost: true}"); code != 0 {
		t.Fatal(out)
	}
	p.awaitPage("/", http.StatusOK, "gpu-node-agent", "<h1>node-7</h1>", "lost</strong>", "drain and reboot the node",
		held.Container.Namespace+"/"+held.Container.Pod, "unhealthy, was healthy: lost")
	p.awaitPage("/api/v1/snapshot", http.StatusOK, `"node":"node-7"`, `"cause":"lost"`, `"registered":true`)
	for output, want := range map[string]string{"table": "lost: the GPU is lost", "wide": "UUID", "json": `"cause":"lost"`} {
		out, code := run(t, "status", "--config", p.config, "-o", output)
		if code != 0 || !strings.Contains(out, want) || !strings.Contains(out, held.Container.Pod) || strings.Contains(out, "\x1b") {
			t.Errorf("status -o %s: exit code %d:\n%s", output, code, out)
		}
	}
	if code := p.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if out, code := run(t, "status", "--config", p.config); code != 1 || !strings.Contains(out, "no agent answers at 127.0.0.1:") {
		t.Errorf("status without an agent: exit code %d: %s", code, out)
	}
}

func TestEndsWhileStalled(t *testing.T) {
	p := start(t, "source: {mode: sim, stallAfter: 1s, sim: {scenario: [{at: 1s, source: stalled}]}}")
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "source stalled")
	p.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_source_stalled 1", "DCGM_FI_DEV_GPU_TEMP")
	if code := p.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestReload(t *testing.T) {
	p := start(t, simConfig)
	address := strings.TrimPrefix(p.url, "http://")
	p.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`, "gpu_node_agent_config_last_reload_successful 1")

	p.write("health: {temperature: hot}", address)
	p.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`, "gpu_node_agent_config_last_reload_successful 0")
	p.await("the bad key in the log", func() bool { return strings.Contains(p.log(), "health.temperature") })

	// Every GPU is warmer than 1 °C.
	p.write(simConfig+"\nhealth: {temperature: 1}", address)
	p.awaitPage("/metrics", http.StatusOK, `cause="temperature"`, "gpu_node_agent_config_last_reload_successful 1")

	moved := freeAddress(t)
	p.write(simConfig+"\nhealth: {recoverAfter: 0s}", moved)
	p.url = "http://" + moved
	p.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`)

	reloads := func(n int) func() bool {
		return func() bool { return strings.Count(p.log(), "configuration reloaded") == n }
	}
	p.await("the log of both reloads", reloads(2))
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	p.await("a reload at SIGHUP", reloads(3))
}

// GPUs that were invented are not given out by an agent that is to measure real ones, and cannot yet.
func TestReloadFromASimulation(t *testing.T) {
	p := start(t, simConfig)
	k, err := kubelettest.Start(p.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	p.allocatable(k, 8)
	address := strings.TrimPrefix(p.url, "http://")
	p.write("source: {address: '127.0.0.1:1'}", address)
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "source down: ")
	p.allocatable(k, 0)
	if _, page := p.get("/metrics"); strings.Contains(page, "gpu_node_agent_device_state{") {
		t.Errorf("there are still devices:\n%s", page)
	}
	p.write(simConfig, address)
	p.allocatable(k, 8)
}

// What is not to be logged is not, not even the first word.
func TestLogLevel(t *testing.T) {
	p := start(t, simConfig+"\nlog: {level: warn}")
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "kubelet")
	if code := p.end(syscall.SIGTERM); code != 0 || strings.Contains(p.log(), `"level":"info"`) || !strings.Contains(p.log(), `"level":"warn"`) {
		t.Errorf("exit code %d, log:\n%s", code, p.log())
	}
}

// One that comes before all is in place is no reason to end.
func TestSIGHUPAtTheStart(t *testing.T) {
	p := start(t, simConfig)
	p.await("the first word", func() bool { return strings.Contains(p.log(), `"starting"`) })
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	p.await("the reload", func() bool { return strings.Contains(p.log(), "configuration reloaded") })
	if code := p.end(syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// A standard error that nobody reads delays no verdict and no end of the agent. When it is read again, it says how much is
// missing; when its reader is gone, the agent goes on.
func TestBlockedLog(t *testing.T) {
	begin := func(t *testing.T) (*process, *os.File) {
		t.Helper()
		read, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = read.Close() })
		p := prepare(t, simConfig)
		p.stderr = write
		p.launch()
		_ = write.Close()
		p.awaitPage("/metrics", http.StatusOK, `state="healthy"} 1`)
		// Each reload of it logs all its faults: more than a pipe holds.
		p.write(simConfig+"\nhealth: {cordon: ["+strings.Repeat("'?', ", 2000)+"]}", strings.TrimPrefix(p.url, "http://"))
		p.hangUp()
		p.awaitPage("/metrics", http.StatusOK, "gpu_node_agent_config_last_reload_successful 0")
		return p, read
	}
	inject := func(t *testing.T, p *process, event string) {
		t.Helper()
		if out, code := run(t, "sim", "--socket", p.dir+"/sim.sock", event); code != 0 {
			t.Fatal(out)
		}
	}
	dropped := func(p *process) string {
		_, page := p.get("/metrics")
		return regexp.MustCompile(`(?m)^gpu_node_agent_log_dropped_total .*$`).FindString(page)
	}

	t.Run("read again", func(t *testing.T) {
		t.Parallel()
		p, stderr := begin(t)
		k, err := kubelettest.Start(p.dir)
		if err != nil {
			t.Fatal(err)
		}
		defer k.Stop()
		p.allocatable(k, 8)
		inject(t, p, "{gpu: 3, xid: 79, lost: true}")
		p.allocatable(k, 7)
		p.awaitPage("/metrics", http.StatusOK, `cause="lost"`, `cause="xid-79"`)
		p.awaitPage("/api/v1/snapshot", http.StatusOK, `"cause":"lost"`)
		p.awaitPage("/readyz", http.StatusOK, "ok")
		p.awaitPage("/livez", http.StatusOK, "ok")
		p.await("dropped entries", func() bool {
			p.hangUp()
			return !strings.HasSuffix(dropped(p), " 0")
		})
		go func() { _, _ = io.Copy(p, stderr) }()
		p.await("a word on what is missing", func() bool { return strings.Contains(p.log(), `"log entries dropped: `) })
		inject(t, p, "{gpu: 4, xid: 48}")
		p.await("the log of what happens now", func() bool { return strings.Contains(p.log(), `"xid":48`) })
		if code := p.end(syscall.SIGTERM); code != 0 {
			t.Errorf("exit code %d", code)
		}
	})
	t.Run("end", func(t *testing.T) {
		t.Parallel()
		p, _ := begin(t)
		if code := p.end(syscall.SIGTERM); code != 0 {
			t.Errorf("exit code %d", code)
		}
	})
	t.Run("reader gone", func(t *testing.T) {
		t.Parallel()
		p, stderr := begin(t)
		_ = stderr.Close()
		inject(t, p, "{gpu: 3, xid: 79, lost: true}")
		p.awaitPage("/metrics", http.StatusOK, `cause="lost"`)
		p.await("dropped entries", func() bool { return !strings.HasSuffix(dropped(p), " 0") })
		if code := p.end(syscall.SIGTERM); code != 0 {
			t.Errorf("exit code %d", code)
		}
	})
}

// hangUp has the agent load its configuration again.
func (p *process) hangUp() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		p.t.Fatal(err)
	}
}

func TestPortInUse(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, "source: {mode: sim}")
	p.awaitPage("/livez", http.StatusOK)
	p.write("source: {mode: sim}", l.Addr().String())
	p.await("a word on the port", func() bool { return strings.Contains(p.log(), "address already in use") })
	p.url = "http://" + l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	p.awaitPage("/livez", http.StatusOK)
}

func run(t *testing.T, args ...string) (string, int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binary, args...)
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

func TestCommands(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "bad.yaml")
	if err := os.WriteFile(bad, []byte("source: {mode: x, intervall: 1s}\nplugin: {resource: gpu}"), 0o600); err != nil {
		t.Fatal(err)
	}
	good := filepath.Join(t.TempDir(), "good.yaml")
	if err := os.WriteFile(good, []byte("source: {mode: sim}"), 0o600); err != nil {
		t.Fatal(err)
	}
	kubeletDir := tempDir(t)
	k, err := kubelettest.Start(kubeletDir)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	for _, c := range []struct {
		args []string
		code int
		want []string
	}{
		{[]string{"version"}, 0, []string{"gpu-node-agent ", "go1.", "go-dcgm v1.", "built with ", "GOOS=linux", "-race=true"}},
		{[]string{"version", "-o", "json"}, 0, []string{`"version": "dev"`, `"modified": `, `"goDCGM": "v1.`, `"GOOS": "linux"`}},
		{[]string{"--version"}, 0, []string{"gpu-node-agent dev", "go1.", "go-dcgm v1."}},
		{[]string{"-v"}, 0, []string{"gpu-node-agent dev", "go1.", "go-dcgm v1."}},
		{[]string{"version", "-o", "xml"}, 1, []string{`--output: "xml" is not known; use text or json`}},
		{[]string{"check-config", "--config", good}, 0, []string{"mode: sim", "kubeletDir: /var/lib/kubelet", "interval: 10s"}},
		{[]string{"check-config", "--config", good, "--source.mode=standalone"}, 1, []string{"source.address: "}},
		{[]string{"check-config", "--config", bad}, 1, []string{"source.intervall: unknown key; did you mean source.interval?"}},
		{[]string{"--config", bad}, 1, []string{"source.intervall"}},
		{[]string{"check-config", "--config", "/nonexistent"}, 1, []string{"/nonexistent"}},
		{[]string{"sim", "--config", good, "{gpu: 1, xid: 79}"}, 1, []string{"source.sim.control"}},
		{[]string{"sim", "--socket", "/nonexistent", "{gpu: 1, xid: 79}"}, 1, []string{"/nonexistent"}},
		{[]string{"sim", "--socket", "/nonexistent", "{gpux: 1}"}, 1, []string{"gpux"}},
		{[]string{"sim"}, 1, []string{"arg"}},
		{[]string{"clear"}, 1, []string{"--gpu"}},
		{[]string{"clear", "--gpu", "GPU-1", "--socket", "/nonexistent"}, 1, []string{"/nonexistent", "is it running", "health.socket"}},
		{[]string{"detach", "--socket", "/nonexistent"}, 1, []string{"/nonexistent"}},
		{[]string{"detach", "--for", "48h", "--socket", "/nonexistent"}, 1, []string{`--for: "48h" is not a time of 1s to 24h`}},
		{[]string{"detach", "GPU-1"}, 1, []string{"unknown command"}},
		{[]string{"attach", "--socket", "/nonexistent"}, 1, []string{"/nonexistent"}},
		{[]string{"attach", "--health.socket="}, 1, []string{"health.socket: not set"}},
		// Where there is a DCGM, this names it too.
		{[]string{"doctor", "--plugin.kubeletDir=/nonexistent"}, 1, []string{"libdcgm.so.4", "fail  kubelet", "the agent cannot do its job here: see "}},
		{[]string{"doctor", "--config", good, "--plugin.kubeletDir", kubeletDir, "--metrics.listen=127.0.0.1:0"}, 0, []string{"info  DCGM", "simulated", "ok    kubelet"}},
		{[]string{"doctor", "--config", good, "--plugin.kubeletDir", kubeletDir, "--metrics.listen=127.0.0.1:0", "-o", "json"}, 0, []string{`"ok": true`}},
		{[]string{"doctor", "-o", "yaml"}, 1, []string{"use text or json"}},
		{[]string{"fields", "--config", good}, 0, []string{"SUPPORTED", "DCGM_FI_DEV_SERIAL "}},
		{[]string{"fields", "--config", good, "-o", "json"}, 0, []string{`"source": "sim"`, `"supported": "yes"`, `"supported": "no"`}},
		{[]string{"fields", "--config", bad}, 0, []string{"unknown", "Which are supported here is not known: the configuration cannot be used: "}},
		{[]string{"fields", "-o", "yaml"}, 1, []string{"use text or json"}},
		{[]string{"status", "-o", "yaml"}, 1, []string{"use table, wide or json"}},
		{[]string{"nonsense"}, 1, []string{"nonsense"}},
		{[]string{"--help"}, 0, []string{"--config", "check-config", "--source.mode"}},
	} {
		out, code := run(t, c.args...)
		if code != c.code {
			t.Errorf("%v: exit code %d, want %d: %s", c.args, code, c.code, out)
		}
		for _, w := range c.want {
			if !strings.Contains(out, w) {
				t.Errorf("%v: got %q, want %q in it", c.args, out, w)
			}
		}
	}
}
