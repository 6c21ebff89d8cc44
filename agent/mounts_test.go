package agent

import (
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// The directories that end the process are those that the configuration in force uses.
func TestHostDirs(t *testing.T) {
	const kubelet, state = "/var/lib/kubelet/device-plugins /var/lib/kubelet/pod-resources", "/var/lib/gpu-node-agent"
	const claims = "/var/lib/kubelet/plugins_registry /var/lib/kubelet/plugins/gpu.nvidia.com"
	for name, c := range map[string]struct {
		change func(*config.Config)
		want   string
	}{
		"defaults":          {func(*config.Config) {}, kubelet + " " + state},
		"no state file":     {func(c *config.Config) { c.Health.StateFile = "" }, kubelet},
		"another directory": {func(c *config.Config) { c.Plugin.KubeletDir = "/k" }, "/k/device-plugins /k/pod-resources " + state},
		"CDI of the toolkit": {
			func(c *config.Config) { c.Plugin.DeviceList = []string{plugin.ListCDICRI} }, kubelet + " /var/run/cdi /etc/cdi " + state,
		},
		"a generated CDI spec": {
			func(c *config.Config) {
				c.Plugin.DeviceList, c.Plugin.CDI.Generate, c.Plugin.CDI.Dir = []string{plugin.ListCDIAnnotations}, true, "/cdi"
			}, kubelet + " /cdi " + state,
		},
		"DRA":                  {func(c *config.Config) { c.Plugin.API = plugin.APIDRA }, kubelet + " " + claims + " /var/run/cdi /etc/cdi " + state},
		"beside another agent": {func(c *config.Config) { c.Plugin.API, c.Plugin.Enabled = plugin.APIDRA, false }, kubelet + " " + state},
	} {
		a := newAgent(config.DefaultConfig(), zap.NewNop(), zap.NewAtomicLevel(), "")
		reloaded := config.DefaultConfig()
		c.change(&reloaded)
		a.apply(reloaded)
		if got := a.hostDirs(); !slices.Equal(got, strings.Fields(c.want)) {
			t.Errorf("%s: %v, want %s", name, got, c.want)
		}
	}
}
