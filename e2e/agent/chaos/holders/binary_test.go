package holders

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/sequence"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	process "github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

var (
	agentPath    = flag.String("agent", "", `the agent's binary; "": $AGENT_BIN, or built from the repository`)
	binarySteps  = flag.Int("binary-steps", 480, "steps with the built binary")
	binaryWorlds = flag.Int("binary-worlds", 6, "nodes on which these steps are played at once")
)

// simProfile has four GPUs, of which the second one is in MIG mode.
const (
	simProfile  = "mixed-4"
	simScenario = "{gpu: 1, mig: balanced}"
)

// binary is the agent's process.
type binary struct {
	view
	*process.Node
	kubeconfig string
	log        *tail

	mu     sync.Mutex   // guards the fields below
	lost   map[int]bool // GPUs
	runs   bool
	config string // without the lost GPUs

	kubelet, cdi, state string // directories of the pod; a reload keeps them
}

func (b *binary) start(v sequence.Values) error {
	kubelet, cdi, state, err := b.mount(v)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.kubelet, b.cdi, b.state = kubelet, cdi, state
	b.config = b.configOf(v)
	if err := b.write(); err != nil {
		return err
	}
	b.runs = true
	stateDir := b.state
	if v.NoState {
		stateDir = ""
	}
	return b.Start(b.log, "NODE_NAME="+nodeName, "GPU_NODE_AGENT_STATE_DIR="+stateDir)
}

// write writes the configuration with the GPUs that are lost: simulated GPUs begin with it. The caller holds mu.
func (b *binary) write() error {
	scenario := simScenario
	for gpu := range b.lost {
		scenario += fmt.Sprintf(", {gpu: %d, lost: true}", gpu)
	}
	return b.Write(fmt.Sprintf("source: {mode: sim, events: 'off', sim: {profile: %s, control: DIR/sim.sock, scenario: [%s]}}\n%s", simProfile,
		scenario, b.config))
}

// configOf returns the configuration of values.
func (b *binary) configOf(v sequence.Values) string {
	c := pluginConfig(v, b.kubelet, b.cdi)
	sharing := ""
	switch v.Sharing {
	case sequence.TimeSlicing:
		sharing = fmt.Sprintf("timeSlicing: {resources: [{name: %s, replicas: 2}]}", c.Resource)
	case sequence.Memory:
		sharing = fmt.Sprintf("memory: {resource: %s, unit: %s, enforcement: %s}", c.Sharing.Memory.Resource, c.Sharing.Memory.Unit,
			c.Sharing.Memory.Enforcement)
	}
	return fmt.Sprintf(`health: {socket: DIR/agent.sock, recoverAfter: 1s, flap: {trips: 0, within: 100h},
  kubernetes: {kubeconfig: %s}}
metrics: {listen: ADDRESS}
plugin: {kubeletDir: %s, cdi: {dir: %s}, api: %s, migStrategy: %s, resource: %s, sharing: {%s}}
`, b.kubeconfig, b.kubelet, b.cdi, c.API, c.MIGStrategy, c.Resource, sharing)
}

// stop stops the agent. In its first milliseconds an agent does not handle the signal yet.
func (b *binary) stop() error {
	return b.end(func() error {
		err := b.Stop()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGTERM {
			return nil
		}
		return err
	})
}

func (b *binary) kill() error {
	return b.end(func() error { b.Kill(); return nil })
}

func (b *binary) end(f func() error) error {
	b.mu.Lock()
	b.runs = false
	b.mu.Unlock()
	if err := f(); err != nil {
		return fmt.Errorf("%w: %s", err, b.log)
	}
	return nil
}

// reload changes the configuration. The signal must not come before the agent handles it.
func (b *binary) reload(v sequence.Values) error {
	b.mu.Lock()
	b.config = b.configOf(v)
	err := b.write()
	b.mu.Unlock()
	if err == nil {
		err = b.await("/livez")
	}
	if err == nil {
		err = b.Signal(syscall.SIGHUP)
	}
	return err
}

