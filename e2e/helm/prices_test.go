package helm

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"sigs.k8s.io/yaml"
)

// priceRules are recording rules with prices, of Prometheus or of its operator.
type priceRules struct {
	Groups []struct {
		Name  string
		Rules []struct {
			Record, Expr string
			Labels       map[string]string
		}
	}
}

// prices returns the expression of each model's price.
func (r priceRules) prices() map[string]string {
	prices := make(map[string]string)
	for _, g := range r.Groups {
		for _, rule := range g.Rules {
			if rule.Record == "model:gpu_node_agent_gpu_hour_price" {
				prices[rule.Labels["modelName"]] = rule.Expr
			}
		}
	}
	return prices
}

// TestPrices checks that the values in docs/usage.md become the rules beside them.
func TestPrices(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", "usage.md"))
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	if len(blocks) != 2 {
		t.Fatalf("docs/usage.md has %d examples, want rules and values", len(blocks))
	}
	var example struct{ Data map[string]string }
	var want priceRules
	unmarshal(t, blocks[0][1], &example)
	unmarshal(t, example.Data["gpu-prices.yaml"], &want)

	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(blocks[1][1]), 0o600); err != nil {
		t.Fatal(err)
	}
	rendered := func(args ...string) map[string]string {
		var object struct{ Spec priceRules }
		unmarshal(t, template(t, append(args, "--set", "prometheusRule.enabled=true")...).unstructured["PrometheusRule"], &object)
		return object.Spec.prices()
	}
	if got := rendered("-f", file); len(got) == 0 || !maps.Equal(got, want.prices()) {
		t.Errorf("prices of the chart: %v, want %v", got, want.prices())
	}
	if got := rendered("-f", file, "--set", "prometheusRule.prices.NVIDIA L4=null", "--set",
		"prometheusRule.prices.A100=1250000"); !maps.Equal(got, map[string]string{
		"NVIDIA H100 80GB HBM3": "vector(2.5)", "A100": "vector(1250000)",
	}) {
		t.Errorf("prices of the chart without the L4: %v", got)
	}
	if got := rendered(); len(got) != 0 {
		t.Errorf("prices by default: %v", got)
	}
}

func unmarshal(t *testing.T, text string, into any) {
	t.Helper()
	if err := yaml.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
}
