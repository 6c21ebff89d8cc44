package sim

import (
	"fmt"
	"maps"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// firmware holds the versions of a board's firmware, as nvidia-smi -q prints them.
type firmware struct {
	brand    string
	vbios    string
	image    string // inforom version
	oem, ecc string // objects of the inforom; empty: missing
}

// The driver is from the production branch of 2025. NVML's version starts with its API's.
const (
	driverVersion = "580.95.05"
	nvmlVersion   = "13." + driverVersion
)

// texts returns the text fields of a GPU, by DCGM's numbers (dcgm_fields.h). Absent fields are blank in DCGM: the inforom
// of these boards has no power object.
func (m model) texts(id health.DeviceID) map[health.Field]string {
	all := map[health.Field]string{
		2:  nvmlVersion,
		51: m.firmware.brand,
		53: fmt.Sprintf("165%010d", seedOf(id)%1e10), // thirteen digits
		56: m.firmware.oem,
		80: m.firmware.ecc,
		82: m.firmware.image,
		85: m.firmware.vbios,
	}
	maps.DeleteFunc(all, func(_ health.Field, text string) bool { return text == "" })
	return all
}
