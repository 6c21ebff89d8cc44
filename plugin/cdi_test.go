package plugin

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const testDriver = "580.95.05"

// driverTree makes a directory like the root of a machine with a driver in root, and returns it.
func driverTree(t *testing.T, root, version string) string {
	t.Helper()
	top := t.TempDir()
	lib := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	files := []string{
		filepath.Join(lib, "libcuda.so."+version), filepath.Join(lib, "libnvidia-ml.so."+version),
		filepath.Join(lib, "vdpau/libvdpau_nvidia.so."+version), filepath.Join(lib, "libc.so.6"), filepath.Join(lib, "libcuda.so.1.bak"),
		filepath.Join(root, "usr/bin/nvidia-smi"), filepath.Join(root, "lib/firmware/nvidia", version, "gsp_ga10x.bin"),
		filepath.Join(root, "run/nvidia-persistenced/socket"),
	}
	for name, file := range machine() {
		if strings.HasPrefix(name, "run/") {
			continue
		}
		files = append(files, name)
		writeFile(t, filepath.Join(top, name), string(file.Data))
	}
	for _, f := range files[:8] {
		writeFile(t, filepath.Join(top, f), "")
	}
	for link, to := range map[string]string{
		"libcuda.so.1": "libcuda.so." + version, "libcuda.so": "libcuda.so.1", "libnvidia-ml.so.1": "libnvidia-ml.so." + version,
		"libc.so": "libc.so.6", "loop.so": "loop.so", "libx.so": "/etc/passwd",
	} {
		if err := os.Symlink(to, filepath.Join(top, lib, link)); err != nil {
			t.Fatal(err)
		}
	}
	return top
}

func writeFile(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// keeper is a cdiKeeper in directories of its own.
func newTestKeeper(t *testing.T, top string) (*cdiKeeper, *observer.ObservedLogs) {
	core, logs := observer.New(zapcore.InfoLevel)
	return &cdiKeeper{root: os.DirFS(top), static: filepath.Join(t.TempDir(), "etc"), log: zap.New(core)}, logs
}

// ofDriver returns a snapshot taken with a driver.
func ofDriver(s *health.Snapshot, driver string) *health.Snapshot {
	next := *s
	next.Source.Versions.Driver = driver
	return &next
}

func TestCDISpecGolden(t *testing.T) {
	snap := partitioned(nil, []string{"1g.10gb", "1g.10gb"}, nil)
	snap.Devices[2].Device.Minor = -1
	for _, c := range []struct {
		name string
		root string
		cfg  Config
	}{
		{"plain", "/", DefaultConfig()},
		{"hook", "/", configured(func(c *Config) { c.CDI.HookPath = "/usr/bin/nvidia-cdi-hook" })},
		{"ctk-mig-index", "/", configured(func(c *Config) {
			c.CDI.HookPath, c.MIGStrategy, c.DeviceID = "/usr/bin/nvidia-ctk", MIGMixed, DeviceIDIndex
		})},
		{"driver-root", "/driver-root", configured(func(c *Config) {
			c.DriverRoot, c.ContainerDriverRoot = "/run/nvidia/driver", "/driver-root"
		})},
	} {
		c.cfg.DeviceList, c.cfg.CDI.Generate, c.cfg.CDI.Dir = []string{ListCDICRI}, true, filepath.Join(t.TempDir(), "cdi")
		if err := c.cfg.Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		layout := Layout(c.cfg, snap)
		k, _ := newTestKeeper(t, driverTree(t, c.root, testDriver))
		if why := k.ready(&c.cfg, layout, ofDriver(snap, testDriver)); why != "" {
			t.Errorf("%s: %s", c.name, why)
			continue
		}
		spec, err := cdi.ReadSpec(filepath.Join(c.cfg.CDI.Dir, "k8s.device-plugin.nvidia.com-gpu.json"), 0)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		checkGolden(t, "cdi/"+c.name, spec.Spec)
		if v, err := cdispecs.MinimumRequiredVersion(spec.Spec); err != nil || v > cdiVersion {
			t.Errorf("%s needs version %s of CDI: %v", c.name, v, err)
		}

		// What Allocate answers is what the container runtime finds.
		cache, err := cdi.NewCache(cdi.WithSpecDirs(c.cfg.CDI.Dir), cdi.WithAutoRefresh(false))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, r := range layout {
			resp, err := allocate(testTerms(c.cfg, machine()), r, ask([]string{r.Devices[0].ID}))
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, resp.ContainerResponses[0].CdiDevices[0].Name)
		}
		var container oci.Spec
		if unknown, err := cache.InjectDevices(&container, names...); len(unknown) > 0 || err != nil && !strings.Contains(err.Error(), "no such file") {
			t.Errorf("%s: unknown %v, %v", c.name, unknown, err)
		}
		entries, err := os.ReadDir(c.cfg.CDI.Dir)
		if err != nil || len(entries) != 1 {
			t.Errorf("%s: %v is left behind, %v", c.name, entries, err)
		}
	}
}

