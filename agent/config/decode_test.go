package config

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health/judge"
)

func TestKindErrors(t *testing.T) {
	for text, want := range map[string][]string{ // the key, and what the error contains
		`health: {cordon: "3"}`:         {"health.cordon", "[3]", `"3"`},
		`health: {cordon: 3}`:           {"health.cordon", "[3]", `"3"`},
		`health: {cordon: [[a]]}`:       {"health.cordon[0]", "such as 3", "[a]"},
		`health: {xid: {warn: 13}}`:     {"health.xid.warn", "[48]", `"13"`},
		`health: {xid: {warn: {a: b}}}`: {"health.xid.warn", "[48]", "{a: b}"},
		`health: {xid: {warn: [a]}}`:    {"health.xid.warn[0]", "such as 48", `"a"`},
		`plugin: {enabled: 1}`:          {"plugin.enabled", "true or false", `"1"`},
		`plugin: {enabled: [true]}`:     {"plugin.enabled", "true"},
		`plugin: {enabled: "yes"}`:      {"plugin.enabled", `"yes"`},
		`plugin: {include: all}`:        {"plugin.include", "[all]", `"all"`},
		`plugin: {deviceList: {a: b}}`:  {"plugin.deviceList", "[envvar]", "{a: b}"},
		`plugin: {resources: 5}`:        {"plugin.resources", "[{pattern: ", `"5"`},
		`plugin: {resources: [5]}`:      {"plugin.resources[0]", " {pattern: ", `"5"`},
		`plugin: {sharing: {timeSlicing: {resources: [{devices: all}]}}}`: {"plugin.sharing.timeSlicing.resources[0].devices", "[all]", `"all"`},
		`health: {temperature: true}`:                                     {"health.temperature", "a number", "true"},
		`health: {temperature: {a: [b, {c: d}]}}`:                         {"health.temperature", "{a: [b, {c: d}]}"},
		`health: {confirm: [2]}`:                                          {"health.confirm", "2"},
		`health: {confirm: 2.9}`:                                          {"health.confirm", "a whole number", "2.9"},
		`health: {confirm: "2.9"}`:                                        {"health.confirm", "2.9"},
		`health: {confirm: .nan}`:                                         {"health.confirm", "NaN"},
		`health: {confirm: 1e99}`:                                         {"health.confirm", "1e+99"},
		`health: {flap: {trips: 9223372036854775808}}`:                    {"health.flap.trips", "9223372036854775808"},
		`health: {1: 2}`:                                                  {"health.1"},
		`health: {flap: {1: 2, trips: x}}`:                                {"health.flap.trips", `"x"`},
		`health: [a]`:                                                     {"health", "[a]"},
		`source: {interval: 10}`:                                          {"source.interval", "1m", `"10"`},
		`source: {interval: [a]}`:                                         {"source.interval", "1m", "[a]"},
		`source: {sim: {scenario: [{at: 1s, gpu: 0, lost: 1}]}}`:          {"source.sim.scenario[0].lost", `"1"`},
		`source: {sim: {scenario: [{at: 1s, gpu: 0, xid: "7.5"}]}}`:       {"source.sim.scenario[0].xid", "7.5"},
		`metrics: {fields: [5]}`:                                          {"metrics.fields[0].name", `"5"`},
		`metrics: {podLabels: "/^a{1,2}/"}`:                               {"metrics.podLabels", `"/^team-/"]`, `"/^a{1,2}/"`},
	} {
		_, err := load(t, text)
		wantError(t, text, err, want[0], append(want[1:], "(in ")...)
	}
}

// The error of a flag names the flag.
func TestKindErrorsOfFlags(t *testing.T) {
	for flag, want := range map[string][]string{
		"--metrics.fields=default":        {"metrics.fields", "[default]", "(in --metrics.fields)"},
		"--metrics.podLabels=[*]":         {"metrics.podLabels", `"/^team-/"]`, `"[*]"`, "(in --metrics.podLabels)"},
		"--health.confirm=2.9":            {"health.confirm", "2.9", "(in --health.confirm)"},
		"--health.confirm=200":            {"health.confirm", "200", "(in --health.confirm)"},
		"--health.xid.warn=[13,":          {"health.xid.warn", "[48]", `"[13,"`, "(in --health.xid.warn)"},
		"--source.sim.scenario=[{xid: 5}": {"source.sim.scenario", "[{at: 5s, ", `"[{xid: 5}"`, "(in --source.sim.scenario)"},
	} {
		_, err := load(t, "", flag)
		wantError(t, flag, err, want[0], want[1:]...)
	}
}

