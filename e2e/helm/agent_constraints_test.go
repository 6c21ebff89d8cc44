package helm

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// faultLine matches a line of check-config that starts with a key, and an entry's index, and a key in it, if the key has a list.
var faultLine = regexp.MustCompile(`(?m)^([a-zA-Z.]+)(?:\[\d+\][a-zA-Z.\[\]\d]*)?: (.*)$`)

// faults returns the agent's errors about a configuration by key, or nil if it is valid. It ignores missing files,
// which would be in volumes.
func faults(t *testing.T, config string) map[string]string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), agentBinary, "check-config", "--config", file).CombinedOutput()
	if err == nil {
		return nil
	}
	lines := faultLine.FindAllStringSubmatch(string(out), -1)
	if len(lines) == 0 {
		t.Fatalf("%v, and no key in the output: %s", err, out)
	}
	all := make(map[string]string)
	for _, line := range lines {
		if !strings.Contains(line[2], "no such file") {
			all[line[1]] += strings.TrimSuffix(line[2], " (in "+file+")") + "\n" // its own path says nothing
		}
	}
	return all
}

// changed returns a copy of the configuration with to applied to each value.
func changed(config map[string]any, prefix string, to func(key string, value any) any) map[string]any {
	result := make(map[string]any, len(config))
	for name, value := range config {
		if section, ok := value.(map[string]any); ok {
			result[name] = changed(section, prefix+name+".", to)
		} else {
			result[name] = to(prefix+name, value)
		}
	}
	return result
}

// wordPattern is what a value of an enum looks like.
var wordPattern = regexp.MustCompile(`[A-Za-z][\w.-]*`)

// durationPattern matches what time.ParseDuration accepts.
const durationPattern = `[-+]?(0|([0-9]*\.?[0-9]*(ns|us|µs|μs|ms|s|m|h))+)`

// texts tries texts as the values of keys with strings or lists of strings.
type texts struct {
	t        *testing.T
	defaults map[string]any
	tried    map[string]map[string]string // by text: the agent's errors by key if every key has it
}

// faults returns the agent's errors by key.
func (c *texts) faults(text func(key string) string) map[string]string {
	c.t.Helper()
	return faults(c.t, asYAML(c.t, changed(c.defaults, "", func(key string, value any) any {
		switch value.(type) {
		case string:
			return text(key)
		case []any:
			return []any{text(key)}
		}
		return value
	})))
}

// everywhere returns the agent's errors by key if every key has the text.
func (c *texts) everywhere(text string) map[string]string {
	c.t.Helper()
	if c.tried[text] == nil {
		c.tried[text] = c.faults(func(string) string { return text })
	}
	return c.tried[text]
}

// accepts reports whether the agent accepts a text as the value of a key.
func (c *texts) accepts(key, text string) bool {
	c.t.Helper()
	fault := c.everywhere(text)[key]
	if fault == "" || strings.ReplaceAll(fault, strconv.Quote(text), `"?"`) == c.everywhere("?")[key] {
		return fault == ""
	}
	// The error may be that another key has the same text.
	return c.faults(func(other string) string { return map[string]string{key: text}[other] })[key] == ""
}

