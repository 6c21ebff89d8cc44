package sim

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

func TestConfigReadsYAML(t *testing.T) {
	const text = `
profile: h100-8
seed: 1
loop: 60s
scenario:
- {at: 5s, gpu: 3, xid: 79}
- {at: 10s, gpu: 3, lost: true}
- {at: 5s, gpu: 1, recoveryAction: reset}
- {at: 6s, gpu: 1, recoveryAction: 7}
- {at: 7s, gpu: 1, stale: true}
- {at: 5s, gpu: 2, rowRemapPending: true, temperature: 97}
- {at: 6s, gpu: 2, rowRemapFailed: true, doubleBitErrors: 3, clocksSlowed: true}
- {at: 7s, gpu: 2, incident: DCGM_FR_NVLINK_DOWN, severity: warn}
- {at: 30s, source: stalled}
past:
- {ago: 10s, gpu: 5, xid: 95}
control: ""
`
	var got Config
	dec := yaml.NewDecoder(strings.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(&got); err != nil {
		t.Fatal(err)
	}
	want := Config{Profile: "h100-8", Seed: 1, Loop: time.Minute, Scenario: []Event{
		ev(t, 5*time.Second, `{gpu: 3, xid: 79}`),
		ev(t, 10*time.Second, `{gpu: 3, lost: true}`),
		ev(t, 5*time.Second, `{gpu: 1, recoveryAction: reset}`),
		ev(t, 6*time.Second, `{gpu: 1, recoveryAction: 7}`),
		ev(t, 7*time.Second, `{gpu: 1, stale: true}`),
		ev(t, 5*time.Second, `{gpu: 2, rowRemapPending: true, temperature: 97}`),
		ev(t, 6*time.Second, `{gpu: 2, rowRemapFailed: true, doubleBitErrors: 3, clocksSlowed: true}`),
		ev(t, 7*time.Second, `{gpu: 2, incident: DCGM_FR_NVLINK_DOWN, severity: warn}`),
		ev(t, 30*time.Second, `{source: stalled}`),
	}, Past: []PastXID{past(10*time.Second, 5, 95)}}
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

func TestValidateNamesTheKeyAndWhatIsRight(t *testing.T) {
	gpu9, xid0, bad, down, heal := 9, 0, "explode", "down", Recovery("explode")
	ok := func(at time.Duration) Event { return ev(t, at, `{gpu: 0, xid: 79}`) }
	tests := []struct {
		name string
		cfg  Config
		want []string // the whole lines
	}{
		{"profile", Config{Profile: "h200-8"}, []string{
			`profile: "h200-8" is not known; use one of h100-8, a100-8, h100-8-mig, v100-16, l4-1, none`,
		}},
		{"gpu of eight", Config{Profile: "h100-8", Scenario: []Event{ok(0), ok(0), ok(0), {GPU: &gpu9, XID: ok(0).XID}}}, []string{
			`scenario[3].gpu: 9 is not a GPU of profile h100-8, which has 0 to 7`,
		}},
		{"gpu of one", Config{Profile: "l4-1", Scenario: []Event{{GPU: &gpu9, XID: ok(0).XID}}}, []string{
			`scenario[0].gpu: 9 is not a GPU of profile l4-1, which has only 0`,
		}},
		{"gpu of none", Config{Profile: "none", Scenario: []Event{ok(0)}}, []string{
			`scenario[0].gpu: 0 is not a GPU of profile none, which has none`,
		}},
		{"times", Config{Profile: "h100-8", Loop: time.Minute, Scenario: []Event{ok(-time.Second), ok(time.Minute), ok(59 * time.Second)}}, []string{
			`scenario[0].at: -1s lies before the start; use 0s or later`,
			`scenario[1].at: 1m0s would never come; the loop starts anew after 1m0s`,
		}},
		{"loop", Config{Profile: "h100-8", Loop: time.Nanosecond}, []string{
			`loop: 1ns is too short; use 0 to run once, or 100ms and more`,
		}},
		{"negative loop", Config{Profile: "h100-8", Loop: -time.Minute}, []string{
			`loop: -1m0s is too short; use 0 to run once, or 100ms and more`,
		}},
		{"no effect", Config{Profile: "h100-8", Scenario: []Event{{}}}, []string{
			`scenario[0]: nothing would happen; say at least one of ` + strings.Join(effectKeys(), ", "),
		}},
		{"words", Config{Profile: "h100-8", Scenario: []Event{{GPU: ok(0).GPU, RecoveryAction: &heal, Source: &bad, XID: &xid0}}}, []string{
			`scenario[0].xid: 0 is not an XID; use 1 to 999`,
			`scenario[0].recoveryAction: "explode" is not known; use a number from 0 to 2147483647 or one of none, reset, reboot, drainP2P, drainAndReset, recoverIMEX, pcieBusReset, systemReboot`,
			`scenario[0].source: "explode" is not known; use one of up, down, stalled, blind, empty`,
		}},
		{"pages", Config{Profile: "h100-8", Scenario: []Event{ev(t, 0, `{gpu: 0, retiredPages: 63}`)}}, []string{
			`scenario[0].retiredPages: the GPUs of profile h100-8 remap rows and retire no pages; use rowRemapFailed, or profile v100-16`,
		}},
		{"checks", Config{Profile: "h100-8", Scenario: []Event{{GPU: ok(0).GPU, Incident: &bad, Severity: &bad}, {GPU: ok(0).GPU, Severity: &bad}}}, []string{
			`scenario[0].incident: "explode" is no incident of DCGM's; use a name such as DCGM_FR_NVLINK_DOWN`,
			`scenario[0].severity: "explode" is not known; use one of fail, warn, none`,
			`scenario[1].severity: is for incident; say which`,
		}},
		{"no gpu", Config{Profile: "h100-8", Scenario: []Event{{XID: ok(0).XID}}}, []string{
			`scenario[0].gpu: is missing; say which GPU this happens to`,
		}},
		{"idle gpu", Config{Profile: "h100-8", Scenario: []Event{{GPU: ok(0).GPU, Source: &down}}}, []string{
			`scenario[0].gpu: nothing happens to GPU 0; leave it out, or say what does`,
		}},
		{"past", Config{Profile: "h100-8", Past: []PastXID{past(0, 0, 79), past(-time.Second, 8, 1000), {Ago: time.Second}}}, []string{
			`past[0].ago: 0s is not before the start; use more than 0s`,
			`past[1].ago: -1s is not before the start; use more than 0s`,
			`past[1].gpu: 8 is not a GPU of profile h100-8, which has 0 to 7`,
			`past[1].xid: 1000 is not an XID; use 1 to 999`,
			`past[2].gpu: is missing; say which GPU reported it`,
			`past[2].xid: is missing; say which`,
		}},
		{"all at once", Config{Profile: "x", Loop: 1, Control: "/" + strings.Repeat("d", 200)}, []string{
			`profile: "x" is not known; use one of h100-8, a100-8, h100-8-mig, v100-16, l4-1, none`,
			`loop: 1ns is too short; use 0 to run once, or 100ms and more`,
			`control: the path is 94 bytes too long for a unix socket; use a shorter one`,
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.cfg.Validate()
			if err == nil {
				t.Fatal("no error")
			}
			if got := strings.Split(err.Error(), "\n"); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
			}
		})
	}
}

func TestNewRefusesWhatValidateRefuses(t *testing.T) {
	if s, err := New(Config{Profile: "h200-8"}, nil); err == nil || s != nil {
		t.Errorf("New gave %v, %v; want no source and an error", s, err)
	}
}
