package dra

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/apiservertest"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/mps"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// driverRig runs a whole driver: a kubelet calls it over unix sockets, and it publishes to an API server.
type driverRig struct {
	*Driver
	t       *testing.T
	dir     string // of the kubelet
	cdi     string
	api     *apiservertest.Server
	kubelet *kubelettest.DRA
	end     func() // ends the process of the driver

	config     *health.Latest[plugin.Config]
	snapshots  *health.Latest[health.Snapshot]
	plugin     *health.Latest[plugin.Handover] // whether the device plugin has released the devices
	holders    *health.Latest[podresources.Holders]
	mps        *health.Latest[mps.Desired]
	properties func(context.Context, []health.Device) map[health.DeviceID]*health.Properties
	options    func(*Options) // edits those of the next process
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
		t: t, dir: dir, cdi: filepath.Join(dir, "cdi"), api: apiservertest.New(t, testNode), kubelet: kubelet,
		config: &health.Latest[plugin.Config]{}, snapshots: &health.Latest[health.Snapshot]{}, plugin: &health.Latest[plugin.Handover]{},
		holders: &health.Latest[podresources.Holders]{}, mps: &health.Latest[mps.Desired]{},
		properties: func(context.Context, []health.Device) map[health.DeviceID]*health.Properties { return nil },
		options:    func(*Options) {},
	}
	cfg := plugin.DefaultConfig()
	cfg.API, cfg.KubeletDir, cfg.CDI.Dir = plugin.APIDRA, dir, g.cdi
	for _, edit := range edits {
		edit(&cfg)
	}
	g.config.Store(&cfg)
	g.plugin.Store(&plugin.Handover{Released: true})
	g.holders.Store(&podresources.Holders{By: map[health.DeviceID][]podresources.Holder{}})
	g.poll(testDevices()[:3]...)
	return g
}

// start starts a process of the driver, whose intervals are short.
func (g *driverRig) start() {
	o := Options{
		Config: g.config, Snapshots: g.snapshots, Node: testNode, BootID: "boot", Connect: g.api.Client, Released: g.plugin, Holders: g.holders, Ask: g.ask,
		NoPlugin: func() bool { return false }, MPS: g.mps, Simulated: func() bool { return true }, Faster: 50,
		Properties: func(ctx context.Context, d []health.Device) map[health.DeviceID]*health.Properties {
			return g.properties(ctx, d)
		},
		Log: zap.NewNop(),
	}
	g.options(&o)
	g.Driver = New(o)
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
	for limit := time.Now().Add(10 * time.Second); !condition(); {
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
	g.await("released", func() bool { r := g.Released().Load(); return r != nil && r.Released })
}

// awaitNotReleased waits until the driver says why the device plugin must not have the devices.
func (g *driverRig) awaitNotReleased(parts ...string) {
	g.t.Helper()
	g.await("unreleased because of "+strings.Join(parts, " and "), func() bool {
		r := g.Released().Load()
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
	devices, err := g.kubelet.Prepare(g.t.Context(), g.config.Load().DRA.DriverName, kubeletClaim(c))
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
	if err := g.kubelet.Unprepare(g.t.Context(), g.config.Load().DRA.DriverName, kubeletClaim(c)); err != nil {
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

// A driver publishes the devices, prepares claims for the kubelet and tells it the health of devices. A restart of it changes nothing of that.
func TestDriverServesKubelet(t *testing.T) {
	t.Parallel()
	g := newDriverRig(t)
	g.start()
	if err := g.Status().Err; err == "" {
		t.Error("serves at once")
	}
	g.awaitServing()
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
	s := g.Status()
	if !s.Enabled || s.Handover || !s.HandoverSince.IsZero() || s.DriverName != plugin.DefaultDRADriver || s.Pool != testNode || s.Devices != 3 || s.Slices != 1 {
		t.Errorf("status %+v", s)
	}
	if want := []string{filepath.Join(g.dir, "plugins_registry"), filepath.Join(g.dir, "plugins", plugin.DefaultDRADriver)}; !slices.Equal(g.Dirs(), want) {
		t.Errorf("directories %q, want %q", g.Dirs(), want)
	}
	if r := g.Released().Load(); r.Released || r.Reason == "" {
		t.Errorf("released %+v", r)
	}
	if devices, known := g.PublishedDevices(); !known || len(devices) != 3 {
		t.Errorf("published %q, %v", devices, known)
	}
	version := g.api.Slices()[0].ResourceVersion

	g.end()
	g.await("forgotten by the kubelet", func() bool { return !g.kubelet.Registered(plugin.DefaultDRADriver) })
	g.poll(testDevices()[:3]...)
	g.start()
	g.awaitServing()
	if names := g.prepare(a); !slices.Equal(names, want) {
		t.Errorf("after a restart %q, want %q", names, want)
	}
	if now := g.api.Slices()[0].ResourceVersion; now != version {
		t.Error("the restart has written the slices")
	}
	g.poll(breakGPU0(testDevices()[:3])...)
	g.await("unhealthy for the kubelet", func() bool { h, _ := g.kubelet.Health("node1/gpu-0"); return h.Health == "UNHEALTHY" })
	g.awaitDevices("gpu-0!gpu-node-agent/xid=79", "gpu-1", "gpu-2")
	g.unprepare(a)
	if uids := g.specs(g.cdi); len(uids) > 0 || len(g.Claims().Load().ByUID) > 0 {
		t.Errorf("left: %q, %+v", uids, g.Claims().Load())
	}
}
