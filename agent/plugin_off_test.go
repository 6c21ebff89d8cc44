package agent

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
)

// With plugin.enabled false the agent is ready and registers nothing. A reload turns the plugin on and off.
func TestPluginOff(t *testing.T) {
	t.Parallel()
	s := newSite(t, "")
	dir := agenttest.SocketDir(t)
	kubelet := agenttest.StartKubelet(t, dir)
	configure := func(plugin string) {
		s.Write("config.yaml", fmt.Sprintf("metrics: {listen: 127.0.0.1:0}\nplugin: {kubeletDir: %s, %s}\n", dir, plugin))
	}
	awaitReady := func(code int, part string) {
		t.Helper()
		s.Eventually(fmt.Sprint(web.ReadyzPath, ": ", code, " ", part), func() error {
			got, text, err := s.Get(web.ReadyzPath, nil, "")
			if err == nil && (got != code || !strings.Contains(text, part)) {
				err = fmt.Errorf("%d: %s", got, text)
			}
			return err
		})
	}
	awaitDevices := func(healthy, all int) {
		t.Helper()
		s.Eventually(fmt.Sprintf("the kubelet has %d of %d devices", healthy, all), func() error {
			r := kubelet.State().Resources["nvidia.com/gpu"]
			if r.Registrations != 1 || r.Allocatable() != healthy || r.Capacity() != all {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
	}
	checkStatus := func(plugin, metric string) {
		t.Helper()
		off := plugin == "off"
		var node status.Node
		if err := json.Unmarshal([]byte(s.MustGet(http.StatusOK, status.SnapshotPath, nil, "")), &node); err != nil {
			t.Fatal(err)
		}
		if node.Kubelet.Plugin != plugin || !node.Ready || node.Kubelet.Error != "" || off != (len(node.Kubelet.Resources) == 0) {
			t.Errorf("%+v, want plugin %s", node.Kubelet, plugin)
		}
		page, table := s.MustGet(http.StatusOK, "/", nil, ""), node.Table(false, false)
		if strings.Contains(page, "plugin off") != off || strings.Contains(table, "plugin off") != off {
			t.Errorf("plugin %s, but the page and the table are\n%s\n%s", plugin, page, table)
		}
		agenttest.MustContain(t, s.MustGet(http.StatusOK, "/metrics", nil, ""), "\ngpu_node_agent_plugin_enabled "+metric+"\n")
	}

	configure(`exclude: ["*"]`)
	s.Start(s.plugin.Run)
	awaitReady(http.StatusServiceUnavailable, "plugin: ")
	configure("enabled: false")
	awaitReady(http.StatusOK, "ok")
	checkStatus("off", "0")
	if k := kubelet.State(); len(k.Resources) != 0 {
		t.Errorf("registered: %+v", k.Resources)
	}
	configure("enabled: true")
	awaitDevices(2, 3)
	awaitReady(http.StatusOK, "ok")
	checkStatus("on", "1")
	configure("enabled: false")
	awaitDevices(0, 0)
	s.Eventually("the plugin is off", func() error {
		if st := s.plugin.Status(); !st.Off || len(st.Resources) != 0 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	awaitReady(http.StatusOK, "ok")
	checkStatus("off", "0")
}
