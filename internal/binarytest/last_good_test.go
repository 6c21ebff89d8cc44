package binarytest

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
)

const (
	cordoned = simConfig + "\nhealth: {cordon: ['7']}"
	invalid  = simConfig + "\nhealth: {cordon: [7, {}], confirm: -1}"
)

func (p *process) lastGood() string { return p.StateDir() + "/last-good-config.json" }

// awaitLastGood waits until the last good configuration is saved, and until it is another than before.
func (p *process) awaitLastGood(before string) string {
	p.t.Helper()
	p.await("the last good configuration", func() bool { return readFile(p.lastGood()) != before })
	return readFile(p.lastGood())
}

// An agent that starts with an invalid file offers the GPUs of the last good configuration, reports that, and loads the file
// when it is valid.
func TestStartWithLastGoodConfiguration(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	saved := p.awaitLastGood("")
	p.write(cordoned)
	p.awaitAllocatable(k, 7)
	saved = p.awaitLastGood(saved)
	p.write(invalid)
	p.awaitMetrics("gpu_node_agent_config_last_reload_successful 0")
	for _, stop := range []func(){p.Kill, p.stop} {
		stop()
		logged := len(p.log())
		p.launch()
		p.awaitAllocatable(k, 7)
		p.awaitMetrics("gpu_node_agent_config_last_reload_successful 0", `cause="cordoned"`)
		p.awaitPage("/readyz", http.StatusOK, "config: invalid: health.cordon[1]: ", "all errors: gpu-node-agent check-config")
		if s := p.snapshot(); s.Config.OK || !strings.Contains(s.Config.Error, "health.confirm") || !s.Ready {
			t.Errorf("status %+v", s.Config)
		}
		times := func() int { return strings.Count(p.log()[logged:], "health.confirm") }
		p.await("the error in the log", func() bool { return times() > 0 })
		if n := times(); n != 1 {
			t.Errorf("logged %d times:\n%s", n, p.log()[logged:])
		}
		if got := readFile(p.lastGood()); got != saved {
			t.Errorf("saved %s, want %s", got, saved)
		}
	}
	p.write(simConfig)
	p.awaitAllocatable(k, 8)
	p.awaitMetrics("gpu_node_agent_config_last_reload_successful 1")
	p.awaitPage("/readyz", http.StatusOK)
	p.await("/readyz without a warning", func() bool { _, text := p.get("/readyz"); return text == "ok\n" })
	p.awaitLastGood(saved)
}

// The commands reach the running agent while the file is invalid.
func TestCommandsWithInvalidConfiguration(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig+"\nhealth: {socket: DIR/agent.sock}", "GPU_NODE_AGENT_HEALTH_SOCKET=")
	p.awaitLastGood("")
	p.awaitSocket(p.agentSocket())
	p.awaitSocket(p.simSocket())
	p.awaitMetrics(`state="healthy"} 1`)
	stateDir := p.StateDir()
	commands := func(config string) {
		t.Helper()
		if err := p.Node.Write(config); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{{"status"}, {"sim", "{gpu: 2, xid: 48}"}, {"clear", "--gpu", "2"}, {"detach", "--force"}, {"attach"}} {
			out, code := run(t, append(args, "--config", p.config(), "--state-dir", stateDir)...)
			if code != 0 || !strings.Contains(out, "warning: ") || !strings.Contains(out, "config.yaml") {
				t.Errorf("%q: %d\n%s", args, code, out)
			}
			if args[0] != "detach" {
				p.awaitMetrics(`state="healthy"} 1`)
			}
		}
	}
	// By the last good configuration: the agent does not use the invalid file's address and sockets.
	commands("health: {socket: /other.sock, confirm: -1}\nmetrics: {listen: nowhere}\nsource: {sim: {control: " +
		"/other.sock}}")
	// By the last good configuration although the file is not YAML.
	for _, invalid := range []string{"log: {", "metrics: {}\nhealth: {}\n", "log:\n\tlevel: info"} {
		commands("health: {}\n" + invalid)
	}
	// By the last good configuration of another file.
	other := filepath.Join(p.Dir, "other.yaml")
	if err := os.WriteFile(other, []byte("log: {"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, code := run(t, "status", "--config", other, "--state-dir", stateDir); code != 0 || !strings.Contains(out, "warning: ") ||
		!strings.Contains(out, "healthy") {
		t.Errorf("another file: %d\n%s", code, out)
	}
	// By the valid values of another file.
	p.Kill()
	if err := os.Remove(p.lastGood()); err != nil {
		t.Fatal(err)
	}
	if err := p.Node.Write(simConfig +
		"\nhealth: {socket: DIR/agent.sock}\nplugin: {kubeletDir: DIR}\nmetrics: {listen: ADDRESS}"); err != nil {
		t.Fatal(err)
	}
	stateDir = ""
	p.launch("GPU_NODE_AGENT_STATE_DIR=", "GPU_NODE_AGENT_HEALTH_SOCKET=")
	p.awaitSocket(p.agentSocket())
	p.awaitSocket(p.simSocket())
	p.awaitMetrics(`state="healthy"} 1`)
	valid := "health: {socket: DIR/agent.sock}\nmetrics: {listen: ADDRESS}\nsource: {sim: {control: DIR/sim.sock}}\n"
	for _, invalid := range []string{"log: {", "metrics: {}", "log: {level: loud}"} {
		commands(valid + invalid)
	}

	if out, code := run(t, "check-config", "--config", p.config()); code == 0 || !strings.Contains(out, "log.level") {
		t.Errorf("check-config: %d %s", code, out)
	}
}

// Without a usable copy of the same file, the agent refuses an invalid one.
func TestStartRefusesInvalidConfiguration(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig)
	saved := p.awaitLastGood("")
	p.Kill()
	p.write(invalid)
	refused := func(file string, flags ...string) {
		t.Helper()
		out, code := run(t, append([]string{"--config", file, "--state-dir", p.StateDir(), "--health.socket="}, flags...)...)
		if code == 0 || !strings.Contains(out, "health.confirm") {
			t.Errorf("%s %q: %d\n%s", file, flags, code, out)
		}
	}
	refused(p.config(), "--metrics.listen=nowhere")
	refused(p.config(), "--state-dir=")
	other := filepath.Join(p.Dir, "other.yaml")
	if err := os.WriteFile(other, []byte(readFile(p.config())), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(other)
	text := strings.TrimSpace(saved)
	if err := os.WriteFile(p.lastGood(), []byte(text[:len(text)/2]), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(p.config())
}

// An agent that is killed while it saves a configuration leaves one that it can start with.
func TestLastGoodConfigurationAfterKill(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig)
	p.awaitLastGood("")
	p.awaitMetrics("gpu_node_agent_config_last_reload_successful 1")
	for i := range 5 {
		logged := len(p.log())
		before, _ := os.Stat(durable.SparePath(p.lastGood())) // the next text is written there
		p.reload(simConfig + fmt.Sprintf("\nhealth: {temperature: %d}\n#%s", 80+i, strings.Repeat("x", 1<<20)))
		p.await("a new configuration", func() bool {
			now, err := os.Stat(durable.SparePath(p.lastGood()))
			written := err == nil && (before == nil || !durable.Same(before, now))
			return written || strings.Contains(p.log()[logged:], "configuration reloaded")
		})
		p.Kill()
		p.write(invalid)
		p.launch()
		p.awaitMetrics("gpu_node_agent_config_last_reload_successful 0", `state="healthy"} 1`)
		p.signal(syscall.SIGHUP)
	}
}
