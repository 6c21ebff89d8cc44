package doctor

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
)

func TestDRAStepsOnlyWithDRA(t *testing.T) {
	for api, want := range map[string]bool{plugin.APIDRA: true, plugin.APIDevicePlugin: false} {
		c := config.Config{Plugin: plugin.DefaultConfig()}
		c.Plugin.API = api
		if dra, cdi := (doctor{}).draSteps(c), (doctor{}).cdiSteps(c); (len(dra) > 0) != want || (len(cdi) > 0) != want {
			t.Errorf("%s: %d and %d checks", api, len(dra), len(cdi))
		}
	}
}

func TestCheckDRADirs(t *testing.T) {
	for name, c := range map[string]struct {
		dirs []string
		want want
	}{
		"before the first start": {[]string{"plugins_registry"}, want{CheckOK, "plugins_registry", ""}},
		"after it":               {[]string{"plugins_registry", "plugins/gpu.nvidia.com"}, want{CheckOK, "plugins/gpu.nvidia.com", ""}},
		"no kubelet":             {nil, want{CheckFail, "plugins_registry", "plugin.kubeletDir"}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := plugin.DefaultConfig()
			cfg.KubeletDir = t.TempDir()
			for _, dir := range c.dirs {
				if err := os.MkdirAll(filepath.Join(cfg.KubeletDir, dir), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			expect(t, checkDRADirs(cfg), c.want)
		})
	}
}

func TestCheckCDISupport(t *testing.T) {
	const enabled = "[plugins.\"io.containerd.grpc.v1.cri\"]\n  enable_cdi = true\n"
	dra := func(*plugin.Config) {}
	list := func(list ...string) func(*plugin.Config) {
		return func(c *plugin.Config) { c.API, c.DeviceList = plugin.APIDevicePlugin, list }
	}
	looked := func(c *plugin.Config) { c.CDI.Runtime = cdi.RuntimeSupported }
	for name, c := range map[string]struct {
		version string
		err     string
		change  func(*plugin.Config)
		config  string
		want    want
	}{
		"containerd 2":          {"containerd://2.1.4", "", dra, "", want{CheckOK, "2.1.4", ""}},
		"containerd 10":         {"containerd://10.0.0", "", dra, "", want{CheckOK, "10.0.0", ""}},
		"containerd 1.6":        {"containerd://1.6.38", "", dra, enabled, want{CheckFail, "1.6.38", "containerd 2"}},
		"1.6, looked at":        {"containerd://1.6.38", "", looked, enabled, want{CheckFail, "1.6.38", "containerd 2"}},
		"1.6, names in the CRI": {"containerd://1.6.38", "", list(plugin.ListCDICRI), "", want{CheckFail, "1.6.38", "containerd 2"}},
		"1.6, annotations": {
			"containerd://1.6.38", "", list(plugin.ListCDIAnnotations), enabled,
			want{CheckWarn, "NVIDIA's", "plugin.cdi.runtime"},
		},
		"containerd 1.7":          {"containerd://1.7.27", "", dra, "", want{CheckWarn, "1.7.27", "enable_cdi"}},
		"containerd 1.7 with CDI": {"containerd://1.7.27", "", dra, enabled, want{CheckOK, "1.7.27", ""}},
		"1.7, looked at":          {"containerd://1.7.27", "", looked, "", want{CheckOK, "1.7.27", ""}},
		"comment":                 {"containerd://1.7.27", "", dra, "# enable_cdi = true\n", want{CheckWarn, "1.7.27", "enable_cdi"}},
		"cri-o":                   {"cri-o://1.34.0", "", dra, "", want{CheckInfo, "cri-o", ""}},
		"no API server":           {"", "connection refused", dra, "", want{CheckInfo, "connection refused", ""}},
		"none reported":           {"", "", dra, "", want{CheckInfo, "", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			d := doctor{host: files{"etc/containerd/config.toml": c.config}.with(nil).root(t)}
			cfg := plugin.DefaultConfig()
			cfg.API = plugin.APIDRA
			c.change(&cfg)
			expect(t, d.checkCDISupport(&cfg, cdi.Runtime{Version: c.version, Kubelet: "v1.37.0", Err: c.err}), c.want)
		})
	}
}

// A running agent reports its driver; without one the sockets are asked.
func TestCheckDRADriver(t *testing.T) {
	with := func(change func(*dra.Status)) dra.Status {
		d := dra.Status{Enabled: true, DriverName: "gpu.nvidia.com", Registered: true, Devices: 8, Published: time.Now()}
		change(&d)
		return d
	}
	for name, c := range map[string]struct {
		dra   dra.Status
		wants []want
	}{
		"serves": {with(func(*dra.Status) {}), []want{{CheckOK, "8 devices", ""}}},
		"another driver": {
			with(func(d *dra.Status) { d.Err = "another driver answers; remove it" }),
			[]want{{CheckFail, "another driver", "remove it"}},
		},
		"features": {
			with(func(d *dra.Status) { d.DroppedFeatures = []string{"DRADeviceTaints"} }),
			[]want{{CheckWarn, "DRADeviceTaints", "feature gates"}},
		},
		"waits":          {dra.Status{Enabled: true, Err: "waiting for pods"}, []want{{CheckWarn, "waiting for pods", "log"}}},
		"does not serve": {dra.Status{}, []want{{CheckOK, "gpu.nvidia.com", ""}}},
		"rights and features": {with(func(d *dra.Status) { d.PublishErr, d.DroppedFeatures = "forbidden", []string{"A"} }), []want{
			{CheckWarn, "forbidden", "rights"}, {CheckWarn, "A", "feature gates"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_ = json.NewEncoder(w).Encode(status.New(&view.View{At: time.Now(), DRA: c.dra}, nil, node.IdleConfig{}, nil))
			}))
			defer agent.Close()
			cfg := config.Config{Plugin: plugin.DefaultConfig()}
			cfg.Plugin.KubeletDir = agenttest.SocketDir(t)
			cfg.Metrics.Listen = strings.TrimPrefix(agent.URL, "http://")
			expect(t, checkDRADriver(t.Context(), cfg), c.wants...)
		})
	}
}
