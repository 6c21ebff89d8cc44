package plugin

import (
	"context"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

func TestServesTheKubelet(t *testing.T) {
	r := newRig(t, snapshot(8))
	k := r.kubelet()
	r.run()
	res := r.wait(k, gpu, listed(8, 8))
	if res.Endpoint != filepath.Base(r.socket()) || !res.Preferred || !slices.Equal(res.Devices[7].NUMA, []int{1}) {
		t.Errorf("%+v", res)
	}
	if info, err := os.Lstat(r.socket()); err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("our socket: %v, %v", info, err)
	}
	r.status(isRegistered)

	a, err := k.Allocate(r.ctx, gpu, 2)
	if err != nil || a.Response.Envs["NVIDIA_VISIBLE_DEVICES"] != "GPU-0,GPU-1" {
		t.Errorf("Allocate: %+v, %v", a, err)
	}
	if a, err = k.Allocate(r.ctx, gpu, 4); err != nil || a.Response.Envs["NVIDIA_VISIBLE_DEVICES"] != "GPU-4,GPU-5,GPU-6,GPU-7" {
		t.Errorf("Allocate: %+v, %v", a, err)
	}
	_, err = k.AllocateIDs(r.ctx, gpu, "GPU-0", "GPU-77")
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), `"GPU-77"`) {
		t.Errorf("Allocate of an unknown device: %v", err)
	}

	r.snaps.Store(with(r.snaps.Load(), 3, health.Unhealthy))
	res = r.wait(k, gpu, listed(8, 7))
	if res.Devices[3].Healthy {
		t.Errorf("the wrong device is unhealthy: %+v", res.Devices)
	}
	_, err = k.AllocateIDs(r.ctx, gpu, "GPU-3")
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "GPU-3 is unhealthy: the GPU has fallen off the bus (xid-79)") {
		t.Errorf("Allocate of an unhealthy device: %v", err)
	}
	s := r.status(isRegistered)
	if s.Name != gpu || s.Err != "" || s.Devices != 8 || s.Healthy != 7 || s.Streams != 1 || s.Registrations != 1 || s.Allocations != 2 ||
		s.AllocationErrors[reasonUnknownDevice] != 1 || s.AllocationErrors[reasonUnhealthyDevice] != 1 {
		t.Errorf("status %+v", s)
	}
	// The log is another reader than the stream: it may skip a snapshot that nobody waits for it to see.
	r.logged("device is unhealthy for the kubelet")
	r.snaps.Store(with(r.snaps.Load(), 3, health.Healthy))
	if res = r.wait(k, gpu, listed(8, 8)); res.Messages != 3 {
		t.Errorf("%d messages, want 3", res.Messages)
	}
	r.logged("device is healthy again for the kubelet")

	r.stop()
	r.wait(k, gpu, func(r kubelettest.Resource) bool { return !r.Connected })
	if entries, err := os.ReadDir(filepath.Dir(r.socket())); err != nil || len(entries) != 1 {
		t.Errorf("left behind beside kubelet.sock: %v, %v", entries, err)
	}
	if s := r.p.Status(); s.Resources != nil {
		t.Errorf("after the end: %+v", s)
	}
	for _, line := range []string{"registered with the kubelet", "device is unhealthy for the kubelet", "device is healthy again for the kubelet"} {
		if n := r.logs.FilterMessage(line).Len(); n != 1 {
			t.Errorf("%q was logged %d times", line, n)
		}
	}
}

func TestNothingRegistersBeforeTheFirstPoll(t *testing.T) {
	never := snapshot(0)
	never.At, never.Source.Err = time.Time{}, "libdcgm.so.4 is missing"
	r := newRig(t, never)
	k := r.kubelet()
	r.run()
	says := func(words string) func(Status) bool {
		return func(s Status) bool { return strings.Contains(s.Err, words) && len(s.Resources) == 0 }
	}
	r.whole(says("not been seen yet: libdcgm.so.4 is missing"))
	r.snaps.Store(snapshot(0))
	r.whole(says("no GPUs"))
	if s := k.State(); len(s.Resources) != 0 {
		t.Errorf("registered without GPUs: %+v", s)
	}
	r.snaps.Store(snapshot(2))
	r.wait(k, gpu, listed(2, 2))
	r.whole(func(s Status) bool { return s.Err == "" && len(s.Resources) == 1 })
	// Removed for good, says the inventory.
	r.snaps.Store(snapshot(0))
	r.whole(says("no GPUs"))
	if _, err := os.Lstat(r.socket()); err == nil {
		t.Error("the socket of a resource without devices is still there")
	}
}