func TestCDISpecIsWrittenWhenSomethingChanged(t *testing.T) {
	top := driverTree(t, "/", testDriver)
	k, logs := newTestKeeper(t, top)
	cfg := configured(func(c *Config) {
		c.DeviceList, c.CDI.Generate, c.CDI.Dir = []string{ListCDIAnnotations}, true, filepath.Join(t.TempDir(), "deep", "cdi")
	})
	file := cfg.cdiFile()
	snap := ofDriver(partitioned(nil), testDriver)
	writes := 0
	step := func(name string, snap *health.Snapshot, written bool, why string) {
		t.Helper()
		if got := k.ready(&cfg, Layout(cfg, snap), snap); why == "" && got != "" || !strings.Contains(got, why) {
			t.Errorf("%s: %q, want %q", name, got, why)
		}
		if written {
			writes++
		}
		if n := logs.FilterMessage("CDI spec written").Len(); n != writes {
			t.Errorf("%s: written %d times, want %d", name, n, writes)
			writes = n
		}
	}
	step("before the driver is known", ofDriver(snap, ""), false, "the version of the driver is not known yet")
	if _, err := os.Stat(file); err == nil {
		t.Error("a spec was written all the same")
	}
	step("first", snap, true, "")
	step("again", snap, false, "")
	step("another verdict", ofDriver(with(snap, 0, health.Unhealthy), testDriver), false, "")
	step("another GPU", ofDriver(partitioned(nil, nil), testDriver), true, "")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	step("the file is gone", ofDriver(partitioned(nil, nil), testDriver), true, "")
	writeFile(t, file, "{}")
	step("the file is another", ofDriver(partitioned(nil, nil), testDriver), true, "")

	// At boot /dev/nvidia-uvm comes later than the GPUs.
	uvm := filepath.Join(top, "dev/nvidia-uvm")
	if err := os.Remove(uvm); err != nil {
		t.Fatal(err)
	}
	step("a control node is gone", ofDriver(partitioned(nil, nil), testDriver), true, "")
	writeFile(t, uvm, "")
	step("a control node has come", ofDriver(partitioned(nil, nil), testDriver), true, "")
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), `"/dev/nvidia-uvm"`) {
		t.Errorf("%v: %s", err, text)
	}

	// A GPU that has left the driver's list may share its index with another.
	gone := ofDriver(partitioned(nil, nil), testDriver)
	gone.Devices[1].Sample.Presence, gone.Devices[1].Device.Index = health.Missing, 0
	cfg.DeviceID = DeviceIDIndex
	step("a GPU is missing", gone, true, "")
	gone.Devices[0].Sample.Presence = health.Missing
	step("all GPUs are missing", gone, false, "")
	cfg.DeviceID = DeviceIDUUID
	step("they are back", ofDriver(partitioned(nil, nil), testDriver), true, "")

	two := ofDriver(partitioned(nil, nil), "590.1.2")
	step("a driver whose files are not there yet", two, false, "the driver is version 590.1.2, and its root has only /usr/lib/x86_64-linux-gnu/libcuda.so."+testDriver)
	writeFile(t, filepath.Join(top, "usr/lib/x86_64-linux-gnu/libcuda.so.590.1.2"), "")
	step("a new driver", two, true, "")
	text, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(text), "libcuda.so.590.1.2") || strings.Contains(string(text), testDriver) {
		t.Errorf("%v: %s", err, text)
	}

	// A device whose nodes are not known does not take the others with it.
	odd := ofDriver(partitioned(nil, nil), "590.1.2")
	odd.Devices[1].Device.Minor, odd.Devices[1].Device.PCI = -1, ""
	step("a device without a node", odd, true, "")
	if n := logs.FilterMessage("CDI spec is incomplete").Len(); n != 1 {
		t.Errorf("warned %d times", n)
	}
	none := ofDriver(partitioned(nil), "590.1.2")
	none.Devices[0].Device.Minor, none.Devices[0].Device.PCI = -1, ""
	step("no device has a node", none, false, "GPU-0")
	if err := os.RemoveAll(top); err != nil {
		t.Fatal(err)
	}
	step("no driver at all", ofDriver(partitioned(nil, nil), "590.1.3"), false, "libcuda.so.590.1.3 is in none of the usual directories")

	cfg.CDI.Dir = filepath.Join(file, "below-a-file")
	k, logs = newTestKeeper(t, driverTree(t, "/", testDriver))
	writes = 0
	step("a directory that cannot be", snap, false, "not a directory")
	cfg.DeviceList = []string{ListEnv}
	step("no CDI at all", snap, false, "")
}

