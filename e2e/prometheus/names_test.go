package prometheus

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/promapi"
)

var dcgmName = regexp.MustCompile(`DCGM_\w+`)

// joinedNames returns the metrics that the recording rules join, by the names of dcgm-exporter 4.9 and of 4.8.
func joinedNames(t *testing.T) (newNames, oldNames []string) {
	t.Helper()
	for _, r := range rules(t)["recording.yaml"] {
		switch names := dcgmName.FindAllString(r.Expr, -1); {
		case len(names) == 2:
			newNames, oldNames = append(newNames, names[0]), append(oldNames, names[1])
		case len(names) != 0:
			t.Errorf("%s queries %v; a recording rule joins two names", r.Record, names)
		}
	}
	if len(newNames) == 0 {
		t.Fatal("no recording rule joins two names")
	}
	return newNames, oldNames
}

// TestNamesAreJoinedOnce checks that each name that the other generation lacks is in one recording rule only, and in no
// alert and no panel.
func TestNamesAreJoinedOnce(t *testing.T) {
	newNames, oldNames := joinedNames(t)
	joined := slices.Concat(newNames, oldNames)
	slices.Sort(joined)
	if unique := slices.Compact(slices.Clone(joined)); len(unique) != len(joined) {
		t.Errorf("a name is joined twice: %v", joined)
	}
	check := func(where, expr string) {
		for _, name := range dcgmName.FindAllString(expr, -1) {
			if slices.Contains(joined, name) {
				t.Errorf("%s queries %s; query the recorded series", where, name)
			}
		}
	}
	for _, rules := range rules(t) {
		for _, r := range rules {
			if r.Record == "" {
				check(r.Alert, r.Expr+fmt.Sprint(r.Annotations))
			}
		}
	}
	for name, d := range dashboards(t) {
		for _, p := range d.all() {
			for _, q := range p.Targets {
				check(name+": "+p.Title, q.Expr)
			}
		}
	}
}

