//go:build cgo && linux

package dcgm

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
)

// chain is a Monitor over the adapter over the scripted library.
type monitorFixture struct {
	*fixture
	n    uint // GPUs
	m    *monitor.Monitor
	out  health.Latest[health.Snapshot]
	stop func()
}

// ofHostEngine is monitored of a host engine.
func monitorHostEngine(b *fixture, gpus uint) *monitorFixture {
	cfg := testConfig()
	cfg.Address = "node:5555"
	return startMonitor(b, gpus, cfg, time.Second, 10*time.Second)
}

// monitored runs a monitor, in a synctest bubble or in real time.
func startMonitor(b *fixture, gpus uint, cfg Config, every, stallAfter time.Duration) *monitorFixture {
	b.clock = &clock{}
	b.addGPUs(gpus)
	c := &monitorFixture{fixture: b, n: gpus}
	var config health.Latest[health.Config]
	var source health.Latest[monitor.Source]
	judging := health.DefaultConfig()
	judging.Interval = every
	config.Store(&judging)
	open := func(ctx context.Context) (health.Session, error) { return Open(ctx, cfg, b.log) }
	from := monitor.Source{SourceID: health.SourceID{Kind: "dcgm"}, Open: open, StallAfter: stallAfter}
	if cfg.Address != "" {
		again := cfg
		again.Attach = true
		from.Attach = func(ctx context.Context) (health.Session, error) { return Open(ctx, again, b.log) }
	}
	source.Store(&from)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	c.m = monitor.New(&config, &source, &c.out, b.log)
	go func() { done <- c.m.Run(ctx) }()
	c.stop = func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Error(err)
		}
		if b.lib.Initialized() {
			b.t.Error("the library is still initialized")
		}
	}
	return c
}

// pass lets seconds pass in a synctest bubble, in each of which the engine samples and check is called.
func (c *monitorFixture) pass(seconds int, check func(second int, s *health.Snapshot)) {
	for i := range seconds {
		time.Sleep(time.Second) //nolint:forbidigo // the bubble's time
		synctest.Wait()
		if check != nil {
			check(i, c.out.Load())
		}
		c.sampleGPUs(c.n)
	}
}

// wait lets time pass in a synctest bubble, in which the engine samples nothing.
func (c *monitorFixture) wait(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // the bubble's time
	synctest.Wait()
}

// device returns what the monitor thinks of a GPU now.
func (c *monitorFixture) device(gpu uint) health.DeviceState {
	c.t.Helper()
	for _, d := range c.out.Load().Devices {
		if d.Device.ID == gpuID(gpu) {
			return d
		}
	}
	c.t.Fatalf("GPU %d is not in the snapshot", gpu)
	return health.DeviceState{}
}

func (c *monitorFixture) expect(when string, want ...health.State) {
	c.t.Helper()
	for gpu, want := range want {
		if d := c.device(uint(gpu)); d.Verdict.State != want {
			c.t.Errorf("%s: GPU %d is %v (%s), want %v", when, gpu, d.Verdict.State, d.Verdict.Cause(), want)
		}
	}
}

// An XID is judged within half a second of the engine's record of it, however seldom the values are polled.
func TestMonitorXIDBetweenPolls(t *testing.T) {
	b := newFixture(t)
	synctest.Test(t, func(*testing.T) {
		c := startMonitor(b, 2, testConfig(), time.Hour, 10*time.Second)
		defer c.stop()
		c.pass(3, nil)
		c.expect("at first", health.Healthy, health.Healthy)
		b.xid(script.GPU, 1, 79, time.Now())
		c.wait(500 * time.Millisecond)
		c.expect("an XID 79", health.Healthy, health.Unhealthy)
		polls := c.out.Load().Source.Polls
		c.pass(600, nil)
		if n := c.out.Load().Source.Polls - polls; n != 0 {
			t.Errorf("%d polls for an XID that was reported", n)
		}
		if d := c.device(1); d.XIDCounts[79] != 1 || d.Verdict.Cause() != "xid-79" {
			t.Errorf("after ten minutes: %d XIDs, cause %s", d.XIDCounts[79], d.Verdict.Cause())
		}
	})
}

func TestMonitorLostGPUReturns(t *testing.T) {
	b := newFixture(t)
	synctest.Test(t, func(*testing.T) {
		c := startMonitor(b, 3, testConfig(), time.Second, 10*time.Second)
		defer c.stop()
		c.pass(3, nil)
		b.lib.Entity(script.GPU, 1, statusLost)
		c.pass(2, nil)
		c.expect("lost", health.Healthy, health.Unhealthy, health.Healthy)
		if got := c.device(1).Verdict.Cause(); got != health.CauseLost {
			t.Errorf("cause %s", got)
		}
		b.lib.Entity(script.GPU, 1, statusOK)
		c.pass(3, nil)
		c.expect("back", health.Healthy, health.Healthy, health.Healthy)
		if got := c.device(1).Sample.Values[health.FieldGPUTemp]; got != 41 {
			t.Errorf("temperature %v of the GPU that is back", got)
		}
		for gpu := range uint(3) { // one GPU is bound, and all are detached for a moment (11)
			b.lib.Entity(script.GPU, gpu, statusDetached)
		}
		c.pass(1, nil)
		c.expect("a blip", health.Healthy, health.Healthy, health.Healthy)
		for gpu := range uint(3) {
			b.lib.Entity(script.GPU, gpu, statusOK)
		}
		c.pass(5, nil)
		c.expect("over", health.Healthy, health.Healthy, health.Healthy)
	})
}

