package nvidiaconfig

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

const gpu = "nvidia.com/gpu"

func configured(change func(*plugin.Config)) plugin.Config {
	c := plugin.DefaultConfig()
	change(&c)
	return c
}

// The example of the README of NVIDIA's plugin, and a file with every key.
const (
	sharedFile = `
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - {name: nvidia.com/gpu, replicas: 10}
    - {name: mig-1g.10gb, replicas: 2}
`
	completeFile = `
version: v1
flags:
  migStrategy: mixed
  failOnInitError: true
  mpsRoot: /run/mps
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /
  gdrcopyEnabled: false
  gdsEnabled: true
  mofedEnabled: false
  useNodeFeatureAPI: true
  deviceDiscoveryStrategy: auto
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [cdi-cri, envvar]
    deviceIDStrategy: index
    cdiAnnotationPrefix: cdi.example.com/
    nvidiaCTKPath: /usr/local/nvidia/toolkit/nvidia-ctk
    containerDriverRoot: /driver-root
    sharedDevicesAllocationPolicy: packed
  gfd: {oneshot: false, noTimestamp: false, sleepInterval: 60s, outputFile: /x, machineTypeFile: /y}
resources:
  gpus: [{pattern: "*", name: gpu}]
  mig: []
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: true
    resources:
    - {name: gpu, replicas: 4, rename: gpu.fast, devices: [0, 1]}
  mps:
    renameByDefault: true
    failRequestsGreaterThanOne: false
    resources: [{name: gpu, replicas: 2, rename: gpu.fast, devices: [0, 1]}, {name: nvidia.com/mig-1g.10gb, replicas: 3}]
imex: {channelIDs: [0], required: true}
kubelet: yes
`
)

// keysOf returns the key of each line.
func keysOf(text string) (keys []string) {
	for line := range strings.Lines(text) {
		key, _, _ := strings.Cut(line, ": ")
		keys = append(keys, key)
	}
	return keys
}

