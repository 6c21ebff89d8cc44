package binarytest

import (
	"strings"
	"testing"
)

// A driver that lists no GPU for a moment makes DCGM report all of them as lost: the kubelet receives nothing, and nothing is
// advised. A GPU with an XID 79 is lost at once all the same.
func TestAllGPUsLostForAMoment(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	messages := k.State().Resources[resource].Messages
	p.sim("{source: lost}")
	p.awaitSource("down")
	_, page := p.get("/metrics")
	if strings.Contains(page, `action="reboot-node"`) || p.findings("lost") > 0 {
		t.Errorf("findings of a source that lost its GPUs: %s", p.log())
	}
	p.sim("{source: up}")
	p.await("the source", func() bool { return p.snapshot().Source.Status == "up" })
	if got := k.State().Resources[resource]; got.Messages != messages || got.Allocatable() != 8 {
		t.Errorf("%d messages and %d healthy GPUs; want %d and 8", got.Messages, got.Allocatable(), messages)
	}

	p.sim("{source: lost}")
	p.awaitSource("down")
	p.sim("{gpu: 3, xid: 79}")
	p.await("lost GPU", func() bool { return p.findings("lost") == 1 })
	p.awaitAllocatable(k, 7)
}
