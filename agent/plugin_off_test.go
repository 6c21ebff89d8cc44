package agent

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
	"github.com/gpu-node-agent/gpu-node-agent/agent/terminal"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/nodelock"
)

// Without a kubelet the agent is ready only if plugin.enabled is false. The pages then show that nothing is registered.
func TestPluginOff(t *testing.T) {
	t.Parallel()
	s := newSite(t, "")
	if err := os.Mkdir(filepath.Join(s.Dir, nodelock.Directory), 0o750); err != nil {
		t.Fatal(err)
	}
	started := *s.pluginConfig.Load()
	started.KubeletDir = s.Dir // a reload cannot change it
	s.pluginConfig.Store(&started)
	s.Start(s.lock.Run)
	s.Start(s.plugin.Run)
	s.Start(s.dra.Run)
	for _, c := range []struct {
		enabled, plugin, metric string
		off                     bool
		code                    int
	}{
		{"true", "on", "1", false, http.StatusServiceUnavailable},
		{"false", "off", "0", true, http.StatusOK},
		{"true", "on", "1", false, http.StatusServiceUnavailable},
	} {
		s.Write("config.yaml", fmt.Sprintf("metrics: {listen: 127.0.0.1:0}\nplugin: {kubeletDir: %s, enabled: %s}\n", s.Dir, c.enabled))
		var node status.Node
		s.Eventually("plugin "+c.plugin, func() error {
			_, text, err := s.Get(status.SnapshotPath, nil, "")
			if err != nil {
				return err
			}
			node = status.Node{}
			err = json.Unmarshal([]byte(text), &node)
			if k := node.Kubelet; node.Ready != c.off || k.Plugin != c.plugin || k.Error != "" || (len(k.Resources) == 0) != c.off {
				err = fmt.Errorf("%+v", k)
			}
			return err
		})
		s.MustGet(c.code, web.ReadyzPath, nil, "")
		page, table := s.MustGet(http.StatusOK, "/", nil, ""), node.Table(false, terminal.Output{})
		if strings.Contains(page, "plugin off") != c.off || strings.Contains(table, "plugin off") != c.off {
			t.Errorf("plugin %s, but the page and the table are\n%s\n%s", c.plugin, page, table)
		}
		agenttest.MustContain(t, s.MustGet(http.StatusOK, "/metrics", nil, ""), "\ngpu_node_agent_plugin_enabled "+c.metric+"\n")
	}
}
