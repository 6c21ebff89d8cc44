package reclaim

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-node-agent/gpu-node-agent/agent/node"
)

const minimalPolicy = "namespaces: [team-a]\nidle: {after: 2h}\n"

func TestParsePolicy(t *testing.T) {
	p := DefaultPolicy()
	p.Namespaces, p.Idle.After.Duration = []string{"team-a"}, 2*time.Hour
	full := Policy{
		Namespaces: []string{"team-a", "team-b"}, PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "notebook"}},
		OptOut: "example.com/keep", Idle: IdlePolicy{metav1.Duration{Duration: time.Second}, node.EvidenceNoWork},
		MaxPerRun: 3,
	}
	for text, want := range map[string]Policy{
		minimalPolicy:                                         p,
		"---\n# comment\n" + minimalPolicy:                    p,
		minimalPolicy + "---\n# no more\n":                    p,
		minimalPolicy + "minimumAge: null\n":                  p,
		`{"namespaces": ["team-a"], "idle": {"after": "2h"}}`: p,
		`namespaces: [team-b, team-a, team-b]
podSelector: {matchLabels: {app: notebook}}
optOutAnnotation: example.com/keep
minimumAge: 0s
idle: {after: 1s, evidence: noWork}
maxPerRun: 3
notice: 0s
leaveFor: 0s
`: full,
	} {
		if got, err := ParsePolicy([]byte(text)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s\n%+v, want\n%+v\n%v", text, got, want, err)
		}
	}
}

// Each error names its key, and what was found or expected.
func TestParsePolicyErrors(t *testing.T) {
	for text, want := range map[string][]string{
		"":                          {"one YAML document"},
		minimalPolicy + "---\na: b": {"one YAML document", "2"},
		"namespaces: [":             {"yaml"},
		"[]":                        {"the policy: ", "array"},
		"{}":                        {"namespaces: ", "idle.after: "},
		"namespaces: []\nminimumAge: -1s\nidle: {after: 10ms, evidence: power}\nmaxPerRun: 0\nnotice: 7d\nleaveFor: 3\noptOutAnnotation: ''": {
			"namespaces: ", "minimumAge: ", `"-1s"`, "idle.after: ", `"10ms"`, "idle.evidence: ", node.EvidenceNoProcess, `"power"`, "maxPerRun: ",
			"notice: ", `"7d"`, "leaveFor: ", `"3"`, "optOutAnnotation: ",
		},
		"namespaces: team-a":                                                       {"namespaces: ", "a list", "string"},
		"namespaces: ['team-*']":                                                   {"namespaces: ", `"team-*"`},
		minimalPolicy + "minAge: 1h":                                               {`"minAge"`},
		minimalPolicy + "minimumage2: 1h":                                          {`"minimumage2"`, "minimumAge"},
		minimalPolicy + "after: 1h":                                                {`"after"`, "idle.after"},
		minimalPolicy + "podSelector: {app: x}":                                    {`"app"`, "podSelector.matchLabels"},
		minimalPolicy + "podSelector: {}":                                          {"podSelector: ", "leave it out"},
		minimalPolicy + "podSelector: {matchLabels: {}}":                           {"podSelector: ", "leave it out"},
		minimalPolicy + "podSelector: {matchLabels: {a: b c}}":                     {"podSelector: ", "b c"},
		minimalPolicy + "podSelector: {matchExpressions: [{key: a, operator: X}]}": {"podSelector: ", "X"},
		minimalPolicy + "notice: 1h\nnotice: 2h":                                   {"notice", "already set"},
		"namespaces: [a]\nidle: {after: 2h, evidence: auto}":                       {"idle.evidence: ", `"auto"`},
		minimalPolicy + "maxPerRun: many":                                          {"maxPerRun: ", "a whole number", "string"},
		minimalPolicy + "maxPerRun: 1.5":                                           {"maxPerRun: ", "1.5"},
		minimalPolicy + "hours: {from: 22:00, to: 06:00}":                          {`"hours"`, "schedule", "timeZone"},
	} {
		p, err := ParsePolicy([]byte(text))
		if err == nil {
			t.Errorf("%s\n%+v", text, p)
			continue
		}
		for _, part := range want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s\n%v\nlacks %q", text, err, part)
			}
		}
	}
}

func TestLoadPolicyNamesFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if _, err := LoadPolicy(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Error(err)
	}
	if err := os.WriteFile(file, []byte("maxPerRun: 0"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := LoadPolicy(file)
	if err == nil {
		t.Fatal("no error")
	}
	for line := range strings.Lines(err.Error()) {
		if !strings.HasPrefix(line, file+": ") {
			t.Errorf("%q", line)
		}
	}
}

// FuzzParsePolicy checks that a policy is valid whenever it is accepted, and the same after it is written and read again.
func FuzzParsePolicy(f *testing.F) {
	for _, text := range []string{
		minimalPolicy, "", "{}", "[]", "---\n---\n",
		minimalPolicy + "podSelector: {matchExpressions: [{key: a, operator: In, values: [b]}]}\nnotice: 0s\nmaxPerRun: 1", "namespaces: &a [*a]",
		"idle: {after: 9999999h}",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := ParsePolicy(text)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without a text")
			}
			return
		}
		if err := p.validate(); err != nil || p.Idle.After.Duration < time.Second || p.Notice.Duration < 0 || p.MinimumAge.Duration < 0 ||
			p.LeaveFor.Duration < 0 {
			t.Errorf("%+v: %v", p, err)
		}
		written, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParsePolicy(written)
		if err != nil {
			t.Fatalf("%s: %v", written, err)
		}
		if rewritten, err := json.Marshal(again); err != nil || string(rewritten) != string(written) {
			t.Errorf("%s, was %s", rewritten, written)
		}
	})
}
