package binarytest

import (
	"errors"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// startWithFinding runs an agent whose GPU 2 has the finding xid-48, also in the state file.
func startWithFinding(t *testing.T) *process {
	t.Helper()
	p := start(t, simConfig)
	p.awaitMetrics(`state="healthy"} 1`)
	p.sim("{gpu: 2, xid: 48}")
	p.awaitState("xid-48")
	return p
}

// A finding survives a kill of the agent, and an operator clears it.
func TestFindingSurvivesRestart(t *testing.T) {
	t.Parallel()
	p := startWithFinding(t)
	uuid := string(p.snapshot().GPUs[2].UUID)
	p.Kill()
	p.launch()
	p.awaitMetrics(`cause="xid-48"`, `state="healthy"} 1`)
	if _, page := p.get("/metrics"); strings.Count(page, `state="unhealthy"} 1`) != 1 {
		t.Errorf("want one unhealthy GPU:\n%s", page)
	}
	if out := p.command(1, "clear", "--gpu", uuid, "--cause", "xid-1"); !strings.Contains(out, "xid-48") {
		t.Errorf("clear of another cause does not name the finding: %s", out)
	}
	if out := p.command(0, "clear", "--gpu", uuid); !strings.Contains(out, "xid-48") {
		t.Errorf("clear does not name the finding: %s", out)
	}
	if n := p.findings("xid-48"); n != 0 {
		t.Error("the finding is left after clear")
	}
}

// Of two agents with one state directory, the second reports who locks it and takes it over when the first has exited.
func TestStateFileSharedByTwoAgents(t *testing.T) {
	t.Parallel()
	first := startWithFinding(t)
	second := start(t, simConfig, "GPU_NODE_AGENT_STATE_DIR="+first.StateDir())
	second.awaitMetrics(`cause="xid-48"`, `state="healthy"} 1`, "gpu_node_agent_file_unwritten_since_timestamp_seconds{",
		"gpu_node_agent_state_file_read 1")
	if s := second.snapshot(); !strings.Contains(s.Memory.Error, strconv.Itoa(first.Pid())) {
		t.Errorf("error %q lacks the other agent's process", s.Memory.Error)
	}
	second.sim("{gpu: 3, xid: 95}")
	second.awaitMetrics(`cause="xid-95"`)
	if strings.Contains(readFile(first.stateFile()), "xid-95") {
		t.Error("both agents write the file")
	}
	first.awaitNoMetric("gpu_node_agent_file_unwritten")
	first.Kill()
	second.await("the file of the second agent", func() bool { return strings.Contains(readFile(first.stateFile()), "xid-95") })
	second.awaitNoMetric("gpu_node_agent_file_unwritten")
}

// awaitNoMetric waits until the agent's page has no such text.
func (p *process) awaitNoMetric(text string) {
	p.t.Helper()
	p.await("the end of "+text, func() bool {
		code, page := p.get("/metrics")
		return code == http.StatusOK && !strings.Contains(page, text)
	})
}

// lease makes each other process that opens a file wait, like a disk that does not answer, until end is called or the kernel breaks the
// lease (fs.lease-break-time, 45 s).
func lease(t *testing.T, path string) (end func()) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	return sync.OnceFunc(func() { _ = f.Close() })
}

// An agent whose state file does not answer serves, says what is unknown, and restores the findings when the file answers. It ends at
// SIGTERM all the same, which the end of the test checks too.
func TestStateFileAnswersLate(t *testing.T) {
	t.Parallel()
	p := startWithFinding(t)
	p.Kill()
	end := lease(t, p.stateFile())
	defer end()
	p.launch()
	p.awaitMetrics("gpu_node_agent_state_file_read 0", `gpu_node_agent_file_unwritten_since_timestamp_seconds{file="`+p.StateDir()+`"}`,
		`state="healthy"} 1`)
	const unknown = "verdicts of before the start are unknown: "
	if _, text := p.get("/readyz"); !strings.Contains(text, "state: "+unknown+p.StateDir()) {
		t.Errorf("/readyz has %q", text)
	}
	if out, _ := run(t, "status", "--config", p.config()); !strings.Contains(out, unknown) {
		t.Errorf("status has %s", out)
	}
	if n := p.findings("xid-48"); n != 0 {
		t.Fatal("the file was read; the lease holds nothing")
	}
	p.stop()
	p.launch() // the kernel breaks no lease before 45 s
	p.awaitMetrics("gpu_node_agent_state_file_read 0")
	p.sim("{gpu: 3, xid: 95}")
	p.awaitMetrics(`cause="xid-95"`)
	end()
	p.awaitMetrics(`cause="xid-48"`, `cause="xid-95"`, "gpu_node_agent_state_file_read 1")
	p.awaitNoMetric("gpu_node_agent_file_unwritten")
	p.await("both findings in the file", func() bool {
		text := readFile(p.stateFile())
		return strings.Contains(text, "xid-48") && strings.Contains(text, "xid-95")
	})
}

// A fifo in the place of the state file blocks neither the start nor the end of the agent.
func TestStateFileIsFifo(t *testing.T) {
	t.Parallel()
	p := newProcess(t, simConfig)
	if err := errors.Join(os.Mkdir(p.StateDir(), 0o750), syscall.Mkfifo(p.stateFile(), 0o600)); err != nil {
		t.Fatal(err)
	}
	p.launch()
	p.awaitMetrics(`state="healthy"} 1`, "gpu_node_agent_state_file_read 1")
	if !strings.Contains(p.log(), "not a regular file; set aside as "+p.stateFile()+".unread") {
		t.Error("the log does not say that the fifo is set aside")
	}
	aside := "set aside as " + p.stateFile() + ".unread; findings may be lost"
	if _, text := p.get("/readyz"); !strings.Contains(text, "state: "+p.stateFile()) || !strings.Contains(text, aside) {
		t.Errorf("/readyz has %q", text)
	}
	if out, _ := run(t, "status", "--config", p.config()); !strings.Contains(out, aside) {
		t.Errorf("status has %s", out)
	}
}
