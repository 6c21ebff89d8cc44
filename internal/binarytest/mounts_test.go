//go:build linux

package binarytest

import (
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// inContainer starts the agent with mounts of the host's directories, as a container runtime does. It makes missing ones. The
// process becomes the agent.
const inContainer = `#!/bin/sh
set -e
for dir in $MOUNTS; do mkdir -p "$NODE/host/$dir" "$NODE/$dir"; done
exec unshare --map-root-user --mount sh -ec '
  for dir in $MOUNTS; do mount --bind "$NODE/host/$dir" "$NODE/$dir"; done
  exec "$AGENT" "$@"' sh "$@"
`

// container is an agent whose kubelet and state file are on a host of which it has mounts.
type container struct {
	*process
	k   *kubelettest.Kubelet
	env []string
}

const containerConfig = `
source: {mode: sim, sim: {control: DIR/sim.sock}}
health: {recovery: never, cordon: ['5']}
`

// startContainer starts a kubelet and an agent with 8 GPUs, of which it cordons one and finds another one unhealthy.
func startContainer(t *testing.T) *container {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "unshare", "--map-root-user", "--mount", "true").CombinedOutput(); err != nil {
		t.Skipf("no user namespaces with mounts here: %v\n%s", err, out)
	}
	program := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(program, []byte(inContainer), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	c := &container{process: newProcessOf(t, program, containerConfig)}
	c.env = []string{
		"AGENT=" + binary, "NODE=" + c.Dir, "MOUNTS=device-plugins pod-resources state",
	}
	var err error
	if c.k, err = kubelettest.Start(c.host()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.k.Stop() })
	if err := c.k.Age(time.Hour); err != nil {
		t.Fatal(err)
	}
	c.launch(c.env...)
	c.sim("{gpu: 2, xid: 48}")
	c.awaitAllocatable(c.k, 6)
	c.await("xid-48 in the state file", func() bool { return strings.Contains(readFile(c.host("state/state.sim.json")), "xid-48") })
	return c
}

// host returns the path of a file of the host.
func (c *container) host(elements ...string) string {
	return filepath.Join(append([]string{c.Dir, "host"}, elements...)...)
}

// remove removes directories of the host.
func (c *container) remove(dirs ...string) {
	c.t.Helper()
	for _, dir := range dirs { // the agent may write a file meanwhile
		c.await("the removal of "+dir, func() bool { return os.RemoveAll(c.host(dir)) == nil })
	}
}

// awaitEnd waits until the agent has ended by itself, with exit code 1 and a message.
func (c *container) awaitEnd(message string) {
	c.t.Helper()
	select {
	case <-c.Exited():
	case <-time.After(awaitTimeout):
		c.t.Fatal("the agent did not end")
	}
	var exit *exec.ExitError
	if err := c.Stop(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		c.t.Fatalf("it ended with %v, want exit code 1", err)
	}
	if !strings.Contains(c.log(), message) {
		c.t.Errorf("the log lacks %q", message)
	}
}

// restartKubelet starts a kubelet, which makes its directories again.
func (c *container) restartKubelet() {
	c.t.Helper()
	if err := errors.Join(c.k.Restart(), c.k.Age(time.Hour)); err != nil {
		c.t.Fatal(err)
	}
}

// A clean-up script removes the kubelet's directory and a kubelet makes it again. The agent's container has a mount of the removed one, so
// the agent ends once; the next container has the new one, and every finding of before.
func TestMountedDirectoryDeleted(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"device-plugins", "pod-resources"} {
		t.Run(dir, func(t *testing.T) {
			t.Parallel()
			c := startContainer(t)
			c.sim("{gpu: 3, xid: 95}") // the state file may not have it yet
			c.await("xid-95", func() bool { return c.findings("xid-95") == 1 })
			c.remove(dir)
			c.awaitEnd(c.Dir + "/" + dir + ": the mounted directory was deleted on the host")
			c.launch(c.env...)
			c.restartKubelet()
			c.awaitAllocatable(c.k, 5)
			c.awaitMetrics(`cause="xid-48"`, `cause="xid-95"`, `cause="cordoned"`)
			if _, text := c.get("/readyz"); strings.Contains(text, "deleted") {
				t.Errorf("nothing was lost:\n%s", text)
			}
			c.stop()
		})
	}
}

// Without the state directory nothing can be saved. The next container learns that, also if another directory was removed too, and still
// knows it after an ordinary restart.
func TestMountedStateDirectoryDeleted(t *testing.T) {
	t.Parallel()
	for name, dirs := range map[string][]string{"alone": {"state"}, "with another one": {"device-plugins", "state"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := startContainer(t)
			c.remove(dirs...)
			c.awaitEnd(": the mounted directory was deleted on the host")
			for range 2 {
				c.launch(c.env...)
				c.restartKubelet()
				c.awaitAllocatable(c.k, 7) // the finding is lost; the cordon is of the configuration
				c.awaitPage("/readyz", http.StatusOK, "state: the directory mounted at "+c.Dir+"/state was deleted on the host at ")
				if out, _ := run(t, "status", "--config", c.config()); !strings.Contains(out, "was deleted on the host at ") {
					t.Errorf("status does not say what is lost:\n%s", out)
				}
				c.stop()
			}
		})
	}
}

// An agent on the host itself goes on: it sees that the directories are missing, and then the new ones.
func TestHostDirectoriesDeleted(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	for _, dir := range []string{"device-plugins", "pod-resources"} {
		if err := os.RemoveAll(filepath.Join(p.Dir, dir)); err != nil {
			t.Fatal(err)
		}
	}
	p.awaitPage("/readyz", http.StatusServiceUnavailable, "no such file or directory")
	if err := k.Restart(); err != nil {
		t.Fatal(err)
	}
	p.awaitAllocatable(k, 8)
	p.sim("{gpu: 2, xid: 48}")
	p.awaitState("xid-48")
	p.awaitPage("/readyz", http.StatusOK)
	p.stop()
}
