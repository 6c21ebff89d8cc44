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

// set decodes data into the value. If it cannot, the value stays.
func (l leaf) set(data any) []error {
	quoted := `"%v"`
	if _, isText := data.(string); isText && l.value.Type() == reflect.TypeFor[[]string]() {
		quoted = `["%v"]` // of a variable or a flag the whole is shown: a shell takes quotes away
	}
	into := reflect.New(l.value.Type())
	var meta mapstructure.Metadata
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: into.Interface(), Metadata: &meta, TagName: "yaml",
		DecodeHook: func(_, to reflect.Type, data any) (any, error) { return decode(to, data, quoted) },
	})
	if err != nil {
		return []error{err}
	}
	errs := decodeErrors(l.key, d.Decode(data))
	slices.Sort(meta.Unused)
	for _, key := range meta.Unused {
		errs = append(errs, fmt.Errorf("%s%s: unknown key", l.key, key))
	}
	if len(errs) == 0 {
		l.value.Set(into.Elem())
	}
	return errs
}

// decode turns what the file, the environment and the flags hold into the types of Config: what it returns,
// mapstructure takes without a word of its own. Quoted is how a text is to be written.
func decode(to reflect.Type, data any, quoted string) (any, error) {
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
		return fmt.Sprint(data), nil // a type that takes numbers and words, and tells later which it knows
	case isText && to == reflect.TypeFor[fields.Spec]():
		return fields.Spec{Name: text}, nil
	case isText && to.Kind() != reflect.String:
		return fromText(to, text, quoted)
	case !fits(to, data):
		return nil, misfit(to, data, quoted)
	}
	switch v := data.(type) {
	case map[any]any: // mapstructure panics of it
		return nil, fmt.Errorf("%s has a key that is not a text; put it in quotes", shown(data))
	case float64:
		if to.Kind() != reflect.Float64 {
			return whole(v)
		}
	case uint64:
		if to.Kind() != reflect.Float64 { // YAML has one only for what is too large for an int
			return nil, fmt.Errorf("%d is too large", v)
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
		return nil, fmt.Errorf("%s is not a duration; use a number with a unit, such as 10s", shown(data))
	}
	return d, nil
}

// fromText reads a text as YAML. A variable and a flag hold only texts, and so even a list can be given there.
func fromText(to reflect.Type, text, quoted string) (any, error) {
	var v any
	err := yaml.Unmarshal([]byte(text), &v)
	_, still := v.(string)
	if err == nil && v != nil && !still && fits(to, v) {
		return decode(to, v, quoted)
	}
	return nil, misfit(to, text, quoted)
}

// whole returns a number as YAML and JSON may write a whole one: 2.0, 1e3.
func whole(f float64) (any, error) {
	const exact = 1 << 53 // above it a float skips whole numbers
	switch {
	case f != math.Trunc(f) || math.IsInf(f, 0): // NaN too
		return nil, fmt.Errorf("%v is not a whole number", f)
	case math.Abs(f) > exact:
		return nil, fmt.Errorf("%v is too large", f)
	}
	return int64(f), nil
}

// fits reports whether a value is of the kind that a type takes.
func fits(to reflect.Type, v any) bool {
	is := reflect.TypeOf(v).Kind()
	switch kind := to.Kind(); kind {
	case reflect.Int, reflect.Int64, reflect.Float64:
		return is == reflect.Int || is == reflect.Int64 || is == reflect.Uint64 || is == reflect.Float64
	case reflect.Struct:
		return is == reflect.Map
	default:
		return is == kind
	}
}

// isScalar reports whether a value is a single one.
func isScalar(v any) bool {
	kind := reflect.TypeOf(v).Kind()
	return kind != reflect.Map && kind != reflect.Slice
}

// misfit is the error of a value that is of another kind than what is wanted.
func misfit(to reflect.Type, v any, quoted string) error {
	hint := ""
	switch {
	case to.Kind() == reflect.String && isScalar(v):
		hint = "; put it in quotes: " + fmt.Sprintf(quoted, v)
	case to.Kind() == reflect.Slice:
		hint = "; write it as " + listLike(to.Elem(), v)
		if text, _ := v.(string); strings.HasPrefix(text, "[") && to.Elem().Kind() == reflect.String {
			hint = `; put each text in it in quotes, as in ["a", "b"]` // to YAML an unquoted * and & are more than letters
		}
	}
	return fmt.Errorf("%s is not %s%s", shown(v), describe(to), hint)
}

// listLike writes down a list: of what somebody has given who did not, if that is plain, else an example.
func listLike(elem reflect.Type, v any) string {
	var words []string
	if s := fmt.Sprint(v); s != "" && !strings.ContainsAny(s, "[]{}/\"'\\\n") {
		for word := range strings.SplitSeq(s, ",") {
			words = append(words, strings.TrimSpace(word))
		}
	}
	isNumber := func(s string) bool { _, err := strconv.Atoi(s); return err == nil }
	switch kind := elem.Kind(); {
	case kind == reflect.Int && len(words) > 0 && !slices.ContainsFunc(words, func(s string) bool { return !isNumber(s) }):
		return "[" + strings.Join(words, ", ") + "]"
	case kind == reflect.Int:
		return "[1, 2]"
	case kind == reflect.Struct && elem != reflect.TypeFor[fields.Spec]():
		return "[{key: value}]"
	case len(words) == 0:
		words = []string{"a", "b"}
	}
	for i := range words {
		words[i] = strconv.Quote(words[i])
	}
	return "[" + strings.Join(words, ", ") + "]"
}

// shown is a value as the file has it, in one line.
func shown(v any) string {
	if text, ok := v.(string); ok {
		return strconv.Quote(text)
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

func describe(t reflect.Type) string {
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
			return "the name of a field or of a set"
		}
		return "keys and values, such as {key: value}"
	case reflect.String:
		return "a text"
	default:
		return "a " + t.Kind().String()
	}
}

// decodeErrors gives every decoding error its key first.
func decodeErrors(key string, err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var errs []error
		for _, e := range joined.Unwrap() {
			errs = append(errs, decodeErrors(key, e)...)
		}
		return errs
	}
	if err == nil {
		return nil
	}
	if de, ok := err.(*mapstructure.DecodeError); ok { //nolint:errorlint // a wrapper may hold several: see below
		return decodeErrors(key+de.Name(), de.Unwrap())
	}
	if inner := errors.Unwrap(err); inner != nil { // mapstructure's words around all the errors of a list
		return decodeErrors(key, inner)
	}
	return []error{fmt.Errorf("%s: %w", key, err)}
}
