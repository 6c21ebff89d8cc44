package doctor

import (
	"fmt"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/config"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// hostCase is a node that differs from goodNode, with the expected checks.
type hostCase struct {
	change      files
	reading     *health.Reading
	inContainer bool
	want        []want
}

func runHostCases(t *testing.T, cases map[string]hostCase, check func(doctor, survey) []Check) {
	t.Helper()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			d := doctor{host: goodNode().with(c.change).root(t), inContainer: c.inContainer}
			expect(t, check(d, survey{reading: c.reading}), c.want...)
		})
	}
}

// noFiles removes the files of goodNode.
func noFiles() files {
	all := goodNode()
	for name := range all {
		all[name] = ""
	}
	return all
}

func TestCheckDriver(t *testing.T) {
	const library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
	runHostCases(t, map[string]hostCase{
		"good":                     {nil, nil, false, []want{{CheckOK, library, ""}}},
		"library in unknown place": {files{library: ""}, goodReading(), false, []want{{CheckOK, "580.95.05", ""}}},
		"version only in sysfs":    {files{"/proc/driver/nvidia/version": ""}, nil, false, []want{{CheckOK, "580.95.05", ""}}},
		"updated without reboot": {
			files{library: "->libnvidia-ml.so.590.10"},
			nil, false,
			[]want{{CheckFail, library + " is 590.10", "reboot"}},
		},
		"no library":                {files{library: ""}, nil, false, []want{{CheckWarn, "libnvidia-ml.so.1", "install"}}},
		"no library in a container": {files{library: ""}, nil, true, []want{{CheckWarn, "libnvidia-ml.so.1", "NVIDIA_VISIBLE_DEVICES"}}},
		"in a driver container": {
			files{
				library: "->libnvidia-ml.so.590.10",
				"/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": "->libnvidia-ml.so.580.95.05",
			},
			nil, false,
			[]want{{CheckOK, "/run/nvidia/driver/usr", ""}},
		},
		"driver root of the configuration": {
			files{library: "", "/opt/driver/usr/lib64/libnvidia-ml.so.1": "->libnvidia-ml.so.580.95.05"},
			nil, false,
			[]want{{CheckOK, "/opt/driver/usr/lib64", ""}},
		},
		"chained links": {
			files{
				library:                               "->/etc/alternatives/libnvidia-ml.so.1",
				"/etc/alternatives/libnvidia-ml.so.1": "->/usr/lib/nvidia/libnvidia-ml.so.580.95.05",
			},
			nil, false,
			[]want{{CheckOK, library, ""}},
		},
		"no GPU": {noFiles(), nil, false, []want{{CheckInfo, "", ""}}},
		"not loaded": {
			files{"/proc/driver/nvidia/version": "", "/sys/module/nvidia/version": ""},
			nil, false,
			[]want{{CheckFail, "", "modprobe"}},
		},
	}, func(d doctor, s survey) []Check { return d.checkDriver(s, plugin.Config{DriverRoot: "/opt/driver"}) })
}

func TestCheckGPUs(t *testing.T) {
	const first, second = "/sys/bus/pci/devices/0000:1b:00.0", "/sys/bus/pci/devices/0000:1c:00.0"
	one, lost := goodReading(), goodReading()
	one.Devices, one.Samples = one.Devices[:1], one.Samples[:1]
	lost.Samples[1].Presence = health.Lost
	none := files{
		first + "/vendor": "", first + "/class": "", first + "/driver": "",
		second + "/vendor": "", second + "/class": "", second + "/driver": "",
	}
	runHostCases(t, map[string]hostCase{
		"no sysfs":           {noFiles(), nil, false, []want{{CheckInfo, "/sys/bus/pci/devices", ""}}},
		"good":               {nil, goodReading(), false, []want{{CheckOK, "2 listed by DCGM", ""}}},
		"without DCGM":       {nil, nil, false, []want{{CheckOK, "2 bound", ""}}},
		"none":               {none, nil, false, []want{{CheckFail, "", "GPU nodes"}}},
		"none in this sysfs": {none, goodReading(), false, []want{{CheckInfo, "lists 2", ""}}},
		"one missing in DCGM": {nil, one, false, []want{
			{CheckOK, "2 bound to the driver nvidia, 1 listed", ""},
			{CheckWarn, ": 0000:1c:00.0", "dmesg"},
		}},
		"one is lost": {nil, lost, false, []want{{CheckOK, "2 listed", ""}, {CheckWarn, "0000:1c:00.0 (lost)", "reset"}}},
		"one bound to vfio": {files{second + "/driver": "->../drivers/vfio-pci"}, one, false, []want{
			{CheckOK, "2 GPUs on the PCI bus, 1 bound", ""},
			{CheckInfo, "0000:1c:00.0 (vfio-pci)", ""},
		}},
		"one without a driver": {files{second + "/driver": ""}, one, false, []want{
			{CheckOK, "1 bound", ""},
			{CheckWarn, ": 0000:1c:00.0", "modprobe"},
		}},
		"none with a driver": {files{first + "/driver": "", second + "/driver": "->../drivers/nouveau"}, nil, false, []want{
			{CheckFail, "nvidia", "bind"},
			{CheckFail, ": 0000:1b:00.0", "modprobe"},
			{CheckFail, "nouveau: 0000:1c:00.0", "blacklist"},
		}},
	}, doctor.checkGPUs)
}

