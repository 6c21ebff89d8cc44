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

// standing returns the causes of each GPU, by commas.
func (c *chain) standing() (all []string) {
	for gpu := range c.n {
		var causes []string
		for _, f := range c.device(gpu).Verdict.Findings {
			causes = append(causes, f.Cause)
		}
		all = append(all, strings.Join(causes, ","))
	}
	return all
}

func (c *chain) stands(when string, want ...string) {
	c.t.Helper()
	if got := c.standing(); strings.Join(got, "|") != strings.Join(want, "|") {
		c.t.Errorf("%s: %q stand, want %q", when, got, want)
	}
}

const released = health.CauseReleased

// The driver is let go of, a GPU is reset, and it is taken back: by an engine of our own, which ends and is started
// anew, and by another's, which is told.
func TestChainDetach(t *testing.T) {
	for address, want := range map[string]map[string]int{
		"":          {"dcgmStopEmbedded": 1, "dcgmStartEmbedded": 2, "dcgmDetachDriver": 0, "dcgmAttachDriver": 0},
		"node:5555": {"dcgmDisconnect": 1, "dcgmConnect_v2": 2, "dcgmDetachDriver": 1, "dcgmAttachDriver": 1},
	} {
		t.Run("address "+address, func(t *testing.T) {
			b := fresh(t)
			synctest.Test(t, func(*testing.T) {
				cfg := config()
				cfg.Address = address
				c := monitored(b, 3, cfg, time.Second, 10*time.Second)
				defer c.stop()
				c.pass(3, nil)
				b.lib.Int(script.GPU, 1, uint(health.FieldRecoveryAction), int64(health.RecoveryReset), 0, time.Now())
				b.xid(script.GPU, 1, 95, time.Now())
				b.xid(script.GPU, 2, 48, time.Now())
				c.wait(time.Second) // the engine samples nothing meanwhile
				c.stands("before", "", "xid-95,recovery-action", "xid-48")

				d, err := c.m.Detach(context.Background(), 30*time.Minute)
				if err != nil || d.Already || d.Unasked || d.Until.Sub(d.Since) != 30*time.Minute {
					t.Fatalf("%+v, %v", d, err)
				}
				if b.lib.Detached() != (address != "") || b.lib.Initialized() || b.lib.Leaked() != 0 {
					t.Errorf("detached %v, initialized %v, %d left", b.lib.Detached(), b.lib.Initialized(), b.lib.Leaked())
				}
				opens := b.lib.Calls("dcgmInit")
				c.pass(600, nil) // nothing is sampled that way, but by the script
				c.stands("let go", released, "xid-95,"+released+",recovery-action", "xid-48,"+released)
				if n := b.lib.Calls("dcgmInit"); n != opens {
					t.Errorf("the library was used %d times while the driver is let go of", n-opens)
				}

				a, err := c.m.Attach(context.Background())
				if err != nil || a.Already || a.Status != health.SourceUp {
					t.Fatalf("%+v, %v", a, err)
				}
				c.pass(3, nil)
				// The driver took back its word on GPU 1: it was reset. Of GPU 2 there is no evidence of that.
				c.stands("back", "", "", "xid-48")
				for function, n := range want {
					if got := b.lib.Calls(function); got != n {
						t.Errorf("%s was called %d times, want %d", function, got, n)
					}
				}
				if b.lib.Detached() {
					t.Error("the engine has not taken the driver back")
				}
				for gpu := range c.n {
					if n := len(c.device(gpu).Verdict.Trips); n > 1 || gpu == 0 && n > 0 {
						t.Errorf("GPU %d has tripped %d times", gpu, n)
					}
				}
			})
		})
	}
}

// After the engine was told to take the driver back, its GPUs are detached for some seconds more: that is no fault of
// theirs, and nobody is given one that was not seen.
func TestChainDetachedForLonger(t *testing.T) {
	b := fresh(t)
	synctest.Test(t, func(*testing.T) {
		c := ofHostEngine(b, 2)
		defer c.stop()
		c.pass(3, nil)
		if _, err := c.m.Detach(context.Background(), time.Hour); err != nil {
			t.Fatal(err)
		}
		for gpu := range c.n {
			b.lib.Entity(script.GPU, gpu, statusDetached)
		}
		if a, err := c.m.Attach(context.Background()); err != nil || a.Status != health.SourceDown || a.Err != monitor.ErrNotBack.Error() {
			t.Fatalf("%+v, %v", a, err)
		}
		// The engine has the driver and no GPU: that it is told again helps only if it lets go before.
		if d, a := b.lib.Calls("dcgmDetachDriver"), b.lib.Calls("dcgmAttachDriver"); d != 2 || a != 2 {
			t.Errorf("told to let go %d times, to take back %d times", d, a)
		}
		down := false
		c.pass(60, func(_ int, s *health.Snapshot) {
			down = down || s.Source.Status == health.SourceDown && s.Source.Err == monitor.ErrNotBack.Error()
			c.stands("not back", released, released)
		})
		if !down {
			t.Error("nobody says what is the matter")
		}
		for gpu := range c.n {
			b.lib.Entity(script.GPU, gpu, statusOK)
		}
		c.pass(31, nil)
		c.stands("back", "", "")
		for gpu := range c.n {
			if d := c.device(gpu); d.Verdict.State != health.Healthy || len(d.Verdict.Trips) > 0 {
				t.Errorf("GPU %d: %+v", gpu, d.Verdict)
			}
		}
	})
}

