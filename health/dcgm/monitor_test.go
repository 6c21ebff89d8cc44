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
	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
)

// monitorFixture is a fixture with a Monitor that uses this package.
type monitorFixture struct {
	*fixture
	n    uint // number of GPUs
	m    *monitor.Monitor
	out  health.Latest[health.Snapshot]
	stop func()
}

// testMonitor runs test with a monitor that has polled for three seconds, in a synctest bubble.
func testMonitor(t *testing.T, gpus uint, cfg Config, test func(c *monitorFixture)) {
	t.Helper()
	b := newFixture(t, 0)
	synctest.Test(t, func(*testing.T) {
		c := startMonitor(b, gpus, cfg, time.Second, 10*time.Second)
		defer c.stop()
		c.pass(3, nil)
		test(c)
	})
}

// startMonitor runs a monitor, in a synctest bubble or in real time.
func startMonitor(b *fixture, gpus uint, cfg Config, every, stallAfter time.Duration) *monitorFixture {
	b.clock = &clock{}
	b.addGPUs(gpus)
	c := &monitorFixture{fixture: b, n: gpus}
	var config health.Latest[judge.Config]
	var source health.Latest[monitor.Source]
	healthConfig := judge.DefaultConfig()
	healthConfig.Interval = every
	config.Store(&healthConfig)
	open := func(ctx context.Context) (health.Session, error) { return Open(ctx, cfg, b.log) }
	from := monitor.Source{SourceID: health.SourceID{Kind: "dcgm"}, Open: open, StallAfter: stallAfter}
	if cfg.Address != "" {
		attaching := cfg
		attaching.Attach = true
		from.Attach = func(ctx context.Context) (health.Session, error) { return Open(ctx, attaching, b.log) }
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

// pass advances the time of a synctest bubble; in each second it calls check and the engine takes a sample.
func (c *monitorFixture) pass(seconds int, check func(second int, s *health.Snapshot)) {
	for i := range seconds {
		time.Sleep(time.Second) //nolint:forbidigo // bubble time
		synctest.Wait()
		if check != nil {
			check(i, c.out.Load())
		}
		c.sampleGPUs(c.n)
	}
}

// wait advances the time of a synctest bubble without a sample.
func (c *monitorFixture) wait(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // bubble time
	synctest.Wait()
}

// device returns the current state of a GPU.
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

// XIDsChanged makes the monitor judge an XID within half a second, whatever the poll interval.
func TestMonitorXIDBetweenPolls(t *testing.T) {
	b := newFixture(t, 0)
	synctest.Test(t, func(*testing.T) {
		c := startMonitor(b, 2, testConfig(), time.Hour, 10*time.Second)
		defer c.stop()
		c.pass(3, nil)
		c.expect("first poll", health.Healthy, health.Healthy)
		b.xid(script.GPU, 1, 79, time.Now())
		c.wait(500 * time.Millisecond)
		c.expect("XID 79", health.Healthy, health.Unhealthy)
		polls := c.out.Load().Source.Polls
		c.pass(600, nil)
		if n := c.out.Load().Source.Polls - polls; n != 0 {
			t.Errorf("%d polls without a new XID", n)
		}
		if d := c.device(1); d.XIDs.Codes[79].Total != 1 || d.Verdict.Cause() != "xid-79" {
			t.Errorf("after ten minutes: %d XIDs, cause %s", d.XIDs.Codes[79].Total, d.Verdict.Cause())
		}
	})
}

// While the engine is dead the states stay. The new engine's XIDs count once: new XIDs, and XIDs that it reads again from the kernel log
// (OBSERVED.md#dead-engine).
func TestMonitorDeadEngine(t *testing.T) {
	testMonitor(t, 3, hostConfig(), func(c *monitorFixture) {
		died := time.Now()
		c.xid(script.GPU, 0, 79, died)
		c.pass(3, nil)

		c.lib.Fail("*", errNotConnected, -1)
		c.pass(90, func(second int, s *health.Snapshot) {
			if second > 0 && (s.Source.Status != health.SourceDown || !strings.Contains(s.Source.Err, "Host engine connection invalid")) {
				t.Errorf("after %d s the source is %+v", second, s.Source)
			}
			c.expect("dead", health.Unhealthy, health.Healthy, health.Healthy)
			if second == 40 {
				c.xid(script.GPU, 1, 48, time.Now())
			}
		})
		c.lib.Fail("", 0, 0)
		c.pass(40, func(second int, _ *health.Snapshot) {
			if second == 35 {
				c.lib.Row(script.GPU, 0, 79, 0, died.Add(3*time.Second)) // from the kernel log
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
		c.expect("end", health.Unhealthy, health.Unhealthy, health.Healthy)
		if first, second := c.device(0).XIDs.Codes, c.device(1).XIDs.Codes; first[79].Total != 1 || len(first) != 1 || second[48].Total != 1 ||
			len(second) != 1 {
			t.Errorf("XIDs of GPU 0 %v and GPU 1 %v, want one 79 and one 48", first, second)
		}
		c.xid(script.GPU, 2, 95, time.Now())
		c.wait(500 * time.Millisecond)
		c.expect("XID from the new engine", health.Unhealthy, health.Unhealthy, health.Unhealthy)
	})
}

// While the driver lists no GPU for a moment, all GPUs are lost, and none of them changes its state (OBSERVED.md#short-loss).
func TestMonitorShortLoss(t *testing.T) {
	testMonitor(t, 3, hostConfig(), func(c *monitorFixture) {
		for range 3 {
			c.setStatus(3, statusLost)
			c.pass(2, func(_ int, s *health.Snapshot) {
				if s.Source.Status != health.SourceDown {
					t.Errorf("source %+v", s.Source)
				}
				c.expect("lost", health.Healthy, health.Healthy, health.Healthy)
			})
			c.setStatus(3, statusOK)
			c.pass(3, func(_ int, s *health.Snapshot) {
				if s.Source.Status != health.SourceUp {
					t.Errorf("source %+v", s.Source)
				}
				c.expect("back", health.Healthy, health.Healthy, health.Healthy)
			})
		}
		c.setStatus(3, statusLost)
		c.pass(12, nil)
		c.expect("lost for long", health.Unhealthy, health.Unhealthy, health.Unhealthy)
	})
}

// A blind engine does not change the state of GPUs. The monitor restarts an embedded engine, not a host engine
// (OBSERVED.md#blind-engine).
func TestMonitorBlindEngine(t *testing.T) {
	for address, starts := range map[string]int{"": 2, "node:5555": 0} {
		t.Run("address "+address, func(t *testing.T) {
			cfg := testConfig()
			cfg.Address = address
			testMonitor(t, 2, cfg, func(c *monitorFixture) {
				c.lib.Blind()
				reported := false
				for i := range 240 { // the shortest pause before the engine is restarted is half a second
					c.wait(time.Second / 4)
					s := c.out.Load().Source
					reported = reported || s.Status == health.SourceDown && strings.Contains(s.Err, errBlind.Error())
					c.expect("blind", health.Healthy, health.Healthy)
					if i%4 == 3 {
						c.sampleGPUs(c.n)
					}
				}
				if s := c.out.Load().Source; !reported || (s.Status == health.SourceUp) != (address == "") {
					t.Errorf("reported %v, source %+v", reported, s)
				}
				c.expectCalls("dcgmStartEmbedded", starts)
				c.expectCalls("dcgmStopEmbedded", max(0, starts-1))
			})
		})
	}
}

// A blind DCGM still has the UUID of a lost GPU. The other GPUs, without UUIDs, keep their state.
func TestMonitorBlindEngineWithLostGPU(t *testing.T) {
	testMonitor(t, 3, hostConfig(), func(c *monitorFixture) {
		for gpu := range uint(3) {
			c.lib.Instance(script.GPU, gpu, 0, 0, script.InstanceInfo{GPU: gpuUUID(gpu)}) // DCGM's attributes
		}
		c.pass(3, nil)
		c.lib.Entity(script.GPU, 1, statusLost)
		c.pass(3, nil)
		c.lib.Blind()
		c.pass(60, func(int, *health.Snapshot) { c.expect("blind", health.Healthy, health.Unhealthy, health.Healthy) })
		if s := c.out.Load(); s.Source.Status != health.SourceDown || !strings.Contains(s.Source.Err, errBlind.Error()) {
			t.Errorf("source %+v", s.Source)
		}
	})
}

// await waits until the source has a status.
func (c *monitorFixture) await(want health.SourceStatus) {
	c.t.Helper()
	timeout := time.After(time.Minute)
	for {
		s, changed := c.out.Watch()
		if s != nil && s.Source.Status == want {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			c.t.Fatalf("the source is %+v, want %v", s.Source, want)
		}
	}
}