// The engine dies and comes back: nothing flaps, and every XID is counted once, those that nobody saw and those
// that the new engine reads from the kernel's log again (14).
func TestMonitorDeadEngine(t *testing.T) {
	b := newFixture(t)
	synctest.Test(t, func(*testing.T) {
		c := monitorHostEngine(b, 3)
		defer c.stop()
		c.pass(3, nil)
		died := time.Now()
		b.xid(script.GPU, 0, 79, died)
		c.pass(3, nil)

		b.lib.Fail("*", errNotConnected, -1)
		c.pass(90, func(second int, s *health.Snapshot) {
			if second > 0 && (s.Source.Status != health.SourceDown || !strings.Contains(s.Source.Err, "Host engine connection invalid")) {
				t.Errorf("after %d s the source is %+v", second, s.Source)
			}
			c.expect("dead", health.Unhealthy, health.Healthy, health.Healthy)
			if second == 40 {
				b.xid(script.GPU, 1, 48, time.Now())
			}
		})
		b.lib.Fail("", 0, 0)
		c.pass(40, func(second int, _ *health.Snapshot) {
			if second == 35 {
				b.lib.Row(script.GPU, 0, 79, 0, died.Add(3*time.Second)) // of the kernel's log
			}
			c.expect("new engine", health.Unhealthy)
			if got := c.device(2).Verdict.State; got != health.Healthy {
				t.Errorf("after %d s GPU 2 is %v", second, got)
			}
		})
		s := c.out.Load()
		if s.Source.Status != health.SourceUp || s.Source.Reconnects != 1 {
			t.Errorf("source %+v", s.Source)
		}
		c.expect("at last", health.Unhealthy, health.Unhealthy, health.Healthy)
		if first, second := c.device(0).XIDCounts, c.device(1).XIDCounts; first[79] != 1 || len(first) != 1 || second[48] != 1 || len(second) != 1 {
			t.Errorf("XIDs of GPU 0 %v and GPU 1 %v, want one 79 and one 48", first, second)
		}
		b.xid(script.GPU, 2, 95, time.Now())
		c.wait(500 * time.Millisecond)
		c.expect("an XID of the new engine's", health.Unhealthy, health.Unhealthy, health.Unhealthy)
	})
}

// DCGM goes blind after an XID 119. That is no GPU's fault; an engine of our own is started again, another's must be
// started by whoever runs it (12).
func TestMonitorBlindEngine(t *testing.T) {
	for address, starts := range map[string]int{"": 2, "node:5555": 0} {
		t.Run("address "+address, func(t *testing.T) {
			b := newFixture(t)
			synctest.Test(t, func(*testing.T) {
				cfg := testConfig()
				cfg.Address = address
				c := startMonitor(b, 2, cfg, time.Second, 10*time.Second)
				defer c.stop()
				c.pass(3, nil)
				b.lib.Blind()
				said := false
				c.pass(60, func(_ int, s *health.Snapshot) {
					said = said || s.Source.Status == health.SourceDown && strings.Contains(s.Source.Err, "blind")
					c.expect("blind", health.Healthy, health.Healthy)
				})
				s := c.out.Load()
				want := health.SourceUp
				if address != "" {
					want = health.SourceDown
				}
				if !said || s.Source.Status != want {
					t.Errorf("said %v, source %+v", said, s.Source)
				}
				if n := b.lib.Calls("dcgmStartEmbedded"); n != starts {
					t.Errorf("the engine was started %d times, want %d", n, starts)
				}
				if n := b.lib.Calls("dcgmStopEmbedded"); n != max(0, starts-1) {
					t.Errorf("the engine was stopped %d times", n)
				}
			})
		})
	}
}

// A blind DCGM still has the name of a GPU that is lost: that it has no other is no word on the others, neither when it
// is connected to again nor when it is first.
func TestMonitorBlindEngineWithLostGPU(t *testing.T) {
	b := newFixture(t)
	synctest.Test(t, func(*testing.T) {
		c := monitorHostEngine(b, 3)
		defer c.stop()
		for gpu := range uint(3) {
			b.lib.Instance(script.GPU, gpu, 0, 0, gpuUUID(gpu), 0, 0) // what DCGM remembers of it
		}
		c.pass(3, nil)
		b.lib.Entity(script.GPU, 1, statusLost)
		c.pass(3, nil)
		b.lib.Blind()
		c.pass(60, func(int, *health.Snapshot) { c.expect("blind", health.Healthy, health.Unhealthy, health.Healthy) })
		if s := c.out.Load(); s.Source.Status != health.SourceDown || !strings.Contains(s.Source.Err, "blind") {
			t.Errorf("source %+v", s.Source)
		}
	})
}

// await waits until the monitor shows a status.
func (c *monitorFixture) await(want health.SourceStatus) {
	c.t.Helper()
	late := time.After(time.Minute)
	for {
		s, changed := c.out.Watch()
		if s != nil && s.Source.Status == want {
			return
		}
		select {
		case <-changed:
		case <-late:
			c.t.Fatalf("the source is %+v, want %v", s.Source, want)
		}
	}
}
