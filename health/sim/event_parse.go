package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// ParseEvent reads one event written as YAML or JSON, `{gpu: 3, xid: 79}`. Its errors name the key and say
// what would be right. Whether the machine has that GPU is left to whoever knows the machine. `at` is an
// error: an event that is sent happens at once.
func ParseEvent(s string) (Event, error) {
	node, err := mapping(s)
	if err != nil {
		return Event{}, err
	}
	var (
		e    Event
		seen = map[string]bool{}
	)
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			return Event{}, errors.New("a key must be a word, as in {gpu: 3, xid: 79}")
		}
		if seen[key.Value] {
			return Event{}, fmt.Errorf("%s: is given twice", key.Value)
		}
		seen[key.Value] = true
		if err := e.set(key.Value, value); err != nil {
			return Event{}, err
		}
	}
	if err := joinFaults(e.faults()); err != nil {
		return Event{}, err
	}
	return e, nil
}

// mapping returns the one mapping that s consists of.
func mapping(s string) (*yaml.Node, error) {
	// JSON may have tabs where YAML may not.
	if compact := new(bytes.Buffer); json.Compact(compact, []byte(s)) == nil {
		s = compact.String()
	}
	dec := yaml.NewDecoder(strings.NewReader(s))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, errors.New("there is no event; write it as {gpu: 3, xid: 79}")
		}
		return nil, fmt.Errorf("not an event as {gpu: 3, xid: 79}: %s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s is not an event; write it as {gpu: 3, xid: 79}", quote(s))
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one event; send one a line")
	}
	return doc.Content[0], nil
}

// set reads one effect.
func (e *Event) set(key string, value *yaml.Node) error {
	switch key {
	case "gpu":
		return decode(key, "a whole number", value, &e.GPU, "!!int")
	case "xid":
		return decode(key, "a whole number", value, &e.XID, "!!int")
	case "lost":
		return decode(key, "true or false", value, &e.Lost, "!!bool")
	case "stale":
		return decode(key, "true or false", value, &e.Stale, "!!bool")
	case "recoveryAction":
		return decode(key, "a number or one of "+strings.Join(recoveryWords(), ", "), value, &e.RecoveryAction, "!!int", "!!str")
	case "rowRemapPending":
		return decode(key, "true or false", value, &e.RowRemapPending, "!!bool")
	case "rowRemapFailed":
		return decode(key, "true or false", value, &e.RowRemapFailed, "!!bool")
	case "doubleBitErrors":
		return decode(key, "a whole number", value, &e.DoubleBitErrors, "!!int")
	case "retiredPages":
		return decode(key, "a whole number", value, &e.RetiredPages, "!!int")
	case "clocksSlowed":
		return decode(key, "true or false", value, &e.ClocksSlowed, "!!bool")
	case "incident":
		return decode(key, "a name of DCGM's, such as "+anIncident, value, &e.Incident, "!!str")
	case "severity":
		return decode(key, "one of "+strings.Join(severityWords(), ", "), value, &e.Severity, "!!str")
	case "temperature":
		return decode(key, "a number of °C", value, &e.Temperature, "!!int", "!!float")
	case "mig":
		return decode(key, "one of "+strings.Join(migWords(), ", "), value, &e.MIG, "!!str")
	case "times":
		return decode(key, "a whole number", value, &e.Times, "!!int")
	case "source":
		return decode(key, "one of "+strings.Join(sourceWords(), ", "), value, &e.Source, "!!str")
	case "at":
		return errors.New("at: belongs into a scenario; an event that is sent happens at once")
	}
	return fmt.Errorf("%s: is not known; use gpu with %s", quote(key), strings.Join(effectKeys(), ", "))
}

// decode reads a single value that YAML resolves to one of the tags. The tags are checked because the
// decoder takes more than we mean: 3.7 as the number 3, "on" as true.
func decode[T any](key, want string, value *yaml.Node, to **T, tags ...string) error {
	v := new(T)
	if value.Kind != yaml.ScalarNode || !slices.Contains(tags, value.ShortTag()) || value.Decode(v) != nil {
		text := value.Value
		if value.Kind != yaml.ScalarNode {
			text = "what is given"
		} else {
			text = quote(text)
		}
		return fmt.Errorf("%s: %s is not %s", key, text, want)
	}
	*to = v
	return nil
}
