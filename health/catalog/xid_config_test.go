package catalog

import (
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/gpu-node-agent/gpu-node-agent/health"
)

// TestXIDPresets has a row for each XID that the presets treat differently.
func TestXIDPresets(t *testing.T) {
	const (
		i = EffectIgnore
		w = EffectWarn
		u = EffectUnhealthy
	)
	all := []string{XIDPresetDefault, XIDPresetNVIDIA, XIDPresetGKE, XIDPresetAWS, XIDPresetNone}
	for _, c := range []struct {
		code int
		want [5]Effect // in the order of all
		why  string
	}{
		{48, [5]Effect{u, u, u, u, i}, "all agree"},
		{13, [5]Effect{i, i, i, w, i}, "application error"},
		{31, [5]Effect{i, i, i, w, i}, "application error"},
		{43, [5]Effect{i, i, i, w, i}, "application error"},
		{45, [5]Effect{i, i, i, w, i}, "precedes failures, according to a user"},
		{68, [5]Effect{i, i, i, w, i}, "gpud: fatal; catalogue: RESTART_APP"},
		{109, [5]Effect{i, i, i, u, i}, "catalogue: RESET_GPU; AWS: fatal; device plugin: application error"},
		{32, [5]Effect{w, u, i, w, i}, "gpud: fatal; catalogue: RESTART_APP"},
		{38, [5]Effect{w, u, i, w, i}, "gpud: fatal; catalogue: IGNORE"},
		{44, [5]Effect{w, u, i, w, i}, "gpud: fatal; catalogue: IGNORE"},
		{69, [5]Effect{w, u, i, w, i}, "gpud: fatal; catalogue: RESTART_APP"},
		{121, [5]Effect{w, u, i, w, i}, "gpud: fatal; catalogue: IGNORE"},
		{123, [5]Effect{w, u, w, w, i}, "gpud: fatal; GKE: condition; catalogue: unused"},
		{63, [5]Effect{w, u, w, u, i}, "AWS and gpud: fatal; catalogue: IGNORE"},
		{54, [5]Effect{u, u, i, u, i}, "AWS alone: fatal"},
		{142, [5]Effect{w, u, i, u, i}, "AWS alone: fatal"},
		{94, [5]Effect{w, u, i, w, i}, "contained: affects only the application"},
		{64, [5]Effect{u, u, w, u, i}, ""},
		{79, [5]Effect{u, u, w, u, i}, ""},
		{119, [5]Effect{u, u, w, u, i}, ""},
		{120, [5]Effect{u, u, w, u, i}, ""},
		{140, [5]Effect{u, u, w, u, i}, ""},
		{62, [5]Effect{u, u, i, u, i}, ""},
		{74, [5]Effect{u, u, i, u, i}, ""},
		{95, [5]Effect{u, u, i, u, i}, ""},
		{149, [5]Effect{w, u, i, w, i}, "follows the recovery action"},
		{154, [5]Effect{i, u, i, w, i}, "announces the recovery action"},
		{167, [5]Effect{u, u, i, w, i}, "the catalogue has no resolution"},
		{999, [5]Effect{w, u, i, w, i}, "unknown"},
	} {
		for p, preset := range all {
			x := XIDConfig{Preset: preset}
			if got := x.Effect(c.code); got != c.want[p] {
				t.Errorf("%s: XID %d is %v, want %v (%s)", preset, c.code, got, c.want[p], c.why)
			}
			for _, override := range []struct {
				config XIDConfig
				want   Effect
			}{
				{XIDConfig{Preset: preset, Unhealthy: []int{1000, c.code}}, u},
				{XIDConfig{Preset: preset, Warn: []int{c.code}}, w},
				{XIDConfig{Preset: preset, Ignore: []int{c.code}}, i},
				{XIDConfig{Preset: preset, Unhealthy: []int{1000}, Warn: []int{1001}, Ignore: []int{1002}}, c.want[p]},
			} {
				if got := override.config.Effect(c.code); got != override.want {
					t.Errorf("%+v: XID %d is %v, want %v", override.config, c.code, got, override.want)
				}
			}
		}
	}
	if !slices.Equal(all, xidPresets[:]) {
		t.Errorf("presets %q", xidPresets)
	}
	for code := range xidRows() {
		if got, want := DefaultXIDConfig().Effect(code), LookupXID(code).Effect; got != want {
			t.Errorf("XID %d is %v by default, %v in the table", code, got, want)
		}
	}
}

