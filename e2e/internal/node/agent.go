package node

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
)

// Configure writes config.yaml, which a running agent reloads. Flags of StartAgent set the paths of files and sockets.
func (n *Node) Configure(text string) {
	n.T.Helper()
	n.Write("config.yaml", text)
}

// StateDir returns the agent's state directory.
func (n *Node) StateDir() string { return n.File("state") }

// StartAgent starts an agent without waiting for it.
func (n *Node) StartAgent() {
	n.T.Helper()
	n.StartAgentUnder()
}

// StartAgentUnder starts an agent by a command, such as a tracer, which must exec it.
func (n *Node) StartAgentUnder(command ...string) {
	n.T.Helper()
	command = append(command, binary, "--config", n.File("config.yaml"), "--source.mode=sim", "--source.sim.control="+n.File("sim.sock"),
		"--state-dir="+n.StateDir(), "--health.socket="+n.File("agent.sock"),
		"--plugin.kubeletDir="+n.Dir, "--metrics.listen="+n.Address)
	n.Agent = n.Start(command[0], command[1:]...)
}

// StartMPSDaemon starts gpu-node-agent mps-daemon, which is stopped with the test.
func (n *Node) StartMPSDaemon() *process.Process {
	n.T.Helper()
	p := n.Start(binary, "mps-daemon", "--config", n.File("config.yaml"), "--source.mode=sim", "--state-dir=")
	n.T.Cleanup(func() { _ = p.Stop() }) // before Start's: killed, it would leave its daemons
	return p
}

// EndAgent sends SIGTERM and expects exit status 0.
func (n *Node) EndAgent() {
	n.T.Helper()
	start := time.Now()
	if err := n.Agent.Stop(); err != nil {
		n.T.Fatalf("agent exited with %v after SIGTERM, want status 0", err)
	}
	n.T.Logf("%-70s %5.2fs", "agent exited after SIGTERM", time.Since(start).Seconds())
	n.AwaitWithdrawal()
}

// KillAgent kills the agent with SIGKILL.
func (n *Node) KillAgent() {
	n.T.Helper()
	n.Agent.Kill()
	n.AwaitWithdrawal()
}

// AwaitWithdrawal waits until the kubelet has no allocatable devices: a test could take them for the next agent's.
func (n *Node) AwaitWithdrawal() {
	n.T.Helper()
	n.Agent = nil
	if n.Kubelet == nil {
		return
	}
	n.Eventually("no allocatable devices without an agent", func() error {
		if usable := n.Kubelet.Usable(); usable > 0 {
			return fmt.Errorf("kubelet has %d allocatable devices", usable)
		}
		return nil
	})
}

// Page returns a page of the agent. It fails if the response has another status.
func (n *Node) Page(path string, status int) (string, error) {
	client := http.Client{Timeout: 10 * time.Second}
	request, err := http.NewRequestWithContext(n.T.Context(), http.MethodGet, "http://"+n.Address+path, nil)
	if err != nil {
		return "", err
	}
	r, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = r.Body.Close() }()
	text, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != status {
		err = fmt.Errorf("%s: %s: %s", path, r.Status, text)
	}
	return string(text), err
}

// AwaitStatus waits until a page of the agent has a status.
func (n *Node) AwaitStatus(what, path string, status int) {
	n.T.Helper()
	n.Eventually(what, func() error {
		_, err := n.Page(path, status)
		return err
	})
}

// Inject sends an event to the simulated GPUs.
func (n *Node) Inject(format string, args ...any) {
	n.T.Helper()
	n.Post("sim.sock", "/events", format, args...)
}

// Post sends a request to a socket of the agent, as curl does. It waits for the socket, because the kubelet may list the devices earlier.
func (n *Node) Post(socket, path, format string, args ...any) {
	n.T.Helper()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", n.File(socket))
	}
	_, err := process.Await(n.T.Context(), Timeout, func(ctx context.Context) error {
		conn, err := dial(ctx, "", "")
		if err == nil {
			_ = conn.Close()
		}
		return err
	}, n.Agent)
	if err != nil {
		n.T.Fatalf("waiting for %s: %v", socket, err)
	}
	body := fmt.Sprintf(format, args...)
	request, err := http.NewRequestWithContext(n.T.Context(), http.MethodPost, "http://localhost"+path, strings.NewReader(body))
	if err != nil {
		n.T.Fatal(err)
	}
	client := http.Client{Timeout: Timeout, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	r, err := client.Do(request)
	if err != nil {
		n.T.Fatalf("%s %s: %v", path, body, err)
	}
	defer func() { _ = r.Body.Close() }()
	if text, err := io.ReadAll(r.Body); err != nil || r.StatusCode >= http.StatusBadRequest {
		n.T.Fatalf("%s %s: %s: %s, %v", path, body, r.Status, text, err)
	}
}
