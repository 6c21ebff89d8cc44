package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/healthtest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestMain(m *testing.M) { healthtest.Main(m) }

// driverRig runs a whole driver: a kubelet calls it over unix sockets, and it publishes to an API server.
type driverRig struct {
	*Driver
	t       *testing.T
	dir     string // of the kubelet
	cdi     string
	api     *apiservertest.Server
	kubelet *kubelettest.DRA
	driver  string // that the kubelet calls
	end     func() // ends the process of the driver

	config     *health.Latest[plugin.Config]
	snapshots  *health.Latest[health.Snapshot]
	plugin     *health.Latest[plugin.Handover] // whether the device plugin has released the devices
	holders    *health.Latest[podresources.Holders]
	mps        *health.Latest[mps.Desired]
	properties *health.Latest[health.KnownProperties]
	options    func(*Options) // edits the options of the next process
	before     func(*Driver)  // is called before it runs
}

// newDriverRig starts a kubelet and an API server; start starts a driver.
func newDriverRig(t *testing.T, edits ...func(*plugin.Config)) *driverRig {
	t.Helper()
	dir, err := os.MkdirTemp("", "gna") // short, because of the sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	kubelet, err := kubelettest.StartDRA(dir, kubelettest.V137)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kubelet.Stop)
	g := &driverRig{
		t: t, dir: dir, driver: plugin.DefaultDRADriver, cdi: filepath.Join(dir, "cdi"), api: apiservertest.New(t, testNode), kubelet: kubelet,
		config: &health.Latest[plugin.Config]{}, snapshots: &health.Latest[health.Snapshot]{}, plugin: &health.Latest[plugin.Handover]{},
		holders: &health.Latest[podresources.Holders]{}, mps: &health.Latest[mps.Desired]{},
		properties: noProperties(),
		options:    func(*Options) {},
		before:     func(*Driver) {},
	}
	cfg := plugin.DefaultConfig()
	cfg.API, cfg.KubeletDir, cfg.CDI.Dir = plugin.APIDRA, dir, g.cdi
	for _, edit := range edits {
		edit(&cfg)
	}
	g.config.Store(&cfg)
	g.plugin.Store(&plugin.Handover{Released: true})
	g.holders.Store(&podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}})
	g.poll(healthtest.NodeDevices()[:3]...)
	return g
}

// noProperties is what NVML has before it was asked.
func noProperties() *health.Latest[health.KnownProperties] {
	known := &health.Latest[health.KnownProperties]{}
	known.Store(&health.KnownProperties{})
	return known
}

// servingRig starts a driver, and waits until it serves.
func servingRig(t *testing.T) *driverRig {
	t.Helper()
	g := newDriverRig(t)
	g.start()
	g.awaitServing()
	return g
}

// start starts a process of the driver, whose intervals are short.
func (g *driverRig) start() {
	o := Options{
		Config: g.config, Snapshots: g.snapshots, Node: testNode, BootID: "boot", Connect: g.api.Client, PluginReleased: g.plugin,
		Holders: g.holders, Ask: g.ask,
		NoPlugin: func() bool { return false }, MPS: g.mps, Simulated: func() bool { return true }, Faster: 50,
		Properties: g.properties, AwaitProperties: func(context.Context, *health.Snapshot) {}, Log: zap.NewNop(),
	}
	g.options(&o)
	g.Driver = New(o)
	g.before(g.Driver)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	g.end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			g.t.Error(err)
		}
	})
	g.t.Cleanup(g.end)
}

// restart ends the process of the driver and starts another, which the kubelet does not take for the one before.
func (g *driverRig) restart() {
	g.t.Helper()
	g.end()
	g.await("forgotten by the kubelet", func() bool { return !g.kubelet.Registered(g.driver) })
	snap := *g.snapshots.Load()
	snap.At = time.Now()
	g.snapshots.Store(&snap)
	g.start()
}

// ask is the kubelet's answer.
func (g *driverRig) ask(context.Context, time.Duration) podresources.Holders {
	h := *g.holders.Load()
	h.At = time.Now()
	g.holders.Store(&h)
	return h
}

// configure changes the configuration.
func (g *driverRig) configure(edit func(*plugin.Config)) {
	cfg := *g.config.Load()
	edit(&cfg)
	g.config.Store(&cfg)
}

func usePlugin(c *plugin.Config) { c.API = plugin.APIDevicePlugin }
func useDRA(c *plugin.Config)    { c.API = plugin.APIDRA }

// poll stores a snapshot of devices.
func (g *driverRig) poll(devices ...health.DeviceState) {
	g.snapshots.Store(&health.Snapshot{At: time.Now(), Source: health.Source{Kind: "sim", Status: health.SourceUp}, Devices: devices})
}

// await waits until something is true.
func (g *driverRig) await(what string, condition func() bool) {
	g.t.Helper()
	for limit := time.Now().Add(time.Minute); !condition(); { // a loaded machine is slow
		if time.Now().After(limit) {
			g.t.Fatalf("not %s: %+v", what, g.Status())
		}
		<-time.After(2 * time.Millisecond)
	}
}

// awaitServing waits until the kubelet has registered the driver, and the API server has its devices.
func (g *driverRig) awaitServing() {
	g.t.Helper()
	g.await("serving", func() bool {
		s := g.Status()
		return s.Registered && s.Err == "" && !s.Behind && !s.Published.IsZero() && g.kubelet.Registered(s.DriverName)
	})
}

// awaitErr waits until the status says why the driver does not serve.
func (g *driverRig) awaitErr(parts ...string) {
	g.t.Helper()
	g.await("the error with "+strings.Join(parts, " and "), func() bool {
		err := g.Status().Err
		return err != "" && !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(err, part) })
	})
}

// awaitDevices waits until the API server has these devices, each as "name" or "name!taint,taint".
func (g *driverRig) awaitDevices(want ...string) {
	g.t.Helper()
	g.await("published "+strings.Join(want, " "), func() bool { return slices.Equal(g.published(), want) })
}

func (g *driverRig) published() (devices []string) {
	for _, s := range g.api.Slices() {
		for _, d := range s.Spec.Devices {
			text := d.Name
			for i, taint := range d.Taints {
				text += map[bool]string{true: "!", false: ","}[i == 0] + taintName(taint)
			}
			devices = append(devices, text)
		}
	}
	return devices
}

// awaitReleased waits until the device plugin may have the devices.
func (g *driverRig) awaitReleased() {
	g.t.Helper()
	g.await("released", func() bool { r := g.DRAReleased().Load(); return r != nil && r.Released })
}

// awaitNotReleased waits until the driver says why the device plugin must not have the devices.
func (g *driverRig) awaitNotReleased(parts ...string) {
	g.t.Helper()
	g.await("unreleased because of "+strings.Join(parts, " and "), func() bool {
		r := g.DRAReleased().Load()
		return r != nil && !r.Released && !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(r.Reason, part) })
	})
}

func kubeletClaim(c *resourceapi.ResourceClaim) kubelettest.Claim {
	return kubelettest.Claim{Namespace: c.Namespace, Name: c.Name, UID: string(c.UID)}
}

// tryPrepare puts a claim to the API server and lets the kubelet prepare it.
func (g *driverRig) tryPrepare(c *resourceapi.ResourceClaim) (names []string, err error) {
	if g.api.Get("resourceclaims", c.Namespace, c.Name) == nil {
		g.api.Put(c)
	}
	devices, err := g.kubelet.Prepare(g.t.Context(), g.driver, kubeletClaim(c))
	for _, d := range devices {
		names = append(names, d.CDI...)
	}
	return names, err
}

