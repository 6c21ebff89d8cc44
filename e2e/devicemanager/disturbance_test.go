package devicemanager

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

var restarts = flag.Int("restarts", 20, "how often TestImmediateRestarts restarts the agent in each way")

// disturbance interrupts the registration of a running agent. Afterwards n.Agent is the agent that must be registered. With
// wait it also waits until the agents have noticed each step, and checks what they do meanwhile.
type disturbance struct {
	name  string
	cause func(n machine, wait bool)
}

func disturbances() []disturbance {
	return []disturbance{
		{"agent's socket removed", loseSockets},
		{"directory removed, then kubelet restarted", func(n machine, wait bool) {
			// Removed under another name, because an agent may create files meanwhile.
			removed := n.File("removed")
			if err := errors.Join(os.Rename(n.File("device-plugins"), removed), os.RemoveAll(removed)); err != nil {
				n.T.Fatal(err)
			}
			if wait {
				n.AwaitStatus("not ready without the directory", "/readyz", http.StatusServiceUnavailable)
			}
			n.StopKubelet()
			n.StartKubelet()
		}},
		{"kubelet restarted", func(n machine, _ bool) {
			n.StopKubelet()
			n.StartKubelet()
		}},
		{"agent killed and started", killAndStart},
		{"agent terminated and started", terminateAndStart},
		{"second agent started, then first terminated", func(n machine, wait bool) {
			first := n.Agent
			n.startSecondAgent(wait)
			n.terminate(first, wait)
		}},
		{"second agent started and terminated", func(n machine, wait bool) {
			first := n.Agent
			n.startSecondAgent(wait)
			n.terminate(n.Agent, wait)
			n.Agent = first
		}},
		{"no agent for a while", func(n machine, wait bool) {
			n.terminate(n.Agent, wait)
			n.AwaitWithdrawal()
			n.StartAgent()
		}},
	}
}

func loseSockets(n machine, wait bool) {
	n.T.Helper()
	if !wait {
		n.removeSockets()
		return
	}
	before := n.registrations()
	n.removeSockets()
	n.Eventually("registered again", func() error {
		if err := n.KubeletHas(node.GPU, 8, 8); err != nil { // the old stream serves meanwhile
			n.T.Errorf("without its socket: %v", err)
		}
		if now := n.registrations(); now <= before {
			return fmt.Errorf("%v registrations, before %v", now, before)
		}
		return nil
	})
}

func killAndStart(n machine, _ bool) {
	n.Agent.Kill()
	n.StartAgent()
}

func terminateAndStart(n machine, wait bool) {
	n.T.Helper()
	n.terminate(n.Agent, wait)
	n.StartAgent()
}

// terminate sends SIGTERM to an agent. One that has just started may exit before it handles the signal, unless the test
// waited for it.
func (n machine) terminate(agent *process.Process, waited bool) {
	n.T.Helper()
	if err := agent.Stop(); err != nil && waited {
		n.T.Fatal(err)
	}
}

// startSecondAgent starts another agent beside the running one. With wait it waits until the second agent waits for the first.
func (n machine) startSecondAgent(wait bool) {
	n.T.Helper()
	const waits = "another agent serves this node"
	logged := len(n.Journal.Lines(waits))
	n.StartAgent()
	if !wait {
		return
	}
	n.Eventually("the second agent waits for the first", func() error {
		if len(n.Journal.Lines(waits)) == logged {
			return errors.New("no line about the first agent is logged")
		}
		return nil
	})
	if err := n.KubeletHas(node.GPU, 8, 8); err != nil {
		n.T.Errorf("with two agents: %v", err)
	}
}

// Every disturbance follows every disturbance. After each one the agent is registered and serves all GPUs.
func TestDisturbancePairs(t *testing.T) {
	n := newMachine(t)
	n.allowFlapping()
	n.StartKubelet()
	n.StartAgent()
	n.checkServing("at first", 0)
	all := disturbances()
	for i, d := range pairWalk(len(all)) {
		t.Logf("step %d: %s", i+1, all[d].name)
		all[d].cause(n, true)
		n.checkServing(fmt.Sprintf("after step %d, %s", i+1, all[d].name), i)
	}
	n.EndAgent()
	if left := n.agentSockets(); len(left) != 0 {
		t.Errorf("agent left sockets %v", left)
	}
}

