package config

import (
	"strings"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// What is of the wrong kind is told as the file has it, in our words, with what would be right.
func TestMisfits(t *testing.T) {
	for text, want := range map[string]string{
		`health: {cordon: "3"}`:                                     `health.cordon: "3" is not a list; write it as ["3"]`,
		`health: {cordon: 3}`:                                       `health.cordon: 3 is not a list; write it as ["3"]`,
		`health: {cordon: "3, GPU-1"}`:                              `health.cordon: "3, GPU-1" is not a list; write it as ["3", "GPU-1"]`,
		`health: {cordon: [3]}`:                                     `health.cordon[0]: 3 is not a text; put it in quotes: "3"`,
		`health: {cordon: [[a]]}`:                                   `health.cordon[0]: [a] is not a text`,
		`health: {xid: {warn: 13}}`:                                 `health.xid.warn: 13 is not a list; write it as [13]`,
		`health: {xid: {warn: {a: b}}}`:                             `health.xid.warn: {a: b} is not a list; write it as [1, 2]`,
		`health: {xid: {warn: [a]}}`:                                `health.xid.warn[0]: "a" is not a whole number`,
		`plugin: {enabled: 1}`:                                      `plugin.enabled: 1 is not true or false`,
		`plugin: {enabled: [true]}`:                                 `plugin.enabled: [true] is not true or false`,
		`plugin: {enabled: "yes"}`:                                  `plugin.enabled: "yes" is not true or false`,
		`plugin: {deviceList: {a: b}}`:                              `plugin.deviceList: {a: b} is not a list; write it as ["a", "b"]`,
		`plugin: {resources: 5}`:                                    `plugin.resources: 5 is not a list; write it as [{key: value}]`,
		`plugin: {resources: [5]}`:                                  `plugin.resources[0]: 5 is not keys and values, such as {key: value}`,
		`health: {temperature: true}`:                               `health.temperature: true is not a number`,
		`health: {temperature: "true"}`:                             `health.temperature: "true" is not a number`,
		`health: {temperature: {a: [b, {c: d}]}}`:                   `health.temperature: {a: [b, {c: d}]} is not a number`,
		`health: {confirm: [2]}`:                                    `health.confirm: [2] is not a whole number`,
		`health: {confirm: 2.9}`:                                    `health.confirm: 2.9 is not a whole number`,
		`health: {confirm: "2.9"}`:                                  `health.confirm: 2.9 is not a whole number`,
		`health: {confirm: .nan}`:                                   `health.confirm: NaN is not a whole number`,
		`health: {confirm: 1e99}`:                                   `health.confirm: 1e+99 is too large`,
		`health: {flap: {trips: 9223372036854775808}}`:              `health.flap.trips: 9223372036854775808 is too large`,
		`health: {1: 2}`:                                            `health.1: unknown key`,
		`health: {flap: {1: 2, trips: x}}`:                          `health.flap.trips: "x" is not a whole number`,
		`health: [1]`:                                               `health: is not a section; write keys below it`,
		`source: {interval: [1]}`:                                   `source.interval: [1] is not a duration; use a number with a unit, such as 10s`,
		`source: {sim: {scenario: [{at: 1s, gpu: 0, lost: 1}]}}`:    `source.sim.scenario[0].lost: 1 is not true or false`,
		`source: {sim: {scenario: [{at: 1s, gpu: 0, xid: "7.5"}]}}`: `source.sim.scenario[0].xid: 7.5 is not a whole number`,
		`metrics: {fields: [5]}`:                                    `metrics.fields[0]: 5 is not the name of a field or of a set`,
		`metrics: {podLabels: "/^a{1,2}/"}`:                         `metrics.podLabels: "/^a{1,2}/" is not a list; write it as ["a", "b"]`,
	} {
		if _, err := loadFile(t, text); err == nil || !strings.Contains(err.Error()+"\n", want+" (in ") {
			t.Errorf("%s:\ngot  %v\nwant %s", text, err, want)
		}
	}
}

// What a flag cannot say is told in the form that it can, and with where it was said.
func TestMisfitsOfFlags(t *testing.T) {
	for flag, want := range map[string]string{
		"--metrics.fields=default":        `metrics.fields: "default" is not a list; write it as ["default"] (in --metrics.fields)`,
		"--health.cordon=[3]":             `health.cordon[0]: 3 is not a text; put it in quotes: ["3"] (in --health.cordon)`,
		"--metrics.podLabels=[*]":         `metrics.podLabels: "[*]" is not a list; put each text in it in quotes, as in ["a", "b"] (in --metrics.podLabels)`,
		"--health.confirm=2.9":            `health.confirm: 2.9 is not a whole number (in --health.confirm)`,
		"--health.confirm=200":            `health.confirm: 200 is out of range; use 1 to 100 (in --health.confirm)`,
		"--health.xid.warn=[13,":          `health.xid.warn: "[13," is not a list; write it as [1, 2] (in --health.xid.warn)`,
		"--source.sim.scenario=[{xid: 5}": `source.sim.scenario: "[{xid: 5}" is not a list; write it as [{key: value}] (in --source.sim.scenario)`,
	} {
		if _, err := load(t, "", flag); err == nil || err.Error() != want {
			t.Errorf("%s:\ngot  %v\nwant %s", flag, err, want)
		}
	}
}

// A number may be written as other programs write it.
func TestWholeNumbers(t *testing.T) {
	for text, want := range map[string]int{"2": 2, "2.0": 2, "1e1": 10, `"7"`: 7, `"7.0"`: 7, "0x10": 16} {
		if c, err := loadFile(t, "health: {confirm: "+text+"}"); err != nil || c.Health.Confirm != want {
			t.Errorf("%s is %d, %v; want %d", text, c.Health.Confirm, err, want)
		}
	}
	want := health.DefaultConfig().Confirm
	if c, err := loadFile(t, "health: {confirm: }"); err != nil || c.Health.Confirm != want {
		t.Errorf("nothing is %d, %v; want %d", c.Health.Confirm, err, want)
	}
}

// A flag that can only be true or false needs no value, and takes no other for it.
func TestFlagsWithoutAValue(t *testing.T) {
	for _, c := range []struct {
		flags  []string
		passed bool
		level  string
	}{
		{[]string{"--plugin.passDeviceSpecs", "--log.level", "debug"}, true, "debug"},
		{[]string{"--log.level", "debug", "--plugin.passDeviceSpecs"}, true, "debug"},
		{[]string{"--plugin.passDeviceSpecs=true"}, true, "info"},
		{[]string{"--plugin.passDeviceSpecs=false"}, false, "info"},
	} {
		got, err := load(t, "plugin: {passDeviceSpecs: true}", c.flags...)
		if err != nil || got.Plugin.PassDeviceSpecs != c.passed || got.Log.Level != c.level {
			t.Errorf("%q: %v, %s, %v", c.flags, got.Plugin.PassDeviceSpecs, got.Log.Level, err)
		}
	}
}