func (g *driverRig) prepare(c *resourceapi.ResourceClaim) (names []string) {
	g.t.Helper()
	names, err := g.tryPrepare(c)
	if err != nil {
		g.t.Fatal(err)
	}
	return names
}

func (g *driverRig) refused(c *resourceapi.ResourceClaim, parts ...string) {
	g.t.Helper()
	names, err := g.tryPrepare(c)
	if err == nil {
		g.t.Fatalf("prepared %s as %q", c.Name, names)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			g.t.Errorf("%q lacks %q", err, part)
		}
	}
}

func (g *driverRig) unprepare(c *resourceapi.ResourceClaim) {
	g.t.Helper()
	if err := g.kubelet.Unprepare(g.t.Context(), g.driver, kubeletClaim(c)); err != nil {
		g.t.Fatal(err)
	}
}

// specs returns the UIDs of the claims with a CDI spec in a directory.
func (g *driverRig) specs(dir string) []string {
	g.t.Helper()
	uids, err := cdi.ClaimSpecs(dir)
	if err != nil {
		g.t.Fatal(err)
	}
	return uids
}

// A driver publishes the devices, prepares claims for the kubelet and tells it the health of devices. A restart of it changes nothing of
// that.
func TestDriverServesKubelet(t *testing.T) {
	t.Parallel()
	g := servingRig(t)
	g.awaitDevices("gpu-0", "gpu-1", "gpu-2")
	a := claim("a", result("gpu-1"))
	want := []string{"k8s.gpu-node-agent/claim=uid-a-gpu-1"}
	if names := g.prepare(a); !slices.Equal(names, want) {
		t.Errorf("prepared %q, want %q", names, want)
	}
	if uids := g.specs(g.cdi); !slices.Equal(uids, []string{"uid-a"}) {
		t.Errorf("specs of %q", uids)
	}
	if c := g.Claims().Load().ByUID["uid-a"]; c.Name != "a" || len(c.Devices) != 1 || c.Devices[0].Device != "GPU-1" {
		t.Errorf("claims %+v", c)
	}
	if c := g.Prepared().Load(); len(c.List) != 1 || c.Lost || c.List[0].Parts[0].Device != "GPU-1" {
		t.Errorf("claims for decisions %+v", c)
	}
	g.await("healthy for the kubelet", func() bool { h, ok := g.kubelet.Health("node1/gpu-1"); return ok && h.Health == "HEALTHY" })
	if info, err := os.Stat(filepath.Join(g.dir, "plugins", plugin.DefaultDRADriver)); err != nil || info.Mode().Perm() != 0o750 {
		t.Errorf("the directory of the checkpoint: %v, %v", info.Mode(), err) // others must not read which pods have which GPU
	}
	s := g.Status()
	if !s.Enabled || s.Handover || !s.HandoverSince.IsZero() || s.DriverName != plugin.DefaultDRADriver || s.Pool != testNode ||
		s.Devices != 3 || s.Slices != 1 {
		t.Errorf("status %+v", s)
	}
	if want := []string{
		filepath.Join(g.dir, "plugins_registry"),
		filepath.Join(g.dir, "plugins", plugin.DefaultDRADriver),
	}; !slices.Equal(g.Dirs(), want) {
		t.Errorf("directories %q, want %q", g.Dirs(), want)
	}
	if r := g.DRAReleased().Load(); r.Released || r.Reason == "" {
		t.Errorf("released %+v", r)
	}
	if devices, known := g.PublishedDevices(); !known || len(devices) != 3 {
		t.Errorf("published %q, %v", devices, known)
	}
	if n := len(DurationBounds()) + 1; len(s.Prepares.Counts) != n || len(s.Unprepares.Counts) != n || s.Prepares.Sum <= 0 ||
		s.Unprepares.Sum != 0 {
		t.Errorf("durations %+v, %+v", s.Prepares, s.Unprepares)
	}
	version := g.api.Slices()[0].ResourceVersion
	if saved := g.Saved().Load(); saved != nil {
		t.Errorf("saved %s without a handover", *saved)
	}

	g.restart()
	g.awaitServing()
	if names := g.prepare(a); !slices.Equal(names, want) {
		t.Errorf("after a restart %q, want %q", names, want)
	}
	if now := g.api.Slices()[0].ResourceVersion; now != version {
		t.Error("the restart has written the slices")
	}
	g.poll(breakGPU0(healthtest.NodeDevices()[:3])...)
	g.await("unhealthy for the kubelet", func() bool { h, _ := g.kubelet.Health("node1/gpu-0"); return h.Health == "UNHEALTHY" })
	g.awaitDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1", "gpu-2")
	g.unprepare(a)
	if s := g.Status(); s.Unprepares.Sum <= 0 {
		t.Errorf("durations %+v", s.Unprepares)
	}
	if uids := g.specs(g.cdi); len(uids) > 0 || len(g.Claims().Load().ByUID) > 0 {
		t.Errorf("left: %q, %+v", uids, g.Claims().Load())
	}
}

// hold stores which container holds which device by a claim.
func (g *driverRig) hold(by map[health.DeviceID][]podresources.Holder) {
	g.holders.Store(&podresources.Holders{By: by})
}

