package plugin

import (
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The kubelet has dropped us, and our stream is still open.
func TestKubeletForgetsUs(t *testing.T) {
	snap := snapshot(4)
	snap.Devices[0].Device.NUMA = []int{0, 1} // the kubelet names it twice
	r := newRig(t, with(snap, 3, health.Unhealthy))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(4, 3))
	r.status(isRegistered)
	for n := uint64(1); n < 4; n++ {
		k.Forget(gpu)
		r.wait(k, gpu, listed(4, 3))
		s := r.status(func(s ResourceStatus) bool { return s.Registered && s.AuditMismatches == n })
		if s.Registrations != n+1 || s.Streams != 1 {
			t.Errorf("%+v", s)
		}
		if _, err := k.AllocateIDs(r.ctx, gpu, "GPU-0"); err != nil {
			t.Error(err)
		}
	}
	if n := r.logs.FilterMessage("the kubelet does not have what we told it, although its stream is open; registering again").Len(); n != 3 {
		t.Errorf("logged %d times", n)
	}
}

// What changes all the time is not a mismatch.
func TestAuditOfAFlappingGPU(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(2, 2))
	start := r.holders("asked", func(h Holders) bool { return h.Err == "" })
	states := []health.State{health.Unhealthy, health.Healthy}
	for i := 0; r.p.Holders().At.Sub(start.At) < 6*r.p.timing.refresh; i++ {
		r.snaps.Store(with(r.snaps.Load(), 0, states[i%2]))
		r.wait(k, gpu, listed(2, 1+i%2))
	}
	if s := r.status(isRegistered); s.AuditMismatches != 0 || s.Registrations != 1 {
		t.Errorf("%+v", s)
	}
}

// auditRig is a registered link whose kubelet believes what the test says, in a bubble of time.
type auditRig struct {
	*link
	t *testing.T
}

func newAuditRig(t *testing.T) *auditRig {
	srv := newTestServer(snapshot(2))
	timing := defaultTiming()
	l := newLink(srv, DefaultConfig(), timing, newPodResources(srv.layouts.cfg, srv.layouts.snapshots, timing, zap.NewNop()), zap.NewNop())
	a := &auditRig{l, t}
	a.register()
	return a
}

func (a *auditRig) register() {
	a.phase, a.since = registered, time.Now()
	a.srv.streams.told()
}

// after lets time pass and the kubelet say what it believes.
func (a *auditRig) after(d time.Duration, ids ...string) {
	time.Sleep(d) //nolint:forbidigo // synthetic time
	a.pods.beliefs.Store(&belief{asked: time.Now(), devices: map[string][]string{gpu: ids}})
	a.check()
}

func (a *auditRig) want(what string, mismatches uint64) {
	a.t.Helper()
	if got := a.status().AuditMismatches; got != mismatches {
		a.t.Errorf("%s: %d mismatches, want %d", what, got, mismatches)
	}
	if a.phase == unregistered {
		a.register()
	}
}

func TestAudit(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(a *auditRig)
		want uint64
	}{
		{"all is well", func(a *auditRig) {
			a.after(3*time.Second, "GPU-0", "GPU-1")
			a.after(3*time.Second, "GPU-0", "GPU-1")
		}, 0},
		{"lost for good", func(a *auditRig) {
			a.after(3 * time.Second)
			a.after(3 * time.Second)
		}, 1},
		{"one is missing", func(a *auditRig) {
			a.after(3*time.Second, "GPU-0")
			a.after(3*time.Second, "GPU-0")
		}, 1},
		{"one too many", func(a *auditRig) {
			a.srv.layouts.snapshots.Store(with(snapshot(2), 1, health.Unhealthy))
			a.after(3*time.Second, "GPU-0", "GPU-1")
			a.after(3*time.Second, "GPU-0", "GPU-1")
		}, 1},
		{"lost for a moment", func(a *auditRig) {
			a.after(3 * time.Second)
			a.after(3*time.Second, "GPU-0", "GPU-1")
			a.after(3 * time.Second)
		}, 0},
		{"two looks in a row are one", func(a *auditRig) {
			a.after(3 * time.Second)
			a.after(time.Second)
		}, 0},
		{"too soon after the registration", func(a *auditRig) {
			a.after(500 * time.Millisecond)
			a.after(400 * time.Millisecond)
		}, 0},
		{"what has just been sent may be on its way", func(a *auditRig) {
			a.after(3 * time.Second)
			a.srv.streams.told()
			a.after(500 * time.Millisecond)
			a.srv.streams.told()
			a.after(900 * time.Millisecond)
		}, 0},
		{"something was said between", func(a *auditRig) {
			a.after(3 * time.Second)
			a.srv.streams.told()
			a.after(3 * time.Second)
		}, 0},
		{"an old answer says nothing new", func(a *auditRig) {
			a.after(3 * time.Second)
			time.Sleep(time.Minute) //nolint:forbidigo // synthetic time
			a.check()
		}, 0},
		{"no answer says nothing", func(a *auditRig) {
			a.pods.beliefs.Store(&belief{asked: time.Now().Add(time.Hour), err: "denied"})
			a.check()
		}, 0},
		{"not registered", func(a *auditRig) {
			a.phase = accepted
			a.after(3 * time.Second)
			a.after(3 * time.Second)
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAuditRig(t)
				c.run(a)
				a.want(c.name, c.want)
			})
		})
	}
}

// A mismatch that registering does not end is no reason to take the devices away again and again.
func TestAuditIsPatient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAuditRig(t)
		start := time.Now()
		for time.Since(start) < time.Hour {
			a.after(2*time.Second, "GPU-0")
			if a.phase == unregistered {
				a.register()
			}
		}
		// At once, after 10 s, 20 s, 40 s … and every ten minutes from then on.
		if n := a.status().AuditMismatches; n < 11 || n > 14 {
			t.Errorf("registered %d times in an hour", n)
		}
		before := a.status().AuditMismatches
		a.after(11*time.Minute, "GPU-0", "GPU-1")
		a.after(3*time.Second, "GPU-0")
		a.after(3*time.Second, "GPU-0")
		if n := a.status().AuditMismatches; n != before+1 {
			t.Errorf("%d mismatches after all was well, want %d", n, before+1)
		}
	})
}
