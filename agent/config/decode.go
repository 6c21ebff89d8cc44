package config

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

// decode decodes the value of a key: a node of the file, or the text of a variable or a flag. On an error the setting keeps its value.
func (s setting) decode(data any) error {
	n, isNode := data.(*yaml.Node)
	if !isNode {
		n = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: fmt.Sprint(data)}
	}
	into := reflect.New(s.value.Type()).Elem()
	if errs := decodeNode(s.key, n, into); len(errs) > 0 {
		return errors.Join(errs...)
	}
	s.value.Set(into)
	return nil
}

// decodeNode decodes a node into a zero value, and returns every error with its key. Scalars are texts: see scalarsAsText.
func decodeNode(key string, n *yaml.Node, to reflect.Value) (errs []error) {
	n = resolved(n)
	if isNull(n) {
		return nil
	}
	text, isText := "", false
	if n.Kind == yaml.ScalarNode {
		text, isText = valueOf(n).(string)
	}
	switch t := to.Type(); {
	case t.Kind() == reflect.Pointer:
		to.Set(reflect.New(t.Elem()))
		return decodeNode(key, n, to.Elem())
	case t == reflect.TypeFor[time.Duration]():
		d, err := time.ParseDuration(text) // accepts 0 without a unit
		if err != nil {
			return []error{fmt.Errorf("%s: expected a duration such as 1m, got %s", key, format(valueOf(n)))}
		}
		to.SetInt(int64(d))
	case isText && t == reflect.TypeFor[fields.Spec]():
		to.Set(reflect.ValueOf(fields.Spec{Name: text}))
	case isText && t.Kind() == reflect.String:
		to.SetString(text)
	case isText:
		return decodeText(key, text, to)
	case t.Kind() == reflect.Slice && n.Kind == yaml.SequenceNode:
		to.Set(reflect.MakeSlice(t, len(n.Content), len(n.Content)))
		for i, entry := range n.Content {
			errs = append(errs, decodeNode(fmt.Sprintf("%s[%d]", key, i), entry, to.Index(i))...)
		}
	case t.Kind() == reflect.Struct && n.Kind == yaml.MappingNode:
		return decodeMapping(key, n, to)
	default:
		return []error{kindError(key, t, valueOf(n), nil)}
	}
	return errs
}

// decodeMapping decodes an entry of a list.
func decodeMapping(key string, n *yaml.Node, to reflect.Value) (errs []error) {
	entries := make(map[string]yaml.Node) // also the merged ones
	if err := n.Decode(&entries); err != nil {
		return []error{fmt.Errorf("%s: expected strings as keys, got %s", key, format(valueOf(n)))}
	}
	if duplicates := duplicateKeys(entries, ""); len(duplicates) > 0 {
		return []error{withPrefix(key+": ", errors.Join(duplicates...))}
	}
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		entry := entries[name]
		if f, ok := findField(to.Type(), name); ok {
			errs = append(errs, decodeNode(key+"."+yamlKey(f), &entry, to.FieldByIndex(f.Index))...)
			continue
		}
		keys := keysOf(to.Type())
		errs = append(errs, fmt.Errorf("%s.%s: unknown key%s", key, name,
			cmp.Or(spaceHint(name), suggest(name, keys), "; the keys are "+strings.Join(keys, ", "))))
	}
	return errs
}

// decodeText decodes a text into a type that is written as YAML, such as a number or a list.
func decodeText(key, text string, to reflect.Value) []error {
	var document yaml.Node
	var v any
	err := yaml.Unmarshal([]byte(text), &document)
	kind := to.Kind()
	if isTree := kind == reflect.Slice || kind == reflect.Struct; err == nil && isTree {
		scalarsAsText(&document)
	}
	if err == nil {
		err = document.Decode(&v)
	}
	if _, isText := v.(string); err != nil || v == nil || isText || !kindMatches(to.Type(), v) {
		return []error{kindError(key, to.Type(), text, explainYAML(err, text))}
	}
	switch kind {
	case reflect.Bool:
		to.SetBool(v.(bool))
	case reflect.Float64:
		to.SetFloat(reflect.ValueOf(v).Convert(reflect.TypeFor[float64]()).Float())
	case reflect.Int, reflect.Int64:
		whole, err := wholeNumber(v)
		if err != nil {
			return []error{fmt.Errorf("%s: %w", key, err)}
		}
		to.SetInt(whole)
	default:
		return decodeNode(key, document.Content[0], to)
	}
	return nil
}

