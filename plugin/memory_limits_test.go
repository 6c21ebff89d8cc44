package plugin

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

func TestMemoryLimitsFollowConfiguration(t *testing.T) {
	enforced := func(by string) func(*Config) {
		return func(c *Config) { memoryShared("1Gi")(c); c.Sharing.Memory.Enforcement = by }
	}
	for name, test := range map[string]struct {
		change func(*Config)
		want   memlimits.Config
	}{
		"no memory shared": {func(*Config) {}, memlimits.Config{}},
		"auto":             {enforced(EnforceAuto), memlimits.Config{Enforcement: memlimits.Driver, PodLogs: "/logs"}},
		"driver":           {enforced(EnforceDriver), memlimits.Config{Enforcement: memlimits.Driver, PodLogs: "/logs"}},
		"mps":              {enforced(EnforceMPS), memlimits.Config{Enforcement: memlimits.MPS}},
		"none":             {enforced(EnforceNone), memlimits.Config{Enforcement: memlimits.None}},
		"plugin off":       {func(c *Config) { enforced(EnforceAuto)(c); c.Enabled = false }, memlimits.Config{}},
	} {
		c := configured(test.change)
		if got := c.MemoryLimits("/logs"); got != test.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// The limit of a container is the memory of the units that the layout offers.
func TestMemoryLimitsOfUnits(t *testing.T) {
	for _, enforcement := range []string{EnforceNone, EnforceMPS} {
		synctest.Test(t, func(t *testing.T) {
			c := configured(memoryShared("1536Mi"), func(c *Config) { c.Sharing.Memory.Enforcement = enforcement })
			snap := withReserved(1)
			var snapshots health.Latest[health.Snapshot]
			var configs health.Latest[memlimits.Config]
			var holders health.Latest[podresources.Holders]
			snapshots.Store(snap)
			limits := c.MemoryLimits("")
			configs.Store(&limits)
			by := map[health.DeviceID][]podresources.Holder{}
			for _, d := range unitsOf(Layout(c, snap)[0])[:3] {
				device := d.State.Device.ID
				by[device] = append(by[device], podresources.Holder{Pod: "p", Container: "c", Resource: c.Sharing.Memory.Resource, DeviceID: d.text()})
			}
			holders.Store(&podresources.Holders{By: by})
			f := memlimits.New(memlimits.Options{Config: &configs, Snapshots: &snapshots, Holders: &holders, Log: zap.NewNop()})
			ctx, cancel := context.WithCancel(t.Context())
			go f.Run(ctx, nil)
			synctest.Wait()
			got := f.Latest().Load().Containers
			if len(got) != 1 || got[0].Units != 3 || got[0].Limit != 3*1536<<20 {
				t.Errorf("%s: %+v", enforcement, got)
			}
			cancel()
			synctest.Wait()
		})
	}
}

func TestMemoryLimitHooks(t *testing.T) {
	dir := t.TempDir()
	hook := `"containerEdits": {"hooks": [{"args": ["nvidia-cdi-hook", "apply-cuda-memory-limits", "--gpu-id", "ID"]}]}`
	spec := `{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0", ` + strings.ReplaceAll(hook, "ID", "GPU-0") +
		`}, {"name": "GPU-1"}, {"name": "1", ` +
		strings.ReplaceAll(hook, "ID", "GPU-1") + `}, {"name": "2", ` + strings.ReplaceAll(hook, "ID", "GPU-0") + `}]}`
	if err := os.WriteFile(filepath.Join(dir, "nvidia.json"), []byte(spec), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		api      string
		lists    []string
		deviceID string
		want     map[health.DeviceID]bool
	}{
		"by UUID":     {APIDevicePlugin, []string{ListEnv, ListCDICRI}, DeviceIDUUID, map[health.DeviceID]bool{"GPU-0": true}},
		"by index":    {APIDevicePlugin, []string{ListCDIAnnotations}, DeviceIDIndex, map[health.DeviceID]bool{"GPU-1": true}},
		"without CDI": {APIDevicePlugin, []string{ListEnv}, DeviceIDUUID, nil},
		"claims":      {APIDRA, []string{ListEnv}, DeviceIDIndex, map[health.DeviceID]bool{"GPU-0": true}},
	} {
		h := newHarness(t, snapshot(3))
		h.setConfig(func(c *Config) { c.API, c.DeviceList, c.DeviceID, c.CDI.Dir = test.api, test.lists, test.deviceID, dir })
		if got := h.p.MemoryLimitHooks(); !maps.Equal(got, test.want) {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// A generated spec has the hook where containers may have limits in their environment.
func TestGeneratedSpecHasMemoryLimitHook(t *testing.T) {
	for _, enforcement := range []string{EnforceAuto, EnforceMPS} {
		snap := withReserved(2)
		snap.Source.Versions.Driver = "615.10"
		h := newHarness(t, snap)
		h.p.hostFS = driverFS("615.10")
		h.setConfig(func(c *Config) {
			memoryShared("1Gi", "0")(c)
			c.Sharing.Memory.Enforcement, c.DeviceList = enforcement, []string{ListCDICRI}
			c.CDI.Generate, c.CDI.Dir, c.CDI.HookPath = true, t.TempDir(), "/usr/bin/nvidia-cdi-hook"
		})
		if err := h.p.ensureCDI(h.p.layouts.current()); err != nil {
			t.Fatal(err)
		}
		var want map[health.DeviceID]bool
		if enforcement == EnforceAuto {
			want = map[health.DeviceID]bool{"GPU-0": true, "GPU-1": true}
		}
		if got := h.p.MemoryLimitHooks(); len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", enforcement, got, want)
		}
	}
}
