package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// FuzzLoad loads any file. A configuration that loads is valid, and the output of check-config loads as the same. Otherwise
// every error has a text.
func FuzzLoad(f *testing.F) {
	defaults, err := os.ReadFile("../../config.yaml")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(defaults))
	for _, text := range []string{
		"source: {mode: sim}", "a: &a [*a]", "? [x]: y", "? {log: 1}\n: 2", "\xff\xfe", "---\nlog:\n---\nlog:", "log: !!binary aGk=",
		"log: {<<: {level: warn}}",
		"plugin: {kubeletDir: 5, x: [1, {a: b}]}", "Plugin: {RESOURCE: a.b/c}\nplugin: {resource: c.d/e}",
		"plugin: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2, devices: ['0', GPU-1]}, null, 7]}}}",
		"plugin: {resources: [{pattern: '*', resource: nvidia.com/mig-1g.10gb}], deviceList: [cdi-cri, cdi-cri], cdi: {generate: maybe}}",
		"source: {sim: {scenario: [{at: 1s, gpu: 3, lost: maybe}]}}",
		"source: {sim: {scenario: [{at: 1s, gpu: 3, temperature: .inf}, {at: -1s, gpu: 1e3, xid: 0x4f}]}}",
		"source: {interval: 1e9, stallAfter: 10000000000h}",
		"health: {temperature: .nan, xid: {unhealthy: [13, 13, '13', 13.0], warn: [99999999999999999999]}}",
		"health: {incidents: {ignore: [~]}, flap: {trips: 9223372036854775808}}",
		"metrics: {fields: [default, {name: DCGM_FI_DEV_FB_TOTAL, help: \"\\0\\n\"}, 5, [a]], listen: ':99999'}",
		"plugin: {resources: [{5: x}]}\nsource: {sim: {scenario: [{~: 1}]}}", "metrics: {idleBelow: 1e400, window: 2562047h47m16.854775807s}",
		"log: {level: [info], format: {a: b}}", "metrics: {podLabels: [team-*, '/^a\\/.*/', \"*\", /[/], podUID: yes}", "log:\n\tlevel: info",
		"health: {1: 2, ~: 3, confirm: 2.0}", "health: {confirm: '2.9', flap: {1: x, trips: 18446744073709551615}}", "log: {}\n---\n---\nlog: {}",
		"- log", "plugin: {sharing: {timeSlicing: {resources: [{2: x}]}}}",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := load(t, text)
		if err != nil {
			for line := range strings.SplitSeq(err.Error(), "\n") {
				if strings.TrimSpace(line) == "" {
					t.Errorf("error without a text in %q", err)
				}
			}
			return
		}
		if err := c.Validate(); err != nil {
			t.Errorf("loaded, but invalid: %v", err)
		}
		// The content of other files may differ between two loads.
		if c.Plugin.NVIDIAConfig != "" || c.Metrics.FieldsFile != "" || c.Metrics.WebConfigFile != "" {
			return
		}
		again, err := load(t, c.String())
		if err != nil {
			t.Fatalf("the output of check-config does not load: %v\n%s", err, c)
		}
		if again.String() != c.String() {
			t.Errorf("loaded again as\n%s\nwant\n%s", again, c)
		}
	})
}

