package plugin

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestPluginServesKubelet(t *testing.T) {
	h, k := startHarness(t, snapshot(8))
	res := h.waitResource(k, gpu, listed(8, 8))
	if res.Endpoint != filepath.Base(h.socket()) || !res.Preferred || !slices.Equal(res.Devices[7].NUMA, []int{1}) {
		t.Errorf("%+v", res)
	}
	// Only root may connect, whatever the umask is.
	if info, err := os.Lstat(h.socket()); err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("socket: %v, %v", info, err)
	}

	a, err := k.Allocate(h.ctx, gpu, 2)
	if err != nil || a.Response.Envs[envDevices] != "GPU-0,GPU-1" {
		t.Errorf("Allocate: %+v, %v", a, err)
	}
	if a, err = k.Allocate(h.ctx, gpu, 4); err != nil || a.Response.Envs[envDevices] != "GPU-4,GPU-5,GPU-6,GPU-7" {
		t.Errorf("Allocate: %+v, %v", a, err)
	}
	if _, err = k.AllocateIDs(h.ctx, gpu, "GPU-0", "GPU-77"); status.Code(err) != codes.NotFound {
		t.Errorf("Allocate of an unknown device: %v", err)
	}

	for id, allocated := range map[string]bool{"GPU-0": true, "GPU-1": true, "GPU-2": false, "GPU-7": true, "GPU-77": false} {
		if at := h.p.LastAllocation(id); at.IsZero() == allocated || time.Since(at) > allocationMemory && allocated {
			t.Errorf("%s was allocated at %v; want an allocation: %v", id, at, allocated)
		}
	}

	h.setHealth(3, health.Unhealthy)
	res = h.waitResource(k, gpu, listed(8, 7))
	if res.Devices[3].Healthy {
		t.Errorf("another device is unhealthy: %+v", res.Devices)
	}
	// The kubelet sends the text of a refusal to the user.
	if _, err = k.AllocateIDs(h.ctx, gpu, "GPU-3"); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "xid-79") {
		t.Errorf("Allocate of an unhealthy device: %v", err)
	}
	s := h.waitStatus(isRegistered)
	if s.Name != gpu || s.Err != "" || s.Devices != 8 || s.Healthy != 7 || s.Streams != 1 || s.Registrations != 1 || s.Allocations != 2 ||
		s.AllocationErrors[reasonUnknownDevice] != 1 || s.AllocationErrors[reasonUnhealthyDevice] != 1 {
		t.Errorf("status %+v", s)
	}
	// The manager may skip a snapshot that a stream has seen, so the test waits for its log.
	h.waitLog(msgUnhealthy, "GPU-3", 1)
	h.setHealth(3, health.Healthy)
	if res = h.waitResource(k, gpu, listed(8, 8)); res.Messages != 3 {
		t.Errorf("%d messages, want 3", res.Messages)
	}
	h.waitLog(msgHealthy, "GPU-3", 1)
	h.waitLog(msgRegistered, gpu, 1)

	h.stop()
	h.waitResource(k, gpu, disconnected)
	if entries, err := os.ReadDir(h.pluginDir()); err != nil || len(entries) != 1 {
		t.Errorf("files besides kubelet.sock: %v, %v", entries, err)
	}
	if s := h.p.Status(); s.Resources != nil {
		t.Errorf("after the end: %+v", s)
	}
}

// Programs other than the kubelet call a plugin through kubelettest.Client.
func TestPluginServesOtherClients(t *testing.T) {
	t.Parallel()
	h, _ := startHarness(t, snapshot(2))
	c, err := kubelettest.Dial(h.socket())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if ids, err := c.PreferredAllocation(h.ctx, []string{"GPU-1", "GPU-0"}, 2); err != nil || len(ids) != 2 {
		t.Errorf("GetPreferredAllocation: %v, %v", ids, err)
	}
	if resp, err := c.Allocate(h.ctx, "GPU-1"); err != nil || resp.GetEnvs()[envDevices] != "GPU-1" {
		t.Errorf("Allocate: %v, %v", resp, err)
	}
	var healthy []bool // of GPU-1, by list
	err = c.Devices(h.ctx, func(devices []kubelettest.Device) bool {
		healthy = append(healthy, devices[1].Healthy)
		h.setHealth(1, health.Unhealthy)
		return devices[1].Healthy
	})
	if err != nil || !slices.Equal(healthy, []bool{true, false}) {
		t.Errorf("GPU-1 healthy: %v, %v", healthy, err)
	}
}