// A driver does nothing before it has a configuration.
func TestDriverAwaitsConfiguration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := &health.Latest[plugin.Config]{}
		d := New(Options{
			Config: config, PluginReleased: &health.Latest[plugin.Handover]{}, Snapshots: &health.Latest[health.Snapshot]{},
			Log: zap.NewNop(),
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- d.Run(ctx) }()
		synctest.Wait()
		if d.DRAReleased().Load() != nil {
			t.Errorf("released %+v", d.DRAReleased().Load())
		}
		config.Store(&plugin.Config{Enabled: false, KubeletDir: t.TempDir()})
		synctest.Wait()
		if r := d.DRAReleased().Load(); r == nil || !r.Released {
			t.Errorf("released %+v", r)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The devices go to the device plugin when every claim has ended, and come back when it has released them.
func TestDriverHandsOver(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	g.plugin.Store(nil)
	g.start()
	g.awaitErr("waiting for the device plugin", "it is starting")
	g.awaitReleased()
	g.plugin.Store(&plugin.Handover{Released: true})
	g.awaitServing()
	a, b := claim("a", result("gpu-1")), claim("b", result("gpu-0"))
	names := g.prepare(a)
	g.hold(map[health.DeviceID][]podresources.Holder{"GPU-1": {claimHolder(a, "gpu-1")}})

	before := time.Now()
	g.configure(usePlugin)
	g.awaitNotReleased("plugin.api has changed", "claim default/a of default/pod-a")
	g.awaitDevices()
	if n := len(g.api.Slices()); n != 1 {
		t.Errorf("%d slices, want an empty one", n)
	}
	g.await("handing over", func() bool { return !g.Status().HandoverSince.IsZero() })
	if s := g.Status(); !s.Enabled || !s.Handover || s.HandoverSince.Before(before.Round(0)) || s.HandoverSince.After(time.Now()) ||
		s.Err != "" || !s.Registered {
		t.Errorf("status %+v", s)
	}
	if !g.DRAReleased().Load().Pods {
		t.Error("it does not wait for pods only")
	}
	g.refused(b, "releases the devices and prepares no new claim")
	if again := g.prepare(a); !slices.Equal(again, names) {
		t.Errorf("prepared again %q, want %q", again, names)
	}

	g.configure(useDRA) // it has changed its mind
	g.awaitServing()
	g.awaitDevices("gpu-0", "gpu-1", "gpu-2")
	g.await("no handover", func() bool { return !g.Status().Handover && string(*g.Saved().Load()) == "{}" })
	g.awaitNotReleased("dynamic resource allocation serves the devices")
	g.prepare(b)
	g.unprepare(b)

	g.configure(usePlugin)
	g.awaitNotReleased("claim default/a")
	since := g.Status().HandoverSince
	saved := *g.Saved().Load()
	g.restart() // continues
	if err := g.Restore(saved); err != nil {
		t.Fatal(err)
	}
	g.awaitNotReleased("claim default/a")
	g.await("registered", func() bool { return g.Status().Registered })
	if s := g.Status(); !s.HandoverSince.Equal(since) {
		t.Errorf("the handover began at %v, want %v", s.HandoverSince, since)
	}
	g.unprepare(a)
	g.awaitReleased()
	if n := len(g.api.Slices()); n != 0 {
		t.Errorf("%d slices are left", n)
	}
	g.await("forgotten by the kubelet", func() bool { return !g.kubelet.Registered(g.driver) })
	if s := g.Status(); s.Enabled || s.Err != "" || s.Handover || len(g.Dirs()) != 0 {
		t.Errorf("status %+v, directories %q", s, g.Dirs())
	}

	g.plugin.Store(&plugin.Handover{Reason: "pod ml/train holds GPU 0", Pods: true})
	g.configure(useDRA)
	g.awaitErr("waiting for the device plugin", "ml/train")
	if s := g.Status(); !s.Enabled || !s.WaitsForPods || !s.Handover || g.kubelet.Registered(g.driver) || len(g.api.Slices()) != 0 {
		t.Errorf("status %+v", s)
	}
	if r := g.DRAReleased().Load(); !r.Released { // else both wait for each other
		t.Errorf("released %+v", r)
	}
	g.plugin.Store(&plugin.Handover{Released: true})
	g.awaitServing()
	g.awaitNotReleased("dynamic resource allocation serves the devices")
}

// A driver of another name serves nothing while claims of the one before are prepared: it could not end them. It serves when the driver of
// the former name has ended them.
func TestDriverOfAnotherName(t *testing.T) {
	t.Parallel()
	g := servingRig(t)
	a := claim("a", result("gpu-1"))
	names := g.prepare(a)
	const former, next = "gpu.nvidia.com", "gpu.example.com"
	rename := func(name string) {
		t.Helper()
		g.end()
		g.await("forgotten by the kubelet", func() bool { return !g.kubelet.Registered(former) })
		g.configure(func(c *plugin.Config) { c.DRA.DriverName = name })
		g.start()
	}
	rename(next)
	const reason = "plugin.dra.driverName: expected gpu.nvidia.com, got gpu.example.com: 1 claim is prepared by the driver gpu.nvidia.com"
	g.awaitErr(reason)
	g.awaitNotReleased(reason)
	if s := g.Status(); !s.Enabled || s.WaitsForPods || g.kubelet.Registered(next) {
		t.Errorf("status %+v", s)
	}
	g.configure(usePlugin) // the device plugin must not get them either
	g.await("disabled", func() bool { return !g.Status().Enabled })
	g.awaitNotReleased(reason)
	g.configure(useDRA)

	rename(former)
	g.awaitServing()
	if again := g.prepare(a); !slices.Equal(again, names) {
		t.Errorf("prepared again %q, want %q", again, names)
	}
	g.unprepare(a)

	g.driver = next
	rename(next)
	g.awaitServing()
	b := claim("b", result("gpu-1", func(r *resourceapi.DeviceRequestAllocationResult) { r.Driver = next }))
	g.prepare(b)
	if id, ok := g.Device(next, testNode, "gpu-1"); !ok || id != "GPU-1" {
		t.Errorf("gpu-1 is %q, %v", id, ok)
	}
	if _, ok := g.Device(former, testNode, "gpu-1"); ok {
		t.Error("the name of a driver that is gone")
	}
	if _, ok := g.Device(next, "node2", "gpu-1"); ok {
		t.Error("the name of another pool")
	}
}

// What the process before this one served decides which claims count: those of its driver, whose checkpoint the agent's pod may not mount,
// do, and a checkpoint that nobody can read does not, unless it is that driver's.
func TestDriverAfterFormer(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	const old, spec = "gpu.old", "0b5b4a0e"
	writeText(t, filepath.Join(g.dir, "plugins", old, checkpointName), "{")
	startAfter := func(name string) {
		former := *g.config.Load()
		former.DRA.DriverName = name
		g.before = func(d *Driver) { d.SetFormer(&former) }
		g.start()
	}
	const unreadable = "plugin.dra.driverName: expected gpu.old, got gpu.nvidia.com: claims may be prepared"
	g.start()
	g.awaitErr(unreadable)
	g.awaitNotReleased(unreadable)
	g.end()
	startAfter(old)
	g.awaitErr(unreadable)
	g.end()
	startAfter(g.driver)
	g.awaitServing()
	g.end()

	g.await("forgotten by the kubelet", func() bool { return !g.kubelet.Registered(g.driver) })
	if err := cdi.WriteClaimSpec(g.cdi, spec, []cdi.ClaimDevice{{Name: "gpu-0", Env: map[string]string{"A": "b"}}}); err != nil {
		t.Fatal(err)
	}
	startAfter("gpu.example.com")
	const prepared = "plugin.dra.driverName: expected gpu.example.com, got gpu.nvidia.com: 1 claim is prepared"
	g.awaitErr(prepared)
	g.awaitNotReleased(prepared)
	if path, ok := cdi.ClaimSpecPath(g.cdi, spec); !ok || os.Remove(path) != nil { // the pod has ended
		t.Fatalf("%s is not there", path)
	}
	g.awaitServing()
}

// While another driver of its name is on the node, a driver does not register and leaves the slices, which may be those of the other.
// Claims that it has prepared end with it all the same.
func TestDriverBesideAnother(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	g.before = func(d *Driver) { d.timing.call = time.Minute } // a driver that answers late counts as none
	g.poll(healthtest.NodeDevices()[0])
	socket := filepath.Join(g.dir, "plugins_registry", "other.sock")
	stop := serveRegistration(t, socket, registration{kind: registerapi.DRAPlugin, name: g.driver})
	g.start()
	g.awaitErr("another driver of the name gpu.nvidia.com answers at " + socket)
	if err := FindDriver(t.Context(), g.config.Load()); err == nil || !strings.Contains(err.Error(), socket) {
		t.Errorf("found %v", err)
	}
	if len(g.api.Slices()) != 0 || g.kubelet.Registered(g.driver) || g.Status().Registered {
		t.Errorf("slices %+v, status %+v", g.api.Slices(), g.Status())
	}
	stop()
	g.awaitServing()
	if err := FindDriver(t.Context(), g.config.Load()); err == nil {
		t.Error("the agent's own socket was not found") // for a command beside the agent
	}
	a := claim("a", result("gpu-0"))
	g.prepare(a)

	stop = serveRegistration(t, socket, registration{kind: registerapi.DRAPlugin, name: g.driver})
	g.awaitErr("another driver of the name")
	g.poll(breakGPU0(healthtest.NodeDevices()[:1])...)
	b := claim("b", result("gpu-0", asAdmin))
	g.prepare(b)
	g.await("known as broken to claims", func() bool {
		_, err := g.tryPrepare(claim("c", result("gpu-0")))
		return err != nil && strings.Contains(err.Error(), "xid-79")
	})
	if got := g.published(); !slices.Equal(got, []string{"gpu-0"}) {
		t.Errorf("published %q beside another driver", got)
	}
	stop()
	g.awaitServing()
	g.awaitDevices("gpu-0!gpu-node-agent/xid=79")

	serveRegistration(t, socket, registration{kind: registerapi.DRAPlugin, name: g.driver})
	g.awaitErr("another driver of the name")
	g.configure(usePlugin)
	g.awaitNotReleased("claims default/a, default/b")
	g.unprepare(a)
	g.unprepare(b)
	g.awaitReleased()
	if got := g.published(); len(got) != 1 {
		t.Errorf("published %q: slices of the other driver are withdrawn", got)
	}
}

// A driver registers again after the loss of a socket, a restart of the kubelet and a refusal.
func TestDriverRegistersAgain(t *testing.T) {
	t.Parallel()
	g := servingRig(t)
	a := claim("a", result("gpu-1"))
	g.prepare(a)
	for _, pattern := range []string{"plugins_registry/*", "plugins/*/*.sock"} {
		files, err := filepath.Glob(filepath.Join(g.dir, pattern))
		if err != nil || len(files) != 1 {
			t.Fatalf("%q, %v", files, err)
		}
		before, err := os.Stat(files[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(files[0]); err != nil {
			t.Fatal(err)
		}
		g.await("served again", func() bool {
			now, err := os.Stat(files[0])
			return err == nil && !unixsock.SameSocket(before, now) && g.kubelet.Registered(g.driver)
		})
		g.awaitServing()
		g.await("prepared again", func() bool { _, err := g.tryPrepare(a); return err == nil }) // the kubelet may still use the lost one
	}

	// The end of the health stream shows that the kubelet is gone. The kubelet opens one after the registration: it has when it gets a change.
	g.poll(breakGPU0(healthtest.NodeDevices()[:3])...)
	g.await("unhealthy for the kubelet", func() bool { h, _ := g.kubelet.Health("node1/gpu-0"); return h.Health == "UNHEALTHY" })
	g.kubelet.Stop()
	g.awaitErr("the kubelet has closed its connection")
	if g.Status().Registered {
		t.Error("registered without a kubelet")
	}
	if _, known := g.PublishedDevices(); known {
		t.Error("without a kubelet it is known what pods can get")
	}
	if err := g.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	g.awaitServing()

	g.kubelet.Stop()
	g.kubelet.Refuse("no")
	if err := g.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	g.awaitErr("the kubelet refused the registration: no")
	g.kubelet.Refuse("")
	g.awaitServing()
}

// Without the kubelet's directory, or with one whose sockets would have too long paths, the driver says so, and serves when that is mended.
func TestDriverWithoutKubelet(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	g.kubelet.Stop()
	if err := os.Remove(filepath.Join(g.dir, "plugins_registry")); err != nil {
		t.Fatal(err)
	}
	g.start()
	g.awaitErr("plugin.kubeletDir", "plugins_registry", "mount that")
	if err := g.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	g.awaitServing()
	long := filepath.Join(g.dir, strings.Repeat("x", 100))
	if err := os.MkdirAll(filepath.Join(long, "plugins_registry"), 0o700); err != nil {
		t.Fatal(err)
	}
	g.end()
	g.configure(func(c *plugin.Config) { c.KubeletDir = long })
	g.start()
	g.awaitErr("bytes too long for a unix socket")
}

// While it is unknown which claims are prepared, neither API gets the devices.
func TestDriverUnreadableCheckpoint(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	dir := filepath.Join(g.dir, "plugins", g.driver)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, dir); err != nil { // too many levels of symbolic links
		t.Fatal(err)
	}
	g.start()
	g.awaitErr("the prepared claims are unknown", "symbolic links")
	if g.Status().WaitsForPods {
		t.Error("it waits for pods")
	}
	g.awaitNotReleased("the prepared claims are unknown", "symbolic links")
	g.configure(usePlugin)
	g.await("disabled", func() bool { return !g.Status().Enabled })
	g.awaitNotReleased("the prepared claims are unknown", "symbolic links")
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	g.awaitReleased()
	g.configure(useDRA)
	g.awaitServing()
}

// A driver without the lock of the node waits; one that loses it stops, and leaves the slices to the holder.
func TestDriverNeedsLock(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	lockDir := filepath.Join(g.dir, "device-plugins")
	if err := os.Mkdir(lockDir, 0o700); err != nil {
		t.Fatal(err)
	}
	run := func(pod string) (l *nodelock.Lock, end func()) {
		l = nodelock.New(nodelock.Holder{Pod: pod, PID: 7}, zap.NewNop()).Faster(10)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); _ = l.Run(ctx) }()
		end = sync.OnceFunc(func() { cancel(); <-done; l.Close() })
		t.Cleanup(end)
		return l, end
	}
	hold := func(l *nodelock.Lock, dir string) {
		l.Request(dir)
		g.await("locked", func() bool { return l.State().Load().Held })
	}
	first, endFirst := run("agent-a")
	hold(first, g.dir)
	own, _ := run("agent-b")
	g.options = func(o *Options) { o.Lock = own }
	g.start()
	g.awaitErr("another agent serves this node")
	g.awaitNotReleased("another agent serves this node")
	if s := g.Status(); !s.Enabled || s.WaitsForPods || g.kubelet.Registered(g.driver) || len(g.api.Slices()) > 0 {
		t.Errorf("status %+v, slices %+v", s, g.api.Slices())
	}
	endFirst()
	g.awaitServing()

	// The kubelet's directory is replaced by one that another agent has locked.
	next := filepath.Join(g.dir, "next")
	if err := os.MkdirAll(filepath.Join(next, "device-plugins"), 0o700); err != nil {
		t.Fatal(err)
	}
	other, endOther := run("agent-c")
	hold(other, next)
	if err := errors.Join(os.Rename(lockDir, lockDir+"-old"), os.Rename(filepath.Join(next, "device-plugins"), lockDir)); err != nil {
		t.Fatal(err)
	}
	g.awaitErr("another agent serves this node")
	g.await("forgotten by the kubelet", func() bool { return !g.kubelet.Registered(g.driver) })
	if n := len(g.api.Slices()); n != 1 {
		t.Errorf("%d slices: the slices of the holder are gone", n)
	}
	endOther()
	g.awaitServing()

	g.configure(func(c *plugin.Config) { c.Enabled = false })
	g.awaitReleased()
	if s := g.Status(); s.Enabled || s.Err != "" || len(g.api.Slices()) > 0 {
		t.Errorf("status %+v", s)
	}
}

// The name of a MIG device contains properties that the snapshot may lack: it is published when they are known, or when the device has not
// answered in time, and its name never changes then.
func TestDriverAwaitsProperties(t *testing.T) {
	t.Parallel()
	devices := healthtest.NodeDevices()[3:5]
	mig := devices[1].Device.Properties
	devices[1].Device.Properties = nil
	full := health.KnownProperties{"MIG-0": mig, "GPU-3": {Brand: "Nvidia"}}
	const parent, byInstance, byPlacement = "gpu-3!gpu-node-agent/mig-mode", "gpu-3-mig-1g10gb-gi7-ci0", mig0

	g := newDriverRig(t)
	g.poll(devices...)
	g.properties.Store(&health.KnownProperties{"GPU-3": nil}) // NVML was asked before there was MIG-0
	g.start()
	g.awaitDevices(parent)
	g.properties.Store(&full)
	g.awaitDevices(parent, byPlacement)
	g.awaitServing()
	if brand := g.api.Slices()[0].Spec.Devices[0].Attributes["brand"].StringValue; brand == nil || *brand != "Nvidia" {
		t.Errorf("brand %v", brand)
	}
	if devices, known := g.PublishedDevices(); !known || !slices.Equal(slices.Sorted(slices.Values(devices)),
		[]health.DeviceID{"GPU-3", "MIG-0"}) {
		t.Errorf("published %q, %v", devices, known)
	}

	g = newDriverRig(t)
	g.poll(devices...)
	g.properties.Store(&health.KnownProperties{"GPU-3": nil, "MIG-0": nil})
	g.start()
	g.awaitDevices(parent, byInstance)
	g.properties.Store(&full)
	g.await("known", func() bool {
		list := g.api.Slices()
		return len(list) == 1 && list[0].Spec.Devices[0].Attributes["brand"].StringValue != nil
	})
	g.awaitDevices(parent, byInstance)
}

// The root of a GPU's PCIe hierarchy comes from the machine. It is read again when there are other devices.
func TestDriverPublishesPCIeRoot(t *testing.T) {
	t.Parallel()
	var buses []string
	for _, link := range []string{"0000:00:00.0", "0000:00:01.0", "0000:00:02.0"} {
		if _, err := os.Stat("/sys/bus/pci/devices/" + link); err == nil {
			buses = append(buses, link)
		}
	}
	if len(buses) < 2 {
		t.Skip("needs a machine with a PCI bus")
	}
	g := newDriverRig(t)
	gpus := healthtest.NodeDevices()[:2]
	gpus[0].Device.PCI, gpus[1].Device.PCI = "0000"+buses[0], "0000"+buses[1]
	rooted := func() (n int) {
		for _, s := range g.api.Slices() {
			for _, d := range s.Spec.Devices {
				if d.Attributes[deviceattribute.StandardDeviceAttributePCIeRoot].StringValue != nil {
					n++
				}
			}
		}
		return n
	}
	g.poll(gpus[0])
	g.start()
	g.await("published with its root", func() bool { return rooted() == 1 })
	g.poll(gpus...)
	g.await("published with both roots", func() bool { return rooted() == 2 })
}

// deviceNames returns the names of the devices in slices.
func deviceNames(s PublishedSlices) (names []string) {
	for _, item := range s.List.Items {
		for _, d := range item.Spec.Devices {
			names = append(names, d.Name)
		}
	}
	return names
}

func (g *driverRig) slices() PublishedSlices {
	g.t.Helper()
	s, err := g.Slices(g.t.Context())
	if err != nil {
		g.t.Fatal(err)
	}
	return s
}

// wantUnpublished checks that Slices returns what would be published of the first three devices, and why it is not.
func (g *driverRig) wantUnpublished(reason string) {
	g.t.Helper()
	if s := g.slices(); !strings.Contains(s.NotPublished, reason) || !slices.Equal(deviceNames(s), []string{"gpu-0", "gpu-1", "gpu-2"}) {
		g.t.Errorf("%s: %+v", s.NotPublished, s.List)
	}
}

// wantPublished checks that Slices returns the slice of the API server.
func (g *driverRig) wantPublished() {
	g.t.Helper()
	s, published := g.slices(), g.api.Slices()
	if s.NotPublished != "" || len(s.List.Items) != 1 || len(published) != 1 {
		g.t.Fatalf("%s: %+v, published %+v", s.NotPublished, s.List, published)
	}
	got, want := s.List.Items[0], published[0]
	if got.Kind != "ResourceSlice" || got.APIVersion != "resource.k8s.io/v1" || s.List.Kind != "ResourceSliceList" ||
		got.Name != "node1-gpu.nvidia.com-0" || got.Spec.Pool.Generation != 1 {
		g.t.Errorf("%s %s %s", got.APIVersion, got.Kind, got.Name)
	}
	if want.Spec.Pool.Generation = got.Spec.Pool.Generation; !equality.Semantic.DeepEqual(got.Spec, want.Spec) {
		g.t.Errorf("%+v, want %+v", got.Spec, want.Spec)
	}
}

// An operator sees the slices of the API server. While it has none, the operator sees what would be published, with the reason.
func TestSlices(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t, func(c *plugin.Config) { c.API = plugin.APIDevicePlugin })
	snap := g.snapshots.Load()
	g.snapshots.Store(&health.Snapshot{Source: health.Source{Err: "no driver"}})
	g.start()
	if _, err := g.Slices(t.Context()); err == nil || !strings.Contains(err.Error(), "no poll of the GPUs has succeeded yet: no driver") {
		t.Errorf("before the first poll: %v", err)
	}
	g.snapshots.Store(snap)
	g.wantUnpublished("plugin.api is devicePlugin")
	g.configure(func(c *plugin.Config) { c.Enabled = false })
	g.wantUnpublished("plugin.enabled is false")
	g.plugin.Store(&plugin.Handover{Reason: "pod ml/train holds GPU 0"})
	g.configure(func(c *plugin.Config) { c.Enabled, c.API = true, plugin.APIDRA })
	g.awaitErr("ml/train")
	g.wantUnpublished("ml/train")

	g.api.Deny("create resourceslices")
	g.plugin.Store(&plugin.Handover{Released: true})
	g.await("refused by the API server", func() bool { return strings.Contains(g.Status().PublishErr, "forbidden") })
	g.wantUnpublished("forbidden")
	g.restart() // without the pause after a refusal
	g.api.Deny()
	g.awaitServing()
	g.wantPublished()
	g.api.Answer(func(r apiservertest.Request) error {
		if r.Verb == "update" {
			return errors.New("overloaded")
		}
		return nil
	})
	g.poll(breakGPU0(healthtest.NodeDevices()[:3])...)
	g.await("behind", func() bool { return g.Status().Behind })
	if s := g.slices(); s.NotPublished == "" || len(s.List.Items[0].Spec.Devices[0].Taints) != 1 {
		t.Errorf("%s: %+v", s.NotPublished, s.List)
	}
}

