package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ParseEvent parses one event written as YAML or JSON, such as {gpu: 3, xid: 79}, and validates what does not depend on
// the profile. `at` is an error: an event that is sent to the agent happens at once.
func ParseEvent(s string) (Event, error) {
	var e Event
	node, err := parseMapping(s)
	if err == nil {
		err = decodeMapping("", node, eventKeys, reflect.ValueOf(&e).Elem())
	}
	if err != nil {
		return Event{}, err
	}
	return e, errors.Join(e.validate()...)
}

// parseMapping returns the one mapping that s consists of.
func parseMapping(s string) (*yaml.Node, error) {
	// JSON allows tabs where YAML does not.
	if compact := new(bytes.Buffer); json.Compact(compact, []byte(s)) == nil {
		s = compact.String()
	}
	dec := yaml.NewDecoder(strings.NewReader(s))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, errors.New("missing event; write one such as {gpu: 3, xid: 79}")
		}
		return nil, fmt.Errorf("invalid event; write one such as {gpu: 3, xid: 79}: %s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s is not an event; write one such as {gpu: 3, xid: 79}", quote(s))
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one event; send one per line")
	}
	return doc.Content[0], nil
}

// keysOf returns the keys of a struct's fields.
func keysOf[T any]() (keys []string) {
	for field := range reflect.TypeFor[T]().Fields() {
		key, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		keys = append(keys, key)
	}
	return keys
}

//nolint:gochecknoglobals // constants
var (
	eventKeys, processKeys = keysOf[Event](), keysOf[Process]()
	effectKeys             = strings.Join(eventKeys[2:], ", ") // without at and gpu
)

// decodeMapping sets the fields of a struct, which have these keys. The key of the struct itself is empty for an event.
func decodeMapping(key string, node *yaml.Node, keys []string, to reflect.Value) error {
	seen := make(map[string]bool)
	for i := 0; i+1 < len(node.Content); i += 2 {
		name := node.Content[i].Value
		field := slices.Index(keys, name)
		if field < 0 || node.Content[i].Kind != yaml.ScalarNode {
			return unknownKey(key, name)
		}
		at := strings.TrimPrefix(key+"."+name, ".")
		if seen[name] {
			return keyErrorf(at, "duplicate key")
		}
		seen[name] = true
		if err := decode(at, node.Content[i+1], to.Field(field)); err != nil {
			return err
		}
	}
	return nil
}

func unknownKey(key, name string) error {
	if key != "" {
		return keyErrorf(key, "%s is not known; use pid with memory, sm, kind, mig", quote(name))
	}
	if name, n, found := strings.Cut(name, ":"); found {
		return keyErrorf(quote(name+":"+n), "no space after the colon; write %s: %s", name, n)
	}
	return keyErrorf(quote(name), "is not known; use gpu with %s", effectKeys)
}

// decode sets a field. It checks the tags of scalars because YAML's decoder would convert values that they exclude: 3.7 to the number 3,
// "on" to true. Quotes have no meaning, as in the configuration.
func decode(key string, node *yaml.Node, to reflect.Value) error {
	scalar := func(expected string, tags ...string) error {
		plain := &yaml.Node{Kind: node.Kind, Value: node.Value}
		if slices.Contains(tags, plain.ShortTag()) && plain.Decode(to.Addr().Interface()) == nil {
			return nil
		}
		got := "a list or mapping"
		if node.Kind == yaml.ScalarNode {
			got = quote(node.Value)
		}
		return keyErrorf(key, "%s is not %s", got, expected)
	}
	switch to.Kind() {
	case reflect.Pointer:
		to.Set(reflect.New(to.Type().Elem()))
		return decode(key, node, to.Elem())
	case reflect.Bool:
		return scalar("true or false", "!!bool")
	case reflect.Int:
		return scalar("a whole number", "!!int")
	case reflect.Float64:
		return scalar("a number", "!!int", "!!float")
	case reflect.String:
		if node.Kind == yaml.ScalarNode {
			to.SetString(node.Value)
		}
		return nil // the check of the key lists the valid names
	case reflect.Struct:
		if node.Kind != yaml.MappingNode {
			return keyErrorf(key, "expected a process such as {pid: 4242, memory: 1073741824}")
		}
		return decodeMapping(key, node, processKeys, to)
	case reflect.Slice:
		if node.Kind != yaml.SequenceNode {
			return keyErrorf(key, "expected a list such as %s", exampleProcesses)
		}
		to.Set(reflect.MakeSlice(to.Type(), len(node.Content), len(node.Content)))
		for i, entry := range node.Content {
			if err := decode(entryKey(key, i), entry, to.Index(i)); err != nil {
				return err
			}
		}
		return nil
	}
	return errAt // Event.At
}