func TestPluginRegistersAfterConfigurationAndFirstPoll(t *testing.T) {
	never := snapshot(0)
	never.At, never.Source.Err = time.Time{}, "libdcgm.so.4 is missing"
	h := newHarness(t, never)
	cfg := h.cfg.Load()
	h.cfg.Store(nil)
	k := h.kubelet()
	h.run()
	empty := func(data string) func(Status) bool {
		return func(s Status) bool { return s.Err != "" && strings.Contains(s.Err, data) && len(s.Resources) == 0 }
	}
	h.waitPlugin(empty("configuration"))
	h.cfg.Store(cfg)
	h.waitPlugin(empty("libdcgm.so.4 is missing"))
	h.snaps.Store(snapshot(0))
	h.waitPlugin(empty("no GPUs"))
	if s := k.State(); len(s.Resources) != 0 {
		t.Errorf("registered without GPUs: %+v", s)
	}
	h.snaps.Store(snapshot(2))
	h.waitResource(k, gpu, listed(2, 2))
	h.waitPlugin(func(s Status) bool { return s.Err == "" && len(s.Resources) == 1 })
	h.snaps.Store(snapshot(0)) // removed from the inventory
	h.waitPlugin(empty("no GPUs"))
	if paths := h.sockets(); len(paths) > 0 {
		t.Errorf("a resource without devices has sockets: %v", paths)
	}
}

func TestRegistrarWaitsForKubelet(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(1))
	h.remove(h.pluginDir())
	h.run()
	if s := h.waitStatus(unregisteredFor("plugin.kubeletDir")); s.Registrations != 0 {
		t.Errorf("%+v", s)
	}
	if err := os.Mkdir(h.pluginDir(), 0o750); err != nil {
		t.Fatal(err)
	}
	h.waitStatus(unregisteredFor("kubelet.sock"))
	k := h.kubelet()
	h.waitResource(k, gpu, listed(1, 1))
	h.waitStatus(isRegistered)
	h.waitLog(msgUnregistered, "", 2) // one for each cause, although each lasts for many polls
}

func TestRegistrarFollowsKubeletRestarts(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h, k := startHarnessOn(t, v, snapshot(8))
		for range 5 {
			h.restart(k)
			h.waitResource(k, gpu, listed(8, 8))
			h.waitStatus(isRegistered)
		}
		if res := h.waitResource(k, gpu, listed(8, 8)); res.Registrations != 1 {
			t.Errorf("registered %d times with one kubelet", res.Registrations)
		}
		k.Stop() // for longer than a retry
		h.waitStatus(unregisteredFor("connection refused"))
		h.restart(k)
		h.waitResource(k, gpu, listed(8, 8))
		h.waitStatus(isRegistered)
	})
}

func TestRegistrarReplacesRemovedSocket(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h, k := startHarnessOn(t, v, snapshot(2))
		for n := 2; n < 5; n++ {
			h.remove(h.socket())
			// The kubelet keeps its devices meanwhile, because the old stream stays open.
			s, err := k.WaitFor(h.ctx, func(s kubelettest.State) bool {
				res := s.Resources[gpu]
				return res.Allocatable() != 2 || res.Registrations == n && res.Messages == n
			})
			if err != nil || s.Resources[gpu].Allocatable() != 2 {
				t.Fatalf("%+v, %v", s, err)
			}
			h.waitStatus(func(s ResourceStatus) bool { return s.Registered && s.Streams == n })
		}
		if _, err := k.Allocate(h.ctx, gpu, 1); err != nil {
			t.Error(err)
		}
		h.setHealth(0, health.Unhealthy) // every stream sends it
		h.waitResource(k, gpu, func(res kubelettest.Resource) bool { return res.Allocatable() == 1 && res.Messages == 8 })
	})
}