func TestWithoutConfiguration(t *testing.T) {
	r := newRig(t, snapshot(1))
	cfg := r.cfg.Load()
	r.cfg.Store(nil)
	k := r.kubelet()
	r.run()
	r.whole(func(s Status) bool { return s.Err == "no configuration yet" })
	r.cfg.Store(cfg)
	r.wait(k, gpu, listed(1, 1))
}

func TestKubeletComesLate(t *testing.T) {
	r := newRig(t, snapshot(1))
	if err := os.Remove(filepath.Join(r.root, "device-plugins")); err != nil {
		t.Fatal(err)
	}
	r.run()
	s := r.status(func(s ResourceStatus) bool { return strings.Contains(s.Err, "plugin.kubeletDir") })
	if s.Registered || s.Registrations != 0 {
		t.Errorf("%+v", s)
	}
	if err := os.Mkdir(filepath.Join(r.root, "device-plugins"), 0o750); err != nil {
		t.Fatal(err)
	}
	r.status(func(s ResourceStatus) bool { return strings.Contains(s.Err, "kubelet.sock is not there") })
	k := r.kubelet()
	r.wait(k, gpu, listed(1, 1))
	r.status(isRegistered)
	// Several looks each, one line each.
	if n := r.logs.FilterMessage("not registered with the kubelet").Len(); n != 2 {
		t.Errorf("%d lines, want one for each cause: %v", n, r.lines())
	}
}

func TestKubeletRestarts(t *testing.T) {
	r := newRig(t, snapshot(8))
	k := r.kubelet()
	r.run()
	for range 10 {
		r.wait(k, gpu, listed(8, 8))
		r.status(isRegistered)
		if err := k.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	if res := r.wait(k, gpu, listed(8, 8)); res.Registrations != 1 {
		t.Errorf("registered %d times with one kubelet", res.Registrations)
	}
	// Away for longer than a retry takes.
	k.Stop()
	s := r.status(func(s ResourceStatus) bool { return strings.Contains(s.Err, "connection refused") })
	if s.Registered {
		t.Errorf("%+v", s)
	}
	if err := k.Restart(); err != nil {
		t.Fatal(err)
	}
	r.wait(k, gpu, listed(8, 8))
	r.status(isRegistered)
}

func TestOurSocketIsRemoved(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(2, 2))
	r.status(isRegistered)
	for n := 2; n < 5; n++ {
		if err := os.Remove(r.socket()); err != nil {
			t.Fatal(err)
		}
		// The kubelet never loses its devices meanwhile: the old stream lives on.
		s, err := k.WaitFor(r.ctx, func(s kubelettest.State) bool {
			res := s.Resources[gpu]
			return res.Allocatable() != 2 || res.Registrations == n && res.Messages == n
		})
		if err != nil || s.Resources[gpu].Allocatable() != 2 {
			t.Fatalf("%+v, %v", s, err)
		}
		r.status(func(s ResourceStatus) bool { return s.Registered && s.Streams == n })
	}
	if _, err := k.Allocate(r.ctx, gpu, 1); err != nil {
		t.Error(err)
	}
	// Every stream hears of a change.
	r.snaps.Store(with(r.snaps.Load(), 0, health.Unhealthy))
	r.wait(k, gpu, func(res kubelettest.Resource) bool { return res.Allocatable() == 1 && res.Messages == 8 })
}

func TestDirectoryIsWipedUnderALiveKubelet(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(2, 2))
	before := r.status(isRegistered)
	for _, path := range []string{r.socket(), filepath.Join(r.root, "device-plugins", "kubelet.sock")} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	// Nobody to register with, and no need to: the stream is still there.
	r.logged("kubelet.sock is not there")
	if s := r.p.Status().Resources[0]; !s.Registered || s.Registrations != before.Registrations {
		t.Errorf("%+v", s)
	}
	if _, err := os.Lstat(r.socket()); err != nil {
		t.Error(err)
	}
	r.snaps.Store(with(r.snaps.Load(), 0, health.Unhealthy))
	r.wait(k, gpu, listed(2, 1))
}

