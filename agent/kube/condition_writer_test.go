package kube

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zapcore"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

var errRefused = errors.New("connection refused")

func TestConditionChangesAreOneWrite(t *testing.T) {
	withRig(t, func(g *rig) {
		g.wantCondition(t, corev1.ConditionTrue, reasonHealthy, 1)
		g.setDevices(gpu(0, nil, finding("xid-79", health.Unhealthy)), gpu(1, nil))
		g.advance(100 * time.Millisecond)
		g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy), finding("xid-79", health.Unhealthy)), gpu(1, nil))
		g.advance(settleDelay)
		g.wantCondition(t, corev1.ConditionFalse, "Lost", 2)
		g.setDevices(gpu(0, nil), gpu(1, nil))
		g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy), finding("xid-79", health.Unhealthy)), gpu(1, nil))
		g.advance(2 * settleDelay)
		if g.writes() != 2 {
			t.Errorf("%d writes after a change that was reverted at once", g.writes())
		}
	})
}

// A source that fails, or fails in another way, is written at once, also while the reason is a device's.
func TestConditionFollowsSource(t *testing.T) {
	withRig(t, func(g *rig) {
		sick := gpu(0, nil, finding("xid-79", health.Unhealthy))
		g.setDevices(sick)
		g.advance(2 * settleDelay)
		for n, status := range []health.SourceStatus{health.SourceDown, health.SourceStalled} {
			s := snapshotOf(sick)
			s.Source.Status = status
			g.snapshots.Store(s)
			g.advance(2 * settleDelay)
			if c := g.condition(t); g.writes() != 3+n || c.Reason != "Xid79" || !strings.Contains(c.Message, fmt.Sprintf(" is %s since ", status)) {
				t.Errorf("%d writes: %+v", g.writes(), c)
			}
		}
	})
}

// The message names the pods that keep free GPUs from being scheduled, also when there is no room for all devices.
func TestConditionNamesUnschedulable(t *testing.T) {
	withRig(t, func(g *rig) {
		var devices []health.DeviceState
		for i := range 30 { // each differs, so that each has an entry of its own
			devices = append(devices, gpu(i, nil, finding("xid-79", health.Unhealthy), finding(fmt.Sprintf("cause-%d", i), health.Unhealthy)))
		}
		g.setDevices(devices...)
		g.advance(2 * settleDelay)
		for n, text := range []string{"end pod ml/a", "end pods ml/a and ml/b", strings.Repeat("long", maxMessage), ""} {
			g.lost.Store(new(slices.Repeat([]string{text}, min(len(text), 2))))
			g.setDevices(devices...)
			g.advance(lostInterval)
			g.wantCondition(t, corev1.ConditionFalse, "Xid79", 3+n)
			message := g.condition(t).Message
			named := strings.Contains(message, "; "+text[:min(len(text), 100)])
			if !named || len(message) > maxMessage || !strings.Contains(message, "GPU 0: xid-79") {
				t.Errorf("%d bytes: %s", len(message), message)
			}
		}
	})
}

// On a full node the unschedulable devices change with every pod. The writes are bounded, and one with a new finding is prompt.
func TestConditionWithChangingPods(t *testing.T) {
	withRig(t, func(g *rig) {
		sick := gpu(0, nil, finding("xid-79", health.Unhealthy))
		for i := range 1800 {
			g.lost.Store(&[]string{fmt.Sprint("end pod ml/", i)})
			g.setDevices(sick, gpu(1, nil))
			g.advance(2 * time.Second)
		}
		if n := g.writes(); n < 59 || n > 62 {
			t.Errorf("%d writes in an hour", n)
		}
		writes := g.writes()
		g.setDevices(sick, gpu(1, nil, finding("lost", health.Unhealthy)))
		g.advance(settleDelay)
		g.wantCondition(t, corev1.ConditionFalse, "Xid79", writes+1)
		if m := g.condition(t).Message; !strings.HasSuffix(m, "end pod ml/1799") {
			t.Errorf("message %s", m)
		}
	})
}

