package prometheus

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/node"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/promapi"
)

// machine is a node whose agent Prometheus scrapes.
type machine struct {
	*node.Node
	prom *promapi.API
}

// newMachine starts a kubelet, an agent and a Prometheus with the chart's rules.
func newMachine(t *testing.T) machine {
	t.Helper()
	prometheus := tool(t, "prometheus")
	address := node.Host() + ":19090"
	n := machine{node.New(t), &promapi.API{URL: "http://" + address}}
	n.StartKubelet()
	n.configure("info")
	n.StartAgent()
	n.Write("prometheus.yaml", n.scrapeConfig())
	n.Start(prometheus, "--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--web.listen-address="+address)
	n.Eventually("Prometheus has scraped the agent", func() error {
		// Several times, because the first value of a counter does not increase it.
		return n.checkSeries(`count_over_time(gpu_node_agent_source_up[1m]) >= 3`, 2)
	})
	return n
}

// The resources of shared GPUs.
const memoryUnits, mpsShares = "nvidia.com/gpu-memory", "nvidia.com/gpu.shared"

// configure writes the agent's configuration: short intervals, a threshold that makes every GPU idle, an unknown
// field, GPU 4 shared by memory and GPU 7 by MPS.
func (n machine) configure(level string) {
	n.T.Helper()
	n.Configure(fmt.Sprintf(`log: {level: %s}
source: {interval: 1s, stallAfter: 1s, events: nvml, sim: {profile: h100-8}}
health: {recoverAfter: 1s}
metrics:
  fields: [default, profiling, optional, DCGM_FI_DEV_NO_SUCH_FIELD]
  idleBelow: 100
  processes: {enabled: true, podLogs: ""}
plugin:
  sharing:
    memory: {resource: %s, devices: [4], enforcement: none}
    mps: {root: %s, control: %s, resources: [{name: nvidia.com/gpu, replicas: 4, devices: [7], rename: %s}]}
`, level, memoryUnits, n.File("mps"), control, mpsShares))
}

// scrapeConfig makes Prometheus scrape the agent twice: as node-1 without a cluster label, and as node-2 with a cluster
// and, as Prometheus' operator sets them, the labels of the agent's own pod on series without these labels. So every
// query must work both ways, and sums over nodes are visible.
func (n machine) scrapeConfig() string {
	return n.prometheusConfig(fmt.Sprintf(`- job_name: gpu-node-agent
  honor_labels: true
  static_configs: [{targets: [%[1]q]}]
  relabel_configs: [{target_label: instance, replacement: node-1}]
- job_name: gpus
  honor_labels: true
  static_configs: [{targets: [%[1]q], labels: {cluster: east, namespace: gpu, pod: agent, container: agent}}]
  relabel_configs: [{target_label: instance, replacement: node-2}]
`, n.Address))
}

// prometheusConfig returns a configuration with the chart's rules, the prices of docs/usage.md and these scrape configurations, for
// scrapes at each second.
func (n machine) prometheusConfig(scrapes string) string {
	n.T.Helper()
	n.Write("prices.yaml", documentedPrices(n.T))
	files := []string{n.File("prices.yaml")}
	for file := range rules(n.T) {
		n.writeRules(file)
		files = append(files, n.File(file))
	}
	return fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%s]\nscrape_configs:\n%s",
		strings.Join(files, ", "), scrapes)
}

// everySecond has what changes in a file of rules so that Prometheus evaluates them each second instead of each 15.
var everySecond = map[string][][2]string{
	"health.yaml": {{"interval: 15s\n", "interval: 1s\n"}},
	"usage.yaml":  {{"interval: 15s\n", "interval: 1s\n"}, {") / 240\n", ") / 3600\n"}, {") * 15\n", ") * 1\n"}},
}

// writeRules writes a file of the chart's rules, for an evaluation each second.
func (n machine) writeRules(file string) {
	n.T.Helper()
	content, err := os.ReadFile(filepath.Join(chart, "rules", file))
	if err != nil {
		n.T.Fatal(err)
	}
	text := string(content)
	for _, change := range everySecond[file] {
		if !strings.Contains(text, change[0]) {
			n.T.Fatalf("%s has no %q", file, change[0])
		}
		text = strings.ReplaceAll(text, change[0], change[1])
	}
	n.Write(file, text)
}

// documentedPrices returns the rules with the prices in docs/usage.md.
func documentedPrices(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "usage.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(text, -1) {
		var example struct {
			Kind string            `json:"kind"`
			Data map[string]string `json:"data"`
		}
		if err := yaml.Unmarshal(m[1], &example); err != nil {
			t.Fatal(err)
		}
		if example.Kind == "ConfigMap" && len(example.Data) == 1 {
			return slices.Collect(maps.Values(example.Data))[0]
		}
	}
	t.Fatal("docs/usage.md has no ConfigMap with prices")
	return ""
}

// runPod admits a pod that requests count of a resource.
func (n machine) runPod(namespace, name string, resource v1.ResourceName, count int64) {
	n.T.Helper()
	n.Admit(n.Bind(node.Pod(namespace, name, resource, count)))
}

// awaitGPU waits until an expression has this number of series, which it has not after a failed scrape, and returns the index of the GPU of
// the first one.
func (n machine) awaitGPU(expr string, count int) (index string) {
	n.T.Helper()
	n.Eventually(expr, func() error {
		result, err := n.prom.Query(n.T.Context(), expr)
		if err == nil && len(result) != count {
			err = fmt.Errorf("%d series, want %d: %v", len(result), count, result)
		}
		if err == nil {
			index = result[0].Labels["gpu"]
		}
		return err
	})
	return index
}

// checkSeries checks the number of series of an expression.
func (n machine) checkSeries(expr string, count int) error {
	result, err := n.prom.Query(n.T.Context(), expr)
	if err == nil && len(result) != count {
		err = fmt.Errorf("%s has %d series, want %d: %v", expr, len(result), count, result)
	}
	return err
}
