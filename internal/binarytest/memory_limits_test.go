//go:build linux

package binarytest

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

const memoryResource = "nvidia.com/gpu-memory"

// inNamespace starts the agent with other control groups. The process becomes the agent.
const inNamespace = `#!/bin/sh
exec unshare --map-root-user --mount sh -c 'mount --bind "$CGROUPS" /sys/fs/cgroup && exec "$AGENT" "$@"' sh "$@"
`

// limitedNode is a node with the scripted DCGM and NVML, whose control groups are a directory.
type limitedNode struct {
	*process
	k   *kubelettest.Kubelet
	env []string
}

// newLimitedNode starts an agent of which each container with memory gets the driver's limits.
func newLimitedNode(t *testing.T) *limitedNode {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "unshare", "--map-root-user", "--mount", "true").CombinedOutput(); err != nil {
		t.Skipf("no user namespaces with mounts here: %v\n%s", err, out)
	}
	program := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(program, []byte(inNamespace), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	p := newProcessOf(t, program, `
source: {mode: embedded, events: off}
plugin:
  kubeletDir: DIR
  sharing: {memory: {resource: `+memoryResource+`, enforcement: driver, requireEnforcement: true}}
`)
	for _, script := range []string{"../../e2e/agent/chaos/testdata/build-libdcgm", "../../health/nvml/testdata/build-libnvidia-ml"} {
		if out, err := exec.CommandContext(t.Context(), script, p.Dir).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
	}
	n := &limitedNode{process: p, k: p.startKubelet()}
	for name, text := range map[string]string{
		"cgroup/cgroup.controllers": "", "cgroup/kubepods/cgroup.procs": "", "log/pods/x": "", "log/containers/x": "", "dcgm": "ready\n",
	} {
		n.writeFile(name, text)
	}
	n.env = []string{
		"AGENT=" + binary, "CGROUPS=" + p.Dir + "/cgroup",
		"LD_LIBRARY_PATH=" + p.Dir, "CHAOS_DCGM=" + p.Dir + "/dcgm", "NVML_SCRIPT=" + p.Dir + "/nvml",
		"GPU_NODE_AGENT_METRICS_PROCESSES_POD_LOGS=" + p.Dir + "/log/pods",
	}
	n.launch(n.env...)
	return n
}

func (n *limitedNode) writeFile(name, text string) {
	n.t.Helper()
	path := filepath.Join(n.Dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// setDriver sets the driver's version, as soon as the agent has loaded NVML.
func (n *limitedNode) setDriver(version string) {
	n.t.Helper()
	n.await("NVML", func() bool {
		c, err := net.Dial("unix", n.Dir+"/nvml")
		if err != nil {
			return false
		}
		defer func() { _ = c.Close() }()
		_, err = fmt.Fprintf(c, "driver %s\n", version)
		reply := make([]byte, 3)
		_, readErr := c.Read(reply)
		return err == nil && readErr == nil && string(reply) == "ok\n"
	})
}

// runContainer starts the container of an allocation, and returns the file that stands for its limits on GPU 0.
func (n *limitedNode) runContainer(a kubelettest.Allocation, start int) (limits string) {
	n.t.Helper()
	id := fmt.Sprintf("%064d", start)
	dir := "cgroup/kubepods/pod0f4b7c1e-2d3a-4b5c-8d9e-0a1b2c3d4e5f/" + id
	n.writeFile(dir+"/cgroup.procs", "1\n")
	n.writeFile(fmt.Sprintf("log/containers/%s_%s_%s-%s.log", a.Container.Pod, a.Container.Namespace, a.Container.Name, id), "")
	return filepath.Join(n.Dir, dir, ".nvml-limits-0")
}

// The units of memory are registered when the driver can limit containers. Then each container gets its limit, which a kill of the agent
// leaves in force.
func TestDriverLimitsMemory(t *testing.T) {
	t.Parallel()
	n := newLimitedNode(t)
	n.setDriver("610.1")
	n.awaitPage("/readyz", 503, "requireEnforcement")
	n.setDriver("615.10")
	var allocation kubelettest.Allocation
	n.await("an allocation", func() (ok bool) {
		var err error
		allocation, err = n.k.Allocate(t.Context(), memoryResource, 10)
		return err == nil
	})
	if env := allocation.Response.GetEnvs(); env["NVIDIA_GPU_MEMORY_LIMIT"] != "10240" || env["NVIDIA_GPU_MEMORY_REQUEST"] != "0" {
		t.Errorf("environment %v", env)
	}
	limits := n.runContainer(allocation, 1)
	inForce := func() bool { return strings.HasPrefix(readFile(limits), "0 10737418240 ") }
	n.await("the limit", inForce)

	n.Kill()
	if !inForce() {
		t.Errorf("after the kill: %q", readFile(limits))
	}
	if err := os.Remove(limits); err != nil { // as after a reset of the GPU
		t.Fatal(err)
	}
	n.launch(n.env...)
	n.setDriver("615.10")
	n.await("the limit again", inForce)
}