func TestRegistrarKeepsStreamInWipedDirectory(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h, k := startHarnessOn(t, v, snapshot(2))
		before := h.waitStatus(isRegistered)
		// The kubelet's first, else the plugin may register again in between. Registration is impossible. The open stream still serves the
		// kubelet.
		h.remove(filepath.Join(h.pluginDir(), "kubelet.sock"))
		h.remove(h.socket())
		h.waitLog(msgUnregistered, "kubelet.sock", 1)
		if s := h.waitStatus(unregisteredFor("kubelet.sock")); s.Registrations != before.Registrations || s.Streams != 1 {
			t.Errorf("%+v", s)
		}
		h.setHealth(0, health.Unhealthy)
		h.waitResource(k, gpu, listed(2, 1))
	})
}

// A kubelet that stops causes one warning, whichever of its sockets disappear; so does a kubelet that drops the plugin.
func TestRegistrarWarnsOncePerKubeletLoss(t *testing.T) {
	for name, c := range map[string]struct {
		lose   func(*harness, *kubelettest.Kubelet)
		reason string
		lives  bool
	}{
		"stopped, sockets stay": {func(_ *harness, k *kubelettest.Kubelet) { k.Stop() }, "connection refused", false},
		"stopped, sockets removed": {func(h *harness, k *kubelettest.Kubelet) {
			h.remove(filepath.Join(h.pluginDir(), "kubelet.sock"))
			k.Stop()
			h.remove(filepath.Join(h.root, "pod-resources", "kubelet.sock"))
		}, "kubelet.sock", false},
		"plugin dropped": {func(_ *harness, k *kubelettest.Kubelet) { k.Drop(gpu) }, "ListAndWatch", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h, k := startHarness(t, snapshot(2))
			h.waitHolders(holdersKnown)
			before := len(h.warnings())
			c.lose(h, k)
			h.waitLog(msgUnregistered, c.reason, 1)
			if c.lives {
				h.waitStatus(isRegistered)
			} else {
				// The holders expire, which Status reports and the log need not.
				h.waitHolders(func(h podresources.Holders) bool { return h.By == nil })
			}
			if warned := h.warnings()[before:]; len(warned) != 1 {
				t.Errorf("%d warnings: %v", len(warned), h.logLines())
			}
			if c.lives {
				return
			}
			h.restart(k)
			h.waitResource(k, gpu, listed(2, 2))
			h.waitStatus(isRegistered)
			h.waitHolders(holdersKnown)
		})
	}
}

func TestRegistrarSettlesAfterDroppedStream(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h, k := startHarnessOn(t, v, snapshot(2))
		for n := 1; n < 4; n++ {
			h.waitResource(k, gpu, func(res kubelettest.Resource) bool { return listed(2, 2)(res) && res.Registrations == n })
			h.waitStatus(isRegistered)
			start := time.Now()
			k.Drop(gpu)
			h.waitResource(k, gpu, func(res kubelettest.Resource) bool { return res.Registrations == n+1 })
			if d := time.Since(start); d < h.p.timing.settle {
				t.Errorf("registered again after %v, before the kubelet could settle", d)
			}
		}
		h.waitResource(k, gpu, listed(2, 2))
	})
}

// A kubelet that drops the plugin again and again gets registrations less and less often, up to a limit.
func TestRegistrarSlowsRetries(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(1))
	h.p.timing.streamTimeout = time.Hour // no registration lasts so long that the delay starts again
	h.p.timing.retryMin, h.p.timing.retryMax = 20*time.Millisecond, 160*time.Millisecond
	k := h.register()
	delay := h.p.timing.retryMin
	for n := 1; n <= 14; n++ { // without the limit, the last delay would be longer than the test may take
		h.waitResource(k, gpu, func(res kubelettest.Resource) bool { return listed(1, 1)(res) && res.Registrations == n })
		h.waitStatus(isRegistered)
		start := time.Now()
		k.Drop(gpu)
		h.waitResource(k, gpu, func(res kubelettest.Resource) bool { return res.Registrations == n+1 })
		if d := time.Since(start); d < delay/2 {
			t.Errorf("registered again %v after the end of registration %d, want at least %v", d, n, delay/2)
		}
		delay = min(2*delay, h.p.timing.retryMax)
	}
}

