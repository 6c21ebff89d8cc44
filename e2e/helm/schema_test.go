package helm

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "update the keys in values.schema.json")

// TestSchema checks the schema of config against config.yaml, which has every key of the agent, and against the values
// that the agent accepts. After a change: go test -run TestSchema -update .
func TestSchema(t *testing.T) {
	defaults := read(t, filepath.Join("..", "..", "config.yaml"))
	constraints := make(map[string]map[string]any)
	addStringSchemas(t, defaults, constraints)
	addNumberSchemas(t, defaults, constraints)
	addEntrySchemas(constraints)
	config, err := schemaOf(defaults, "", constraints)
	if err != nil {
		t.Fatal(err)
	}
	if t.Failed() {
		return // the schema would be wrong
	}
	file := filepath.Join(chart, "values.schema.json")
	was, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(was, &schema); err != nil {
		t.Fatal(err)
	}
	schema["definitions"] = map[string]any{"config": config}
	var indented bytes.Buffer
	enc := json.NewEncoder(&indented)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(schema); err != nil {
		t.Fatal(err)
	}
	is := lists.ReplaceAllFunc(indented.Bytes(), func(list []byte) []byte {
		words := strings.Fields(string(list[1 : len(list)-1]))
		return []byte("[" + strings.Join(words, " ") + "]")
	})
	if *update {
		if err := os.WriteFile(file, is, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(was, is) {
		t.Errorf("%s is out of date: go test -run TestSchema -update .", file)
	}
}

// lists matches lists of strings in indented JSON, which fit into a line.
var lists = regexp.MustCompile(`\[\s+[^\[\]{}]*\s\]`)

// schemaOf returns the schema of a value from its default; null stands for the default. constraints has more conditions by
// key. The agent checks the rest.
func schemaOf(value any, key string, constraints map[string]map[string]any) (map[string]any, error) {
	var schema map[string]any
	switch v := value.(type) {
	case map[string]any:
		properties := make(map[string]any, len(v))
		for name, value := range v {
			one, err := schemaOf(value, strings.TrimPrefix(key+"."+name, "."), constraints)
			if err != nil {
				return nil, err
			}
			properties[name] = one
		}
		schema = orNull("object")
		schema["additionalProperties"], schema["properties"] = false, properties
	case []any:
		schema = orNull("array")
	case string:
		schema = orNull("string")
	case bool:
		schema = orNull("boolean")
	case float64:
		schema = orNull("number")
	default:
		return nil, fmt.Errorf("%s: unexpected type %T", key, value)
	}
	maps.Copy(schema, constraints[key])
	return schema, nil
}

func orNull(kind string) map[string]any {
	return map[string]any{"type": []any{kind, "null"}}
}
