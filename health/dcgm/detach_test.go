//go:build cgo && linux

package dcgm

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/dcgm/internal/script"
	"github.com/gpu-node-agent/gpu-node-agent/health/monitor"
)

// causes returns the causes of each GPU's findings, joined by commas.
func (c *monitorFixture) causes() (all []string) {
	for gpu := range c.n {
		var causes []string
		for _, f := range c.device(gpu).Verdict.Findings {
			causes = append(causes, f.Cause)
		}
		all = append(all, strings.Join(causes, ","))
	}
	return all
}

func (c *monitorFixture) expectCauses(when string, want ...string) {
	c.t.Helper()
	if got := c.causes(); strings.Join(got, "|") != strings.Join(want, "|") {
		c.t.Errorf("%s: causes %q, want %q", when, got, want)
	}
}

// detach makes the monitor detach the driver.
func (c *monitorFixture) detach(d time.Duration) {
	c.t.Helper()
	if _, err := c.m.Detach(context.Background(), d); err != nil {
		c.t.Fatal(err)
	}
}

const detachedCause = health.CauseReleased

// A GPU is reset while the driver is detached: by stopping an embedded engine, or by a call to a host engine.
func TestMonitorDetach(t *testing.T) {
	for address, want := range map[string]map[string]int{
		"":          {"dcgmStopEmbedded": 1, "dcgmStartEmbedded": 2, "dcgmDetachDriver": 0, "dcgmAttachDriver": 0},
		"node:5555": {"dcgmDisconnect": 1, "dcgmConnect_v2": 2, "dcgmDetachDriver": 1, "dcgmAttachDriver": 1},
	} {
		t.Run("address "+address, func(t *testing.T) {
			cfg := testConfig()
			cfg.Address = address
			testMonitor(t, 3, cfg, func(c *monitorFixture) {
				c.resetWhileDetached(address != "", want)
			})
		})
	}
}

// resetWhileDetached resets a GPU while the driver is detached, and checks the verdicts and the number of calls by function.
func (c *monitorFixture) resetWhileDetached(hostEngine bool, calls map[string]int) {
	t := c.t
	t.Helper()
	c.lib.Int(script.GPU, 1, uint(health.FieldRecoveryAction), int64(health.RecoveryReset), 0, time.Now())
	c.xid(script.GPU, 1, 95, time.Now())
	c.xid(script.GPU, 2, 48, time.Now())
	c.wait(time.Second)
	c.expectCauses("before", "", "xid-95,recovery-action", "xid-48")

	d, err := c.m.Detach(context.Background(), 30*time.Minute)
	if err != nil || d.Already || d.EngineUnasked || d.Until.Sub(d.Since) != 30*time.Minute {
		t.Fatalf("%+v, %v", d, err)
	}
	if c.lib.Detached() != hostEngine || c.lib.Initialized() || c.lib.Leaked() != 0 {
		t.Errorf("detached %v, initialized %v, %d left", c.lib.Detached(), c.lib.Initialized(), c.lib.Leaked())
	}
	opens := c.lib.Calls("dcgmInit")
	c.pass(600, nil)
	c.expectCauses("detached", detachedCause, "xid-95,"+detachedCause+",recovery-action", "xid-48,"+detachedCause)
	c.expectCalls("dcgmInit", opens)

	a, err := c.m.Attach(context.Background())
	if err != nil || a.Already || a.Status != health.SourceUp {
		t.Fatalf("%+v, %v", a, err)
	}
	c.pass(3, nil)
	// The driver no longer asks to reset GPU 1, so GPU 1 was reset. For GPU 2 there is no evidence.
	c.expectCauses("attached", "", "", "xid-48")
	for function, n := range calls {
		c.expectCalls(function, n)
	}
	if c.lib.Detached() {
		t.Error("the engine has not attached the driver")
	}
	for gpu := range c.n {
		if n := len(c.device(gpu).Memory.Trips); n > 1 || gpu == 0 && n > 0 {
			t.Errorf("GPU %d has tripped %d times", gpu, n)
		}
	}
}

// GPUs can stay detached for some time after attach (OBSERVED.md#driver-attach). They stay withheld until a poll sees them.
func TestMonitorDriverReturnsLate(t *testing.T) {
	testMonitor(t, 2, hostConfig(), func(c *monitorFixture) {
		c.detach(time.Hour)
		c.setStatus(c.n, statusDetached)
		if a, err := c.m.Attach(context.Background()); err != nil || a.Status != health.SourceDown || a.Err != monitor.ErrNotBack.Error() {
			t.Fatalf("%+v, %v", a, err)
		}
		// The engine attached the driver without GPUs, so it has to detach it before another attach.
		c.expectCalls("dcgmDetachDriver", 2)
		c.expectCalls("dcgmAttachDriver", 2)
		down := false
		c.pass(60, func(_ int, s *health.Snapshot) {
			down = down || s.Source.Status == health.SourceDown && s.Source.Err == monitor.ErrNotBack.Error()
			c.expectCauses("not back", detachedCause, detachedCause)
		})
		if !down {
			t.Error("the source was not down with ErrNotBack")
		}
		c.setStatus(c.n, statusOK)
		c.pass(31, nil)
		c.expectCauses("returned", "", "")
		for gpu := range c.n {
			if d := c.device(gpu); d.Verdict.State != health.Healthy || len(d.Memory.Trips) > 0 {
				t.Errorf("GPU %d: %+v", gpu, d.Verdict)
			}
		}
	})
}

