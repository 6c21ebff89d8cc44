package fields

import "github.com/gpu-node-agent/gpu-node-agent/health"

// Whether the source provides a field.
const (
	SupportedYes     = "yes"     // for at least one GPU
	SupportedDerived = "derived" // from the field that it replaces
	SupportedNo      = "no"      // for no GPU
	SupportedUnknown = "unknown" // the source did not answer
)

// Info describes a field of the table.
type Info struct {
	ID   health.Field `json:"id,omitempty"` // DCGM's number; absent if the agent computes the metric
	Name string       `json:"name"`
	// dcgm-exporter 4.9's name for the field, or for the one in base units that replaces it; "" if it has the same
	Name49    string `json:"name49,omitempty"`
	Inferred  bool   `json:"inferred,omitempty"` // whether the name in 4.9 is only inferred
	Replaces  string `json:"replaces,omitempty"` // the name of the field that this one replaces in 4.9
	Since     string `json:"since,omitempty"`    // the DCGM that introduced a field in base units; "" for the others
	Type      string `json:"type"`
	Unit      string `json:"unit,omitempty"`
	Set       string `json:"set,omitempty"`
	Help      string `json:"help"`
	Supported string `json:"supported"` // SupportedYes, SupportedDerived, SupportedNo or SupportedUnknown
}

// List returns the fields of the table. The argument holds the fields that the source provides; nil means unknown.
//
// List omits the rest of DCGM's fields, which metrics.fields accepts too: they are five hundred, without unit or help.
func List(supported map[health.Field]bool) []Info {
	list := make([]Info, len(table))
	for i, r := range table {
		info := Info{
			ID: r.id, Name: r.name, Name49: r.renamed, Inferred: r.since49 == inferred, Since: health.AddedIn(r.id),
			Type: r.typ, Unit: r.unit, Set: r.set, Help: r.help, Supported: SupportedUnknown,
		}
		if newer, ok := rowOf(newerField(r.id)); ok && newer.id != r.id {
			info.Name49, info.Inferred = newer.name, newer.since49 == inferred
		}
		older := olderField(r.id)
		if older != r.id {
			info.Replaces = nameIn(r.id, Names48)
		}
		_, convertible := health.DerivationOf(r.id)
		switch {
		case supported[r.id], supported != nil && r.id == 0: // the agent computes these for every source
			info.Supported = SupportedYes
		case convertible && supported[older]:
			info.Supported = SupportedDerived
		case supported != nil:
			info.Supported = SupportedNo
		}
		list[i] = info
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