// Another process plans with the names that the first has published.
func TestSlicesKeepNames(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	g.start()
	g.awaitServing()
	g.wantPublished()
	g.end()
	renamed := healthtest.NodeDevices()[:3]
	renamed[0].Device.Minor, renamed[2].Device.Minor = 2, 0
	missing := healthtest.NodeDevices()[3:5] // its properties are asked for
	properties := missing[1].Device.Properties
	missing[1].Device.Properties = nil
	g.poll(append(renamed, missing...)...)
	g.configure(usePlugin)
	planner := New(Options{
		Config: g.config, Snapshots: g.snapshots, Node: testNode, PluginReleased: &health.Latest[plugin.Handover]{}, Holders: g.holders,
		Properties: g.properties, Log: zap.NewNop(),
		AwaitProperties: func(context.Context, *health.Snapshot) {
			g.properties.Store(&health.KnownProperties{"MIG-0": properties})
		},
	})
	planned, err := planner.Slices(t.Context())
	if got := deviceNames(planned); err != nil || !slices.Equal(got, []string{"gpu-0", "gpu-1", "gpu-2", "gpu-3", mig0}) {
		t.Errorf("planned %q, %v", got, err)
	}
	if id := *planned.List.Items[0].Spec.Devices[0].Attributes["uuid"].StringValue; id != "GPU-0" {
		t.Errorf("gpu-0 is %s", id)
	}
	g.poll()
	planned, err = planner.Slices(t.Context())
	items := planned.List.Items
	if err != nil || len(items) != 1 || items[0].Spec.Pool.ResourceSliceCount != 1 || len(deviceNames(planned)) != 0 {
		t.Errorf("of no device: %+v, %v", planned.List, err)
	}
}

