package helm

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the agent's keys into values.schema.json")

// TestSchema holds the schema of `config` against config.yaml, which has every key of the agent. After a new key:
// go test -run TestSchema -update .
func TestSchema(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "config.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var defaults map[string]any
	if err := yaml.Unmarshal(text, &defaults); err != nil {
		t.Fatal(err)
	}
	config, err := schemaOf(defaults)
	if err != nil {
		t.Fatal(err)
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
		t.Errorf("%s does not know the keys of config.yaml as they are: go test -run TestSchema -update .", file)
	}
}

// lists are those of names in indented JSON, which fit into a line.
var lists = regexp.MustCompile(`\[\s+[^\[\]{}]*\s\]`)

// schemaOf is the schema of what has such a value by default, or is null, which stands for the default. What the agent
// makes of it, such as a duration or a list of names, it checks itself.
func schemaOf(value any) (map[string]any, error) {
	switch v := value.(type) {
	case map[string]any:
		properties := make(map[string]any, len(v))
		for key, value := range v {
			one, err := schemaOf(value)
			if err != nil {
				return nil, fmt.Errorf("%s.%w", key, err)
			}
			properties[key] = one
		}
		object := orNull("object")
		object["additionalProperties"], object["properties"] = false, properties
		return object, nil
	case []any:
		return orNull("array"), nil
	case string:
		return orNull("string"), nil
	case bool:
		return orNull("boolean"), nil
	case float64, int64:
		return orNull("number"), nil
	default:
		return nil, fmt.Errorf("%T is not a value of a configuration", value)
	}
}

func orNull(kind string) map[string]any {
	return map[string]any{"type": []any{kind, "null"}}
}
