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

var update = flag.Bool("update", false, "write the agent's keys into values.schema.json")

// TestSchema holds the schema of `config` against config.yaml, which has every key of the agent, and against the agent
// itself, which knows what it takes. After a new key or word: go test -run TestSchema -update .
func TestSchema(t *testing.T) {
	defaults := read(t, filepath.Join("..", "..", "config.yaml"))
	wanted := make(map[string]map[string]any)
	ofTexts(t, defaults, wanted)
	ofNumbers(t, defaults, wanted)
	config, err := schemaOf(defaults, "", wanted)
	if err != nil {
		t.Fatal(err)
	}
	if t.Failed() {
		return // what it would write is wrong
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
		t.Errorf("%s does not know the keys and words of the agent as they are: go test -run TestSchema -update .", file)
	}
}

// lists are those of names in indented JSON, which fit into a line.
var lists = regexp.MustCompile(`\[\s+[^\[\]{}]*\s\]`)

// schemaOf is the schema of what has such a value by default, or is null, which stands for the default. What else the
// agent wants of a value is added by its key, or that of its list; what no schema can say, it checks itself.
func schemaOf(value any, key string, wanted map[string]map[string]any) (map[string]any, error) {
	var schema map[string]any
	switch v := value.(type) {
	case map[string]any:
		properties := make(map[string]any, len(v))
		for name, value := range v {
			one, err := schemaOf(value, strings.TrimPrefix(key+"."+name, "."), wanted)
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
		return nil, fmt.Errorf("%s: %T is not a value of a configuration", key, value)
	}
	maps.Copy(schema, wanted[key])
	return schema, nil
}

func orNull(kind string) map[string]any {
	return map[string]any{"type": []any{kind, "null"}}
}
