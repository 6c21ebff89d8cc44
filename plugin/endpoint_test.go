package plugin

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// site is a node whose agent and kubelet are disturbed one after the other.
type site struct {
	*harness // the current agent
	kubelet  *kubelettest.Kubelet
}

func startSite(t *testing.T, v kubelettest.Version) *site {
	h, k := startHarnessOn(t, v, snapshot(4))
	return &site{h, k}
}

// successor returns an agent in the same directory that does not run yet.
func (s *site) successor() *harness {
	next := newHarnessIn(s.T, s.root, snapshot(4))
	next.version = s.version
	return next
}

// kill ends the agent as SIGKILL does: its sockets stay.
func (s *site) kill() {
	s.Helper()
	saved := shortDir(s.T)
	socket := s.socket()
	left := filepath.Join(saved, "left.sock")
	if err := os.Link(socket, left); err != nil {
		s.Fatal(err)
	}
	s.stop()
	if err := os.Link(left, socket); err != nil {
		s.Fatal(err)
	}
}

// check waits until the kubelet counts the devices, follows the health of one, and allocates from the agent.
func (s *site) check(after string) {
	s.Helper()
	s.waitStatus(isRegistered)
	s.waitResource(s.kubelet, gpu, listed(4, 4))
	s.setHealth(2, health.Unhealthy)
	s.waitResource(s.kubelet, gpu, listed(4, 3))
	s.setHealth(2, health.Healthy)
	s.waitResource(s.kubelet, gpu, listed(4, 4))
	before := s.waitStatus(isRegistered)
	s.allocate(s.kubelet, id(0))
	s.kubelet.Free(gpu, id(0))
	if now := s.waitStatus(isRegistered); now.Allocations != before.Allocations+1 {
		s.Errorf("after %s: %+v", after, now)
	}
	if names := s.sockets(); len(names) != 1 {
		s.Errorf("after %s: sockets %v", after, names)
	}
}

// disturbances are what happens on a node while the agent serves. Each ends with an agent that runs.
var disturbances = map[string]func(s *site){
	"socket removed": func(s *site) {
		registrations := s.waitStatus(isRegistered).Registrations
		s.remove(s.socket())
		s.waitStatus(func(r ResourceStatus) bool { return r.Registered && r.Registrations > registrations })
	},
	"directory wiped": func(s *site) {
		s.remove(s.pluginDir())
		s.waitStatus(unregisteredFor("plugin.kubeletDir"))
		s.restart(s.kubelet)
	},
	"kubelet restart": func(s *site) { s.restart(s.kubelet) },
	"kill": func(s *site) {
		s.kill()
		s.harness = s.successor()
		s.run()
	},
	"restart": func(s *site) {
		s.stop()
		s.harness = s.successor()
		s.run()
	},
}

func TestRegisteredAfterEachDisturbanceAfterEach(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		for first, disturbFirst := range disturbances {
			for second, disturbSecond := range disturbances {
				t.Run(first+", "+second, func(t *testing.T) {
					t.Parallel()
					s := startSite(t, v)
					disturbFirst(s)
					s.check(first)
					disturbSecond(s)
					s.check(second)
					s.stop()
					if r := s.waitResource(s.kubelet, gpu, disconnected); r.Allocatable() != 0 || len(r.Endpoints) != 0 {
						t.Errorf("after the end: %+v", r)
					}
					if names := s.sockets(); len(names) > 0 {
						t.Errorf("after the end: sockets %v", names)
					}
				})
			}
		}
	})
}

// A program that removes the sockets again and again costs neither devices nor streams without end.
func TestRegistrarLimitsStreamsOfLostSockets(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		s := startSite(t, v)
		most := 0
		for range 2 * maxStreamsKept {
			disturbances["socket removed"](s)
			most = max(most, s.waitStatus(isRegistered).Streams)
		}
		if most < 3 || most > maxStreamsKept+1 {
			t.Errorf("up to %d streams", most)
		}
		s.check("many lost sockets")
	})
}

