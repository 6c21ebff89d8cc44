package devicemanager

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
)

// The agent may start before the kubelet.
func TestAgentBeforeKubelet(t *testing.T) {
	n := newMachine(t)
	n.StartAgent()
	n.Eventually("not ready without a kubelet", func() error {
		why, err := n.Page("/readyz", http.StatusServiceUnavailable)
		if err == nil && !strings.Contains(why, "kubelet") {
			err = fmt.Errorf("/readyz does not name the kubelet: %q", why)
		}
		return err
	})
	n.AwaitStatus("alive without a kubelet", "/livez", http.StatusOK)

	n.StartKubelet()
	n.Eventually("eight GPUs once there is a kubelet", func() error { return n.checkDevices() })
	n.AwaitStatus("ready", "/readyz", http.StatusOK)

	n.StopKubelet()
	n.AwaitStatus("not ready after the kubelet stops", "/readyz", http.StatusServiceUnavailable)
	n.EndAgent()
}

// The kubelet restarts at every stage of the agent's registration. Afterwards it has all GPUs.
func TestKubeletRestartStorm(t *testing.T) {
	n := newMachine(t)
	n.StartKubelet()
	n.StartAgent()
	n.Eventually("eight GPUs", func() error { return n.checkDevices() })
	pod := n.bind("steady", 2)
	gpus := n.admit(pod)

	for i := range 200 {
		n.StopKubelet()
		if i%2 == 0 {
			n.leaveDeadSocket()
		}
		n.StartKubelet()
		switch i % 3 {
		case 0: // restart again immediately
		case 1:
			n.Eventually("the agent listens", func() error {
				if len(n.pluginSockets()) == 0 {
					return errors.New("no socket of the agent")
				}
				return nil
			})
		case 2:
			n.Eventually(fmt.Sprintf("eight GPUs after %d restarts", i+1), func() error { return n.checkDevices() })
		}
	}
	n.Eventually("eight GPUs in the end", func() error { return n.checkDevices() })
	n.checkPodDevices(pod, gpus...)
	if again := n.admitEventually(pod); !sameSet(again, gpus) {
		t.Errorf("the pod had %v and now has %v", gpus, again)
	}
	// All streams of stopped kubelets must have ended: an old stream would take the next event.
	n.Eventually("one stream is open", func() error {
		p, err := n.Scrape()
		if err == nil && p.Value("gpu_node_agent_plugin_streams") != 1 {
			err = fmt.Errorf("%v streams", p.Value("gpu_node_agent_plugin_streams"))
		}
		return err
	})
	n.Inject(`{"gpu":5,"lost":true}`)
	n.Eventually("the remaining stream carries events", func() error { return n.KubeletHas(node.GPU, 8, 7) })
}

// The agent registers again after a running kubelet loses its registration.
func TestKubeletLosesAgent(t *testing.T) {
	t.Parallel()
	for _, loss := range []struct {
		name   string
		by     func(machine)
		rounds int
	}{
		{name: "agent's socket is removed", rounds: 5, by: machine.removeSockets},
		{name: "kubelet closes the connection", rounds: 3, by: func(n machine) {
			for _, socket := range n.agentSockets() {
				n.Kubelet.Disconnect(node.GPU, socket)
			}
		}},
		// The agent detects this through the pod resources API, which takes longer when it repeats soon.
		{name: "kubelet drops the plugin and keeps the stream", rounds: 2, by: func(n machine) {
			for _, socket := range n.agentSockets() {
				n.Kubelet.Forget(node.GPU, socket)
			}
		}},
	} {
		t.Run(loss.name, func(t *testing.T) {
			n := newMachine(t)
			n.StartKubelet()
			n.StartAgent()
			n.Eventually("eight GPUs", func() error { return n.checkDevices() })
			for i := range loss.rounds {
				before, err := n.Scrape()
				if err != nil {
					t.Fatal(err)
				}
				loss.by(n)
				n.Eventually("registered again", func() error {
					p, err := n.Scrape()
					const name = "gpu_node_agent_plugin_registrations_total"
					if err == nil && p.Value(name) <= before.Value(name) {
						err = fmt.Errorf("%s is still %v", name, p.Value(name))
					}
					return err
				})
				n.Eventually("eight GPUs again", func() error { return n.checkDevices() })
				n.admitEventually(n.bind(fmt.Sprintf("pod-%d", i), 1))
			}
			// A kubelet before 1.37 may read this list from one stream after it has seen the end of another.
			n.Inject(`{"gpu":0,"lost":true}`)
			n.EndAgent()
		})
	}
}
