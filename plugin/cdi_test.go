package plugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/cdi"
)

// driverFS is the file system of a machine with a driver.
func driverFS(version string) fstest.MapFS {
	fsys := machine()
	fsys["usr/lib64/libcuda.so."+version] = &fstest.MapFile{}
	return fsys
}

// A resource is registered only when the CDI spec for its devices exists. It continues when the spec disappears.
func TestRegistrationWaitsForCDISpec(t *testing.T) {
	h := newHarness(t, snapshot(2))
	dir := t.TempDir()
	h.setConfig(func(c *Config) { c.DeviceList, c.CDI.Dir = []string{ListCDICRI}, dir })
	h.p.cdi.StaticDir = filepath.Join(dir, "absent")
	k := h.kubelet()
	h.run()
	h.waitPlugin(func(s Status) bool { return strings.Contains(s.Err, dir) && len(s.Resources) == 0 })
	file := filepath.Join(dir, "nvidia.json")
	if err := os.WriteFile(file, []byte(`{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0"}, {"name": "GPU-1"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	h.setHealth(0, health.Healthy)
	h.waitResource(k, gpu, listed(2, 2))
	h.waitPlugin(func(s Status) bool { return s.Err == "" })
	h.remove(file)
	h.setHealth(0, health.Healthy)
	h.waitPlugin(func(s Status) bool { return s.Err != "" && len(s.Resources) == 1 && s.Resources[0].Registered })
}

// A resource is served when nvcdi has answered, here that this machine has no such driver.
func TestResourceWaitsForNVCDI(t *testing.T) {
	first := snapshot(2)
	first.Source.Kind, first.Source.Versions.Driver = "dcgm", "1.2.3"
	h := newHarness(t, first)
	h.p.hostFS = driverFS("1.2.3")
	h.setConfig(func(c *Config) {
		c.DeviceList = []string{ListCDICRI}
		c.CDI.Generate, c.CDI.Dir, c.CDI.HookPath = true, t.TempDir(), "/usr/bin/nvidia-cdi-hook"
	})
	h.run()
	h.waitPlugin(func(s Status) bool { return strings.Contains(s.Err, cdi.ErrPending.Error()) && len(s.Resources) == 0 })
	done := make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		defer close(done)
		h.p.GenerateCDI(ctx)
	}()
	h.waitPlugin(func(s Status) bool { return s.Err == "" && len(s.Resources) == 1 })
	stop()
	<-done
}

func TestCDIInput(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Config)
		source health.Source
		want   string // NVML, detached, memory limits
	}{
		"DCGM":      {func(*Config) {}, health.Source{Kind: "dcgm"}, "true false false"},
		"simulated": {func(*Config) {}, health.Source{Kind: "sim"}, "false false false"},
		"detached":  {func(*Config) {}, health.Source{Kind: "dcgm", Detachment: health.Detachment{Since: time.Unix(1, 0)}}, "true true false"},
		"attached":  {func(*Config) {}, health.Source{Kind: "dcgm", Detachment: health.Detachment{Over: true}}, "true false false"},
		"memory":    {memoryShared("1Gi"), health.Source{}, "false false false"},
		"memory, limit": {
			both(memoryShared("1Gi"), func(c *Config) { c.Sharing.Memory.Enforcement = EnforceAuto }),
			health.Source{},
			"false false true",
		},
		"limit of none": {func(c *Config) { c.Sharing.Memory.Enforcement = EnforceDriver }, health.Source{}, "false false false"},
		"memory by MPS": {
			both(memoryShared("1Gi"), func(c *Config) { c.Sharing.Memory.Enforcement = EnforceMPS }),
			health.Source{},
			"false false false",
		},
		"memory, driver": {
			both(memoryShared("1Gi"), func(c *Config) { c.Sharing.Memory.Enforcement = EnforceDriver }), health.Source{}, "false false true",
		},
	} {
		cfg := configured(c.change, func(c *Config) { c.DriverRoot, c.CDI.Kind = "/run/driver", "a.com/gpu" })
		c.source.Versions.Driver = "580.1"
		in := cfg.CDIInput(&health.Snapshot{Source: c.source}, os.DirFS("/"))
		if got := fmt.Sprint(in.NVML, in.Detached, in.MemoryLimits); got != c.want || in.Driver != "580.1" ||
			in.Host.DriverRoot != "/run/driver" || in.Config.Kind != "a.com/gpu" || in.Host.FS == nil {
			t.Errorf("%s: %s, want %s: %+v", name, got, c.want, in)
		}
	}
}
