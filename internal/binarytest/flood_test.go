package binarytest

import (
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

// limitFiles sets the number of descriptors that the agent may have, for good.
func (p *process) limitFiles(n int) {
	p.t.Helper()
	limit := syscall.Rlimit{Cur: uint64(n), Max: uint64(n)}
	_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(p.Pid()), syscall.RLIMIT_NOFILE, uintptr(unsafe.Pointer(&limit)), 0, 0,
		0)
	if errno != 0 {
		p.t.Fatal(errno)
	}
}

func (p *process) usage() node.Usage {
	p.t.Helper()
	u, err := node.UsageOf(p.Pid())
	if err != nil {
		p.t.Fatal(err)
	}
	return u
}

// awaitConnection waits until a page can be had on a new connection. A client as fast as the flood may be dropped once.
func (p *process) awaitConnection(path string) {
	p.t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: awaitTimeout}
	p.await(path, func() bool {
		code, _, err := node.Get(p.t.Context(), &client, p.URL+path, "")
		return err == nil && code == http.StatusOK
	})
}

// Clients that open thousands of connections, or do not read, keep no probe and no scrape from the agent, and cost it
// neither memory nor descriptors without limit.
func TestAgentServesDuringFloods(t *testing.T) { // not parallel, because it takes all processors
	begin := time.Now()
	p := start(t, simConfig)
	p.awaitMetrics("gpu_node_agent_source_up 1")
	before, growth := p.usage(), uint64(60<<20)
	if raced {
		growth *= 5
	}
	flood := func(f node.Flood, connections int) {
		t.Helper()
		t.Log(connections, f.Name)
		opened := make(chan node.Connections)
		go func() {
			all, err := p.Flood(t.Context(), f, connections)
			if err != nil {
				t.Error(err)
			}
			opened <- all
		}()
		var all node.Connections
		for all == nil {
			p.awaitConnection("/livez")
			select {
			case all = <-opened:
			case <-time.After(10 * time.Millisecond):
			}
		}
		for _, path := range []string{"/livez", "/health", "/metrics", "/", "/api/v1/snapshot"} {
			p.awaitConnection(path)
		}
		u := p.usage()
		if u.Files > before.Files+400 || u.RSS > before.RSS+growth {
			t.Errorf("beside %d %s: %d open files and %d bytes of memory, %d and %d before", connections, f.Name, u.Files, u.RSS, before.Files,
				before.RSS)
		}
		all.Close()
	}
	for _, f := range node.Floods() {
		flood(f, 2000)
	}
	p.limitFiles(before.Files + 30)
	for _, f := range node.Floods() {
		flood(f, 200)
	}
	page, err := p.Metrics(t.Context())
	if dropped, _ := page.Value("gpu_node_agent_http_connections_dropped_total"); err != nil || dropped < 1000 {
		t.Errorf("%v dropped connections on the page, %v", dropped, err)
	}
	p.awaitLog("clientConnections")
	if n, most := strings.Count(p.log(), "clientConnections"), 1+int(time.Since(begin)/time.Minute); n > most { // at most one in a minute
		t.Errorf("dropped connections are logged %d times, want %d at most", n, most)
	}
}
