// Demo runs the agent with eight simulated GPUs and a stand-in kubelet, and prints what the kubelet and Prometheus see
// while GPUs fail and recover. It needs no root, Kubernetes or GPU.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// config is the agent's configuration; the scenario repeats.
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
    control: DIR/sim.sock
health:
  flap: {trips: 0}             # the GPUs fail again in each loop
  socket: DIR/agent.sock
plugin: {kubeletDir: DIR}
metrics: {listen: ADDRESS}
`

const intro = `Eight simulated H100 with gpu-node-agent and a stand-in kubelet. Ctrl-C ends it.

  status   %[1]s/
  metrics  %[1]s/metrics
  log      %[3]s/agent.log
  inject   %[2]s sim --socket %[3]s/sim.sock \
             '{gpu: 6, xid: 48}'

`

func main() {
	agent := flag.String("agent", "bin/gpu-node-agent", "path of the agent's binary")
	listen := flag.String("listen", "127.0.0.1:9400", "address of the agent; if it is in use, another one is chosen")
	once := flag.Bool("once", false, "exit after one loop of the scenario; fail if the GPUs did not fail and recover")
	flag.Parse()
	// A closed terminal ends the demo as Ctrl-C does, and so does an error of the timeline's output, so that no files are left behind. SIGPIPE
	// also comes from the sockets of the kubelet when the agent closes its end.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := run(ctx, *agent, *listen, *once); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

var errAgentExited = errors.New("agent exited")

func run(ctx context.Context, agent, listen string, once bool) (err error) {
	n, err := node.New(ctx, agent)
	if err != nil {
		return err
	}
	defer func() {
		if errors.Is(err, context.Canceled) { // by a signal
			err = nil
		}
		err = errors.Join(err, os.RemoveAll(n.Dir))
	}()
	switch l, err := new(net.ListenConfig).Listen(ctx, "tcp", listen); {
	case err == nil:
		n.URL = "http://" + l.Addr().String()
		_ = l.Close() // without accepting connections
	case !errors.Is(err, syscall.EADDRINUSE): // else the node's address
		return err
	}
	if err := n.Write(config); err != nil {
		return err
	}
	kubelet, err := kubelettest.Start(n.Dir)
	if err != nil {
		return err
	}
	defer kubelet.Stop()
	// The kubelet of a node has run for longer than the agent, which waits until it has read its pods.
	if err := kubelet.Age(time.Hour); err != nil {
		return err
	}
	logFile := filepath.Join(n.Dir, "agent.log")
	log, err := os.Create(logFile)
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // it is removed
	if err := n.Start(log); err != nil {
		return err
	}
	fmt.Printf(intro, n.URL, agent, n.Dir)

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		<-n.Exited()
		cancel(errAgentExited)
	}()
	t := &timeline{kubelet: kubelet, url: n.URL, start: time.Now(), out: os.Stdout}
	err = t.print(ctx, once)
	stopErr := n.Stop()
	switch {
	case errors.Is(err, errAgentExited):
		text, _ := os.ReadFile(logFile) // if unreadable, without the log
		return fmt.Errorf("%w\n%s", errors.Join(err, stopErr), text)
	// by a signal, or the pipe or terminal is closed
	case errors.Is(err, context.Canceled), errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EIO):
		fmt.Println("\nStopped.")
		return stopErr
	case err == nil:
		fmt.Println("\nDone. Without -once the scenario repeats.")
	}
	return err
}