// A kubelet that stops is one line, however many sockets of its are gone; so is one that drops us and lives on.
func TestKubeletStopsOnce(t *testing.T) {
	for name, c := range map[string]struct {
		stop func(*rig, *kubelettest.Kubelet)
		why  string
	}{
		"its sockets stay": {func(_ *rig, k *kubelettest.Kubelet) { k.Stop() }, "connection refused"},
		"its sockets go": {func(r *rig, k *kubelettest.Kubelet) {
			remove := func(dir string) {
				if err := os.Remove(filepath.Join(r.root, dir, "kubelet.sock")); err != nil {
					r.Error(err)
				}
			}
			remove("device-plugins")
			k.Stop()
			remove("pod-resources")
		}, "kubelet.sock is not there"},
		"it lives": {func(_ *rig, k *kubelettest.Kubelet) { k.Drop(gpu) }, "closed ListAndWatch"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, snapshot(2))
			k := r.kubelet()
			r.run()
			r.wait(k, gpu, listed(2, 2))
			r.status(isRegistered)
			r.holders("asked", func(h Holders) bool { return h.Err == "" })
			before := r.logs.FilterLevelExact(zapcore.WarnLevel).Len()
			c.stop(r, k)
			r.logged(c.why)
			if name == "it lives" {
				r.status(isRegistered)
			} else {
				// For long enough that the holders are old, which the status says and the log need not.
				r.holders("dropped", func(h Holders) bool { return h.By == nil })
			}
			if warned := r.logs.FilterLevelExact(zapcore.WarnLevel).All()[before:]; len(warned) != 1 {
				t.Errorf("%d warnings: %v", len(warned), r.lines())
			}
			if name == "it lives" {
				return
			}
			if err := k.Restart(); err != nil {
				t.Fatal(err)
			}
			r.wait(k, gpu, listed(2, 2))
			r.status(isRegistered)
			r.holders("asked again", func(h Holders) bool { return h.Err == "" })
		})
	}
}

// logged waits until a cause has been logged.
func (r *rig) logged(why string) {
	r.Helper()
	r.whole(func(Status) bool {
		return slices.ContainsFunc(r.lines(), func(line string) bool { return strings.Contains(line, why) })
	})
}

func TestKubeletDropsUs(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	for n := 1; n < 4; n++ {
		r.wait(k, gpu, func(res kubelettest.Resource) bool { return listed(2, 2)(res) && res.Registrations == n })
		r.status(isRegistered)
		start := time.Now()
		k.Drop(gpu)
		r.wait(k, gpu, func(res kubelettest.Resource) bool { return res.Registrations == n+1 })
		if d := time.Since(start); d < r.p.timing.settle {
			t.Errorf("registered again after %v, before the kubelet could settle", d)
		}
	}
	r.wait(k, gpu, listed(2, 2))
}

// With two streams open, the end of the older one makes the kubelet close the newer.
func TestOldStreamTakesTheNewOneWithIt(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(2, 2))
	if err := os.Remove(r.socket()); err != nil {
		t.Fatal(err)
	}
	r.status(func(s ResourceStatus) bool { return s.Registered && s.Streams == 2 })
	k.Drop(gpu)
	// The stream of the first registration is still open, and proves nothing.
	r.wait(k, gpu, func(res kubelettest.Resource) bool { return listed(2, 2)(res) && res.Registrations == 3 })
	r.status(func(s ResourceStatus) bool { return s.Registered && s.Streams == 2 })
}

func TestKubeletMisbehaves(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	k.SetFault(kubelettest.Fault{RegisterError: "the moon is full"})
	r.run()
	s := r.status(func(s ResourceStatus) bool { return strings.Contains(s.Err, "the moon is full") })
	if s.Registered || !strings.Contains(s.Err, gpu) || !strings.Contains(s.Err, "kubelet.sock") {
		t.Errorf("%+v", s)
	}
	k.SetFault(kubelettest.Fault{IgnoreRegistration: true})
	r.status(func(s ResourceStatus) bool {
		return s.Registrations == 2 && strings.Contains(s.Err, "waiting for it to open ListAndWatch")
	})
	r.logged("did not open ListAndWatch within")
	k.SetFault(kubelettest.Fault{})
	r.wait(k, gpu, listed(2, 2))
	r.status(isRegistered)
	if n := r.logs.FilterMessage("not registered with the kubelet").Len(); n != 2 {
		t.Errorf("%d lines, want one for each cause: %v", n, r.lines())
	}
}

func TestTwoStreams(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(2, 2))
	// Another reader, by a registration that did not come from us.
	other := newRig(t, nil)
	otherKubelet := other.kubelet()
	if err := os.Symlink(r.socket(), filepath.Join(other.root, "device-plugins", "link.sock")); err != nil {
		t.Fatal(err)
	}
	if err := register(r.ctx, filepath.Join(other.root, "device-plugins", "kubelet.sock"), gpu, "link.sock"); err != nil {
		t.Fatal(err)
	}
	other.wait(otherKubelet, gpu, listed(2, 2))
	r.status(func(s ResourceStatus) bool { return s.Streams == 2 })
	r.snaps.Store(with(r.snaps.Load(), 1, health.Unhealthy))
	r.wait(k, gpu, listed(2, 1))
	other.wait(otherKubelet, gpu, listed(2, 1))
	otherKubelet.Drop(gpu)
	r.status(func(s ResourceStatus) bool { return s.Streams == 1 && s.Registered })
	r.snaps.Store(with(r.snaps.Load(), 1, health.Healthy))
	r.wait(k, gpu, listed(2, 2))
}

