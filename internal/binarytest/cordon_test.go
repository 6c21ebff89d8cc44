package binarytest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

func TestCordon(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig)
	p.reload(simConfig + "\nhealth: {recoverAfter: 0s, cordon: ['2', GPU-of-another-node]}")
	p.awaitAllocatable(k, 7)
	p.awaitMetrics(`cause="cordoned"`)
	p.await("the reference without a device in the log", func() bool { return strings.Contains(p.log(), `["GPU-of-another-node"]`) })
	p.reload(simConfig + "\nhealth: {recoverAfter: 0s}")
	p.awaitAllocatable(k, 8)
}

// With health.isolatePending, a GPU that waits for a reset gets no new pod after its pod ended.
func TestIsolatePending(t *testing.T) {
	t.Parallel()
	p, k := startRegistered(t, simConfig+"\nhealth: {isolatePending: true, recoverAfter: 0s}")
	job := p.allocate(k)
	index := slices.IndexFunc(p.snapshot().GPUs, func(d status.Device) bool { return string(d.UUID) == job.Devices[0] })
	p.sim(fmt.Sprintf("{gpu: %d, rowRemapPending: true}", index))
	p.awaitMetrics(`cause="row-remap-pending"`, `state="degraded"} 1`)
	p.awaitAllocatable(k, 8)
	k.Free(resource, job.Devices...)
	p.awaitAllocatable(k, 7)
	p.awaitMetrics(`cause="isolated"`)
	p.sim(fmt.Sprintf("{gpu: %d, rowRemapPending: false}", index))
	p.awaitAllocatable(k, 8)
}
