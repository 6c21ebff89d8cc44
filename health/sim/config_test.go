package sim

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

func TestConfigReadsYAML(t *testing.T) {
	text := "profile: h100-8\nseed: 1\ndcgm: \"4.7\"\nloop: 60s\npast: [{ago: 10s, gpu: 5, xid: 95}]\ncontrol: ''\nscenario:\n"
	want := Config{Profile: "h100-8", Seed: 1, DCGM: "4.7", Loop: time.Minute, Past: []PastXID{pastXID(10*time.Second, 5, 95)}}
	for i, effects := range []string{
		`gpu: 3, xid: 79`,
		`gpu: 3, lost: true`,
		`gpu: 1, recoveryAction: reset`,
		`gpu: 1, recoveryAction: 7`,
		`gpu: 1, stale: true`,
		`gpu: 2, rowRemapPending: true, temperature: 97`,
		`gpu: 2, rowRemapFailed: true, doubleBitErrors: 3, clocksSlowed: true`,
		`gpu: 2, incident: DCGM_FR_NVLINK_DOWN, severity: warn`,
		`source: stalled`,
	} {
		at := time.Duration(i) * time.Second
		text += fmt.Sprintf("- {at: %v, %s}\n", at, effects)
		want.Scenario = append(want.Scenario, event(t, at, "{"+effects+"}"))
	}
	var got Config
	dec := yaml.NewDecoder(strings.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(&got); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	if err := got.Validate(); err != nil {
		t.Errorf("Validate: %v", err)
	}
}

func TestDefaultConfigIsValid(t *testing.T) {
	if err := DefaultConfig().Validate(); err != nil {
		t.Error(err)
	}
}

func TestValidate(t *testing.T) {
	valid := func(at time.Duration) Event { return event(t, at, `{gpu: 0, xid: 79}`) }
	for name, tt := range map[string]struct {
		cfg  Config
		want []string // key and data of each error
	}{
		"unknown profile": {
			Config{Profile: "h200-8"},
			[]string{`profile "h200-8" h100-8, a100-8, h100-8-mig, h100-16-mig, v100-16, mixed-4, l4-1, none`},
		},
		"GPU above the range": {
			Config{Profile: "h100-8", Scenario: []Event{valid(0), valid(0), {GPU: new(9), XID: new(79)}}},
			[]string{`scenario[2].gpu 9 h100-8 0 to 7`},
		},
		"GPU of one":  {Config{Profile: "l4-1", Scenario: []Event{{GPU: new(9), XID: new(79)}}}, []string{`scenario[0].gpu 9 l4-1 0 to 0`}},
		"GPU of none": {Config{Profile: "none", Scenario: []Event{valid(0)}}, []string{`scenario[0].gpu 0 none`}},
		"event outside the loop": {
			Config{Profile: "h100-8", Loop: time.Minute, Scenario: []Event{valid(-time.Second), valid(time.Minute), valid(59 * time.Second)}},
			[]string{`scenario[0].at -1s`, `scenario[1].at 1m0s`},
		},
		"short loop":    {Config{Profile: "h100-8", Loop: time.Nanosecond}, []string{`loop 1ns 100ms`}},
		"negative loop": {Config{Profile: "h100-8", Loop: -time.Minute}, []string{`loop -1m0s`}},
		"no effect":     {Config{Profile: "h100-8", Scenario: []Event{{}}}, []string{`scenario[0] xid`}},
		"invalid values": {
			Config{Profile: "h100-8", Scenario: []Event{{
				GPU: new(0), RecoveryAction: new(Recovery("explode")), Source: new("explode"),
				XID: new(0),
			}}},
			[]string{`scenario[0].xid 0 1 to 999`, `scenario[0].recoveryAction "explode" 2147483647`, `scenario[0].source "explode" up, down`},
		},
		"effect without a required key": {
			Config{Profile: "h100-8", Scenario: []Event{{GPU: new(0), Severity: new("fail")}}},
			[]string{`scenario[0].severity incident`},
		},
		"pages of a GPU that remaps rows": {
			Config{Profile: "h100-8", Scenario: []Event{event(t, 0, `{gpu: 0, retiredPages: 63}`)}},
			[]string{`scenario[0].retiredPages h100-8 v100-16`},
		},
		"partition of an L4": {
			Config{Profile: "l4-1", Scenario: []Event{event(t, 0, `{gpu: 0, mig: sevenths}`)}},
			[]string{`scenario[0].mig l4-1 h100-8-mig`},
		},
		"partition of an L4 beside an H100": {
			Config{Profile: "mixed-4", Scenario: []Event{event(t, 0, `{gpu: 1, mig: sevenths}`), event(t, 0, `{gpu: 2, mig: sevenths}`)}},
			[]string{`scenario[1].mig 2 mixed-4 h100-8-mig`},
		},
		"no GPU":             {Config{Profile: "h100-8", Scenario: []Event{{XID: new(79)}}}, []string{`scenario[0].gpu`}},
		"GPU without effect": {Config{Profile: "h100-8", Scenario: []Event{{GPU: new(0), Source: new("down")}}}, []string{`scenario[0].gpu 0`}},
		"past XIDs": {
			Config{Profile: "h100-8", Past: []PastXID{pastXID(0, 0, 79), pastXID(-time.Second, 8, 1000), {Ago: time.Second}}},
			[]string{`past[0].ago 0s`, `past[1].ago -1s`, `past[1].gpu 8 0 to 7`, `past[1].xid 1000`, `past[2].gpu`, `past[2].xid`},
		},
		"generation of DCGM": {Config{Profile: "h100-8", DCGM: "4.6.1"}, []string{`dcgm "4.6" "4.7" "4.6.1"`}},
		"several keys": {
			Config{Profile: "x", Loop: 1, Control: "/" + strings.Repeat("d", 200)}, []string{`profile "x"`, `loop 1ns`, `control 94`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tt.cfg.DCGM = cmp.Or(tt.cfg.DCGM, "4.6")
			err := tt.cfg.Validate()
			if err == nil {
				t.Fatal("no error")
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tt.want) {
				t.Fatalf("got\n%v\nwant %d errors", err, len(tt.want))
			}
			for i, want := range tt.want {
				key, text, _ := strings.Cut(lines[i], ": ")
				data := strings.Fields(want)
				if key != data[0] || slices.ContainsFunc(data[1:], func(s string) bool { return !strings.Contains(text, s) }) {
					t.Errorf("%q; want key and data %q", lines[i], data)
				}
			}
		})
	}
}

func TestNewValidates(t *testing.T) {
	if s, err := New(Config{Profile: "h200-8", DCGM: "4.6"}, nil); err == nil || s != nil {
		t.Errorf("New returned %v, %v; want an error", s, err)
	}
}