// Every disturbance follows every disturbance at once, before the agent and the kubelet have recovered from the first.
func TestDisturbancesInQuickSuccession(t *testing.T) {
	n := newMachine(t)
	n.allowFlapping()
	n.StartKubelet()
	n.StartAgent()
	n.checkServing("at first", 0)
	all := disturbances()
	walk := pairWalk(len(all))
	for i := 1; i < len(walk); i++ {
		first, second := all[walk[i-1]], all[walk[i]]
		t.Logf("pair %d: %s; %s", i, first.name, second.name)
		first.cause(n, false)
		second.cause(n, false)
		n.checkServing(fmt.Sprintf("after pair %d, %s; %s", i, first.name, second.name), i)
	}
	n.EndAgent()
}

// pairWalk returns a sequence of the numbers below n in which each follows each, itself included, exactly once: a de Bruijn
// sequence of order two, closed by its first number.
func pairWalk(n int) []int {
	var walk []int
	for i := range n {
		walk = append(walk, i)
		for j := i + 1; j < n; j++ {
			walk = append(walk, i, j)
		}
	}
	return append(walk, 0)
}

func TestPairWalk(t *testing.T) {
	for n := 1; n < 9; n++ {
		walk, pairs := pairWalk(n), make(map[[2]int]bool)
		for i := 1; i < len(walk); i++ {
			pairs[[2]int(walk[i-1:])] = true
		}
		if len(walk) != n*n+1 || len(pairs) != n*n {
			t.Errorf("walk of %d numbers has %d steps and %d pairs, want %d and %d", n, len(walk), len(pairs), n*n+1, n*n)
		}
	}
}

// The agent ends and starts again at once, many times in a row, as in a crash loop. make e2e-restarts does it 200 times.
func TestImmediateRestarts(t *testing.T) {
	t.Parallel()
	for _, way := range []disturbance{{"killed", killAndStart}, {"terminated", terminateAndStart}} {
		t.Run(way.name, func(t *testing.T) {
			n := newMachine(t)
			n.allowFlapping()
			n.StartKubelet()
			n.StartAgent()
			n.checkServing("at first", 0)
			var took []time.Duration
			for i := range *restarts {
				start := time.Now()
				way.cause(n, true)
				n.awaitRegistered(fmt.Sprintf("registered after restart %d", i+1))
				took = append(took, time.Since(start))
				n.checkServing(fmt.Sprintf("after restart %d", i+1), i)
			}
			slices.Sort(took)
			t.Logf("%d restarts; from signal to registration: median %v, slowest %v", len(took), took[len(took)/2], took[len(took)-1])
			n.EndAgent()
		})
	}
}

// allowFlapping keeps a GPU that is often lost from staying unhealthy.
func (n machine) allowFlapping() {
	n.Configure("source: {sim: {profile: h100-8}}\nhealth: {flap: {trips: 0}}\n")
}

// removeSockets removes the agent's sockets from device-plugins while the agent runs.
func (n machine) removeSockets() {
	n.T.Helper()
	for _, socket := range n.agentSockets() {
		if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) { // the agent may remove one itself
			n.T.Fatal(err)
		}
	}
}

// registrations returns how often the running agent has registered.
func (n machine) registrations() float64 {
	n.T.Helper()
	p, err := n.Scrape()
	if err != nil {
		n.T.Fatal(err)
	}
	return p.Value("gpu_node_agent_plugin_registrations_total")
}

// awaitRegistered waits until the running agent is registered and ready, and the kubelet has its eight healthy GPUs.
func (n machine) awaitRegistered(what string) {
	n.T.Helper()
	n.Eventually(what, func() error {
		p, err := n.Scrape()
		if err != nil {
			return err
		}
		if p.Value("gpu_node_agent_plugin_registered") != 1 {
			return errors.New("the agent is not registered")
		}
		if _, err := n.Page("/readyz", http.StatusOK); err != nil {
			return err
		}
		return n.checkDevices()
	})
}

// checkServing checks that the agent serves the kubelet: it is registered, a pod gets a GPU, and the kubelet sees a GPU
// fail and recover. A different GPU fails at each step.
func (n machine) checkServing(when string, step int) {
	n.T.Helper()
	n.awaitRegistered("registered " + when)
	n.Eventually("one socket "+when, func() error {
		if sockets := n.pluginSockets(); len(sockets) != 1 {
			return fmt.Errorf("sockets %v", sockets)
		}
		return nil
	})
	n.admitEventually(n.bind(fmt.Sprintf("pod-%d", step), 1))
	n.UnbindAll()
	gpu := step % 8
	n.Inject(`{"gpu":%d,"lost":true}`, gpu)
	n.Eventually(fmt.Sprintf("lost GPU %d is unhealthy", gpu), func() error { return n.KubeletHas(node.GPU, 8, 7) })
	n.Inject(`{"gpu":%d,"lost":false}`, gpu)
	n.Eventually(fmt.Sprintf("GPU %d is healthy again", gpu), func() error { return n.KubeletHas(node.GPU, 8, 8) })
}