// Real devices have a second CDI name, in a spec that another program writes or the driver. A claim is refused while container runtimes
// cannot resolve it; the status says why.
func TestDriverNamesDevicesByCDI(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	g.options = func(o *Options) { o.Simulated = func() bool { return false } }
	writeSpec := func(devices string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(g.cdi, 0o700), os.WriteFile(filepath.Join(g.cdi, "nvidia.yaml"),
			[]byte(`{"kind": "nvidia.com/gpu", "devices": [`+devices+`]}`), 0o600)); err != nil {
			t.Fatal(err)
		}
		g.poll(healthtest.NodeDevices()[:3]...)
	}
	g.start()
	g.awaitServing()
	g.await("warned", func() bool { return strings.Contains(g.Status().Warning, "no CDI spec for nvidia.com/gpu") })
	a, b := claim("a", result("gpu-0")), claim("b", result("gpu-2"))
	g.refused(a, "no CDI spec for nvidia.com/gpu", "nvidia-ctk cdi generate")
	writeSpec(`{"name": "GPU-0"}, {"name": "GPU-1"}`)
	const text = "lacks GPU-2 and has GPU-0, GPU-1; run nvidia-ctk cdi generate --device-name-strategy=uuid"
	g.await("warned", func() bool { return strings.Contains(g.Status().Warning, text) })
	if names := g.prepare(a); !slices.Equal(names, []string{"k8s.gpu-node-agent/claim=uid-a-gpu-0", "nvidia.com/gpu=GPU-0"}) {
		t.Errorf("names %q", names)
	}
	g.refused(b, "device gpu-2", text)
	writeSpec(`{"name": "GPU-0"}, {"name": "GPU-1"}, {"name": "GPU-2"}`)
	g.await("without a warning", func() bool { return g.Status().Warning == "" })
	g.prepare(b)
	g.unprepare(a)
	g.unprepare(b)

	// The driver writes it.
	root := filepath.Join(g.dir, "root")
	for _, file := range []string{"usr/lib64/libcuda.so.580.95.05", "dev/nvidia0", "dev/nvidia1", "dev/nvidia2"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(root, file)), 0o700),
			os.WriteFile(filepath.Join(root, file), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	g.configure(func(c *plugin.Config) { c.CDI.Generate, c.DriverRoot, c.CDI.HookPath = true, root, "" })
	g.await("warned", func() bool { return strings.Contains(g.Status().Warning, "the driver version is not known yet") })
	g.refused(a, "device gpu-0", "the driver version is not known yet")
	poll := func(devices ...health.DeviceState) {
		g.snapshots.Store(&health.Snapshot{
			At: time.Now(), Source: health.Source{Kind: "sim", Status: health.SourceUp, Versions: health.Versions{Driver: "580.95.05"}},
			Devices: devices,
		})
	}
	poll(healthtest.NodeDevices()[:3]...)
	g.await("without a warning", func() bool { return g.Status().Warning == "" })
	if names := g.prepare(a); len(names) != 2 || names[1] != "k8s.device-plugin.nvidia.com/gpu=GPU-0" {
		t.Errorf("names %q", names)
	}
	text2, err := os.ReadFile(filepath.Join(g.cdi, "k8s.device-plugin.nvidia.com-gpu.json"))
	if err != nil || !strings.Contains(string(text2), `"GPU-0"`) {
		t.Errorf("spec %s, %v", text2, err)
	}
	odd := healthtest.NodeDevices()[:3]
	odd[2].Device.Minor, odd[2].Device.PCI = -1, ""
	odd[1].Sample.Presence, odd[1].Verdict.State = health.Missing, health.Unhealthy
	odd[1].Verdict.Findings = []health.Finding{{Cause: "missing", State: health.Unhealthy}}
	poll(odd...)
	g.await("told of a missing GPU", func() bool { return g.Status().Tainted == 1 })
	g.refused(claim("c", result("gpu-2")), "has no device node")
	monitor := g.prepare(claim("monitor", result("gpu-1", asAdmin)))
	if !slices.Equal(monitor, []string{"k8s.gpu-node-agent/claim=uid-monitor-gpu-1"}) { // no spec has a missing GPU
		t.Errorf("names of a missing GPU %q", monitor)
	}
}

