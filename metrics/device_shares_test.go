package metrics

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
)

// A node without devices that are shared by MPS or by memory has no series of them, and what is unknown is absent.
func TestShareSeries(t *testing.T) {
	shareMetrics := []string{
		"share_units", "mps_daemon_up", "mps_daemon_restarts_total", "mps_clients", "mps_active_thread_ratio", "mps_pinned_memory_limit_bytes",
		"container_memory_limit_bytes", "container_memory_used_bytes",
	}
	src := testSources(testNode())
	page := render(t, collectorOf(src))
	for metric, want := range map[string]int{
		"share_units": 7, "mps_daemon_up": 2, "mps_daemon_restarts_total": 2, "mps_clients": 2, "mps_active_thread_ratio": 1,
		"mps_pinned_memory_limit_bytes": 1, "container_memory_limit_bytes": 2, "container_memory_used_bytes": 1,
	} {
		expectSeries(t, page, want, namespace+metric)
	}
	expectSeries(t, page, 0, namespace+"share_units", `UUID="GPU-c"`) // time-sliced
	expectSeries(t, page, 1, namespace+"share_units", `UUID="MIG-3"`) // its holders are unknown

	none := testNode()
	for i := range none.Devices {
		none.Devices[i].MPS = nil
	}
	src.Snapshot = none
	src.Shares, src.Memory = nil, nil
	page = render(t, collectorOf(src))
	for _, metric := range shareMetrics {
		expectSeries(t, page, 0, namespace+metric)
	}
}

// The series of a container end with it.
func TestMemorySeriesEndWithContainer(t *testing.T) {
	src := testSources(testNode())
	c := collectorOf(src)
	expectSeries(t, render(t, c), 1, namespace+"container_memory_limit_bytes", `pod="chat-1"`, `enforcement="driver"`)
	src.Memory = &memlimits.Snapshot{Containers: src.Memory.Containers[:1]}
	page := render(t, c)
	if strings.Contains(page, "chat-1") {
		t.Errorf("the container has ended:\n%s", strings.Join(series(page, namespace+"container_memory_limit_bytes"), "\n"))
	}
	expectSeries(t, page, 1, namespace+"container_memory_limit_bytes", `pod="chat-0"`, `enforcement="none"`)
}

// The state of a daemon is exported while its device is lost, but not while it only waits for its last clients.
func TestMPSSeriesOfLostAndLeavingDevice(t *testing.T) {
	s := testNode()
	s.Devices[1].MPS = &health.MPSDaemon{Restarts: 1}
	s.Devices[0].MPS = &health.MPSDaemon{Leaving: true, Servers: []health.MPSServer{{Clients: []int{7}}}}
	page := render(t, collectorOf(testSources(s)))
	expectSeries(t, page, 0, namespace+"mps_daemon_up", `UUID="GPU-a"`)
	expectSeries(t, page, 1, namespace+"mps_clients", `UUID="GPU-a"`, "} 1")
	expectSeries(t, page, 1, namespace+"mps_daemon_up", `UUID="GPU-b"`, "} 0")
	expectSeries(t, page, 1, namespace+"mps_daemon_restarts_total", `UUID="GPU-b"`, "} 1")
}
