package metrics

import (
	"strconv"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

// collectComputed adds one of dcgm-exporter's DCGM_EXP_ metrics, which are not fields of DCGM. dcgm-exporter queries
// DCGM for them at every scrape; the agent computes them from the snapshot and the totals.
func (s *scrape) collectComputed(name string, family int, set labelSet) {
	add := func(v float64, more ...Label) { s.AddWith(family, v, set.labels, more...) }
	window := label("window_size_in_ms", s.window)
	d, totals := s.firstDevice(set.entity), s.totals[set.devices[0]]
	isGPU := d.Device.Kind == health.KindGPU // clock events, health checks and links belong to the whole GPU
	switch name {
	case fields.XIDErrorsCount:
		counts := s.sumXIDs(set.entity, func(v *deviceTotalsView) map[int]uint64 { return v.xidsInWindow })
		if len(counts) == 0 {
			add(0, window, label("xid", ""))
		}
		for xid, n := range counts {
			add(float64(n), window, label("xid", strconv.Itoa(xid)))
		}
	case fields.XIDErrorsTotal: // like dcgm-exporter's, it has no series before the first XID
		for xid, n := range s.sumXIDs(set.entity, func(v *deviceTotalsView) map[int]uint64 { return v.xids }) {
			add(float64(n), label("xid", strconv.Itoa(xid)))
		}
	case fields.ClockEventsCount:
		for bit, n := range totals.clocksInWindow {
			if n > 0 && isGPU {
				add(float64(n), window, label("clock_event", clockEvents[bit]))
			}
		}
	case fields.ClockEventsTotal:
		for bit, n := range totals.clocks {
			if n > 0 && isGPU {
				add(float64(n), label("clock_event", clockEvents[bit]))
			}
		}
	case fields.GPUHealthStatus:
		if isGPU && totals.healthChecked && s.Snapshot.Source.Checks.Status != health.ChecksDown {
			addHealthStatus(d.Sample.Incidents, add)
		}
	case fields.P2PStatus:
		s.addP2PStatus(d.Device.Links, add)
	}
}

// sumXIDs adds up the XID counts of an entity's devices.
func (s *scrape) sumXIDs(e *entity, counts func(*deviceTotalsView) map[int]uint64) map[int]uint64 {
	if len(e.devices) == 1 {
		return counts(&s.totals[e.devices[0]])
	}
	sum := make(map[int]uint64)
	for _, i := range e.devices {
		for xid, n := range counts(&s.totals[i]) {
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

// States of NVLink between two GPUs (dcgm_structs.h, dcgmNvLinkGpuP2PStatus_t). The snapshot contains the number of
// links but no reason for their absence, so the other states do not occur.
const (
	p2pOK      = 0.0
	p2pUnknown = 6.0
)

// addP2PStatus adds a series for each listed GPU that a GPU has links with.
func (s *scrape) addP2PStatus(links []health.Link, add func(v float64, more ...Label)) {
	for _, l := range links {
		if n, exists := s.entityByKey[entityKey{uuid: l.Peer}]; exists {
			status, text := p2pUnknown, "Unknown"
			if l.NVLinks > 0 {
				status, text = p2pOK, "OK"
			}
			peer := s.firstDevice(&s.entities[n]) // the GPU itself
			add(status, label("peer_gpu", peer.Device.IndexText()), label("link_status", text))
		}
	}
}

// addHealthStatus adds a series for each of DCGM's health systems: 0, or one for each incident with 10 (warning) or
// 20 (failure). dcgm-exporter exports only the last incident.
func addHealthStatus(incidents []health.Incident, add func(v float64, more ...Label)) {
	systems := []string{"PCIE", "NVLINK", "PMU", "MCU", "MEM", "SM", "INFOROM", "THERMAL", "POWER", "DRIVER", "ALL"}
	for _, system := range systems {
		codes := make(map[string]float64)
		for _, in := range incidents {
			if healthWatch(in.System) != system {
				continue
			}
			v := 10.0 // DCGM_HEALTH_RESULT_WARN
			if in.Severity == health.SeverityFail {
				v = 20
			}
			code := catalog.LookupIncident(in.Code).Name
			codes[code] = max(codes[code], v)
		}
		if len(codes) == 0 {
			codes[""] = 0
		}
		for code, v := range codes {
			add(v, label("health_watch", system), label("health_error_code", code))
		}
	}
}

// healthWatch returns dcgm-exporter's name of one of DCGM's health systems.
func healthWatch(system string) string {
	switch system {
	case "memory":
		return "MEM"
	case "xid":
		return "ALL"
	}
	return strings.ToUpper(system)
}
