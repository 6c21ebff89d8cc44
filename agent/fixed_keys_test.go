package agent

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
)

// A running agent refuses another name of the driver and other directories, and keeps its configuration.
func TestReloadRefusesFixedKeys(t *testing.T) {
	for key, section := range map[string]string{
		"plugin.dra.driverName: cannot change from gpu.nvidia.com to gpu.example.com": "dra: {driverName: gpu.example.com}",
		"plugin.kubeletDir: cannot change from /var/lib/kubelet to /var/lib/k0s":      "kubeletDir: /var/lib/k0s",
		"plugin.sharing.mps.root: cannot change from /run/nvidia/mps to /run/mps":     "sharing: {mps: {root: /run/mps}}",
	} {
		t.Run(section, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: sim}\n")
				a := startReload(t, dir, zap.NewNop(), nil, func() {})
				before := a.pluginConfig.Load()
				agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: sim}\nhealth: {temperature: 80}\nplugin: {"+section+"}\n")
				waitIntervals(3)
				if a.lastReload.Load().OK || a.pluginConfig.Load() != before || a.healthConfig.Load().Temperature == 80 {
					t.Fatalf("%+v, %+v", a.lastReload.Load(), a.pluginConfig.Load())
				}
				agenttest.MustContain(t, *a.configError.Load(), key+" while the agent runs; drain the node, then restart the agent")
				agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: sim}\nhealth: {temperature: 80}\n")
				waitIntervals(3)
				if !a.lastReload.Load().OK || a.healthConfig.Load().Temperature != 80 {
					t.Errorf("set back: %+v, %s", a.lastReload.Load(), *a.configError.Load())
				}
			})
		})
	}
}

// An agent starts with its last good configuration while pods have claims or MPS daemons that only this one serves.
func TestStartWithFormerConfiguration(t *testing.T) {
	const claims = `{"version":1,"bootID":"boot","publishing":true,"names":{},"claims":{"uid":{"uid":"uid","name":"a"}}}`
	makeDir := func(t *testing.T, path ...string) string {
		t.Helper()
		dir := filepath.Join(path...)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	checkpoint := func(t *testing.T, dir string) {
		agenttest.WriteFile(t, makeDir(t, dir, "plugins", "gpu.former"), "gpu-node-agent.json", claims)
	}
	daemon := func(t *testing.T, dir string) {
		pipe := makeDir(t, dir, "mps", "GPU-1", "pipe")
		l, err := net.Listen("unix", filepath.Join(pipe, "control"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
	}
	none := func(*testing.T, string) {}
	const root = "plugin.sharing.mps.root: "
	for name, c := range map[string]struct {
		saved, next string // of the section plugin; no saved: there is no last good configuration
		pods        func(t *testing.T, dir string)
		wantSaved   bool
		key         string // of the error; empty for none
	}{
		"claims":                   {"dra: {driverName: gpu.former}", "dra: {driverName: gpu.next}", checkpoint, true, "plugin.dra.driverName: "},
		"no claims":                {"dra: {driverName: gpu.former}", "dra: {driverName: gpu.next}", none, false, ""},
		"claims, no last good one": {"", "dra: {driverName: gpu.next}", checkpoint, false, "plugin.dra.driverName: "},
		"last good one of a third": {"dra: {driverName: gpu.third}", "dra: {driverName: gpu.next}", checkpoint, false, "plugin.dra.driverName: "},
		"same driver":              {"dra: {driverName: gpu.former}", "dra: {driverName: gpu.former}, resource: a.b/c", checkpoint, false, ""},
		"MPS daemon":               {"sharing: {mps: {root: DIR/mps}}", "sharing: {mps: {root: DIR/next}}", daemon, true, root},
		"no MPS daemon":            {"sharing: {mps: {root: DIR/mps}}", "sharing: {mps: {root: DIR/next}}", none, false, ""},
		"same root":                {"sharing: {mps: {root: DIR/mps}}", "resource: a.b/c, sharing: {mps: {root: DIR/mps}}", daemon, false, ""},
		"MPS daemon, root unknown": {"", "sharing: {mps: {root: DIR/next}}", daemon, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "gna") // short, because of the sockets
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			load := func(section string) config.Config {
				text := fmt.Sprintf("source: {mode: sim}\nhealth: {stateFile: DIR/state.json}\nplugin: {api: dra, kubeletDir: DIR, %s}\n", section)
				file := agenttest.WriteFile(t, dir, "config.yaml", strings.ReplaceAll(text, "DIR", dir))
				loaded, err := config.Loader{File: file}.Load()
				if err != nil {
					t.Fatal(err)
				}
				return loaded
			}
			want := load("")
			if c.saved != "" {
				want = load(c.saved)
				agenttest.WriteFile(t, dir, "state.json.config", string(want.LastGood))
			}
			next := load(c.next)
			if !c.wantSaved {
				want = next
			}
			c.pods(t, dir)
			s := checkStart(t.Context(), config.Loader{File: filepath.Join(dir, "config.yaml")}, next, "boot")
			if !reflect.DeepEqual(s.Plugin, want.Plugin) || (s.Rejection != nil) != c.wantSaved {
				t.Errorf("%+v", s)
			}
			text := ""
			if err := cmp.Or(s.err, rejectionOf(s)); err != nil {
				text = err.Error()
			}
			if !strings.HasPrefix(text, c.key) || c.key == "" && text != "" {
				t.Errorf("error %q, want one of %q", text, c.key)
			}
		})
	}
}

// rejectionOf returns why the last good configuration is used; nil if it is not.
func rejectionOf(s start) error {
	if s.Rejection == nil {
		return nil
	}
	return s.Err
}