// Claims of a checkpoint that was lost keep the devices from the device plugin until their pods have ended.
func TestDriverReleasesAfterLostCheckpoint(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(path string) error{
		"missing": os.Remove, "corrupt": func(path string) error { return os.Truncate(path, 20) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testReleaseAfterLostCheckpoint(t, name, lose)
		})
	}
}

func testReleaseAfterLostCheckpoint(t *testing.T, warning string, lose func(path string) error) {
	g := servingRig(t)
	a := claim("a", result("gpu-1"))
	g.prepare(a)
	g.hold(map[health.DeviceID][]podresources.Holder{"GPU-1": {claimHolder(a, "gpu-1")}})
	g.end()
	if err := lose(filepath.Join(g.dir, "plugins", g.driver, checkpointName)); err != nil {
		t.Fatal(err)
	}
	g.configure(usePlugin)
	g.restart()
	g.awaitNotReleased("waiting for the end of pods with claims that were prepared before the checkpoint was lost")
	g.await("waiting for pods", func() bool { return g.DRAReleased().Load().Pods })
	if s := g.Status(); !strings.Contains(s.Warning, warning) || !strings.Contains(s.Warning, "until these pods have ended") ||
		len(g.api.Slices()) > 0 {
		t.Errorf("warning %q, slices %+v", s.Warning, g.api.Slices())
	}
	if !g.Prepared().Load().Lost {
		t.Error("no decision knows that claims are lost")
	}
	if len(g.specs(g.cdi)) != 1 {
		t.Error("the container of a lost claim cannot restart")
	}
	g.hold(map[health.DeviceID][]podresources.Holder{})
	g.awaitReleased()
	if g.Prepared().Load().Lost {
		t.Error("claims are still lost")
	}
}

