package plugin

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/status"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
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

// sockets returns the names of the plugin's sockets.
func (s *site) sockets() (names []string) {
	s.Helper()
	paths, err := filepath.Glob(filepath.Join(s.pluginDir(), SocketPattern))
	if err != nil {
		s.Fatal(err)
	}
	for _, p := range paths {
		names = append(names, filepath.Base(p))
	}
	return names
}

// kill ends the agent as SIGKILL does: its sockets stay.
func (s *site) kill() {
	s.Helper()
	saved := shortDir(s.T)
	names := s.sockets()
	for _, n := range names {
		if err := os.Link(filepath.Join(s.pluginDir(), n), filepath.Join(saved, n)); err != nil {
			s.Fatal(err)
		}
	}
	s.stop()
	for _, n := range names {
		if err := os.Link(filepath.Join(saved, n), filepath.Join(s.pluginDir(), n)); err != nil {
			s.Fatal(err)
		}
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
	if now := s.waitStatus(isRegistered); now.Allocations != before.Allocations+1 || now.Warning != "" {
		s.Errorf("after %s: %+v", after, now)
	}
	if names := s.sockets(); len(names) > 2 || !slices.Contains(names, filepath.Base(s.socket())) {
		s.Errorf("after %s: sockets %v", after, names)
	}
}

// disturbances are what happens on a node while the agent serves. Each ends with an agent that runs.
var disturbances = map[string]func(s *site){
	"socket removed": func(s *site) {
		registrations := s.waitStatus(isRegistered).Registrations
		for _, n := range s.sockets() {
			s.remove(filepath.Join(s.pluginDir(), n))
		}
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
	"second agent": func(s *site) {
		next := s.successor()
		next.run()
		next.waitStatus(unregisteredFor(unixsock.ErrInUse.Error()))
		s.check("the start of a second agent")
		s.stop()
		s.harness = next
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

// poison makes the kubelet keep a dead endpoint, as an earlier agent does that registers a connected path.
func (s *site) poison() {
	s.Helper()
	err := register(s.ctx, filepath.Join(s.pluginDir(), "kubelet.sock"), gpu, filepath.Base(s.socket()))
	if !isConnected(status.Convert(err)) {
		s.Fatalf("a registration of a connected path: %v", err)
	}
}

func TestRegistrarReportsDeadEndpoint(t *testing.T) {
	t.Parallel()
	s := startSite(t, kubelettest.V137)
	fixed := filepath.Base(s.socket())
	s.poison()
	s.stop()
	s.harness = s.successor()
	s.p.timing.endTimeout = shortTimeout
	s.p.timing.settle = shortTimeout // an end of a stream that takes longer would contradict the kubelet's restart
	s.run()
	first := s.waitStatus(isRegistered)
	if !strings.Contains(first.Warning, s.socket()) || first.Err != "" {
		t.Errorf("%+v", first)
	}
	r := s.waitResource(s.kubelet, gpu, listed(4, 4))
	if r.Endpoint == fixed || !slices.Equal(r.Endpoints, []string{fixed, r.Endpoint}) {
		t.Errorf("the kubelet has %+v", r)
	}
	s.waitLog(msgDeadEndpoint, s.socket(), 1)
	s.waitLog(msgUnregistered, "", 0) // another path is tried at once
	// It is the kubelet's: other disturbances change nothing.
	disturbances["socket removed"](s)
	if again := s.waitStatus(isRegistered); again.Warning != first.Warning {
		t.Errorf("%+v", again)
	}
	s.waitLog(msgDeadEndpoint, "", 1)

	s.restart(s.kubelet)
	s.check("the kubelet's restart")
	if r := s.waitResource(s.kubelet, gpu, listed(4, 4)); !slices.Equal(r.Endpoints, []string{fixed}) {
		t.Errorf("the kubelet has %+v", r)
	}
}

// A kubelet that processes the end of an earlier agent late is not poisoned: the next agent waits for it.
func TestRegistrarWaitsForEndOfEarlierAgent(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		s := startSite(t, v)
		fixed := filepath.Base(s.socket())
		s.kubelet.SetFault(kubelettest.Fault{HoldEnds: true})
		s.stop()
		s.harness = s.successor()
		s.p.timing.endTimeout = time.Minute
		s.run()
		s.waitStatus(unregisteredFor("earlier plugin"))
		s.kubelet.SetFault(kubelettest.Fault{})
		s.check("a late end")
		if r := s.waitResource(s.kubelet, gpu, listed(4, 4)); r.Registrations != 2 || r.Endpoint != fixed || len(r.Endpoints) != 1 {
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
		if r := s.waitStatus(isRegistered); r.Warning != "" {
			t.Errorf("%+v", r)
		}
		s.kubelet.SetFault(kubelettest.Fault{})
		s.check("a late end")
		s.stop()
		s.waitResource(s.kubelet, gpu, disconnected)
	})
}

// A registrar can end after it has found a new kubelet and before it registers.
func TestRegistrarForgetsEarlierKubelet(t *testing.T) {
	dir := shortDir(t)
	if err := os.Mkdir(filepath.Join(dir, "device-plugins"), 0o750); err != nil {
		t.Fatal(err)
	}
	r := newTestRegistrar(t, dir)
	r.fixedHeld = true
	r.setWarning("restart the kubelet")
	if err := os.WriteFile(r.kubeletPath, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.checkKubelet()
	next := newTestRegistrar(t, dir)
	next.resume(r.view())
	next.checkKubelet()
	if next.fixedHeld || next.status().Warning != "" || !next.kubeletNew {
		t.Errorf("beside the new kubelet: %+v", next.status())
	}
}

// After endTimeout the refusal itself makes the kubelet keep the endpoint.
func TestRegistrarWaitsLimitedForEndOfEarlierAgent(t *testing.T) {
	t.Parallel()
	s := startSite(t, kubelettest.V137)
	s.kubelet.SetFault(kubelettest.Fault{HoldEnds: true})
	s.stop()
	s.harness = s.successor()
	s.p.timing.endTimeout = shortTimeout
	s.run()
	s.waitStatus(func(r ResourceStatus) bool { return r.Registered && r.Warning != "" })
	s.kubelet.SetFault(kubelettest.Fault{})
	s.stop()
	if r := s.waitResource(s.kubelet, gpu, func(r kubelettest.Resource) bool { return len(r.Endpoints) == 1 }); r.Allocatable() != 4 {
		t.Errorf("the kubelet has %+v", r)
	}
}

// A later kubelet may refuse a connected path with another text: the next attempt has another name, without the warning.
func TestRegistrarAvoidsPathRefusedForAnyReason(t *testing.T) {
	t.Parallel()
	s := startSite(t, kubelettest.V137)
	s.kubelet.SetFault(kubelettest.Fault{HoldEnds: true, ConnectedError: "endpoint exists"})
	s.stop()
	s.harness = s.successor()
	s.p.timing.endTimeout = shortTimeout
	s.run()
	s.waitStatus(func(r ResourceStatus) bool { return r.Registered && r.Warning == "" })
}

// The same kubelet.sock does not mean a new kubelet, nor does a new time of change while the stream is open.
func TestRegistrarDetectsSameKubelet(t *testing.T) {
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

// The probes must not claim a registration at a socket that is lost.
func TestStatusShowsLostSocketAtOnce(t *testing.T) {
	dir := shortDir(t)
	if err := os.Mkdir(filepath.Join(dir, "device-plugins"), 0o750); err != nil {
		t.Fatal(err)
	}
	r := newTestRegistrar(t, dir)
	defer r.stop(false)
	for _, lose := range []func() string{
		func() string { return r.socketPath },
		func() string {
			path := r.cfg.alternateSocketPath(gpu, 7)
			alternate, err := openSocket(t.Context(), path)
			if err != nil {
				t.Fatal(err)
			}
			r.alternate = alternate
			return path
		},
	} {
		if err := r.listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		leave, _ := r.srv.streams.enter()
		r.phase, r.accepted = registered, true
		if !r.status().Registered {
			t.Fatalf("%+v", r.status())
		}
		path := lose()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := r.listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s := r.status(); s.Registered || s.Err == "" {
			t.Errorf("%s lost: %+v", path, s)
		}
		leave()
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
	stale := []string{
		"gpu-node-agent-example.com_gpu.sock", filepath.Base(h.cfg.Load().alternateSocketPath(gpu, 1)),
		filepath.Base(h.socket()),
	}
	for _, name := range append(slices.Clone(stale), "nvidia-gpu.sock") {
		if err := listen(name).Close(); err != nil {
			t.Fatal(err)
		}
	}
	listen("gpu-node-agent-example.com_served.sock")
	if err := os.WriteFile(filepath.Join(h.pluginDir(), "gpu-node-agent-file.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	listen("kubelet.sock")
	h.run()
	want := []string{
		"gpu-node-agent-example.com_served.sock", "gpu-node-agent-file.sock", filepath.Base(h.socket()), "kubelet.sock",
		"nvidia-gpu.sock",
	}
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
		return slices.Equal(names, want) && unixsock.RemoveStale(h.ctx, h.socket()) != nil
	}) // served
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
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: h.socket(), Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			l.SetUnlinkOnClose(false)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			h.run()
			h.stop()
			if _, err := os.Lstat(h.socket()); !os.IsNotExist(err) {
				t.Errorf("the socket is left: %v", err)
			}
		})
	}
}

func TestAlternateSocketPath(t *testing.T) {
	c := Config{KubeletDir: "/var/lib/kubelet"}
	for _, resource := range []string{gpu, "a.b/cdef", "nvidia.com/mig-1g.10gb.shared", "example.com/" + strings.Repeat("x", 63)} {
		fixed, one, other := c.socketPath(resource), c.alternateSocketPath(resource, 1), c.alternateSocketPath(resource, 2)
		if len(one) > len(fixed) || one == other || one == fixed {
			t.Errorf("%s: %s, %s, %s", resource, fixed, one, other)
		}
		if ours, err := filepath.Match(SocketPattern, filepath.Base(one)); !ours || err != nil {
			t.Errorf("%s does not match %s", one, SocketPattern)
		}
	}
	// The path of a short resource's other sockets may be longer than its fixed path.
	c.KubeletDir = "/" + strings.Repeat("d", unixsock.MaxPath-len("//device-plugins/gpu-node-agent-a.b_c.sock"))
	c.Resource = "a.b/c"
	if err := c.validateKubeletDir(); err == nil {
		t.Errorf("accepted, with a path of %d bytes", len(c.alternateSocketPath(c.Resource, 1)))
	}
}
