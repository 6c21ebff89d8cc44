package binarytest

import (
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// log.level applies from the first entry on.
func TestLogLevel(t *testing.T) {
	t.Parallel()
	p := start(t, simConfig+"\nlog: {level: warn}")
	p.awaitPage("/readyz", http.StatusServiceUnavailable)
	p.await("a warning", func() bool { return strings.Contains(p.log(), `"level":"warn"`) })
	p.stop()
	if strings.Contains(p.log(), `"level":"info"`) {
		t.Errorf("log at level warn:\n%s", p.log())
	}
}

// A blocked standard error delays neither verdicts nor shutdown. When it is read again, the log reports how many entries
// are missing. When its reader closes it, the agent keeps running.
func TestBlockedLog(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T) (*process, *os.File) {
		t.Helper()
		t.Parallel()
		read, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = read.Close() })
		p := newProcess(t, simConfig)
		p.launchWithLog(write)
		_ = write.Close()
		p.awaitMetrics(`state="healthy"} 1`)
		// Each reload logs every fault of the configuration: more than a pipe holds. The queue holds one such entry.
		p.reload(simConfig + "\nhealth: {cordon: [" + strings.Repeat("'?', ", 1000) + "]}")
		p.awaitMetrics("gpu_node_agent_config_last_reload_successful 0")
		return p, read
	}
	dropped := func(p *process) bool {
		_, page := p.get("/metrics")
		return regexp.MustCompile(`(?m)^gpu_node_agent_log_dropped_total [1-9]`).MatchString(page)
	}

	t.Run("read again", func(t *testing.T) {
		p, stderr := begin(t)
		k := p.startKubelet()
		p.awaitAllocatable(k, 8)
		p.sim("{gpu: 3, xid: 79, lost: true}")
		p.awaitAllocatable(k, 7)
		p.awaitMetrics(`cause="lost"`, `cause="xid-79"`)
		p.awaitPage("/readyz", http.StatusOK)
		p.awaitPage("/livez", http.StatusOK)
		p.await("dropped entries", func() bool {
			p.signal(syscall.SIGHUP)
			return dropped(p)
		})
		go func() { _, _ = io.Copy(p, stderr) }()
		p.await("the count of missing entries", func() bool { return strings.Contains(p.log(), `"entries":`) })
		p.await("the log of a new XID", func() bool {
			p.sim("{gpu: 4, xid: 48}") // its entry may be dropped, if the last reload's fills the queue
			return strings.Contains(p.log(), `"xid":48,"meaning":`)
		})
	})
	t.Run("shutdown", func(t *testing.T) {
		p, _ := begin(t)
		p.stop()
	})
	t.Run("reader closed", func(t *testing.T) {
		p, stderr := begin(t)
		_ = stderr.Close()
		p.sim("{gpu: 3, xid: 79, lost: true}")
		p.awaitMetrics(`cause="lost"`)
		p.await("dropped entries", func() bool { return dropped(p) })
	})
}
