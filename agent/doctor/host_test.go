package doctor

import (
	"fmt"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Each row is a machine that differs from the good one by its files.
func TestDoctorDriver(t *testing.T) {
	const library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
	for name, c := range map[string]struct {
		change  files
		reading *health.Reading
		inside  bool
		want    wanted
	}{
		"good":                      {nil, nil, false, wanted{CheckOK, "kernel module 580.95.05, " + library + " the same", ""}},
		"library nobody knows of":   {files{library: ""}, goodReading(), false, wanted{CheckOK, "580.95.05", ""}},
		"only in sysfs":             {files{"/proc/driver/nvidia/version": ""}, nil, false, wanted{CheckOK, "580.95.05", ""}},
		"updated, not rebooted":     {files{library: "->libnvidia-ml.so.590.10"}, nil, false, wanted{CheckFail, library + " is 590.10", "reboot"}},
		"no library":                {files{library: ""}, nil, false, wanted{CheckWarn, "libnvidia-ml.so.1 is not", "install"}},
		"no library in a container": {files{library: ""}, nil, true, wanted{CheckWarn, "libnvidia-ml.so.1 is not", "NVIDIA_VISIBLE_DEVICES"}},
		"in a driver container": {
			files{library: "->libnvidia-ml.so.590.10", "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "->libnvidia-ml.so.580.95.05"},
			nil, false,
			wanted{CheckOK, "/run/nvidia/driver/usr", ""},
		},
		"where the configuration says": {
			files{library: "", "/opt/driver/usr/lib64/libnvidia-ml.so.1": "->libnvidia-ml.so.580.95.05"},
			nil, false,
			wanted{CheckOK, "/opt/driver/usr/lib64", ""},
		},
		"links over links": {
			files{library: "->/etc/alternatives/libnvidia-ml.so.1", "/etc/alternatives/libnvidia-ml.so.1": "->/usr/lib/nvidia/libnvidia-ml.so.580.95.05"},
			nil, false,
			wanted{CheckOK, "the same", ""},
		},
		"not loaded": {files{"/proc/driver/nvidia/version": "", "/sys/module/nvidia/version": ""}, nil, false, wanted{CheckFail, "not loaded", "modprobe"}},
	} {
		t.Run(name, func(t *testing.T) {
			d := doctor{host: goodNode().with(c.change).root(t), inside: c.inside}
			expect(t, d.checkDriver(probe{reading: c.reading}, plugin.Config{DriverRoot: "/opt/driver"}), c.want)
		})
	}
	t.Run("no GPU", func(t *testing.T) {
		expect(t, doctor{host: files{}.root(t)}.checkDriver(probe{}, config.DefaultConfig().Plugin), wanted{CheckInfo, "no GPU", ""})
	})
}

func TestDoctorGPUs(t *testing.T) {
	const first, second = "/sys/bus/pci/devices/0000:1b:00.0", "/sys/bus/pci/devices/0000:1c:00.0"
	one, lost := goodReading(), goodReading()
	one.Devices, one.Samples = one.Devices[:1], one.Samples[:1]
	lost.Samples[1].Presence = health.Lost
	none := files{
		first + "/vendor": "", first + "/class": "", first + "/driver": "",
		second + "/vendor": "", second + "/class": "", second + "/driver": "",
	}
	for name, c := range map[string]struct {
		change  files
		reading *health.Reading
		want    []wanted
	}{
		"good":         {nil, goodReading(), []wanted{{CheckOK, "2 GPUs on the PCI bus, 2 bound to the driver nvidia, 2 listed by DCGM", ""}}},
		"without DCGM": {nil, nil, []wanted{{CheckOK, "2 GPUs on the PCI bus, 2 bound to the driver nvidia", ""}}},
		"none":         {none, nil, []wanted{{CheckFail, "none", "GPU nodes only"}}},
		"none in this sysfs": {
			none, goodReading(),
			[]wanted{{CheckInfo, "none on the PCI bus, but DCGM lists 2", ""}},
		},
		"one fell off": {nil, one, []wanted{
			{CheckOK, "2 bound to the driver nvidia, 1 listed", ""},
			{CheckWarn, "not listed by DCGM: 0000:1c:00.0", "dmesg"},
		}},
		"one is lost": {nil, lost, []wanted{{CheckOK, "2 listed", ""}, {CheckWarn, "0000:1c:00.0 (lost)", "reset"}}},
		"one passed to a VM": {files{second + "/driver": "->../drivers/vfio-pci"}, one, []wanted{
			{CheckOK, "2 GPUs on the PCI bus, 1 bound", ""},
			{CheckInfo, "0000:1c:00.0 (vfio-pci)", ""},
		}},
		"one without a driver": {files{second + "/driver": ""}, one, []wanted{
			{CheckOK, "1 bound", ""},
			{CheckWarn, "no driver has: 0000:1c:00.0", "modprobe"},
		}},
		"none with a driver": {files{first + "/driver": "", second + "/driver": "->../drivers/nouveau"}, nil, []wanted{
			{CheckFail, "none bound", "bind"},
			{CheckFail, "no driver has: 0000:1b:00.0", "modprobe"},
			{CheckFail, "nouveau has: 0000:1c:00.0", "blacklist"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			d := doctor{host: goodNode().with(c.change).root(t)}
			expect(t, d.checkGPUs(probe{reading: c.reading}), c.want...)
		})
	}
	t.Run("no sysfs", func(t *testing.T) {
		expect(t, doctor{host: files{}.root(t)}.checkGPUs(probe{}), wanted{CheckInfo, "not known", ""})
	})
}

func TestBusID(t *testing.T) {
	for id, want := range map[string]string{
		"00000000:1B:00.0": "0000:1b:00.0", "0000:1b:00.0": "0000:1b:00.0", "00010000:01:00.0": "10000:01:00.0", "": "", "what": "what",
	} {
		if got := busID(id); got != want {
			t.Errorf("%q: got %q, want %q", id, got, want)
		}
	}
}

func TestDoctorMIG(t *testing.T) {
	empty := migReading()
	empty.Devices[1].MIGMode = true
	for name, c := range map[string]struct {
		reading *health.Reading
		want    []wanted
	}{
		"not known": {nil, []wanted{{CheckInfo, "not known", ""}}},
		"off":       {goodReading(), []wanted{{CheckInfo, "off", ""}}},
		"on":        {migReading(), []wanted{{CheckOK, "on for 1 of 2 GPUs, 2 x 1g.10gb, 1 x 3g.40gb", ""}}},
		"empty":     {empty, []wanted{{CheckOK, "on for 2 of 2", ""}, {CheckWarn, "no instance on GPU 1", "nvidia-smi mig"}}},
	} {
		t.Run(name, func(t *testing.T) { expect(t, checkMIG(probe{reading: c.reading}), c.want...) })
	}
}

func TestDoctorDeviceNodes(t *testing.T) {
	for name, c := range map[string]struct {
		change  files
		reading *health.Reading
		inside  bool
		want    []wanted
	}{
		"good":           {nil, goodReading(), false, []wanted{{CheckOK, "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0, /dev/nvidia1", ""}}},
		"no driver":      {files{"/proc/driver/nvidia/version": "", "/sys/module/nvidia/version": ""}, nil, false, []wanted{{CheckInfo, "none without", ""}}},
		"no uvm":         {files{"/dev/nvidia-uvm": ""}, goodReading(), false, []wanted{{CheckWarn, "missing: /dev/nvidia-uvm", "nvidia-modprobe"}}},
		"a GPU's":        {files{"/dev/nvidia1": ""}, goodReading(), false, []wanted{{CheckWarn, "missing: /dev/nvidia1", "nvidia-smi"}}},
		"DCGM has none":  {files{"/dev/nvidiactl": ""}, nil, false, []wanted{{CheckFail, "missing: /dev/nvidiactl", "nvidia-smi"}}},
		"no char links":  {files{"/dev/char/195:0": "", "/dev/char/195:255": ""}, goodReading(), false, []wanted{{CheckOK, "", ""}, {CheckWarn, "no /dev/char/195:255, /dev/char/195:0", "create-dev-char-symlinks"}}},
		"in a container": {files{"/dev/char/195:0": ""}, goodReading(), true, []wanted{{CheckOK, "", ""}}},
	} {
		t.Run(name, func(t *testing.T) {
			d := doctor{host: goodNode().with(c.change).root(t), inside: c.inside}
			expect(t, d.checkNodes(probe{reading: c.reading}), c.want...)
		})
	}
}

func TestDoctorContainerRuntime(t *testing.T) {
	const containerd = "/etc/containerd/config.toml"
	for name, c := range map[string]struct {
		change files
		inside bool
		want   wanted
	}{
		"good": {nil, false, wanted{CheckOK, "default in " + containerd + "; /usr/bin/nvidia-container-runtime", ""}},
		"drop-in": {
			files{containerd: "imports = ['/etc/containerd/conf.d/*.toml']", "/etc/containerd/conf.d/99-nvidia.toml": `default_runtime_name = "nvidia"`},
			false,
			wanted{CheckOK, "99-nvidia.toml", ""},
		},
		"docker":           {files{containerd: "", "/etc/docker/daemon.json": `{"default-runtime": "nvidia", "runtimes": {}}`}, false, wanted{CheckOK, "daemon.json", ""}},
		"docker, indented": {files{containerd: "", "/etc/docker/daemon.json": "{\n    \"default-runtime\": \"nvidia\"\n}"}, false, wanted{CheckOK, "daemon.json", ""}},
		"CRI-O":            {files{containerd: "", "/etc/crio/crio.conf.d/99-nvidia.conf": "[crio.runtime]\ndefault_runtime = \"nvidia\""}, false, wanted{CheckOK, "99-nvidia.conf", ""}},
		"CRI-O hook":       {files{containerd: "", "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": "{}"}, false, wanted{CheckOK, "hook", ""}},
		"GPU operator": {
			files{"/usr/bin/nvidia-container-runtime": "", "/usr/bin/nvidia-ctk": "", "/usr/local/nvidia/toolkit/nvidia-container-runtime": "program"},
			false,
			wanted{CheckOK, "/usr/local/nvidia/toolkit", ""},
		},
		"not the default":    {files{containerd: "[plugins.cri.containerd.runtimes.nvidia]"}, false, wanted{CheckWarn, "not the default", "runtimeClassName"}},
		"not set up":         {files{containerd: "version = 2"}, false, wanted{CheckWarn, "no container runtime", "nvidia-ctk runtime configure"}},
		"no toolkit":         {files{"/usr/bin/nvidia-container-runtime": "", "/usr/bin/nvidia-ctk": ""}, false, wanted{CheckWarn, "not in the usual places", "install"}},
		"nothing":            {files{"/usr/bin/nvidia-container-runtime": "", "/usr/bin/nvidia-ctk": "", containerd: ""}, false, wanted{CheckWarn, "no NVIDIA container toolkit", "install"}},
		"inside a container": {files{"/usr/bin/nvidia-container-runtime": "", "/usr/bin/nvidia-ctk": "", containerd: ""}, true, wanted{CheckInfo, "not known", "--root"}},
	} {
		t.Run(name, func(t *testing.T) {
			expect(t, doctor{host: goodNode().with(c.change).root(t), inside: c.inside}.checkRuntime(config.DefaultConfig().Plugin), c.want)
		})
	}
}

func TestDoctorRuntimeIsNotNeededForCDI(t *testing.T) {
	c := config.DefaultConfig().Plugin
	c.DeviceList = []string{plugin.ListCDICRI}
	expect(t, doctor{host: files{}.root(t)}.checkRuntime(c), wanted{CheckInfo, "cdi-cri", ""})
}

func TestDoctorCDI(t *testing.T) {
	const spec = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: '0'}, {name: all}]\ncontainerEdits: {mounts: [{hostPath: /usr/lib/libcuda.so.%s}]}\n"
	good := fmt.Sprintf(spec, "580.95.05")
	cri, own := config.DefaultConfig().Plugin, config.DefaultConfig().Plugin
	cri.DeviceList = []string{plugin.ListCDICRI}
	own.DeviceList, own.CDI.Generate = cri.DeviceList, true
	for name, c := range map[string]struct {
		config plugin.Config
		files  files
		want   []wanted
	}{
		"none":   {config.DefaultConfig().Plugin, files{"/etc/cdi/other.yaml": "kind: vendor.com/nic", "/etc/cdi/README": "x"}, []wanted{{CheckInfo, "none", ""}}},
		"good":   {config.DefaultConfig().Plugin, files{"/etc/cdi/nvidia.yaml": good}, []wanted{{CheckInfo, "/etc/cdi/nvidia.yaml: nvidia.com/gpu, 2 devices", ""}}},
		"twice":  {config.DefaultConfig().Plugin, files{"/run/cdi/nvidia.yaml": good, "/var/run": "->../run"}, []wanted{{CheckInfo, "2 devices", ""}}},
		"JSON":   {config.DefaultConfig().Plugin, files{"/var/run/cdi/gpu.json": `{"kind": "nvidia.com/gpu", "devices": [{"name": "0"}]}`}, []wanted{{CheckInfo, "1 device", ""}}},
		"stale":  {config.DefaultConfig().Plugin, files{"/etc/cdi/nvidia.yaml": fmt.Sprintf(spec, "570.86.15")}, []wanted{{CheckWarn, "is for driver 570.86.15, but 580.95.05 is loaded", "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"}}},
		"broken": {config.DefaultConfig().Plugin, files{"/etc/cdi/nvidia.yaml": "kind: [nvidia.com/gpu"}, []wanted{{CheckWarn, "cannot be read", "nvidia-ctk cdi generate"}}},
		"needed": {cri, nil, []wanted{{CheckWarn, "none declares nvidia.com/gpu", "nvidia-ctk cdi generate"}}},
		"there":  {cri, files{"/etc/cdi/nvidia.yaml": good}, []wanted{{CheckInfo, "nvidia.com/gpu, 2 devices", ""}}},
		"ours":   {own, nil, []wanted{{CheckInfo, "the agent writes one", ""}}},
	} {
		t.Run(name, func(t *testing.T) {
			expect(t, doctor{host: goodNode().with(c.files).root(t)}.checkCDI(c.config), c.want...)
		})
	}
}

func TestDoctorOperator(t *testing.T) {
	const dir = "/run/nvidia/validations/"
	for name, c := range map[string]struct {
		files files
		want  []wanted
	}{
		"not here":  {nil, nil},
		"ready":     {files{dir + "driver-ready": "x", dir + "toolkit-ready": "x"}, []wanted{{CheckInfo, "driver-ready, toolkit-ready", ""}}},
		"half":      {files{dir + "driver-ready": "x"}, []wanted{{CheckWarn, "driver-ready, no toolkit-ready", "wait"}}},
		"beginning": {files{dir: "/"}, []wanted{{CheckWarn, "no driver-ready, no toolkit-ready", "wait"}}},
	} {
		t.Run(name, func(t *testing.T) { expect(t, doctor{host: c.files.root(t)}.checkOperator(), c.want...) })
	}
}
