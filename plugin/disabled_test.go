package plugin

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

const foreignSocket = "nvidiaGPU-1.sock" // as GKE's plugin names it

// serveForeign registers nvidia.com/gpu with these IDs, as another device plugin, until the test ends or calls stop.
func (h *harness) serveForeign(ids ...health.DeviceID) (stop func()) {
	h.Helper()
	snap := snapshot(len(ids))
	for i, id := range ids {
		snap.Devices[i].Device.ID = id
	}
	dir := h.pluginDir()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, foreignSocket), Net: "unix"})
	if err != nil {
		h.Fatal(err)
	}
	srv, done := grpc.NewServer(grpc.WaitForHandlers(true)), make(chan struct{})
	pluginapi.RegisterDevicePluginServer(srv, newTestServer(snap))
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	stop = func() {
		srv.Stop()
		<-done
	}
	h.Cleanup(stop)
	if err := register(h.ctx, filepath.Join(dir, "kubelet.sock"), gpu, foreignSocket); err != nil {
		h.Fatal(err)
	}
	return stop
}

// A disabled plugin leaves the kubelet to another plugin and still reports the holders. It is switched at run time.
func TestPluginDisableAndEnable(t *testing.T) {
	t.Parallel()
	specDir := filepath.Join(t.TempDir(), "cdi")
	h := newHarness(t, partitioned(whole, whole))
	h.snaps.Load().Source.Versions.Driver = "580.95.05"
	h.p.hostFS = driverFS("580.95.05")
	h.setConfig(func(c *Config) {
		c.Enabled, c.MIGStrategy, c.DriverRoot, c.DeviceList = false, MIGNone, "/", []string{ListCDIAnnotations}
		c.CDI.Generate, c.CDI.Dir = true, specDir
	})
	k := h.kubelet()
	k.SetFault(kubelettest.Fault{AllocatableError: "no query expected"})
	stopForeign := h.serveForeign("nvidia0", "nvidia1")
	h.waitResource(k, gpu, listed(2, 2))
	train := kubelettest.Container{Namespace: "ml", Pod: "train", Name: "torch"}
	if _, err := k.AllocateTo(h.ctx, train, gpu, 1); err != nil {
		t.Fatal(err)
	}

	h.run()
	disabled := func(s Status) bool { return s.Off && s.Err == "" && len(s.Resources) == 0 && s.AuditErr == "" }
	h.waitPlugin(disabled)
	holders := h.waitHolders(heldBy(id(0), "train"))
	if want := (podresources.Holder{
		Namespace: "ml", Pod: "train", Container: "torch", Resource: gpu,
		DeviceID: "nvidia0",
	}); holders.Err != "" || holders.By[health.DeviceID(id(0))][0] != want {
		t.Errorf("%+v, want %+v", holders, want)
	}
	h.setHealth(1, health.Unhealthy) // does not concern the other plugin
	h.waitLog(msgDisabled, "", 1)
	if res := h.waitResource(k, gpu, listed(2, 2)); res.Registrations != 1 || res.Messages != 1 || res.Endpoint != foreignSocket {
		t.Errorf("the other plugin's resource: %+v", res)
	}
	entries, err := os.ReadDir(h.pluginDir())
	if err != nil || len(entries) != 2 || entries[0].Name() != "kubelet.sock" || entries[1].Name() != foreignSocket {
		t.Errorf("sockets: %v, %v", entries, err)
	}
	if _, err := os.Stat(specDir); err == nil {
		t.Error("a CDI spec was written")
	}

	stopForeign()
	h.waitResource(k, gpu, disconnected)
	k.SetFault(kubelettest.Fault{})
	h.setConfig(func(c *Config) { c.Enabled = true })
	h.waitResource(k, gpu, listed(2, 0)) // one is unhealthy, and train holds the other as nvidia0
	h.waitPlugin(func(s Status) bool {
		return !s.Off && s.Err == "" && len(s.Resources) == 1 && s.Resources[0].Registered
	})
	specs, err := os.ReadDir(specDir)
	if err != nil || len(specs) != 1 {
		t.Errorf("CDI specs: %v, %v", specs, err)
	}
	k.Free(gpu, "nvidia0")
	h.waitResource(k, gpu, listed(2, 1))
	if _, err := k.AllocateTo(h.ctx, kubelettest.Container{Namespace: "ml", Pod: "second", Name: "c"}, gpu, 1); err != nil {
		t.Error(err)
	}
	h.waitHolders(heldBy(id(0), "second"))

	socket := h.socket()
	before := h.waitResource(k, gpu, listed(2, 1)).Messages
	h.setConfig(func(c *Config) { c.Enabled = false })
	if res := h.waitResource(k, gpu, disconnected); res.Capacity() != 0 || res.Messages != before+1 {
		t.Errorf("the kubelet did not get an empty list: %+v", res)
	}
	h.waitPlugin(disabled)
	if _, err := os.Lstat(socket); err == nil {
		t.Errorf("%s still exists", socket)
	}
	if specs, err := os.ReadDir(specDir); err != nil || len(specs) != 1 { // running containers need it
		t.Errorf("CDI specs: %v, %v", specs, err)
	}
	at := h.p.Holders().At
	h.waitHolders(func(h podresources.Holders) bool { return h.At.After(at) && heldBy(id(0), "second")(h) })
	h.waitLog(msgDisabled, "", 2)
	for _, w := range h.warnings() {
		if w.Message != msgUnhealthy && w.Message != msgWithheld {
			t.Errorf("warning: %s %v", w.Message, w.ContextMap())
		}
	}
}

// A disabled plugin reports no error, whatever the node has.
func TestDisabledPluginHasNoError(t *testing.T) {
	for name, c := range map[string]struct {
		snap   *health.Snapshot
		change func(*Config)
	}{
		"before the first snapshot": {nil, func(*Config) {}},
		"no GPUs":                   {snapshot(0), func(*Config) {}},
		"all GPUs excluded":         {snapshot(2), func(c *Config) { c.Exclude = []string{"*"} }},
		"no kubelet directory":      {snapshot(2), func(c *Config) { c.KubeletDir = filepath.Join(c.KubeletDir, "absent") }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, c.snap)
			h.setConfig(c.change)
			h.setConfig(func(c *Config) { c.Enabled = false })
			h.run()
			if s := h.waitPlugin(func(s Status) bool { return s.Err == "" }); !s.Off || len(s.Resources) != 0 {
				t.Errorf("%+v", s)
			}
			// The holders are queried nevertheless, here without success.
			poll(h, "warnings", h.warnings, func(w []observer.LoggedEntry) bool { return len(w) == 1 })
			if s := h.p.Status(); s.AuditErr != "" {
				t.Errorf("audited: %+v", s)
			}
		})
	}
}
