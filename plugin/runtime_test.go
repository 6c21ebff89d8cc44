package plugin

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/offer"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestNeedsCDI(t *testing.T) {
	for _, c := range []struct {
		change func(*Config)
		want   bool
	}{
		{func(*Config) {}, false},
		{func(c *Config) { c.API = APIDRA }, true},
		{func(c *Config) { c.API, c.Enabled = APIDRA, false }, false},
		{func(c *Config) { c.DeviceList = []string{ListCDICRI} }, true},
		{func(c *Config) { c.DeviceList = []string{ListCDIAnnotations} }, true},
		{func(c *Config) { c.DeviceList, c.Enabled = []string{ListCDICRI}, false }, false},
		{func(c *Config) { c.DeviceList = []string{ListCDICRI, ListCDIAnnotations} }, true},
		{func(c *Config) { c.DeviceList = []string{ListCDICRI, ListEnv} }, false},
		{func(c *Config) { c.DeviceList = []string{ListMounts, ListCDIAnnotations} }, false},
	} {
		cfg := configured(c.change)
		if got := cfg.NeedsCDI(); got != c.want {
			t.Errorf("api %s, deviceList %q, enabled %v: got %v", cfg.API, cfg.DeviceList, cfg.Enabled, got)
		}
	}
}

// NVIDIA's runtime can read annotations itself, so only names in the CRI alone are surely lost.
func TestJudgeRuntime(t *testing.T) {
	for _, c := range []struct {
		api, kubelet string
		list         []string
		want         cdi.Support
	}{
		{APIDRA, "v1.34.0", nil, cdi.SupportIgnored},
		{APIDRA, "", []string{ListCDIAnnotations}, cdi.SupportIgnored},
		{APIDevicePlugin, "v1.34.0", []string{ListCDICRI}, cdi.SupportIgnored},
		{APIDevicePlugin, "v1.31.9", []string{ListCDICRI}, cdi.SupportDepends},
		{APIDevicePlugin, "", []string{ListCDICRI}, cdi.SupportDepends},
		{APIDevicePlugin, "v1.34.0", []string{ListCDIAnnotations}, cdi.SupportDepends},
		{APIDevicePlugin, "v1.34.0", []string{ListCDICRI, ListCDIAnnotations}, cdi.SupportDepends},
	} {
		cfg := configured(func(cfg *Config) { cfg.API, cfg.DeviceList = c.api, c.list })
		if v := cfg.JudgeRuntime(cdi.Runtime{Version: "containerd://1.6.36", Kubelet: c.kubelet}); v.Support != c.want {
			t.Errorf("%+v: got %s (%s)", c, v.Support, v)
		}
	}
}

// With CDI alone, no pod gets a device on a runtime that ignores CDI, and one reason says so. Running pods keep theirs. All comes back with
// a newer runtime. Before the first answer nothing is offered, and a Node that cannot be read changes nothing.
func TestRuntimeIgnoresCDI(t *testing.T) {
	const old = "containerd://1.6.36"
	h := newHarness(t, snapshot(2))
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "nvidia.json"),
		[]byte(`{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0"}, {"name": "GPU-1"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	h.setConfig(func(c *Config) { c.DeviceList, c.CDI.Dir, c.CDI.Runtime = []string{ListCDICRI}, dir, cdi.RuntimeAuto })
	h.p.cdi.StaticDir = filepath.Join(dir, "absent")
	runtime := &health.Latest[cdi.Runtime]{}
	set := func(version string) { runtime.Store(&cdi.Runtime{Version: version, Kubelet: "v1.37.0"}) }
	h.p.SetRuntime(runtime)
	k := h.kubelet()
	h.run()
	h.waitResource(k, gpu, listed(2, 0))
	runtime.Store(&cdi.Runtime{Err: "forbidden"})
	h.waitResource(k, gpu, listed(2, 2))
	h.waitPlugin(func(s Status) bool { return s.Err == "" })
	h.allocate(k, id(0))
	h.waitHolders(func(h podresources.Holders) bool { return len(h.By["GPU-0"]) == 1 })

	set(old)
	h.waitResource(k, gpu, func(r kubelettest.Resource) bool {
		return r.Connected && r.Devices[0].Healthy && !r.Devices[1].Healthy // the pod keeps its device
	})
	s := h.waitPlugin(func(s Status) bool {
		return strings.Contains(s.Err, old) && len(s.Resources) == 1 && s.Resources[0].Registered
	})
	if len(s.Warnings) > 0 {
		t.Errorf("%+v", s)
	}
	l := h.p.layouts.current()
	for _, d := range l.resources[0].Devices {
		if d.offer.Code() != offer.NoCDI && d.id(0) != id(0) || d.give.Allows(offer.Give) {
			t.Errorf("%s: offered: %+v, %+v", d.id(0), d.offer, d.give)
		}
	}
	_, err := allocation{cfg: l.cfg}.grants(l.resources[0], []string{id(1)})
	if r, ok := errors.AsType[*refusal](err); !ok || r.reason != reasonWithheldDevice || !strings.Contains(r.text, s.Err) ||
		strings.Contains(r.text, "another device") {
		t.Errorf("refused with %v, want %q", err, s.Err)
	}

	h.setConfig(func(c *Config) { c.DeviceList = []string{ListCDICRI, ListEnv} })
	h.waitResource(k, gpu, listed(2, 2))
	h.setConfig(func(c *Config) { c.DeviceList = []string{ListCDICRI} })
	h.waitPlugin(func(s Status) bool { return strings.Contains(s.Err, old) })
	set("containerd://2.1.4")
	h.waitResource(k, gpu, listed(2, 2))
	h.waitPlugin(func(s Status) bool { return s.Err == "" })
}
