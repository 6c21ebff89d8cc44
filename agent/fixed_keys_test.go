package agent

import (
	"context"
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
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
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
				agenttest.MustContain(t, a.lastReload.Load().Err, key+" while the agent runs; it takes effect at a restart: drain the node first if ")
				agenttest.WriteFile(t, dir, "config.yaml", "source: {mode: sim}\nhealth: {temperature: 80}\n")
				waitIntervals(3)
				if !a.lastReload.Load().OK || a.healthConfig.Load().Temperature != 80 {
					t.Errorf("set back: %+v, %s", a.lastReload.Load(), a.lastReload.Load().Err)
				}
			})
		})
	}
}

// startDaemon stands in for an MPS daemon of a device.
func startDaemon(t *testing.T, dir string) {
	pipe := filepath.Join(dir, "mps", "GPU-1", "pipe")
	if err := os.MkdirAll(pipe, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(pipe, "control"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
}

// An agent starts with its last good configuration while pods have what only that serves.
func TestStartWithFormerConfiguration(t *testing.T) {
	checkpoint := func(text string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			dir = filepath.Join(dir, "plugins", "gpu.former")
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			agenttest.WriteFile(t, dir, "gpu-node-agent.json", text)
		}
	}
	claims := checkpoint(`{"version":1,"bootID":"boot","publishing":true,"names":{},"claims":{"uid":{"uid":"uid","name":"a"}}}`)
	unreadable := checkpoint("{")
	none := func(*testing.T, string) {}
	const former, third, next = "dra: {driverName: gpu.former}", "dra: {driverName: gpu.third}", "dra: {driverName: gpu.next}"
	const here, there = "resource: a.b/c, sharing: {mps: {root: DIR/mps}}", "sharing: {mps: {root: DIR/next}}"
	const starts, startsUnfit, refused = "", "unfit", "plugin."
	for name, c := range map[string]struct {
		saved, next string // of the section plugin; no saved: there is no last good configuration
		pods        func(t *testing.T, dir string)
		want        string // starts, startsUnfit, or the start of the error with which the last good configuration is in force
	}{
		"claims":                       {former, next, claims, refused + "dra.driverName: "},
		"no claims":                    {former, next, none, starts},
		"claims, no last good one":     {"", next, claims, startsUnfit},
		"claims of neither":            {third, next, claims, startsUnfit},
		"same driver":                  {former, former + ", resource: a.b/c", claims, starts},
		"unreadable":                   {former, next, unreadable, refused + "dra.driverName: "},
		"unreadable, no last good one": {"", next, unreadable, startsUnfit},
		"unreadable, of weeks ago":     {third, next, unreadable, starts},
		"MPS daemon":                   {here, there, startDaemon, refused + "sharing.mps.root: "},
		"no MPS daemon":                {here, there, none, starts},
		"same root":                    {here, here + ", migStrategy: mixed", startDaemon, starts},
		"MPS daemon, root unknown":     {"", there, startDaemon, starts},
	} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "gna") // short, because of the sockets
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			load := func(section string) config.Config {
				text := fmt.Sprintf("source: {mode: sim}\nplugin: {api: dra, kubeletDir: DIR, %s}\n", section)
				file := agenttest.WriteFile(t, dir, "config.yaml", strings.ReplaceAll(text, "DIR", dir))
				loaded, err := config.Loader{File: file, StateDir: dir}.Load()
				if err != nil {
					t.Fatal(err)
				}
				return loaded
			}
			next := load(c.next)
			want, former := next, (*plugin.Config)(nil)
			if c.saved != "" {
				last := load(c.saved)
				agenttest.WriteFile(t, dir, "last-good-config.json", string(last.LastGood))
				if former = &last.Plugin; strings.HasPrefix(c.want, refused) {
					want = last
				}
			}
			c.pods(t, dir)
			loader := config.Loader{File: filepath.Join(dir, "config.yaml"), StateDir: dir}
			s := checkStart(t.Context(), loader, next, "boot")
			if !reflect.DeepEqual(s.Plugin, want.Plugin) || !reflect.DeepEqual(s.former, former) || s.keepLastGood != (c.want == startsUnfit) {
				t.Errorf("%+v", s)
			}
			switch isRefused := strings.HasPrefix(c.want, refused); {
			case isRefused != (s.Rejection != nil):
				t.Errorf("rejection %+v", s.Rejection)
			case isRefused && !strings.HasPrefix(s.Err.Error(), c.want):
				t.Errorf("error %q, want one of %q", s.Err, c.want)
			}

			ended, end := context.WithCancel(t.Context())
			end()
			if s := checkStart(ended, loader, next, "boot"); !reflect.DeepEqual(s.Plugin, next.Plugin) || !s.keepLastGood {
				t.Errorf("not checked: %+v", s)
			}
		})
	}
}

// A configuration that may not serve what pods have does not replace the last good one, which the next start checks again.
func TestUnfitConfigurationIsNotLastGood(t *testing.T) {
	for _, unfit := range []bool{false, true} {
		c := config.DefaultConfig()
		c.LastGood = []byte("files")
		a := newAgent(c, zap.NewNop(), zap.NewAtomicLevel(), "")
		a.keepLastGood = unfit
		a.settle()
		if saved := a.lastGood.Load() != nil; saved == unfit {
			t.Errorf("unfit %v: saved %v", unfit, saved)
		}
	}
}
