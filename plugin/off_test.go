package plugin

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// foreign is another device plugin, such as the one that a cloud keeps on its nodes.
type foreign struct {
	pluginapi.UnimplementedDevicePluginServer
	ids []string
}

func (f foreign) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{}, nil
}

func (f foreign) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	var list []*pluginapi.Device
	for _, id := range f.ids {
		list = append(list, &pluginapi.Device{ID: id, Health: pluginapi.Healthy})
	}
	if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: list}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (f foreign) Allocate(context.Context, *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{{}}}, nil
}

const foreignSocket = "nvidiaGPU-1.sock" // as GKE's plugin names its own

// foreign serves a resource with those ids until the test ends, or until it is told to.
func (r *rig) foreign(resource string, ids ...string) (stop func()) {
	r.Helper()
	dir := filepath.Join(r.root, "device-plugins")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, foreignSocket), Net: "unix"})
	if err != nil {
		r.Fatal(err)
	}
	srv, done := grpc.NewServer(grpc.WaitForHandlers(true)), make(chan struct{})
	pluginapi.RegisterDevicePluginServer(srv, foreign{ids: ids})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	stop = func() {
		srv.Stop()
		<-done
	}
	r.Cleanup(stop)
	if err := register(r.ctx, filepath.Join(dir, "kubelet.sock"), resource, foreignSocket); err != nil {
		r.Fatal(err)
	}
	return stop
}

// sockets are those where device plugins meet the kubelet.
func (r *rig) sockets() (names []string) {
	r.Helper()
	entries, err := os.ReadDir(filepath.Join(r.root, "device-plugins"))
	if err != nil {
		r.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (r *rig) set(change func(*Config)) {
	cfg := *r.cfg.Load()
	change(&cfg)
	r.cfg.Store(&cfg)
}

// A plugin that is off leaves the kubelet to another one, and says all the same who has which GPU; it is switched
// on and off without a restart.
func TestOffAndOn(t *testing.T) {
	const offLine = "the plugin is off: nothing is registered with the kubelet"
	r := newRig(t, ofDriver(partitioned(nil, nil), testDriver))
	r.p.cdi, _ = newTestKeeper(t, driverTree(t, "/", testDriver))
	r.set(func(c *Config) {
		c.Enabled, c.MIGStrategy, c.DriverRoot, c.DeviceList = false, MIGNone, "/", []string{ListCDIAnnotations}
		c.CDI.Generate, c.CDI.Dir = true, filepath.Join(t.TempDir(), "cdi")
	})
	spec := r.cfg.Load().cdiFile()
	k := r.kubelet()
	k.SetFault(kubelettest.Fault{AllocatableError: "nobody should ask"})
	stopForeign := r.foreign(gpu, "nvidia0", "nvidia1")
	r.wait(k, gpu, listed(2, 2))
	train := kubelettest.Container{Namespace: "ml", Pod: "train", Name: "torch"}
	if _, err := k.AllocateTo(r.ctx, train, gpu, 1); err != nil {
		t.Fatal(err)
	}

	r.run()
	off := func(s Status) bool { return s.Off && s.Err == "" && len(s.Resources) == 0 && s.AuditErr == "" }
	r.whole(off)
	h := r.holders("of another plugin's device", has(id(0), "train"))
	if want := (Holder{"ml", "train", "torch", gpu, "nvidia0"}); h.Err != "" || h.By[health.DeviceID(id(0))][0] != want {
		t.Errorf("%+v, want %+v", h, want)
	}
	// The snapshots go on, and the other plugin's stream with them.
	r.snaps.Store(with(r.snaps.Load(), 1, health.Unhealthy))
	r.logged(offLine)
	if res := r.wait(k, gpu, listed(2, 2)); res.Registrations != 1 || res.Messages != 1 || res.Endpoint != foreignSocket {
		t.Errorf("the other plugin's resource: %+v", res)
	}
	if got := r.sockets(); !slices.Equal(got, []string{"kubelet.sock", foreignSocket}) {
		t.Errorf("sockets: %v", got)
	}
	if _, err := os.Stat(spec); err == nil {
		t.Errorf("%s was written", spec)
	}

	stopForeign()
	r.wait(k, gpu, gone)
	k.SetFault(kubelettest.Fault{})
	r.set(func(c *Config) { c.Enabled = true })
	r.wait(k, gpu, listed(2, 0)) // one is unhealthy, and train holds the other as nvidia0
	r.whole(func(s Status) bool {
		return !s.Off && s.Err == "" && len(s.Resources) == 1 && s.Resources[0].Registered
	})
	if _, err := os.Stat(spec); err != nil {
		t.Errorf("on, and without a CDI spec: %v", err)
	}
	k.Free(gpu, "nvidia0")
	r.wait(k, gpu, listed(2, 1))
	if _, err := k.AllocateTo(r.ctx, kubelettest.Container{Namespace: "ml", Pod: "ours", Name: "c"}, gpu, 1); err != nil {
		t.Error(err)
	}
	r.holders("of ours", has(id(0), "ours"))

	socket := r.socket()
	before := r.wait(k, gpu, listed(2, 1)).Messages
	r.set(func(c *Config) { c.Enabled = false })
	if res := r.wait(k, gpu, gone); res.Capacity() != 0 || res.Messages != before+1 {
		t.Errorf("no empty list came first: %+v", res)
	}
	r.whole(off)
	if _, err := os.Lstat(socket); err == nil {
		t.Errorf("%s is still there", socket)
	}
	if _, err := os.Stat(spec); err != nil {
		t.Errorf("running containers have lost their CDI spec: %v", err)
	}
	at := r.p.Holders().At
	r.holders("still asked", func(h Holders) bool { return h.At.After(at) && has(id(0), "ours")(h) })
	if n := r.logs.FilterMessage(offLine).Len(); n != 2 {
		t.Errorf("%d lines that the plugin is off, want one for each time: %v", n, r.lines())
	}
	for _, warned := range r.logs.FilterLevelExact(zapcore.WarnLevel).All() {
		if warned.Message != "device is unhealthy for the kubelet" && warned.Message != "device is not offered to new pods" {
			t.Errorf("warning: %s %v", warned.Message, warned.ContextMap())
		}
	}
}

// What is off is as it should be, whatever the node has.
func TestOffAlone(t *testing.T) {
	for name, c := range map[string]struct {
		snap   *health.Snapshot
		change func(*Config)
	}{
		"before the first snapshot": {nil, func(*Config) {}},
		"no GPUs":                   {snapshot(0), func(*Config) {}},
		"nothing left over":         {snapshot(2), func(c *Config) { c.Exclude = []string{"*"} }},
		"nowhere":                   {snapshot(2), func(c *Config) { c.KubeletDir = filepath.Join(c.KubeletDir, "nowhere") }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, c.snap)
			r.set(c.change)
			r.set(func(c *Config) { c.Enabled = false })
			r.run()
			if s := r.whole(func(s Status) bool { return s.Err == "" }); !s.Off || len(s.Resources) != 0 {
				t.Errorf("%+v", s)
			}
			// Who holds what is asked for all the same, and missed.
			r.logged("the kubelet does not say who has which device")
			if s := r.p.Status(); s.AuditErr != "" {
				t.Errorf("audited: %+v", s)
			}
		})
	}
}