func TestWholeNumbers(t *testing.T) {
	for text, want := range map[string]int{"2": 2, "2.0": 2, "1e1": 10, `"7"`: 7, `"7.0"`: 7, "0x10": 16} {
		if c, err := load(t, "health: {confirm: "+text+"}"); err != nil || c.Health.Confirm != want {
			t.Errorf("%s is %d, %v; want %d", text, c.Health.Confirm, err, want)
		}
	}
	want := judge.DefaultConfig().Confirm
	if c, err := load(t, "health: {confirm: }"); err != nil || c.Health.Confirm != want {
		t.Errorf("no value is %d, %v; want %d", c.Health.Confirm, err, want)
	}
}

// A boolean flag needs no value, and does not take the next argument as one.
func TestBooleanFlags(t *testing.T) {
	for _, c := range []struct {
		flags []string
		pass  bool
		level string
	}{
		{[]string{"--plugin.passDeviceSpecs", "--log.level", "debug"}, true, "debug"},
		{[]string{"--log.level", "debug", "--plugin.passDeviceSpecs"}, true, "debug"},
		{[]string{"--plugin.passDeviceSpecs=true"}, true, "info"},
		{[]string{"--plugin.passDeviceSpecs=false"}, false, "info"},
	} {
		got, err := load(t, "plugin: {passDeviceSpecs: true}", c.flags...)
		if err != nil || got.Plugin.PassDeviceSpecs != c.pass || got.Log.Level != c.level {
			t.Errorf("%q: %v, %s, %v", c.flags, got.Plugin.PassDeviceSpecs, got.Log.Level, err)
		}
	}
}

// A device reference keeps the text that YAML would take for another number, in the file and in a flag.
func TestDeviceReferencesKeepTheirText(t *testing.T) {
	for text, want := range map[string]string{ // "" is an error
		"3": "3", `"3"`: "3", "3:0": "3:0", "010": "010", "08": "08", "12:10": "12:10", "1b:00.0": "1b:00.0", "00:1e.0": "00:1e.0",
		"0000:10:00.0": "0000:10:00.0",
		"0x1b":         "", "3.0": "", "-1": "", "+1": "", "1_0": "", "1e3": "", ".5": "", "1:2:3": "", "~": "", "2024-01-01": "", "0-3": "",
	} {
		for key, got := range map[string]func(Config) []string{
			"health.cordon":                        func(c Config) []string { return c.Health.Cordon },
			"plugin.include":                       func(c Config) []string { return c.Plugin.Include },
			"plugin.exclude":                       func(c Config) []string { return c.Plugin.Exclude },
			"plugin.sharing.timeSlicing.resources": func(c Config) []string { return c.Plugin.Sharing.TimeSlicing.Resources[0].Devices },
			"plugin.sharing.mps.resources":         func(c Config) []string { return c.Plugin.Sharing.MPS.Resources[0].Devices },
			"plugin.sharing.memory.devices":        func(c Config) []string { return c.Plugin.Sharing.Memory.Devices },
		} {
			list, at := "["+text+"]", key+"[0]"
			if strings.HasSuffix(key, "resources") {
				list, at = "[{name: nvidia.com/gpu, replicas: 2, devices: ["+text+"]}]", key+"[0].devices[0]"
			}
			section, rest, _ := strings.Cut(key, ".")
			file := section + ": {" + strings.ReplaceAll(rest, ".", ": {") + ": " + list + strings.Repeat("}", strings.Count(key, "."))
			for name, loaded := range map[string]func() (Config, error){
				file:                    func() (Config, error) { return load(t, file) },
				"--" + key + "=" + list: func() (Config, error) { return load(t, "", "--"+key+"="+list) },
			} {
				c, err := loaded()
				if want == "" {
					wantError(t, name, err, at)
				} else if err != nil || !slices.Equal(got(c), []string{want}) {
					t.Errorf("%s: %v, want %s", name, err, want)
				}
			}
		}
	}
}

// Every list, also one in an entry of another list, has a valid example for errors.
func TestListExamples(t *testing.T) {
	used := 0
	var check func(key string, value reflect.Type, set func(example string) string)
	check = func(key string, value reflect.Type, set func(example string) string) {
		if value.Kind() != reflect.Slice {
			return
		}
		used++
		text := listExamples[key]
		if text == "" {
			t.Fatalf("no example of %s", key)
		}
		section, _, _ := strings.Cut(key, "[]")
		if _, err := load(t, "", "--"+section+"="+set(text)); err != nil {
			t.Errorf("%s: %v", key, err)
		}
		if entry := value.Elem(); entry.Kind() == reflect.Struct {
			for f := range entry.Fields() {
				check(key+"[]."+yamlKey(f), f.Type, func(example string) string {
					return strings.Replace(text, "}", ", "+yamlKey(f)+": "+example+"}", 1)
				})
			}
		}
	}
	for _, s := range new(Config).settings() {
		check(s.key, s.value.Type(), func(example string) string { return example })
	}
	if used != len(listExamples) {
		t.Errorf("%d lists, %d examples", used, len(listExamples))
	}
}