func TestConditionHeartbeat(t *testing.T) {
	withRig(t, func(g *rig) {
		before := g.condition(t)
		for i := range 3600 { // an hour of snapshots that differ in a measured value
			hot := finding("temperature", health.Degraded)
			hot.Reason = time.Duration(i).String()
			g.setDevices(gpu(0, nil, hot), gpu(1, nil))
			g.advance(time.Second)
		}
		after := g.condition(t)
		if !after.LastTransitionTime.Equal(&before.LastTransitionTime) {
			t.Errorf("transition time moved from %v to %v", before.LastTransitionTime, after.LastTransitionTime)
		}
		if age := time.Since(after.LastHeartbeatTime.Time); age > heartbeatInterval+time.Second {
			t.Errorf("last heartbeat is %v old", age)
		}
		if n := g.writes(); n < 12 || n > 14 { // the first, the change, and one per five minutes
			t.Errorf("%d writes in an hour", n)
		}
	})
}

// endedRig returns a process that has ended after it had reported the devices for a minute, and its condition.
func endedRig(t *testing.T, devices ...health.DeviceState) (g *rig, last corev1.NodeCondition) {
	t.Helper()
	g = newRig(newAPI(t))
	g.start(t)
	g.setDevices(devices...)
	g.advance(time.Minute)
	last = g.condition(t)
	g.stop()
	return g, last
}

func TestRestartKeepsCondition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sick := gpu(0, nil, finding("xid-79", health.Unhealthy))
		g, before := endedRig(t, sick)

		next := newRig(g.apiServer, sick)
		next.start(t)
		next.advance(time.Minute)
		next.setDevices(sick)
		next.advance(time.Minute)
		if next.writes() != 1 || next.condition(t) != before {
			t.Errorf("%d writes, %+v, want the first process's: %+v", next.writes(), next.condition(t), before)
		}
		next.wantEvents(t, "node/node1 GPUUnhealthy ×1")
		next.advance(3*time.Minute + 2*time.Second)
		if c := next.condition(t); next.writes() != 2 || !c.LastTransitionTime.Equal(&before.LastTransitionTime) {
			t.Errorf("%d writes, transition %v, want a heartbeat with the transition at %v", next.writes(), c.LastTransitionTime,
				before.LastTransitionTime)
		}
	})
}

// What has changed since the earlier process is written at once, also if the status is the same.
func TestRestartWritesChange(t *testing.T) {
	xid79 := finding("xid-79", health.Unhealthy)
	for name, devices := range map[string][]health.DeviceState{
		"status":  {gpu(0, nil), gpu(1, nil)},
		"reason":  {gpu(0, nil, finding("lost", health.Unhealthy), xid79), gpu(1, nil)},
		"message": {gpu(0, nil), gpu(1, nil, xid79)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g, before := endedRig(t, gpu(0, nil, xid79), gpu(1, nil))

				next := newRig(g.apiServer)
				next.start(t)
				next.setDevices(devices...)
				next.advance(2 * settleDelay)
				after := next.condition(t)
				if want, _ := conditionOf(snapshotOf(devices...)); next.writes() != 2 || after.Reason != want.reason ||
					after.Message != want.message {
					t.Errorf("%d writes: %+v", next.writes(), after)
				}
				if moved := !after.LastTransitionTime.Equal(&before.LastTransitionTime); moved != (name == "status") {
					t.Errorf("transition at %v, was at %v", after.LastTransitionTime, before.LastTransitionTime)
				}
			})
		})
	}
}

// The condition of the earlier process is read before it is written, also if that fails at first.
func TestRestartReadsCondition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sick := gpu(0, nil, finding("xid-79", health.Unhealthy))
		g, before := endedRig(t, sick)

		g.fail = func(r *http.Request) error {
			if r.Method == "GET" {
				return apiError(503, metav1.StatusReasonServiceUnavailable)
			}
			return nil
		}
		next := newRig(g.apiServer, sick)
		next.start(t)
		next.setDevices(sick)
		next.advance(time.Minute)
		if s := next.reporter.Status(); next.writes() != 1 || s.ConditionErr == "" {
			t.Errorf("%d writes, %+v", next.writes(), s)
		}
		next.failWith(nil)
		next.advance(heartbeatInterval)
		if c := next.condition(t); next.writes() != 2 || !c.LastTransitionTime.Equal(&before.LastTransitionTime) {
			t.Errorf("%d writes, transition %v, want %v", next.writes(), c.LastTransitionTime, before.LastTransitionTime)
		}
	})
}

