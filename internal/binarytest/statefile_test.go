package binarytest

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// A finding survives a kill of the agent, and an operator clears it.
func TestFindingSurvivesRestart(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig)
	p.awaitMetrics(`state="healthy"} 1`)
	p.sim("{gpu: 2, xid: 48}")
	p.awaitMetrics(`cause="xid-48"`)
	_, page := p.get("/metrics")
	uuid := regexp.MustCompile(`UUID="(GPU-[^"]*)".*cause="xid-48"`).FindStringSubmatch(page)
	if uuid == nil {
		t.Fatal(page)
	}
	p.awaitState("xid-48")
	p.kill()

	next := p.restart()
	next.awaitMetrics(`cause="xid-48"`, `state="healthy"} 1`)
	if _, page := next.get("/metrics"); strings.Count(page, `state="unhealthy"} 1`) != 1 {
		t.Errorf("want one unhealthy GPU:\n%s", page)
	}
	if out := next.command(1, "clear", "--gpu", uuid[1], "--cause", "xid-1"); !strings.Contains(out, "xid-48") {
		t.Errorf("clear of another cause does not name the finding: %s", out)
	}
	if out := next.command(0, "clear", "--gpu", uuid[1]); !strings.Contains(out, "xid-48") {
		t.Errorf("clear does not name the finding: %s", out)
	}
	if n := next.findings("xid-48"); n != 0 {
		t.Error("the finding is left after clear")
	}
	next.stop()
}

// Of two agents with one state file, the second reports who locks it and takes it over when the first has exited.
func TestStateFileSharedByTwoAgents(t *testing.T) {
	t.Parallel()
	first := start(t, simConfig)
	first.awaitMetrics(`state="healthy"} 1`)
	first.sim("{gpu: 2, xid: 48}")
	first.awaitState("xid-48")

	second := start(t, simConfig, "GPU_NODE_AGENT_HEALTH_STATE_FILE="+first.stateFile())
	second.awaitMetrics(`cause="xid-48"`, `state="healthy"} 1`, "gpu_node_agent_state_file_up 0")
	if s := second.snapshot(); !strings.Contains(s.Memory.Error, strconv.Itoa(first.cmd.Process.Pid)) {
		t.Errorf("error %q lacks the other agent's process", s.Memory.Error)
	}
	second.sim("{gpu: 3, xid: 95}")
	second.awaitMetrics(`cause="xid-95"`)
	if strings.Contains(readFile(first.stateFile()), "xid-95") {
		t.Error("both agents write the file")
	}
	first.awaitMetrics("gpu_node_agent_state_file_up 1")
	first.kill()
	second.await("the file of the second agent", func() bool { return strings.Contains(readFile(first.stateFile()), "xid-95") })
	second.awaitMetrics("gpu_node_agent_state_file_up 1")
	second.stop()
}

// A source neither shows nor deletes the findings of another source.
func TestStateFileOfAnotherSource(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig)
	p.awaitMetrics(`state="healthy"} 1`)
	p.sim("{gpu: 2, xid: 48}")
	p.awaitState("xid-48")
	p.kill()

	dcgm := strings.ReplaceAll(readFile(p.stateFile()), `"source":"sim"`, `"source":"dcgm"`)
	if err := os.WriteFile(p.stateFile(), []byte(dcgm), 0o600); err != nil {
		t.Fatal(err)
	}
	sim := p.restart()
	sim.awaitMetrics(`state="healthy"} 1`)
	if n := sim.findings("xid-48"); n != 0 {
		t.Error("the simulation shows a finding of DCGM")
	}
	sim.awaitState(`"source":"sim"`)
	sim.awaitState("xid-48")
	sim.sim("{gpu: 1, xid: 95}")
	sim.awaitState("xid-95")
	sim.kill()

	p.write("source: {mode: sim, sim: {profile: a100-8, control: %[1]s/sim.sock}}")
	other := p.restart()
	other.awaitMetrics(`state="healthy"} 1`)
	if _, page := other.get("/metrics"); strings.Count(page, `state="healthy"} 1`) != 8 || other.findings("xid-95")+other.findings("missing") != 0 {
		t.Errorf("want the GPUs of the new profile only:\n%s", page)
	}
}

// A state file that cannot be read is reported and left alone, and the agent runs without it.
func TestStateFileUnreadable(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	file := dir + "/state.json"
	if err := os.MkdirAll(file+"/theirs", 0o750); err != nil {
		t.Fatal(err)
	}
	p := start(t, simConfig, "GPU_NODE_AGENT_HEALTH_STATE_FILE="+file)
	p.awaitMetrics(`state="healthy"} 1`, "gpu_node_agent_state_file_up 0")
	if s := p.snapshot(); s.Memory.File != file || s.Memory.Error == "" {
		t.Errorf("state file %+v", s.Memory)
	}
	if out, code := run(t, "status", "--config", p.config); code != 0 || !strings.Contains(out, file) {
		t.Errorf("status does not name the file: exit code %d\n%s", code, out)
	}
	p.stop()
	left, err := filepath.Glob(dir + "/*")
	if err != nil || len(left) != 2 { // it and the lock
		t.Errorf("%v %v", left, err)
	}
	if _, err := os.Stat(file + "/theirs"); err != nil {
		t.Error(err)
	}
}
