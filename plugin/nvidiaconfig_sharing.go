package plugin

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

const nvidiaDomain = "nvidia.com/"

// shared reads the list of shared resources.
func (in *nvidiaImport) shared(key string, value any) {
	list, ok := value.([]any)
	if !ok {
		in.fail(key, "is not a list")
		return
	}
	in.sliced = len(list) > 0
	in.Sharing.TimeSlicing.Resources = []SharedResource{}
	for i, e := range list {
		key := fmt.Sprintf("%s[%d]", key, i)
		entry, ok := e.(map[string]any)
		if !ok {
			in.fail(key, "has no keys; use name and replicas")
			continue
		}
		r, counted := SharedResource{Devices: []string{}}, true
		for _, name := range slices.Sorted(maps.Keys(entry)) {
			switch value := entry[name]; strings.ToLower(name) {
			case "name":
				in.text(key+".name", value, &r.Name)
			case "replicas":
				r.Replicas, counted = in.count(key+".replicas", value)
			case "rename":
				if value != nil && value != "" {
					in.warn(key+".rename", "has no effect, as in NVIDIA's plugin; plugin.sharing can rename")
				}
			case "devices":
				if value != nil && value != "all" {
					in.warn(key+".devices", "has no effect, as in NVIDIA's plugin: all devices are shared; plugin.sharing can choose")
				}
			default:
				in.warn(key+"."+name, "is not known")
			}
		}
		if counted && r.Replicas < 2 {
			in.fail(key+".replicas", "%d is too few; use 2 or more", r.Replicas)
		}
		if !strings.HasPrefix(r.Name, nvidiaDomain) { // it may be left out in the file
			r.Name = nvidiaDomain + r.Name
		}
		in.Sharing.TimeSlicing.Resources = append(in.Sharing.TimeSlicing.Resources, r)
	}
}

// count reads a whole number; ok is false if it is none, which was said then.
func (in *nvidiaImport) count(key string, value any) (n int, ok bool) {
	switch v := value.(type) {
	case int:
		return v, true
	case float64: // 4.0, as some programs write it
		if v == math.Trunc(v) && math.Abs(v) < math.MaxInt32 {
			return int(v), true
		}
	case string:
		if _, err := strconv.Atoi(v); err == nil {
			in.fail(key, "%q is a text; remove the quotes", v)
			return 0, false
		}
	}
	in.fail(key, "%v is not a whole number", value)
	return 0, false
}
