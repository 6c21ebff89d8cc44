package config

import (
	"encoding"
	"errors"
	"fmt"
	"math"
	"reflect"
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
	quoted := `"%v"` // how to write a string
	if _, isText := data.(string); isText && s.value.Type() == reflect.TypeFor[[]string]() {
		quoted = `["%v"]` // a variable or flag needs the brackets too, because a shell removes plain quotes
	}
	into := reflect.New(s.value.Type())
	var meta mapstructure.Metadata
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: into.Interface(), Metadata: &meta, TagName: "yaml",
		DecodeHook: func(_, to reflect.Type, data any) (any, error) { return convert(to, data, quoted) },
	})
	if err != nil {
		return err
	}
	errs := []error{decodeError(s.key, d.Decode(data))}
	slices.Sort(meta.Unused)
	for _, key := range meta.Unused {
		errs = append(errs, fmt.Errorf("%s%s: unknown key", s.key, key))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	s.value.Set(into.Elem())
	return nil
}

// convert converts a value of the file, the environment or a flag to a type of Config. mapstructure then accepts the
// result, so that all error texts come from here.
func convert(to reflect.Type, data any, quoted string) (any, error) {
	for to.Kind() == reflect.Pointer {
		to = to.Elem()
	}
	text, isText := data.(string)
	switch {
	case data == nil, reflect.TypeOf(data) == to:
		return data, nil
	case to == reflect.TypeFor[time.Duration]():
		return duration(data)
	case to.Kind() == reflect.String && reflect.PointerTo(to).Implements(reflect.TypeFor[encoding.TextUnmarshaler]()) && isScalar(data):
		return fmt.Sprint(data), nil // a type that accepts names and numbers, and validates them itself
	case isText && to == reflect.TypeFor[fields.Spec]():
		return fields.Spec{Name: text}, nil
	case isText && to.Kind() != reflect.String:
		return fromText(to, text, quoted)
	case !kindMatches(to, data):
		return nil, kindError(to, data, quoted)
	}
	switch v := data.(type) {
	case map[any]any: // mapstructure would panic
		return nil, fmt.Errorf("expected strings as keys, got %s; put the keys in quotes", format(data))
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
	if data == 0 || data == "0" {
		return time.Duration(0), nil
	}
	text, _ := data.(string)
	d, err := time.ParseDuration(text)
	if err != nil {
		return nil, fmt.Errorf("expected a duration such as 10s, got %s", format(data))
	}
	return d, nil
}

// fromText parses a string as YAML. Variables and flags are strings, so this allows lists and numbers in them.
func fromText(to reflect.Type, text, quoted string) (any, error) {
	var v any
	err := yaml.Unmarshal([]byte(text), &v)
	_, isText := v.(string)
	if err == nil && v != nil && !isText && kindMatches(to, v) {
		return convert(to, v, quoted)
	}
	return nil, kindError(to, text, quoted)
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

// isScalar reports whether a value is neither a mapping nor a list.
func isScalar(v any) bool {
	kind := reflect.TypeOf(v).Kind()
	return kind != reflect.Map && kind != reflect.Slice
}

// kindError returns the error for a value of a wrong kind, with an example of a right one.
func kindError(to reflect.Type, v any, quoted string) error {
	expected := typeName(to)
	switch {
	case to.Kind() == reflect.String && isScalar(v):
		expected += " such as " + fmt.Sprintf(quoted, v)
	case to.Kind() == reflect.Slice:
		example := exampleList(to.Elem(), v)
		if text, _ := v.(string); strings.HasPrefix(text, "[") && to.Elem().Kind() == reflect.String {
			example = `["a", "b"], with quotes` // an unquoted * or & has a meaning in YAML
		}
		expected += " such as " + example
	}
	return fmt.Errorf("expected %s, got %s", expected, format(v))
}

// exampleList returns a list as YAML, with the elements of a value that is not a list if it is plain.
func exampleList(elem reflect.Type, v any) string {
	var elements []string
	if s := fmt.Sprint(v); s != "" && !strings.ContainsAny(s, "[]{}/\"'\\\n") {
		for e := range strings.SplitSeq(s, ",") {
			elements = append(elements, strings.TrimSpace(e))
		}
	}
	isNumber := func(s string) bool { _, err := strconv.Atoi(s); return err == nil }
	switch kind := elem.Kind(); {
	case kind == reflect.Int && len(elements) > 0 && !slices.ContainsFunc(elements, func(s string) bool { return !isNumber(s) }):
		return "[" + strings.Join(elements, ", ") + "]"
	case kind == reflect.Int:
		return "[1, 2]"
	case kind == reflect.Struct && elem != reflect.TypeFor[fields.Spec]():
		return "[{key: value}]"
	case len(elements) == 0:
		elements = []string{"a", "b"}
	}
	for i := range elements {
		elements[i] = strconv.Quote(elements[i])
	}
	return "[" + strings.Join(elements, ", ") + "]"
}

// format returns a value as YAML in one line, and names numbers as such.
func format(v any) string {
	switch v := v.(type) {
	case string:
		return strconv.Quote(v)
	case int, int64, uint64, float64:
		return fmt.Sprintf("the number %v", v)
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
		return "a mapping such as {key: value}"
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
		return fmt.Errorf("%s: %w", key, err)
	})
}