// The end of a registration that has lasted delays the next one by no more than the settle time.
func TestRegistrarRetriesAtOnceAfterLastingRegistration(t *testing.T) {
	t.Parallel()
	h := newHarness(t, snapshot(1))
	h.p.timing.retryMin, h.p.timing.retryMax = time.Hour, time.Hour
	k := h.register()
	<-time.After(h.p.timing.streamTimeout + h.p.timing.poll)
	k.Drop(gpu)
	h.waitResource(k, gpu, func(res kubelettest.Resource) bool { return listed(1, 1)(res) && res.Registrations == 2 })
	h.waitStatus(isRegistered)
	k.Drop(gpu)
	ctx, cancel := context.WithTimeout(h.ctx, 10*h.p.timing.settle)
	defer cancel()
	if s, err := k.WaitFor(ctx, func(s kubelettest.State) bool { return s.Resources[gpu].Registrations > 2 }); err == nil {
		t.Errorf("registered again after a registration that has not lasted: %+v", s)
	}
}

// The pauses between attempts start anew with a new kubelet or socket, and after a registration that has lasted.
func TestRegistrarRetriesSoonAgain(t *testing.T) {
	for name, begin := range map[string]func(*registrar){
		"another kubelet or socket": func(r *registrar) { r.scheduleRegistration("test") },
		"a lasting registration": func(r *registrar) {
			r.phase, r.phaseSince = registered, time.Now().Add(-time.Hour)
			r.followStreams() // it has no stream
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newAuditHarness().registrar
			pause := func() time.Duration {
				r.retryLater("test")
				return time.Until(r.nextAttempt)
			}
			for range 20 {
				pause()
			}
			if p := pause(); p < r.retryMax/3 {
				t.Errorf("pause %v after twenty failures", p)
			}
			if begin(r); !r.nextAttempt.IsZero() {
				t.Errorf("the first attempt waits for %v", r.nextAttempt)
			}
			if p := pause(); p > r.retryMin {
				t.Errorf("pause %v, want at most %v", p, r.retryMin)
			}
		})
	}
}

// With two streams open, the end of the older one makes the kubelet close the newer one.
func TestRegistrarRegistersAfterNewerStreamEnds(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h, k := startHarnessOn(t, v, snapshot(2))
		h.remove(h.socket())
		h.waitStatus(func(s ResourceStatus) bool { return s.Registered && s.Streams == 2 })
		k.Drop(gpu)
		// The stream of the first registration is still open and proves nothing.
		h.waitResource(k, gpu, func(res kubelettest.Resource) bool { return listed(2, 2)(res) && res.Registrations == 3 })
		h.waitStatus(func(s ResourceStatus) bool { return s.Registered && s.Streams == 2 })
	})
}

func TestRegistrarRetriesRefusedRegistration(t *testing.T) {
	onEachKubelet(t, func(t *testing.T, v kubelettest.Version) {
		h := newHarness(t, snapshot(2))
		h.version = v
		h.p.timing.streamTimeout = shortTimeout
		k := h.kubelet()
		k.SetFault(kubelettest.Fault{RegisterError: "too many plugins"})
		h.run()
		s := h.waitStatus(unregisteredFor("too many plugins"))
		if !strings.Contains(s.Err, gpu) || !strings.Contains(s.Err, "kubelet.sock") {
			t.Errorf("%+v names neither the resource nor the socket", s)
		}
		k.SetFault(kubelettest.Fault{IgnoreRegistration: true})
		h.waitStatus(func(s ResourceStatus) bool { return s.Registrations == 2 && unregisteredFor("ListAndWatch")(s) })
		h.waitLog(msgUnregistered, h.p.timing.streamTimeout.String(), 1)
		k.SetFault(kubelettest.Fault{})
		h.waitResource(k, gpu, listed(2, 2))
		h.waitStatus(isRegistered)
		h.waitLog(msgUnregistered, "", 2) // one for each cause
		k.SetFault(kubelettest.Fault{RegisterError: "too many plugins"})
		k.Drop(gpu)
		h.waitLog(msgUnregistered, "too many plugins", 2) // the registration between them makes it news
		k.SetFault(kubelettest.Fault{})
		h.waitStatus(isRegistered)
	})
}

