package config

import (
	"fmt"
	"slices"
	"strings"
)

// othersVariables are the variables by which NVIDIA's device plugin (cmd/nvidia-device-plugin/main.go) and dcgm-exporter
// (pkg/cmd/app.go) are configured, with the keys that say the same here. Those of which nothing is lost are left out.
//
//nolint:gochecknoglobals // a table of constants
var othersVariables = map[string]string{
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
	"KUBERNETES_VIRTUAL_GPUS":                            "metrics.attribution",
}

// othersEnv returns a note for each variable that is one of NVIDIA's programs', while the key that says the same is not
// set: whoever comes from there may think that it is read.
func othersEnv(environ []string, set origins) (notes []string) {
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		key, known := othersVariables[name]
		if _, done := set[key]; !known || done || value == "" {
			continue
		}
		notes = append(notes, fmt.Sprintf("%s: is not read here; use %s or %s", name, key, envNames(key)[0]))
	}
	slices.Sort(notes)
	return notes
}
