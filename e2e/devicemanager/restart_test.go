package devicemanager

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/kubelet"
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

// A plugin has registered its path again after it had lost its socket. A kubelet since 1.37 refuses that, and
// keeps the endpoint until the kubelet restarts. The agent registers in spite of it, and names the kubelet until it has
// restarted.
func TestDeadEndpoint(t *testing.T) {
	n := newMachine(t)
	n.allowFlapping()
	n.StartKubelet()
	if err := n.Kubelet.RegisterTwice(t.Context(), node.GPU, n.File("device-plugins/gpu-node-agent-nvidia.com_gpu.sock")); err != nil {
		t.Fatal(err)
	}
	dead := kubelet.Minor >= 37
	if !dead {
		n.AwaitWithdrawal()
	} else if err := n.KubeletHas(node.GPU, 1, 1); err != nil {
		t.Fatalf("without a plugin: %v", err)
	}

	n.StartAgent()
	n.checkServing("beside the dead endpoint", 0)
	n.checkDeadEndpoint(dead)
	loseSockets(n, true)
	n.checkServing("after the agent lost its socket", 1)
	n.checkDeadEndpoint(dead)
	if dead { // as docs/operations.md describes it
		if err := n.Agent.Stop(); err != nil {
			t.Fatal(err)
		}
		if err := n.KubeletHas(node.GPU, 8, 8); err != nil {
			t.Errorf("without an agent: %v", err)
		}
		if env, err := n.Kubelet.Admit(t.Context(), n.bind("alone", 1)); err == nil {
			t.Errorf("without an agent a pod is admitted with %v", env)
		}
		n.UnbindAll()
		n.StartAgent()
		n.checkServing("after a restart beside the dead endpoint", 2)
		n.checkDeadEndpoint(dead)
	}

	n.StopKubelet()
	n.StartKubelet()
	n.checkServing("with a new kubelet", 3)
	n.checkDeadEndpoint(false)
	n.EndAgent()
	n.StartAgent()
	n.checkServing("after a restart", 4)
	n.checkDeadEndpoint(false)
}

// checkDeadEndpoint checks whether the agent asks for a restart of the kubelet.
func (n machine) checkDeadEndpoint(want bool) {
	n.T.Helper()
	const advice = "restart the kubelet"
	for _, path := range []string{"/readyz", "/api/v1/snapshot"} {
		text, err := n.Page(path, http.StatusOK)
		if err != nil {
			n.T.Error(err)
		} else if got := strings.Contains(text, advice); got != want {
			n.T.Errorf("%s asks for a restart of the kubelet: %v, want %v\n%s", path, got, want, text)
		}
	}
	// The exit status depends on other checks.
	text, _ := n.Command("doctor", "--config", n.File("config.yaml"), "--source.mode=sim", "--state-dir="+n.StateDir(),
		"--health.socket="+n.File("agent.sock"), "--plugin.kubeletDir="+n.Dir, "--metrics.listen="+n.Address)
	if got := strings.Contains(text, advice); got != want {
		n.T.Errorf("doctor asks for a restart of the kubelet: %v, want %v\n%s", got, want, text)
	}
}
