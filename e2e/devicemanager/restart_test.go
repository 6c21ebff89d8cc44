package devicemanager

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
)

// The agent usually starts before the kubelet is ready for it.
func TestAgentBeforeKubelet(t *testing.T) {
	n := newNode(t)
	n.startAgent()
	n.eventually("not ready without a kubelet, and says so", func() error {
		why, err := n.probe("/readyz", http.StatusServiceUnavailable)
		if err == nil && !strings.Contains(why, "kubelet") {
			err = fmt.Errorf("/readyz does not name the kubelet: %q", why)
		}
		return err
	})
	n.eventually("alive without a kubelet", func() error {
		_, err := n.probe("/livez", http.StatusOK)
		return err
	})

	n.startKubelet()
	n.eventually("eight GPUs once there is a kubelet", func() error { return n.allSee() })
	n.eventually("ready", func() error {
		_, err := n.probe("/readyz", http.StatusOK)
		return err
	})

	n.stopKubelet()
	n.eventually("not ready when the kubelet is gone", func() error {
		_, err := n.probe("/readyz", http.StatusServiceUnavailable)
		return err
	})
	n.endAgent()
}

// A kubelet that restarts again and again, at every moment of the agent's registration, has all GPUs in
// the end.
func TestKubeletRestartStorm(t *testing.T) {
	n := newNode(t)
	n.startKubelet()
	n.startAgent()
	n.eventually("eight GPUs", func() error { return n.allSee() })
	pod := n.bind("steady", 2)
	gpus := n.admit(pod)

	for i := range 200 {
		n.stopKubelet()
		if i%2 == 0 {
			n.leaveDeadSocket()
		}
		n.startKubelet()
		switch i % 3 {
		case 0: // at once again
		case 1:
			n.eventually("the agent listens", func() error {
				if len(n.agentSockets()) == 0 {
					return errors.New("no socket of the agent")
				}
				return nil
			})
		case 2:
			n.eventually(fmt.Sprintf("eight GPUs after %d restarts", i+1), func() error { return n.allSee() })
		}
	}
	n.eventually("eight GPUs in the end", func() error { return n.allSee() })
	n.podHasAtAll(pod, gpus...)
	if again := n.admit(pod); !sameSet(again, gpus) {
		t.Errorf("the pod had %v and has %v", gpus, again)
	}
	// Each stream that the kubelet left must have ended: an old one would take the next event.
	n.eventually("one stream is open", func() error {
		p, err := n.scrape()
		if err == nil && p.value("gpu_node_agent_plugin_streams") != 1 {
			err = fmt.Errorf("%v streams", p.value("gpu_node_agent_plugin_streams"))
		}
		return err
	})
	n.inject(`{"gpu":5,"lost":true}`)
	n.eventually("the last stream carries events", func() error { return n.kubeletHas(8, 7) })
}

// Whatever ends what the kubelet has of us, while the kubelet itself runs on, is put right.
func TestKubeletLosesAgent(t *testing.T) {
	for _, loss := range []struct {
		name   string
		by     func(*node)
		rounds int
	}{
		{name: "the agent's socket is removed", rounds: 3, by: func(n *node) {
			for _, s := range n.agentSockets() {
				if err := os.Remove(s); err != nil {
					n.t.Fatal(err)
				}
			}
		}},
		{name: "the kubelet closes the connection", rounds: 3, by: func(n *node) { n.kubelet.Disconnect(gpuResource) }},
		// Found by asking the pod resources API, which takes longer when it comes again at once.
		{name: "the kubelet forgets and leaves the stream open", rounds: 2, by: func(n *node) { n.kubelet.Forget(gpuResource) }},
	} {
		t.Run(loss.name, func(t *testing.T) {
			n := newNode(t)
			n.startKubelet()
			n.startAgent()
			n.eventually("eight GPUs", func() error { return n.allSee() })
			for i := range loss.rounds {
				before, err := n.scrape()
				if err != nil {
					t.Fatal(err)
				}
				loss.by(n)
				n.eventually("registered again", func() error {
					p, err := n.scrape()
					const name = "gpu_node_agent_plugin_registrations_total"
					if err == nil && p.value(name) <= before.value(name) {
						err = fmt.Errorf("%s is still %v", name, p.value(name))
					}
					return err
				})
				n.eventually("eight GPUs again", func() error { return n.allSee() })
				n.admit(n.bind(fmt.Sprintf("pod-%d", i), 1))
			}
		})
	}
}