// A restarted agent does not know the holders at first. It neither removes the pods from the message, nor waits for ever.
func TestRestartKeepsPodsInCondition(t *testing.T) {
	for known, writes := range map[bool]int{true: 1, false: 2} {
		synctest.Test(t, func(t *testing.T) {
			g := newRig(newAPI(t))
			g.lost.Store(&[]string{"end pod ml/train"})
			g.start(t)
			sick := gpu(0, nil, finding("xid-79", health.Unhealthy))
			g.setDevices(sick)
			g.advance(time.Minute)
			g.stop()

			next := newRig(g.apiServer, sick)
			next.lost.Store(nil)
			next.start(t)
			next.setDevices(sick)
			next.advance(holdersDelay / 2)
			if known {
				next.lost.Store(g.lost.Load())
			}
			next.advance(time.Minute) // without another snapshot
			if c := next.condition(t); next.writes() != writes || strings.Contains(c.Message, "ml/train") != known {
				t.Errorf("holders known: %v: %d writes, want %d: %s", known, next.writes(), writes, c.Message)
			}
		})
	}
}

func TestOutage(t *testing.T) {
	for _, failure := range []error{
		errRefused, apiError(403, metav1.StatusReasonForbidden), apiError(503, metav1.StatusReasonServiceUnavailable),
	} {
		withRig(t, func(g *rig) { testOutage(t, g, failure) })
	}
}

func testOutage(t *testing.T, g *rig, failure error) {
	t.Helper()
	g.failWith(failure)
	before := len(g.requests)
	g.advance(time.Second)
	var flipped time.Time
	for i := range 5 { // the last one is unhealthy
		flipped = time.Now()
		if i%2 == 0 {
			g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy)), gpu(1, nil))
		} else {
			g.setDevices(gpu(0, nil), gpu(1, nil))
		}
		g.advance(2 * time.Minute)
	}
	g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy), finding("xid-79", health.Unhealthy)), gpu(1, nil))
	if n := len(g.requests) - before; n > 2*(20+8) { // two writers, each twice a minute at most after the first retries
		t.Errorf("%d requests in ten minutes of an outage", n)
	}
	if n := g.logged.FilterLevelExact(zapcore.WarnLevel).Len(); n != 2 { // the condition, the events
		t.Errorf("%d warnings: %v", n, g.logged.All())
	}
	// each request is made once
	if s := g.reporter.Status(); s.ConditionErr == "" || s.EventErr == "" || s.Errors != uint64(len(g.requests)-before) || s.Writes != 1 {
		t.Errorf("status %+v after %d requests", s, len(g.requests)-before)
	}
	g.failWith(nil)
	g.advance(maxBackoff + settleDelay)
	g.wantCondition(t, corev1.ConditionFalse, "Lost", 2)
	if at := g.condition(t).LastTransitionTime; at.Sub(flipped).Abs() > time.Second {
		t.Errorf("transition time %v, want %v", at, flipped)
	}
	g.wantEvents(t, "node/node1 GPURecovered ×2", "node/node1 GPUUnhealthy ×1", "node/node1 GPUUnhealthy ×3") // the one is XID 79
	if s := g.reporter.Status(); s.ConditionErr != "" || s.EventErr != "" || s.Writes != 2 {
		t.Errorf("status %+v", s)
	}

	// The next outage starts with short pauses again.
	g.failWith(failure)
	g.setDevices(gpu(0, nil, finding("xid-79", health.Unhealthy)), gpu(1, nil, finding("lost", health.Unhealthy)))
	g.advance(settleDelay + minBackoff/4)
	g.failWith(nil)
	g.advance(settleDelay + minBackoff)
	g.wantCondition(t, corev1.ConditionFalse, "Xid79", 3)
	g.wantEvents(t, "node/node1 GPURecovered ×2", "node/node1 GPUUnhealthy ×1", "node/node1 GPUUnhealthy ×1", "node/node1 GPUUnhealthy ×3")
}

