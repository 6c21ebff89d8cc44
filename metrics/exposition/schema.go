package exposition

import (
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
)

// Family describes a metric: what all series of one name have in common.
type Family struct {
	Name string
	Help string
	Type dto.MetricType
	Unit string // appears in OpenMetrics only; "" for none
}

// Schema lists the families of a page. A family's number is its index. A schema is immutable.
type Schema struct {
	families []Family
	byName   []int // numbers, ordered by name
}

// NewSchema returns a schema of families with distinct names.
func NewSchema(families []Family) *Schema {
	s := &Schema{families: slices.Clone(families)}
	for i := range s.families {
		s.families[i].Help = strings.ToValidUTF8(s.families[i].Help, "�")
		s.byName = append(s.byName, i)
	}
	slices.SortFunc(s.byName, func(a, b int) int { return strings.Compare(s.families[a].Name, s.families[b].Name) })
	return s
}