// A kubelet that refuses registrations keeps the devices, because an earlier stream stays open.
func TestRegistrarKeepsStreamWhileRefused(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		s := startSite(t, v)
		attempts := &s.p.registrars()[0].registrar.srv.streams
		s.kubelet.SetFault(kubelettest.Fault{RegisterError: "too many plugins"})
		s.remove(s.socket())
		poll(s.harness, "attempts", func() uint64 {
			attempts.mu.Lock()
			defer attempts.mu.Unlock()
			return attempts.registration
		}, func(n uint64) bool { return n > 2*maxStreamsKept })
		s.setHealth(2, health.Unhealthy)
		s.waitResource(s.kubelet, gpu, listed(4, 3))
		s.setHealth(2, health.Healthy)
		s.kubelet.SetFault(kubelettest.Fault{})
		s.check("refused registrations")
	})
}

// The kubelet may have connected a path whose registration it did not answer, or whose stream it did not open.
func TestRegistrarLeavesUnansweredPath(t *testing.T) {
	for name, fault := range map[string]kubelettest.Fault{
		"answer lost": {LoseAnswer: true},
		"no stream":   {HoldStreams: true},
	} {
		t.Run(name, func(t *testing.T) {
			onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
				h := newHarness(t, snapshot(4))
				h.version = v
				h.p.timing.registerTimeout, h.p.timing.streamTimeout = 100*time.Millisecond, shortTimeout
				s := &site{h, h.kubelet()}
				s.kubelet.SetFault(fault)
				h.run()
				s.waitResource(s.kubelet, gpu, func(r kubelettest.Resource) bool { return r.Registrations > 1 })
				s.kubelet.SetFault(kubelettest.Fault{})
				s.check(name)
				s.stop()
				if r := s.waitResource(s.kubelet, gpu, disconnected); r.Allocatable() != 0 {
					t.Errorf("after the end: %+v", r)
				}
			})
		})
	}
}

// The next agent waits for a kubelet that processes the end of an earlier one late.
func TestRegistrarWaitsForEndOfEarlierAgent(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		s := startSite(t, v)
		s.kubelet.SetFault(kubelettest.Fault{HoldEnds: true})
		s.stop()
		s.harness = s.successor()
		s.p.timing.endTimeout = time.Minute
		s.run()
		s.waitStatus(unregisteredFor("earlier plugin"))
		s.kubelet.SetFault(kubelettest.Fault{})
		s.check("a late end")
		if r := s.waitResource(s.kubelet, gpu, listed(4, 4)); r.Registrations != 2 || len(r.Endpoints) != 1 {
			t.Errorf("the kubelet has %+v", r)
		}
	})
}

// The first registration does not wait for a kubelet that cannot tell which devices it counts.
func TestRegistrarNeedsNoPodResources(t *testing.T) {
	for name, disturb := range map[string]func(h *harness, k *kubelettest.Kubelet){
		"error": func(_ *harness, k *kubelettest.Kubelet) {
			k.SetFault(kubelettest.Fault{AllocatableError: "method GetAllocatableResources not implemented"})
		},
		"no socket": func(h *harness, _ *kubelettest.Kubelet) { h.remove(filepath.Join(h.root, "pod-resources")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, snapshot(2))
			h.p.timing.endTimeout = time.Minute
			k := h.kubelet()
			disturb(h, k)
			h.run()
			h.waitResource(k, gpu, listed(2, 2))
			h.waitStatus(isRegistered)
		})
	}
}

// A changed configuration can remove a resource and return it before the kubelet has processed the end of its stream.
func TestRegistrarReturnsBeforeEndOfEarlierStream(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		s := startSite(t, v)
		s.kubelet.SetFault(kubelettest.Fault{HoldEnds: true})
		s.setConfig(func(c *Config) { c.Resource = "example.com/gpu" })
		s.waitResource(s.kubelet, "example.com/gpu", listed(4, 4))
		s.setConfig(func(c *Config) { c.Resource = gpu })
		s.waitResource(s.kubelet, gpu, listed(4, 4))
		s.waitStatus(isRegistered)
		s.kubelet.SetFault(kubelettest.Fault{})
		s.check("a late end")
		s.stop()
		s.waitResource(s.kubelet, gpu, disconnected)
	})
}