// resolved returns the node that an alias stands for.
func resolved(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

func isNull(n *yaml.Node) bool { return n.ShortTag() == "!!null" }

// valueOf returns a node as a value of Go.
func valueOf(n *yaml.Node) (v any) {
	if err := n.Decode(&v); err != nil {
		return n.Value // unreachable: parse has decoded the document
	}
	return v
}

// scalarsAsText makes strings of all scalars except null. A device reference such as 010 thus keeps its text, and the values
// of the file, the environment and flags are converted alike.
func scalarsAsText(n *yaml.Node) {
	switch n.ShortTag() {
	case "!!int", "!!float", "!!bool", "!!timestamp":
		n.Tag = "!!str"
	}
	for i, child := range n.Content {
		if isKey := n.Kind == yaml.MappingNode && i%2 == 0; isKey && child.ShortTag() == "!!null" {
			child.Tag = "!!str"
		}
		scalarsAsText(child)
	}
}

// wholeNumber returns a whole number, which YAML or JSON may write as a float, such as 2.0 or 1e3.
func wholeNumber(v any) (int64, error) {
	const exact = 1 << 53 // floats above it skip whole numbers
	switch v := v.(type) {
	case float64:
		switch {
		case v != math.Trunc(v) || math.IsInf(v, 0): // includes NaN
			return 0, fmt.Errorf("expected a whole number, got %v", v)
		case math.Abs(v) > exact:
			return 0, fmt.Errorf("number %v is too large", v)
		}
		return int64(v), nil
	case uint64: // YAML decodes only numbers that overflow an int to it
		return 0, fmt.Errorf("number %d is too large", v)
	}
	return reflect.ValueOf(v).Int(), nil
}

// kindMatches reports whether a value has a kind that can be decoded into a type.
func kindMatches(to reflect.Type, v any) bool {
	kind := reflect.TypeOf(v).Kind()
	switch to.Kind() {
	case reflect.Int, reflect.Int64, reflect.Float64:
		return kind == reflect.Int || kind == reflect.Int64 || kind == reflect.Uint64 || kind == reflect.Float64
	case reflect.Struct:
		return kind == reflect.Map
	default:
		return kind == to.Kind()
	}
}

// kindError returns the error for a value of a wrong kind, with an example of a right one. why is why a text is not YAML; nil if it is.
func kindError(key string, to reflect.Type, got any, why error) error {
	such := example(key, got)
	if such != "" {
		such = " such as " + such
	}
	text := fmt.Sprintf("%s: expected %s%s, got %s", key, typeName(to), such, format(got))
	if why != nil {
		text += ": " + why.Error()
	}
	return errors.New(text)
}

// example returns a valid value to use instead of another, for a list or one of its entries. It returns "" for other keys.
func example(key string, instead any) string {
	list, isEntry := strings.CutSuffix(entryIndex.ReplaceAllString(key, "[]"), "[]")
	text := listExamples[list]
	switch {
	case isEntry:
		return strings.TrimSuffix(strings.TrimPrefix(text, "["), "]")
	case text == selectorExample && instead == "all": // as in NVIDIA's plugin
		return "[all]"
	}
	return text
}

//nolint:gochecknoglobals // constants
var (
	entryIndex = regexp.MustCompile(`\[\d+\]`) // in a key

	// listExamples has a valid value of each list.
	listExamples = map[string]string{
		"source.healthSystems":                           "[all]",
		"source.sim.scenario":                            "[{at: 5s, gpu: 3, xid: 79}]",
		"source.sim.past":                                "[{ago: 10s, gpu: 5, xid: 95}]",
		"health.cordon":                                  "[3]",
		"health.xid.unhealthy":                           "[48]",
		"health.xid.warn":                                "[48]",
		"health.xid.ignore":                              "[48]",
		"health.incidents.unhealthy":                     "[DCGM_FR_NVLINK_DOWN]",
		"health.incidents.warn":                          "[DCGM_FR_NVLINK_DOWN]",
		"health.incidents.ignore":                        "[DCGM_FR_NVLINK_DOWN]",
		"plugin.resources":                               `[{pattern: "*H100*", resource: nvidia.com/h100}]`,
		"plugin.include":                                 selectorExample,
		"plugin.exclude":                                 selectorExample,
		"plugin.sharing.timeSlicing.resources":           "[{name: nvidia.com/gpu, replicas: 4}]",
		"plugin.sharing.timeSlicing.resources[].devices": selectorExample,
		"plugin.sharing.mps.resources":                   "[{name: nvidia.com/gpu, replicas: 4}]",
		"plugin.sharing.mps.resources[].devices":         selectorExample,
		"plugin.sharing.memory.devices":                  selectorExample,
		"plugin.deviceList":                              "[envvar]",
		"plugin.dra.evictOn":                             "[xid=79]",
		"metrics.fields":                                 "[default]",
		"metrics.names":                                  "[dcgm-exporter-4.8]",
		"metrics.podLabels":                              `[team, "/^team-/"]`,
		"node.taints":                                    "[{when: allUnhealthy, key: gpu-node-agent/unhealthy, effect: NoSchedule}]",
	}
)

const selectorExample = "[0]"

// format returns a value as YAML in one line.
func format(v any) string {
	if s, isText := v.(string); isText {
		return strconv.Quote(s)
	}
	var n yaml.Node
	if err := n.Encode(v); err != nil {
		return fmt.Sprint(v)
	}
	n.Style = yaml.FlowStyle
	text, err := yaml.Marshal(&n)
	if err != nil {
		return fmt.Sprint(v)
	}
	return strings.Join(strings.Fields(string(text)), " ")
}

func typeName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "a list"
	case reflect.Struct:
		if t == reflect.TypeFor[fields.Spec]() {
			return "the name of a field or of a set of fields"
		}
		return "a mapping"
	case reflect.String:
		return "a string"
	default:
		return "a " + t.Kind().String()
	}
}
