package helm

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// aFault is a line of check-config that names a key, and maybe an entry of its list.
var aFault = regexp.MustCompile(`(?m)^([a-zA-Z.]+)(?:\[\d+\])?: (.*)$`)

// faults are what the agent says of each key of a configuration; of none if it takes it. Files that the configuration
// names are in volumes, which are not here: that they are missing is no fault.
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
	lines := aFault.FindAllStringSubmatch(string(out), -1)
	if len(lines) == 0 {
		t.Fatalf("%v, and no key is named: %s", err, out)
	}
	all := make(map[string]string)
	for _, line := range lines {
		if !strings.Contains(line[2], "no such file") {
			all[line[1]] += strings.TrimSuffix(line[2], " (in "+file+")") + "\n" // where it is, we know
		}
	}
	return all
}

// changed is the configuration with what `to` makes of each value.
func changed(config map[string]any, prefix string, to func(key string, value any) any) map[string]any {
	made := make(map[string]any, len(config))
	for name, value := range config {
		if section, ok := value.(map[string]any); ok {
			made[name] = changed(section, prefix+name+".", to)
		} else {
			made[name] = to(prefix+name, value)
		}
	}
	return made
}

// aWord is what a value of an enum looks like.
var aWord = regexp.MustCompile(`[A-Za-z][\w-]*`)

// aDuration is what time.ParseDuration takes.
const aDuration = `[-+]?(0|([0-9]*\.?[0-9]*(ns|us|µs|μs|ms|s|m|h))+)`

// ofTexts is what the agent wants of keys that are texts or lists of texts, as far as a schema can say it: one of some
// words, a duration, an absolute path. The agent tells, by what it says of others.
func ofTexts(t *testing.T, defaults map[string]any, wanted map[string]map[string]any) {
	t.Helper()
	asked := func(text func(key string) string) map[string]string {
		return faults(t, asYAML(t, changed(defaults, "", func(key string, value any) any {
			switch value.(type) {
			case string:
				return text(key)
			case []any:
				return []any{text(key)}
			}
			return value
		})))
	}
	said := asked(func(string) string { return "?" })
	empty := asked(func(string) string { return "" })
	for key, text := range said {
		taken := func(text string) bool {
			return asked(func(other string) string { return map[string]string{key: text}[other] })[key] == ""
		}
		orEmpty := ""
		if empty[key] == "" {
			orEmpty = "|^$"
		}
		_, list := at(defaults, strings.Split(key, ".")).([]any)
		switch {
		case taken("1h2m3s"):
			wanted[key] = map[string]any{"pattern": "^" + aDuration + "$" + orEmpty}
		case !list && taken("/no/such/path") && !taken("no/such/path"):
			wanted[key] = map[string]any{"pattern": "^/" + orEmpty}
		case !taken("arbitrary"):
			// The error names the words of an enum. A single one is an example.
			words := slices.DeleteFunc(aWord.FindAllString(text, -1), func(word string) bool { return !taken(word) })
			if len(words) < 2 {
				continue
			}
			wanted[key] = oneOf(t, key, words, taken)
			if list {
				wanted[key] = map[string]any{"items": wanted[key]}
			} else {
				wanted[key]["enum"] = append(wanted[key]["enum"].([]any), nil)
			}
		}
	}
}

// oneOf is the schema of a key that has one of some words, and it fails the test if the agent takes others.
func oneOf(t *testing.T, key string, words []string, taken func(string) bool) map[string]any {
	t.Helper()
	var all []any
	for _, word := range words {
		all = append(all, word)
		if other := strings.ToUpper(word); taken(other) {
			t.Errorf("%s: the agent takes %q, and does not offer it", key, other)
		}
	}
	if taken("") {
		t.Errorf("%s: the agent takes an empty text, and does not offer it", key)
	}
	return map[string]any{"enum": all}
}

// ofNumbers is what the agent wants of keys that are numbers. The bounds are its own: it is asked on both sides of them.
func ofNumbers(t *testing.T, defaults map[string]any, wanted map[string]map[string]any) {
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
		taken := func(number any) bool {
			return faults(t, asYAML(t, changed(defaults, "", func(other string, value any) any {
				if other == key {
					return number
				}
				return value
			})))[key] == ""
		}
		step := 0.001
		switch {
		case !taken(1.5):
			wanted[key], step = orNull("integer"), 1
		case taken("1.5"): // which helm --set makes of it
			wanted[key] = map[string]any{"type": []any{"number", "string", "null"}, "pattern": `^[0-9]+[.][0-9]+$`}
		default:
			wanted[key] = orNull("number")
		}
		if bounds[key] == nil && (!taken(-1e9) || !taken(1e9)) {
			t.Errorf("%s: say its bounds here", key)
		}
		for word, bound := range bounds[key] {
			wanted[key][word] = bound
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
			if !taken(in) || taken(out) {
				t.Errorf("%s: the schema says %s %v, and the agent takes %v: %v, and %v: %v", key, word, bound, in, taken(in), out, taken(out))
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

// at is the value at a path.
func at(values any, path []string) any {
	for _, name := range path {
		section, _ := values.(map[string]any)
		values = section[name]
	}
	return values
}