func TestConfigChanges(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(2, 2))
	old := r.socket()
	same := *r.cfg.Load()
	r.cfg.Store(&same)
	r.cfg.Store(&Config{Enabled: true, Resource: "example.com/gpu", KubeletDir: r.root})
	r.wait(k, "example.com/gpu", listed(2, 2))
	s := r.status(func(s ResourceStatus) bool { return s.Name == "example.com/gpu" && s.Registered })
	if s.Registrations != 1 {
		t.Errorf("%+v", s)
	}
	if res := r.wait(k, gpu, func(res kubelettest.Resource) bool { return !res.Connected }); res.Allocatable() != 0 || res.Registrations != 1 {
		t.Errorf("the old resource: %+v", res)
	}
	if _, err := os.Lstat(old); err == nil {
		t.Errorf("%s is still there", old)
	}

	other := newRig(t, nil)
	otherKubelet := other.kubelet()
	r.cfg.Store(&Config{Enabled: true, Resource: "example.com/gpu", KubeletDir: other.root})
	other.wait(otherKubelet, "example.com/gpu", listed(2, 2))
	r.wait(k, "example.com/gpu", func(res kubelettest.Resource) bool { return !res.Connected })
}

func TestUnchangedConfigTouchesNothing(t *testing.T) {
	r := newRig(t, snapshot(2))
	k := r.kubelet()
	r.run()
	r.wait(k, gpu, listed(2, 2))
	before, err := os.Lstat(r.socket())
	if err != nil {
		t.Fatal(err)
	}
	same := *r.cfg.Load()
	r.cfg.Store(&same)
	r.snaps.Store(with(r.snaps.Load(), 1, health.Unhealthy)) // seen after the configuration
	res := r.wait(k, gpu, listed(2, 1))
	after, err := os.Lstat(r.socket())
	if err != nil || !os.SameFile(before, after) || res.Registrations != 1 || res.Messages != 2 {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestForeignFileStays(t *testing.T) {
	r := newRig(t, snapshot(1))
	k := r.kubelet()
	if err := os.WriteFile(r.socket(), []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.run()
	s := r.status(func(s ResourceStatus) bool { return strings.Contains(s.Err, "is not a socket") })
	if s.Registered || !strings.Contains(s.Err, r.socket()) {
		t.Errorf("%+v", s)
	}
	r.stop()
	if text, err := os.ReadFile(r.socket()); err != nil || string(text) != "mine" {
		t.Errorf("the file that was there: %q, %v", text, err)
	}
	if len(k.State().Resources) != 0 {
		t.Errorf("registered: %+v", k.State())
	}
}

func TestForeignSocket(t *testing.T) {
	r := newRig(t, snapshot(1))
	k := r.kubelet()
	listen := func(path string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		return l
	}
	l := listen(r.socket())
	r.run()
	r.status(func(s ResourceStatus) bool { return !s.Registered && strings.Contains(s.Err, "another process serves") })
	// Its process dies: the socket is stale, and replaced.
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	r.wait(k, gpu, listed(1, 1))
	r.status(isRegistered)

	// Another agent takes our place while the kubelet's stream goes on; by a rename, or we would be back
	// between its two steps.
	l = listen(r.socket() + ".new")
	if err := os.Rename(r.socket()+".new", r.socket()); err != nil {
		t.Fatal(err)
	}
	s := r.status(func(s ResourceStatus) bool { return strings.Contains(s.Err, "another process serves") })
	if s.Registered || s.Streams != 1 {
		t.Errorf("%+v", s)
	}
	r.stop()
	if _, err := os.Lstat(r.socket()); err != nil {
		t.Errorf("the other's socket: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func TestPathTooLong(t *testing.T) {
	path := filepath.Join("/", strings.Repeat("d", 120), "x.sock")
	if _, err := openSocket(t.Context(), path); err == nil || !strings.Contains(err.Error(), "plugin.kubeletDir") {
		t.Errorf("%v", err)
	}
}

func TestListenerDies(t *testing.T) {
	srv := newTestServer(snapshot(1))
	dir := shortDir(t)
	if err := os.Mkdir(filepath.Join(dir, "device-plugins"), 0o750); err != nil {
		t.Fatal(err)
	}
	l := newLink(srv, Config{Enabled: true, Resource: gpu, KubeletDir: dir}, quick(), newRig(t, nil).p.pods, newRig(t, nil).p.log)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	defer l.stop(false)
	if err := l.listen(ctx); err != nil {
		t.Fatal(err)
	}
	first := l.own
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	<-l.served
	if err := l.listen(ctx); err != nil || l.own == first {
		t.Errorf("not listening again: %v", err)
	}
}
