package cdi

import (
	"errors"
	"fmt"
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
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
)

const (
	driverVersion  = "580.95.05"
	limitingDriver = "615.10.02" // can limit memory
)

// hostDir creates the file system of a machine with three GPUs, the second of which is partitioned, and with a driver
// below root. It returns its directory.
func hostDir(t *testing.T, root, version string) string {
	t.Helper()
	top := t.TempDir()
	lib := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	for file, text := range map[string]string{
		"dev/nvidiactl": "", "dev/nvidia-uvm": "", "dev/nvidia-uvm-tools": "",
		"proc/driver/nvidia-caps/mig-minors": "config 1\nmonitor 2\ngpu1/gi7/access 66\ngpu1/gi7/ci0/access 67\ngpu1/gi8/access " +
			"75\ngpu1/gi8/ci0/access 76\n",
		"proc/driver/nvidia/gpus/0000:12:00.0/information": "Model: \t\t NVIDIA H100\nIRQ:   \t\t 18\nDevice Minor: \t 5\n",

		lib + "/libcuda.so." + version: "", lib + "/libnvidia-ml.so." + version: "", lib + "/vdpau/libvdpau_nvidia.so." + version: "",
		lib + "/libc.so.6": "", lib + "/libcuda.so.1.bak": "",
		root + "/usr/bin/nvidia-smi": "", root + "/lib/firmware/nvidia/" + version + "/gsp_ga10x.bin": "",
		root + "/run/nvidia-persistenced/socket": "",
	} {
		writeFile(t, filepath.Join(top, file), text)
	}
	for link, to := range map[string]string{
		"libcuda.so.1": "libcuda.so." + version, "libcuda.so": "libcuda.so.1", "libnvidia-ml.so.1": "libnvidia-ml.so." + version,
		"libc.so": "libc.so.6", "loop.so": "loop.so", "libx.so": "/etc/passwd",
	} {
		if err := os.Symlink(to, filepath.Join(top, lib, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("usr/bin", filepath.Join(top, root, "bin")); err != nil {
		t.Fatal(err)
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

// newTestWriter returns a Writer with an empty static directory.
func newTestWriter(t *testing.T) (*Writer, *observer.ObservedLogs) {
	core, logs := observer.New(zapcore.InfoLevel)
	w := NewWriter(zap.New(core))
	w.StaticDir = filepath.Join(t.TempDir(), "etc")
	return w, logs
}

// testInput returns n GPUs of a host by UUID. The source does not report the minor of GPU 2.
func testInput(t *testing.T, dir string, n int) Input {
	in := Input{
		Config: Config{Generate: true, Dir: filepath.Join(t.TempDir(), "deep", "cdi")},
		Host:   Host{FS: os.DirFS(dir), DriverRoot: "/"},
		Driver: driverVersion,
	}
	for i := range n {
		d := health.Device{ID: health.DeviceID(fmt.Sprint("GPU-", i)), Index: i, Minor: i, PCI: fmt.Sprintf("00000000:%02X:00.0", 16+i)}
		if i == 2 {
			d.Minor = -1
		}
		in.Devices = append(in.Devices, Device{Name: string(d.ID), State: &health.DeviceState{Device: d}, Offered: true})
	}
	return in
}

// mig returns a MIG device of GPU 1.
func mig(name string, gi int) Device {
	return Device{Name: name, Offered: true, State: &health.DeviceState{Device: health.Device{
		ID: health.DeviceID(fmt.Sprint("MIG-1-", gi)), Kind: health.KindMIG, Parent: "GPU-1", Index: 1, Minor: 1, GI: gi,
	}}}
}

func TestSpecGolden(t *testing.T) {
	for _, c := range []struct {
		name   string
		root   string
		driver string
		change func(*Input)
	}{
		{"plain", "/", driverVersion, func(*Input) {}},
		{"hook", "/", driverVersion, func(in *Input) { in.Config.HookPath = "/usr/bin/nvidia-cdi-hook" }},
		{"ctk-mig-index", "/", driverVersion, func(in *Input) {
			in.Config.HookPath = "/usr/bin/nvidia-ctk"
			in.Devices = []Device{in.Devices[0], in.Devices[2], mig("1:0", 7), mig("1:1", 8)}
			in.Devices[0].Name, in.Devices[1].Name = "0", "2"
		}},
		{"driver-root", "/driver-root", driverVersion, func(in *Input) {
			in.Host.DriverRoot, in.Host.ContainerDriverRoot = "/run/nvidia/driver", "/driver-root"
		}},
		{"memory-limits", "/driver-root", limitingDriver, func(in *Input) {
			in.Host.DriverRoot, in.Host.ContainerDriverRoot = "/run/nvidia/driver", "/driver-root"
			in.Config.HookPath, in.MemoryLimits = "/usr/bin/nvidia-ctk", true
			in.Devices = []Device{in.Devices[0], mig("1:0", 7)}
		}},
	} {
		in := testInput(t, hostDir(t, c.root, c.driver), 3)
		in.Driver = c.driver
		c.change(&in)
		w, _ := newTestWriter(t)
		if err := w.Ensure(in); err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		spec, err := cdi.ReadSpec(filepath.Join(in.Config.Dir, "k8s.device-plugin.nvidia.com-gpu.json"), 0)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		golden.CheckJSON(t, "testdata/"+c.name+".json", spec.Spec)
		if v, err := specs.MinimumRequiredVersion(spec.Spec); err != nil || v > specVersion {
			t.Errorf("%s requires CDI version %s: %v", c.name, v, err)
		}

		// The container runtime finds every name of an Allocate response.
		cache, err := cdi.NewCache(cdi.WithSpecDirs(in.Config.Dir), cdi.WithAutoRefresh(false))
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range in.Devices {
			unknown, err := cache.InjectDevices(&oci.Spec{}, in.Config.QualifiedName(d.Name))
			if len(unknown) > 0 || err != nil && !errors.Is(err, os.ErrNotExist) { // this machine has no such device node
				t.Errorf("%s: unknown %v, %v", c.name, unknown, err)
			}
		}
		if entries, err := os.ReadDir(in.Config.Dir); err != nil || len(entries) != 1 {
			t.Errorf("%s: more files than the spec: %v, %v", c.name, entries, err)
		}
	}
}

func TestSpecIsWrittenAfterChanges(t *testing.T) {
	top := hostDir(t, "/", driverVersion)
	w, logs := newTestWriter(t)
	one, two := testInput(t, top, 1), testInput(t, top, 2)
	two.Config.Dir = one.Config.Dir
	file := one.Config.file()
	// step checks whether the spec is written, and the data in the error. Without data no error is expected.
	step := func(name string, in Input, written bool, data string) {
		t.Helper()
		logs.TakeAll()
		err := w.Ensure(in)
		if data == "" && err != nil || data != "" && (err == nil || !strings.Contains(err.Error(), data)) {
			t.Errorf("%s: %v, want %q", name, err, data)
		}
		if got := logs.FilterFieldKey("file").Len() == 1; got != written {
			t.Errorf("%s: written = %t", name, got)
		}
	}
	// with returns the input with a change of its copied last device.
	with := func(in Input, change func(*health.DeviceState)) Input {
		in.Devices = slices.Clone(in.Devices)
		d := &in.Devices[len(in.Devices)-1]
		state := *d.State
		d.State = &state
		change(&state)
		return in
	}
	missing := func(s *health.DeviceState) { s.Sample.Presence = health.Missing }
	withoutNodes := func(s *health.DeviceState) { s.Device.Minor, s.Device.PCI = -1, "" }

	unknown := one
	unknown.Driver = ""
	step("driver version unknown", unknown, false, "driver")
	if _, err := os.Stat(file); err == nil {
		t.Error("a spec was written")
	}
	step("first", one, true, "")
	step("unchanged", one, false, "")
	step("other health", with(one, func(s *health.DeviceState) { s.Verdict.State = health.Unhealthy }), false, "")
	step("other GPU", two, true, "")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	step("file removed", two, true, "")
	writeFile(t, file, "{}")
	step("file replaced", two, true, "")

	// At boot /dev/nvidia-uvm appears later than the GPUs.
	uvm := filepath.Join(top, "dev/nvidia-uvm")
	if err := os.Remove(uvm); err != nil {
		t.Fatal(err)
	}
	step("control node removed", two, true, "")
	writeFile(t, uvm, "")
	step("control node appeared", two, true, "")
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), `"/dev/nvidia-uvm"`) {
		t.Errorf("%v: %s", err, text)
	}

	// No container can use a missing GPU, whatever its name.
	byIndex := with(two, missing)
	byIndex.Devices[0].Name, byIndex.Devices[1].Name = "0", "0"
	step("one GPU missing", byIndex, true, "")
	// A lost GPU whose index another one has has no name by index.
	lost := with(two, func(s *health.DeviceState) { s.Sample.Presence, s.Device.Index = health.Lost, -1 })
	lost.Devices[0].Name, lost.Devices[1].Name = "0", "-1"
	step("it is back, lost, without an index", lost, false, "")
	step("all GPUs missing", with(one, missing), false, "")
	step("GPUs back", two, true, "")

	upgraded := two
	upgraded.Driver = "590.1.2"
	step("driver files absent", upgraded, false, "/usr/lib/x86_64-linux-gnu/libcuda.so."+driverVersion)
	writeFile(t, filepath.Join(top, "usr/lib/x86_64-linux-gnu/libcuda.so.590.1.2"), "")
	step("driver upgraded", upgraded, true, "")
	if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "libcuda.so.590.1.2") ||
		strings.Contains(string(text), driverVersion) {
		t.Errorf("%v: %s", err, text)
	}

	// A device without known nodes does not affect the others.
	step("one device without nodes", with(upgraded, withoutNodes), true, "")
	if warnings := logs.FilterLevelExact(zapcore.WarnLevel).All(); len(warnings) != 1 ||
		!strings.Contains(fmt.Sprint(warnings[0].ContextMap()), "GPU-1 left out of the CDI spec: ") {
		t.Errorf("warnings: %v", warnings)
	}
	upgraded.Devices = one.Devices
	step("no device with nodes", with(upgraded, withoutNodes), false, "GPU-0")
	upgraded.Driver = "590.1.3"
	if err := os.RemoveAll(top); err != nil {
		t.Fatal(err)
	}
	step("no driver", upgraded, false, "libcuda.so.590.1.3")

	one = testInput(t, hostDir(t, "/", driverVersion), 1)
	one.Config.Dir = filepath.Join(file, "below-a-file")
	step("invalid directory", one, false, file)
}

// Rootless container runtimes read the spec too, so it does not keep the mode of os.CreateTemp.
func TestSpecIsReadableByAll(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cdi", "spec.json")
	text := []byte(`{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {"env": ["A=b"]}}]}`)
	for range 2 { // a new spec, then a replaced one
		if err := writeSpec(file, text); err != nil {
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

// A spec that fits is not written again, and what a killed writer left is still removed.
func TestWriterRemovesTemporaries(t *testing.T) {
	in := testInput(t, hostDir(t, "/", driverVersion), 1)
	for range 2 {
		left := filepath.Join(in.Config.Dir, ".gpu-node-agent-1.tmp")
		writeFile(t, left, "{")
		w, _ := newTestWriter(t)
		if err := w.Ensure(in); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(left); err == nil {
			t.Error("a temporary file is left")
		}
	}
}

func TestSpecsOfOthers(t *testing.T) {
	in := testInput(t, t.TempDir(), 2)
	in.Config = Config{Dir: t.TempDir()}
	w, logs := newTestWriter(t)
	// step checks the names that are missing; nil: none. With noSpec, the kind is missing.
	noSpec := []string{}
	step := func(name string, missing []string) {
		t.Helper()
		err := w.Ensure(in)
		e, ok := errors.AsType[*MissingError](err)
		switch {
		case missing == nil:
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		case !ok || e.Kind != in.Config.EffectiveKind() || !slices.Equal(e.Devices, missing):
			t.Errorf("%s: %v, want %q", name, err, missing)
		case !strings.Contains(e.Error(), w.StaticDir) || !strings.Contains(e.Error(), in.Config.Dir):
			t.Errorf("%s: %v does not name the directories", name, err)
		}
	}
	step("no spec", noSpec)
	writeFile(t, filepath.Join(in.Config.Dir, "other.json"),
		`{"cdiVersion": "0.5.0", "kind": "intel.com/gpu", "devices": [{"name": "GPU-0"}]}`)
	writeFile(t, filepath.Join(in.Config.Dir, "broken.yaml"), "{")
	writeFile(t, filepath.Join(in.Config.Dir, "nvidia.yaml.tmp"), "kind: nvidia.com/gpu")
	step("other kinds only", noSpec)
	if logs.FilterField(zap.String("file", filepath.Join(in.Config.Dir, "broken.yaml"))).Len() != 1 {
		t.Error("the broken spec was not logged")
	}
	writeFile(t, filepath.Join(w.StaticDir, "nvidia.yaml"),
		"cdiVersion: 9.9.9\nkind: nvidia.com/gpu\nfuture: yes\ndevices: [{name: '0'}, {name: '1'}, {name: all}]")
	step("by index", []string{"GPU-0", "GPU-1"})
	in.Devices[0].Name, in.Devices[1].Name = "0", "1"
	step("by index as wanted", nil)
	in.Devices[0].Name, in.Devices[1].Name = "GPU-0", "GPU-1"
	writeFile(t, filepath.Join(in.Config.Dir, "more.json"), `{"kind": "nvidia.com/gpu", "devices": [{"name": "GPU-0"}]}`)
	step("one missing", []string{"GPU-1"})
	in.Devices[1].Offered = false
	step("one missing that is not offered", nil)
	if err := os.Remove(filepath.Join(w.StaticDir, "nvidia.yaml")); err != nil {
		t.Fatal(err)
	}
	in.Config.Kind = "intel.com/gpu"
	step("configured kind", nil)
}

func TestFindDriverFilesInOtherDirectories(t *testing.T) {
	top := t.TempDir()
	writeFile(t, filepath.Join(top, "home/lib64/libcuda.so."+driverVersion), "")
	writeFile(t, filepath.Join(top, "home/bin/nvidia-smi"), "")
	if err := os.Symlink("libcuda.so."+driverVersion, filepath.Join(top, "home/lib64/libcuda.so.1")); err != nil {
		t.Fatal(err)
	}
	files, err := findDriverFiles(os.DirFS(filepath.Join(top, "home")), driverVersion)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(files.libraries, []string{"/lib64/libcuda.so." + driverVersion}) ||
		!slices.Equal(files.others, []string{"/bin/nvidia-smi"}) ||
		files.links["/lib64/libcuda.so.1"] != "/lib64/libcuda.so."+driverVersion {
		t.Errorf("%+v", files)
	}
}
