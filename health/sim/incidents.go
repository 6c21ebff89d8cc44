package sim

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

const exampleIncident = "DCGM_FR_NVLINK_DOWN"

// Severities, the values of Event.Severity.
const (
	severityFail = "fail"
	severityWarn = "warn"
	severityNone = "none" // the incident has ended
)

// incidentSet holds the severities of incidents that events have set on a GPU, by code. It is immutable.
type incidentSet map[int]string

// with returns the set with a valid incident added or changed.
func (s incidentSet) with(name, severity string) incidentSet {
	code, _ := health.IncidentCode(name)
	return incidentSet{code: severity}.over(s)
}

// over returns s with the incidents of below that s does not have.
func (s incidentSet) over(below incidentSet) incidentSet {
	if len(s) == 0 {
		return below
	}
	all := maps.Clone(below)
	if all == nil {
		all = make(incidentSet, len(s))
	}
	maps.Copy(all, s)
	return all
}

// active returns the incidents that have not ended, by code.
func (s incidentSet) active() []health.Incident {
	var out []health.Incident
	for _, code := range slices.Sorted(maps.Keys(s)) {
		name := health.LookupIncident(code).Name
		i := health.Incident{System: systemOf(name), Code: code, Message: "simulated: " + name}
		switch s[code] {
		case severityNone:
			continue
		case severityFail:
			i.Severity = health.SeverityFail
		}
		out = append(out, i)
	}
	return out
}

// systemOf returns the health system of DCGM that finds an incident (dcgm_structs.h: dcgmHealthSystems_t), or "" if only
// dcgmi diag finds it.
func systemOf(name string) string {
	for _, s := range []struct{ system, names string }{
		{"pcie", "PCI_REPLAY_RATE"},
		{imexSystem, "IMEX"},
		{"nvlink", "NVLINK FABRIC"},
		{"memory", "DBE PAGE ROW_REMAP FAULTY_MEMORY"},
		{"inforom", "INFOROM"},
		{"thermal", "CLOCKS_EVENT_THERMAL"},
		{"power", "CLOCKS_EVENT_POWER POWER_UNREADABLE"},
		{"driver", "GPU_RECOVERY"},
		{xidSystem, "XID CONTAINED_ERROR FALLEN_OFF_BUS"},
	} {
		for part := range strings.FieldsSeq(s.names) {
			if strings.Contains(name, part) {
				return s.system
			}
		}
	}
	return ""
}

// imexSystem is the system whose incidents name no GPU.
const imexSystem = "imex"

// xidIncident is the incident that DCGM's health check makes of an XID.
type xidIncident struct {
	system   string
	severity health.Severity
	code     int // dcgm_errors.h
}

// The code of XIDs without an incident of their own, and the system of XIDs that concern the whole GPU.
const (
	xidSystem = "xid"
	xidError  = 101 // DCGM_FR_XID_ERROR
)

// xidIncidents lists the XIDs that DCGM's health check reports (DCGM 4.6, DcgmHealthWatch; its tests, TestHealthMonitor).
//
//nolint:gochecknoglobals // a table of constants
var xidIncidents = map[int]xidIncident{
	48:  {xidSystem, health.SeverityFail, xidError},
	74:  {xidSystem, health.SeverityFail, xidError},
	79:  {xidSystem, health.SeverityFail, 120}, // FALLEN_OFF_BUS
	94:  {xidSystem, health.SeverityWarn, 131}, // CONTAINED_ERROR
	95:  {xidSystem, health.SeverityFail, 81},  // UNCONTAINED_ERROR
	119: {xidSystem, health.SeverityFail, xidError},
	120: {xidSystem, health.SeverityFail, xidError},
	140: {xidSystem, health.SeverityFail, xidError},

	31:  {"memory", health.SeverityWarn, xidError},
	32:  {"memory", health.SeverityWarn, xidError},
	43:  {"memory", health.SeverityWarn, xidError},
	63:  {"memory", health.SeverityWarn, 6},  // PENDING_PAGE_RETIREMENTS
	64:  {"memory", health.SeverityFail, 80}, // ROW_REMAP_FAILURE
	38:  {"pcie", health.SeverityWarn, xidError},
	39:  {"pcie", health.SeverityWarn, xidError},
	42:  {"pcie", health.SeverityWarn, xidError},
	60:  {"thermal", health.SeverityWarn, xidError},
	61:  {"thermal", health.SeverityWarn, xidError},
	62:  {"thermal", health.SeverityWarn, xidError},
	54:  {"power", health.SeverityWarn, xidError},
	56:  {"power", health.SeverityWarn, xidError},
	57:  {"power", health.SeverityWarn, xidError},
	58:  {"power", health.SeverityWarn, xidError},
	78:  {"power", health.SeverityWarn, xidError},
	67:  {"nvlink", health.SeverityWarn, xidError},
	73:  {"nvlink", health.SeverityWarn, xidError},
	121: {"nvlink", health.SeverityWarn, xidError},
	137: {"nvlink", health.SeverityWarn, xidError},
	93:  {"inforom", health.SeverityWarn, 9}, // CORRUPT_INFOROM; on Volta only
}

// xidIncidents returns the incidents that DCGM's health check makes of the GPU's XIDs, by XID. They last as long as the
// agent runs: only a restart of the engine clears them. The message names the XID as DCGM's does.
func (g *gpu) xidIncidents() []health.Incident {
	var out []health.Incident
	for _, xid := range g.reported {
		x, ok := xidIncidents[xid]
		if !ok || x.system == "inforom" && !g.model.retires { // only Volta retires pages
			continue
		}
		message := fmt.Sprintf("simulated: %s, XID %d", health.LookupIncident(x.code).Name, xid)
		if x.system != xidSystem {
			message = fmt.Sprintf("simulated: %s (triggered by XID %d: %s)", health.LookupIncident(x.code).Name, xid, health.LookupXID(xid).Name)
		}
		out = append(out, health.Incident{System: x.system, Code: x.code, Severity: x.severity, Message: message})
	}
	return out
}
