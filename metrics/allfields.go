package metrics

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

// allFields is the list of DCGM's fields; it says itself what stands in it. fieldTable has those that people ask for,
// with a help that is worth reading; any other can be had by its name, so that a list made for dcgm-exporter works.
//
//go:embed allfields.txt
var allFields string

// namedField is a field of that list.
type namedField struct {
	id   health.Field
	name string // as the list has it
	kind string
}

// namedFields are those of the list by name. It is read when somebody asks for a name that the table lacks.
//
//nolint:gochecknoglobals // a table of constants
var namedFields = sync.OnceValue(func() map[string]namedField {
	all := make(map[string]namedField)
	for line := range strings.Lines(allFields) {
		words := strings.Fields(line)
		if strings.HasPrefix(line, "#") || len(words) < 3 {
			continue
		}
		id, _ := strconv.Atoi(words[0]) // a test reads them all
		for _, name := range words[2:] {
			all[name] = namedField{health.Field(id), name, words[1]}
		}
	}
	return all
})

// lookupField finds what a name means: a row with the name that its series has. The error says what is wrong with the
// name.
func lookupField(name string) (knownField, error) {
	// As it is written, then in the case that all of them have, but for dcgm-exporter 1's.
	for _, name := range []string{name, strings.ToUpper(name), strings.ToLower(name)} {
		if i := slices.IndexFunc(fieldTable, func(k knownField) bool { return k.name == name }); i >= 0 {
			return fieldTable[i], nil
		}
		if n, ok := namedFields()[name]; ok {
			return n.row()
		}
	}
	return knownField{}, errors.New("not a known field; gpu-node-agent fields lists the usual ones, dcgm_fields.h of DCGM all")
}

// row returns what there is to know of a field that is only in the list, or is in the table under another name.
func (n namedField) row() (knownField, error) {
	if i := slices.IndexFunc(fieldTable, func(k knownField) bool { return k.id == n.id && n.id != 0 }); i >= 0 {
		k := fieldTable[i]
		k.name = n.name
		return k, nil
	}
	k := knownField{id: n.id, name: n.name, typ: TypeGauge, help: fmt.Sprintf("Field %d of DCGM.", n.id)}
	switch n.kind {
	case "number":
		return k, nil
	case "text":
		k.typ = TypeLabel
		return k, nil
	case "binary":
		return k, errors.New("is neither a number nor a text")
	case "mark":
		return k, errors.New("is no field but the end of a range of them")
	}
	return k, fmt.Errorf("is a field of %s, which this agent does not watch", owners(n.kind))
}

// owners names what a field is of that is not of GPUs.
func owners(kind string) string {
	switch kind {
	case "nvswitch":
		return "NVSwitches"
	case "nvlink":
		return "single NVLinks"
	case "vgpu":
		return "vGPUs"
	case "cpu":
		return "CPUs"
	case "connectx":
		return "network cards"
	}
	return kind
}
