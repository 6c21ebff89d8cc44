package kube

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zapcore"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

var errRefused = errors.New("connection refused")

func TestOneWriteForABurst(t *testing.T) {
	inRig(t, func(g *rig) {
		if c := g.condition(t); c.Status != corev1.ConditionTrue || c.Reason != reasonHealthy || len(g.writes) != 1 {
			t.Fatalf("after %d writes: %+v", len(g.writes), c)
		}
		g.show(gpu(0, nil, finding("xid-79", health.Unhealthy)), gpu(1, nil))
		g.pass(100 * time.Millisecond)
		g.show(gpu(0, nil, finding("lost", health.Unhealthy), finding("xid-79", health.Unhealthy)), gpu(1, nil))
		g.pass(settle)
		if c := g.condition(t); c.Status != corev1.ConditionFalse || c.Reason != "Lost" || len(g.writes) != 2 {
			t.Fatalf("after %d writes: %+v", len(g.writes), c)
		}
		g.show(gpu(0, nil), gpu(1, nil))
		g.show(gpu(0, nil, finding("lost", health.Unhealthy), finding("xid-79", health.Unhealthy)), gpu(1, nil))
		g.pass(2 * settle)
		if len(g.writes) != 2 {
			t.Errorf("%d writes though it has changed back at once", len(g.writes))
		}
	})
}

func TestHeartbeat(t *testing.T) {
	inRig(t, func(g *rig) {
		before := g.condition(t)
		for i := range 3600 { // a snapshot each second with another temperature, for an hour
			hot := finding("temperature", health.Degraded)
			hot.Reason = time.Duration(i).String()
			g.show(gpu(0, nil, hot), gpu(1, nil))
			g.pass(time.Second)
		}
		after := g.condition(t)
		if !after.LastTransitionTime.Equal(&before.LastTransitionTime) {
			t.Errorf("the transition moved from %v to %v", before.LastTransitionTime, after.LastTransitionTime)
		}
		if age := time.Since(after.LastHeartbeatTime.Time); age > heartbeat+time.Second {
			t.Errorf("the last heartbeat is %v old", age)
		}
		if n := len(g.writes); n < 12 || n > 14 { // the first, the change, and one each five minutes
			t.Errorf("%d writes in an hour", n)
		}
	})
}

func TestRestartWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI())
		g.start(t)
		sick := gpu(0, nil, finding("xid-79", health.Unhealthy))
		g.show(sick)
		g.pass(time.Minute)
		before := g.condition(t)
		g.stop()

		next := newRig(g.apiServer, sick)
		next.start(t)
		next.pass(time.Minute)
		next.show(sick)
		next.pass(time.Minute)
		if len(next.writes) != 1 || next.condition(t) != before {
			t.Errorf("%d writes, %+v, want what the first process wrote: %+v", len(next.writes), next.condition(t), before)
		}
		if got := next.all(); len(got) != 1 {
			t.Errorf("a restart made events: %q", got)
		}
		next.pass(3*time.Minute + 2*time.Second)
		if c := next.condition(t); len(next.writes) != 2 || !c.LastTransitionTime.Equal(&before.LastTransitionTime) {
			t.Errorf("%d writes, transition %v, want a heartbeat with the transition at %v", len(next.writes), c.LastTransitionTime, before.LastTransitionTime)
		}
	})
}

