package binarytest

import (
	"strconv"
	"strings"
	"testing"
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

// Of two agents with one state file, the second reports who locks it and takes it over when the first has exited.
func TestStateFileSharedByTwoAgents(t *testing.T) {
	t.Parallel()
	first := startWithFinding(t)
	second := start(t, simConfig, "GPU_NODE_AGENT_HEALTH_STATE_FILE="+first.stateFile())
	second.awaitMetrics(`cause="xid-48"`, `state="healthy"} 1`, "gpu_node_agent_state_file_up 0")
	if s := second.snapshot(); !strings.Contains(s.Memory.Error, strconv.Itoa(first.Pid())) {
		t.Errorf("error %q lacks the other agent's process", s.Memory.Error)
	}
	second.sim("{gpu: 3, xid: 95}")
	second.awaitMetrics(`cause="xid-95"`)
	if strings.Contains(readFile(first.stateFile()), "xid-95") {
		t.Error("both agents write the file")
	}
	first.awaitMetrics("gpu_node_agent_state_file_up 1")
	first.Kill()
	second.await("the file of the second agent", func() bool { return strings.Contains(readFile(first.stateFile()), "xid-95") })
	second.awaitMetrics("gpu_node_agent_state_file_up 1")
}
