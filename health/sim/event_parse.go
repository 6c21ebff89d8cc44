package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ParseEvent parses one event written as YAML or JSON, such as {gpu: 3, xid: 79}, and validates what does not depend on
// the profile. `at` is an error: an event that is sent to the agent happens at once.
func ParseEvent(s string) (Event, error) {
	node, err := parseMapping(s)
	if err != nil {
		return Event{}, err
	}
	var (
		e    Event
		keys = map[string]bool{}
	)
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			return Event{}, errors.New("a key is not a string; write an event such as {gpu: 3, xid: 79}")
		}
		if keys[key.Value] {
			return Event{}, keyErrorf(key.Value, "duplicate key")
		}
		keys[key.Value] = true
		if err := e.decode(key.Value, value); err != nil {
			return Event{}, err
		}
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

// gpuIndex is Event.GPU, which is not an effect.
//
//nolint:gochecknoglobals // a constant
var gpuIndex = integer(func(e *Event) **int { return &e.GPU }, 0, 0)

func (e *Event) decode(key string, value *yaml.Node) error {
	switch f := effectOf(key); {
	case f != nil:
		return f.decode(e, key, value)
	case key == "gpu":
		return gpuIndex.decode(e, key, value)
	case key == "at":
		return errAt
	}
	if name, n, found := strings.Cut(key, ":"); found {
		return keyErrorf(quote(key), "no space after the colon; write %s: %s", name, n)
	}
	return keyErrorf(quote(key), "is not known; use gpu with %s", effectKeys())
}