func TestCheckMIG(t *testing.T) {
	empty := migReading()
	empty.Devices[1].MIGMode = true
	runHostCases(t, map[string]hostCase{
		"no DCGM": {nil, nil, false, []want{{CheckInfo, "DCGM", ""}}},
		"off":     {nil, goodReading(), false, []want{{CheckInfo, "off", ""}}},
		"on":      {nil, migReading(), false, []want{{CheckOK, "on for 1 of 2 GPUs, 2 x 1g.10gb, 1 x 3g.40gb", ""}}},
		"empty":   {nil, empty, false, []want{{CheckOK, "on for 2 of 2", ""}, {CheckWarn, "GPU 1:", "nvidia-smi mig"}}},
	}, func(_ doctor, s survey) []Check { return checkMIG(s) })
}

func TestCheckDeviceNodes(t *testing.T) {
	runHostCases(t, map[string]hostCase{
		"good":            {nil, goodReading(), false, []want{{CheckOK, "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0, /dev/nvidia1", ""}}},
		"no driver":       {files{"/proc/driver/nvidia/version": "", "/sys/module/nvidia/version": ""}, nil, false, []want{{CheckInfo, "", ""}}},
		"no uvm":          {files{"/dev/nvidia-uvm": ""}, goodReading(), false, []want{{CheckWarn, "/dev/nvidia-uvm", "nvidia-modprobe"}}},
		"no GPU node":     {files{"/dev/nvidia1": ""}, goodReading(), false, []want{{CheckWarn, "/dev/nvidia1", "nvidia-smi"}}},
		"no control node": {files{"/dev/nvidiactl": ""}, nil, false, []want{{CheckFail, "/dev/nvidiactl", "nvidia-smi"}}},
		"no char links": {
			files{"/dev/char/195:0": "", "/dev/char/195:255": ""},
			goodReading(), false,
			[]want{{CheckOK, "", ""}, {CheckWarn, "/dev/char/195:255, /dev/char/195:0", "create-dev-char-symlinks"}},
		},
		"in a container": {files{"/dev/char/195:0": ""}, goodReading(), true, []want{{CheckOK, "", ""}}},
	}, doctor.checkDeviceNodes)
}

func TestCheckRuntime(t *testing.T) {
	const containerd = "/etc/containerd/config.toml"
	runHostCases(t, map[string]hostCase{
		"good": {nil, nil, false, []want{{CheckOK, containerd + "; /usr/bin/nvidia-container-runtime", ""}}},
		"drop-in": {
			files{
				containerd:                              "imports = ['/etc/containerd/conf.d/*.toml']",
				"/etc/containerd/conf.d/99-nvidia.toml": `default_runtime_name = "nvidia"`,
			},
			nil, false,
			[]want{{CheckOK, "99-nvidia.toml", ""}},
		},
		"docker": {
			files{containerd: "", "/etc/docker/daemon.json": `{"default-runtime": "nvidia", "runtimes": {}}`},
			nil, false,
			[]want{{CheckOK, "daemon.json", ""}},
		},
		"docker, indented": {
			files{containerd: "", "/etc/docker/daemon.json": "{\n    \"default-runtime\": \"nvidia\"\n}"},
			nil, false,
			[]want{{CheckOK, "daemon.json", ""}},
		},
		"CRI-O": {
			files{containerd: "", "/etc/crio/crio.conf.d/99-nvidia.conf": "[crio.runtime]\ndefault_runtime = \"nvidia\""},
			nil,
			false,
			[]want{{CheckOK, "99-nvidia.conf", ""}},
		},
		"CRI-O hook": {
			files{containerd: "", "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json": "{}"},
			nil, false,
			[]want{{CheckOK, "oci-nvidia-hook.json", ""}},
		},
		"GPU operator": {
			files{
				"/usr/bin/nvidia-container-runtime": "", "/usr/bin/nvidia-ctk": "",
				"/usr/local/nvidia/toolkit/nvidia-container-runtime": "program",
			},
			nil, false,
			[]want{{CheckOK, "/usr/local/nvidia/toolkit", ""}},
		},
		"not the default": {
			files{containerd: "[plugins.cri.containerd.runtimes.nvidia]"},
			nil, false,
			[]want{{CheckWarn, containerd, "runtimeClassName"}},
		},
		"not configured": {
			files{containerd: "version = 2"},
			nil, false,
			[]want{{CheckWarn, "/usr/bin/nvidia-ctk", "nvidia-ctk runtime configure"}},
		},
		"no toolkit": {
			files{"/usr/bin/nvidia-container-runtime": "", "/usr/bin/nvidia-ctk": ""},
			nil, false,
			[]want{{CheckWarn, containerd, "install"}},
		},
		"not installed": {
			files{"/usr/bin/nvidia-container-runtime": "", "/usr/bin/nvidia-ctk": "", containerd: ""},
			nil, false,
			[]want{{CheckWarn, "", "install"}},
		},
		"in a container": {
			files{"/usr/bin/nvidia-container-runtime": "", "/usr/bin/nvidia-ctk": "", containerd: ""},
			nil, true,
			[]want{{CheckInfo, "", "--root"}},
		},
	}, func(d doctor, _ survey) []Check { return d.checkRuntime(config.DefaultConfig().Plugin) })
}

