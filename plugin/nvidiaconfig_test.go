package plugin

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

// Files as people have them: the README's and the operator's examples, and one with every key.
const (
	nvidiaShared = `
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - {name: nvidia.com/gpu, replicas: 10}
    - {name: mig-1g.10gb, replicas: 2}
`
	nvidiaEverything = `
version: v1
flags:
  migStrategy: mixed
  failOnInitError: true
  mpsRoot: /run/nvidia/mps
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
    resources: [{name: nvidia.com/gpu, replicas: 2}]
imex: {channelIDs: [0], required: true}
kubelet: yes
`
)

func TestImportNVIDIA(t *testing.T) {
	for _, c := range []struct {
		name, text string
		base, want Config
		warnings   []string // the start of each
	}{
		{"nothing", "", DefaultConfig(), DefaultConfig(), nil},
		{"a section with nothing in it", "resources: {}", DefaultConfig(), DefaultConfig(), nil},
		{"NVIDIA's own resources", "resources: {gpus: [], mig: [{pattern: x, name: y}]}", DefaultConfig(), DefaultConfig(), []string{"resources.mig: has no effect"}},
		{
			"a number as JSON may have it", "sharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 4.0}]}}", DefaultConfig(),
			configured(func(c *Config) {
				c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 4, Devices: []string{}}}
			}), nil,
		},
		{"nothing but its version", "version: v1\nflags:\n  plugin:\n", DefaultConfig(), DefaultConfig(), nil},
		{
			"sharing", nvidiaShared, DefaultConfig(), configured(func(c *Config) {
				c.Sharing.TimeSlicing = TimeSlicing{RenameByDefault: true, Resources: []SharedResource{
					{Name: gpu, Replicas: 10, Devices: []string{}}, {Name: "nvidia.com/mig-1g.10gb", Replicas: 2, Devices: []string{}},
				}}
			}),
			[]string{"sharing.timeSlicing.failRequestsGreaterThanOne: is not set, so it is false"},
		},
		{
			"everything", nvidiaEverything, DefaultConfig(), configured(func(c *Config) {
				c.MIGStrategy, c.DriverRoot, c.DevRoot, c.ContainerDriverRoot = MIGMixed, "/run/nvidia/driver", "/", "/driver-root"
				c.PassDeviceSpecs, c.DeviceList, c.DeviceID = true, []string{ListCDICRI, ListEnv}, DeviceIDIndex
				c.CDI.AnnotationPrefix, c.CDI.HookPath, c.CDI.Generate = "cdi.example.com/", "/usr/local/nvidia/toolkit/nvidia-ctk", true
				c.AllocationPolicy = AllocationPacked
				c.Sharing.TimeSlicing.Resources = []SharedResource{{Name: gpu, Replicas: 4, Devices: []string{}}}
			}),
			[]string{
				"flags.failOnInitError: has no effect", "flags.gdsEnabled: is not supported", "flags.gfd.machineTypeFile: is for GPU feature discovery",
				"flags.gfd.noTimestamp:", "flags.gfd.oneshot:", "flags.gfd.outputFile:", "flags.gfd.sleepInterval:", "flags.mpsRoot: MPS",
				"flags.useNodeFeatureAPI: is for GPU feature discovery", "imex.channelIDs: IMEX", "imex.required: IMEX", "kubelet: is not known",
				"resources.gpus: has no effect", "sharing.mps.renameByDefault: has no effect", "sharing.mps.resources: MPS", "sharing.timeSlicing.resources[0].devices: has no effect",
				"sharing.timeSlicing.resources[0].rename: has no effect",
			},
		},
		{
			"the chart's default", "version: v1\nflags: {migStrategy: none, failOnInitError: false, nvidiaDriverRoot: '', deviceDiscoveryStrategy: nvml, mpsRoot: '', " +
				"plugin: {deviceListStrategy: 'envvar,volume-mounts', deviceIDStrategy: uuid}}\nimex: {channelIDs: []}",
			configured(func(c *Config) { c.MIGStrategy, c.DriverRoot = MIGSingle, "/d" }),
			configured(func(c *Config) { c.DriverRoot, c.DeviceList = "/d", []string{ListEnv, ListMounts} }), nil,
		},
		{
			"CDI with the path of its own default", "flags: {PLUGIN: {deviceListStrategy: cdi-annotations}}", DefaultConfig(),
			configured(func(c *Config) {
				c.DeviceList, c.CDI.Generate, c.CDI.HookPath = []string{ListCDIAnnotations}, true, "/usr/bin/nvidia-ctk"
			}), nil,
		},
		{
			"what the file does not say stays", "version: v1", configured(func(c *Config) { c.DeviceList, c.PassDeviceSpecs = []string{ListCDICRI}, true }),
			configured(func(c *Config) { c.DeviceList, c.PassDeviceSpecs = []string{ListCDICRI}, true }), nil,
		},
	} {
		got, warnings, err := ImportNVIDIA([]byte(c.text), c.base)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", c.name, got, c.want)
		}
		if !slices.EqualFunc(warnings, c.warnings, strings.HasPrefix) {
			t.Errorf("%s: warned of\n%s\nwant\n%s", c.name, strings.Join(warnings, "\n"), strings.Join(c.warnings, "\n"))
		}
		if again, more, err := ImportNVIDIA([]byte(c.text), got); err != nil || !reflect.DeepEqual(again, got) || !slices.Equal(more, warnings) {
			t.Errorf("%s, read twice: %+v, %v, %v", c.name, again, more, err)
		}
	}
}

