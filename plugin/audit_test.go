package plugin

import (
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// The kubelet drops the plugin although the stream stays open.
func TestAuditRegistersAfterKubeletForgets(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		snap := snapshot(4)
		snap.Devices[0].Device.NUMA = []int{0, 1} // the kubelet lists it twice
		h, k := startHarnessOn(t, v, with(snap, 3, health.Unhealthy))
		for n := uint64(1); n < 4; n++ {
			k.Forget(gpu)
			h.waitResource(k, gpu, listed(4, 3))
			s := h.waitStatus(func(s ResourceStatus) bool { return s.Registered && s.AuditMismatches == n })
			if s.Registrations != n+1 || s.Streams != 1 {
				t.Errorf("%+v", s)
			}
			h.allocate(k, "GPU-0")
		}
		h.waitLog(msgMismatch, "", 3)
	})
}

func TestAuditIgnoresFlappingGPU(t *testing.T) {
	t.Parallel()
	h, k := startHarness(t, snapshot(2))
	start := h.waitHolders(holdersKnown)
	states := []health.State{health.Unhealthy, health.Healthy}
	for i := 0; h.p.Holders().At.Sub(start.At) < 6*h.p.timing.pods.Refresh; i++ {
		h.setHealth(0, states[i%2])
		h.waitResource(k, gpu, listed(2, 1+i%2))
	}
	if s := h.waitStatus(isRegistered); s.AuditMismatches != 0 || s.Registrations != 1 {
		t.Errorf("%+v", s)
	}
}

// auditHarness is a registered registrar in synthetic time. The test provides the kubelet's list.
type auditHarness struct{ *registrar }

func newAuditHarness() *auditHarness {
	srv := newTestServer(snapshot(2))
	pods := newPlugin(srv.layouts.cfg, srv.layouts.snapshots, defaultTiming(), zap.NewNop()).pods
	a := &auditHarness{newRegistrar(srv, DefaultConfig(), defaultTiming(), pods, zap.NewNop())}
	a.setRegistered()
	return a
}

func (a *auditHarness) setRegistered() { a.phase, a.phaseSince = registered, time.Now() }

// answerAfter lets time pass, then audits an answer with these IDs.
func (a *auditHarness) answerAfter(d time.Duration, ids ...string) {
	time.Sleep(d) //nolint:forbidigo // synthetic time
	a.pods.Allocatable.Store(&podresources.Allocatable{At: time.Now(), IDs: map[string][]string{gpu: ids}})
	a.auditDevices()
}

func TestAuditDevices(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(a *auditHarness)
		want uint64
	}{
		{"equal lists", func(a *auditHarness) {
			a.answerAfter(3*time.Second, "GPU-0", "GPU-1")
			a.answerAfter(3*time.Second, "GPU-0", "GPU-1")
		}, 0},
		{"empty twice", func(a *auditHarness) {
			a.answerAfter(3 * time.Second)
			a.answerAfter(3 * time.Second)
		}, 1},
		{"one missing", func(a *auditHarness) {
			a.answerAfter(3*time.Second, "GPU-0")
			a.answerAfter(3*time.Second, "GPU-0")
		}, 1},
		{"one too many", func(a *auditHarness) {
			a.srv.layouts.snapshots.Store(with(snapshot(2), 1, health.Unhealthy))
			a.answerAfter(3*time.Second, "GPU-0", "GPU-1")
			a.answerAfter(3*time.Second, "GPU-0", "GPU-1")
		}, 1},
		{"empty for a moment", func(a *auditHarness) {
			a.answerAfter(3 * time.Second)
			a.answerAfter(3*time.Second, "GPU-0", "GPU-1")
			a.answerAfter(3 * time.Second)
		}, 0},
		{"answers too close", func(a *auditHarness) {
			a.answerAfter(3 * time.Second)
			a.answerAfter(time.Second)
		}, 0},
		{"first answer too soon after the registration", func(a *auditHarness) {
			a.answerAfter(500 * time.Millisecond)
			a.answerAfter(3 * time.Second)
		}, 0},
		{"first answer too soon after a message", func(a *auditHarness) {
			a.answerAfter(3*time.Second, "GPU-0", "GPU-1")
			a.srv.streams.noteSent()
			a.answerAfter(500 * time.Millisecond)
			a.answerAfter(3 * time.Second)
		}, 0},
		{"message between the answers", func(a *auditHarness) {
			a.answerAfter(3 * time.Second)
			a.srv.streams.noteSent()
			a.answerAfter(3 * time.Second)
		}, 0},
		{"same answer again", func(a *auditHarness) {
			a.answerAfter(3 * time.Second)
			time.Sleep(time.Minute) //nolint:forbidigo // synthetic time
			a.auditDevices()
		}, 0},
		{"no answer", func(a *auditHarness) {
			a.pods.Allocatable.Store(&podresources.Allocatable{At: time.Now().Add(time.Hour), Err: "denied"})
			a.auditDevices()
		}, 0},
		{"not registered", func(a *auditHarness) {
			a.phase = accepted
			a.answerAfter(3 * time.Second)
			a.answerAfter(3 * time.Second)
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAuditHarness()
				c.run(a)
				if got := a.status().AuditMismatches; got != c.want {
					t.Errorf("%d mismatches, want %d", got, c.want)
				}
			})
		})
	}
}

