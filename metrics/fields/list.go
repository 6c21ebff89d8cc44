package fields

import "github.com/gpu-node-agent/gpu-node-agent/health"

// Whether the source provides a field.
const (
	SupportedYes     = "yes"     // for at least one GPU
	SupportedNo      = "no"      // for no GPU
	SupportedUnknown = "unknown" // the source did not answer
)

// Info describes a field of the table.
type Info struct {
	ID        health.Field `json:"id,omitempty"` // DCGM's number; absent if the agent computes the metric
	Name      string       `json:"name"`
	Renamed   string       `json:"since46,omitempty"` // the name since DCGM 4.6
	Type      string       `json:"type"`
	Unit      string       `json:"unit,omitempty"`
	Set       string       `json:"set,omitempty"`
	Help      string       `json:"help"`
	Supported string       `json:"supported"` // SupportedYes, SupportedNo or SupportedUnknown
}

// List returns the fields of the table. The argument holds the fields that the source provides; nil means unknown.
//
// List omits the rest of DCGM's fields, which metrics.fields accepts too: they are five hundred, without unit or help.
func List(supported map[health.Field]bool) []Info {
	list := make([]Info, len(table))
	for i, r := range table {
		status := SupportedUnknown
		switch {
		case supported[r.id], supported != nil && r.id == 0: // the agent computes these for every source
			status = SupportedYes
		case supported != nil:
			status = SupportedNo
		}
		list[i] = Info{r.id, r.name, r.renamed, r.typ, r.unit, r.set, r.help, status}
	}
	return list
}

// IDs returns DCGM's number of every field of the table.
func IDs() []health.Field {
	var ids []health.Field
	for _, r := range table {
		if r.id != 0 {
			ids = append(ids, r.id)
		}
	}
	return ids
}

// Supported returns the fields that occur in a reading of all fields. The last XID counts as supported even if no GPU
// has reported one.
func Supported(r *health.Reading) map[health.Field]bool {
	supported := map[health.Field]bool{health.FieldXID: true}
	for _, s := range r.Samples {
		for id := range s.Values {
			supported[id] = true
		}
	}
	for _, d := range r.Devices {
		for _, f := range table {
			if f.typ == TypeLabel && Text(f.id, d, r.Versions) != "" {
				supported[f.id] = true
			}
		}
	}
	return supported
}