// The reason of a handover that waits names some of many claims, each with its pods.
func TestDriverNamesClaims(t *testing.T) {
	t.Parallel()
	g := servingRig(t)
	holders := map[health.DeviceID][]podresources.Holder{}
	var claims []*resourceapi.ResourceClaim
	for i := range 7 {
		c := claim(fmt.Sprintf("c%d", i), result("gpu-0", asAdmin))
		claims = append(claims, c)
		g.prepare(c)
		for _, pod := range []string{"z", "a", "z"} {
			h := claimHolder(c, "gpu-0")
			h.Pod = fmt.Sprintf("%s%d", pod, i)
			holders["GPU-0"] = append(holders["GPU-0"], h)
		}
	}
	foreign := claimHolder(claims[6], "gpu-0")
	foreign.Pod, foreign.Claim.Driver = "foreign", "nic.example.com"
	holders["GPU-0"] = append(holders["GPU-0"], foreign)
	g.hold(holders)
	g.configure(usePlugin)
	of := func(i int) string { return fmt.Sprintf("default/c%d of default/a%d and default/z%d", i, i, i) }
	g.awaitNotReleased("the end of claims " + strings.Join([]string{of(0), of(1), of(2), of(3), of(4)}, ", ") + ", 2 more")
	g.unprepare(claims[0])
	g.await("naming five of six claims", func() bool { return strings.HasSuffix(g.DRAReleased().Load().Reason, of(5)+", 1 more") })
	g.unprepare(claims[1])
	g.await("naming five claims", func() bool { return strings.HasSuffix(g.DRAReleased().Load().Reason, of(5)+", "+of(6)) })
	for _, c := range claims[2:6] {
		g.unprepare(c)
	}
	g.await("naming one claim", func() bool { return strings.HasSuffix(g.DRAReleased().Load().Reason, "the end of claim "+of(6)) })
}

// Where the API server has no taints, a broken device is not published. A claim from before finds it and is told what is wrong; one that
// tolerates it gets it. Of a device that is not to be published at all, no claim is known.
func TestDriverWithoutTaints(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	g.api.Lack(apiservertest.TaintsGate)
	g.start()
	g.awaitServing()
	g.awaitDevices("gpu-0", "gpu-1", "gpu-2")
	g.poll(breakGPU0(healthtest.NodeDevices()[:3])...)
	g.awaitDevices("gpu-1", "gpu-2")
	if s := g.Status(); !slices.Equal(s.DroppedFeatures, []string{"DRADeviceTaints"}) ||
		!strings.Contains(s.Warning, "the API server has no taints of devices") {
		t.Errorf("features %q, warning %q", s.DroppedFeatures, s.Warning)
	}
	g.refused(claim("a", result("gpu-0")), "device gpu-0", "is unhealthy", "xid-79")
	g.prepare(claim("b", result("gpu-0", tolerating(resourceapi.DeviceToleration{Operator: resourceapi.DeviceTolerationOpExists}))))
	g.refused(claim("c", result("gpu-7")), `device "gpu-7" is unknown; node node1 has gpu-1, gpu-2`)
	g.poll(healthtest.NodeDevices()[:3]...)
	g.configure(func(c *plugin.Config) { c.Exclude = []string{"2"} })
	g.awaitDevices("gpu-0", "gpu-1")
	g.refused(claim("d", result("gpu-2")), `device "gpu-2" is unknown; node node1 has gpu-0, gpu-1`)
	if id, ok := g.Device(g.driver, testNode, "gpu-2"); !ok || id != "GPU-2" { // a container may have it
		t.Errorf("gpu-2 is %q, %v", id, ok)
	}
	if _, ok := g.Device(g.driver, testNode, "gpu-7"); ok {
		t.Error("gpu-7 resolves")
	}
	g.await("publishing two devices", func() bool { // the driver learns it after the API server
		devices, known := g.PublishedDevices()
		return known && len(devices) == 2
	})
	g.configure(func(c *plugin.Config) { c.Exclude = []string{"*"} })
	g.awaitDevices()
	g.refused(claim("e", result("gpu-2")), "node node1 has none")
}

// A handover of an earlier process counts from its begin, also if the wall clock of this one knows a later one.
func TestRestoreHandover(t *testing.T) {
	g := newDriverRig(t)
	g.plugin.Store(&plugin.Handover{})
	early, late := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC)
	text := func(at time.Time) string { return `{"handoverSince":"` + at.Format(time.RFC3339) + `"}` }
	for name, c := range map[string]struct {
		texts []string
		want  time.Time
	}{
		"none":       {[]string{`{}`}, time.Time{}},
		"one":        {[]string{text(late)}, late},
		"an earlier": {[]string{text(late), text(early)}, early},
		"a later":    {[]string{text(early), text(late)}, early},
		"none later": {[]string{text(early), `{}`}, early},
		"nonsense":   {[]string{text(early), `7`}, early},
	} {
		t.Run(name, func(t *testing.T) {
			d := New(Options{Config: g.config, Snapshots: g.snapshots, PluginReleased: g.plugin, Holders: g.holders, Log: zap.NewNop()})
			for i, text := range c.texts {
				if err := d.Restore([]byte(text)); (err != nil) != (text == "7") || err != nil && !strings.Contains(err.Error(), "handover") {
					t.Errorf("%d: %v", i, err)
				}
			}
			if s := d.Status(); !s.Enabled || !s.HandoverSince.Equal(c.want) {
				t.Errorf("%+v, want since %v", s, c.want)
			}
		})
	}
}

// Shares of a GPU's memory are offered when the node has been examined and can limit them, and what claims have of them is counted.
func TestDriverSharesMemory(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t, func(c *plugin.Config) {
		m := &c.Sharing.Memory
		m.Resource, m.Unit, m.Reserve, m.Devices, m.Enforcement, m.RequireEnforcement = "nvidia.com/gpu-memory", "10Gi", "0", []string{"0"},
			plugin.EnforceDriver, true
	})
	limits := &health.Latest[memlimits.Capabilities]{}
	g.before = func(d *Driver) { d.SetMemoryCapabilities(limits) }
	g.start()
	g.awaitServing()
	g.awaitDevices("gpu-0!gpu-node-agent/memory-limits", "gpu-1", "gpu-2")
	a := claim("a", result("gpu-0", share("s", 30*gib)))
	g.refused(a, "device gpu-0")
	if s := g.Status(); s.Warning != "" { // it is a matter of seconds
		t.Errorf("warning %q", s.Warning)
	}
	limits.Store(&memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": "the driver is too old"}})
	g.await("warned", func() bool { return strings.Contains(g.Status().Warning, "the driver is too old") })
	g.refused(a, "the driver is too old")
	if all := g.Shares(); len(all) != 1 || all[0].Free != 8 || all[0].Largest != 0 {
		t.Errorf("shares %+v", all)
	}
	planner := New(Options{
		Config: g.config, Snapshots: g.snapshots, Node: testNode, PluginReleased: g.plugin, Holders: g.holders,
		Properties: g.properties, AwaitProperties: func(context.Context, *health.Snapshot) {}, Log: zap.NewNop(),
	})
	planner.SetMemoryCapabilities(limits)
	if s, err := planner.Slices(t.Context()); err != nil || !slices.ContainsFunc(s.Warnings,
		func(w string) bool { return strings.Contains(w, "the driver is too old") }) {
		t.Errorf("planned with the warnings %q, %v", s.Warnings, err)
	}
	limits.Store(&memlimits.Capabilities{Driver: map[health.DeviceID]string{"GPU-0": ""}})
	g.awaitDevices("gpu-0", "gpu-1", "gpu-2")
	g.prepare(a)
	all := g.Shares()
	want := plugin.ShareUnits{
		Device: "GPU-0", Sharing: plugin.SharingMemory, Unit: 10 * gib, Total: 8, Free: 5, Largest: 5, Enforcement: memlimits.Driver,
	}
	if len(all) != 1 || all[0] != want {
		t.Errorf("shares %+v, want %+v", all, want)
	}
	h := claimHolder(a, "gpu-0")
	h.Claim.ShareID = "s"
	if bytes, byMPS := g.Memory(h); bytes != 30*gib || byMPS {
		t.Errorf("the container has %d bytes, by MPS %v", bytes, byMPS)
	}
	g.unprepare(a)
	if all := g.Shares(); len(all) != 1 || all[0].Free != 8 {
		t.Errorf("shares %+v", all)
	}
}

