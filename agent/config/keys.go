package config

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"unicode"
)

// What is here knows keys, and not what they mean: it walks Config by its yaml tags, so that every fault can be
// said with its key as the file writes it.

// prune removes from the tree what is no key of a section, and returns an error for each.
func prune(tree map[string]any, section reflect.Type, prefix string, known []string) []error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(tree)) {
		f, ok := fieldNamed(section, name)
		sub, isMap := asTree(tree[name])
		switch {
		case !ok:
			hint := suggest(prefix+name, known)
			if section, key, dotted := strings.Cut(name, "."); dotted {
				hint = fmt.Sprintf("; a dot makes no section: write %s: {%s: …}", section, key)
			}
			errs = append(errs, fmt.Errorf("%s: unknown key%s", prefix+name, hint))
			delete(tree, name)
		case f.Type.Kind() != reflect.Struct:
		case isMap:
			tree[name] = sub
			errs = append(errs, prune(sub, f.Type, prefix+name+".", known)...)
		case tree[name] != nil: // a section without keys is empty
			errs = append(errs, fmt.Errorf("%s: is not a section; write keys below it", prefix+name))
			delete(tree, name)
		}
	}
	return errs
}

// asTree returns the keys of a section. YAML's may be numbers and other things too; none of ours is.
func asTree(v any) (tree map[string]any, ok bool) {
	odd, isOdd := v.(map[any]any)
	if !isOdd {
		tree, ok = v.(map[string]any)
		return tree, ok
	}
	tree = make(map[string]any, len(odd))
	for key, value := range odd {
		tree[fmt.Sprint(key)] = value
	}
	return tree, true
}

// fieldNamed returns the field of a section for a key. As with viper, capitals make no difference.
func fieldNamed(section reflect.Type, name string) (reflect.StructField, bool) {
	for f := range section.Fields() {
		if key := keyOf(f); key != "" && strings.EqualFold(key, name) {
			return f, true
		}
	}
	return reflect.StructField{}, false
}

// keyOf returns a field's key, "" if it has none.
func keyOf(f reflect.StructField) string {
	key, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
	return strings.TrimPrefix(key, "-")
}

// leaf is one value of the configuration.
type leaf struct {
	key   string
	value reflect.Value
}

// leavesOf returns every value below a section.
func leavesOf(section reflect.Value, prefix string) []leaf {
	var all []leaf
	for f, v := range section.Fields() {
		if keyOf(f) == "" {
			continue
		}
		key := prefix + keyOf(f)
		if f.Type.Kind() == reflect.Struct {
			all = append(all, leavesOf(v, key+".")...)
		} else {
			all = append(all, leaf{key, v})
		}
	}
	return all
}

// envNames returns the environment variables of a key: plugin.kubeletDir is GPU_NODE_AGENT_PLUGIN_KUBELET_DIR,
// and without the underscore that the capital makes, as viper itself would have it. Capitals that follow each other
// are one word: metrics.podUID is GPU_NODE_AGENT_METRICS_POD_UID.
func envNames(key string) []string {
	var b strings.Builder
	capital := false
	for _, r := range key {
		if unicode.IsUpper(r) && !capital {
			b.WriteByte('_')
		}
		capital = unicode.IsUpper(r)
		b.WriteRune(r)
	}
	name := func(s string) string { return EnvPrefix + "_" + strings.ToUpper(strings.ReplaceAll(s, ".", "_")) }
	return slices.Compact([]string{name(b.String()), name(key)})
}

// strayEnv returns a note for each environment variable that looks like one of ours and sets nothing. They are no
// errors: the kubelet makes some like them, of each Service whose name begins as ours.
func strayEnv(environ, known []string) (notes []string) {
	taken := make(map[string]bool)
	for _, key := range known {
		for _, name := range envNames(key) {
			taken[name] = true
		}
	}
	for _, entry := range environ {
		name, _, _ := strings.Cut(entry, "=")
		rest, ours := strings.CutPrefix(name, EnvPrefix+"_")
		section, _, below := strings.Cut(strings.ToLower(rest), "_")
		_, isSection := fieldNamed(reflect.TypeFor[Config](), section)
		service := strings.Contains(rest, "_SERVICE_") || strings.HasSuffix(rest, "_PORT") || strings.Contains(rest, "_PORT_")
		if ours && below && isSection && !service && !taken[name] {
			notes = append(notes, name+": no key has this name, and nothing is set"+suggest(name, slices.Collect(maps.Keys(taken))))
		}
	}
	slices.Sort(notes)
	return notes
}

// suggest returns a known key that is like the unknown one.
func suggest(key string, known []string) string {
	best, least := "", 4
	for _, k := range known {
		if d := distance(strings.ToLower(key), strings.ToLower(k)); d < least {
			best, least = k, d
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// distance is the number of letters to add, drop or change to get from a to b.
func distance(a, b string) int {
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
