package binarytest

import (
	"net/http"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest/node"
)

const eventsConfig = "source: {mode: sim, events: nvml, stallAfter: 1s, interval: 1s, sim: {control: DIR/sim.sock}}"

// value returns a metric's value, or -1 if the page lacks it.
func (p *process) value(name string, labels ...string) float64 {
	p.t.Helper()
	_, text := p.get("/metrics")
	page, err := node.ParsePage([]byte(text))
	if err != nil {
		p.t.Fatal(err)
	}
	if v, ok := page.Value(name, labels...); ok {
		return v
	}
	return -1
}

// awaitPolls waits until the source has given more readings.
func (p *process) awaitPolls(n float64) {
	p.t.Helper()
	begin := p.value("gpu_node_agent_source_poll_duration_seconds_count")
	p.await("polls", func() bool { return p.value("gpu_node_agent_source_poll_duration_seconds_count") >= begin+n })
}

// XIDs of events and the driver's recovery action reach the kubelet while the source is stalled, and the record that follows does not count
// the XIDs again. The source, when it is back, shows the reset of a GPU.
func TestEventsWhileSourceStalled(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, eventsConfig)
	xids := func(gpu, code string) float64 {
		return p.value("gpu_node_agent_xid_errors_total", "gpu", gpu, "xid", code)
	}
	p.sim("{source: stalled}")
	p.awaitSource("stalled")
	p.sim("{gpu: 3, xid: 79}")
	p.awaitAllocatable(k, 7)
	p.sim("{gpu: 4, xid: 31, times: 1000}")
	p.sim("{gpu: 5, xid: 149, recoveryAction: reset}")
	p.awaitAllocatable(k, 6)
	p.sim("{gpu: 5, recoveryAction: none}")
	if s := p.snapshot().Source; s.Status != "stalled" {
		t.Errorf("source %s", s.Status)
	}
	p.sim("{source: up}")
	p.awaitPage("/readyz", http.StatusOK)
	p.awaitAllocatable(k, 7)
	p.awaitPolls(5)
	for _, x := range []struct {
		gpu, code string
		want      float64
	}{{"3", "79", 1}, {"4", "31", 1000}, {"5", "149", 1}} {
		if n := xids(x.gpu, x.code); n != x.want {
			t.Errorf("XID %s of GPU %s: %v, want %v", x.code, x.gpu, n, x.want)
		}
	}
	if n := k.State().Resources[resource].Allocatable(); n != 7 {
		t.Errorf("%d allocatable GPUs: the record of the XID before the reset broke GPU 5", n)
	}
	p.sim("{gpu: 4, xid: 31, times: 1000}")
	p.await("XIDs while the source is up", func() bool { return xids("4", "31") >= 2000 })
	p.awaitPolls(5)
	if n := xids("4", "31"); n != 2000 {
		t.Errorf("%v XIDs, want 2000", n)
	}
}

// XIDs count although their events do not arrive.
func TestXIDsWithoutEvents(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, eventsConfig)
	for i, state := range []string{"lossy", "down"} {
		p.sim("{events: " + state + "}")
		p.sim("{gpu: 3, xid: 79}")
		p.awaitAllocatable(k, 7)
		p.awaitPolls(3)
		if n := p.value("gpu_node_agent_xid_errors_total", "gpu", "3", "xid", "79"); n != float64(i+1) {
			t.Errorf("events %s: %v XIDs, want %d", state, n, i+1)
		}
	}
}
