package prometheus

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/promapi"
)

// variableValues returns values of a dashboard's variables, as Grafana would set them: All where the variable offers it and
// all is set, otherwise a value that Prometheus has. The names with underscores are Grafana's own; they are shorter than in
// Grafana, because the tests scrape every second and have no history.
func (n machine) variableValues(d dashboard, all bool) map[string]string {
	n.T.Helper()
	values := map[string]string{
		"datasource": "prometheus", "__rate_interval": "1m", "__range": "1h", "__interval": "5s",
		"__interval_ms": "5000",
	}
	for _, v := range d.Templating.List {
		if v.Type == "textbox" {
			values[v.Name] = v.text(n.T)
		}
		if v.Type != "query" {
			continue
		}
		parts := labelValues.FindStringSubmatch(v.query(n.T))
		if parts == nil {
			n.T.Fatalf("%s: variable %s: expected label_values(selector, label), got %q", d.Title, v.Name, v.query(n.T))
		}
		options, err := n.prom.LabelValues(n.T.Context(), substitute(parts[1], values), parts[2])
		if err != nil || len(options) == 0 {
			n.T.Fatalf("%s: variable %s has the values %q: %v", d.Title, v.Name, options, err)
		}
		switch {
		case all && v.IncludeAll:
			values[v.Name] = v.AllValue
		case v.Multi: // as Grafana joins several values
			values[v.Name] = "(" + strings.Join(options, "|") + ")"
		default:
			values[v.Name] = slices.Max(options)
		}
	}
	return values
}

func substitute(text string, values map[string]string) string {
	return reference.ReplaceAllStringFunc(text, func(ref string) string {
		m := reference.FindStringSubmatch(ref)
		return values[m[1]+m[2]] // TestDashboards checks that it exists
	})
}

// evaluate evaluates a panel's query as Grafana does.
func (n machine) evaluate(q target, values map[string]string) ([]promapi.Series, error) {
	expr := substitute(q.Expr, values)
	if q.Instant {
		return n.prom.Query(n.T.Context(), expr)
	}
	return n.prom.QueryRange(n.T.Context(), expr, time.Second)
}

// unsimulated lists the metrics in panels that the simulation lacks.
var unsimulated = []string{
	"DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES", "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
	"gpu_node_agent_container_memory_used_bytes",
	"by (gpu, GPU_I_PROFILE, GPU_I_ID, namespace, pod, container) (gpu_node_agent_process_memory_bytes",
}

// mayBeEmpty reports whether a query may have no data: it reads MIG devices, GPU-hours of one use, nodes that have gone, or metrics that
// the simulation lacks.
func mayBeEmpty(q target) bool {
	return strings.Contains(q.Expr, `GPU_I_ID!=""`) && !strings.Contains(q.Expr, `GPU_I_ID=""`) ||
		strings.Contains(q.Expr, `use="`) && !strings.Contains(q.Expr, "or 0 *") ||
		strings.Contains(q.Expr, "gone_gpus") && !strings.Contains(q.Expr, " or ") ||
		slices.ContainsFunc(unsimulated, func(metric string) bool { return strings.Contains(q.Expr, metric) })
}

// checkPanels checks that every query of every panel has data, with the labels that legends and tables name.
func (n machine) checkPanels(all bool) {
	n.T.Helper()
	queries := 0
	for name, d := range dashboards(n.T) {
		values := n.variableValues(d, all)
		for _, a := range d.Annotations.List {
			if _, err := n.evaluate(a.Target, values); err != nil {
				n.T.Errorf("%s: annotation %s: %v", name, a.Name, err)
			}
		}
		for _, p := range d.all() {
			fields := make(map[string]bool) // columns of a table
			for _, q := range p.Targets {
				queries++
				n.checkQuery(name, p, q, values, fields)
				if fields["Value"] = true; len(p.Targets) > 1 {
					delete(fields, "Value")
					fields["Value #"+q.RefID] = true
				}
			}
			n.checkColumns(name, p, fields)
		}
	}
	n.T.Logf("%d queries of panels", queries)
}

