package sim

import (
	"fmt"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// firmware holds the versions of a board's firmware, as nvidia-smi -q prints them.
type firmware struct {
	brand    string
	vbios    string
	image    string // inforom version
	oem, ecc string // objects of the inforom; empty: missing
}

func (m model) firmware() firmware {
	switch m.name {
	case h100().name:
		return firmware{"NVIDIA", "96.00.99.00.01", "G520.0200.00.05", "2.1", "7.16"}
	case a100().name:
		return firmware{"NVIDIA", "92.00.A0.00.05", "G506.0210.00.04", "2.0", "6.16"}
	case v100().name:
		return firmware{"Tesla", "88.00.80.00.01", "G503.0204.00.02", "1.1", "5.0"}
	case l4().name:
		return firmware{"NVIDIA", "95.04.29.00.06", "G193.0200.00.01", "2.1", "6.16"}
	}
	return firmware{}
}

// The driver is from the production branch of 2025. NVML's version starts with that of its API.
const (
	driverVersion = "580.95.05"
	nvmlVersion   = "13." + driverVersion
)

// texts returns the text fields of a GPU, by DCGM's numbers (dcgm_fields.h). Absent fields are blank in DCGM: the inforom
// of these boards has no power object.
func (m model) texts(id health.DeviceID) map[health.Field]string {
	f := m.firmware()
	all := map[health.Field]string{
		2:  nvmlVersion,
		51: f.brand,
		53: fmt.Sprintf("165%010d", seedOf(id)%1e10), // thirteen digits
		56: f.oem,
		80: f.ecc,
		82: f.image,
		85: f.vbios,
	}
	for field, text := range all {
		if text == "" {
			delete(all, field)
		}
	}
	return all
}
