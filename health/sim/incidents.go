package sim

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// anIncident is the one in examples.
const anIncident = "DCGM_FR_NVLINK_DOWN"

// The words of Event.Severity.
const (
	severityFail = "fail"
	severityWarn = "warn"
	severityNone = "none" // DCGM does not find it any more
)

func severityWords() []string { return []string{severityFail, severityWarn, severityNone} }

// severity is what the event says of its incident.
func (e Event) severity() string {
	if e.Severity == nil {
		return severityFail
	}
	return *e.Severity
}

func (e Event) incidentFaults() []fault {
	var out []fault
	if e.Incident != nil {
		if _, known := health.IncidentCode(*e.Incident); !known {
			out = append(out, fault{"incident", fmt.Sprintf("%s is no incident of DCGM's; use a name such as %s", quote(*e.Incident), anIncident)})
		}
	}
	switch {
	case e.Severity == nil:
	case e.Incident == nil:
		out = append(out, fault{"severity", "is for incident; say which"})
	case !slices.Contains(severityWords(), *e.Severity):
		out = append(out, fault{"severity", fmt.Sprintf("%q is not known; use one of %s", *e.Severity, strings.Join(severityWords(), ", "))})
	}
	return out
}

// incidents are what DCGM's own checks say of a GPU: words of Event.Severity, by code. It is not modified.
type incidents map[int]string

// with is in with another word for one of them, which has been validated.
func (in incidents) with(name, severity string) incidents {
	code, _ := health.IncidentCode(name)
	return incidents{code: severity}.over(in)
}

// over lays in over what is below it.
func (in incidents) over(below incidents) incidents {
	if len(in) == 0 {
		return below
	}
	all := maps.Clone(below)
	if all == nil {
		all = make(incidents, len(in))
	}
	maps.Copy(all, in)
	return all
}

// standing returns those that stand, by code.
func (in incidents) standing() []health.Incident {
	var out []health.Incident
	for _, code := range slices.Sorted(maps.Keys(in)) {
		name := health.LookupIncident(code).Name
		i := health.Incident{System: systemOf(name), Code: code, Message: "simulated: " + name}
		switch in[code] {
		case severityNone:
			continue
		case severityFail:
			i.Severity = health.SeverityFail
		}
		out = append(out, i)
	}
	return out
}

// systemOf is which of DCGM's health systems finds an incident (dcgm_structs.h: dcgmHealthSystems_t), "" for one that only
// dcgmi diag finds.
func systemOf(name string) string {
	for _, s := range []struct{ system, names string }{
		{"pcie", "PCI_REPLAY_RATE"},
		{"nvlink", "NVLINK FABRIC IMEX"},
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

// xidIncident is how DCGM's health check files an XID.
type xidIncident struct {
	system   string
	severity health.Severity
	code     int // dcgm_errors.h
}

// The incidents of XIDs that DCGM has no name of its own for, and the system of those that are no system's.
const (
	xidSystem = "xid"
	xidError  = 101 // DCGM_FR_XID_ERROR
)

// xidIncidents are the XIDs that DCGM's health check knows (DCGM 4.6, DcgmHealthWatch; its tests, TestHealthMonitor).
// Those of no system concern the whole GPU.
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
	93:  {"inforom", health.SeverityWarn, 9}, // CORRUPT_INFOROM; of Volta alone
}

// incidents are what DCGM's health check makes of the XIDs that the GPU has reported, by XID. They stand as long as the
// agent runs: only another engine takes them back. The message names the XID as DCGM's does.
func (g *gpu) incidents() []health.Incident {
	var out []health.Incident
	for _, xid := range g.noted {
		x, known := xidIncidents[xid]
		if !known || x.system == "inforom" && !g.model.retires { // Volta is the one that retires pages
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
