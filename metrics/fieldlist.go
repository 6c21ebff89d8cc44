package metrics

import (
	"cmp"
	"strings"
	"text/tabwriter"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// What is known of a field's support by the source here.
const (
	SupportedYes     = "yes"     // some GPU has it
	SupportedNo      = "no"      // none has
	SupportedUnknown = "unknown" // the source could not be asked
)

// FieldInfo is what there is to know of a field of the table.
type FieldInfo struct {
	ID        health.Field `json:"id,omitempty"` // DCGM's number; absent: made by the agent
	Name      string       `json:"name"`
	Renamed   string       `json:"since46,omitempty"` // DCGM 4.6's name
	Type      string       `json:"type"`
	Unit      string       `json:"unit,omitempty"`
	Set       string       `json:"set,omitempty"`
	Help      string       `json:"help"`
	Supported string       `json:"supported"` // SupportedYes, SupportedNo, SupportedUnknown
}

// FieldList returns the fields of the table. Has tells which ones the source here has; nil if it could not be asked. The
// rest of DCGM's fields, which metrics.fields may name too, is not here: five hundred rows of which we know neither
// unit nor meaning would hide those that people look for.
func FieldList(has map[health.Field]bool) []FieldInfo {
	list := make([]FieldInfo, len(fieldTable))
	for i, k := range fieldTable {
		supported := SupportedUnknown
		switch {
		case has[k.id], has != nil && k.id == 0: // what we make needs nothing else
			supported = SupportedYes
		case has != nil:
			supported = SupportedNo
		}
		list[i] = FieldInfo{k.id, k.name, k.renamed, k.typ, k.unit, k.set, k.help, supported}
	}
	return list
}

// FieldIDs returns the number of every field of the table that is DCGM's.
func FieldIDs() []health.Field {
	var ids []health.Field
	for _, k := range fieldTable {
		if k.id != 0 {
			ids = append(ids, k.id)
		}
	}
	return ids
}

// HasFields tells which of them are in a reading of all. The last XID is one that a GPU without
// an XID has as well.
func HasFields(r *health.Reading) map[health.Field]bool {
	has := map[health.Field]bool{health.FieldXID: true}
	for _, s := range r.Samples {
		for id := range s.Values {
			has[id] = true
		}
	}
	for _, d := range r.Devices {
		for _, k := range fieldTable {
			if k.typ == TypeLabel && textOf(k.id, d, r.Versions) != "" {
				has[k.id] = true
			}
		}
	}
	return has
}

// FieldTable is the list for people.
func FieldTable(list []FieldInfo) string {
	rows := []string{"NAME\tTYPE\tUNIT\tSET\tSUPPORTED\tSINCE DCGM 4.6\tHELP\n"}
	for _, f := range list {
		cells := []string{f.Name, f.Type, cmp.Or(f.Unit, "-"), cmp.Or(f.Set, "-"), f.Supported, cmp.Or(f.Renamed, "-"), f.Help}
		rows = append(rows, strings.Join(cells, "\t")+"\n")
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	_, _ = w.Write([]byte(strings.Join(rows, ""))) // into memory
	_ = w.Flush()
	return b.String()
}
