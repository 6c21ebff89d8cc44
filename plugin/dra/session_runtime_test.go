package dra

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const (
	goodRuntime = "containerd://2.1.4"
	oldRuntime  = "containerd://1.6.36"
)

// setRuntime is the answer of the API server to the question for the runtime; without a version there is none yet.
func (g *sessionRig) setRuntime(version string) {
	g.runtime.Store(&cdi.Runtime{Version: version, Kubelet: "v1.37.0", Away: version == ""})
	g.advance(5 * time.Second)
}

func (g *sessionRig) wantErr(parts ...string) {
	g.t.Helper()
	var s Status
	g.session.report(&s)
	for _, part := range parts {
		if !strings.Contains(s.Err, part) {
			g.t.Errorf("error %q, want %q", s.Err, parts)
		}
	}
	if len(parts) == 0 && strings.Contains(s.Err, "runtime") || len(parts) > 0 && s.Behind {
		g.t.Errorf("error %q, behind %v, want %q", s.Err, s.Behind, parts)
	}
}

func unchanged(d []health.DeviceState) []health.DeviceState { return d }

// On a node whose runtime ignores CDI no slice ever appears, whatever the devices do, until the runtime is upgraded.
func TestSessionRuntimeIgnoresCDI(t *testing.T) {
	for name, runtime := range map[string]*cdi.Runtime{
		"known": {Version: oldRuntime}, "asked later": nil,
		"API server away": {Err: "refused", Away: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := prepareSession(t, apiservertest.New(t, publishNode))
				g.runtime.Store(runtime)
				g.begin()
				g.poll(unchanged)
				if runtime == nil || runtime.Away {
					g.wantErr("about to learn which container runtime")
					g.poll(breakGPU0)
					g.wantWrites()
					g.setRuntime(oldRuntime)
				}
				g.wantErr(oldRuntime, "ignores CDI", "upgrade")
				g.poll(breakGPU0)
				g.poll(unchanged)
				g.advance(time.Hour)
				g.wantWrites()
				if s := g.status(); s.Devices != 0 || s.Slices != 0 || s.Published.IsZero() {
					t.Errorf("%+v", s)
				}
				g.setRuntime("containerd://1.7.27")
				g.wantDevices("gpu-0", "gpu-1", "gpu-2")
				g.wantErr()
			})
		})
	}
}

// What is known of the runtime only in part keeps no device from claims.
func TestSessionRuntimeUnsure(t *testing.T) {
	for name, runtime := range map[string]cdi.Runtime{
		"containerd 1.7": {Version: "containerd://1.7.27"}, "CRI-O": {Version: "cri-o://1.34.0"}, "none": {}, "refused": {Err: "forbidden"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := prepareSession(t, apiservertest.New(t, publishNode))
				g.runtime.Store(&runtime)
				g.begin()
				want := g.config.Load().JudgeRuntime(runtime).Warning() // only containerd 1.7 needs somebody to look
				for range 2 {
					g.poll(unchanged)
					g.wantDevices("gpu-0", "gpu-1", "gpu-2")
					g.wantErr()
					var s Status
					if g.session.report(&s); s.Warning != want || (want != "") != (name == "containerd 1.7") {
						t.Errorf("warning %q, want %q", s.Warning, want)
					}
				}
			})
		})
	}
}

// A runtime that becomes older takes published devices: first they are tainted, and the slices are removed when the API server has the
// taints. They come back with a newer runtime. A restart at any point goes on.
func TestSessionRuntimeDowngraded(t *testing.T) {
	const withheld = "!" + TaintWithheld
	for _, restarts := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			api, dir := apiservertest.New(t, publishNode), t.TempDir()
			var g *sessionRig
			start := func() { // another process, which learns of the runtime later
				g = prepareSessionIn(t, api, dir)
				g.writes()
				g.runtime.Store(nil)
				g.begin()
				g.poll(unchanged)
				g.wantWrites()
			}
			restart := func(runtime string) {
				if restarts {
					g.end()
					start()
					g.setRuntime(runtime)
				}
			}
			refuse := func(verb string) {
				api.Answer(func(r apiservertest.Request) error {
					if r.Verb == verb {
						return errors.New("overloaded")
					}
					return nil
				})
			}
			start()
			g.setRuntime(goodRuntime)
			g.wantDevices("gpu-0", "gpu-1", "gpu-2")
			restart(goodRuntime)
			g.writes()

			refuse("update")
			g.setRuntime(oldRuntime)
			g.advance(10 * time.Second)
			g.wantDevices("gpu-0", "gpu-1", "gpu-2")
			if s := g.status(); !s.Behind {
				t.Errorf("not behind: %+v", s)
			}
			restart(oldRuntime)
			if all := g.writes(); slices.ContainsFunc(all, func(r string) bool { return strings.HasPrefix(r, "delete") }) {
				t.Errorf("deleted before the taints: %q", all)
			}

			refuse("delete")
			g.advance(time.Minute)
			g.wantDevices("gpu-0"+withheld, "gpu-1"+withheld, "gpu-2"+withheld)
			restart(oldRuntime)
			g.wantDevices("gpu-0"+withheld, "gpu-1"+withheld, "gpu-2"+withheld)
			g.wantErr(oldRuntime)

			api.Answer(nil)
			g.advance(time.Minute)
			g.wantDevices()
			if n := len(api.Slices()); n != 0 {
				t.Errorf("%d slices", n)
			}
			g.wantErr(oldRuntime)
			if s := g.status(); s.Devices != 0 || s.Slices != 0 {
				t.Errorf("%+v", s)
			}
			restart(oldRuntime)
			g.writes()
			g.poll(breakGPU0)
			g.wantWrites()

			g.setRuntime(goodRuntime)
			g.wantDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1", "gpu-2")
			g.wantErr()
			restart(goodRuntime)
			g.poll(unchanged)
			g.wantDevices("gpu-0", "gpu-1", "gpu-2")
			g.end()
		})
	}
}

