package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
)

// TestPluginOff: an agent that only shows is ready, and says that it does no more; a reload makes it serve, and
// another one takes the GPUs back.
func TestPluginOff(t *testing.T) {
	t.Parallel()
	s := newSite(t, "")
	dir := agenttest.SocketDir(t)
	kubelet, err := kubelettest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(kubelet.Stop)
	configure := func(plugin string) {
		s.Write("config.yaml", fmt.Sprintf("metrics: {listen: 127.0.0.1:0}\nplugin: {kubeletDir: %s, %s}\n", dir, plugin))
	}
	configure(`exclude: ["*"]`)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.devices.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	ready := func(want int, says string) {
		t.Helper()
		s.Eventually(fmt.Sprint("/readyz is ", want, " and says ", says), func() error {
			code, text, err := s.Get(web.ReadyzPath, nil, "")
			if err == nil && (code != want || !strings.Contains(text, says)) {
				err = fmt.Errorf("%d: %s", code, text)
			}
			return err
		})
	}
	shows := func(word, metric string) {
		t.Helper()
		var node status.Node
		if err := json.Unmarshal([]byte(s.MustGet(http.StatusOK, status.SnapshotPath, nil, "")), &node); err != nil {
			t.Fatal(err)
		}
		if node.Kubelet.Plugin != word || !node.Ready || node.Kubelet.Error != "" || (word == "off") != (len(node.Kubelet.Resources) == 0) {
			t.Errorf("%+v, want it to be %s", node.Kubelet, word)
		}
		page, table := s.MustGet(http.StatusOK, "/", nil, ""), node.Table(false, false)
		if off := word == "off"; strings.Contains(page, "plugin off") != off || strings.Contains(table, "plugin off") != off {
			t.Errorf("it is %s, but the page and the table say\n%s\n%s", word, page, table)
		}
		agenttest.MustContain(t, s.MustGet(http.StatusOK, "/metrics", nil, ""), "\ngpu_node_agent_plugin_enabled "+metric+"\n")
	}

	ready(http.StatusServiceUnavailable, "plugin.include and plugin.exclude leave none")
	configure("enabled: false")
	ready(http.StatusOK, "ok")
	shows("off", "0")
	if s := kubelet.State(); len(s.Resources) != 0 {
		t.Errorf("registered: %+v", s.Resources)
	}
	configure("enabled: true")
	has := func(healthy, all int) {
		t.Helper()
		s.Eventually(fmt.Sprintf("the kubelet has %d of %d", healthy, all), func() error {
			r := kubelet.State().Resources["nvidia.com/gpu"]
			if r.Registrations != 1 || r.Allocatable() != healthy || r.Capacity() != all {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
	}
	has(2, 3)
	ready(http.StatusOK, "ok")
	shows("on", "1")
	configure("enabled: false")
	has(0, 0)
	s.Eventually("the plugin is off", func() error {
		if st := s.devices.Status(); !st.Off || len(st.Resources) != 0 {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	ready(http.StatusOK, "ok")
	shows("off", "0")
}