// advice returns the values that an error names as valid: examples, the ends of a range, the values of an enum.
func advice(text string) (values []string) {
	for _, m := range regexp.MustCompile(`such as (\[.*\]|\{.*\}|"[^"]+"|[^ ,;]+)`).FindAllStringSubmatch(text, -1) {
		values = append(values, m[1])
	}
	for _, m := range regexp.MustCompile(`expected (\S+) to ([^ ,]+), `).FindAllStringSubmatch(text, -1) {
		values = append(values, m[1:]...)
	}
	for _, m := range regexp.MustCompile(`(?:one of|one or more of|expected) ([\w, -]+), got`).FindAllStringSubmatch(text, -1) {
		if list := strings.ReplaceAll(m[1], " or ", ", "); strings.Contains(list, ", ") &&
			!strings.Contains(strings.ReplaceAll(list, ", ", ""), " ") {
			values = append(values, strings.Split(list, ", ")...)
		}
	}
	return values
}

// What an error names as valid is valid.
func TestAdviceWorks(t *testing.T) {
	followed := make(map[string]bool)
	follow := func(s setting, bad, text string) {
		for _, value := range advice(text) {
			if s.value.Kind() == reflect.Slice && !strings.HasPrefix(value, "[") {
				value = "[" + value + "]"
			}
			flag := "--" + s.key + "=" + value
			if _, err := load(t, "", flag); err != nil && strings.Contains(err.Error(), s.key) {
				t.Errorf("%s: %s\n%s: %v", bad, text, flag, err)
			}
			followed[flag] = true
		}
	}
	for _, s := range new(Config).settings() {
		for _, bad := range []string{"?", "all", "7", "-1", "1000h", "[?]", "[-1]", "[all]", "{a: b}", "[{}]", "[[]]"} {
			_, err := load(t, "", "--"+s.key+"="+bad)
			_ = mapErrors(err, func(err error) error {
				key, rest, _ := strings.Cut(err.Error(), ": ")
				if list, below, isEntry := strings.Cut(key, "["); list == s.key && (!isEntry || strings.HasSuffix(below, "]")) {
					follow(s, bad, rest)
				}
				return nil
			})
		}
	}
	if len(followed) < 80 {
		t.Errorf("only %d values were tried", len(followed))
	}
}

// An unknown key of an entry has a hint, and a key that is written twice in different cases is an error.
func TestKeysOfEntries(t *testing.T) {
	const list = "plugin.sharing.timeSlicing.resources"
	for entry, want := range map[string]string{
		"{name: nvidia.com/gpu, replica: 4}":           list + "[0].replica: unknown key; did you mean replicas?",
		"{name: nvidia.com/gpu, replicas:4}":           list + "[0].replicas:4: unknown key; write a space after the colon: replicas: 4",
		"{name: nvidia.com/gpu, count: {}}":            list + "[0].count: unknown key; the keys are name, replicas, devices, rename",
		"{name: nvidia.com/gpu, replicas: 0}":          list + "[0].replicas: expected 2 to 1000, got 0 or no value",
		"{name: nvidia.com/gpu}":                       list + "[0].replicas: expected 2 to 1000, got 0 or no value",
		"{name: nvidia.com/gpu, NAME: x, replicas: 4}": list + "[0]: name: same key as NAME",
	} {
		_, err := load(t, "", "--"+list+"=["+entry+"]")
		if !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: %v, want %s", entry, err, want)
		}
	}
}

// An entry can have the keys of another by YAML's merge.
func TestMergedEntries(t *testing.T) {
	c := mustLoad(t, "plugin: {sharing: {timeSlicing: {resources: [&a {name: nvidia.com/gpu, replicas: 2}, "+
		"{<<: *a, name: nvidia.com/mig-1g.10gb}]}}}")
	if r := c.Plugin.Sharing.TimeSlicing.Resources; len(r) != 2 || r[1].Name != "nvidia.com/mig-1g.10gb" || r[1].Replicas != 2 {
		t.Errorf("%+v", r)
	}
}