// The monitor restarts an embedded engine that starts without a driver (OBSERVED.md#empty-engine).
func TestMonitorDriverMissing(t *testing.T) {
	testMonitor(t, 2, testConfig(), func(c *monitorFixture) {
		c.detach(time.Minute)
		for gpu := range c.n {
			c.lib.Drop(script.GPU, gpu)
		}
		c.pass(100, nil) // longer than the detach
		if s := c.out.Load().Source; s.Status != health.SourceDown || s.Err != monitor.ErrNotBack.Error() {
			t.Errorf("source %+v", s)
		}
		c.expectCauses("no driver", detachedCause, detachedCause)
		c.addGPUs(2)
		c.pass(31, nil)
		c.expect("back", health.Healthy, health.Healthy)
	})
}

// Detach of an engine that cannot detach fails without any change.
func TestMonitorDetachOldEngine(t *testing.T) {
	b := newFixture(t, 0)
	synctest.Test(t, func(*testing.T) {
		b.lib.Engine("4.4.2")
		c := startMonitor(b, 2, hostConfig(), time.Second, 10*time.Second)
		defer c.stop()
		c.pass(3, nil)
		seq := c.out.Load().Seq
		_, err := c.m.Detach(context.Background(), time.Hour)
		if !errors.Is(err, errDetachOld) || !strings.Contains(err.Error(), "4.4.2") {
			t.Errorf("Detach: %v, want errDetachOld with the version", err)
		}
		if c.out.Load().Seq != seq || b.lib.Calls("dcgmDetachDriver") != 0 {
			t.Error("a new snapshot, or a call of dcgmDetachDriver")
		}
		if a, err := c.m.Attach(context.Background()); err != nil || !a.Already || b.lib.Calls("dcgmAttachDriver") != 0 {
			t.Errorf("Attach: %+v, %v", a, err)
		}
		if n := c.out.Load().Source.Reconnects; n != 0 {
			t.Errorf("%d reconnects", n)
		}
	})
}

func TestMonitorDetachFails(t *testing.T) {
	testMonitor(t, 2, hostConfig(), func(c *monitorFixture) {
		c.lib.Fail("dcgmDetachDriver", errTimeout, 1)
		_, err := c.m.Detach(context.Background(), time.Hour)
		if err == nil || !strings.Contains(err.Error(), "node:5555") || !strings.Contains(err.Error(), "Timeout") {
			t.Errorf("Detach: %v, want the address and DCGM's error", err)
		}
		c.pass(3, nil)
		c.expect("after failed detach", health.Healthy, health.Healthy)
		if s := c.out.Load().Source; s.Status != health.SourceUp {
			t.Errorf("source %+v", s)
		}
		c.expectCalls("dcgmAttachDriver", 1)
	})
}

// A restarted agent does not know that the engine has detached the driver; attach works nevertheless.
func TestMonitorAttachAfterRestart(t *testing.T) {
	b := newFixture(t, 0)
	synctest.Test(t, func(*testing.T) {
		cfg := hostConfig()
		c := startMonitor(b, 2, cfg, time.Second, 10*time.Second)
		c.pass(3, nil)
		c.detach(time.Hour)
		c.stop()
		if !b.lib.Detached() {
			t.Error("the engine attached the driver when the agent ended")
		}
		c = startMonitor(b, 2, cfg, time.Second, 10*time.Second)
		defer c.stop()
		c.pass(5, nil)
		if d := c.out.Load().Devices; len(d) != 0 { // an engine without a driver has no UUIDs
			t.Errorf("devices %+v", d)
		}
		a, err := c.m.Attach(context.Background())
		if err != nil || !a.Already || a.Status != health.SourceUp || b.lib.Detached() {
			t.Fatalf("%+v, %v, detached %v", a, err, b.lib.Detached())
		}
		c.pass(3, nil)
		c.expect("attached", health.Healthy, health.Healthy)
		b.expectCalls("dcgmAttachDriver", 1)
		b.lib.Fail("dcgmAttachDriver", errTimeout, 1) // the driver is attached already
		if a, err := c.m.Attach(context.Background()); err != nil || a.Status != health.SourceUp {
			t.Errorf("failed attach: %+v, %v", a, err)
		}
	})
}

// While the call to detach hangs, the source is stalled and the devices are withheld.
func TestMonitorDetachHangs(t *testing.T) {
	b := newFixture(t, 0)
	cfg := testConfig()
	cfg.Address, cfg.Interval = "node:5555", time.Millisecond
	c := startMonitor(b, 2, cfg, time.Millisecond, 5*time.Millisecond)
	t.Cleanup(c.stop)
	c.await(health.SourceUp)
	b.lib.Hang("dcgmDetachDriver")
	done := make(chan error, 1)
	go func() {
		_, err := c.m.Detach(context.Background(), time.Hour)
		done <- err
	}()
	b.lib.WaitHanging()
	c.await(health.SourceStalled)
	c.expectCauses("hanging", detachedCause, detachedCause)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.m.Detach(ctx, time.Hour); err == nil || c.out.Load().Source.Status != health.SourceStalled {
		t.Errorf("second Detach: %v", err)
	}
	b.lib.Release()
	if err := <-done; err != nil {
		t.Error(err)
	}
	c.await(health.SourceDetached)
	b.expectCalls("dcgmDetachDriver", 1)
}

func TestOlderThan(t *testing.T) {
	for version, want := range map[string]bool{
		"": false, "4": false, "4.4.2": true, "4.5.0": false, "4.10.0": false, "3.3.9": true, "5.0.0": false, "x.y": false,
	} {
		if olderThan(version, 4, 5) != want {
			t.Errorf("%q older than 4.5: %v", version, !want)
		}
	}
}