func TestServerServesTwoKubelets(t *testing.T) {
	t.Parallel()
	h, k := startHarness(t, snapshot(2))
	other := newHarness(t, nil)
	otherKubelet := other.kubelet()
	if err := os.Symlink(h.socket(), filepath.Join(other.pluginDir(), "link.sock")); err != nil {
		t.Fatal(err)
	}
	if err := register(h.ctx, filepath.Join(other.pluginDir(), "kubelet.sock"), gpu, "link.sock"); err != nil {
		t.Fatal(err)
	}
	other.waitResource(otherKubelet, gpu, listed(2, 2))
	h.waitStatus(func(s ResourceStatus) bool { return s.Streams == 2 })
	h.setHealth(1, health.Unhealthy)
	h.waitResource(k, gpu, listed(2, 1))
	other.waitResource(otherKubelet, gpu, listed(2, 1))
	otherKubelet.Drop(gpu)
	h.waitStatus(func(s ResourceStatus) bool { return s.Streams == 1 && s.Registered })
	h.setHealth(1, health.Healthy)
	h.waitResource(k, gpu, listed(2, 2))
}

func TestPluginFollowsConfiguration(t *testing.T) {
	t.Parallel()
	h, k := startHarness(t, snapshot(2))
	old, renamed := h.socket(), "example.com/gpu"
	before, err := os.Lstat(old)
	if err != nil {
		t.Fatal(err)
	}
	h.setConfig(func(*Config) {})    // an equal configuration changes nothing
	h.setHealth(1, health.Unhealthy) // seen after the configuration
	res := h.waitResource(k, gpu, listed(2, 1))
	if after, err := os.Lstat(old); err != nil || !os.SameFile(before, after) || res.Registrations != 1 || res.Messages != 2 {
		t.Errorf("%+v, %v", res, err)
	}
	h.setHealth(1, health.Healthy)
	h.waitResource(k, gpu, listed(2, 2))
	h.setConfig(func(c *Config) { c.Resource = renamed })
	h.waitResource(k, renamed, listed(2, 2))
	if s := h.waitStatus(func(s ResourceStatus) bool { return s.Name == renamed && s.Registered }); s.Registrations != 1 {
		t.Errorf("%+v", s)
	}
	if res := h.waitResource(k, gpu, disconnected); res.Allocatable() != 0 || res.Registrations != 1 {
		t.Errorf("the old resource: %+v", res)
	}
	if _, err := os.Lstat(old); err == nil {
		t.Errorf("%s still exists", old)
	}
}

// newTestRegistrar returns a registrar of one GPU that does not run.
func newTestRegistrar(t *testing.T, dir string) *registrar {
	h := newHarness(t, nil)
	return newRegistrar(newTestServer(snapshot(1)), Config{Enabled: true, Resource: gpu, KubeletDir: dir}, shortTiming(), h.p.pods, h.p.log)
}

// The probes must not claim a registration at a socket that is lost. The next registration has another socket.
func TestStatusShowsLostSocketAtOnce(t *testing.T) {
	for name, lose := range map[string]func(r *registrar) error{
		"removed": func(r *registrar) error { return os.Remove(r.socket.Path()) },
		"listener failed": func(r *registrar) error {
			err := r.socket.Listener.Close()
			<-r.served
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := shortDir(t)
			if err := os.Mkdir(filepath.Join(dir, "device-plugins"), 0o750); err != nil {
				t.Fatal(err)
			}
			r := newTestRegistrar(t, dir)
			defer r.stop(false)
			if err := r.listen(t.Context()); err != nil {
				t.Fatal(err)
			}
			leave, _ := r.srv.streams.enter()
			defer leave()
			r.phase, r.accepted = registered, true
			if r.checkSocket(); !r.status().Registered {
				t.Fatalf("%+v", r.status())
			}
			first := r.socket
			if err := lose(r); err != nil {
				t.Fatal(err)
			}
			if r.checkSocket(); r.status().Registered || r.status().Err == "" {
				t.Errorf("%+v", r.status())
			}
			if err := r.listen(t.Context()); err != nil || r.socket.Path() == first.Path() {
				t.Errorf("listening at %s: %v", r.socket.Path(), err)
			}
		})
	}
}

func TestRegistrarStopsBeforeListening(t *testing.T) {
	r := newTestRegistrar(t, filepath.Join(shortDir(t), "absent"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r.run(ctx)
	r.stop(true)
}
