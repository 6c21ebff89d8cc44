// Package metrics exports the newest snapshot and the agent's own state as Prometheus metrics.
//
// A scrape renders what is in memory: it calls neither DCGM, nor the kubelet, nor the API server. Totals accumulates
// what a single snapshot does not contain, such as the time that a device has been unhealthy.
package metrics

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/exposition"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/response"
)

// Sources provides the data of a scrape. All functions must return quickly.
type Sources struct {
	Config *health.Latest[Config] // never empty
	View   func() *view.View      // what the agent knows, which a scrape takes once
	Totals *Totals

	// PodLabels returns the labels of a pod as PodPicker.Of selects them, including its UID. nil: no pod labels.
	PodLabels func(namespace, pod string) []Label
	// Jobs returns the IDs of the jobs on a GPU, or on the GPU instance with the ID gi ("" for a whole GPU), in order.
	// nil: no jobs.
	Jobs func(gpu int, gi string) []string
}

// Label is a label of a series.
type Label = exposition.Label

func label(name, value string) Label { return Label{Name: name, Value: value} }

// Handler serves /metrics.
func Handler(src Sources, renderer *response.Renderer, log promhttp.Logger) http.Handler {
	return exposition.Handler(newCollector(src).collect, renderer, log)
}

// collector renders Sources as pages.
type collector struct {
	src Sources

	mu      sync.Mutex // guards schema
	schema  *schema
	buffers sync.Pool // of *buffers
}

func newCollector(src Sources) *collector { return &collector{src: src} }

// currentSchema returns the schema of the configuration in force.
func (c *collector) currentSchema() *schema {
	cfg := c.src.Config.Load()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.schema == nil || c.schema.cfg != cfg {
		c.schema = newSchema(cfg)
	}
	return c.schema
}

// buffers is the memory of a scrape. Later scrapes reuse it.
type buffers struct {
	*schema
	*exposition.Page

	entityByKey map[entityKey]int // index in entities
	entities    []entity
	labelSets   []labelSet
	devices     []labeledDevice
	xidCounts   []xidCount
	gpuParts    []float64 // of the holders of one device
	podLabels   map[podName][]Label
	runtime     runtimeReading
}

func newBuffers(s *schema) *buffers {
	return &buffers{
		schema: s, Page: exposition.NewPage(s.Schema), entityByKey: make(map[entityKey]int), podLabels: make(map[podName][]Label),
		runtime: newRuntimeReading(),
	}
}

// reset prepares buffers for another scrape and drops the references of this one.
func (b *buffers) reset() {
	b.Reset()
	clear(b.entityByKey)
	clear(b.podLabels)
	b.entities, b.labelSets, b.devices = truncate(b.entities), truncate(b.labelSets), truncate(b.devices)
}

func truncate[T any](list []T) []T {
	clear(list)
	return list[:0]
}

// scrape holds the data of one scrape. It reads each source once, so that its series are consistent.
type scrape struct {
	*buffers
	*view.View
	src    *Sources
	totals []deviceTotalsView // of the snapshot's devices
	polls  pollHistogram

	gpuShares GPUShares
}

// collect renders the current state. It is an exposition.CollectFunc.
func (c *collector) collect() (*exposition.Page, func()) {
	schema := c.currentSchema()
	b, ok := c.buffers.Get().(*buffers)
	if !ok || b.schema != schema {
		b = newBuffers(schema)
	}
	s := &scrape{buffers: b, View: c.src.View(), src: &c.src}
	// While another agent serves the node, /metrics has the agent's own series only: every sum over the devices would count the node twice.
	holder, waits := s.WaitsFor()
	if !waits {
		s.collectDevicesAndNode()
	}
	s.collectAgent(holder, waits)
	s.collectProcess()
	s.collectRuntime()
	return b.Page, func() {
		b.reset()
		c.buffers.Put(b)
	}
}

// collectDevicesAndNode adds everything but the agent's own series.
func (s *scrape) collectDevicesAndNode() {
	if s.Snapshot != nil {
		s.totals, s.polls = s.src.Totals.views(s.Snapshot.Devices, s.needsEvents)
		if s.Snapshot.ValuesCount(s.At) {
			s.collectFields()
			s.collectEntities()
		}
		s.gpuShares = NewGPUShares(s.Snapshot.Devices, s.Shares, s.Claims)
		s.collectDevices()
		s.collectSource()
	}
	s.collectPlugin()
	s.collectDRA()
	s.collectNode()
}

func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func unixSeconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

// gpuInstance returns the ID of a MIG device's GPU instance, "" for a GPU.
func gpuInstance(d *health.Device) string {
	if d.Kind == health.KindMIG {
		return strconv.Itoa(d.GI)
	}
	return ""
}
