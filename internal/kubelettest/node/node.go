// Package node runs the built agent from outside, as a process on a node of its own, for programs that measure it or
// try to break it.
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health/sim"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

// Node is a directory that stands for a node's root, and the agent that runs there on simulated GPUs. Its
// kubelet, if there is one, is the caller's.
type Node struct {
	Dir string // plugin.kubeletDir, and all sockets and files of the agent
	URL string // where the agent serves

	binary, file string
	web          *http.Client
	cmd          *exec.Cmd
	exited       chan struct{}
	err          error // how the agent has ended; read it after exited
}

// New makes a node for a binary. The directory's path is short enough for unix sockets; the caller ends with Remove.
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

// freeAddress is on an address of this machine that no other program asks for a port of, as all of 127.0.0.0/8 is this
// machine's: a port of 127.0.0.1 would be anybody's until the agent serves, and again while it restarts.
func freeAddress(ctx context.Context) (string, error) {
	pid := os.Getpid() // below 1<<22: proc_sys_kernel(5)
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", fmt.Sprintf("127.%d.%d.%d:0", 64+pid>>16, pid>>8&0xff, pid&0xff))
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// Write writes the agent's configuration: in it DIR is the node's directory and ADDRESS where it is to serve. A
// running agent reloads it by itself, or at once after Signal(SIGHUP).
func (n *Node) Write(config string) error {
	config = strings.NewReplacer("DIR", n.Dir, "ADDRESS", strings.TrimPrefix(n.URL, "http://")).Replace(config)
	return os.WriteFile(n.file, []byte(config), 0o600)
}

// Start starts the agent with its log going to log. It ends with this process, whatever happens, and by Stop.
func (n *Node) Start(log io.Writer, env ...string) error {
	n.cmd = exec.Command(n.binary, "--config", n.file) //nolint:noctx // Stop ends it in order
	n.cmd.Dir, n.cmd.Stdout, n.cmd.Stderr = n.Dir, log, log
	n.cmd.Env = append(os.Environ(), env...)
	n.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := n.cmd.Start(); err != nil {
		n.cmd = nil // there is nothing to stop
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

// Exited closes when the agent has ended.
func (n *Node) Exited() <-chan struct{} { return n.exited }

// Pid is the agent's.
func (n *Node) Pid() int { return n.cmd.Process.Pid }

// Signal sends the agent a signal.
func (n *Node) Signal(s os.Signal) error { return n.cmd.Process.Signal(s) }

// stopWithin is how long an agent may take to end in order.
const stopWithin = 15 * time.Second

// Stop ends the agent in order and returns what was wrong with its end.
func (n *Node) Stop() error {
	if n.cmd == nil {
		return nil
	}
	_ = n.cmd.Process.Signal(syscall.SIGTERM) // one that has ended is told apart below
	select {
	case <-n.exited:
		n.cmd = nil
		if n.err != nil {
			return fmt.Errorf("the agent has ended: %w", n.err)
		}
		return nil
	case <-time.After(stopWithin):
		_ = n.cmd.Process.Kill()
		<-n.exited
		n.cmd = nil
		return fmt.Errorf("the agent has not ended within %v of SIGTERM", stopWithin)
	}
}

// Remove stops the agent and removes the node's directory.
func (n *Node) Remove() error { return errors.Join(n.Stop(), os.RemoveAll(n.Dir)) }

// Get returns a page of the agent's, on a connection that is kept.
func (n *Node) Get(ctx context.Context, path string) (int, []byte, error) {
	return Get(ctx, n.web, n.URL+path, "")
}

// accepts is what Prometheus 3 asks for (acceptHeader in its scrape package): a client that does not name the escaping
// has all names looked at for it.
const accepts = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5," +
	"text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"

// Get returns a page as it comes over the wire: in an encoding such as gzip to who asks as Prometheus does, "" for none.
func Get(ctx context.Context, c *http.Client, url, encoding string) (int, []byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, nil, err
	}
	if encoding != "" {
		req.Header.Set("Accept-Encoding", encoding)
		req.Header.Set("Accept", accepts)
	}
	res, err := c.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	return res.StatusCode, text, err
}

// Metrics returns the agent's series.
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

// Event makes something happen to the simulated GPUs: "{gpu: 3, xid: 79}". The configuration must have
// source.sim.control: DIR/sim.sock.
func (n *Node) Event(ctx context.Context, text string) error {
	e, err := sim.ParseEvent(text)
	if err != nil {
		return err
	}
	_, err = sim.Send(ctx, filepath.Join(n.Dir, "sim.sock"), e)
	return err
}

// Clear says as an operator that a device is well again. The configuration must have health.socket: DIR/agent.sock.
func (n *Node) Clear(ctx context.Context, device, cause string) error {
	_, err := unixsock.Call(ctx, filepath.Join(n.Dir, "agent.sock"), map[string]any{"clear": map[string]string{"device": device, "cause": cause}})
	return err
}

// Hush closes the connections to the agent that are open and unused, so that it can be counted what it holds itself.
func (n *Node) Hush() { n.web.CloseIdleConnections() }
