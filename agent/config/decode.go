package config

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
)

// decode decodes data into the setting. On an error the setting keeps its value.
func (s setting) decode(data any) error {
	into := reflect.New(s.value.Type())
	var meta mapstructure.Metadata
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: into.Interface(), Metadata: &meta, TagName: "yaml",
		DecodeHook: func(_, to reflect.Type, data any) (any, error) { return convert(to, data) },
	})
	if err != nil {
		return err
	}
	errs := []error{decodeError(s.key, d.Decode(data))}
	slices.Sort(meta.Unused)
	for _, key := range meta.Unused { // such as [0].replica
		_, name, _ := strings.Cut(key, ".")
		keys := keysOf(s.value.Type().Elem())
		errs = append(errs, fmt.Errorf("%s%s: unknown key%s", s.key, key,
			cmp.Or(spaceHint(name), suggest(name, keys), "; the keys are "+strings.Join(keys, ", "))))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	s.value.Set(into.Elem())
	return nil
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

// convert converts a value of the file, the environment or a flag to a type of Config. mapstructure then accepts the result. So all error
// texts come from here.
func convert(to reflect.Type, data any) (any, error) {
	for to.Kind() == reflect.Pointer {
		to = to.Elem()
	}
	text, isText := data.(string)
	switch {
	case data == nil, reflect.TypeOf(data) == to:
		return data, nil
	case to == reflect.TypeFor[time.Duration]():
		return duration(data)
	case isText && to == reflect.TypeFor[fields.Spec]():
		return fields.Spec{Name: text}, nil
	case isText && to.Kind() != reflect.String:
		return fromText(to, text)
	case !kindMatches(to, data):
		return nil, &kindError{to, data, nil}
	}
	switch v := data.(type) {
	case map[any]any: // mapstructure would panic
		return nil, fmt.Errorf("expected strings as keys, got %s", format(data))
	case map[string]any:
		return data, errors.Join(duplicateKeys(v, "")...)
	case float64:
		if to.Kind() != reflect.Float64 {
			return wholeNumber(v)
		}
	case uint64:
		if to.Kind() != reflect.Float64 { // YAML decodes only numbers that overflow an int to uint64
			return nil, fmt.Errorf("number %d is too large", v)
		}
	}
	return data, nil
}

func duration(data any) (any, error) {
	text, _ := data.(string)
	d, err := time.ParseDuration(text) // accepts 0 without a unit
	if err != nil {
		return nil, fmt.Errorf("expected a duration such as 1m, got %s", format(data))
	}
	return d, nil
}

// fromText converts a string to a type that is written as YAML, such as a number or a list.
func fromText(to reflect.Type, text string) (any, error) {
	var node yaml.Node
	var v any
	err := yaml.Unmarshal([]byte(text), &node)
	if kind := to.Kind(); err == nil && (kind == reflect.Slice || kind == reflect.Struct) {
		scalarsAsText(&node)
	}
	if err == nil {
		err = node.Decode(&v)
	}
	if _, isText := v.(string); err != nil || v == nil || isText || !kindMatches(to, v) {
		return nil, &kindError{to, text, explainYAML(err, text)}
	}
	return convert(to, v)
}

// wholeNumber converts a whole number that YAML or JSON writes as a float, such as 2.0 or 1e3.
func wholeNumber(f float64) (any, error) {
	const exact = 1 << 53 // floats above it skip whole numbers
	switch {
	case f != math.Trunc(f) || math.IsInf(f, 0): // includes NaN
		return nil, fmt.Errorf("expected a whole number, got %v", f)
	case math.Abs(f) > exact:
		return nil, fmt.Errorf("number %v is too large", f)
	}
	return int64(f), nil
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

// kindError is the error for a value of a wrong kind.
type kindError struct {
	to   reflect.Type
	got  any
	yaml error // why a text is not YAML; nil if it is
}

func (e *kindError) Error() string { return e.withExample("") }

// withExample returns the error with an example of a right value, "" for none.
func (e *kindError) withExample(example string) string {
	if example != "" {
		example = " such as " + example
	}
	text := fmt.Sprintf("expected %s%s, got %s", typeName(e.to), example, format(e.got))
	if e.yaml != nil {
		text += ": " + e.yaml.Error()
	}
	return text
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

// decodeError returns the errors of mapstructure, each with its key first.
func decodeError(key string, err error) error {
	return mapErrors(err, func(err error) error {
		if de, ok := err.(*mapstructure.DecodeError); ok { //nolint:errorlint // a wrapper may hold several errors: see below
			return decodeError(key+de.Name(), de.Unwrap())
		}
		if inner := errors.Unwrap(err); inner != nil { // mapstructure wraps all the errors of a list
			return decodeError(key, inner)
		}
		if kind, ok := errors.AsType[*kindError](err); ok {
			return fmt.Errorf("%s: %s", key, kind.withExample(example(key, kind.got)))
		}
		return fmt.Errorf("%s: %w", key, err)
	})
}
