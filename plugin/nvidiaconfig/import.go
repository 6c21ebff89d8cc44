// Package nvidiaconfig imports a configuration file of NVIDIA's device plugin.
package nvidiaconfig

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// Import applies a file (see "As a configuration file" in the README of NVIDIA's plugin) to base: keys of the file
// override keys of base. It treats the file as NVIDIA's plugin does, so resource names and devices stay the same. It
// returns a warning for each key without effect, here or in NVIDIA's plugin. Errors name the key in the file.
func Import(text []byte, base plugin.Config) (plugin.Config, []string, error) {
	var tree map[string]any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		return base, nil, fmt.Errorf("not a configuration file of NVIDIA's device plugin: %w", err)
	}
	if err := checkFormat(tree); err != nil {
		return base, nil, err
	}
	in := importer{Config: base}
	in.section("", tree)
	in.finish()
	if len(in.errs) == 0 {
		in.errs = append(in.errs, in.Validate())
	}
	if err := errors.Join(in.errs...); err != nil {
		return base, in.warnings, err
	}
	return in.Config, in.warnings, nil
}

// checkFormat returns an error for other YAML files, which would have no effect. It accepts an empty file.
func checkFormat(tree map[string]any) error {
	if len(tree) == 0 {
		return nil
	}
	for name, value := range tree {
		section, _ := value.(map[string]any)
		switch key := strings.ToLower(name); {
		case key == "resources": // also in a chart's values, as the resources of the pod
			if len(section) == 0 && len(tree) == 1 || section["gpus"] != nil || section["mig"] != nil {
				return nil
			}
		case key == "version", slices.Contains(sections(), key):
			return nil
		}
	}
	if tree["kind"] == "ConfigMap" {
		data, _ := tree["data"].(map[string]any)
		return fmt.Errorf("expected a file, got a ConfigMap; use one file of its data: %s",
			cmp.Or(strings.Join(slices.Sorted(maps.Keys(data)), " or "), "none"))
	}
	return errors.New("not a configuration file of NVIDIA's device plugin: expected a key version, flags, resources, sharing or imex; " +
		"use the file itself, not the chart values that contain it")
}

// importer is the state of one import.
type importer struct {
	plugin.Config
	warnings []string
	errs     []error
	sliced   bool // the file has sharing.timeSlicing.resources
	failSet  bool // the file has sharing.timeSlicing.failRequestsGreaterThanOne
	mps      bool // the file has sharing.mps.resources
	mpsFail  bool // the file has sharing.mps.failRequestsGreaterThanOne
	listSet  bool // the file has flags.plugin.deviceListStrategy
}

func (in *importer) warn(key, format string, args ...any) {
	in.warnings = append(in.warnings, key+": "+fmt.Sprintf(format, args...))
}

// warnIfSet warns about a key that has no effect here, unless its value is false or empty.
func (in *importer) warnIfSet(key string, value any, text string) {
	if list, isList := value.([]any); value != false && value != "" && (!isList || len(list) > 0) {
		in.warn(key, "%s", text)
	}
}

func (in *importer) fail(key, format string, args ...any) {
	in.errs = append(in.errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, args...)))
}

// section imports a map. As in NVIDIA's plugin, the case of keys is ignored, and so are null values.
func (in *importer) section(prefix string, tree map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(tree)) {
		key, value := prefix+name, tree[name]
		if value == nil {
			continue
		}
		switch sub, isMap := value.(map[string]any); {
		case !slices.Contains(sections(), strings.ToLower(key)):
			in.key(key, value)
		case isMap:
			in.section(key+".", sub)
		default:
			in.fail(key, "expected keys below it, got %v", value)
		}
	}
}

func sections() []string {
	return []string{"flags", "flags.plugin", "flags.gfd", "resources", "sharing", "sharing.timeslicing", "sharing.mps", "imex"}
}

