package config

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// The functions here walk Config by its yaml tags, so that every error has its key as the file writes it.

// setting is one value of the configuration.
type setting struct {
	key   string
	value reflect.Value
}

// settings returns the settings of all sections.
func (c *Config) settings() []setting { return settingsOf(reflect.ValueOf(c).Elem(), "") }

// settingsOf returns the settings in a section and its subsections.
func settingsOf(section reflect.Value, prefix string) []setting {
	var settings []setting
	for f, v := range section.Fields() {
		if yamlKey(f) == "" {
			continue
		}
		key := prefix + yamlKey(f)
		if f.Type.Kind() == reflect.Struct {
			settings = append(settings, settingsOf(v, key+".")...)
		} else {
			settings = append(settings, setting{key, v})
		}
	}
	return settings
}

// position says where in the file a line is; "" without a file.
type position func(line int) string

// sectionTree returns the values of a section of the file, by their keys as Config has them: nodes, and the trees of subsections. It
// returns an error for each unknown key and for each key that is written twice.
func sectionTree(
	n *yaml.Node, section reflect.Type, prefix string, keys []string, at position,
) (tree map[string]any, errs []error) {
	tree = make(map[string]any)
	if n == nil {
		return tree, nil
	}
	entries := make(map[string]yaml.Node) // also the merged ones
	if err := n.Decode(&entries); err != nil {
		return tree, []error{fmt.Errorf("%s: expected a section with keys, got %s", strings.TrimSuffix(prefix, "."), format(valueOf(n)))}
	}
	similar := slices.Clone(keys)
	for _, key := range keysOf(section) {
		similar = append(similar, prefix+key) // sections too
	}
	lines := make(map[string]int)
	for i := 0; i < len(n.Content); i += 2 {
		lines[n.Content[i].Value] = n.Content[i].Line
	}
	for _, err := range duplicateKeys(entries, prefix) {
		errs = append(errs, fmt.Errorf("%w%s", err, at(0)))
	}
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		entry := entries[name]
		value := resolved(&entry)
		f, ok := findField(section, name)
		switch {
		case !ok:
			hint := cmp.Or(spaceHint(name), stateDirHint(prefix+name), suggest(prefix+name, similar), suggest(name, keys))
			if section, key, dotted := strings.Cut(name, "."); dotted {
				hint = fmt.Sprintf("; write it as %s: {%s: …}", section, key)
			}
			errs = append(errs, fmt.Errorf("%s: unknown key%s%s", prefix+name, hint, at(lines[name])))
		case isNull(value): // as if it were not written; a section without keys is valid
		case f.Type.Kind() != reflect.Struct:
			tree[yamlKey(f)] = value
		case value.Kind == yaml.MappingNode:
			sub, more := sectionTree(value, f.Type, prefix+yamlKey(f)+".", keys, at)
			tree[yamlKey(f)], errs = sub, append(errs, more...)
		default:
			errs = append(errs, fmt.Errorf("%s: expected a section with keys, got %s%s", prefix+name, format(valueOf(value)), at(lines[name])))
		}
	}
	return tree, errs
}

// duplicateKeys returns an error for each key that differs from another only in its case, which has no meaning.
func duplicateKeys[V any](mapping map[string]V, prefix string) (errs []error) {
	seen := make(map[string]string)
	for _, name := range slices.Sorted(maps.Keys(mapping)) {
		folded := strings.ToLower(name)
		if other, ok := seen[folded]; ok {
			errs = append(errs, fmt.Errorf("%s: same key as %s; remove one of the two", prefix+name, prefix+other))
		}
		seen[folded] = name
	}
	return errs
}

// findField returns the field of a section for a key. Keys are case-insensitive.
func findField(section reflect.Type, name string) (reflect.StructField, bool) {
	for f := range section.Fields() {
		if key := yamlKey(f); key != "" && strings.EqualFold(key, name) {
			return f, true
		}
	}
	return reflect.StructField{}, false
}

// yamlKey returns a field's key, "" if it has none.
func yamlKey(f reflect.StructField) string {
	key, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
	return strings.TrimPrefix(key, "-")
}

// keysOf returns the keys of a section or of an entry of a list.
func keysOf(section reflect.Type) (keys []string) {
	for f := range section.Fields() {
		if key := yamlKey(f); key != "" {
			keys = append(keys, key)
		}
	}
	return keys
}

// spaceHint returns a hint if a key and its value are written without a space, which YAML takes for one key.
func spaceHint(name string) string {
	if key, value, found := strings.Cut(name, ":"); found {
		return fmt.Sprintf("; write a space after the colon: %s: %s", key, value)
	}
	return ""
}

// stateDirHint returns a hint if a key names a place for the state, which a file that cannot be read must not move.
func stateDirHint(key string) string {
	if strings.EqualFold(key, "health.stateFile") {
		return fmt.Sprintf("; set --%s or %s, a directory", StateDirFlag, stateDirVariable)
	}
	return ""
}

// suggest returns a hint with the name that Nearest returns.
func suggest(unknown string, names []string) string {
	if name := Nearest(unknown, names); name != "" {
		return "; did you mean " + name + "?"
	}
	return ""
}

// Nearest returns the name that an unknown one resembles. That is the only name of which it is a part, such as health.cordon for cordon,
// else the most similar name. It returns "" if there is none.
func Nearest(unknown string, names []string) string {
	best, least := "", min(4, (len(unknown)-strings.LastIndexByte(unknown, '.')-1)/2+1) // of a short name, fewer letters may differ
	places := make(map[string]bool)
	unknown = strings.ToLower(unknown)
	for _, name := range names {
		if d := editDistance(unknown, strings.ToLower(name)); d < least {
			best, least = name, d
		}
		if i := strings.Index(strings.ToLower("."+name+"."), "."+unknown+"."); i >= 0 {
			places[name[:i+len(unknown)]] = true
		}
	}
	if len(places) == 1 {
		return slices.Collect(maps.Keys(places))[0]
	}
	return best
}

// editDistance returns the Levenshtein distance of two texts.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