// Registrations for a mismatch that they do not end become rare, because each removes the devices for a moment.
func TestAuditBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuditHarness()
		start := time.Now()
		for time.Since(start) < time.Hour {
			a.answerAfter(2*time.Second, "GPU-0")
			if a.phase == unregistered {
				a.setRegistered()
			}
		}
		// At once, after up to 10 s, 20 s, 40 s … and then every ten minutes, or up to twice as often.
		before := a.status().AuditMismatches
		if before < 11 || before > 20 {
			t.Errorf("registered %d times in an hour", before)
		}
		a.answerAfter(3*time.Second, "GPU-0", "GPU-1")
		a.answerAfter(3*time.Second, "GPU-0")
		a.answerAfter(3*time.Second, "GPU-0")
		if n := a.status().AuditMismatches; n != before+1 {
			t.Errorf("%d mismatches after equal lists, want %d", n, before+1)
		}
		a.setRegistered()
		a.answerAfter(2*time.Second, "GPU-0")
		a.answerAfter(2*time.Second, "GPU-0")
		if n := a.status().AuditMismatches; n != before+2 {
			t.Errorf("%d mismatches, want the second at once too, %d", n, before+2)
		}
		for start := time.Now(); time.Since(start) < 40*time.Second; a.answerAfter(2*time.Second, "GPU-0") {
			if a.phase == unregistered {
				a.setRegistered()
			}
		}
		if n := a.status().AuditMismatches; n < before+3 {
			t.Errorf("%d mismatches after equal lists, want the third after up to 10 s", n-before)
		}
	})
}

// A resource counts as audited only while the kubelet was asked after the last list, answered with that list, and nothing disturbed the
// registration since.
func TestAudited(t *testing.T) {
	equal := func(a *auditHarness) { a.answerAfter(3*time.Second, "GPU-0", "GPU-1") }
	for name, c := range map[string]struct {
		run  func(a *auditHarness)
		want bool
	}{
		"not asked yet":    {func(*auditHarness) {}, false},
		"equal lists":      {equal, true},
		"asked too soon":   {func(a *auditHarness) { a.answerAfter(500*time.Millisecond, "GPU-0", "GPU-1") }, false},
		"another list":     {func(a *auditHarness) { a.answerAfter(3*time.Second, "GPU-0") }, false},
		"then another":     {func(a *auditHarness) { equal(a); a.answerAfter(3*time.Second, "GPU-0") }, false},
		"then equal again": {func(a *auditHarness) { equal(a); a.answerAfter(3*time.Second, "GPU-0"); equal(a) }, true},
		"then a new list":  {func(a *auditHarness) { equal(a); a.srv.streams.noteSent() }, false},
		"then asked again": {func(a *auditHarness) { equal(a); a.srv.streams.noteSent(); equal(a) }, true},
		"then the kubelet does not answer": {func(a *auditHarness) {
			equal(a)
			a.pods.Allocatable.Store(&podresources.Allocatable{At: time.Now().Add(time.Minute), Err: "denied"})
			a.auditDevices()
		}, true},
		"then the registration ends": {func(a *auditHarness) {
			equal(a)
			a.unregister("the kubelet has started")
			a.setRegistered()
			a.mu.Lock()
			a.accepted = true
			a.mu.Unlock()
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAuditHarness()
				a.accepted = true
				a.srv.streams.beginRegistration()
				leave, _ := a.srv.streams.enter()
				defer leave()
				a.srv.streams.noteSent()
				c.run(a)
				if s := a.status(); !s.Registered || s.Audited != c.want {
					t.Errorf("%+v, want audited %v", s, c.want)
				}
			})
		})
	}
}
