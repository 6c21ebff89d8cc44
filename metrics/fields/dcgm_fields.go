package fields

import (
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// dcgmFieldsText lists all fields of DCGM; its header describes the format. It allows every field to be selected by
// name, so that any list made for dcgm-exporter works.
//
//go:embed dcgm_fields.txt
var dcgmFieldsText string

// dcgmField is one name of a field in that list.
type dcgmField struct {
	id   health.Field
	name string
	kind string
}

// dcgmList is the parsed list.
type dcgmList struct {
	names map[string]dcgmField
	ids   map[health.Field][]string // the names of a number, the newest first
}

// dcgmFields returns the list. It parses the text on first use.
//
//nolint:gochecknoglobals // a table of constants
var dcgmFields = sync.OnceValue(func() dcgmList {
	list := dcgmList{make(map[string]dcgmField), make(map[health.Field][]string)}
	for line := range strings.Lines(dcgmFieldsText) {
		columns := strings.Fields(line)
		if strings.HasPrefix(line, "#") || len(columns) < 3 {
			continue
		}
		id, _ := strconv.Atoi(columns[0]) // a test checks the format
		list.ids[health.Field(id)] = columns[2:]
		for _, name := range columns[2:] {
			list.names[name] = dcgmField{health.Field(id), name, columns[1]}
		}
	}
	return list
})

// Reasons why a name cannot be selected.
var (
	errUnknownField = errors.New("unknown field; gpu-node-agent fields lists the common ones, DCGM's dcgm_fields.h all of them")
	errBinaryField  = errors.New("binary field; only numbers and texts can be exported")
	errRangeMarker  = errors.New("marks the end of a range of fields and has no value")
)

// unsupportedEntityError reports a field of hardware that the agent does not measure.
type unsupportedEntityError struct{ kind string }

func (e unsupportedEntityError) Error() string {
	return fmt.Sprintf("field of %s, which the agent does not measure", entityName(e.kind))
}

// lookup returns the field that a name refers to, under the name that its metric gets.
func lookup(name string) (row, error) {
	// The exact name wins. Otherwise upper case is tried, and lower case for the names of dcgm-exporter 1.
	for _, name := range []string{name, strings.ToUpper(name), strings.ToLower(name)} {
		if i := slices.IndexFunc(table, func(r row) bool { return r.name == name }); i >= 0 {
			return table[i], nil
		}
		if f, ok := dcgmFields().names[name]; ok {
			return f.row()
		}
	}
	return row{}, errUnknownField
}

// row describes a field that is only in the list, or that the table has under another name.
func (f dcgmField) row() (row, error) {
	if r, ok := rowOf(f.id); ok {
		r.name = f.name
		return r, nil
	}
	r := row{id: f.id, name: f.name, typ: TypeGauge, help: fmt.Sprintf("Field %d of DCGM.", f.id)}
	switch f.kind {
	case "text", "nvswitch-text", "cpu-text":
		r.typ = TypeLabel
		return r, nil
	case "number", "nvswitch", "nvlink", "cpu":
		return r, nil
	case "binary":
		return r, errBinaryField
	case "mark":
		return r, errRangeMarker
	}
	return r, unsupportedEntityError{f.kind}
}

// entityName returns the plural name of the hardware of a kind of fields that the agent does not measure; the kind itself if
// unknown.
func entityName(kind string) string {
	switch kind {
	case "vgpu":
		return "vGPUs"
	case "connectx":
		return "network cards"
	}
	return kind
}
