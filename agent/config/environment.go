package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"unicode"
)

// envPrefix is the prefix of the environment variables: GPU_NODE_AGENT_SOURCE_MODE sets source.mode.
const envPrefix = "GPU_NODE_AGENT"

// envName returns the environment variable of a key: GPU_NODE_AGENT_PLUGIN_KUBELET_DIR of plugin.kubeletDir. Consecutive capitals are one
// word: metrics.podUID has GPU_NODE_AGENT_METRICS_POD_UID.
func envName(key string) string {
	var b strings.Builder
	capital := false
	for _, r := range key {
		if unicode.IsUpper(r) && !capital {
			b.WriteByte('_')
		}
		capital = unicode.IsUpper(r)
		b.WriteRune(r)
	}
	return envPrefix + "_" + strings.ToUpper(strings.ReplaceAll(b.String(), ".", "_"))
}

// IsVariable reports whether an environment variable sets one of some keys.
func IsVariable(name string, keys ...string) bool {
	return slices.ContainsFunc(keys, func(key string) bool { return envName(key) == name })
}

// unknownVariables returns a note for each environment variable with the agent's prefix and the name of a section that
// sets no key. It is not an error, because the kubelet sets such variables for Services whose names start with the prefix.
func unknownVariables(environ, keys []string) (notes []string) {
	valid := make(map[string]bool)
	for _, key := range keys {
		valid[envName(key)] = true
	}
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		rest, hasPrefix := strings.CutPrefix(name, envPrefix+"_")
		section, _, hasKey := strings.Cut(strings.ToLower(rest), "_")
		_, isSection := findField(reflect.TypeFor[Config](), section)
		isService := strings.Contains(rest, "_SERVICE_") || strings.HasSuffix(rest, "_PORT") || strings.Contains(rest, "_PORT_")
		if hasPrefix && hasKey && isSection && !isService && !valid[name] {
			notes = append(notes, name+": no such key, ignored"+suggest(name, slices.Collect(maps.Keys(valid))))
		}
	}
	slices.Sort(notes)
	return notes
}

// foreignKeys maps the environment variables of NVIDIA's device plugin (cmd/nvidia-device-plugin/main.go) and of
// dcgm-exporter (pkg/cmd/app.go) to the keys with the same effect. Variables without an effect here are left out.
//
//nolint:gochecknoglobals // a table of constants
var foreignKeys = map[string]string{
	"CDI_ANNOTATION_PREFIX":            "plugin.cdi.annotationPrefix",
	"CONFIG_FILE":                      "plugin.nvidiaConfig",
	"CONTAINER_DRIVER_ROOT":            "plugin.containerDriverRoot",
	"DEVICE_ID_STRATEGY":               "plugin.deviceID",
	"DEVICE_LIST_STRATEGY":             "plugin.deviceList",
	"DRIVER_ROOT_CTR_PATH":             "plugin.containerDriverRoot",
	"MIG_STRATEGY":                     "plugin.migStrategy",
	"NVIDIA_CDI_HOOK_PATH":             "plugin.cdi.hookPath",
	"NVIDIA_CTK_PATH":                  "plugin.cdi.hookPath",
	"NVIDIA_DEV_ROOT":                  "plugin.devRoot",
	"NVIDIA_DRIVER_ROOT":               "plugin.driverRoot",
	"PASS_DEVICE_SPECS":                "plugin.passDeviceSpecs",
	"SHARED_DEVICES_ALLOCATION_POLICY": "plugin.allocationPolicy",

	"DCGM_EXPORTER_COLLECTORS":                           "metrics.fieldsFile",
	"DCGM_EXPORTER_INTERVAL":                             "source.interval",
	"DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS":         "metrics.podLabels",
	"DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID":            "metrics.podUID",
	"DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX": "metrics.podLabels",
	"DCGM_EXPORTER_LISTEN":                               "metrics.listen",
	"DCGM_EXPORTER_WEB_CONFIG_FILE":                      "metrics.webConfigFile",
	"DCGM_EXPORTER_XID_COUNT_WINDOW_SIZE":                "metrics.window",
	"DCGM_HPC_JOB_MAPPING_DIR":                           "metrics.hpcJobDir",
	"DCGM_REMOTE_HOSTENGINE_INFO":                        "source.address",
	"KUBERNETES_ENABLE_DRA":                              "metrics.claimLabels",
	"KUBERNETES_VIRTUAL_GPUS":                            "metrics.attribution",
}

// foreignVariables returns a note for each variable in foreignKeys whose key is not set. The agent does not read these
// variables, but a user who migrates may expect that it does.
func foreignVariables(environ []string, set origins) (notes []string) {
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		key, foreign := foreignKeys[name]
		if _, isSet := set[key]; !foreign || isSet || value == "" {
			continue
		}
		notes = append(notes, fmt.Sprintf("%s: ignored; set %s or %s", name, key, envName(key)))
	}
	slices.Sort(notes)
	return notes
}
