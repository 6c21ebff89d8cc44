package fields

import (
	"cmp"
	"slices"
	"strings"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// The generations of dcgm-exporter's names, the values of metrics.names.
const (
	Names48 = "dcgm-exporter-4.8" // to 4.8: DCGM's older names, in MHz, mJ, percent and MiB
	Names49 = "dcgm-exporter-4.9" // from 4.9: DCGM 4.7's names, in base units
)

// Generations returns the generations of names.
func Generations() []string { return []string{Names48, Names49} }

// unconvertible lists the fields in base units that do not follow exactly from the field that they replace: the old rates are in
// KiB / 1000, the new ones in KiB x 1024. health.DerivationOf has the others.
//
//nolint:gochecknoglobals // a table of constants
var unconvertible = map[health.Field]health.Field{
	1629: 287, // C2C
	1630: 440, 1631: 441, 1632: 442, 1633: 443, 1634: 444, 1635: 445, 1636: 475, 1637: 476, 1638: 477, 1639: 478, 1640: 479, 1641: 480,
	1642: 446, 1643: 447, 1644: 448, 1645: 494, 1646: 495, 1647: 496, // NVLinks 0 to 17
	1648: health.FieldNVLinkBandwidth,
}

// olderField returns the field that a field in base units replaces, otherwise the field itself.
func olderField(id health.Field) health.Field {
	if d, ok := health.DerivationOf(id); ok {
		return d.From
	}
	return cmp.Or(unconvertible[id], id)
}

// newerField returns the field in base units that replaces a field, otherwise the field itself.
func newerField(id health.Field) health.Field { return cmp.Or(newerFields()[id], id) }

//nolint:gochecknoglobals // a table of constants
var newerFields = sync.OnceValue(func() map[health.Field]health.Field {
	newer := make(map[health.Field]health.Field)
	for id := range dcgmFields().ids {
		if older := olderField(id); older != id {
			newer[older] = id
		}
	}
	return newer
})

// nameIn returns the name of a row in a generation, "" if the generation has another field instead.
func (r row) nameIn(generation string) string {
	switch {
	case generation == Names48 && health.AddedIn(r.id) == "":
		return r.name
	case generation == Names49 && newerField(r.id) == r.id:
		return cmp.Or(r.renamed, r.name)
	}
	return ""
}

// nameIn returns a field's name in a generation. The field of that name may have another unit.
func nameIn(id health.Field, generation string) string {
	if generation == Names48 {
		id = olderField(id)
	} else {
		id = newerField(id)
	}
	if r, ok := rowOf(id); ok {
		if name := r.nameIn(generation); name != "" {
			return name
		}
	}
	names := slices.DeleteFunc(slices.Clone(dcgmFields().ids[id]), func(name string) bool { return strings.HasPrefix(name, "dcgm_") })
	if generation == Names48 {
		return names[len(names)-1]
	}
	return names[0]
}

// rowOf returns the row of a field.
func rowOf(id health.Field) (row, bool) {
	if i := slices.IndexFunc(table, func(r row) bool { return r.id == id && id != 0 }); i >= 0 {
		return table[i], true
	}
	return row{}, false
}
