// Package metrics shows the newest snapshot and the agent's own state to Prometheus.
//
// A scrape renders what is already known: it calls neither DCGM, nor the kubelet, nor the API server. What
// no single snapshot tells, such as how long a device was unhealthy, is summed up by Totals beside it.
package metrics

import (
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

const namespace = "gpu_node_agent"

// Reload is how the configuration's last reload went.
type Reload struct {
	OK bool
	At time.Time // of the configuration that is in force
}

// Sources is what the collector reads at each scrape. Each is a quick look at memory.
type Sources struct {
	Config    *health.Latest[Config] // never empty
	Snapshots *health.Latest[health.Snapshot]
	Totals    *Totals
	Plugin    func() plugin.Status
	Holders   func() plugin.Holders
	Reload    func() Reload
	Now       func() time.Time
	Hostname  string // the node's name

	// PodLabels returns the labels of a pod that metrics.podLabels allows, with names that Prometheus takes;
	// nil: there are none to show.
	PodLabels func(namespace, pod string) []Label
	// Jobs returns the ids of the jobs that run on a GPU, or on a GPU instance (gi is its id, "" for a whole
	// GPU), in order; nil: there are none to show.
	Jobs func(gpu int, gi string) []string

	Version, Revision string // of the agent
}

// Label is a label of a series.
type Label struct{ Name, Value string }

// NewRegistry returns a registry with all that the agent shows.
func NewRegistry(src Sources) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		NewCollector(src),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return r
}

// Collector is a prometheus.Collector over Sources.
type Collector struct {
	src Sources

	mu    sync.Mutex // guards shape
	shape *shape
}

// shape is what a configuration makes of the series. It is not modified.
type shape struct {
	cfg     *Config
	devices []deviceDescs // by field
	own     ownDescs
}

// NewCollector returns a collector.
func NewCollector(src Sources) *Collector { return &Collector{src: src} }

// shaped returns the shape of the configuration in force.
func (c *Collector) shaped() *shape {
	cfg := c.src.Config.Load()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shape == nil || c.shape.cfg != cfg {
		c.shape = &shape{cfg: cfg, own: newOwnDescs(cfg.Compat.HostnameLabel)}
		for _, f := range cfg.Chosen.Fields {
			c.shape.devices = append(c.shape.devices, newDeviceDescs(cfg, f))
		}
	}
	return c.shape
}

// scrape is all that one scrape shows, each read once so that its series agree.
type scrape struct {
	*shape
	out      chan<- prometheus.Metric
	snapshot *health.Snapshot
	holders  plugin.Holders
	hostname string
}

// Describe sends nothing: the series depend on the devices, which come and go.
func (c *Collector) Describe(chan<- *prometheus.Desc) {}

// staleAfter is how long what was measured is shown while the source is away. A short stall leaves no gap in the
// graphs; after that a flat line would pass for a measurement. States and findings stay.
const staleAfter = time.Minute

// Collect renders the newest snapshot.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	s := &scrape{
		shape: c.shaped(), out: out, snapshot: c.src.Snapshots.Load(), holders: c.src.Holders(), hostname: c.src.Hostname,
	}
	if s.snapshot != nil {
		if s.snapshot.Source.Status == health.SourceUp || c.src.Now().Sub(s.snapshot.At) < staleAfter {
			s.collectFields(c.src.Totals)
		}
		s.collectDevices(c.src.Totals)
		s.collectSource(c.src.Now(), c.src.Totals)
	}
	s.collectPlugin(c.src.Plugin(), c.src.Now())
	s.collectAgent(c.src)
}

// send sends a series. What comes from outside may be no UTF-8, which Prometheus would not take.
func send(out chan<- prometheus.Metric, d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
	m, err := prometheus.NewConstMetric(d, kind, v, labels...)
	if err != nil {
		clean := make([]string, len(labels))
		for i, l := range labels {
			clean[i] = strings.ToValidUTF8(l, "�")
		}
		m, err = prometheus.NewConstMetric(d, kind, v, clean...)
		if err != nil {
			m = prometheus.NewInvalidMetric(d, err) // said in the log, and no reason to lose the others
		}
	}
	out <- m
}

func (s *scrape) gauge(d *prometheus.Desc, v float64, labels ...string) {
	send(s.out, d, prometheus.GaugeValue, v, labels...)
}

func (s *scrape) counter(d *prometheus.Desc, v float64, labels ...string) {
	send(s.out, d, prometheus.CounterValue, v, labels...)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// instanceOf is the id of a MIG device's GPU instance, "" of a GPU.
func instanceOf(d health.Device) string {
	if d.Kind == health.KindMIG {
		return strconv.Itoa(d.GI)
	}
	return ""
}
