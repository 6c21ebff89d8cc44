package metrics

import (
	"cmp"
	"encoding/csv"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// FieldSpec is an entry of metrics.fields: the name of a field or a set, and how to show it if not as usual.
type FieldSpec struct {
	Name string `yaml:"name"`
	Type string `yaml:"type,omitempty"`
	Help string `yaml:"help,omitempty"`
}

// MarshalYAML writes a name alone as people write it.
func (s FieldSpec) MarshalYAML() (any, error) {
	if s.Type == "" && s.Help == "" {
		return s.Name, nil
	}
	type plain FieldSpec
	return plain(s), nil
}

// Field is a field as it is shown.
type Field struct {
	ID   health.Field // 0: made by us
	Name string
	Type string
	Help string
}

// Selection is which fields are shown.
type Selection struct {
	Fields  []Field  // that have series, no name twice
	Labels  []Field  // that are labels of these
	Unknown []string // entries that are not shown: which, and why
}

// IDs returns the fields that the source must measure. Utilization is always one: it tells who is idle.
func (s Selection) IDs() []health.Field {
	ids := []health.Field{health.FieldGPUUtil}
	for _, f := range slices.Concat(s.Fields, s.Labels) {
		if !slices.Contains(ids, f.ID) && f.ID != 0 && !isKnownAnyway(f.ID) {
			ids = append(ids, f.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// Resolve finds out which fields the section means. Entries that mean none are in Chosen.Unknown; an error
// is a file that cannot be read.
func (c Config) Resolve() (Config, error) {
	specs, s := c.Fields, Selection{}
	if c.FieldsFile != "" {
		text, err := os.ReadFile(c.FieldsFile)
		if err != nil {
			return c, fmt.Errorf("fieldsFile: %w", err)
		}
		specs, s.Unknown = parseCSV(string(text))
	}
	for _, spec := range specs {
		s.add(spec)
	}
	c.Chosen = s
	return c, nil
}

// Notes says what in the section has no effect.
func (c Config) Notes() []string {
	key := "metrics.fields"
	if c.FieldsFile != "" {
		key = "metrics.fieldsFile: " + c.FieldsFile
	}
	notes := make([]string, len(c.Chosen.Unknown))
	for i, u := range c.Chosen.Unknown {
		notes[i] = key + ": " + u
	}
	return notes
}

// isSet tells the sets from fields.
func isSet(name string) bool {
	return name == SetDefault || name == SetProfiling || name == SetOptional
}

// add adds what an entry means.
func (s *Selection) add(spec FieldSpec) {
	if isSet(spec.Name) {
		for _, k := range fieldTable {
			// A serial number on every series is for those who ask for it by name.
			if k.set == spec.Name && (k.typ != TypeLabel || k.set == SetDefault) {
				s.add(FieldSpec{Name: k.name})
			}
		}
		return
	}
	k, err := lookupField(spec.Name)
	if err != nil {
		hint := ""
		// With a type it is no set: so are all of a file.
		if spec.Type == "" && !strings.HasPrefix(strings.ToUpper(spec.Name), "DCGM_") {
			hint = "; the sets are " + strings.Join([]string{SetDefault, SetProfiling, SetOptional}, ", ")
		}
		s.Unknown = append(s.Unknown, spec.Name+": "+err.Error()+hint)
		return
	}
	f := Field{ID: k.id, Name: k.name, Type: cmp.Or(spec.Type, k.typ), Help: cmp.Or(spec.Help, k.help)}
	is := func(g Field) bool { return g.Name == f.Name }
	switch {
	case f.Type == TypeGauge || f.Type == TypeCounter:
		if k.typ == TypeLabel {
			s.Unknown = append(s.Unknown, f.Name+": is a text; its type can only be label")
		} else if !slices.ContainsFunc(s.Fields, is) {
			s.Fields = append(s.Fields, f)
		}
	case f.Type != TypeLabel:
		s.Unknown = append(s.Unknown, fmt.Sprintf("%s: type %q is not supported; use gauge, counter or label", f.Name, f.Type))
	case k.id == 0:
		s.Unknown = append(s.Unknown, f.Name+": cannot be a label: it has several values")
	case !slices.ContainsFunc(s.Labels, is):
		s.Labels = append(s.Labels, f)
	}
}

// isKnownAnyway tells the texts that the source need not be asked for.
func isKnownAnyway(id health.Field) bool {
	return id == fieldDriverVersion || id == fieldDeviceName || id == fieldDeviceUUID || id == fieldDevicePCI
}

// textOf is the value of a text, empty if it is not known.
func textOf(id health.Field, d health.Device, v health.Versions) string {
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

// parseCSV reads dcgm-exporter's format: NAME, type, help; # begins a comment. What is no such line is told. Its own
// reader ends at the first bad line, and takes a comma in the help only between quotes; we go on, and take both. Each
// line is read by itself: a quote that is left open must not swallow the lines after it.
func parseCSV(text string) (specs []FieldSpec, unknown []string) {
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		parts := record(line)
		if len(parts) != 3 || parts[0] == "" || isSet(parts[0]) {
			unknown = append(unknown, fmt.Sprintf("line %d: not NAME, type, help", n))
			continue
		}
		specs = append(specs, FieldSpec{Name: parts[0], Type: strings.ToLower(parts[1]), Help: strings.ToValidUTF8(parts[2], "�")})
	}
	return specs, unknown
}

// record takes a line apart. What is not made of three parts for CSV can be for people, whose help has commas.
func record(line string) []string {
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