func TestImportNVIDIARefuses(t *testing.T) {
	for text, want := range map[string]string{
		"version: v2":                                    "version: v2 is not known; use v1",
		"flags: [a]":                                     "flags: is not a section",
		"flags: {migStrategy: on}":                       "flags.migStrategy: on is not known; use one of none, single, mixed",
		"flags: {nvidiaDriverRoot: 5}":                   "flags.nvidiaDriverRoot: 5 is not a text",
		"flags: {plugin: {passDeviceSpecs: 'true'}}":     `flags.plugin.passDeviceSpecs: "true" is a text; remove the quotes`,
		"flags: {plugin: {passDeviceSpecs: yes please}}": `flags.plugin.passDeviceSpecs: "yes please" is neither true nor false`,
		"flags: {plugin: {passDeviceSpecs: 5}}":          `flags.plugin.passDeviceSpecs: 5 is neither true nor false`,

		"flags: {plugin: {deviceListStrategy: [cdi]}}":                                                               `flags.plugin.deviceListStrategy: "cdi" is not known`,
		"flags: {plugin: {deviceListStrategy: 7}}":                                                                   "flags.plugin.deviceListStrategy: 7 is not known",
		"flags: {plugin: {deviceIDStrategy: name}}":                                                                  "flags.plugin.deviceIDStrategy: name",
		"flags: {nvidiaDriverRoot: here}":                                                                            `driverRoot: "here" is not an absolute path`,
		"sharing: {timeSlicing: {resources: {name: a}}}":                                                             "sharing.timeSlicing.resources: is not a list",
		"sharing: {timeSlicing: {resources: [a]}}":                                                                   "sharing.timeSlicing.resources[0]: has no keys",
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}":                                            "sharing.timeSlicing.resources[0].replicas: 1 is too few",
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: x}]}}":                                            "sharing.timeSlicing.resources[0].replicas: x is not a whole number",
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: gpu}]}}":                               "sharing.timeSlicing.resources[1].replicas: 0 is too few",
		"sharing: {timeSlicing: {resources: [{name: tpu, replicas: 2}]}}":                                            "sharing.timeSlicing.resources[0].name: no device is called",
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: '2'}]}}":                                          `sharing.timeSlicing.resources[0].replicas: "2" is a text; remove the quotes`,
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2.5}]}}":                                          `sharing.timeSlicing.resources[0].replicas: 2.5 is not a whole number`,
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: nvidia.com/gpu, replicas: 3}]}}":       `sharing.timeSlicing.resources[1].name: nvidia.com/gpu is there twice`,
		"{kind: ConfigMap, apiVersion: v1, metadata: {name: a}, data: {default: 'version: v1', mig: 'version: v1'}}": "is a ConfigMap; give the file that is in its data: default or mig",
		"{kind: ConfigMap, data: }":                                                                                  "is a ConfigMap; give the file that is in its data: it has none",
		"{image: {tag: x}, resources: {limits: {cpu: 1}}, migStrategy: mixed}":                                       "has none of its keys version, flags, resources, sharing and imex; give the file itself",
		"{resources: {}, nodeSelector: {}}":                                                                          "has none of its keys",
		"[a]":                                                                                                        "not a configuration file of NVIDIA's device plugin",
		"a: {":                                                                                                       "not a configuration file of NVIDIA's device plugin",
	} {
		base := DefaultConfig()
		got, _, err := ImportNVIDIA([]byte(text), base)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
			continue
		}
		if more := strings.Count(err.Error(), "replicas: "); more > 1 {
			t.Errorf("%s: one fault is told %d times: %v", text, more, err)
		}
		if !reflect.DeepEqual(got, base) {
			t.Errorf("%s: changed the configuration", text)
		}
	}
}

func FuzzImportNVIDIA(f *testing.F) {
	for _, text := range []string{nvidiaShared, nvidiaEverything, "", "a: &a [*a]", "flags: {plugin: {gfd: 1}}", "? {a: b}\n: c", "sharing: {timeSlicing: {resources: [{}, null]}}"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, warnings, err := ImportNVIDIA(text, DefaultConfig())
		if err != nil {
			if !reflect.DeepEqual(c, DefaultConfig()) {
				t.Error("an error, and another configuration")
			}
			return
		}
		if err := c.Validate(); err != nil {
			t.Errorf("imported, and not valid: %v", err)
		}
		if again, more, err := ImportNVIDIA(text, c); err != nil || !reflect.DeepEqual(again, c) || !slices.Equal(warnings, more) {
			t.Errorf("read twice: %+v after %+v, %v", again, c, err)
		}
	})
}
