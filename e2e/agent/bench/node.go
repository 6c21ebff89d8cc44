package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// config is the agent's configuration. It changes the defaults' speed in no way; GPUs may fail often without being
// withdrawn.
const config = `source: {%s}
health: {socket: DIR/agent.sock, flap: {trips: 0}}
plugin: {kubeletDir: DIR, migStrategy: mixed}
metrics: {listen: ADDRESS}
log: {level: warn}
`

// resource is the resource of whole GPUs.
const resource = "nvidia.com/gpu"

// patience is the longest wait for a step that takes moments.
const patience = 30 * time.Second

// testNode is a node with an agent and a kubelet.
type testNode struct {
	*node.Node
	kubelet *kubelettest.Kubelet
	ready   time.Duration // from the process's start until the kubelet has all devices
}

// startSim starts a kubelet and an agent with simulated GPUs, and waits until the kubelet has them.
func startSim(ctx context.Context, binary, profile string, gpus int) (*testNode, error) {
	return startSource(ctx, binary, "mode: sim, sim: {profile: "+profile+", control: DIR/sim.sock}", gpus)
}

// startSource starts an agent with another source.
func startSource(ctx context.Context, binary, source string, gpus int, env ...string) (_ *testNode, err error) {
	n, err := node.New(ctx, binary)
	if err != nil {
		return nil, err
	}
	r := &testNode{Node: n}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.stop())
		}
	}()
	if err := n.Write(fmt.Sprintf(config, source)); err != nil {
		return nil, err
	}
	if r.kubelet, err = kubelettest.Start(n.Dir); err != nil {
		return nil, err
	}
	log, err := os.Create(r.logFile())
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }() // the agent has its own descriptor
	begin := time.Now()
	if err := n.Start(log, env...); err != nil {
		return nil, err
	}
	err = r.await(ctx, func(s kubelettest.State) bool { return s.Resources[resource].Allocatable() == gpus })
	r.ready = time.Since(begin)
	return r, err
}

func (r *testNode) logFile() string { return filepath.Join(r.Dir, "agent.log") }

// await waits for a state of the kubelet. The error has the agent's log.
func (r *testNode) await(ctx context.Context, ok func(kubelettest.State) bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err := r.kubelet.WaitFor(ctx, ok)
	if err != nil {
		log, _ := os.ReadFile(r.logFile()) // no log reads as an empty one
		err = fmt.Errorf("%w\n%s", err, log)
	}
	return err
}

// awaitHealth waits until the kubelet has a health of a GPU.
func (r *testNode) awaitHealth(ctx context.Context, id string, healthy bool) error {
	return r.await(ctx, func(s kubelettest.State) bool {
		return slices.ContainsFunc(s.Resources[resource].Devices, func(d kubelettest.Device) bool { return d.ID == id && d.Healthy == healthy })
	})
}

// stop stops the agent and the kubelet.
func (r *testNode) stop() error {
	err := r.Remove()
	if r.kubelet != nil {
		r.kubelet.Stop()
	}
	return err
}

// socket returns the plugin's socket for whole GPUs.
func (r *testNode) socket() string {
	return r.Dir + "/device-plugins/" + r.kubelet.State().Resources[resource].Endpoint
}

// pause waits without requests to the agent.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
