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
		{"xid", "XID CONTAINED_ERROR FALLEN_OFF_BUS"},
	} {
		for part := range strings.FieldsSeq(s.names) {
			if strings.Contains(name, part) {
				return s.system
			}
		}
	}
	return ""
}
