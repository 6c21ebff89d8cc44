package plugin

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ImportNVIDIA reads a configuration file of NVIDIA's device plugin (its README, "As a configuration file")
// over base: what the file says wins. It does what that plugin does with the file, so resource names and
// devices stay what they are; a key that means nothing here, or that NVIDIA's plugin ignores, is named in a
// warning. Errors name the key as it is in the file.
func ImportNVIDIA(text []byte, base Config) (Config, []string, error) {
	var tree map[string]any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		return base, nil, fmt.Errorf("not a configuration file of NVIDIA's device plugin: %w", err)
	}
	if err := isNVIDIAs(tree); err != nil {
		return base, nil, err
	}
	in := nvidiaImport{Config: base}
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

// isNVIDIAs returns an error for what is no such file, though YAML: else all of it would be of no effect, with the
// defaults in force. A file with nothing in it is one.
func isNVIDIAs(tree map[string]any) error {
	if len(tree) == 0 {
		return nil
	}
	for name, value := range tree {
		section, _ := value.(map[string]any)
		switch key := strings.ToLower(name); {
		case key == "resources": // of a chart's values too, where it is what the pod gets
			if len(section) == 0 && len(tree) == 1 || section["gpus"] != nil || section["mig"] != nil {
				return nil
			}
		case key == "version", slices.Contains(nvidiaSections(), key):
			return nil
		}
	}
	if tree["kind"] == "ConfigMap" {
		data, _ := tree["data"].(map[string]any)
		return fmt.Errorf("is a ConfigMap; give the file that is in its data: %s",
			cmp.Or(strings.Join(slices.Sorted(maps.Keys(data)), " or "), "it has none"))
	}
	return errors.New("not a configuration file of NVIDIA's device plugin: has none of its keys version, flags, resources, sharing and imex; " +
		"give the file itself, and not a chart's values around it")
}

// nvidiaImport is a file being read.
type nvidiaImport struct {
	Config
	warnings []string
	errs     []error
	sliced   bool // the file has sharing.timeSlicing.resources
	failSet  bool // and says failRequestsGreaterThanOne
	listSet  bool // the file has flags.plugin.deviceListStrategy
}

func (in *nvidiaImport) warn(key, format string, args ...any) {
	in.warnings = append(in.warnings, key+": "+fmt.Sprintf(format, args...))
}

func (in *nvidiaImport) fail(key, format string, args ...any) {
	in.errs = append(in.errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, args...)))
}

// section reads a map. As in NVIDIA's plugin, capitals in keys make no difference, and null is nothing.
func (in *nvidiaImport) section(prefix string, tree map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(tree)) {
		key, value := prefix+name, tree[name]
		if value == nil {
			continue
		}
		switch sub, isMap := value.(map[string]any); {
		case !slices.Contains(nvidiaSections(), strings.ToLower(key)):
			in.key(key, value)
		case isMap:
			in.section(key+".", sub)
		default:
			in.fail(key, "is not a section; write keys below it")
		}
	}
}

func nvidiaSections() []string {
	return []string{"flags", "flags.plugin", "flags.gfd", "resources", "sharing", "sharing.timeslicing", "sharing.mps", "imex"}
}