// The action and Clears of an overridden XID match its effect.
func TestXIDConfigLookup(t *testing.T) {
	for _, preset := range xidPresets {
		for code := range 200 {
			c := XIDConfig{Preset: preset}
			x := c.Lookup(code)
			if x.Effect != c.Effect(code) || x.Code != code {
				t.Fatalf("%s: XID %d: %+v", preset, code, x)
			}
			if (x.Effect == EffectUnhealthy) == (x.Clears == health.ClearsItself || x.Clears == health.ClearsRestart) {
				t.Errorf("%s: XID %d is %v and clears by %v", preset, code, x.Effect, x.Clears)
			}
			if x.Effect == EffectUnhealthy && x.Action == health.ActionRestartApp {
				t.Errorf("%s: XID %d is unhealthy and only needs a restart of the application", preset, code)
			}
			if x.Effect == LookupXID(code).Effect && x != LookupXID(code) {
				t.Errorf("%s: XID %d has the same effect but a different row: %+v", preset, code, x)
			}
		}
	}
}

func TestXIDConfigValidate(t *testing.T) {
	for _, c := range []struct {
		config XIDConfig
		want   string // the keys of the errors
	}{
		{DefaultXIDConfig(), ""},
		{XIDConfig{Preset: "gke", Unhealthy: []int{45, 45, 2000}, Warn: []int{109}, Ignore: []int{92}}, ""},
		{XIDConfig{Preset: "x"}, "preset"},
		{XIDConfig{}, "preset"},
		{XIDConfig{Preset: "aws", Warn: []int{109, 109}, Ignore: []int{109}}, "warn"},
		{XIDConfig{Preset: "aws", Unhealthy: []int{-1}, Ignore: []int{0}}, "unhealthy[0] ignore[0]"},
		{XIDConfig{Preset: "aws", Unhealthy: []int{5}, Warn: []int{5}, Ignore: []int{5}}, "unhealthy unhealthy warn"},
	} {
		if got := keys(c.config.Validate()); got != c.want {
			t.Errorf("%+v: errors for %q, want %q: %v", c.config, got, c.want, c.config.Validate())
		}
	}
	if err := (XIDConfig{Preset: "aws", Warn: []int{109}, Ignore: []int{109}}).Validate(); !strings.Contains(err.Error(), "XID 109") {
		t.Errorf("%v does not name the XID of two lists", err)
	}
}

// Only invalid items, and lists that another setting overrides, give notes.
func TestNVIDIAEnvNotes(t *testing.T) {
	overridden := XIDConfig{Preset: XIDPresetDefault, Unhealthy: []int{45}, Warn: []int{109}, Ignore: []int{92}}
	for _, c := range []struct {
		config          XIDConfig
		disable, enable string
		want            int
	}{
		{DefaultXIDConfig(), "all,48", " XIDs ", 0},
		{overridden, " , ", "109,92,32", 0},
		{overridden, "all", "", 1},
		{overridden, "48", "all", 1},
		{DefaultXIDConfig(), "4 8,-79,0,0x20,99999999999999999999,1e2,62", "all!,+13", 8},
	} {
		if _, notes := c.config.WithNVIDIAEnv(c.disable, c.enable); len(notes) != c.want {
			t.Errorf("%q %q: notes %q, want %d", c.disable, c.enable, notes, c.want)
		}
	}
	_, notes := DefaultXIDConfig().WithNVIDIAEnv("48,foo", "")
	if len(notes) != 1 || !strings.HasPrefix(notes[0], EnvDisableHealthChecks+": ") || !strings.Contains(notes[0], `"foo"`) {
		t.Errorf("want one note with the variable and the value, got %q", notes)
	}
}