func TestOutage(t *testing.T) {
	inRig(t, func(g *rig) {
		g.failWith(errRefused)
		before := g.requests
		g.pass(time.Second)
		var flipped time.Time
		for i := range 5 { // the last one is unhealthy
			flipped = time.Now()
			if i%2 == 0 {
				g.show(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
			} else {
				g.show(gpu(0, nil), gpu(1, nil))
			}
			g.pass(2 * time.Minute)
		}
		g.show(gpu(0, nil, finding("lost", health.Unhealthy), finding("xid-79", health.Unhealthy)), gpu(1, nil))
		if n := g.requests - before; n > 2*(10+8) { // two parts, each once a minute but at first
			t.Errorf("%d requests in ten minutes of an outage", n)
		}
		if n := g.logged.FilterLevelExact(zapcore.WarnLevel).Len(); n != 2 { // the condition, the events
			t.Errorf("%d warnings: %v", n, g.logged.All())
		}
		if s := g.reporter.Status(); s.Condition == "" || s.Event == "" || s.Errors == 0 || s.Writes != 1 {
			t.Errorf("status %+v", s)
		}
		g.failWith(nil)
		g.pass(maxBackoff + settle)
		c := g.condition(t)
		if c.Status != corev1.ConditionFalse || c.Reason != "Lost" || len(g.writes) != 2 {
			t.Errorf("after %d writes: %+v", len(g.writes), c)
		}
		if late := c.LastTransitionTime.Sub(flipped); late > time.Second || late < -time.Second {
			t.Errorf("the transition is at %v, it was at %v", c.LastTransitionTime, flipped)
		}
		if got := g.all(); len(got) != 2 || got[0] != "node/node1 GPURecovered ×2" || got[1] != "node/node1 GPUUnhealthy ×3" {
			t.Errorf("events %q", got)
		}
		if s := g.reporter.Status(); s.Condition != "" || s.Event != "" || s.Writes != 2 {
			t.Errorf("status %+v", s)
		}

		// The next one begins with short pauses again.
		g.failWith(errRefused)
		g.show(gpu(0, nil, finding("xid-79", health.Unhealthy)), gpu(1, nil, finding("lost", health.Unhealthy)))
		g.pass(settle + minBackoff/2)
		g.failWith(nil)
		g.pass(settle + minBackoff)
		if c := g.condition(t); len(g.writes) != 3 || len(g.all()) != 3 {
			t.Errorf("after %d writes: %+v, events %q", len(g.writes), c, g.all())
		}
	})
}

func TestDeniedIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI())
		g.failWith(refuse(403, "Forbidden"))
		g.start(t)
		g.show(gpu(0, nil, finding("lost", health.Unhealthy)))
		g.pass(time.Hour / 2)
		if n := g.logged.FilterLevelExact(zapcore.WarnLevel).Len(); n != 2 {
			t.Errorf("%d warnings: %v", n, g.logged.All())
		}
		if g.requests > 2*40 {
			t.Errorf("%d requests in half an hour", g.requests)
		}
		g.failWith(nil) // the role is there at last
		g.pass(2 * maxBackoff)
		if c := g.condition(t); c.Reason != "Lost" || len(g.all()) != 1 {
			t.Errorf("%+v, events %q", c, g.all())
		}
	})
}

func TestReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI())
		g.enable(false)
		g.start(t)
		g.show(gpu(0, map[int]uint64{31: 7}, finding("lost", health.Unhealthy)))
		g.pass(time.Hour)
		if g.requests != 0 {
			t.Fatalf("%d requests while disabled", g.requests)
		}
		g.enable(true)
		g.pass(2 * time.Second)
		if c := g.condition(t); c.Reason != "Lost" || len(g.all()) != 0 {
			t.Errorf("%+v, events %q, want none of before", c, g.all())
		}
		g.enable(true) // another part of the section has changed
		g.pass(2 * time.Second)
		if len(g.writes) != 1 {
			t.Errorf("%d writes", len(g.writes))
		}
		g.enable(false)
		g.pass(2 * time.Second)
		if len(g.conditions) != 0 {
			t.Errorf("left behind: %+v", g.conditions)
		}
		g.pass(time.Hour)
		g.enable(true)
		g.pass(2 * time.Second)
		if c := g.condition(t); time.Since(c.LastTransitionTime.Time) > time.Minute {
			t.Errorf("a new condition with a transition of %v ago", time.Since(c.LastTransitionTime.Time))
		}
	})
}

func TestNoClientYet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI())
		open, tries := g.reporter.open, 0
		g.reporter.open = func(k string) (*client, error) {
			if tries++; tries < 5 {
				return nil, errRefused
			}
			return open(k)
		}
		g.start(t)
		g.show(gpu(0, nil, finding("lost", health.Unhealthy)))
		g.pass(time.Minute)
		if c := g.condition(t); c.Reason != "Lost" || len(g.all()) != 1 || g.logged.FilterLevelExact(zapcore.WarnLevel).Len() != 1 {
			t.Errorf("%+v, events %q, log %v", c, g.all(), g.logged.All())
		}
	})
}

func TestConnectSaysWhatIsMissing(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for _, kubeconfig := range []string{"", "/does/not/exist"} {
		if _, err := connect(kubeconfig); err == nil || !strings.Contains(err.Error(), "health.kubernetes.kubeconfig") {
			t.Errorf("%q: %v", kubeconfig, err)
		}
	}
}