// Container runtimes of users read the spec too, so it is not left as os.CreateTemp makes a file.
func TestCDISpecIsReadableByAll(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cdi", "spec.json")
	text := []byte(`{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}]}`)
	for range 2 { // a new spec, and one that replaces it
		if err := writeCDISpec(file, text); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		if mode := info.Mode().Perm(); mode != 0o644 {
			t.Errorf("the spec has mode %v", mode)
		}
	}
}

func TestCDISpecOfOthers(t *testing.T) {
	cfg := configured(func(c *Config) {
		c.DeviceList, c.CDI.Dir = []string{ListCDICRI}, t.TempDir()
	})
	k, logs := newTestKeeper(t, t.TempDir())
	snap := partitioned(nil, nil)
	step := func(name string, snap *health.Snapshot, why ...string) {
		t.Helper()
		got := k.ready(&cfg, Layout(cfg, snap), snap)
		if len(why) == 0 && got != "" {
			t.Errorf("%s: %s", name, got)
		}
		for _, w := range why {
			if !strings.Contains(got, w) {
				t.Errorf("%s: %q does not say %q", name, got, w)
			}
		}
	}
	none := []string{"plugin.deviceList cdi-cri needs a CDI spec for nvidia.com/gpu", k.static, cfg.CDI.Dir, "plugin.cdi.generate"}
	step("nothing there", snap, none...)
	writeFile(t, filepath.Join(cfg.CDI.Dir, "other.json"), `{"cdiVersion": "0.5.0", "kind": "intel.com/gpu", "devices": [{"name": "GPU-0"}]}`)
	writeFile(t, filepath.Join(cfg.CDI.Dir, "broken.yaml"), "{")
	writeFile(t, filepath.Join(cfg.CDI.Dir, "nvidia.yaml.tmp"), "kind: nvidia.com/gpu")
	step("others only", snap, none...)
	if logs.FilterMessage("CDI spec cannot be read").Len() != 1 {
		t.Error("the broken spec is not in the log")
	}
	writeFile(t, filepath.Join(k.static, "nvidia.yaml"), "cdiVersion: 9.9.9\nkind: nvidia.com/gpu\nfuture: yes\ndevices: [{name: '0'}, {name: '1'}, {name: all}]")
	step("by index only", snap, "has no device GPU-0, GPU-1, only 0, 1, all", "set plugin.deviceID to index")
	cfg.DeviceID = DeviceIDIndex
	step("which is what is wanted", snap)
	cfg.DeviceID = DeviceIDUUID
	writeFile(t, filepath.Join(cfg.CDI.Dir, "more.json"), `{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0"}]}`)
	step("one is missing", snap, "no device GPU-1")
	step("an unhealthy one may be missing", with(snap, 1, health.Unhealthy))
	if err := os.Remove(filepath.Join(k.static, "nvidia.yaml")); err != nil {
		t.Fatal(err)
	}
	cfg.CDI.Kind = "intel.com/gpu"
	step("of another kind", partitioned(nil))
}

// A resource waits for the spec that its answers need, and one that runs is not taken away with it.
func TestRegistrationWaitsForTheCDISpec(t *testing.T) {
	r := newRig(t, snapshot(2))
	dir := t.TempDir()
	cfg := *r.cfg.Load()
	cfg.DeviceList, cfg.CDI.Dir = []string{ListCDICRI}, dir
	r.cfg.Store(&cfg)
	r.p.cdi.static = filepath.Join(dir, "none")
	k := r.kubelet()
	r.run()
	r.whole(func(s Status) bool {
		return strings.Contains(s.Err, "needs a CDI spec for nvidia.com/gpu") && len(s.Resources) == 0
	})
	file := filepath.Join(dir, "nvidia.json")
	writeFile(t, file, `{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0"}, {"name": "GPU-1"}]}`)
	r.snaps.Store(with(snapshot(2), 0, health.Healthy))
	r.wait(k, gpu, listed(2, 2))
	r.whole(func(s Status) bool { return s.Err == "" })
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	r.snaps.Store(with(snapshot(2), 0, health.Healthy))
	r.whole(func(s Status) bool { return s.Err != "" && len(s.Resources) == 1 && s.Resources[0].Registered })
}

func TestDriverFilesElsewhere(t *testing.T) {
	top := t.TempDir()
	writeFile(t, filepath.Join(top, "home/lib64/libcuda.so."+testDriver), "")
	writeFile(t, filepath.Join(top, "home/bin/nvidia-smi"), "")
	if err := os.Symlink("libcuda.so."+testDriver, filepath.Join(top, "home/lib64/libcuda.so.1")); err != nil {
		t.Fatal(err)
	}
	files, err := findDriverFiles(os.DirFS(filepath.Join(top, "home")), testDriver)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(files.libraries, []string{"/lib64/libcuda.so." + testDriver}) || !slices.Equal(files.others, []string{"/bin/nvidia-smi"}) ||
		files.links["/lib64/libcuda.so.1"] != "/lib64/libcuda.so."+testDriver {
		t.Errorf("%+v", files)
	}
}