// After endTimeout the next agent registers beside the earlier one, whose end does not concern it: the paths differ.
func TestRegistrarWaitsLimitedForEndOfEarlierAgent(t *testing.T) {
	t.Parallel()
	s := startSite(t, kubelettest.V137)
	s.kubelet.SetFault(kubelettest.Fault{HoldEnds: true})
	s.stop()
	s.harness = s.successor()
	s.p.timing.endTimeout = shortTimeout
	s.run()
	s.waitStatus(isRegistered)
	s.kubelet.SetFault(kubelettest.Fault{})
	s.check("a late end")
	s.stop()
	if r := s.waitResource(s.kubelet, gpu, disconnected); r.Allocatable() != 0 || len(r.Endpoints) != 0 {
		t.Errorf("after the end: %+v", r)
	}
}

// A kubelet.sock that vanished and returned, or that was touched, ends no stream: it stays open beside the stream of the next registration.
func TestRegistrarKeepsStreamOfTouchedKubelet(t *testing.T) {
	for name, disturb := range map[string]func(h *harness, socket string){
		"removed and back": func(h *harness, socket string) {
			if err := os.Rename(socket, socket+".away"); err != nil {
				h.Fatal(err)
			}
			h.remove(h.socket()) // so that the status shows when the registrar has seen it
			h.waitStatus(unregisteredFor("kubelet.sock"))
			if err := os.Rename(socket+".away", socket); err != nil {
				h.Fatal(err)
			}
		},
		"touched": func(h *harness, socket string) {
			if err := os.Chtimes(socket, time.Time{}, time.Unix(1, 0)); err != nil {
				h.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startSite(t, kubelettest.V137)
			disturb(s.harness, filepath.Join(s.pluginDir(), "kubelet.sock"))
			s.waitStatus(func(r ResourceStatus) bool { return r.Registered && r.Registrations == 2 })
			s.check(name)
			if r := s.waitResource(s.kubelet, gpu, listed(4, 4)); len(r.Endpoints) != 2 {
				t.Errorf("the kubelet has %+v", r)
			}
			s.stop()
			s.waitResource(s.kubelet, gpu, disconnected)
		})
	}
}

// A kubelet before 1.37 needs time to read the last list of each stream before the first stream ends.
func TestStopWaitsForListsOfSeveralStreams(t *testing.T) {
	for name, c := range map[string]struct {
		streams  int
		withdraw bool
		want     time.Duration
	}{
		"one stream":               {1, false, 0},
		"several streams":          {2, false, defaultTiming().settle},
		"several streams withdraw": {2, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAuditHarness()
				for range c.streams {
					leave, _ := a.srv.streams.enter()
					defer leave()
				}
				a.srv.streams.noteSent()
				start := time.Now()
				a.stop(c.withdraw)
				if d := time.Since(start); d != c.want {
					t.Errorf("ended after %v, want %v", d, c.want)
				}
			})
		})
	}
}

func TestPluginRemovesStaleSockets(t *testing.T) {
	h := newHarness(t, snapshot(1))
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(h.pluginDir(), name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	stale := filepath.Base(h.cfg.Load().socketPath(gpu, 1))
	for _, name := range []string{"gpu-node-agent-example.com_gpu.sock", stale, "nvidia-gpu.sock"} {
		if err := listen(name).Close(); err != nil {
			t.Fatal(err)
		}
	}
	listen("gpu-node-agent-example.com_served.sock")
	if err := os.WriteFile(filepath.Join(h.pluginDir(), "gpu-node-agent-file.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	h.run()
	want := []string{"gpu-node-agent-example.com_served.sock", "gpu-node-agent-file.sock", "nvidia-gpu.sock"}
	poll(h, "files", func() (names []string) {
		entries, err := os.ReadDir(h.pluginDir())
		if err != nil {
			t.Error(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}, func(names []string) bool {
		return slices.Equal(names, want)
	})
}

// An agent that ends before it serves removes the sockets that a killed one has left: after an uninstall nothing else would.
func TestPluginStopRemovesStaleSockets(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"no poll yet": func(*Config) {},
		"DRA":         func(c *Config) { c.API = APIDRA },
		"disabled":    func(c *Config) { c.Enabled = false },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, nil)
			h.setConfig(change)
			socket := h.cfg.Load().socketPath(gpu, 1)
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			l.SetUnlinkOnClose(false)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			h.run()
			h.stop()
			if _, err := os.Lstat(socket); !os.IsNotExist(err) {
				t.Errorf("the socket is left: %v", err)
			}
		})
	}
}