func TestCheckRuntimeIsNotNeededForCDI(t *testing.T) {
	c := config.DefaultConfig().Plugin
	c.DeviceList = []string{plugin.ListCDICRI}
	expect(t, doctor{host: files{}.root(t)}.checkRuntime(c), want{CheckInfo, "cdi-cri", ""})
}

func TestCheckCDI(t *testing.T) {
	const spec = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: '0'}, {name: all}]\ncontainerEdits: {mounts: [{hostPath: " +
		"/usr/lib/libcuda.so.%s}]}\n"
	good := fmt.Sprintf(spec, "580.95.05")
	cri, own := config.DefaultConfig().Plugin, config.DefaultConfig().Plugin
	cri.DeviceList = []string{plugin.ListCDICRI}
	own.DeviceList, own.CDI.Generate = cri.DeviceList, true
	for name, c := range map[string]struct {
		config plugin.Config
		files  files
		want   []want
	}{
		"none": {
			config.DefaultConfig().Plugin,
			files{"/etc/cdi/other.yaml": "kind: vendor.com/nic", "/etc/cdi/README": "x"},
			[]want{{CheckInfo, "", ""}},
		},
		"good": {
			config.DefaultConfig().Plugin,
			files{"/etc/cdi/nvidia.yaml": good},
			[]want{{CheckInfo, "/etc/cdi/nvidia.yaml: nvidia.com/gpu, 2 devices", ""}},
		},
		"linked": {
			config.DefaultConfig().Plugin,
			files{"/run/cdi/nvidia.yaml": good, "/var/run": "->../run"},
			[]want{{CheckInfo, "2 devices", ""}},
		},
		"JSON": {
			config.DefaultConfig().Plugin,
			files{"/var/run/cdi/gpu.json": `{"kind": "nvidia.com/gpu", "devices": [{"name": "0"}]}`},
			[]want{{CheckInfo, "1 device", ""}},
		},
		"other driver": {
			config.DefaultConfig().Plugin,
			files{"/etc/cdi/nvidia.yaml": fmt.Sprintf(spec, "570.86.15")},
			[]want{{CheckWarn, "driver 570.86.15, but 580.95.05", "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"}},
		},
		"invalid": {
			config.DefaultConfig().Plugin,
			files{"/etc/cdi/nvidia.yaml": "kind: [nvidia.com/gpu"},
			[]want{{CheckWarn, "/etc/cdi/nvidia.yaml: ", "nvidia-ctk cdi generate"}},
		},
		"needed":             {cri, nil, []want{{CheckWarn, "nvidia.com/gpu", "nvidia-ctk cdi generate"}}},
		"needed and present": {cri, files{"/etc/cdi/nvidia.yaml": good}, []want{{CheckInfo, "nvidia.com/gpu, 2 devices", ""}}},
		"generated":          {own, nil, []want{{CheckInfo, own.CDI.Dir, ""}}},
	} {
		t.Run(name, func(t *testing.T) {
			expect(t, doctor{host: goodNode().with(c.files).root(t)}.checkCDI(c.config), c.want...)
		})
	}
}

func TestCheckGPUOperator(t *testing.T) {
	const dir = "/run/nvidia/validations/"
	runHostCases(t, map[string]hostCase{
		"not installed": {},
		"ready": {
			files{dir + "driver-ready": "x", dir + "toolkit-ready": "x"},
			nil, false,
			[]want{{CheckInfo, "driver-ready, toolkit-ready", ""}},
		},
		"driver ready": {files{dir + "driver-ready": "x"}, nil, false, []want{{CheckWarn, "driver-ready, no toolkit-ready", "wait"}}},
		"starting":     {files{dir: "/"}, nil, false, []want{{CheckWarn, "no driver-ready, no toolkit-ready", "wait"}}},
	}, func(d doctor, _ survey) []Check { return d.checkGPUOperator() })
}