// checkQuery checks that a query has data with the labels of its legend. It adds the labels to fields.
func (n machine) checkQuery(name string, p panel, q target, values map[string]string, fields map[string]bool) {
	n.T.Helper()
	var result []promapi.Series
	n.Eventually(fmt.Sprintf("%s: %s %s has data", name, p.Title, q.RefID), func() (err error) {
		if result, err = n.evaluate(q, values); err == nil && len(result) == 0 && !mayBeEmpty(q) {
			err = errors.New("no series: " + substitute(q.Expr, values)) // the first steps of 15s may have none
		}
		return err
	})
	for _, s := range result {
		for _, m := range legendLabel.FindAllStringSubmatch(q.Legend, -1) {
			if s.Labels[m[1]] == "" && !optional(m[1]) {
				n.T.Errorf("%s: %s: legend %q: no label %s in %v", name, p.Title, q.Legend, m[1], s.Labels)
			}
		}
		for l := range s.Labels {
			fields[l] = true
		}
	}
}

// optional reports whether some series lack a label.
func optional(label string) bool {
	return slices.Contains([]string{"cluster", "GPU_I_ID", "GPU_I_PROFILE"}, label)
}

// checkColumns checks that the columns that a table orders, renames and colours exist.
func (n machine) checkColumns(name string, p panel, fields map[string]bool) {
	if p.Type != "table" || strings.Contains(p.Targets[0].Expr, "(ALERTS{") { // alerts differ in their labels
		return
	}
	shown := maps.Clone(fields)
	for _, t := range p.Transformations {
		for _, used := range []map[string]bool{t.Options.Exclude, keys(t.Options.Index), keys(t.Options.Rename)} {
			for field := range used {
				if !fields[field] && field != "Time" && !optional(field) {
					n.T.Errorf("%s: %s: the column %q does not exist: %v", name, p.Title, field, fields)
				}
			}
		}
		for from, to := range t.Options.Rename {
			delete(shown, from)
			shown[to] = true
		}
	}
	for _, o := range p.FieldConfig.Overrides {
		if o.Matcher.ID != "byName" || !shown[o.Matcher.Options] && !optional(o.Matcher.Options) {
			n.T.Errorf("%s: %s: the override for %q finds no column: %v", name, p.Title, o.Matcher.Options, shown)
		}
	}
}

func keys[V any](m map[string]V) map[string]bool {
	out := make(map[string]bool)
	for k := range m {
		out[k] = true
	}
	return out
}

// panel returns the current result of a panel's first query, with all variables set to All.
func (n machine) panel(file, title string) ([]promapi.Series, error) {
	n.T.Helper()
	d := dashboards(n.T)[file]
	return n.prom.Query(n.T.Context(), substitute(n.find(d, title).Targets[0].Expr, n.variableValues(d, true)))
}

// find returns the panel with a title.
func (n machine) find(d dashboard, title string) panel {
	n.T.Helper()
	all := d.all()
	i := slices.IndexFunc(all, func(p panel) bool { return p.Title == title && p.Type != "row" })
	if i < 0 {
		n.T.Fatalf("%s has no panel %q", d.Title, title)
	}
	return all[i]
}

// awaitDashboard12239 waits for the queries of NVIDIA's dashboard for dcgm-exporter (12239 on grafana.com) of a node: those by
// GPU return a series per GPU, the others one.
func (n machine) awaitDashboard12239(node string) {
	n.T.Helper()
	selector := fmt.Sprintf(`{instance=~"%s", gpu=~"(0|1|2|3|4|5|6|7)"}`, node)
	for expr, want := range map[string]int{
		"DCGM_FI_DEV_GPU_TEMP" + selector:                8,
		"avg(DCGM_FI_DEV_GPU_TEMP" + selector + ")":      1,
		"DCGM_FI_DEV_POWER_USAGE" + selector:             8,
		"sum(DCGM_FI_DEV_POWER_USAGE" + selector + ")":   1,
		"DCGM_FI_DEV_SM_CLOCK" + selector + " * 1000000": 8,
		"DCGM_FI_DEV_GPU_UTIL" + selector:                8,
		"DCGM_FI_DEV_FB_USED" + selector:                 8,
		"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" + selector:     8,
	} {
		n.Eventually("12239: "+expr, func() error {
			result, err := n.prom.Query(n.T.Context(), expr)
			gpus := make(map[string]bool)
			for _, s := range result {
				gpus[s.Labels["gpu"]] = true
			}
			if err == nil && (len(result) != want || len(gpus) != want) {
				err = fmt.Errorf("%d series of %d GPUs, want %d", len(result), len(gpus), want)
			}
			return err
		})
	}
	for _, label := range []string{"instance", "gpu"} {
		if values, err := n.prom.LabelValues(n.T.Context(), "DCGM_FI_DEV_GPU_TEMP", label); err != nil || len(values) == 0 {
			n.T.Errorf("12239: its variable %s has the values %q: %v", label, values, err)
		}
	}
}