// An agent that serves nothing does not wait for the lock of the node, unless claims of an earlier process are left.
func TestDriverDisabledNeedsLock(t *testing.T) {
	t.Parallel()
	g := servingRig(t)
	a := claim("a", result("gpu-1"))
	g.prepare(a)
	g.end()
	g.configure(func(c *plugin.Config) { c.Enabled = false })
	if err := os.Mkdir(filepath.Join(g.dir, "device-plugins"), 0o700); err != nil {
		t.Fatal(err)
	}
	locks := make([]*nodelock.Lock, 2)
	for i := range locks {
		locks[i] = nodelock.New(nodelock.Holder{Pod: "agent", PID: 7 + i}, zap.NewNop()).Faster(10)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); _ = locks[i].Run(ctx) }()
		t.Cleanup(func() { cancel(); <-done; locks[i].Close() })
	}
	locks[0].Request(g.dir)
	g.await("locked", func() bool { return locks[0].State().Load().Held })
	g.options = func(o *Options) { o.Lock = locks[1] }
	g.restart()
	g.awaitNotReleased("another agent serves this node")
	if s := g.Status(); s.Enabled {
		t.Errorf("status %+v", s)
	}
	g.end()
	if err := os.Remove(filepath.Join(g.dir, "plugins", g.driver, checkpointName)); err != nil {
		t.Fatal(err)
	}
	if err := cdi.RemoveClaimSpec(g.cdi, string(a.UID)); err != nil {
		t.Fatal(err)
	}
	g.restart()
	g.awaitReleased()
}

// The driver ends when the kubelet has the answers to its calls: it could not ask again, and the pod of a claim would not end.
func TestDriverAnswersBeforeRelease(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	asked, slow := make(chan struct{}), make(chan struct{})
	g.before = func(d *Driver) {
		remove := d.preparer.disk.removeSpec
		d.preparer.disk.removeSpec = func(dir, uid string) error {
			if uid == "uid-slow" {
				close(asked)
				<-slow
			}
			return remove(dir, uid)
		}
	}
	g.start()
	g.awaitServing()
	a := claim("a", result("gpu-1"))
	g.prepare(a)
	answer := make(chan error, 1)
	go func() {
		answer <- g.kubelet.Unprepare(t.Context(), g.driver, kubelettest.Claim{Namespace: "default", Name: "slow", UID: "uid-slow"})
	}()
	<-asked
	g.configure(usePlugin)
	g.unprepare(a)
	g.awaitNotReleased("the kubelet's last call is being answered")
	begin := time.Now()
	close(slow)
	if err := <-answer; err != nil {
		t.Error(err)
	}
	g.awaitReleased()
	if d := time.Since(begin); d < g.timing.answer {
		t.Errorf("released within %v of the last answer", d)
	}
}

// Calls that end no claim, such as calls for pods whose claims are refused, hold up no release.
func TestDriverReleasesDespiteOtherCalls(t *testing.T) {
	t.Parallel()
	g := servingRig(t)
	a := claim("a", result("gpu-9")) // which the node has not: a call before the release begins is refused too
	g.configure(usePlugin)
	g.await("released", func() bool {
		if _, err := g.tryPrepare(a); err == nil { // more often than every half second
			t.Fatal("a claim for an unknown device is prepared")
		}
		r := g.DRAReleased().Load()
		return r != nil && r.Released
	})
}

// A kubeconfig that was changed counts from the next start of the driver on, also for the question whether a claim still exists.
func TestDriverConnectsAnew(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	var current atomic.Pointer[apiservertest.Server]
	current.Store(g.api)
	g.options = func(o *Options) {
		o.Connect = func() (kubernetes.Interface, error) { return current.Load().Client() }
	}
	g.start()
	g.awaitServing()
	a, b := claim("a", result("gpu-1")), claim("b", result("gpu-1"))
	g.prepare(a)
	g.refused(b, "default/a")
	g.unprepare(a)
	g.configure(usePlugin)
	g.awaitReleased()
	g.api.Delete("resourceclaims", a.Namespace, a.Name)
	g.api = apiservertest.New(t, testNode)
	current.Store(g.api)
	g.configure(useDRA)
	g.awaitServing()
	g.prepare(a)
	g.refused(b, "is prepared for claim default/a of ") // not: which does not exist any more
}

// Slices that cannot be removed keep the devices from the device plugin: a pod could get one by each API. The end of pods does not help.
func TestDriverReleasesAfterSlices(t *testing.T) {
	t.Parallel()
	g := servingRig(t)
	g.api.Answer(func(r apiservertest.Request) error {
		if r.Verb == "delete" {
			return apierrors.NewServiceUnavailable("overloaded")
		}
		return nil
	})
	g.configure(usePlugin)
	g.awaitNotReleased("removing the ResourceSlices of the node: ", "overloaded")
	if g.DRAReleased().Load().Pods {
		t.Error("it waits for pods")
	}
	g.configure(func(c *plugin.Config) { c.Enabled = false }) // nobody else reports the reason
	g.await("a warning", func() bool {
		s := g.Status()
		return s.Err == "" && strings.Contains(s.Warning, "releasing the devices: removing the ResourceSlices")
	})
	g.api.Answer(nil)
	g.awaitReleased()
	if n := len(g.api.Slices()); n > 0 {
		t.Errorf("%d slices are left", n)
	}
}

// A server of the kubelet's helper that fails is the reason for a moment, and served again.
func TestDriverServesAgainAfterFailure(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	g.options = func(o *Options) { o.Faster = 1 } // the next try is after a second
	g.start()
	g.awaitServing()
	files, err := filepath.Glob(filepath.Join(g.dir, "plugins_registry", "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%q, %v", files, err)
	}
	before, err := os.Stat(files[0])
	if err != nil {
		t.Fatal(err)
	}
	g.mu.Lock()
	sockets := g.session.sockets
	g.mu.Unlock()
	service{g.preparer, sockets}.HandleError(t.Context(), errors.New("closed"), "server failed")
	g.awaitErr("server failed: closed")
	g.await("served again", func() bool {
		now, err := os.Stat(files[0])
		return err == nil && !unixsock.SameSocket(before, now)
	})
	g.awaitServing()
}

// Without a CDI spec of the devices no claim can be prepared. The log says so once.
func TestDriverLogsThatClaimsCannotBePrepared(t *testing.T) {
	t.Parallel()
	core, logs := observer.New(zap.WarnLevel)
	g := newDriverRig(t, func(c *plugin.Config) { c.CDI.Kind = "absent.example/gpu" }) // no host has a spec of it
	g.options = func(o *Options) {
		o.Simulated, o.Log = func() bool { return false }, zap.New(core)
	}
	g.start()
	logged := func() []observer.LoggedEntry { return logs.FilterMessage("claims cannot be prepared").All() }
	g.await("logged", func() bool { return len(logged()) > 0 })
	for range 3 { // polls with the same result, each after the one before was followed
		before := g.preparer.base.Load()
		g.poll(healthtest.NodeDevices()[:3]...)
		g.await("followed", func() bool { return g.preparer.base.Load() != before })
	}
	g.end()
	if all := logged(); len(all) != 1 || all[0].ContextMap()["error"] == "" {
		t.Errorf("logged %v, want one error", all)
	}
}