// TestPanelsWhenNamesChange checks that panels have the same data with the names of either generation and with both, and that
// no recorded series has a gap when an agent's names change.
func TestPanelsWhenNamesChange(t *testing.T) {
	const nodes, gpus = 3, 8
	prometheus := tool(t, "prometheus")
	address := node.Host() + ":19092"
	n := machine{node.New(t), &promapi.API{URL: "http://" + address}}
	n.configureNames("dcgm-exporter-4.8")
	n.StartAgent()
	newNames, oldNames := joinedNames(t)
	scrape := func(node, driver string, dropped []string) string {
		return fmt.Sprintf(`- job_name: %s
  honor_labels: true
  static_configs: [{targets: [%q], labels: {cluster: lab, instance: %[1]s}}]
  metric_relabel_configs:
  - {action: drop, source_labels: [__name__], regex: %[3]s}
  - {action: labeldrop, regex: %s}
`, node, n.Address, strings.Join(dropped, "|"), driver)
	}
	// Three nodes are one agent: with all of its series, and with the series of either generation.
	n.Write("prometheus.yaml", n.prometheusConfig(scrape("all", "none", []string{"none"})+
		scrape("new", "DCGM_FI_DRIVER_VERSION", oldNames)+scrape("old", "DCGM_FI_SYSTEM_DRIVER_VERSION", newNames)))
	n.Start(prometheus, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--web.listen-address="+address)

	const recorded = `{__name__=~"device:gpu_node_agent_.+", __name__!="device:gpu_node_agent_state:max", instance="all"}`
	awaitNames := func(names ...string) {
		t.Helper()
		n.configureNames(names...)
		n.Eventually(fmt.Sprintf("the names are %v", names), func() error {
			var series int
			for name, metrics := range map[string][]string{"dcgm-exporter-4.8": oldNames, "dcgm-exporter-4.9": newNames} {
				if slices.Contains(names, name) {
					series += len(metrics)
				}
			}
			all := fmt.Sprintf(`{__name__=~"%s", instance="all"}`, strings.Join(slices.Concat(oldNames, newNames), "|"))
			return errors.Join(n.checkSeries(all, gpus*series), n.checkSeries(recorded, gpus*len(newNames)))
		})
	}
	awaitNames("dcgm-exporter-4.8")
	start := time.Now()
	n.checkLoadPanels("all", "old")
	n.awaitDashboard12239("all")

	awaitNames("dcgm-exporter-4.8", "dcgm-exporter-4.9")
	n.checkLoadPanels("all", "old", "new")
	n.awaitDashboard12239("all")
	n.Eventually("the fleet counts each GPU once", func() error {
		return n.checkSeries(fmt.Sprintf(`cluster:gpu_node_agent_power_watts:sum
			== on () sum(max by (instance, gpu) (device:gpu_node_agent_power_watts:max))
			and on () count(device:gpu_node_agent_power_watts:max) == %d`, nodes*gpus), 1)
	})

	awaitNames("dcgm-exporter-4.9")
	n.checkLoadPanels("all", "new")
	for _, r := range rules(t)["recording.yaml"] {
		if !strings.HasPrefix(r.Record, "device:") {
			continue
		}
		// A busy machine fails scrapes, which take at most a second: the times around these do not count.
		window := time.Since(start).Truncate(time.Second)
		result, err := n.prom.Query(t.Context(),
			fmt.Sprintf(`min_over_time(((count(%s{instance="all"}) or vector(0)) and on () min_over_time(up{instance="all"}[5s]) == 1)[%ds:1s])`,
				r.Record, int(window.Seconds())))
		if err != nil || len(result) != 1 || result[0].Value != gpus {
			t.Errorf("%s: number of GPUs in each of the %v: %v, want %d: %v", r.Record, window, result, gpus, err)
		}
	}
}

// configureNames writes a configuration of the agent with these names. Polls are rarer than scrapes, so that the three nodes
// have the same values most of the time.
func (n machine) configureNames(names ...string) {
	n.T.Helper()
	n.Configure(fmt.Sprintf(`source: {interval: 5s, sim: {profile: h100-8}}
health: {interval: 5s}
plugin: {enabled: false}
metrics: {fields: [default, profiling, optional], names: [%s]}
`, strings.Join(names, ", ")))
}

// checkLoadPanels checks that each panel of recorded series or fields has data, and the same of all nodes.
func (n machine) checkLoadPanels(nodes ...string) {
	n.T.Helper()
	queries := 0
	for file, d := range dashboards(n.T) {
		values := n.variableValues(d, true)
		for _, p := range d.all() {
			for _, q := range p.Targets {
				if !strings.Contains(q.Expr, "device:gpu_node_agent_") && !strings.Contains(q.Expr, "DCGM_FI_") || mayBeEmpty(q) {
					continue
				}
				queries++
				n.Eventually(fmt.Sprintf("%s: %s %s is the same of %v", file, p.Title, q.RefID, nodes), func() error {
					return n.checkSame(q.Expr, values, nodes)
				})
			}
		}
	}
	if queries == 0 {
		n.T.Error("no panel queries a recorded series or a field")
	}
}

// checkSame returns an error if an expression has other values for one of the nodes. values has the other variables.
func (n machine) checkSame(expr string, values map[string]string, nodes []string) error {
	var first map[string]float64
	for _, node := range nodes {
		values["node"] = node
		rows, err := n.valuesByLabels(substitute(expr, values))
		if err != nil {
			return err
		}
		if first == nil {
			first = rows
		}
		if !maps.EqualFunc(first, rows, nearlyEqual) {
			return fmt.Errorf("%v of %s, %v of %s", first, nodes[0], rows, node)
		}
	}
	return nil
}

// nearlyEqual ignores that a sum depends on the order of its parts.
func nearlyEqual(a, b float64) bool { return math.Abs(a-b) <= 1e-9*math.Abs(b) }

// valuesByLabels returns the current values of an expression by their labels without the node, at least one.
func (n machine) valuesByLabels(expr string) (map[string]float64, error) {
	result, err := n.prom.Query(n.T.Context(), expr)
	values := make(map[string]float64)
	for _, s := range result {
		delete(s.Labels, "instance")
		values[fmt.Sprint(s.Labels)] = s.Value
	}
	if err == nil && (len(values) == 0 || len(values) != len(result)) {
		err = fmt.Errorf("%s has %d series in %d rows", expr, len(result), len(values))
	}
	return values, err
}
