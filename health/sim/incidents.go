package sim

import (
	"maps"
	"slices"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/catalog"
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
	code, _ := catalog.IncidentCode(name)
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
		info := catalog.LookupIncident(code)
		i := health.Incident{System: info.System, Code: code, Message: "simulated: " + info.Name}
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

// imexSystem is the system whose incidents name no GPU.
const imexSystem = "imex"
