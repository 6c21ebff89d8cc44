package config

import (
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

func TestKindErrors(t *testing.T) {
	for text, want := range map[string][]string{ // the key, and what the error contains
		`health: {cordon: "3"}`:                                     {"health.cordon", `["3"]`, `"3"`},
		`health: {cordon: 3}`:                                       {"health.cordon", `["3"]`, "number 3"},
		`health: {cordon: "3, GPU-1"}`:                              {"health.cordon", `["3", "GPU-1"]`, `"3, GPU-1"`},
		`health: {cordon: [3]}`:                                     {"health.cordon[0]", `"3"`, "number 3"},
		`health: {cordon: [[a]]}`:                                   {"health.cordon[0]", "[a]"},
		`health: {xid: {warn: 13}}`:                                 {"health.xid.warn", "[13]", "number 13"},
		`health: {xid: {warn: {a: b}}}`:                             {"health.xid.warn", "[1, 2]", "{a: b}"},
		`health: {xid: {warn: [a]}}`:                                {"health.xid.warn[0]", `"a"`},
		`plugin: {enabled: 1}`:                                      {"plugin.enabled", "true or false", "number 1"},
		`plugin: {enabled: [true]}`:                                 {"plugin.enabled", "[true]"},
		`plugin: {enabled: "yes"}`:                                  {"plugin.enabled", `"yes"`},
		`plugin: {deviceList: {a: b}}`:                              {"plugin.deviceList", `["a", "b"]`, "{a: b}"},
		`plugin: {resources: 5}`:                                    {"plugin.resources", "[{key: value}]", "number 5"},
		`plugin: {resources: [5]}`:                                  {"plugin.resources[0]", "{key: value}", "number 5"},
		`health: {temperature: true}`:                               {"health.temperature", "a number", "true"},
		`health: {temperature: "true"}`:                             {"health.temperature", `"true"`},
		`health: {temperature: {a: [b, {c: d}]}}`:                   {"health.temperature", "{a: [b, {c: d}]}"},
		`health: {confirm: [2]}`:                                    {"health.confirm", "[2]"},
		`health: {confirm: 2.9}`:                                    {"health.confirm", "a whole number", "2.9"},
		`health: {confirm: "2.9"}`:                                  {"health.confirm", "2.9"},
		`health: {confirm: .nan}`:                                   {"health.confirm", "NaN"},
		`health: {confirm: 1e99}`:                                   {"health.confirm", "1e+99"},
		`health: {flap: {trips: 9223372036854775808}}`:              {"health.flap.trips", "9223372036854775808"},
		`health: {1: 2}`:                                            {"health.1"},
		`health: {flap: {1: 2, trips: x}}`:                          {"health.flap.trips", `"x"`},
		`health: [1]`:                                               {"health", "[1]"},
		`source: {interval: [1]}`:                                   {"source.interval", "10s", "[1]"},
		`source: {sim: {scenario: [{at: 1s, gpu: 0, lost: 1}]}}`:    {"source.sim.scenario[0].lost", "number 1"},
		`source: {sim: {scenario: [{at: 1s, gpu: 0, xid: "7.5"}]}}`: {"source.sim.scenario[0].xid", "7.5"},
		`metrics: {fields: [5]}`:                                    {"metrics.fields[0]", "number 5"},
		`metrics: {podLabels: "/^a{1,2}/"}`:                         {"metrics.podLabels", `["a", "b"]`, `"/^a{1,2}/"`},
	} {
		_, err := load(t, text)
		wantError(t, text, err, want[0], append(want[1:], "(in ")...)
	}
}

// The error of a flag has an example in the form that a flag accepts, and names the flag.
func TestKindErrorsOfFlags(t *testing.T) {
	for flag, want := range map[string][]string{
		"--metrics.fields=default":        {"metrics.fields", `["default"]`, "(in --metrics.fields)"},
		"--health.cordon=[3]":             {"health.cordon[0]", `["3"]`, "number 3", "(in --health.cordon)"},
		"--metrics.podLabels=[*]":         {"metrics.podLabels", `["a", "b"]`, `"[*]"`, "(in --metrics.podLabels)"},
		"--health.confirm=2.9":            {"health.confirm", "2.9", "(in --health.confirm)"},
		"--health.confirm=200":            {"health.confirm", "200", "(in --health.confirm)"},
		"--health.xid.warn=[13,":          {"health.xid.warn", "[1, 2]", `"[13,"`, "(in --health.xid.warn)"},
		"--source.sim.scenario=[{xid: 5}": {"source.sim.scenario", "[{key: value}]", `"[{xid: 5}"`, "(in --source.sim.scenario)"},
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
	want := health.DefaultConfig().Confirm
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
