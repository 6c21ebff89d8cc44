//go:build cluster

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/process"
	"github.com/gpu-node-agent/gpu-node-agent/e2e/internal/promapi"
)

// prometheusServer is a Prometheus with the configuration that its operator would derive from the chart's
// ServiceMonitor and PrometheusRule.
type prometheusServer struct {
	*process.Process
	api *promapi.API
}

const prometheusURL = "http://127.0.0.1:9090"

func startPrometheus(t *testing.T) prometheusServer {
	t.Helper()
	rules := monitoringSpec(t, "prometheusrules")
	text, err := yaml.Marshal(rules)
	if err != nil {
		t.Fatal(err)
	}
	file := func(name string) string { return theCluster.file("state", "prometheus-"+name) }
	endpoint := monitoringSpec(t, "servicemonitors")["endpoints"].([]any)[0].(map[string]any)
	relabel, err := json.Marshal(endpoint["relabelings"])
	if err != nil {
		t.Fatal(err)
	}
	// The job is the value of the Service's label that jobLabel names. The interval is one second instead of 15.
	config := fmt.Sprintf(`global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%s]
scrape_configs:
- job_name: gpu-node-agent
  honor_labels: %v
  metrics_path: %v
  file_sd_configs: [{files: [%s], refresh_interval: 1s}]
  relabel_configs: %s
`, file("rules.yaml"), endpoint["honorLabels"], endpoint["path"], file("targets.json"),
		strings.NewReplacer("sourceLabels", "source_labels", "targetLabel", "target_label").Replace(string(relabel)))
	if err := errors.Join(os.WriteFile(file("rules.yaml"), text, 0o600),
		os.WriteFile(file("config.yaml"), []byte(config), 0o600)); err != nil {
		t.Fatal(err)
	}
	writeTargets(t, file("targets.json"), endpoint["port"].(string))
	if out, err := exec.CommandContext(t.Context(), "promtool", "check", "config", file("config.yaml")).CombinedOutput(); err != nil {
		t.Fatalf("promtool: %v\n%s", err, out)
	}
	p, err := theCluster.program("prometheus", "--config.file="+file("config.yaml"),
		"--storage.tsdb.path="+file("data"), "--web.listen-address=127.0.0.1:9090")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	server := prometheusServer{p, &promapi.API{URL: prometheusURL}}
	server.awaitCount(t, `up{job="gpu-node-agent", instance="`+nodeName+`"} == 1`, 1)
	return server
}

// monitoringSpec returns the spec of the release's only object of a kind.
func monitoringSpec(t *testing.T, resource string) map[string]any {
	t.Helper()
	all, err := theCluster.dynamic.Resource(monitoring(resource)).Namespace(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(all.Items) != 1 {
		t.Fatalf("%s: %d objects, want 1: %v", resource, len(all.Items), err)
	}
	spec, _, err := unstructured.NestedMap(all.Items[0].Object, "spec")
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

// writeTargets writes the addresses of the Service from its EndpointSlices.
func writeTargets(t *testing.T, file, port string) {
	t.Helper()
	selector := metav1.ListOptions{LabelSelector: discovery.LabelServiceName + "=" + release + "-gpu-node-agent"}
	eventually(t, "the Service has an address", func(ctx context.Context) error {
		slices, err := theCluster.client.DiscoveryV1().EndpointSlices(namespace).List(ctx, selector)
		if err != nil {
			return err
		}
		for _, slice := range slices.Items {
			for _, p := range slice.Ports {
				for _, e := range slice.Endpoints {
					if p.Name != nil && *p.Name == port && e.Conditions.Ready != nil && *e.Conditions.Ready {
						// The labels that the operator sets before the chart's relabelings.
						target := fmt.Sprintf(`[{"targets": ["%s:%d"], "labels": {"__meta_kubernetes_pod_node_name": %q,
							"namespace": %q, "pod": %q, "container": "gpu-node-agent", "endpoint": %q}}]`,
							e.Addresses[0], *p.Port, *e.NodeName, namespace, e.TargetRef.Name, port)
						return os.WriteFile(file, []byte(target), 0o600)
					}
				}
			}
		}
		return fmt.Errorf("no ready address of port %s", port)
	})
}

// awaitCount waits until a query returns want series.
func (p prometheusServer) awaitCount(t *testing.T, query string, want int) {
	t.Helper()
	eventually(t, fmt.Sprintf("Prometheus has %d of %s", want, query), func(ctx context.Context) error {
		found, err := p.api.Query(ctx, query)
		if err != nil {
			return err
		}
		if len(found) != want {
			return fmt.Errorf("got %v", found)
		}
		return nil
	}, p.Process)
}

// alerts returns the alerts of a name, as state and labels.
func (p prometheusServer) alerts(ctx context.Context, name string) ([]string, error) {
	found, err := p.api.Alerts(ctx)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, a := range found {
		if a.Labels["alertname"] == name {
			all = append(all, fmt.Sprintf("%s %q", a.State, a.Labels))
		}
	}
	return all, nil
}

// awaitFiring waits until an alert with the label fires. A scrape that fails begins the alert's minutes anew.
func (p prometheusServer) awaitFiring(t *testing.T, alert, label, value string) {
	t.Helper()
	eventuallyWithin(t, 5*time.Minute, "alert "+alert+" fires", func(ctx context.Context) error {
		all, err := p.alerts(ctx, alert)
		for _, a := range all {
			if strings.HasPrefix(a, "firing") && strings.Contains(a, fmt.Sprintf("%q:%q", label, value)) {
				return nil
			}
		}
		return errors.Join(err, fmt.Errorf("alerts: %v", all))
	}, p.Process)
}

// awaitResolved waits until an alert is neither pending nor firing.
func (p prometheusServer) awaitResolved(t *testing.T, alert string) {
	t.Helper()
	eventually(t, "alert "+alert+" is resolved", func(ctx context.Context) error {
		all, err := p.alerts(ctx, alert)
		if err == nil && len(all) > 0 {
			err = fmt.Errorf("alerts: %v", all)
		}
		return err
	}, p.Process)
}
