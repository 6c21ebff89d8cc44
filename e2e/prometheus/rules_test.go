package prometheus

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// templateLabel matches a label in an annotation.
var templateLabel = regexp.MustCompile(`\$labels\.(\w+)`)

// rule is an alerting or recording rule; Alert or Record is its name.
type rule struct {
	Alert       string            `json:"alert"`
	Record      string            `json:"record"`
	Expr        string            `json:"expr"`
	For         string            `json:"for"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

func (r rule) name() string { return r.Alert + r.Record }

// rules returns the chart's rules by file.
func rules(t *testing.T) map[string][]rule {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(chart, "rules", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no rules in %s: %v", chart, err)
	}
	all := make(map[string][]rule)
	for _, file := range files {
		var content struct {
			Groups []struct {
				Name     string `json:"name"`
				Interval string `json:"interval"`
				Rules    []rule `json:"rules"`
			} `json:"groups"`
		}
		parse(t, file, &content)
		for _, g := range content.Groups {
			all[filepath.Base(file)] = append(all[filepath.Base(file)], g.Rules...)
		}
	}
	return all
}

func parse(t *testing.T, file string, into any) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(text, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

// TestRules runs promtool: it checks the rules and runs their unit tests in the file of the same name in rules.
func TestRules(t *testing.T) {
	promtool := tool(t, "promtool")
	for file := range rules(t) {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			for _, args := range [][]string{
				{"check", "rules", filepath.Join(chart, "rules", file)},
				{"test", "rules", filepath.Join("rules", file)},
			} {
				if out, err := exec.Command(promtool, args...).CombinedOutput(); err != nil {
					t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
				}
			}
		})
	}
}

// TestRulesAreDocumented checks that every alert has a severity and annotations, and that every rule has unit tests.
func TestRulesAreDocumented(t *testing.T) {
	names := make(map[string]bool)
	for file, rules := range rules(t) {
		samples := testedSeries(t, file)
		for _, r := range rules {
			id := strings.TrimSpace(r.name() + " " + r.Labels["severity"])
			if names[id] {
				t.Errorf("%s is defined twice", id)
			}
			names[id] = true
			if r.Alert == "" {
				if !slices.ContainsFunc(samples, func(l string) bool { return strings.HasPrefix(l, r.Record+"{") }) {
					t.Errorf("%s has no unit test", r.Record)
				}
				continue
			}
			if !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) {
				t.Errorf("%s: severity %q; use critical, warning or info", r.Alert, r.Labels["severity"])
			}
			i := slices.IndexFunc(samples, func(l string) bool {
				return strings.HasPrefix(l, fmt.Sprintf(`ALERTS{alertname=%q, alertstate="firing", severity=%q`, r.Alert, r.Labels["severity"]))
			})
			if i < 0 {
				t.Errorf("%s never fires in its unit tests", r.Alert)
				continue
			}
			checkAnnotations(t, r, samples[i])
		}
	}
}

// testedSeries returns the labels of the series that the unit tests of a file of rules expect.
func testedSeries(t *testing.T, file string) (samples []string) {
	t.Helper()
	var tests struct {
		RuleFiles []string `json:"rule_files"`
		Interval  string   `json:"evaluation_interval"`
		Tests     []struct {
			Name     string           `json:"name"`
			Interval string           `json:"interval"`
			Input    []map[string]any `json:"input_series"`
			Alerts   []any            `json:"alert_rule_test"`
			Exprs    []struct {
				Expr    string `json:"expr"`
				At      string `json:"eval_time"`
				Samples []struct {
					Labels string  `json:"labels"`
					Value  float64 `json:"value"`
				} `json:"exp_samples"`
			} `json:"promql_expr_test"`
		} `json:"tests"`
	}
	parse(t, filepath.Join("rules", file), &tests)
	for _, test := range tests.Tests {
		for _, e := range test.Exprs {
			for _, s := range e.Samples {
				samples = append(samples, s.Labels)
			}
		}
	}
	return samples
}

// checkAnnotations checks that an alert has all annotations, and that its series in the unit tests has the labels that they use.
func checkAnnotations(t *testing.T, r rule, series string) {
	t.Helper()
	for _, a := range []string{"summary", "description", "runbook", "runbook_url"} {
		if r.Annotations[a] == "" {
			t.Errorf("%s has no annotation %s", r.Alert, a)
		}
		if strings.Contains(r.Annotations[a], "{{ $labels.gpu }}") {
			t.Errorf("%s: %s names no GPU if another one has its index; use or $labels.gpu $labels.UUID", r.Alert, a)
		}
		// A template renders a missing label as an empty string, which is right for labels that only some series have.
		for _, m := range templateLabel.FindAllStringSubmatch(r.Annotations[a], -1) {
			if optional := m[1] == "cluster" || m[1] == "GPU_I_ID"; !optional && !strings.Contains(series, " "+m[1]+"=") {
				t.Errorf("%s: %s: the alert has no label %s: %s", r.Alert, a, m[1], series)
			}
		}
	}
}