func TestImport(t *testing.T) {
	for _, c := range []struct {
		name, text string
		base, want plugin.Config
		warnings   []string // their keys
	}{
		{"empty file", "", plugin.DefaultConfig(), plugin.DefaultConfig(), nil},
		{"empty section", "resources: {}", plugin.DefaultConfig(), plugin.DefaultConfig(), nil},
		{
			"resources of NVIDIA's plugin", "resources: {gpus: [], mig: [{pattern: x, name: y}]}", plugin.DefaultConfig(), plugin.DefaultConfig(),
			[]string{"resources.mig"},
		},
		{
			"number with a fraction of 0", "sharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 4.0}]}}",
			plugin.DefaultConfig(),
			configured(func(c *plugin.Config) {
				c.Sharing.TimeSlicing.Resources = []plugin.SharedResource{{Name: gpu, Replicas: 4, Devices: []string{}}}
			}), nil,
		},
		{"version only", "version: v1\nflags:\n  plugin:\n", plugin.DefaultConfig(), plugin.DefaultConfig(), nil},
		{
			"sharing", sharedFile, plugin.DefaultConfig(), configured(func(c *plugin.Config) {
				c.Sharing.TimeSlicing = plugin.TimeSlicing{RenameByDefault: true, Resources: []plugin.SharedResource{
					{Name: gpu, Replicas: 10, Devices: []string{}}, {Name: "nvidia.com/mig-1g.10gb", Replicas: 2, Devices: []string{}},
				}}
			}),
			[]string{"sharing.timeSlicing.failRequestsGreaterThanOne"},
		},
		{
			"every key", completeFile, plugin.DefaultConfig(), configured(func(c *plugin.Config) {
				c.MIGStrategy, c.DriverRoot, c.DevRoot, c.ContainerDriverRoot = plugin.MIGMixed, "/run/nvidia/driver", "/", "/driver-root"
				c.PassDeviceSpecs, c.DeviceList, c.DeviceID = true, []string{plugin.ListCDICRI, plugin.ListEnv}, plugin.DeviceIDIndex
				c.CDI.AnnotationPrefix, c.CDI.HookPath, c.CDI.Generate = "cdi.example.com/", "/usr/local/nvidia/toolkit/nvidia-ctk", true
				c.AllocationPolicy = plugin.AllocationPacked
				c.Sharing.MPS.Root, c.Sharing.MPS.RenameByDefault, c.Sharing.MPS.FailRequestsGreaterThanOne = "/run/mps", true, false
				c.Sharing.MPS.Resources = []plugin.MPSResource{
					{Name: gpu, Replicas: 2, Devices: []string{}}, {Name: "nvidia.com/mig-1g.10gb", Replicas: 3, Devices: []string{}},
				}
			}),
			[]string{
				"flags.failOnInitError", "flags.gdsEnabled", "flags.gfd.machineTypeFile",
				"flags.gfd.noTimestamp", "flags.gfd.oneshot", "flags.gfd.outputFile", "flags.gfd.sleepInterval",
				"flags.useNodeFeatureAPI", "imex.channelIDs", "imex.required", "kubelet",
				"resources.gpus", "sharing.mps.resources[0].devices", "sharing.mps.resources[0].rename", "sharing.timeSlicing.resources[0].devices",
				"sharing.timeSlicing.resources[0].rename", "sharing.timeSlicing.resources",
			},
		},
		{
			"MPS refuses requests of several shares by default", "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}",
			configured(func(c *plugin.Config) { c.Sharing.MPS.FailRequestsGreaterThanOne = false }),
			configured(func(c *plugin.Config) {
				c.Sharing.MPS.Resources = []plugin.MPSResource{{Name: gpu, Replicas: 2, Devices: []string{}}}
			}), nil,
		},
		{
			"time-slicing without MPS resources",
			"sharing: {mps: {resources: []}, timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 4}]}}",
			plugin.DefaultConfig(),
			configured(func(c *plugin.Config) {
				c.Sharing.TimeSlicing.Resources = []plugin.SharedResource{{Name: gpu, Replicas: 4, Devices: []string{}}}
			}), nil,
		},
		{
			"chart default", "version: v1\nflags: {migStrategy: none, failOnInitError: false, nvidiaDriverRoot: '', deviceDiscoveryStrategy: " +
				"nvml, mpsRoot: '', " +
				"plugin: {deviceListStrategy: 'envvar,volume-mounts', deviceIDStrategy: uuid}}\nimex: {channelIDs: []}",
			configured(func(c *plugin.Config) { c.MIGStrategy, c.DriverRoot = plugin.MIGSingle, "/d" }),
			configured(func(c *plugin.Config) { c.DriverRoot, c.DeviceList = "/d", []string{plugin.ListEnv, plugin.ListMounts} }), nil,
		},
		{
			"CDI with the default hook", "flags: {PLUGIN: {deviceListStrategy: cdi-annotations}}", plugin.DefaultConfig(),
			configured(func(c *plugin.Config) {
				c.DeviceList, c.CDI.Generate, c.CDI.HookPath = []string{plugin.ListCDIAnnotations}, true, "/usr/bin/nvidia-ctk"
			}), nil,
		},
		{
			"absent keys", "version: v1", configured(func(c *plugin.Config) { c.DeviceList, c.PassDeviceSpecs = []string{plugin.ListCDICRI}, true }),
			configured(func(c *plugin.Config) { c.DeviceList, c.PassDeviceSpecs = []string{plugin.ListCDICRI}, true }), nil,
		},
	} {
		got, warnings, err := Import([]byte(c.text), c.base)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", c.name, got, c.want)
		}
		if got := keysOf(strings.Join(warnings, "\n")); !slices.Equal(got, c.warnings) {
			t.Errorf("%s: warnings of\n%s\nwant\n%s", c.name, strings.Join(got, "\n"), strings.Join(c.warnings, "\n"))
		}
		if again, more, err := Import([]byte(c.text), got); err != nil || !reflect.DeepEqual(again, got) || !slices.Equal(more, warnings) {
			t.Errorf("%s, imported twice: %+v, %v, %v", c.name, again, more, err)
		}
	}
}

