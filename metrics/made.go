package metrics

import (
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// collectMade shows one of dcgm-exporter's series that are no field of DCGM's. They are made of what is
// known anyway: dcgm-exporter asks DCGM for them at every scrape.
func (s *scrape) collectMade(f *fieldFamily, x showing) {
	show := func(v float64, more ...Label) { s.addWith(f.number, v, x.labels, more...) }
	window := Label{"window_size_in_ms", s.window}
	d, view := s.first(x.spot), s.views[x.devices[0]]
	isGPU := d.Device.Kind == health.KindGPU // clocks, checks and links are the whole GPU's
	switch f.Name {
	case expXIDs:
		counts := s.xidsOf(x.spot, func(v *deviceView) map[int]uint64 { return v.xids })
		if len(counts) == 0 {
			show(0, window, Label{"xid", ""})
		}
		for xid, n := range counts {
			show(float64(n), window, Label{"xid", strconv.Itoa(xid)})
		}
	case expXIDTotal: // like dcgm-exporter's it has no series before the first, and so has the next
		for xid, n := range s.xidsOf(x.spot, func(v *deviceView) map[int]uint64 { return v.all.byXID() }) {
			show(float64(n), Label{"xid", strconv.Itoa(xid)})
		}
	case expClockTotal:
		for bit, n := range view.all.begun() {
			if n > 0 && isGPU {
				show(float64(n), Label{"clock_event", clockEvents[bit]})
			}
		}
	case expClocks:
		for bit, n := range view.clocks {
			if n > 0 && isGPU {
				show(float64(n), window, Label{"clock_event", clockEvents[bit]})
			}
		}
	case expHealth:
		if isGPU && view.checked {
			showHealth(d.Sample.Incidents, show)
		}
	case expP2P:
		for _, l := range d.Device.Links {
			// A GPU is the first in its place.
			if n, known := s.at[place{uuid: l.Peer}]; known {
				status, word := p2pUnknown, "Unknown"
				if l.NVLinks > 0 {
					status, word = p2pOK, "OK"
				}
				show(status, Label{"peer_gpu", strconv.Itoa(s.first(&s.spots[n]).Device.Index)}, Label{"link_status", word})
			}
		}
	}
}

// xidsOf adds up what the totals of the devices in a place have of XIDs.
func (s *scrape) xidsOf(x *spot, of func(*deviceView) map[int]uint64) map[int]uint64 {
	if len(x.devices) == 1 {
		return of(&s.views[x.devices[0]])
	}
	sum := make(map[int]uint64)
	for _, i := range x.devices {
		for xid, n := range of(&s.views[i]) {
			sum[xid] += n
		}
	}
	return sum
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

// showHealth shows each of DCGM's health systems: 0, or 10 or 20 for each thing that is wrong. dcgm-exporter
// shows only the last of those.
func showHealth(incidents []health.Incident, show func(v float64, more ...Label)) {
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
		for code, v := range codes {
			show(v, Label{"health_watch", system}, Label{"health_error_code", code})
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