// An engine of ours that starts while there is no driver shows no GPU, and never looks again: it is started anew.
func TestChainDriverNotBack(t *testing.T) {
	b := fresh(t)
	synctest.Test(t, func(*testing.T) {
		c := monitored(b, 2, config(), time.Second, 10*time.Second)
		defer c.stop()
		c.pass(3, nil)
		if _, err := c.m.Detach(context.Background(), time.Minute); err != nil {
			t.Fatal(err)
		}
		for gpu := range c.n {
			b.lib.Drop(script.GPU, gpu)
		}
		c.pass(100, nil) // the minute is up
		if s := c.out.Load().Source; s.Status != health.SourceDown || s.Err != monitor.ErrNotBack.Error() {
			t.Errorf("source %+v", s)
		}
		c.stands("no driver", released, released)
		b.gpus(2)
		c.pass(31, nil)
		c.expect("back", health.Healthy, health.Healthy)
	})
}

// What an engine cannot do is said before anything is done, and what it refuses is taken back.
func TestChainDetachRefused(t *testing.T) {
	b := fresh(t)
	synctest.Test(t, func(*testing.T) {
		b.lib.Engine("4.4.2")
		c := ofHostEngine(b, 2)
		defer c.stop()
		c.pass(3, nil)
		seq := c.out.Load().Seq
		_, err := c.m.Detach(context.Background(), time.Hour)
		if err == nil || !strings.Contains(err.Error(), "is DCGM 4.4.2 and cannot let go of the driver") || !strings.Contains(err.Error(), "systemctl stop") {
			t.Errorf("an engine that is too old: %v", err)
		}
		if c.out.Load().Seq != seq || b.lib.Calls("dcgmDetachDriver") != 0 {
			t.Error("something was done all the same")
		}
		if a, err := c.m.Attach(context.Background()); err != nil || !a.Already || b.lib.Calls("dcgmAttachDriver") != 0 {
			t.Errorf("attach with an engine that is too old: %+v, %v", a, err)
		}
		if n := c.out.Load().Source.Reconnects; n != 0 {
			t.Errorf("%d reconnections", n)
		}
	})
}

func TestChainDetachFails(t *testing.T) {
	b := fresh(t)
	synctest.Test(t, func(*testing.T) {
		c := ofHostEngine(b, 2)
		defer c.stop()
		c.pass(3, nil)
		b.lib.Fail("dcgmDetachDriver", errTimeout, 1)
		_, err := c.m.Detach(context.Background(), time.Hour)
		if err == nil || !strings.Contains(err.Error(), "the host engine at node:5555 does not let go of the driver: Timeout") {
			t.Errorf("%v", err)
		}
		c.pass(3, nil)
		c.expect("refused", health.Healthy, health.Healthy)
		if s := c.out.Load().Source; s.Status != health.SourceUp {
			t.Errorf("source %+v", s)
		}
		if n := b.lib.Calls("dcgmAttachDriver"); n != 1 {
			t.Errorf("the engine was asked %d times to take back what it may have let go of", n)
		}
	})
}

// An agent that was restarted does not know that the engine was told to let go: attach says it all the same.
func TestChainAttachAfterRestart(t *testing.T) {
	b := fresh(t)
	synctest.Test(t, func(*testing.T) {
		cfg := config()
		cfg.Address = "node:5555"
		c := monitored(b, 2, cfg, time.Second, 10*time.Second)
		c.pass(3, nil)
		if _, err := c.m.Detach(context.Background(), time.Hour); err != nil {
			t.Fatal(err)
		}
		c.stop()
		if !b.lib.Detached() {
			t.Error("the end of the agent made the engine take the driver back")
		}
		c = monitored(b, 2, cfg, time.Second, 10*time.Second)
		defer c.stop()
		c.pass(5, nil)
		if d := c.out.Load().Devices; len(d) != 0 { // an engine without a driver cannot name any
			t.Errorf("devices %+v", d)
		}
		a, err := c.m.Attach(context.Background())
		if err != nil || !a.Already || a.Status != health.SourceUp || b.lib.Detached() {
			t.Fatalf("%+v, %v, detached %v", a, err, b.lib.Detached())
		}
		c.pass(3, nil)
		c.expect("attached", health.Healthy, health.Healthy)
		if n := b.lib.Calls("dcgmAttachDriver"); n != 1 {
			t.Errorf("told %d times", n)
		}
		b.lib.Fail("dcgmAttachDriver", errTimeout, 1) // the engine has the driver: nothing depends on it
		if a, err := c.m.Attach(context.Background()); err != nil || a.Status != health.SourceUp {
			t.Errorf("attach that fails: %+v, %v", a, err)
		}
	})
}

// The engine hangs while it is asked: that is shown, and the devices are kept from pods meanwhile.
func TestDetachThatHangs(t *testing.T) {
	b := fresh(t)
	cfg := config()
	cfg.Address, cfg.Interval = "node:5555", time.Millisecond
	c := monitored(b, 2, cfg, time.Millisecond, 5*time.Millisecond)
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
	c.stands("hanging", released, released)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.m.Detach(ctx, time.Hour); err == nil || c.out.Load().Source.Status != health.SourceStalled {
		t.Errorf("said again: %v", err)
	}
	b.lib.Release()
	if err := <-done; err != nil {
		t.Error(err)
	}
	c.await(health.SourceDetached)
	if n := b.lib.Calls("dcgmDetachDriver"); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

func TestBefore(t *testing.T) {
	for version, want := range map[string]bool{
		"": false, "4": false, "4.4.2": true, "4.5.0": false, "4.10.0": false, "3.3.9": true, "5.0.0": false, "x.y": false,
	} {
		if before(version, 4, 5) != want {
			t.Errorf("%q is taken to be before 4.5: %v", version, !want)
		}
	}
}