func TestImportRejects(t *testing.T) {
	for _, c := range []struct{ text, key string }{
		{"version: v2", "version"},
		{"flags: [a]", "flags"},
		{"flags: {migStrategy: on}", "flags.migStrategy"},
		{"flags: {nvidiaDriverRoot: 5}", "flags.nvidiaDriverRoot"},
		{"flags: {plugin: {passDeviceSpecs: 'true'}}", "flags.plugin.passDeviceSpecs"},
		{"flags: {plugin: {passDeviceSpecs: yes please}}", "flags.plugin.passDeviceSpecs"},
		{"flags: {plugin: {passDeviceSpecs: 5}}", "flags.plugin.passDeviceSpecs"},
		{"flags: {plugin: {deviceListStrategy: [cdi]}}", "flags.plugin.deviceListStrategy"},
		{"flags: {plugin: {deviceListStrategy: 7}}", "flags.plugin.deviceListStrategy"},
		{"flags: {plugin: {deviceIDStrategy: name}}", "flags.plugin.deviceIDStrategy"},
		{"flags: {nvidiaDriverRoot: here}", "driverRoot"},
		{"flags: {mpsRoot: here}", "sharing.mps.root"},
		{"sharing: {mps: {resources: [{name: gpu, replicas: 49}]}}", "sharing.mps.resources[0].replicas"},
		{"sharing: {mps: {resources: [{name: gpu}]}}", "sharing.mps.resources[0].replicas"},
		{"sharing: {mps: {resources: 5}}", "sharing.mps.resources"},
		{"sharing: {mps: {failRequestsGreaterThanOne: 5}}", "sharing.mps.failRequestsGreaterThanOne"},
		{"sharing: {timeSlicing: {resources: {name: a}}}", "sharing.timeSlicing.resources"},
		{"sharing: {timeSlicing: {resources: [a]}}", "sharing.timeSlicing.resources[0]"},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}", "sharing.timeSlicing.resources[0].replicas"},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: x}]}}", "sharing.timeSlicing.resources[0].replicas"},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: gpu}]}}", "sharing.timeSlicing.resources[1].replicas"},
		{"sharing: {timeSlicing: {resources: [{name: tpu, replicas: 2}]}}", "sharing.timeSlicing.resources[0].name"},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: '2'}]}}", "sharing.timeSlicing.resources[0].replicas"},
		{"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2.5}]}}", "sharing.timeSlicing.resources[0].replicas"},
		{
			"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: nvidia.com/gpu, replicas: 3}]}}",
			"sharing.timeSlicing.resources[1].name",
		},
	} {
		got, _, err := Import([]byte(c.text), plugin.DefaultConfig())
		if err == nil {
			t.Errorf("%s: no error", c.text)
			continue
		}
		if keys := keysOf(err.Error()); !slices.Equal(keys, []string{c.key}) {
			t.Errorf("%s: %v, want one error of %s", c.text, err, c.key)
		}
		if !reflect.DeepEqual(got, plugin.DefaultConfig()) {
			t.Errorf("%s: changed the configuration", c.text)
		}
	}
}

func TestImportRejectsOtherFiles(t *testing.T) {
	for text, data := range map[string]string{
		"{kind: ConfigMap, apiVersion: v1, metadata: {name: a}, data: {default: 'version: v1', mig: 'version: v1'}}": "default or mig",
		"{kind: ConfigMap, data: }": "ConfigMap",
		"{image: {tag: x}, resources: {limits: {cpu: 1}}, migStrategy: mixed}": "chart",
		"{resources: {}, nodeSelector: {}}":                                    "chart",
		"[a]":                                                                  "NVIDIA",
		"a: {":                                                                 "NVIDIA",
	} {
		if _, _, err := Import([]byte(text), plugin.DefaultConfig()); err == nil || !strings.Contains(err.Error(), data) {
			t.Errorf("%s: %v, want %s", text, err, data)
		}
	}
}

func FuzzImport(f *testing.F) {
	for _, text := range []string{
		sharedFile, completeFile, "", "a: &a [*a]", "flags: {plugin: {gfd: 1}}", "? {a: b}\n: c",
		"sharing: {timeSlicing: {resources: [{}, null]}}", "sharing: {mps: {resources: [{name: gpu, replicas: 48}]}}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, warnings, err := Import(text, plugin.DefaultConfig())
		if err != nil {
			if !reflect.DeepEqual(c, plugin.DefaultConfig()) {
				t.Error("changed the configuration despite an error")
			}
			return
		}
		if err := c.Validate(); err != nil {
			t.Errorf("imported an invalid configuration: %v", err)
		}
		if again, more, err := Import(text, c); err != nil || !reflect.DeepEqual(again, c) || !slices.Equal(warnings, more) {
			t.Errorf("imported twice: %+v after %+v, %v", again, c, err)
		}
	})
}
