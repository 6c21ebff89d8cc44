package devicemanager

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/binary"
)

// agentBinary is the program under test: $AGENT_BIN, or what TestMain builds from this repository.
var agentBinary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "gpu-node-agent-e2e")
	if err == nil {
		defer os.RemoveAll(dir)
		agentBinary, err = binary.Agent(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.RemoveAll(dir)
		os.Exit(2)
	}
	m.Run() // its result becomes the exit code when TestMain returns
}

// agent is one agent process.
type agent struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed once err is set
	err    error
}

// startAgent starts an agent on the node's configuration.
func (n *node) startAgent() {
	n.t.Helper()
	cmd := exec.Command(agentBinary, "--config", filepath.Join(n.dir, "config.yaml"))
	// A group of its own, so that whatever it starts ends with it; and it ends with the tests.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Dir = n.dir
	cmd.Stdout = n.journal.writer("agent")
	cmd.Stderr = cmd.Stdout
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	a := &agent{cmd: cmd, exited: make(chan struct{})}
	go func() {
		a.err = cmd.Wait()
		close(a.exited)
	}()
	n.agent = a
	n.t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // an error: it is gone already
		<-a.exited
	})
}

// endAgent sends SIGTERM and wants an orderly end.
func (n *node) endAgent() {
	n.t.Helper()
	a := n.agent
	n.agent = nil
	if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		n.t.Fatal(err)
	}
	start := time.Now()
	select {
	case <-a.exited:
		if a.err != nil {
			n.t.Fatalf("after SIGTERM the agent ended with %v, want status 0", a.err)
		}
		n.t.Logf("%-60s %5.2fs", "the agent ended after SIGTERM", time.Since(start).Seconds())
	case <-time.After(5 * time.Second):
		n.t.Fatal("the agent still runs 5s after SIGTERM")
	}
}

// get reads a page of the agent.
func (n *node) get(path string) (*http.Response, error) {
	return n.client.Get("http://" + n.address + path)
}

// inject sends an event to the agent's simulator, straight to its control socket.
func (n *node) inject(event string) {
	n.t.Helper()
	conn, err := net.Dial("unix", n.control)
	if err != nil {
		n.t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		n.t.Fatal(err)
	}
	if _, err := fmt.Fprintln(conn, event); err != nil {
		n.t.Fatal(err)
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		n.t.Fatalf("event %s: no answer: %v", event, err)
	}
	if answer != "{\"ok\":true}\n" {
		n.t.Fatalf("event %s: answered %q", event, answer)
	}
}

// injectByCommand does the same with the agent's own command, as a user would.
func (n *node) injectByCommand(event string) {
	n.t.Helper()
	out, err := exec.Command(agentBinary, "sim", "--socket", n.control, event).CombinedOutput()
	n.journal.add("sim", bytes.TrimSpace(out))
	if err != nil {
		n.t.Fatalf("gpu-node-agent sim --socket %s '%s': %v\n%s", n.control, event, err, out)
	}
}
