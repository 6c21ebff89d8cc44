package prometheus

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/promapi"
)

// fleet is a machine whose Prometheus scrapes three nodes: eight GPUs, eight GPUs in MIG mode, and sixteen old GPUs. Each has
// other names of fields.
type fleet struct {
	machine
	gpus, mig, old *node.Node
}

func newFleet(t *testing.T) fleet {
	t.Helper()
	prometheus := tool(t, "prometheus")
	var f fleet
	var targets strings.Builder
	for _, n := range []struct {
		at                         **node.Node
		name, profile, dcgm, names string
	}{
		{&f.gpus, "gpus", "h100-8", "4.6", "dcgm-exporter-4.8"},
		{&f.mig, "mig", "h100-8-mig", "4.7", "dcgm-exporter-4.9"},
		{&f.old, "old", "v100-16", "4.6", "dcgm-exporter-4.9, dcgm-exporter-4.8"},
	} {
		*n.at = node.New(t)
		(*n.at).Configure(fmt.Sprintf(`source: {interval: 1s, sim: {profile: %s, dcgm: %q}}
plugin: {enabled: false}
metrics: {fields: [default, profiling, optional], names: [%s]}
`, n.profile, n.dcgm, n.names))
		(*n.at).StartAgent()
		fmt.Fprintf(&targets, "  - {targets: [%q], labels: {cluster: lab, instance: %s}}\n", (*n.at).Address, n.name)
	}
	address := node.Host() + ":19091"
	f.machine = machine{f.gpus, &promapi.API{URL: "http://" + address}}
	f.Write("prometheus.yaml", f.prometheusConfig("- job_name: gpu-node-agent\n  static_configs:\n"+targets.String()))
	f.Start(prometheus, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--web.listen-address="+address)
	f.Eventually("Prometheus has scraped the agents", func() error {
		return f.checkSeries(`count_over_time(gpu_node_agent_source_up[1m]) >= 10`, 3) // longer than a variable's $__interval
	})
	return f
}

// rows returns the current results of a panel's query for a node, or for all nodes if node is "": values by the labels
// that are given, joined by spaces.
func (f fleet) rows(file, title string, query int, node string, labels ...string) (map[string]float64, error) {
	f.T.Helper()
	d := dashboards(f.T)[file]
	values := f.variableValues(d, true)
	if node != "" {
		values["node"] = node
	}
	result, err := f.evaluate(f.find(d, title).Targets[query], values)
	rows := make(map[string]float64)
	for _, s := range result {
		var key []string
		for _, l := range labels {
			key = append(key, s.Labels[l])
		}
		rows[strings.TrimSpace(strings.Join(key, " "))] = s.Value
	}
	if err == nil && len(rows) != len(result) {
		err = fmt.Errorf("labels %v do not tell %d series apart: %v", labels, len(result), result)
	}
	return rows, err
}

// await waits until a panel's query returns these rows.
func (f fleet) await(want map[string]float64, file, title string, query int, node string, labels ...string) {
	f.T.Helper()
	f.Eventually(fmt.Sprintf("%s: %s of node %q is right", file, title, node), func() error {
		got, err := f.rows(file, title, query, node, labels...)
		if err == nil && !maps.Equal(got, want) {
			err = fmt.Errorf("it shows %v, want %v", got, want)
		}
		return err
	})
}

// TestFleetPanels checks what the dashboards show of three nodes: none at fault, then XIDs and a lost GPU, then one agent
// that is down, then all.
func TestFleetPanels(t *testing.T) {
	f := newFleet(t)
	all := func(value float64) map[string]float64 { return map[string]float64{"": value} }

	f.await(map[string]float64{"none": 3}, "fleet.json", "Findings", 0, "", "severity")
	f.await(map[string]float64{"none": 0}, "fleet.json", "XIDs in the time range", 0, "", "xid")
	f.await(map[string]float64{"none": 0}, "node.json", "XIDs of each GPU", 0, "gpus", "xid")
	f.await(map[string]float64{"none": 0}, "fleet.json", "Nodes not measured", 0, "", "state")
	f.await(map[string]float64{"no alert is firing": 1}, "fleet.json", "Alerts", 0, "", "alertname")
	f.await(all(3), "fleet.json", "Agents", 0, "")
	f.await(all(0), "fleet.json", "Agents", 1, "")
	f.await(all(32), "fleet.json", "GPUs", 0, "")
	f.await(map[string]float64{"NVIDIA H100 80GB HBM3": 8}, "node.json", "GPUs", 0, "mig", "model")
	f.await(map[string]float64{"": 0}, "node.json", "Firing alerts", 0, "gpus")
	for _, title := range []string{"Allocated", "Allocated and idle"} { // no kubelet runs, so the holders are unknown
		f.await(map[string]float64{}, "fleet.json", title, 0, "")
	}

	// 62 is no common XID: its series begins with the value 1.
	for _, event := range []string{`{gpu: 1, xid: 48}`, `{gpu: 2, xid: 62}`, `{gpu: 5, xid: 31, times: 200}`, `{gpu: 3, lost: true}`} {
		f.Inject("%s", event)
	}
	f.await(map[string]float64{"31": 200, "48": 1, "62": 1}, "fleet.json", "XIDs in the time range", 0, "", "xid")
	f.await(map[string]float64{"1 48": 1, "2 62": 1, "5 31": 200}, "node.json", "XIDs of each GPU", 0, "gpus", "gpu", "xid")
	f.await(map[string]float64{"gpus": 202, "mig": 0, "old": 0}, "fleet.json", "Worst nodes", 3, "", "instance")
	f.await(map[string]float64{"none": 0}, "node.json", "XIDs of each GPU", 0, "mig", "xid")
	f.Eventually("the XIDs have times", func() error {
		last, err := f.rows("node.json", "XIDs of each GPU", 1, "gpus", "gpu", "xid")
		if want := []string{"1 48", "2 62", "5 31"}; err == nil && !slices.Equal(slices.Sorted(maps.Keys(last)), want) {
			err = fmt.Errorf("it shows %v, want %v", last, want)
		}
		return err
	})
	f.checkBars(map[string]float64{"31": 200, "48": 1, "62": 1})
	f.await(map[string]float64{"xid-48": 1, "xid-62": 1, "lost": 1}, "fleet.json", "Findings", 0, "", "cause")
	f.checkTimelines()
	f.checkAnnotations()

	for _, title := range []string{"Utilization", "Health of MIG devices", "Utilization of MIG devices", "Framebuffer memory of MIG devices"} {
		f.Eventually("the MIG node has "+title, func() error {
			rows, err := f.rows("node.json", title, 0, "mig", "gpu", "GPU_I_ID")
			if err == nil && len(rows) < 8 {
				err = fmt.Errorf("it shows %v, want a series for each GPU", rows)
			}
			return err
		})
	}
	f.Eventually("the fleet's utilization includes the GPUs in MIG mode", func() error {
		rows, err := f.rows("fleet.json", "Utilization by model", 0, "mig", "modelName")
		if err == nil && len(rows) != 1 {
			err = fmt.Errorf("it shows %v", rows)
		}
		return err
	})

	// The source of the MIG node is down, and the agent of the old one.
	f.mig.Inject(`{source: down}`)
	f.await(all(8), "fleet.json", "Not measured", 0, "")
	f.await(all((32-3-8)/32.0), "fleet.json", "Healthy", 0, "")
	f.checkNotMeasured("mig", 8)
	f.mig.Inject(`{source: up}`)
	f.await(all((32-3)/32.0), "fleet.json", "Healthy", 0, "")
	f.await(all(0), "node.json", "Unhealthy", 0, "mig")

	f.old.KillAgent()
	f.await(all(2), "fleet.json", "Agents", 0, "")
	f.await(all(1), "fleet.json", "Agents", 1, "")
	f.await(all(32), "fleet.json", "GPUs", 0, "")
	f.await(all(16), "fleet.json", "Not measured", 0, "")
	f.await(all((32-3-16)/32.0), "fleet.json", "Healthy", 0, "")
	f.await(map[string]float64{"old not measured": 16}, "fleet.json", "Nodes not measured", 0, "", "instance", "state")
	f.checkNotMeasured("old", 16)
	none := map[string]float64{}
	for _, title := range []string{"GPUs", "Kubelet", "Pod resources", "Holders", "Configuration", "Versions"} {
		f.await(none, "node.json", title, 0, "old")
	}
	f.await(all(-3), "node.json", "Measuring", 0, "old")

	f.gpus.KillAgent()
	f.mig.KillAgent()
	f.await(all(0), "fleet.json", "Agents", 0, "")
	f.await(all(3), "fleet.json", "Agents", 1, "")
	f.await(all(32), "fleet.json", "GPUs", 0, "")
	f.await(all(0), "fleet.json", "Healthy", 0, "")
	for _, title := range []string{"Unhealthy", "Degraded", "Allocated", "Allocated and idle", "Hottest GPU", "Utilization", "Total power"} {
		f.await(all(notMeasured), "fleet.json", title, 0, "")
	}
	f.await(map[string]float64{"gpus not measured": 1, "mig not measured": 1, "old not measured": 1}, "fleet.json", "Findings", 0, "",
		"instance", "severity")
	f.await(map[string]float64{"31": 200, "48": 1, "62": 1, "not measured": -1}, "fleet.json", "XIDs in the time range", 0, "", "xid")
}

// checkNotMeasured checks the dashboard of a node that is not measured, and whose GPUs were healthy.
func (f fleet) checkNotMeasured(node string, gpus int) {
	f.T.Helper()
	for _, title := range []string{"Unhealthy", "Degraded", "Hottest GPU", "Total power"} {
		f.await(map[string]float64{"": notMeasured}, "node.json", title, 0, node)
	}
	f.await(map[string]float64{"": float64(gpus)}, "node.json", "Not measured", 0, node)
	f.await(map[string]float64{"not measured": 1}, "node.json", "Findings", 0, node, "severity")
	f.await(map[string]float64{"not measured": -1}, "node.json", "XIDs of each GPU", 0, node, "xid")
	d := dashboards(f.T)["node.json"]
	values := f.variableValues(d, true)
	values["node"] = node
	f.Eventually("the bars of "+node+" end with not measured", func() error {
		rows, err := f.prom.QueryRange(f.T.Context(), substitute(f.find(d, "Health").Targets[0].Expr, values), time.Second)
		if err == nil && len(rows) != gpus {
			err = fmt.Errorf("%d bars, want %d", len(rows), gpus)
		}
		for _, s := range rows {
			if last := s.Values[len(s.Values)-1]; last != 0 {
				err = errors.Join(err, fmt.Errorf("the bar of GPU %s ends with %v", s.Labels["gpu"], last))
			}
		}
		return err
	})
}

// checkBars checks that each XID is in one bar of the panel: the sum of the points that are $__interval apart is exact.
func (f fleet) checkBars(want map[string]float64) {
	f.T.Helper()
	d := dashboards(f.T)["fleet.json"]
	f.Eventually("the bars add up to the XIDs", func() error {
		all, err := f.prom.QueryRange(f.T.Context(), substitute(f.find(d, "XIDs").Targets[0].Expr, f.variableValues(d, true)), 5*time.Second)
		got := make(map[string]float64)
		for _, s := range all {
			for _, v := range s.Values {
				got[s.Labels["xid"]] += v
			}
		}
		if err == nil && !maps.Equal(got, want) {
			err = fmt.Errorf("they add up to %v, want %v", got, want)
		}
		return err
	})
}

// checkTimelines checks the order of the rows of the state timelines, which Grafana takes from Prometheus' result, and
// which GPUs are unhealthy.
func (f fleet) checkTimelines() {
	f.T.Helper()
	d := dashboards(f.T)["node.json"]
	values := f.variableValues(d, true)
	for _, c := range []struct {
		title, node string
		unhealthy   []int
	}{{"Health", "gpus", []int{1, 2, 3}}, {"Health", "old", nil}, {"Health of MIG devices", "mig", nil}} {
		values["node"] = c.node
		f.Eventually(c.title+" of "+c.node+" has its rows in the order of the GPUs", func() error {
			result, err := f.evaluate(f.find(d, c.title).Targets[0], values)
			var rows, unhealthy []int
			for _, s := range result {
				gpu, bad := strconv.Atoi(s.Labels["gpu"])
				if err = errors.Join(err, bad); s.Value == 3 {
					unhealthy = append(unhealthy, gpu)
				}
				rows = append(rows, gpu)
			}
			if err == nil && (len(rows) < 8 || !slices.IsSorted(rows) || !slices.Equal(unhealthy, c.unhealthy)) {
				err = fmt.Errorf("rows of GPUs %v, of which %v are unhealthy", rows, unhealthy)
			}
			return err
		})
	}
}

// checkAnnotations checks that the annotations have the XIDs and the GPUs that became unhealthy.
func (f fleet) checkAnnotations() {
	f.T.Helper()
	for file, want := range map[string][]string{
		"fleet.json": {"gpus GPU 1: XID 48", "gpus GPU 1: unhealthy", "gpus GPU 2: XID 62", "gpus GPU 2: unhealthy", "gpus GPU 3: unhealthy"},
		"node.json":  {"GPU 1: XID 48", "GPU 1: unhealthy", "GPU 2: XID 62", "GPU 2: unhealthy", "GPU 3: unhealthy", "GPU 5: XID 31"},
	} {
		d := dashboards(f.T)[file]
		values := f.variableValues(d, true)
		values["node"] = "gpus"
		f.Eventually(file+" has annotations", func() error {
			var titles []string
			for _, a := range d.Annotations.List {
				result, err := f.evaluate(a.Target, values)
				if err != nil {
					return err
				}
				for _, s := range result {
					titles = append(titles, legendLabel.ReplaceAllStringFunc(a.Title,
						func(ref string) string { return s.Labels[strings.Trim(ref, "{}")] }))
				}
			}
			if slices.Sort(titles); !slices.Equal(titles, want) {
				return fmt.Errorf("it has %q, want %q", titles, want)
			}
			return nil
		})
	}
}