// startTimeout limits the wait for a process that starts.
const startTimeout = 20 * time.Second

// await waits until a page is there.
func (b *binary) await(path string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		code, _, err := b.Get(ctx, path)
		if err == nil && code == http.StatusOK {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %d, %w; %s", path, code, err, b.log)
		case <-b.Exited():
			return fmt.Errorf("the agent has exited: %s", b.log)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// setLost loses a GPU, or gives it back.
func (b *binary) setLost(gpu int, lost bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if delete(b.lost, gpu); lost {
		b.lost[gpu] = true
	}
	if !b.runs {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		err := b.Event(ctx, fmt.Sprintf("{gpu: %d, lost: %t}", gpu, lost))
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", err, b.log)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (b *binary) status() string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	code, text, err := b.Get(ctx, "/readyz")
	return fmt.Sprintf("/readyz: %d %s %v", code, text, err)
}

// tail keeps the newest part of a log.
type tail struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

const maxTail = 64 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.b.Len()+len(p) > maxTail {
		t.b.Next(maxTail / 2)
	}
	return t.b.Write(p)
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}

// builtBinary returns nodes whose agents are processes of the built binary.
func builtBinary(path string, k newKubelet, v kubelettest.Version) setup {
	return func(t *testing.T, seed uint64, log func(string, ...any)) (*world, func() string, error) {
		dir, err := os.MkdirTemp("", "gna")
		if err != nil {
			return nil, nil, err
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		devices, byName, err := sequence.Simulated(t.Context(), path, fmt.Sprintf("{profile: %s, scenario: [%s]}", simProfile, simScenario))
		if err != nil {
			return nil, nil, err
		}
		api := apiservertest.New(t, nodeName)
		kubeconfig := api.Kubeconfig(t)
		w, err := newWorld(api, worldOptions{
			dir: dir, seed: seed, kubelet: k, version: v, second: time.Second, patience: time.Duration(30 * *slack * float64(time.Second)),
			devices: devices, byName: byName, log: log,
		})
		if err != nil {
			return nil, nil, err
		}
		var agents []*binary
		for i := range w.releases {
			n, err := process.New(t.Context(), path)
			if err != nil {
				return nil, nil, err
			}
			t.Cleanup(func() { _ = n.Remove() })
			b := &binary{view: view{dir, i}, Node: n, kubeconfig: kubeconfig, log: &tail{}, lost: make(map[int]bool)}
			agents, w.releases[i].agent = append(agents, b), b
		}
		w.fault = func(gpu int, unhealthy bool) (err error) {
			for _, b := range agents {
				err = errors.Join(err, b.setLost(gpu, unhealthy))
			}
			return err
		}
		// An agent that finds its configuration unfit for the devices changes to the last good one. That may begin with other lost GPUs, and a
		// new simulation forgets what its control socket did.
		w.resync = func() (err error) {
			for gpu, id := range w.gpus() {
				err = errors.Join(err, w.fault(gpu, w.unhealthy[id]))
			}
			return err
		}
		return w, func() string {
			var lines []string
			for i, b := range agents {
				lines = append(lines, fmt.Sprintf("agent %c:\n%s", 'a'+i, b.log))
			}
			return strings.Join(lines, "\n")
		}, nil
	}
}

// build builds the agent.
func build(t *testing.T) string {
	if path := cmp.Or(*agentPath, os.Getenv("AGENT_BIN")); path != "" {
		return path
	}
	path := filepath.Join(t.TempDir(), "gpu-node-agent")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", path, ".")
	cmd.Dir = "../../../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

// TestBinary plays the sequences against the built binary.
func TestBinary(t *testing.T) {
	path := build(t)
	kubelets := append([]newKubelet{standInOf(kubelettest.V137), standInOf(kubelettest.V136)}, others()...)
	playAll(t, *binaryWorlds, *binarySteps, func(i int) setup {
		v := kubelettest.V137
		if i%len(kubelets) == 1 {
			v = kubelettest.V136
		}
		return builtBinary(path, kubelets[i%len(kubelets)], v)
	})
}
