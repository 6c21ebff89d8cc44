// Package devicemanager tests the agent against the device manager of the real kubelet.
package devicemanager

import (
	"flag"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

// The tests run in parallel, because they mostly wait for the kubelet and the agent.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil { // the default; go test -parallel overrides it
		panic(err)
	}
	os.Exit(node.Main(m, nil))
}

// machine is a node with the helpers of this package.
type machine struct{ *node.Node }

// newMachine returns a node for a test that runs in parallel with others.
func newMachine(t *testing.T) machine {
	t.Helper()
	t.Parallel()
	return machine{node.New(t)}
}

// leaveDeadSocket leaves kubelet.sock without a listener, as a killed kubelet does.
func (n machine) leaveDeadSocket() {
	n.T.Helper()
	socket := filepath.Join(n.Dir, "device-plugins", "kubelet.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: socket})
	if err != nil {
		n.T.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		n.T.Fatal(err)
	}
}

// agentSockets returns the sockets in device-plugins except the kubelet's.
func (n machine) agentSockets() []string {
	n.T.Helper()
	entries, err := os.ReadDir(filepath.Join(n.Dir, "device-plugins"))
	if err != nil {
		n.T.Fatal(err)
	}
	var sockets []string
	for _, e := range entries {
		if e.Type() == os.ModeSocket && e.Name() != "kubelet.sock" {
			sockets = append(sockets, filepath.Join(n.Dir, "device-plugins", e.Name()))
		}
	}
	return sockets
}

// pluginSockets returns the sockets at which the agent serves resources: agentSockets without the one that names the lock's holder.
func (n machine) pluginSockets() []string {
	n.T.Helper()
	return slices.DeleteFunc(n.agentSockets(), func(path string) bool { return filepath.Base(path) == "gpu-node-agent.sock" })
}

// bind binds a pod that requests GPUs.
func (n machine) bind(name string, gpus int64) *v1.Pod {
	return n.bindFor(name, node.GPU, gpus)
}

// bindFor binds a pod that requests a resource.
func (n machine) bindFor(name string, of v1.ResourceName, count int64) *v1.Pod {
	return n.Bind(node.Pod("default", name, of, count))
}

// tryAdmit asks the kubelet to admit a pod, and returns the devices that the kubelet assigned, and the devices in
// the container's environment.
func (n machine) tryAdmit(pod *v1.Pod, of v1.ResourceName) (booked, visible []string, err error) {
	env, err := n.Kubelet.Admit(n.T.Context(), pod)
	return slices.Sorted(maps.Keys(n.Kubelet.PodDevices(pod, of))), strings.Split(env["NVIDIA_VISIBLE_DEVICES"], ","), err
}

func (n machine) admitFor(pod *v1.Pod, of v1.ResourceName) (booked, visible []string) {
	n.T.Helper()
	booked, visible, err := n.tryAdmit(pod, of)
	if err != nil {
		n.T.Fatal(err)
	}
	return booked, visible
}

// admit admits a pod and returns the GPUs in the container's environment. They must equal what the kubelet assigned.
func (n machine) admit(pod *v1.Pod) []string {
	n.T.Helper()
	booked, visible := n.admitFor(pod, node.GPU)
	if !sameSet(visible, booked) {
		n.T.Fatalf("pod %s sees %v, but the kubelet assigned %v", pod.Name, visible, booked)
	}
	return visible
}

// admitEventually retries admit: the kubelet may lose the agent's registration (kubernetes#127803) and refuses pods until
// the agent registers again.
func (n machine) admitEventually(pod *v1.Pod) (visible []string) {
	n.T.Helper()
	n.Eventually("pod "+pod.Name+" is admitted", func() error {
		booked, shown, err := n.tryAdmit(pod, node.GPU)
		if err == nil && !sameSet(shown, booked) {
			err = fmt.Errorf("container sees %v, but the kubelet assigned %v", shown, booked)
		}
		visible = shown
		return err
	})
	return visible
}

// checkDevices checks that the kubelet and /metrics agree on eight GPUs, of which only the sick ones are unhealthy.
func (n machine) checkDevices(sick ...string) error {
	if err := n.KubeletHas(node.GPU, 8, 8-len(sick)); err != nil {
		return err
	}
	page, err := n.Scrape()
	if err != nil {
		return err
	}
	var healthy []string
	for id, state := range page.States() {
		switch {
		case state == "healthy":
			healthy = append(healthy, id)
		case state != "unhealthy" || !slices.Contains(sick, id):
			return fmt.Errorf("/metrics has %s %s", id, state)
		}
	}
	if usable := slices.Collect(maps.Keys(n.Kubelet.Healthy(node.GPU))); !sameSet(healthy, usable) {
		return fmt.Errorf("healthy in /metrics: %v; for the kubelet: %v", healthy, usable)
	}
	if len(page.States()) != 8 {
		return fmt.Errorf("/metrics has %d GPUs, want 8", len(page.States()))
	}
	return nil
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}
