//go:build cgo && linux

package cdi

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/nvml"
	"github.com/gpu-node-agent/gpu-node-agent/internal/golden"
)

// nvcdiRoot names, in the environment, the directory of the machine in which TestNVCDI runs again.
const nvcdiRoot = "GNA_TEST_NVCDI"

// TestNVCDI tests the real nvcdi and go-nvml with the scripted libnvidia-ml.so.1. It runs itself again with that library, in a
// mount namespace with a machine's /proc and device nodes.
func TestNVCDI(t *testing.T) {
	if top := os.Getenv(nvcdiRoot); top != "" {
		testNVCDI(t, top)
		return
	}
	top := nvcdiMachine(t)
	if out, err := exec.CommandContext(t.Context(), "../../health/nvml/testdata/build-libnvidia-ml", top).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestNVCDI$", "-test.v", "-update="+flag.Lookup("update").Value.String())
	cmd.Env = append(os.Environ(), nvcdiRoot+"="+top, "LD_LIBRARY_PATH="+top, "NVML_SCRIPT="+filepath.Join(top, "script"), "XDG_DATA_DIRS=")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, syscall.EPERM), strings.Contains(string(out), "--- SKIP: TestNVCDI"):
		t.Skipf("no user namespaces with mounts here: %v\n%s", err, out)
	case err != nil || !strings.Contains(string(out), "--- PASS: TestNVCDI"):
		t.Errorf("%v\n%s", err, out)
	}
}

// nvcdiMachine creates the files of a machine with four GPUs, the last of which is partitioned, and a driver in a container. Its
// device nodes become such in the mount namespace.
func nvcdiMachine(t *testing.T) (top string) {
	t.Helper()
	top = hostDir(t, "/driver-root", driverVersion)
	for _, node := range nvcdiNodes() {
		writeFile(t, filepath.Join(top, "driver-root/dev", node), "")
	}
	for _, file := range []string{
		"usr/bin/nvidia-imex", "usr/share/vulkan/icd.d/nvidia_icd.json",
		"usr/lib/x86_64-linux-gnu/libnvidia-nvvm70.so.4",
	} {
		writeFile(t, filepath.Join(top, "driver-root", file), "")
	}
	writeFile(t, filepath.Join(top, "driver-root/dev/dri/by-path/other"), "")
	writeFile(t, filepath.Join(top, "sys/bus/pci/devices/0000:10:00.0/drm/card0"), "")
	writeFile(t, filepath.Join(top, "sys/bus/pci/devices/0000:10:00.0/drm/renderD128"), "")
	if err := os.Symlink("../card0", filepath.Join(top, "driver-root/dev/dri/by-path/pci-0000:10:00.0-card")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(top, "driver-root/usr/bin/nvidia-smi"), 0o700); err != nil { //nolint:gosec // nvcdi looks for a program
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(top, "proc/driver/nvidia-caps/mig-minors"),
		"config 1\nmonitor 2\ngpu3/gi7/access 66\ngpu3/gi7/ci0/access 67\ngpu3/gi8/access 75\ngpu3/gi8/ci0/access 76\n")
	return top
}

func nvcdiNodes() []string {
	return []string{
		"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidia-caps/nvidia-cap66",
		"nvidia-caps/nvidia-cap67", "nvidia-caps/nvidia-cap75", "nvidia-caps/nvidia-cap76", "dri/card0", "dri/renderD128",
	}
}

// nvcdiTest is a Writer with the real nvcdi.
type nvcdiTest struct {
	*testing.T
	in   Input
	w    *Writer
	logs *observer.ObservedLogs
}

func testNVCDI(t *testing.T, top string) {
	mount := func(from, to string) {
		switch err := syscall.Mount(from, to, "", syscall.MS_BIND, ""); {
		case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
			t.Skipf("cannot mount %s: %v", from, err)
		case err != nil:
			t.Fatalf("cannot mount %s: %v", from, err)
		}
	}
	for _, node := range nvcdiNodes() {
		mount("/dev/null", filepath.Join(top, "driver-root/dev", node))
	}
	library, err := nvml.Path()
	if err != nil {
		t.Fatal(err)
	}
	if path.Dir(library) != top {
		t.Fatalf("loaded %s", library)
	}
	mount(filepath.Join(top, "proc"), "/proc")
	mount(filepath.Join(top, "sys"), "/sys")

	for name, test := range map[string]func(*nvcdiTest){
		"spec": (*nvcdiTest).testSpec, "bad GPUs": (*nvcdiTest).testBadGPUs, "no node": (*nvcdiTest).testNoNode,
		"detach": (*nvcdiTest).testDetach, "no driver": (*nvcdiTest).testNoDriver,
		"MIG without privileges": (*nvcdiTest).testMIGWithoutPrivileges,
		"memory limits":          (*nvcdiTest).testMemoryLimits,
	} {
		t.Run(name, func(t *testing.T) {
			h := &nvcdiTest{T: t}
			h.in = testInput(t, "/", 4)
			h.in.NVML, h.in.Config.HookPath = true, hook
			h.in.Host.DriverRoot, h.in.Host.ContainerDriverRoot = "/run/nvidia/driver", filepath.Join(top, "driver-root")
			for i := range h.in.Devices {
				d := &h.in.Devices[i].State.Device
				d.Minor, d.ID = i, health.DeviceID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i))
				h.in.Devices[i].Name = string(d.ID)
			}
			parent := h.in.Devices[3].State.Device.ID
			h.in.Devices = h.in.Devices[:3]
			for i, gi := range []int{7, 8} {
				id := health.DeviceID(fmt.Sprintf("MIG-00000003-%04d-0000-0000-000000000000", gi))
				h.in.Devices = append(h.in.Devices, Device{Name: string(id), Offered: true, State: &health.DeviceState{Device: health.Device{
					ID: id, Kind: health.KindMIG, Parent: parent, Index: 3, Minor: 3, GI: gi,
				}}})
				h.do("mig 3 %d %d 0", i, gi)
			}
			h.w, h.logs = newTestWriter(t)
			test(h)
			h.do("reset")
			h.do("release")
			if inits := h.do("inits"); inits != "0" {
				t.Errorf("%s Inits are left", inits)
			}
		})
	}
}