// addStringSchemas adds the schemas of keys with strings or lists of strings, as far as a schema can express them: an enum, a
// duration, an absolute path, a size, a domain, the name of a resource, a taint. It tries values on the agent.
func addStringSchemas(t *testing.T, defaults map[string]any, constraints map[string]map[string]any) {
	t.Helper()
	tries := &texts{t, defaults, make(map[string]map[string]string)}
	for key, text := range tries.everywhere("?") {
		accepts := func(text string) bool { return tries.accepts(key, text) }
		orEmpty := ""
		if accepts("") {
			orEmpty = "|^$"
		}
		_, list := at(defaults, strings.Split(key, ".")).([]any)
		switch {
		case key == "metrics.fields": // has any name of DCGM's; see addEntrySchemas
		case !list && accepts("gpu.example.com"): // which may look like a duration
			constraints[key] = map[string]any{"pattern": domain + orEmpty, "maxLength": 63}
		case !list && accepts("1m"):
			constraints[key] = map[string]any{"pattern": "^" + durationPattern + "$" + orEmpty}
		case !list && accepts("/no/such/nvidia-ctk") && !accepts("no/such/nvidia-ctk"): // a name that plugin.cdi.hookPath accepts
			constraints[key] = map[string]any{"pattern": "^/" + orEmpty}
		case !list && accepts("8Gi"):
			constraints[key] = map[string]any{"pattern": size + orEmpty}
		case !list && accepts("a/b:NoSchedule"):
			constraints[key] = map[string]any{"pattern": "^" + labelKey + "(=" + labelValue + ")?:(NoSchedule|PreferNoSchedule|NoExecute)$" +
				orEmpty}
		case !list && accepts("a.b/c"):
			constraints[key] = map[string]any{"pattern": resourceName + orEmpty}
		case !accepts("arbitrary"):
			// The error names the words of an enum. A single one is an example.
			words := slices.DeleteFunc(wordPattern.FindAllString(text, -1), func(word string) bool { return !accepts(word) })
			if len(words) < 2 {
				continue
			}
			constraints[key] = enumSchema(t, key, words, accepts)
			if list {
				constraints[key] = map[string]any{"items": constraints[key]}
			} else {
				constraints[key]["enum"] = append(constraints[key]["enum"].([]any), nil)
				if accepts("false") { // an unquoted off
					constraints[key]["enum"] = append(constraints[key]["enum"].([]any), false)
					constraints[key]["type"] = []any{"string", "boolean", "null"}
				}
			}
		}
	}
}

// enumSchema returns the schema of an enum. It fails the test if the agent accepts other values.
func enumSchema(t *testing.T, key string, words []string, accepts func(string) bool) map[string]any {
	t.Helper()
	var all []any
	for _, word := range words {
		all = append(all, word)
		if other := strings.ToUpper(word); accepts(other) {
			t.Errorf("%s: the agent accepts %q, which its error does not name", key, other)
		}
	}
	if accepts("") {
		t.Errorf("%s: the agent accepts an empty string, which its error does not name", key)
	}
	return map[string]any{"enum": all}
}

// addNumberSchemas adds the schemas of keys with numbers. It tries values on both sides of each bound on the agent.
func addNumberSchemas(t *testing.T, defaults map[string]any, constraints map[string]map[string]any) {
	t.Helper()
	bounds := map[string]map[string]float64{
		"health.confirm":     {"minimum": 1, "maximum": 100},
		"health.flap.trips":  {"minimum": 0, "maximum": 100},
		"health.temperature": {"exclusiveMinimum": 0, "exclusiveMaximum": 200},
		"metrics.idleBelow":  {"minimum": 0, "maximum": 100},
	}
	for _, path := range paths(defaults) {
		if _, number := at(defaults, path).(float64); !number {
			continue
		}
		key := strings.Join(path, ".")
		accepts := func(number any) bool {
			return faults(t, asYAML(t, changed(defaults, "", func(other string, value any) any {
				if other == key {
					return number
				}
				return value
			})))[key] == ""
		}
		step := 0.001
		switch {
		case !accepts(1.5):
			constraints[key], step = orNull("integer"), 1
		case accepts("1.5"): // from helm --set
			constraints[key] = map[string]any{"type": []any{"number", "string", "null"}, "pattern": `^[0-9]+[.][0-9]+$`}
		default:
			constraints[key] = orNull("number")
		}
		if bounds[key] == nil && (!accepts(-1e9) || !accepts(1e9)) {
			t.Errorf("%s: add its bounds here", key)
		}
		for word, bound := range bounds[key] {
			constraints[key][word] = bound
			in, out := bound, bound
			switch word {
			case "minimum":
				out -= step
			case "maximum":
				out += step
			case "exclusiveMinimum":
				in += step
			case "exclusiveMaximum":
				in -= step
			}
			if !accepts(in) || accepts(out) {
				t.Errorf("%s: schema has %s %v, but the agent accepts %v: %v, and %v: %v", key, word, bound, in, accepts(in), out, accepts(out))
			}
		}
	}
}

func asYAML(t *testing.T, config map[string]any) string {
	t.Helper()
	text, err := yaml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// at returns the value at a path.
func at(values any, path []string) any {
	for _, name := range path {
		section, _ := values.(map[string]any)
		values = section[name]
	}
	return values
}