// key reads one value.
func (in *nvidiaImport) key(key string, value any) {
	const plugin = "flags.plugin."
	switch k := strings.ToLower(key); k {
	case "version":
		if value != "v1" && value != "" {
			in.fail(key, "%v is not known; use v1", value)
		}
	case "flags.migstrategy":
		in.word(key, value, &in.MIGStrategy, MIGNone, MIGSingle, MIGMixed)
	case "flags.nvidiadriverroot":
		in.text(key, value, &in.DriverRoot)
	case "flags.nvidiadevroot":
		in.text(key, value, &in.DevRoot)
	case plugin + "passdevicespecs":
		in.flag(key, value, &in.PassDeviceSpecs)
	case plugin + "deviceliststrategy":
		in.deviceList(key, value)
	case plugin + "deviceidstrategy":
		in.word(key, value, &in.DeviceID, DeviceIDUUID, DeviceIDIndex)
	case plugin + "cdiannotationprefix":
		in.text(key, value, &in.CDI.AnnotationPrefix)
	case plugin + "nvidiactkpath":
		in.text(key, value, &in.CDI.HookPath)
	case plugin + "containerdriverroot":
		in.text(key, value, &in.ContainerDriverRoot)
	case plugin + "shareddevicesallocationpolicy":
		in.word(key, value, &in.AllocationPolicy, AllocationDistributed, AllocationPacked)
	case "sharing.timeslicing.renamebydefault":
		in.flag(key, value, &in.Sharing.TimeSlicing.RenameByDefault)
	case "sharing.timeslicing.failrequestsgreaterthanone":
		in.failSet = true
		in.flag(key, value, &in.Sharing.TimeSlicing.FailRequestsGreaterThanOne)
	case "sharing.timeslicing.resources":
		in.shared(key, value)
	case "flags.failoniniterror":
		if value != false {
			in.warn(key, "has no effect: the agent never ends for want of a GPU; it tries again, and /readyz says why")
		}
	case "flags.gdrcopyenabled", "flags.gdsenabled", "flags.mofedenabled":
		if value != false {
			in.warn(key, "is not supported")
		}
	case "flags.devicediscoverystrategy":
		if value != "auto" && value != "nvml" {
			in.warn(key, "%v is not supported: devices are found through DCGM", value)
		}
	case "flags.mpsroot", "sharing.mps.resources":
		if list, ok := value.([]any); value != "" && (!ok || len(list) > 0) {
			in.warn(key, "MPS is not supported: what it shares is handed out as sharing.timeSlicing has it, else whole")
		}
	case "sharing.mps.renamebydefault", "sharing.mps.failrequestsgreaterthanone":
		if value != false {
			in.warn(key, "has no effect: MPS is not supported")
		}
	case "imex.channelids":
		if list, ok := value.([]any); !ok || len(list) > 0 {
			in.warn(key, "IMEX channels are not supported")
		}
	case "imex.required":
		if value != false {
			in.warn(key, "IMEX channels are not supported")
		}
	case "resources.gpus", "resources.mig":
		if list, ok := value.([]any); !ok || len(list) > 0 {
			in.warn(key, "has no effect, as in NVIDIA's plugin; plugin.resources can name resources")
		}
	default:
		if strings.HasPrefix(k, "flags.gfd.") || k == "flags.usenodefeatureapi" {
			in.warn(key, "is for GPU feature discovery, which is another program")
			return
		}
		in.warn(key, "is not known")
	}
}

func (in *nvidiaImport) text(key string, value any, to *string) {
	s, ok := value.(string)
	if !ok {
		in.fail(key, "%v is not a text; put it in quotes", value)
		return
	}
	if s != "" { // NVIDIA's plugin takes its default for it, and so do we
		*to = s
	}
}

func (in *nvidiaImport) word(key string, value any, to *string, words ...string) {
	s, ok := value.(string)
	if !ok || !slices.Contains(words, s) {
		in.fail(key, "%v is not known; use one of %s", value, strings.Join(words, ", "))
		return
	}
	*to = s
}

func (in *nvidiaImport) flag(key string, value any, to *bool) {
	switch v := value.(type) {
	case bool:
		*to = v
	case string:
		if v == "true" || v == "false" {
			in.fail(key, "%q is a text; remove the quotes", v)
			return
		}
		in.fail(key, "%q is neither true nor false", v)
	default:
		in.fail(key, "%v is neither true nor false", v)
	}
}

// deviceList is a text, which may have commas, or a list of texts.
func (in *nvidiaImport) deviceList(key string, value any) {
	var all []string
	switch v := value.(type) {
	case string:
		all = strings.Split(v, ",")
	case []any:
		for _, e := range v {
			all = append(all, fmt.Sprint(e))
		}
	default:
		in.fail(key, "%v is not known; use one or more of %s", value, strings.Join(lists(), ", "))
		return
	}
	for _, how := range all {
		if !slices.Contains(lists(), how) {
			in.fail(key, "%q is not known; use one or more of %s", how, strings.Join(lists(), ", "))
			return
		}
	}
	if all = once(all); len(all) > 0 {
		in.DeviceList, in.listSet = all, true
	}
}

// finish does what follows from several keys together.
func (in *nvidiaImport) finish() {
	t := &in.Sharing.TimeSlicing
	if in.sliced && !in.failSet {
		t.FailRequestsGreaterThanOne = false
		in.warn("sharing.timeSlicing.failRequestsGreaterThanOne", "is not set, so it is false as in NVIDIA's plugin; "+
			"true refuses a pod that asks for several replicas and would get no more for it")
	}
	// NVIDIA's plugin always writes a spec of its own, with hooks.
	if in.listSet && in.usesCDI() {
		in.CDI.Generate = true
		in.CDI.HookPath = cmp.Or(in.CDI.HookPath, "/usr/bin/"+hookCTK)
	}
}