// key imports one value.
func (in *importer) key(key string, value any) {
	const pluginFlags = "flags.plugin."
	switch k := strings.ToLower(key); k {
	case "version":
		if value != "v1" && value != "" {
			in.fail(key, "expected v1, got %v", value)
		}
	case "flags.migstrategy":
		in.oneOf(key, value, &in.MIGStrategy, plugin.MIGNone, plugin.MIGSingle, plugin.MIGMixed)
	case "flags.nvidiadriverroot":
		in.text(key, value, &in.DriverRoot)
	case "flags.nvidiadevroot":
		in.text(key, value, &in.DevRoot)
	case pluginFlags + "passdevicespecs":
		in.boolean(key, value, &in.PassDeviceSpecs)
	case pluginFlags + "deviceliststrategy":
		in.deviceList(key, value)
	case pluginFlags + "deviceidstrategy":
		in.oneOf(key, value, &in.DeviceID, plugin.DeviceIDUUID, plugin.DeviceIDIndex)
	case pluginFlags + "cdiannotationprefix":
		in.text(key, value, &in.CDI.AnnotationPrefix)
	case pluginFlags + "nvidiactkpath":
		in.text(key, value, &in.CDI.HookPath)
	case pluginFlags + "containerdriverroot":
		in.text(key, value, &in.ContainerDriverRoot)
	case pluginFlags + "shareddevicesallocationpolicy":
		in.oneOf(key, value, &in.AllocationPolicy, plugin.AllocationDistributed, plugin.AllocationPacked)
	case "sharing.timeslicing.renamebydefault":
		in.boolean(key, value, &in.Sharing.TimeSlicing.RenameByDefault)
	case "sharing.timeslicing.failrequestsgreaterthanone":
		in.failSet = true
		in.boolean(key, value, &in.Sharing.TimeSlicing.FailRequestsGreaterThanOne)
	case "sharing.timeslicing.resources":
		if list, ok := in.shared(key, value); ok {
			in.Sharing.TimeSlicing.Resources, in.sliced = list, len(list) > 0
		}
	case "flags.mpsroot":
		in.text(key, value, &in.Sharing.MPS.Root)
	case "sharing.mps.renamebydefault":
		in.boolean(key, value, &in.Sharing.MPS.RenameByDefault)
	case "sharing.mps.failrequestsgreaterthanone":
		in.mpsFail = true
		in.boolean(key, value, &in.Sharing.MPS.FailRequestsGreaterThanOne)
	case "sharing.mps.resources":
		if list, ok := in.shared(key, value); ok {
			in.Sharing.MPS.Resources, in.mps = []plugin.MPSResource{}, len(list) > 0
			for _, r := range list {
				in.Sharing.MPS.Resources = append(in.Sharing.MPS.Resources, plugin.MPSResource{Name: r.Name, Replicas: r.Replicas, Devices: r.Devices})
			}
		}
	case "flags.failoniniterror":
		in.warnIfSet(key, value, "has no effect: without a GPU the agent retries, and /readyz reports the reason")
	case "flags.gdrcopyenabled", "flags.gdsenabled", "flags.mofedenabled":
		in.warnIfSet(key, value, "is not supported")
	case "flags.devicediscoverystrategy":
		if value != "auto" && value != "nvml" {
			in.warn(key, "%v is not supported: the agent finds devices through DCGM", value)
		}
	case "imex.channelids", "imex.required":
		in.warnIfSet(key, value, "IMEX channels are not supported")
	case "resources.gpus", "resources.mig":
		in.warnIfSet(key, value, "has no effect, as in NVIDIA's plugin; use plugin.resources")
	default:
		if strings.HasPrefix(k, "flags.gfd.") || k == "flags.usenodefeatureapi" {
			in.warn(key, "configures GPU feature discovery, which is another program")
			return
		}
		in.warn(key, "unknown key")
	}
}

func (in *importer) text(key string, value any, to *string) {
	s, ok := value.(string)
	if !ok {
		in.fail(key, "expected a string, got %v", value)
		return
	}
	if s != "" { // as in NVIDIA's plugin, the empty string selects the default
		*to = s
	}
}

func (in *importer) oneOf(key string, value any, to *string, accepted ...string) {
	s, ok := value.(string)
	if !ok || !slices.Contains(accepted, s) {
		in.fail(key, "expected one of %s, got %v", strings.Join(accepted, ", "), value)
		return
	}
	*to = s
}

func (in *importer) boolean(key string, value any, to *bool) {
	b, ok := value.(bool)
	if !ok {
		in.fail(key, "expected true or false without quotes, got %#v", value)
		return
	}
	*to = b
}

