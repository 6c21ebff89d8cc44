// Package metrics shows the newest snapshot and the agent's own state to Prometheus.
//
// A scrape renders what is already known: it calls neither DCGM, nor the kubelet, nor the API server. What
// no single snapshot tells, such as how long a device was unhealthy, is summed up by Totals beside it.
package metrics

import (
	"strconv"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

const namespace = "gpu_node_agent"

// Reload is how the configuration's last reload went.
type Reload struct {
	OK bool
	At time.Time // of the configuration that is in force
}

// Kubernetes is what was told to the API server since the agent started.
type Kubernetes struct {
	Writes  uint64 // of the node's condition
	Events  uint64
	Dropped uint64 // events that were given up
	Errors  uint64 // requests that failed; most are made again
}

// Sources is what is read once at each scrape. Each is a quick look at memory.
type Sources struct {
	Config    *health.Latest[Config] // never empty
	Snapshots *health.Latest[health.Snapshot]
	Totals    *Totals
	Plugin    func() plugin.Status
	Holders   func() plugin.Holders
	Reload    func() Reload
	Now       func() time.Time
	Hostname  string // the node's name

	// PodLabels returns what PodPicker.Of picks of a pod: the labels that metrics.podLabels allows, and its UID;
	// nil: there are none to show.
	PodLabels func(namespace, pod string) []Label
	// Jobs returns the ids of the jobs that run on a GPU, or on a GPU instance (gi is its id, "" for a whole
	// GPU), in order; nil: there are none to show.
	Jobs func(gpu int, gi string) []string

	// Parts that may be off, which false says, and so does a nil function. Then they have no series.
	Kubernetes  func() (k Kubernetes, on bool)
	PodLabelsUp func() (up, on bool) // whether the API server tells the pods' labels
	StateFileUp func() (up, on bool) // whether what is to be remembered is in health.stateFile

	LogDropped func() uint64 // log entries that were not written; nil: not counted

	Version, Revision string // of the agent
}

// Label is a label of a series.
type Label struct{ Name, Value string }

// Gatherer renders Sources. It is a prometheus.TransactionalGatherer.
//
// It builds the families itself, in order, for two reasons: a registry makes, checks and sorts each series as
// if it knew nothing of the others, which took more than half of a scrape; and it refuses a second series
// with the same labels by an error, where we leave it out.
type Gatherer struct {
	src Sources

	mu    sync.Mutex // guards shape
	shape *shape
	pages sync.Pool // of *page, whose scrape is over
}

// NewGatherer returns a gatherer of what there is to be seen now, and whenever it is asked.
func NewGatherer(src Sources) *Gatherer { return &Gatherer{src: src} }

// shape is what a configuration makes of the series. It is not modified.
type shape struct {
	cfg      *Config
	families []family // by number
	order    []int    // the numbers in the order of the names
	fields   []fieldFamily
	own      ownFamilies
	process  processFamilies
	runtime  runtimeFamilies
	window   string // in milliseconds
	events   bool   // a field needs what happened in the window
}

// shaped returns the shape of the configuration in force.
func (g *Gatherer) shaped() *shape {
	cfg := g.src.Config.Load()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.shape == nil || g.shape.cfg != cfg {
		g.shape = newShape(cfg)
	}
	return g.shape
}

// scrape is all that one scrape shows, each read once so that its series agree.
type scrape struct {
	*shape
	*page
	src      *Sources
	now      time.Time
	snapshot *health.Snapshot
	holders  plugin.Holders
	views    []deviceView // of the snapshot's devices
	poll     pollTotals
}

// staleAfter is how long what was measured is shown while the source is away. A short stall leaves no gap in the
// graphs; after that a flat line would pass for a measurement. States and findings stay.
const staleAfter = time.Minute

// Gather renders the newest snapshot, which cannot fail. The families are the caller's until it calls done.
func (g *Gatherer) Gather() (families []*dto.MetricFamily, done func(), err error) {
	p := g.page()
	return p.out, func() { g.done(p) }, nil
}

// done takes a page back.
func (g *Gatherer) done(p *page) {
	p.reset()
	g.pages.Put(p)
}

// page is what there is to be seen now, to be given back by done.
func (g *Gatherer) page() *page {
	shape := g.shaped()
	p, ok := g.pages.Get().(*page)
	if !ok || p.shape != shape {
		p = newPage(shape)
	}
	s := &scrape{
		shape: shape, page: p, src: &g.src, now: g.src.Now(), snapshot: g.src.Snapshots.Load(), holders: g.src.Holders(),
	}
	if s.snapshot != nil {
		s.views, s.poll = g.src.Totals.views(s.snapshot.Devices, shape.events)
		if s.snapshot.Source.Status == health.SourceUp || s.now.Sub(s.snapshot.At) < staleAfter {
			s.collectFields()
		}
		s.collectDevices()
		s.collectSource()
	}
	s.collectPlugin(g.src.Plugin())
	s.collectAgent()
	s.collectProcess()
	s.collectRuntime()
	p.finish()
	return p
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// instanceOf is the id of a MIG device's GPU instance, "" of a GPU.
func instanceOf(d *health.Device) string {
	if d.Kind == health.KindMIG {
		return strconv.Itoa(d.GI)
	}
	return ""
}
