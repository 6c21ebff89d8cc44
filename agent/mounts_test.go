package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/mounts"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Only the loss of a directory that the configuration in force uses ends the process.
func TestHostDirs(t *testing.T) {
	const kubelet, state = "/k/device-plugins /k/pod-resources", "/var/lib/gpu-node-agent"
	const claims = "/k/plugins_registry /k/plugins/gpu.nvidia.com"
	for name, c := range map[string]struct {
		change func(*config.Config)
		want   string
	}{
		"defaults": {func(*config.Config) {}, kubelet + " " + state},
		"CDI of the toolkit": {
			func(c *config.Config) { c.Plugin.DeviceList = []string{plugin.ListCDICRI} }, kubelet + " /var/run/cdi /etc/cdi " + state,
		},
		"a generated CDI spec": {
			func(c *config.Config) {
				c.Plugin.DeviceList, c.Plugin.CDI.Generate, c.Plugin.CDI.Dir = []string{plugin.ListCDIAnnotations}, true, "/cdi"
			}, kubelet + " /cdi " + state,
		},
		"DRA": {
			func(c *config.Config) { c.Plugin.API = plugin.APIDRA },
			kubelet + " " + claims + " /var/run/cdi /etc/cdi " + state,
		},
		"beside another agent": {func(c *config.Config) { c.Plugin.API, c.Plugin.Enabled = plugin.APIDRA, false }, kubelet + " " + state},
	} {
		reloaded := config.DefaultConfig()
		reloaded.Plugin.KubeletDir, reloaded.StateDir = "/k", state
		a := newAgent(reloaded, zap.NewNop(), zap.NewAtomicLevel(), "")
		c.change(&reloaded)
		a.apply(reloaded)
		if got := a.hostDirs(); !slices.Equal(got, strings.Fields(c.want)) {
			t.Errorf("%s: %v, want %s", name, got, c.want)
		}
	}
	c := config.DefaultConfig()
	c.Plugin.KubeletDir = "/k"
	if got := newAgent(c, zap.NewNop(), zap.NewAtomicLevel(), "").hostDirs(); !slices.Equal(got, strings.Fields(kubelet)) {
		t.Errorf("without a state directory: %v", got)
	}
}

// A process that finds the note of a lost state directory reports it on /readyz, in the status and by an event, and does not conclude from
// the missing file that no device plugin has served.
func TestLossOfStateDirectory(t *testing.T) {
	for _, lost := range []bool{false, true} {
		dir := t.TempDir()
		c := config.DefaultConfig()
		c.Health.Socket = filepath.Join(dir, "agent.sock")
		at := time.Now().UTC().Truncate(time.Second)
		if lost {
			note := fmt.Sprintf(`{"directory": "/var/lib/gpu-node-agent", "at": %q}`, at.Format(time.RFC3339))
			if err := os.WriteFile(filepath.Join(dir, mounts.NoteName), []byte(note), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		a := idleAgent(nil)
		a.apply(c)
		a.readLoss()
		const text = "the directory mounted at /var/lib/gpu-node-agent was deleted on the host at "
		if all := strings.Join(a.problems().Texts(view.Warning), "\n"); strings.Contains(all, "state: "+text) != lost {
			t.Errorf("lost %v: warnings %s", lost, all)
		}
		if got := a.status().Memory.Loss; strings.HasPrefix(got, text) != lost {
			t.Errorf("lost %v: status %q", lost, got)
		}
		if lost {
			old := *a.loss
			old.At = at.Add(-25 * time.Hour)
			if all := strings.Join(warningsAfter(a, &old), "\n"); strings.Contains(all, text) {
				t.Errorf("warnings of a process that runs for more than a day: %s", all)
			}
		}
		if e := a.lossEvent(); (e != nil) != lost || lost && (!e.At.Equal(at) || !strings.Contains(e.Message, text)) {
			t.Errorf("lost %v: event %+v", lost, e)
		}
		if served := a.served.Load() != nil; served != lost {
			t.Errorf("lost %v: a device plugin may have served: %v", lost, served)
		}
	}
}

func warningsAfter(a *Agent, loss *mounts.Loss) []string {
	defer func(was *mounts.Loss) { a.loss = was }(a.loss)
	a.loss = loss
	return a.problems().Texts(view.Warning)
}