// do runs a command of the scripted library and returns its reply.
func (h *nvcdiTest) do(format string, args ...any) string {
	h.Helper()
	c, err := net.Dial("unix", os.Getenv("NVML_SCRIPT"))
	if err != nil {
		h.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	fmt.Fprintf(c, format+"\n", args...)
	reply, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		h.Fatal(err)
	}
	return strings.TrimSpace(reply)
}

// ensure runs the Toolkit until Ensure needs nothing more of it, and returns the spec. stop ends the Toolkit.
func (h *nvcdiTest) ensure() (spec *specs.Spec, stop func()) {
	h.Helper()
	t := &toolkitTest{T: h.T, w: h.w}
	cancel, done := t.run()
	changed := health.Wake(h.Context(), h.w.Toolkit.Parts())
	for {
		err := h.w.Ensure(h.in)
		if err == nil {
			break
		}
		if !errors.Is(err, ErrPending) {
			h.Fatal(err)
		}
		select {
		case <-changed:
		case <-h.Context().Done():
			h.Fatal("no parts")
		}
	}
	found, err := cdi.ReadSpec(h.in.Config.file(), 0)
	if err != nil {
		h.Fatal(err)
	}
	return found.Spec, func() { cancel(); <-done }
}

func (h *nvcdiTest) generator() string {
	entries := h.logs.FilterMessage("CDI spec written").All()
	return entries[len(entries)-1].ContextMap()["generator"].(string)
}

// fromNVCDI returns the names of the devices with a part from nvcdi, which has the permissions of their nodes.
func fromNVCDI(spec *specs.Spec) (names []string) {
	for _, d := range spec.Devices {
		if d.ContainerEdits.DeviceNodes[0].Permissions != "" {
			names = append(names, d.Name)
		}
	}
	return names
}

func names(devices []Device) (names []string) {
	for _, d := range devices {
		names = append(names, d.Name)
	}
	return names
}

// allEdits returns the edits for all devices, then the edits of each.
func allEdits(spec *specs.Spec) []*specs.ContainerEdits {
	all := []*specs.ContainerEdits{&spec.ContainerEdits}
	for i := range spec.Devices {
		all = append(all, &spec.Devices[i].ContainerEdits)
	}
	return all
}

func (h *nvcdiTest) testSpec() {
	spec, stop := h.ensure()
	stop()
	for _, edits := range allEdits(spec) {
		for _, n := range edits.DeviceNodes {
			n.GID = nil // unknown in the namespace of another user than root
		}
	}
	golden.CheckJSON(h.T, "testdata/nvcdi.json", spec)
	if got := fromNVCDI(spec); h.generator() != "nvcdi" || !slices.Equal(got, names(h.in.Devices)) {
		h.Errorf("%s: %q", h.generator(), got)
	}
	if spec.Version != specVersion {
		h.Errorf("CDI version %s needs a newer runtime than a spec from the driver's files", spec.Version)
	}
	// All that the driver's files give is there too.
	small, _, err := newSpec(h.in)
	if err != nil {
		h.Fatal(err)
	}
	contents := func(spec *specs.Spec) (all []string) {
		for _, m := range spec.ContainerEdits.Mounts {
			all = append(all, m.HostPath+" at "+m.ContainerPath)
		}
		for i, edits := range allEdits(spec) {
			for _, n := range edits.DeviceNodes {
				all = append(all, fmt.Sprint(i, " has ", n.HostPath, " as ", n.Path))
			}
		}
		for _, hook := range spec.ContainerEdits.Hooks {
			all = append(all, strings.Join(append([]string{hook.Path}, hook.Args[:2]...), " "))
		}
		slices.Sort(all)
		return slices.Compact(append(all, spec.ContainerEdits.Env...))
	}
	all := contents(spec)
	for _, c := range contents(small) {
		c = strings.ReplaceAll(c, " at /usr/share/vulkan", " at /etc/vulkan")
		if !slices.Contains(all, c) {
			h.Errorf("nvcdi's spec lacks %s", c)
		}
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(h.in.Config.Dir), cdi.WithAutoRefresh(false))
	if err != nil {
		h.Fatal(err)
	}
	for _, d := range h.in.Devices {
		unknown, err := cache.InjectDevices(&oci.Spec{}, h.in.Config.QualifiedName(d.Name))
		if len(unknown) > 0 || err != nil && !errors.Is(err, os.ErrNotExist) {
			h.Errorf("%s: unknown %v, %v", d.Name, unknown, err)
		}
	}
}

