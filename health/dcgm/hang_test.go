//go:build cgo && linux

package dcgm

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestCloseWaitsForHangingPoll(t *testing.T) {
	b := openFixture(t, 1, testConfig())
	b.lib.Hang("dcgmEntitiesGetLatestValues")
	polled, closed := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := b.Poll(context.Background())
		polled <- err
	}()
	b.lib.WaitHanging()
	before := b.lib.Calls("dcgmStopEmbedded")
	go func() { closed <- b.Close() }()
	for range 1000 {
		runtime.Gosched() // lets a Close that does not wait return
	}
	select {
	case err := <-closed:
		t.Fatalf("Close returned during a poll: %v", err)
	default:
	}
	b.expectCalls("dcgmStopEmbedded", before)
	b.lib.Release()
	if err := <-polled; err != nil {
		t.Errorf("poll: %v", err)
	}
	if err := <-closed; err != nil {
		t.Errorf("close: %v", err)
	}
	if _, err := b.Poll(t.Context()); err == nil {
		t.Error("polled a closed session")
	}
	if err := b.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

// The monitor reports a call that hangs and makes no other call; neither goroutines nor threads remain
// (OBSERVED.md#hung-engine).
func TestHangingCallsLeakNothing(t *testing.T) {
	b := newFixture(t, 0)
	cfg := testConfig()
	cfg.Interval = time.Millisecond // every poll is full
	c := startMonitor(b, 2, cfg, time.Millisecond, 5*time.Millisecond)
	t.Cleanup(c.stop)
	c.await(health.SourceUp)
	functions := []string{
		"dcgmEntitiesGetLatestValues", "dcgmGetValuesSince_v2", "dcgmGetGpuStatus", "dcgmHealthCheck",
		"dcgmGetEntityGroupEntities",
	}
	rounds := 0
	expectNoLeak(t, 50, func() {
		function := functions[rounds%len(functions)]
		rounds++
		b.sampleGPUs(2)
		b.lib.Hang(function)
		b.lib.WaitHanging()
		calls := b.lib.Calls(function)
		c.await(health.SourceStalled)
		for gpu := range uint(2) {
			if d := c.device(gpu); d.Verdict.State != health.Healthy {
				t.Errorf("%s hangs: GPU %d is %v", function, gpu, d.Verdict.State)
			}
		}
		b.expectCalls(function, calls)
		b.lib.Release()
		c.await(health.SourceUp)
	})
	if n := b.lib.MostHanging(); n != 1 {
		t.Errorf("%d calls hung at once, want 1", n)
	}
	if r := c.out.Load().Source.Reconnects; r != 0 {
		t.Errorf("%d reconnects, want none", r)
	}
}
