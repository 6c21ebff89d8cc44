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

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/exposition"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/processes"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/response"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/dra"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/memlimits"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// Reload is the result of the last configuration reload.
type Reload struct {
	OK bool
	At time.Time // of the last successful one
}

// Kubernetes counts the writes to the API server since the agent started.
type Kubernetes struct {
	Writes  uint64 // of the node condition
	Events  uint64
	Dropped uint64 // events
	Errors  uint64 // failed requests; most are retried
}

// NodeWrites counts the writes of labels and taints of the node since the agent started.
type NodeWrites struct {
	Writes uint64
	Errors uint64 // failed tries

	Leftovers []string // labels, nodefeature, taints, condition: what earlier agents may have left and this one has no right to remove
}

// Sources provides the data of a scrape, which reads each source once. All functions must return quickly.
type Sources struct {
	Config    *health.Latest[Config] // never empty
	Snapshots *health.Latest[health.Snapshot]
	Totals    *Totals
	Plugin    func() plugin.Status
	Holders   func() podresources.Holders
	Reload    func() Reload
	Now       func() time.Time
	Hostname  string // the node's name

	// PodLabels returns the labels of a pod as PodPicker.Of selects them, including its UID. nil: no pod labels.
	PodLabels func(namespace, pod string) []Label
	// Jobs returns the IDs of the jobs on a GPU, or on the GPU instance with the ID gi ("" for a whole GPU), in order.
	// nil: no jobs.
	Jobs func(gpu int, gi string) []string

	// Processes are the processes of the devices; nil, or empty: not measured.
	Processes *health.Latest[processes.Snapshot]

	Shares func() []plugin.ShareUnits         // of the shared devices; nil: none
	Memory *health.Latest[memlimits.Snapshot] // of the containers on devices that are shared by memory; nil, or empty: none

	DRA    func() dra.Status          // of the DRA driver; nil: none
	Claims *health.Latest[dra.Claims] // prepared by it; required with DRA

	CDIRuntime func() (r CDIRuntime, needed bool) // nil, or not needed: no series

	// The status of optional parts. A part has no series if it is not enabled or its function is nil.
	Kubernetes  func() (k Kubernetes, enabled bool)
	NodeWrites  func() (n NodeWrites, enabled bool)
	PodLabelsUp func() (up, enabled bool) // whether the API server provides the pods' labels

	// Unwritten are the files that cannot be written, without which a restart would lose something. nil: none.
	Unwritten func() []durable.Failure
	// StateFileRead reports whether --state-dir was read.
	StateFileRead func() (read, enabled bool)

	// WaitsFor reports whether the agent waits for another one that serves the node, and the name of its pod if that is known. Meanwhile
	// /metrics has the agent's own series only: every sum over the devices would count the node twice. nil: it never waits.
	WaitsFor func() (holder string, waits bool)
	// OtherPlugins returns the number of devices of this node that other device plugins serve, by resource. nil: no series.
	OtherPlugins func() map[string]int

	// NodeDevices returns the number of GPUs as each of SeenBy sees them; one that is unknown is missing. nil: no series.
	NodeDevices func() map[SeenBy]int

	// UnmatchedRefs returns the device references of the configuration that match no device. nil: no series.
	UnmatchedRefs func() []health.UnmatchedRefs

	LogDropped         func() uint64 // dropped log entries; nil: not counted
	ConnectionsDropped func() uint64 // dropped connections of the web server

	Version, Revision string // of the agent
}

// CDIRuntime is the container runtime of the node, while pods get their devices by CDI names alone.
type CDIRuntime struct {
	Version string // empty if it is unknown
	Support string // see cdi.Support
}

// SeenBy is who sees GPUs.
type SeenBy string

// The values of SeenBy.
const (
	SeenByPCI     SeenBy = "pci"     // on the PCI bus, without those for virtual machines
	SeenByDriver  SeenBy = "driver"  // reached by the driver
	SeenByKubelet SeenBy = "kubelet" // with a device that the kubelet counts; with DRA published
	OfferedToPods SeenBy = "offered" // with a device that new pods can get
)

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
	src      *Sources
	now      time.Time
	snapshot *health.Snapshot
	holders  podresources.Holders
	totals   []deviceTotalsView // of the snapshot's devices
	polls    pollHistogram

	processes *processes.Snapshot // nil: not measured
	shares    []plugin.ShareUnits
	gpuShares GPUShares
	memory    []memlimits.Container
}

// collect renders the current state. It is an exposition.CollectFunc.
func (c *collector) collect() (*exposition.Page, func()) {
	schema := c.currentSchema()
	b, ok := c.buffers.Get().(*buffers)
	if !ok || b.schema != schema {
		b = newBuffers(schema)
	}
	s := &scrape{buffers: b, src: &c.src, now: c.src.Now(), snapshot: c.src.Snapshots.Load(), holders: c.src.Holders()}
	holder, waits := "", false
	if c.src.WaitsFor != nil {
		holder, waits = c.src.WaitsFor()
	}
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
	if src := s.src.Processes; src != nil {
		s.processes = src.Load()
	}
	if shares := s.src.Shares; shares != nil {
		s.shares = shares()
	}
	if src := s.src.Memory; src != nil {
		if m := src.Load(); m != nil {
			s.memory = m.Containers
		}
	}
	if s.snapshot != nil {
		s.totals, s.polls = s.src.Totals.views(s.snapshot.Devices, s.needsEvents)
		if s.snapshot.ValuesCount(s.now) {
			s.collectFields()
			s.collectEntities()
		}
		var claims *dra.Claims
		if src := s.src.Claims; src != nil {
			claims = src.Load()
		}
		s.gpuShares = NewGPUShares(s.snapshot.Devices, s.shares, claims)
		s.collectDevices()
		s.collectSource()
	}
	s.collectPlugin(s.src.Plugin())
	s.collectDRA()
	s.collectCDIRuntime()
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
