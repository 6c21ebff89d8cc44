// Package node runs the agent's binary as a process on a simulated node, for tests, benchmarks and the demo.
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// Node is a directory with the files and sockets of a node, and an agent with simulated GPUs that runs there. The caller
// may run a kubelet in the directory.
type Node struct {
	Dir string // plugin.kubeletDir, and all files and sockets of the agent
	URL string // of the agent's web server

	binary, file string
	web          *http.Client
	cmd          *exec.Cmd
	exited       chan struct{}
	err          error // of the agent's process; set when exited is closed
}

// New returns a node for a binary. The path of its directory is short enough for unix sockets. The caller must call
// Remove.
func New(ctx context.Context, binary string) (*Node, error) {
	path, err := filepath.Abs(binary)
	if err != nil {
		return nil, err
	}
	address, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		return nil, err
	}
	return &Node{
		Dir: dir, URL: "http://" + address, binary: path, file: filepath.Join(dir, "config.yaml"),
		web: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 16, DisableCompression: true}},
	}, nil
}

const (
	firstPort = 10_000
	ports     = 50_000
)

// lastPort is the port of the newest node, counted from firstPort.
//
//nolint:gochecknoglobals // the ports belong to the process
var lastPort = rand.Uint32N(ports)

// freeAddress returns an address with a free port. The IP address depends on the process: on 127.0.0.1 another program
// could take the port before the agent listens, or while it restarts. All of 127.0.0.0/8 is the loopback network. For the
// same reason each node of the process gets the next port: the kernel would choose one that was free a moment ago, of some
// thousands, and so the port of another node whose agent does not listen right now.
func freeAddress(ctx context.Context) (string, error) {
	pid := os.Getpid() // below 1<<22: proc_sys_kernel(5)
	for {
		port := firstPort + atomic.AddUint32(&lastPort, 1)%ports
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", fmt.Sprintf("127.%d.%d.%d:%d", 64+pid>>16, pid>>8&0xff, pid&0xff, port))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return "", err
		}
		return l.Addr().String(), l.Close()
	}
}

// Write writes the agent's configuration, in which it replaces DIR by the node's directory and ADDRESS by the address of
// URL. A running agent reloads it eventually, or at once after Signal(SIGHUP).
func (n *Node) Write(config string) error {
	config = strings.NewReplacer("DIR", n.Dir, "ADDRESS", strings.TrimPrefix(n.URL, "http://")).Replace(config)
	return os.WriteFile(n.file, []byte(config), 0o600)
}

// StateDir returns the agent's state directory, which env of Start may change.
func (n *Node) StateDir() string { return filepath.Join(n.Dir, "state") }

// Start starts the agent, which writes its log to log. The agent ends with this process or by Stop.
func (n *Node) Start(log io.Writer, env ...string) error {
	n.cmd = exec.Command(n.binary, "--config", n.file) //nolint:noctx // Stop ends it
	n.cmd.Dir, n.cmd.Stdout, n.cmd.Stderr = n.Dir, log, log
	n.cmd.Env = append(append(os.Environ(), "GPU_NODE_AGENT_STATE_DIR="+n.StateDir()), env...)
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := n.cmd.Start(); err != nil {
		n.cmd = nil // nothing to stop
		return err
	}
	exited := make(chan struct{})
	n.exited = exited
	go func() {
		n.err = n.cmd.Wait()
		close(exited)
	}()
	return nil
}

// Exited returns a channel that is closed when the agent has exited.
func (n *Node) Exited() <-chan struct{} { return n.exited }

// Pid returns the process ID of the agent.
func (n *Node) Pid() int { return n.cmd.Process.Pid }

// Signal sends a signal to the agent.
func (n *Node) Signal(s os.Signal) error { return n.cmd.Process.Signal(s) }

// stopTimeout is the time after which Stop kills the agent. The agent promises to exit within 5 s; the rest is for a busy
// machine.
const stopTimeout = 10 * time.Second

// Stop sends SIGTERM and waits for the agent to exit. It fails if the agent exits with an error or must be killed.
func (n *Node) Stop() error {
	if n.cmd == nil {
		return nil
	}
	_ = n.cmd.Process.Signal(syscall.SIGTERM) // fails if the agent has exited
	select {
	case <-n.exited:
		n.cmd = nil
		if n.err != nil {
			return fmt.Errorf("agent exited: %w", n.err)
		}
		return nil
	case <-time.After(stopTimeout):
		n.Kill()
		return fmt.Errorf("agent did not exit within %v of SIGTERM", stopTimeout)
	}
}

// Kill kills the agent, without a chance to clean up, and waits for its exit.
func (n *Node) Kill() {
	if n.cmd != nil {
		_ = n.cmd.Process.Kill() // fails if the agent has exited
		<-n.exited
		n.cmd = nil
	}
}

// Remove stops the agent and removes the node's directory.
func (n *Node) Remove() error { return errors.Join(n.Stop(), os.RemoveAll(n.Dir)) }

// Get returns the status and body of one of the agent's pages. It reuses connections.
func (n *Node) Get(ctx context.Context, path string) (int, []byte, error) {
	return Get(ctx, n.web, n.URL+path, "")
}

// acceptHeader is the Accept header of Prometheus 3 (acceptHeader in its scrape package). For a client that does not name
// the escaping, the server would check and escape all names.
const acceptHeader = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6," +
	"application/openmetrics-text;version=0.0.1;q=0.5," +
	"text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"

// Get returns the status and body of a page without decoding it. If encoding is not empty, it requests that encoding
// with the Accept header of Prometheus.
func Get(ctx context.Context, c *http.Client, url, encoding string) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, nil, err
	}
	if encoding != "" {
		req.Header.Set("Accept-Encoding", encoding)
		req.Header.Set("Accept", acceptHeader)
	}
	res, err := c.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	return res.StatusCode, text, err
}

// Metrics returns the series of /metrics.
func (n *Node) Metrics(ctx context.Context) (Page, error) {
	status, text, err := n.Get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, fmt.Errorf("/metrics: status %d: %s", status, text)
	}
	return ParsePage(text)
}

// Event applies an event such as "{gpu: 3, xid: 79}" to the simulated GPUs. The configuration must have
// source.sim.control: DIR/sim.sock.
func (n *Node) Event(ctx context.Context, text string) error {
	e, err := sim.ParseEvent(text)
	if err != nil {
		return err
	}
	return sim.Send(ctx, filepath.Join(n.Dir, "sim.sock"), e)
}

// Clear clears a finding as an operator does. The configuration must have health.socket: DIR/agent.sock.
func (n *Node) Clear(ctx context.Context, device, cause string) error {
	return unixsock.Call(ctx, filepath.Join(n.Dir, "agent.sock"), "POST /clear", map[string]string{"device": device, "cause": cause}, nil)
}

// CloseIdleConnections closes unused connections to the agent, so that they do not count as its open files.
func (n *Node) CloseIdleConnections() { n.web.CloseIdleConnections() }