// overYAML marshals a configuration and parses it again, as with the output of check-config.
func overYAML(t *testing.T, c XIDConfig) XIDConfig {
	t.Helper()
	text, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var again XIDConfig
	if err := yaml.Unmarshal(text, &again); err != nil {
		t.Fatal(err)
	}
	return again
}

// FuzzNVIDIAEnv compares the result with the documented meaning of each item. NVIDIA's code checks no XID if all are disabled,
// even if others are enabled.
func FuzzNVIDIAEnv(f *testing.F) {
	f.Add("all", "48")
	f.Add("13, 31 ,xids", "ALL")
	f.Add("48,79,foo,-1,0", "13,,109")
	f.Add("", "")
	f.Add(" , ", "109,92,32")
	f.Add("all", "xids")
	f.Add("48,ALL", "")
	f.Add("4 8,-79,0,0x20,99999999999999999999,1e2,62", "all!,+13")
	f.Fuzz(func(t *testing.T, disable, enable string) {
		off, on := listedXIDs(disable), listedXIDs(enable)
		for _, before := range []XIDConfig{
			DefaultXIDConfig(),
			preset(XIDPresetNVIDIA),
			{Preset: XIDPresetAWS, Unhealthy: []int{45, 13}, Warn: []int{109, 48}, Ignore: []int{79}},
		} {
			unchanged := XIDConfig{before.Preset, slices.Clone(before.Unhealthy), slices.Clone(before.Warn), slices.Clone(before.Ignore)}
			got, notes := before.WithNVIDIAEnv(disable, enable)
			if !reflect.DeepEqual(before, unchanged) {
				t.Fatalf("%q %q: the receiver was modified: %+v", disable, enable, before)
			}
			if err := got.Validate(); err != nil {
				t.Fatalf("%q %q: %v", disable, enable, err)
			}
			for code := 1; code < 200; code++ {
				want := before.Effect(code)
				switch {
				case on(code):
					want = EffectUnhealthy
				case off(code):
					want = EffectIgnore
				}
				if e := got.Effect(code); e != want {
					t.Fatalf("%q %q: XID %d is %v, want %v", disable, enable, code, e, want)
				}
			}
			if slices.ContainsFunc(notes, func(n string) bool {
				return !strings.HasPrefix(n, EnvDisableHealthChecks+": ") && !strings.HasPrefix(n, EnvEnableHealthChecks+": ")
			}) {
				t.Fatalf("notes %q", notes)
			}
			if again, _ := got.WithNVIDIAEnv(disable, enable); !reflect.DeepEqual(again, got) {
				t.Fatalf("%q %q: not idempotent: %+v, %+v", disable, enable, again, got)
			}
			if again := overYAML(t, got); !reflect.DeepEqual(again, got) {
				t.Fatalf("over YAML %+v becomes %+v", got, again)
			}
		}
	})
}

// listedXIDs returns a function that reports whether an item of the list names an XID.
func listedXIDs(list string) func(code int) bool {
	codes, all := make(map[int]bool), false
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		all = all || strings.EqualFold(item, "all") || strings.EqualFold(item, "xids")
		if n, err := strconv.Atoi(item); err == nil && n > 0 && item[0] != '+' {
			codes[n] = true
		}
	}
	return func(code int) bool { return all || codes[code] }
}

// keys returns the keys of the errors, a line each.
func keys(err error) string {
	if err == nil {
		return ""
	}
	var all []string
	for line := range strings.SplitSeq(err.Error(), "\n") {
		key, _, _ := strings.Cut(line, ": ")
		all = append(all, key)
	}
	return strings.Join(all, " ")
}