// FuzzEnvironment sets one key to any value, by its variable and by its flag. Both have the same result, and an error names
// the key and the variable or flag.
func FuzzEnvironment(f *testing.F) {
	settings := new(Config).settings()
	index := func(key string) uint8 {
		i := slices.IndexFunc(settings, func(s setting) bool { return s.key == key })
		if i < 0 {
			f.Fatalf("no key %s", key)
		}
		return uint8(i)
	}
	for key, values := range map[string][]string{
		"log.level":       {"debug", "DEBUG", "", " info", "[info]", "null"},
		"source.interval": {"10s", "10", "0", "-1s", "1h0m0.000000001s", "9999999h"},
		"source.sim.scenario": {
			"[{at: 1s, gpu: 0, xid: 13}]", "[{at: 1s, gpu: 0, xid: 13, xid: 14}]", "{}", "[[]]",
			"- at: 1s\n  gpu: 0\n  lost: yes", "- 0:", "- {1: 2, a: b}",
		},
		"source.sim.past":        {"[{ago: 10s, gpu: 5, xid: 95}]", "[{ago: 10, gpu: 5}]", "[{ago: -1s, gpu: 99, xid: 0x4f}]", "[[]]"},
		"source.sim.seed":        {"7", "7.0", "0x7", "9223372036854775808", "1_000"},
		"health.flap.trips":      {"3.9", "3.0", "1e3", "1e99", "18446744073709551615", "true", "[3]", "{3: 3}"},
		"health.cordon":          {"3", "[3]", "3,GPU-1", "[*]", "[\"3\"]", "{a: b}", "!!binary aGk="},
		"health.temperature":     {"90", ".nan", "1e2", "-.inf", "9O"},
		"health.xid.unhealthy":   {"[13, 31]", "13", "[a]", "[[13]]", "[13.5]", "&a [*a]"},
		"plugin.include":         {"['0']", "[0]", "[]", "0", "[~]", "['0', '0:1', 'GPU-1']"},
		"plugin.passDeviceSpecs": {"true", "yes", "1", "'true'", "!!bool true"},
		"plugin.kubeletDir":      {"/k", "k", "/" + strings.Repeat("k", 100), "/k\n/l"},
		"plugin.resources":       {"[{pattern: '*', resource: a.b/c}]", "[{pattern: '*', resource: a.b/c, x: y}]"},
		"plugin.dra.driverName":  {"gpu.nvidia.com", "GPU", "a/b", ".", strings.Repeat("d", 64)},
		"plugin.dra.evictOn":     {"[xid=79]", "xid=79,lost", "[xid=0]", "[dcgm-nvlink-down]", "[]"},
		"metrics.fields":         {"[default]", "[{name: X, help: y}]", "DCGM_FI_DEV_GPU_TEMP", "[default, default]"},
		"metrics.podLabels":      {"[team, app.kubernetes.io/name]", `["/^team-/", '/.*/']`, `[/^a{2,3}$/]`, "[/a]", "[*]", "*", "team"},
		"metrics.podUID":         {"true", "1"},
		"metrics.listen":         {":9400", "9400", "[::1]:9400", "localhost:http"},
	} {
		for _, v := range values {
			f.Add(index(key), v)
		}
	}
	file := filepath.Join(f.TempDir(), "empty.yaml")
	write(f, file, "")
	defaults := DefaultConfig().String()
	f.Fuzz(func(t *testing.T, index uint8, value string) {
		key := settings[int(index)%len(settings)].key
		if strings.Contains(value, "\x00") {
			return // not possible in a variable
		}
		if strings.HasSuffix(key, "Config") || strings.HasSuffix(key, "File") {
			return // names a file that Load would read
		}
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		AddFlags(flags)
		if err := flags.Set(key, value); err != nil {
			t.Fatal(err)
		}
		byFlag, flagErr := Loader{File: file, Flags: flags}.Load()
		t.Setenv(envName(key), value)
		byEnv, envErr := Loader{File: file}.Load()
		if value == "" { // an empty variable counts as unset
			if envErr != nil || byEnv.String() != defaults {
				t.Errorf("an empty variable of %s: %v\n%s", key, envErr, byEnv)
			}
			return
		}
		withoutOrigin := func(err error, origin string) string {
			return strings.ReplaceAll(fmt.Sprint(err), " (in "+origin+")", "")
		}
		if (flagErr == nil) != (envErr == nil) || withoutOrigin(flagErr, "--"+key) != withoutOrigin(envErr, envName(key)) ||
			byFlag.String() != byEnv.String() {
			t.Fatalf("%s=%q: with the flag %v\n%s\nwith the variable %v\n%s", key, value, flagErr, byFlag, envErr, byEnv)
		}
		if envErr != nil {
			section, _, _ := strings.Cut(key, ".")
			if !strings.Contains(envErr.Error(), key) && !strings.Contains(envErr.Error(), section+".") {
				t.Errorf("%s=%q: %v does not name the key", key, value, envErr)
			}
			return
		}
		again, err := load(t, byEnv.String())
		if err != nil || again.String() != byEnv.String() {
			t.Errorf("%s=%q is loaded again as\n%s, %v\nwant\n%s", key, value, again, err, byEnv)
		}
	})
}

// FuzzParsePartial appends an invalid section to any text. Nothing of the sections before it is lost.
func FuzzParsePartial(f *testing.F) {
	for _, text := range []string{
		"log: {level: info}\nmetrics:\n  listen: :9500", "a: |+\n  b\n\n", "a: [\nb: 1", "a: 1\n\tb: 2\n",
		"a:\r\n  b: 1\r\n", "---\n- a", "? [x]: y", "\xff",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > maxPartial/2 {
			return
		}
		before, after := treeOf(parsePartial([]byte(text+"\n"))), treeOf(parsePartial([]byte(text+"\nx: ]\n")))
		if fmt.Sprint(before) != fmt.Sprint(after) {
			t.Errorf("%v\nwith an invalid section\n%v", before, after)
		}
	})
}