func TestDisableAndEnable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI(t))
		g.enable(false)
		g.start(t)
		g.setDevices(gpu(0, map[int]uint64{31: 7}, finding("lost", health.Unhealthy)))
		g.advance(time.Hour)
		if len(g.requests) != 0 {
			t.Fatalf("%d requests while disabled", len(g.requests))
		}
		g.enable(true)
		g.advance(2 * time.Second)
		g.wantCondition(t, corev1.ConditionFalse, "Lost", 1)
		g.wantEvents(t) // none from before
		if s := g.reporter.Status(); s != (Status{Enabled: true, Writes: 1}) {
			t.Errorf("%+v", s)
		}
		g.enable(true) // another key of the section changed
		g.advance(2 * time.Second)
		if g.writes() != 1 {
			t.Errorf("%d writes", g.writes())
		}
		g.failWith(errRefused)
		g.setDevices(gpu(0, nil))
		g.advance(time.Minute)
		if s := g.reporter.Status(); s.ConditionErr == "" || s.EventErr == "" || s.Errors == 0 {
			t.Errorf("%+v", s)
		}
		g.failWith(nil)
		g.enable(false)
		g.advance(2 * time.Second)
		if g.advance(time.Hour); g.writes() != 1 {
			t.Errorf("%d writes", g.writes())
		}
		if s := g.reporter.Status(); s.Enabled || s.ConditionErr != "" || s.EventErr != "" {
			t.Errorf("disabled: %+v", s)
		}
		g.setConditions() // as NodeWriter
		g.enable(true)
		g.advance(2 * time.Second)
		if c := g.condition(t); time.Since(c.LastTransitionTime.Time) > time.Minute {
			t.Errorf("transition of the new condition is %v ago", time.Since(c.LastTransitionTime.Time))
		}
	})
}

func TestConnectRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI(t))
		open, tries := g.reporter.open, 0
		g.reporter.open = func(k string) (*client, error) {
			if tries++; tries < 5 {
				return nil, errRefused
			}
			return open(k)
		}
		g.start(t)
		g.setDevices(gpu(0, nil, finding("lost", health.Unhealthy)))
		g.advance(time.Minute)
		g.wantCondition(t, corev1.ConditionFalse, "Lost", 1)
		g.wantEvents(t, "node/node1 GPUUnhealthy ×1")
		if g.logged.FilterLevelExact(zapcore.WarnLevel).Len() != 1 {
			t.Errorf("log %v", g.logged.All())
		}
	})
}

// A reporter that cannot connect shows why, and ends at once.
func TestConnectFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(newAPI(t))
		g.reporter.open = func(string) (*client, error) { return nil, errors.New("no kubeconfig file") }
		g.reporter.Idle = nil // as without idle pods
		g.start(t)
		g.setDevices(gpu(0, nil))
		g.advance(10 * time.Minute)
		if s := g.reporter.Status(); s.ConditionErr != "no kubeconfig file" || s.EventErr != s.ConditionErr || s.Errors < 10 || s.Errors > 28 {
			t.Errorf("%+v", s)
		}
		began := time.Now()
		if g.stop(); time.Since(began) > 0 || len(g.requests) != 0 {
			t.Errorf("ended after %v, %d requests", time.Since(began), len(g.requests))
		}
	})
}

func TestConnectErrorNamesKey(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	for _, kubeconfig := range []string{"", "/does/not/exist"} {
		if _, err := connect(kubeconfig); err == nil || !strings.Contains(err.Error(), "health.kubernetes.kubeconfig") {
			t.Errorf("%q: %v", kubeconfig, err)
		}
	}
}

// A heartbeat on a clock that was ahead, or behind, delays the next one by no more than its interval: an old one means that no agent runs.
func TestConditionHeartbeatAfterClockStep(t *testing.T) {
	for _, ahead := range []time.Duration{-24 * time.Hour, 2 * heartbeatInterval, 24 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			g := newRig(newAPI(t))
			g.start(t)
			g.setDevices(gpu(0, nil))
			g.advance(time.Minute)
			g.stop()
			last := g.condition(t)
			last.LastHeartbeatTime.Time = last.LastHeartbeatTime.Add(ahead)
			g.setConditions(last)

			next := newRig(g.apiServer)
			next.start(t)
			next.setDevices(gpu(0, nil))
			next.advance(heartbeatInterval)
			if age := time.Since(next.condition(t).LastHeartbeatTime.Time); age < 0 || age > heartbeatInterval {
				t.Errorf("clock ahead by %v: the heartbeat is %v old", ahead, age)
			}
			next.advance(2 * heartbeatInterval)
			if n := next.writes(); n > 4 {
				t.Errorf("clock ahead by %v: %d writes in three intervals", ahead, n-1)
			}
		})
	}
}
