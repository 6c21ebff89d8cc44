// Package fields selects the fields of DCGM that the agent measures and exports.
package fields

import (
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// Spec is an entry of metrics.fields: the name of a field or a set, and optionally another type or help.
type Spec struct {
	Name string `yaml:"name"`
	Type string `yaml:"type,omitempty"`
	Help string `yaml:"help,omitempty"`
}

// MarshalYAML writes an entry that has only a name as a string.
func (s Spec) MarshalYAML() (any, error) {
	if s.Type == "" && s.Help == "" {
		return s.Name, nil
	}
	type plain Spec
	return plain(s), nil
}

// Field is a selected field.
type Field struct {
	ID   health.Field // 0: computed by the agent
	Name string
	Type string
	Help string

	older   health.Derivation // from the field that it replaces; From is 0 if there is none
	derived bool              // the field that it replaces is selected too, so this one is not measured
}

// Value returns the field's value, given the values of a device. If DCGM lacks the field, or the field that it replaces is selected
// too, the value follows from that one: then the two agree in every scrape.
func (f *Field) Value(measured map[health.Field]float64) (v float64, ok bool) {
	v, ok = measured[f.ID]
	if f.older.From == 0 || ok && !f.derived {
		return v, ok
	}
	if older, ok := measured[f.older.From]; ok {
		return f.older.Apply(older), true
	}
	return v, ok
}

// Selection holds the selected fields.
type Selection struct {
	Fields  []Field  // exported as metrics; names are unique
	Labels  []Field  // exported as labels of these metrics
	Unknown []string // entries that select nothing, each with the reason
}

// IDs returns the fields that the source must measure. The utilization of the GPU and its video engines are always some: idle time depends
// on them.
func (s Selection) IDs() []health.Field {
	ids := []health.Field{health.FieldGPUUtil, health.FieldEncUtil, health.FieldDecUtil}
	for _, f := range slices.Concat(s.Fields, s.Labels) {
		if !slices.Contains(ids, f.ID) && f.ID != 0 && !f.derived && !alwaysProvided(f.ID) {
			ids = append(ids, f.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// Requirements returns a sentence for each selected field that has no value with an older DCGM. That is so if the field that it replaces
// cannot be converted exactly.
func (s Selection) Requirements() (all []string) {
	for _, f := range slices.Concat(s.Fields, s.Labels) {
		if since := health.AddedIn(f.ID); since != "" && f.older.From == 0 {
			all = append(all, fmt.Sprintf("%s: needs DCGM %s; left out with older ones, whose value cannot be converted", f.Name, since))
		}
	}
	return all
}

// Select resolves entries to fields. A set has the names of the generations. An entry with a name has that name; with several generations,
// it also has the names of the others.
func Select(specs []Spec, generations ...string) Selection {
	var s Selection
	for _, spec := range specs {
		if isSet(spec.Name) {
			s.addSet(spec.Name, generations)
		} else {
			s.add(spec)
		}
	}
	if len(generations) > 1 {
		for _, spec := range specs { // after all entries, because the first of a name wins
			s.addOtherNames(spec.Name, generations)
		}
	}
	s.deriveFromSelected()
	return s
}

// SelectCSV resolves the entries of a text in dcgm-exporter's format.
func SelectCSV(text string, generations ...string) Selection {
	specs, malformed := parseCSV(text)
	s := Select(specs, generations...)
	s.Unknown = append(malformed, s.Unknown...)
	return s
}

// deriveFromSelected sets how fields in base units follow from the fields that they replace.
func (s *Selection) deriveFromSelected() {
	selected := slices.Concat(s.Fields, s.Labels)
	for _, list := range [][]Field{s.Fields, s.Labels} {
		for i := range list {
			if d, ok := health.DerivationOf(list[i].ID); ok {
				list[i].older, list[i].derived = d, slices.ContainsFunc(selected, func(f Field) bool { return f.ID == d.From })
			}
		}
	}
}

func isSet(name string) bool {
	return name == SetDefault || name == SetProfiling || name == SetOptional
}

// Names returns the names of all sets and fields.
func Names() []string {
	names := []string{SetDefault, SetProfiling, SetOptional}
	for _, r := range table {
		names = append(names, r.name)
	}
	return append(names, slices.Sorted(maps.Keys(dcgmFields().names))...)
}

// Validate returns an error for each typo. An unknown name of DCGM's is none: a newer DCGM may have it. suggest returns a hint at the
// most similar of some names.
func (s Spec) Validate(suggest func(unknown string, names []string) string) error {
	var errs []error
	set := isSet(s.Name)
	if _, err := lookup(s.Name); errors.Is(err, errUnknownField) && !set && !strings.HasPrefix(strings.ToUpper(s.Name), "DCGM_") {
		errs = append(errs, fmt.Errorf("name: expected a field such as DCGM_FI_DEV_GPU_TEMP, or one of the sets %s, %s and %s, got %q%s",
			SetDefault, SetProfiling, SetOptional, s.Name, suggest(s.Name, Names())))
	}
	switch types := []string{TypeGauge, TypeCounter, TypeLabel}; {
	case set && s.Type != "", set && s.Help != "":
		errs = append(errs, fmt.Errorf("name: %s is a set, whose fields have types and helps; remove type and help", s.Name))
	case s.Type != "" && !slices.Contains(types, s.Type):
		errs = append(errs, fmt.Errorf("type: expected one of %s, got %q%s", strings.Join(types, ", "), s.Type, suggest(s.Type, types)))
	}
	return errors.Join(errs...)
}

// addSet adds the fields of a set, each under its names in the generations.
func (s *Selection) addSet(set string, generations []string) {
	for _, r := range table {
		// A set other than the default adds no labels: a label such as the serial number must be selected by name.
		if r.set != set || r.typ == TypeLabel && set != SetDefault {
			continue
		}
		for _, g := range generations {
			if name := r.nameIn(g); name != "" {
				s.add(Spec{Name: name})
			}
		}
	}
}

// addOtherNames adds a field that was selected by name under its names in the generations. A custom type or help applies to the
// selected name only, unless the agent has none of its own for the field. A label has both names.
func (s *Selection) addOtherNames(name string, generations []string) {
	written, err := lookup(name)
	if err != nil || written.id == 0 {
		return
	}
	_, hasRow := rowOf(written.id)
	for _, f := range slices.Concat(s.Fields, s.Labels) {
		if f.Name != written.name {
			continue
		}
		for _, g := range generations {
			other := Spec{Name: nameIn(f.ID, g)}
			switch {
			case f.Type == TypeLabel:
				other.Type = TypeLabel
			case dcgmFields().names[other.Name].id == f.ID && !hasRow:
				other.Type, other.Help = f.Type, f.Help
			}
			s.add(other)
		}
	}
}

// add resolves one entry with a name. If two entries have the same name, the first one wins.
func (s *Selection) add(spec Spec) {
	r, err := lookup(spec.Name)
	if err != nil {
		s.reject(spec.Name, err.Error())
		return
	}
	f := Field{ID: r.id, Name: r.name, Type: cmp.Or(spec.Type, r.typ), Help: cmp.Or(spec.Help, r.help)}
	sameName := func(g Field) bool { return g.Name == f.Name }
	isMetric := f.Type == TypeGauge || f.Type == TypeCounter
	switch {
	case isMetric && r.typ == TypeLabel:
		s.reject(f.Name, "field is a text; its type must be label")
	case isMetric && !slices.ContainsFunc(s.Fields, sameName):
		s.Fields = append(s.Fields, f)
	case isMetric:
	case f.Type != TypeLabel:
		s.reject(f.Name, fmt.Sprintf("unsupported type %q; use gauge, counter or label", f.Type))
	case r.id == 0:
		s.reject(f.Name, "cannot be a label: it has several values per device")
	case !slices.ContainsFunc(s.Labels, sameName):
		s.Labels = append(s.Labels, f)
	}
}

func (s *Selection) reject(entry, reason string) {
	s.Unknown = append(s.Unknown, entry+": "+reason)
}

// alwaysProvided reports whether a source provides a text field without being asked for it.
func alwaysProvided(id health.Field) bool {
	return id == fieldDriverVersion || id == fieldDeviceName || id == fieldDeviceUUID || id == fieldDevicePCI
}

// Text returns the value of a text field of a device, "" if unknown.
func Text(id health.Field, d health.Device, v health.Versions) string {
	switch id {
	case fieldDriverVersion:
		return v.Driver
	case fieldDeviceName:
		return d.Model
	case fieldDeviceUUID:
		return string(d.ID)
	case fieldDevicePCI:
		return d.PCI
	}
	return d.Texts[id]
}

// parseCSV reads dcgm-exporter's format: NAME, type, help; # starts a comment. It reports malformed lines by number and
// reads on, and accepts a comma in an unquoted help; dcgm-exporter's reader does neither. It parses each line on its
// own, so that an unclosed quote affects one line only.
func parseCSV(text string) (specs []Spec, malformed []string) {
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		parts := splitLine(line)
		if len(parts) != 3 || parts[0] == "" || isSet(parts[0]) {
			malformed = append(malformed, fmt.Sprintf("line %d: expected NAME, type, help", n))
			continue
		}
		specs = append(specs, Spec{Name: parts[0], Type: strings.ToLower(parts[1]), Help: strings.ToValidUTF8(parts[2], "�")})
	}
	return specs, malformed
}

// splitLine splits a line as CSV, or at its first two commas if it is not a CSV record of three parts.
func splitLine(line string) []string {
	r := csv.NewReader(strings.NewReader(line))
	r.TrimLeadingSpace = true
	parts, err := r.Read()
	if err != nil || len(parts) != 3 {
		parts = strings.SplitN(line, ",", 3)
	}
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	return parts
}