// A runtime that is upgraded while the slices are being removed gets the devices back untainted.
func TestSessionRuntimeFlips(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newSessionRig(t)
		g.poll(unchanged)
		for range 3 {
			g.api.Answer(func(r apiservertest.Request) error {
				if r.Verb == "delete" {
					return errors.New("overloaded")
				}
				return nil
			})
			g.setRuntime(oldRuntime)
			g.api.Answer(nil)
			g.setRuntime(goodRuntime)
			g.wantDevices("gpu-0", "gpu-1", "gpu-2")
			g.wantErr()
		}
		g.setRuntime(oldRuntime)
		g.wantDevices()
	})
}

// A full disk keeps no slice, and none flickers while the checkpoint cannot be written. plugin.api set back ends the driver.
func TestSessionRuntimeFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := prepareSession(t, apiservertest.New(t, publishNode))
		var full atomic.Bool
		g.write = func() error {
			if full.Load() {
				return errors.New("no space left on device")
			}
			return nil
		}
		g.begin()
		g.poll(unchanged)
		full.Store(true)
		g.setRuntime(oldRuntime)
		g.wantDevices()
		g.wantErr(oldRuntime, "no space left")
		g.writes()
		g.advance(time.Minute)
		g.wantWrites()
		full.Store(false)
		g.advance(time.Minute)
		if g.session.preparer.publishing() {
			t.Error("the checkpoint still says that there are slices")
		}
		cfg := *g.config.Load()
		cfg.API = plugin.APIDevicePlugin
		g.config.Store(&cfg)
		g.advance(time.Minute)
		if g.session.preparer.needed() {
			t.Error("the devices are not released")
		}
	})
}

// New claims are refused, claims of monitors too. What is prepared stays so, and ends as usual.
func TestPrepareRuntimeIgnoresCDI(t *testing.T) {
	n := newClaimNode(t)
	n.options.Runtime = &health.Latest[cdi.Runtime]{}
	free, monitor := claim("free", result("gpu-1")), claim("monitor", result("gpu-2", asAdmin))
	n.refused(free, reasonNotReady, "container runtime")
	n.options.Runtime.Store(&cdi.Runtime{Version: "containerd://1.7.1"})
	held := claim("held", result("gpu-0"))
	names := n.must(held)
	n.options.Runtime.Store(&cdi.Runtime{Version: oldRuntime})
	n.refused(free, "runtime_ignores_cdi", oldRuntime, "upgrade")
	n.refused(monitor, "runtime_ignores_cdi", oldRuntime)
	if again := n.must(held); !slices.Equal(again, names) {
		t.Errorf("got %q, want %q", again, names)
	}
	n.restart(n.boot)
	n.options.Runtime = &health.Latest[cdi.Runtime]{}
	if again := n.must(held); !slices.Equal(again, names) {
		t.Errorf("got %q, want %q after a restart", again, names)
	}
	n.options.Runtime.Store(&cdi.Runtime{Version: oldRuntime})
	if err := n.unprepare(held); err != nil {
		t.Fatal(err)
	}
	if left := n.prepared(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	n.refused(held, "runtime_ignores_cdi")
	n.options.Runtime.Store(&cdi.Runtime{Version: goodRuntime})
	n.must(free)
	n.must(monitor)
}

// A device of which the kubelet has not said who holds it is tainted all the same.
func TestSessionRuntimeWithUnknownHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, dir := apiservertest.New(t, publishNode), t.TempDir()
		first := prepareSessionIn(t, api, dir)
		first.begin()
		first.poll(unchanged)
		first.wantDevices("gpu-0", "gpu-1", "gpu-2")
		first.end()
		g := prepareSessionIn(t, api, dir)
		g.session.Ask = func(context.Context, time.Duration) podresources.Holders { return *g.holders.Load() }
		g.hold(podresources.Holders{Err: "denied"})
		g.runtime.Store(&cdi.Runtime{Version: oldRuntime})
		g.begin()
		g.poll(unchanged)
		g.wantDevices()
		g.wantErr(oldRuntime)
	})
}
