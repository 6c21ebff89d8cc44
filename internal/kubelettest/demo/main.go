// Demo shows the agent at work on one terminal: eight simulated GPUs, a stand-in kubelet, and what both
// the kubelet and Prometheus see as GPUs break and come back. It needs no root, no Kubernetes and no GPU.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

const resource = "nvidia.com/gpu"

// config is the agent's: a story that begins again after its loop.
const config = `log: {format: console}
source:
  mode: sim
  sim:
    profile: h100-8
    loop: 40s
    scenario:
    - {at: 5s, gpu: 3, xid: 79}
    - {at: 7s, gpu: 3, lost: true}
    - {at: 14s, gpu: 3, lost: false}
    - {at: 19s, gpu: 1, xid: 95, recoveryAction: reset}
    - {at: 24s, gpu: 1, recoveryAction: none}
    - {at: 28s, gpu: 5, xid: 31}
    - {at: 28s, gpu: 2, rowRemapPending: true}
    control: %[1]s/sim.sock
health:
  flap: {trips: 0}             # the story goes on for ever
  stateFile: %[1]s/state.json
  socket: %[1]s/agent.sock
plugin: {kubeletDir: %[1]s}
metrics: {listen: %[2]s}
`

const intro = `gpu-node-agent on eight simulated H100, with a stand-in kubelet. Ctrl-C ends it.

  look     %[1]s/   %[1]s/metrics   %[1]s/readyz
  break    %[2]s sim --socket %[3]s/sim.sock '{gpu: 6, xid: 48}'
  log      %[3]s/agent.log

`

func main() {
	agent := flag.String("agent", "bin/gpu-node-agent", "the agent's binary")
	listen := flag.String("listen", "127.0.0.1:9400", "where the agent serves; another port if this one is in use")
	once := flag.Bool("once", false, "end when the story has been told once; fail if it was not")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *agent, *listen, *once); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, agent, listen string, once bool) (err error) {
	dir, err := os.MkdirTemp("", "gpu-demo")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	address, err := usable(ctx, listen)
	if err != nil {
		return err
	}
	kubelet, err := kubelettest.Start(dir)
	if err != nil {
		return err
	}
	defer kubelet.Stop()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended, err := launch(ctx, agent, dir, address)
	if err != nil {
		return err
	}
	fmt.Printf(intro, "http://"+address, agent, dir)

	s := &story{kubelet: kubelet, url: "http://" + address, begin: time.Now()}
	go func() {
		if err := <-ended; ctx.Err() == nil {
			log, _ := os.ReadFile(filepath.Join(dir, "agent.log")) // shown as far as it can be read
			cancel(fmt.Errorf("the agent has ended: %w\n%s", err, log))
		}
		close(ended)
	}()
	told := s.tell(ctx, once)
	cause := context.Cause(ctx)
	cancel(nil)
	for range ended { // the agent ends in order, and removes its socket
	}
	switch {
	case told:
		fmt.Println("\nThe story is told. Without -once it goes on.")
		return nil
	case errors.Is(cause, context.Canceled):
		fmt.Println("\nEnded.")
		return nil
	default:
		return cause
	}
}

// usable returns the address if it is free, else one with another port.
func usable(ctx context.Context, address string) (string, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		host, _, splitErr := net.SplitHostPort(address)
		if splitErr != nil {
			return "", splitErr
		}
		if l, err = lc.Listen(ctx, "tcp", net.JoinHostPort(host, "0")); err != nil {
			return "", err
		}
	}
	return l.Addr().String(), l.Close()
}

// launch starts the agent. It is ended with ctx; the channel tells how.
func launch(ctx context.Context, agent, dir, address string) (chan error, error) {
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, config, dir, address), 0o600); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "agent.log"))
	if err != nil {
		return nil, err
	}
	path, err := filepath.Abs(agent)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, "--config", file)
	cmd.Dir, cmd.Stderr, cmd.Stdout = dir, log, log
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	// Ctrl-C is for us; the agent is ended by us, and with us, whatever happens.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	ended := make(chan error, 1)
	go func() {
		err := cmd.Wait()
		ended <- errors.Join(err, log.Close())
	}()
	return ended, nil
}

// story tells what happens as it happens.
type story struct {
	kubelet *kubelettest.Kubelet
	url     string
	begin   time.Time
	seen    struct{ broken, back int }
}

func (s *story) say(who, format string, args ...any) {
	fmt.Printf("%6.1fs  %-8s %s\n", time.Since(s.begin).Seconds(), who, fmt.Sprintf(format, args...))
}

// tell follows the kubelet until ctx ends, or until two GPUs were seen to break and to come back.
func (s *story) tell(ctx context.Context, once bool) bool {
	var was kubelettest.Resource
	deadline := time.After(2 * time.Minute)
	for {
		state, changed := s.kubelet.Watch()
		now := state.Resources[resource]
		s.changes(ctx, was, now)
		was = now
		if once && s.seen.broken >= 2 && s.seen.back >= 2 {
			return true
		}
		if !once {
			deadline = nil
		}
		select {
		case <-ctx.Done():
			return false
		case <-deadline:
			s.say("demo", "waited in vain: %d GPUs broke, %d came back", s.seen.broken, s.seen.back)
			return false
		case <-changed:
		}
	}
}

// changes tells what is new for the kubelet, and shows the same on the metrics page.
func (s *story) changes(ctx context.Context, was, now kubelettest.Resource) {
	if now.Registrations > was.Registrations {
		s.say("kubelet", "%s is registered by %s", resource, now.Endpoint)
	}
	if len(was.Devices) == 0 && len(now.Devices) > 0 {
		s.say("kubelet", "%d devices, %d healthy", now.Capacity(), now.Allocatable())
		for _, d := range now.Devices {
			s.say("", "  %s  NUMA %v", d.ID, d.NUMA)
		}
		s.allocate(ctx)
		return
	}
	for i, d := range now.Devices {
		if i >= len(was.Devices) || was.Devices[i].ID != d.ID || was.Devices[i].Healthy == d.Healthy {
			continue
		}
		if d.Healthy {
			s.seen.back++
			s.say("kubelet", "%s is healthy again: %d of %d can be scheduled", d.ID, now.Allocatable(), now.Capacity())
		} else {
			s.seen.broken++
			s.say("kubelet", "%s is UNHEALTHY: %d of %d can be scheduled", d.ID, now.Allocatable(), now.Capacity())
		}
		s.metrics(ctx, d.ID)
	}
}

// allocate plays a pod that wants two GPUs.
func (s *story) allocate(ctx context.Context) {
	a, err := s.kubelet.Allocate(ctx, resource, 2)
	if err != nil {
		s.say("kubelet", "Allocate: %v", err)
		return
	}
	for _, name := range slices.Sorted(maps.Keys(a.Response.GetEnvs())) {
		s.say("kubelet", "pod %s/%s asks for 2 GPUs; Allocate answers %s=%s", a.Container.Namespace, a.Container.Pod, name, a.Response.GetEnvs()[name])
	}
}

// metrics shows what the page says of a device's health at this moment.
func (s *story) metrics(ctx context.Context, id string) {
	text, err := get(ctx, s.url+"/metrics")
	if err != nil {
		s.say("metrics", "%v", err)
		return
	}
	for line := range strings.Lines(text) {
		state := strings.HasPrefix(line, "gpu_node_agent_device_state") && strings.HasSuffix(line, "1\n")
		finding := strings.HasPrefix(line, "gpu_node_agent_device_finding")
		if (state || finding) && strings.Contains(line, id) {
			s.say("metrics", "%s", short(strings.TrimSpace(line)))
		}
	}
}
