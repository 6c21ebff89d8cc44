package metrics

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// collectMade shows one of dcgm-exporter's series that are no field of DCGM's. They are made of what is
// known anyway: dcgm-exporter asks DCGM for them at every scrape.
func (s *scrape) collectMade(name string, d *health.DeviceState, t *Totals, show func(v float64, labels ...string)) {
	window := strconv.FormatInt(s.cfg.Window.Milliseconds(), 10)
	isGPU := d.Device.Kind == health.KindGPU
	switch name {
	case expXIDs:
		counts := t.device(d.Device.ID).xids
		if len(counts) == 0 {
			show(0, window, "")
		}
		for _, xid := range slices.Sorted(maps.Keys(counts)) {
			show(float64(counts[xid]), window, strconv.Itoa(xid))
		}
	case expClocks:
		if !isGPU {
			return // clocks are the whole GPU's
		}
		for bit, n := range t.device(d.Device.ID).clocks {
			if n > 0 {
				show(float64(n), window, clockEvents[bit])
			}
		}
	case expHealth:
		if isGPU && t.device(d.Device.ID).checked {
			showHealth(d.Sample.Incidents, show)
		}
	case expP2P:
		for _, l := range d.Device.Links {
			if peer := s.indexOf(l.Peer); peer != "" {
				status, word := p2pUnknown, "Unknown"
				if l.NVLinks > 0 {
					status, word = p2pOK, "OK"
				}
				show(status, peer, word)
			}
		}
	}
}

// clockEvents are dcgm-exporter's names of the bits of FieldClocksEvents (nvml.h, nvmlClocksEventReasons).
//
//nolint:gochecknoglobals // a table of constants
var clockEvents = [...]string{
	"gpu_idle", "clocks_setting", "power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal", "hw_power_brake",
	"display_clocks",
}

// Of the states that NVLink can be in between two GPUs (dcgm_structs.h: dcgmNvLinkGpuP2PStatus_t), we know
// whether there are links. Why there are none we do not know.
const (
	p2pOK      = 0.0
	p2pUnknown = 6.0
)

// indexOf is the index of a GPU, "" if it is not there.
func (s *scrape) indexOf(id health.DeviceID) string {
	for _, d := range s.snapshot.Devices {
		if d.Device.ID == id {
			return strconv.Itoa(d.Device.Index)
		}
	}
	return ""
}

// showHealth shows each of DCGM's health systems: 0, or 10 or 20 for each thing that is wrong. dcgm-exporter
// shows only the last of those.
func showHealth(incidents []health.Incident, show func(v float64, labels ...string)) {
	systems := []string{"PCIE", "NVLINK", "PMU", "MCU", "MEM", "SM", "INFOROM", "THERMAL", "POWER", "DRIVER", "ALL"}
	for _, system := range systems {
		codes := make(map[string]float64)
		for _, in := range incidents {
			if watchOf(in.System) != system {
				continue
			}
			v := 10.0 // DCGM_HEALTH_RESULT_WARN
			if in.Severity == health.SeverityFail {
				v = 20
			}
			code := health.LookupIncident(in.Code).Name
			codes[code] = max(codes[code], v)
		}
		if len(codes) == 0 {
			codes[""] = 0
		}
		for _, code := range slices.Sorted(maps.Keys(codes)) {
			show(codes[code], system, code)
		}
	}
}

// watchOf is dcgm-exporter's name of one of DCGM's systems.
func watchOf(system string) string {
	switch system {
	case "memory":
		return "MEM"
	case "xid":
		return "ALL"
	}
	return strings.ToUpper(system)
}
