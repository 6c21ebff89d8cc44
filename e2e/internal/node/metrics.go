package node

import (
	"fmt"
	"net/http"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Metrics is the result of one scrape of the agent.
type Metrics map[string]*dto.MetricFamily

// Scrape returns the metrics of the agent.
func (n *Node) Scrape() (Metrics, error) {
	text, err := n.Page("/metrics", http.StatusOK)
	if err != nil {
		return nil, err
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	p, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("/metrics: %w", err)
	}
	return p, nil
}

// States returns the state of each device. Several states of one device are joined by a plus sign.
func (p Metrics) States() map[string]string {
	states := make(map[string]string)
	for _, m := range p["gpu_node_agent_device_state"].GetMetric() {
		id := label(m, "UUID")
		var now []string
		if states[id] != "" {
			now = append(now, states[id])
		}
		if m.GetGauge().GetValue() == 1 {
			now = append(now, label(m, "state"))
		}
		states[id] = strings.Join(now, "+")
	}
	return states
}

// Index returns the index of a device, which simulated events use.
func (p Metrics) Index(uuid string) string {
	for _, m := range p["gpu_node_agent_device_state"].GetMetric() {
		if label(m, "UUID") == uuid {
			return label(m, "gpu")
		}
	}
	return ""
}

// Value returns the value of a series of nvidia.com/gpu, or -1 if it does not exist.
func (p Metrics) Value(name string) float64 {
	for _, m := range p[name].GetMetric() {
		if label(m, "resource") == string(GPU) {
			if m.Counter != nil {
				return m.GetCounter().GetValue()
			}
			return m.GetGauge().GetValue()
		}
	}
	return -1
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}
