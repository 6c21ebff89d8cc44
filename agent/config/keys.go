package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
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

// removeUnknownKeys removes the keys that a section does not have from a tree, and returns an error for each.
func removeUnknownKeys(tree map[string]any, section reflect.Type, prefix string, keys []string) []error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(tree)) {
		f, ok := findField(section, name)
		sub, isMap := stringKeys(tree[name])
		switch {
		case !ok:
			hint := suggest(prefix+name, keys)
			if section, key, dotted := strings.Cut(name, "."); dotted {
				hint = fmt.Sprintf("; write it as %s: {%s: …}", section, key)
			}
			errs = append(errs, fmt.Errorf("%s: unknown key%s", prefix+name, hint))
			delete(tree, name)
		case f.Type.Kind() != reflect.Struct:
		case isMap:
			tree[name] = sub
			errs = append(errs, removeUnknownKeys(sub, f.Type, prefix+name+".", keys)...)
		case tree[name] != nil: // a section without keys is valid
			errs = append(errs, fmt.Errorf("%s: expected a section with keys, got %s", prefix+name, format(tree[name])))
			delete(tree, name)
		}
	}
	return errs
}

// stringKeys returns a mapping with its keys as strings. YAML allows other types, such as numbers.
func stringKeys(v any) (tree map[string]any, ok bool) {
	mapping, isMapping := v.(map[any]any)
	if !isMapping {
		tree, ok = v.(map[string]any)
		return tree, ok
	}
	tree = make(map[string]any, len(mapping))
	for key, value := range mapping {
		tree[fmt.Sprint(key)] = value
	}
	return tree, true
}

// findField returns the field of a section for a key. Keys are case-insensitive, as with viper.
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

// suggest returns a hint with the key that is most similar to an unknown one, "" if none is similar.
func suggest(unknown string, keys []string) string {
	best, least := "", 4
	for _, k := range keys {
		if d := editDistance(strings.ToLower(unknown), strings.ToLower(k)); d < least {
			best, least = k, d
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
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