// deviceList imports a list of strings, or one string separated by commas.
func (in *importer) deviceList(key string, value any) {
	var all []string
	switch v := value.(type) {
	case string:
		all = strings.Split(v, ",")
	case []any:
		for _, e := range v {
			all = append(all, fmt.Sprint(e))
		}
	default:
		in.fail(key, "expected one or more of %s, got %v", strings.Join(plugin.DeviceLists(), ", "), value)
		return
	}
	var list []string
	for _, s := range all {
		if !slices.Contains(plugin.DeviceLists(), s) {
			in.fail(key, "expected one or more of %s, got %q", strings.Join(plugin.DeviceLists(), ", "), s)
			return
		}
		if !slices.Contains(list, s) {
			list = append(list, s)
		}
	}
	if len(list) > 0 {
		in.DeviceList, in.listSet = list, true
	}
}

// finish applies the settings that follow from several keys.
func (in *importer) finish() {
	t := &in.Sharing.TimeSlicing
	if in.mps && !in.mpsFail {
		in.Sharing.MPS.FailRequestsGreaterThanOne = true
	}
	switch {
	case in.sliced && in.mps:
		t.Resources = []plugin.SharedResource{}
		in.warn("sharing.timeSlicing.resources",
			"has no effect, as in NVIDIA's plugin, which applies sharing.mps.resources instead; use plugin.sharing for both")
	case in.sliced && !in.failSet:
		t.FailRequestsGreaterThanOne = false
		in.warn("sharing.timeSlicing.failRequestsGreaterThanOne", "is not set and defaults to false as in NVIDIA's plugin; "+
			"set it to true to refuse pods that request several replicas, which give no larger share")
	}
	// NVIDIA's plugin always generates a spec, with hooks.
	if in.listSet && in.UsesCDI() {
		in.CDI.Generate = true
		in.CDI.HookPath = cmp.Or(in.CDI.HookPath, "/usr/bin/nvidia-ctk")
	}
}

const nvidiaDomain = "nvidia.com/"

// shared returns a list of shared resources. If the value is no such list, it adds an error.
func (in *importer) shared(key string, value any) (resources []plugin.SharedResource, ok bool) {
	list, ok := value.([]any)
	if !ok {
		in.fail(key, "expected a list, got %v", value)
		return nil, false
	}
	resources = []plugin.SharedResource{}
	for i, e := range list {
		key := fmt.Sprintf("%s[%d]", key, i)
		entry, ok := e.(map[string]any)
		if !ok {
			in.fail(key, "expected the keys name and replicas, got %v", e)
			continue
		}
		r, counted := plugin.SharedResource{Devices: []string{}}, true
		for _, name := range slices.Sorted(maps.Keys(entry)) {
			switch value := entry[name]; strings.ToLower(name) {
			case "name":
				in.text(key+".name", value, &r.Name)
			case "replicas":
				r.Replicas, counted = in.count(key+".replicas", value)
			case "rename":
				if value != nil && value != "" {
					in.warn(key+".rename", "has no effect, as in NVIDIA's plugin; use plugin.sharing")
				}
			case "devices":
				if value != nil && value != "all" {
					in.warn(key+".devices", "has no effect, as in NVIDIA's plugin, which shares all devices; use plugin.sharing")
				}
			default:
				in.warn(key+"."+name, "unknown key")
			}
		}
		if counted && r.Replicas < 2 {
			in.fail(key+".replicas", "expected 2 or more, got %d", r.Replicas)
		}
		if !strings.HasPrefix(r.Name, nvidiaDomain) { // optional in the file
			r.Name = nvidiaDomain + r.Name
		}
		resources = append(resources, r)
	}
	return resources, true
}

// count returns a whole number. If the value is another, it adds an error.
func (in *importer) count(key string, value any) (n int, ok bool) {
	switch v := value.(type) {
	case int:
		return v, true
	case float64: // some programs write 4.0
		if v == math.Trunc(v) && math.Abs(v) < math.MaxInt32 {
			return int(v), true
		}
	}
	in.fail(key, "expected a whole number without quotes, got %#v", value)
	return 0, false
}