func (h *nvcdiTest) testBadGPUs() {
	h.do("lost 0")
	h.do("hang nvmlDeviceGetMinorNumber 1")
	spec, stop := h.ensure()
	if got := fromNVCDI(spec); !slices.Equal(got, names(h.in.Devices[2:])) || len(spec.Devices) != len(h.in.Devices) {
		h.Errorf("%d devices, from nvcdi %q", len(spec.Devices), got)
	}
	h.do("release")
	stop()
}

func (h *nvcdiTest) testNoNode() {
	h.in.Devices[1].State.Device.Minor = -1 // as nvcdi has it
	h.in.Devices[1].State.Device.PCI = ""
	node := path.Join(h.in.Host.ContainerDriverRoot, "dev/nvidia1")
	if err := errors.Join(syscall.Unmount(node, 0), os.Remove(node)); err != nil {
		h.Fatal(err)
	}
	h.Cleanup(func() {
		writeFile(h.T, node, "")
		if err := syscall.Mount("/dev/null", node, "", syscall.MS_BIND, ""); err != nil {
			h.Error(err)
		}
	})
	spec, stop := h.ensure()
	stop()
	if got := fromNVCDI(spec); len(got) != 4 || slices.Contains(got, h.in.Devices[1].Name) || len(spec.Devices) != 4 {
		h.Errorf("%q", got)
	}
}

func (h *nvcdiTest) testDetach() {
	_, stop := h.ensure()
	stop()
	before := h.do("calls nvmlInit_v2")
	h.in.Detached = true
	h.in.Devices = h.in.Devices[:1]
	if err := h.w.Ensure(h.in); err != nil || h.do("inits") != "0" || h.do("calls nvmlInit_v2") != before {
		h.Errorf("%v; %s Inits are left, and %s calls after %s", err, h.do("inits"), h.do("calls nvmlInit_v2"), before)
	}
}

func (h *nvcdiTest) testNoDriver() {
	h.do("unload")
	_, stop := h.ensure()
	stop()
	if h.generator() != "driver files" || h.logs.FilterMessage("nvcdi cannot generate the CDI spec").Len() != 1 {
		h.Errorf("%s, %v", h.generator(), h.logs.All())
	}
	h.do("load")
}

// nvcdi needs the instances of a MIG device, which the driver may refuse.
func (h *nvcdiTest) testMIGWithoutPrivileges() {
	h.do("fail nvmlDeviceGetGpuInstanceById -1 4 -1")
	spec, stop := h.ensure()
	stop()
	if got := fromNVCDI(spec); !slices.Equal(got, names(h.in.Devices[:3])) || len(spec.Devices) != len(h.in.Devices) {
		h.Errorf("%d devices, from nvcdi %q", len(spec.Devices), got)
	}
}

// The hook that sets memory limits is there for whole GPUs, where the driver can limit memory and containers may have limits.
func (h *nvcdiTest) testMemoryLimits() {
	// In this order: until nvcdi has answered, a spec that fits stays, and one with the hook would also fit the old driver.
	for _, test := range []struct {
		name   string
		driver string
		shared bool
		want   bool
	}{
		{"old driver", driverVersion, true, false}, {"not shared", limitingDriver, false, false}, {"shared", limitingDriver, true, true},
	} {
		name := test.name
		h.in.Driver, h.in.MemoryLimits = test.driver, test.shared
		spec, stop := h.ensure()
		stop()
		if h.generator() != "nvcdi" {
			h.Errorf("%s: by %s", name, h.generator())
		}
		for i, d := range spec.Devices {
			var want []string
			if state := h.in.Devices[i].State; test.want && state.Device.Kind != health.KindMIG {
				want = []string{"nvidia-cdi-hook", limitsHook, driverRootFlag, "/run/nvidia/driver", gpuFlag, string(state.Device.ID)}
			}
			var got []string
			for _, hook := range d.ContainerEdits.Hooks {
				if slices.Contains(hook.Args, limitsHook) {
					got = hook.Args
				}
			}
			if !slices.Equal(got, want) {
				h.Errorf("%s: %s has %q, want %q", name, d.Name, got, want)
			}
		}
		gpus := (&LimitHooks{staticDir: h.w.StaticDir, log: zap.NewNop()}).GPUs(h.in.Config)
		for _, d := range h.in.Devices {
			want := test.want && d.State.Device.Kind != health.KindMIG
			if got := slices.Contains(gpus[d.Name], string(d.State.Device.ID)); got != want {
				h.Errorf("%s: %s found: %v", name, d.Name, got)
			}
		}
	}
}
