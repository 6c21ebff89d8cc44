package prometheus

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestPanelsOfStates evaluates panels with the rules in promtool, on the series of the unit tests of health.yaml: what a dashboard shows
// when a node is not measured, and when it has gone.
func TestPanelsOfStates(t *testing.T) {
	promtool := tool(t, "promtool")
	series := make(map[string][]inputSeries)
	var units struct {
		Files    []string `json:"rule_files"`
		Interval string   `json:"evaluation_interval"`
		Tests    []struct {
			Name     string        `json:"name"`
			Interval string        `json:"interval"`
			Input    []inputSeries `json:"input_series"`
			Exprs    []any         `json:"promql_expr_test"`
		} `json:"tests"`
	}
	parse(t, filepath.Join("rules", "health.yaml"), &units)
	for _, u := range units.Tests {
		series[u.Name] = u.Input
	}
	file, err := filepath.Abs(filepath.Join(chart, "rules", "health.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	all := dashboards(t)
	var tests []any
	for _, c := range stateCases {
		input := series[c.series]
		if input == nil {
			t.Fatalf("health.yaml has no test %q", c.series)
		}
		var exprs []any
		for _, shown := range slices.Concat(c.before, c.after) {
			for name, want := range shown.panels {
				title, ref, ok := strings.Cut(name, "#")
				if !ok {
					ref = "A"
				}
				expr := substitute(query(t, all[shown.file], title, ref).Expr, map[string]string{
					"cluster": ".*", "node": shown.node, "gpu": ".*", "__range": "5m", "__interval": "15s",
				})
				var samples []any
				for _, labels := range slices.Sorted(maps.Keys(want)) {
					samples = append(samples, map[string]any{"labels": "{" + labels + "}", "value": want[labels]})
				}
				exprs = append(exprs, map[string]any{"expr": expr, "eval_time": shown.at, "exp_samples": samples})
			}
		}
		tests = append(tests, map[string]any{"name": c.series, "interval": "1m", "input_series": input, "promql_expr_test": exprs})
	}
	// JSON is YAML.
	text, err := json.Marshal(map[string]any{"rule_files": []string{file}, "evaluation_interval": units.Interval, "tests": tests})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "panels.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(promtool, "test", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

type inputSeries struct {
	Series string `json:"series"`
	Values string `json:"values"`
}

// query returns a query of a panel.
func query(t *testing.T, d dashboard, title, ref string) target {
	t.Helper()
	for _, p := range d.all() {
		for _, q := range p.Targets {
			if p.Title == title && q.RefID == ref {
				return q
			}
		}
	}
	t.Fatalf("%s has no panel %q with the query %s", d.Title, title, ref)
	return target{}
}

// stateCase is what panels show of the series of a test of health.yaml.
type stateCase struct {
	series        string
	before, after []shown // minute 10
}

// shown has values by labels, by title and, unless it is A, #query of a panel.
type shown struct {
	file, node, at string
	panels         map[string]map[string]float64
}

func value(v float64) map[string]float64 { return map[string]float64{"": v} }

const (
	notMeasured = -1 // which panels map to a grey "not measured"
	eu          = `cluster="eu", `
	n2          = `cluster="eu", instance="n2"`
)

// Before minute 10 n2 is measured, with a healthy and a degraded GPU.
var measured = []shown{
	{"fleet.json", ".*", "9m", map[string]map[string]float64{
		"Agents": value(2), "Agents#B": value(0), "GPUs": value(3), "Unhealthy": value(0), "Degraded": value(1), "Not measured": value(0),
		"Healthy": value(2.0 / 3), "Findings": {`severity="none"`: 2}, "XIDs in the time range": {`xid="none"`: 0},
		"Worst nodes#E":    {eu + `instance="n1"`: 0, n2: 0},
		"GPUs by state":    {`state="healthy"`: 2, `state="degraded"`: 1, `state="unhealthy"`: 0, `state="not measured"`: 0},
		"Capacity and use": value(3), "Capacity and use#B": value(2), "Capacity and use#E": value(0),
		"Agents by state#B": value(2), "Agents by state#F": value(0), "Nodes not measured": {`instance="none", state="none"`: 0},
		"Nodes not measured#B": {},
	}},
	{"node.json", "n2", "9m", map[string]map[string]float64{
		"Unhealthy": value(0), "Degraded": value(1), "Not measured": value(0), "Findings": {`severity="none"`: 1},
		"XIDs of each GPU": {`xid="none"`: 0},
		"Health":           {`A_order="00", gpu="0"`: 1, `A_order="01", gpu="1"`: 2}, "Memory errors#C": {},
	}},
}

// fleetNotMeasured is what the fleet shows when n2 is not measured.
func fleetNotMeasured(at string) shown {
	return shown{"fleet.json", ".*", at, map[string]map[string]float64{
		"Agents": value(1), "Agents#B": value(1), "GPUs": value(3), "Unhealthy": value(0), "Degraded": value(0), "Not measured": value(2),
		"Healthy": value(1.0 / 3), "Findings": {n2 + `, severity="not measured"`: 1}, "XIDs in the time range": {`xid="not measured"`: -1},
		"Longest idle": {n2 + `, namespace="(not measured)"`: -1},
		"Worst nodes":  {eu + `instance="n1"`: 0}, "Worst nodes#E": {eu + `instance="n1"`: 0, n2: 2},
		"GPUs by state":    {`state="healthy"`: 1, `state="degraded"`: 0, `state="unhealthy"`: 0, `state="not measured"`: 2},
		"Capacity and use": value(3), "Capacity and use#B": value(1), "Capacity and use#E": value(2),
		"Agents by state#B": value(1), "Agents by state#F": value(1),
		"Nodes not measured": {n2 + `, state="not measured"`: 2}, "Nodes not measured#B": {},
	}}
}

// onlyNotMeasured is what the fleet shows if a node that is not measured is selected.
func onlyNotMeasured(node, at string, gpus float64) shown {
	return shown{"fleet.json", node, at, map[string]map[string]float64{
		"Agents": value(0), "Agents#B": value(1), "GPUs": value(gpus), "Unhealthy": value(notMeasured), "Degraded": value(notMeasured),
		"Not measured": value(gpus), "Healthy": value(0), "Unschedulable": value(notMeasured), "Hottest GPU": value(notMeasured),
		"Utilization": value(notMeasured), "Total power": value(notMeasured), "Allocated and idle": value(notMeasured),
		"GPUs by state": {`state="not measured"`: gpus}, "Capacity and use#B": value(0),
	}}
}

// nodeNotMeasured is what n2's own dashboard shows.
func nodeNotMeasured(at string) shown {
	return shown{"node.json", "n2", at, map[string]map[string]float64{
		"Unhealthy": value(notMeasured), "Degraded": value(notMeasured), "Not measured": value(2), "Unschedulable": value(notMeasured),
		"Hottest GPU": value(notMeasured), "Total power": value(notMeasured),
		"Findings": {`severity="not measured"`: 1}, "XIDs of each GPU": {`xid="not measured"`: -1},
		"Health": {`A_order="00", gpu="0"`: 0, `A_order="01", gpu="1"`: 0}, "Memory errors#C": {`gpu="0"`: -1, `gpu="1"`: -1},
	}}
}

// gone is what is shown when n2 has left the fleet.
func gone(at string, since float64) []shown {
	return []shown{
		{"fleet.json", ".*", at, map[string]map[string]float64{
			"Agents": value(1), "Agents#B": value(0), "GPUs": value(1), "Unhealthy": value(0), "Not measured": value(0), "Healthy": value(1),
			"Findings": {`severity="none"`: 1}, "GPUs by state": {
				`state="healthy"`: 1, `state="degraded"`: 0, `state="unhealthy"`: 0,
				`state="not measured"`: 0,
			},
			"Nodes not measured": {n2 + `, state="gone"`: 2}, "Nodes not measured#B": {n2 + `, state="gone"`: since * 1000},
		}},
		{"node.json", "n2", at, map[string]map[string]float64{"Unhealthy": {}, "Not measured": {}, "Health": {}, "Measuring": {}}},
	}
}

// Of an agent that does not answer.
var noAgent = shown{"node.json", "n2", "11m", map[string]map[string]float64{"Measuring": value(-3), "Last measured": value(notMeasured)}}

var stateCases = []stateCase{
	{"the source is down from minute 10", measured, []shown{fleetNotMeasured("11m"), onlyNotMeasured("n2", "11m", 2), nodeNotMeasured("11m")}},
	{"the source is stalled from minute 10", measured, []shown{fleetNotMeasured("11m"), nodeNotMeasured("11m")}},
	{"the source is stalled from minute 10, and up", measured, []shown{fleetNotMeasured("11m"), nodeNotMeasured("11m")}},
	{"the agent is dead from minute 10", measured, []shown{
		fleetNotMeasured("11m"), onlyNotMeasured("n2", "30m", 2), nodeNotMeasured("30m"),
		noAgent,
	}},
	{
		"the agent's pod is deleted in minute 10, the node is there", measured,
		[]shown{fleetNotMeasured("11m"), fleetNotMeasured("30m"), nodeNotMeasured("30m"), noAgent},
	},
	{
		"the agent's pod is deleted in minute 10, without kube-state-metrics", measured,
		slices.Concat([]shown{fleetNotMeasured("11m"), nodeNotMeasured("11m")}, gone("16m", 14*60), gone("2h", 14*60)),
	},
	{"the node is removed in minute 10", measured, slices.Concat([]shown{fleetNotMeasured("11m"), nodeNotMeasured("11m")},
		gone("16m", 14*60))},
	{"the only agent is dead from minute 10", nil, []shown{onlyNotMeasured(".*", "11m", 1)}},
	{"a GPU is unhealthy from minute 5, the source is down from minute 10", nil, []shown{
		{"fleet.json", ".*", "11m", map[string]map[string]float64{
			"Unhealthy": value(1), "Not measured": value(1), "Healthy": value(1.0 / 3), "Worst nodes": {eu + `instance="n1"`: 0, n2: 1},
		}},
		{"node.json", "n2", "11m", map[string]map[string]float64{
			"Unhealthy": value(1), "Degraded": value(notMeasured), "Not measured": value(1),
			"Health": {`A_order="00", gpu="0"`: 3, `A_order="01", gpu="1"`: 0},
		}},
	}},
	{
		"two GPUs are missing from minute 5, and others have their indexes", nil,
		[]shown{{"node.json", "n2", "11m", map[string]map[string]float64{
			"Unhealthy": value(2), "Health": {`gpu="GPU-20"`: 3, `gpu="GPU-21"`: 3, `A_order="00", gpu="0"`: 1},
		}}},
	},
}

// TestStatesAreDefinedOnce checks that panels take the states of GPUs from the rules of health.yaml. The source's own metrics are for
// panels and alerts of the source; annotations have the moments at which the agent's verdict changed.
func TestStatesAreDefinedOnce(t *testing.T) {
	ofTheSource := []string{"node.json Measuring", "fleet.json Agents by state"}
	for name, d := range dashboards(t) {
		for _, p := range d.all() {
			for _, q := range p.Targets {
				if strings.Contains(q.Expr, "gpu_node_agent_device_state") {
					t.Errorf("%s: %s: query %s reads the agent's verdict, which stays without measurements", name, p.Title, q.RefID)
				}
				if strings.Contains(q.Expr, "gpu_node_agent_source_") && !slices.Contains(ofTheSource, name+" "+p.Title) &&
					!strings.Contains(q.Expr, "gpu_node_agent_source_info") && !strings.Contains(q.Expr, "gpu_node_agent_source_poll") {
					t.Errorf("%s: %s: query %s decides by itself whether a node is measured", name, p.Title, q.RefID)
				}
			}
		}
	}
}
