// Package devicemanager holds the agent against the device manager of the real kubelet.
package devicemanager

import (
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

func TestMain(m *testing.M) { os.Exit(node.Main(m, nil)) }

// machine is a node of these tests.
type machine struct{ *node.Node }

func newMachine(t *testing.T) machine {
	t.Helper()
	return machine{node.New(t)}
}

// leaveDeadSocket puts kubelet.sock where a kubelet that was killed leaves it, with nobody behind it.
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

// agentSockets are the sockets in device-plugins that are not the kubelet's.
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

// bind binds a pod that asks for GPUs.
func (n machine) bind(name string, gpus int64) *v1.Pod {
	return n.bindFor(name, node.GPU, gpus)
}

// bindFor binds a pod that asks for some of a resource.
func (n machine) bindFor(name string, of v1.ResourceName, count int64) *v1.Pod {
	return n.Bind(node.Pod("default", name, of, count))
}

// admission has the kubelet admit a pod, and returns the devices that it books and what the container is shown.
func (n machine) admission(pod *v1.Pod, of v1.ResourceName) (booked, visible []string, err error) {
	env, err := n.Kubelet.Admit(n.T.Context(), pod)
	return slices.Sorted(maps.Keys(n.Kubelet.PodDevices(pod, of))), strings.Split(env["NVIDIA_VISIBLE_DEVICES"], ","), err
}

func (n machine) admitTo(pod *v1.Pod, of v1.ResourceName) (booked, visible []string) {
	n.T.Helper()
	booked, visible, err := n.admission(pod, of)
	if err != nil {
		n.T.Fatal(err)
	}
	return booked, visible
}

// admit admits a pod and returns the GPUs that its container runtime is told to show it, which must be
// those that the kubelet booked for it.
func (n machine) admit(pod *v1.Pod) []string {
	n.T.Helper()
	booked, visible := n.admitTo(pod, node.GPU)
	if !sameSet(visible, booked) {
		n.T.Fatalf("pod %s sees %v, but the kubelet booked %v", pod.Name, visible, booked)
	}
	return visible
}

// admitInTheEnd does so where the kubelet may lose the agent after it has had it (kubernetes#127803): it has it again
// soon, and a pod that comes between is refused.
func (n machine) admitInTheEnd(pod *v1.Pod) (visible []string) {
	n.T.Helper()
	n.Eventually("pod "+pod.Name+" is admitted", func() error {
		booked, shown, err := n.admission(pod, node.GPU)
		if err == nil && !sameSet(shown, booked) {
			err = fmt.Errorf("it sees %v, but the kubelet booked %v", shown, booked)
		}
		visible = shown
		return err
	})
	return visible
}

// allSee checks that the kubelet and Prometheus are told the same of each of the eight GPUs, namely that
// all are healthy but the sick ones.
func (n machine) allSee(sick ...string) error {
	if err := n.KubeletHas(node.GPU, 8, 8-len(sick)); err != nil {
		return err
	}
	page, err := n.scrape()
	if err != nil {
		return err
	}
	var healthy []string
	for id, state := range page.states() {
		switch {
		case state == "healthy":
			healthy = append(healthy, id)
		case state != "unhealthy" || !slices.Contains(sick, id):
			return fmt.Errorf("/metrics has %s %s", id, state)
		}
	}
	if usable := slices.Collect(maps.Keys(n.Kubelet.Healthy(node.GPU))); !sameSet(healthy, usable) {
		return fmt.Errorf("healthy on /metrics: %v; to the kubelet: %v", healthy, usable)
	}
	if len(page.states()) != 8 {
		return fmt.Errorf("/metrics has %d GPUs, want 8", len(page.states()))
	}
	return nil
}

func sameSet(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}
