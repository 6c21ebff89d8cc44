package metrics

import (
	"cmp"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
)

// family is what all series of one name share.
type family struct {
	name, help string
	kind       dto.MetricType
	unit       string // of those that say it, which only OpenMetrics shows
}

// declare adds a family and returns its number.
func (s *shape) declare(name, help string, kind dto.MetricType) int {
	s.families = append(s.families, family{name: name, help: strings.ToValidUTF8(help, "�"), kind: kind})
	return len(s.families) - 1
}

// newShape declares all that a configuration shows.
func newShape(cfg *Config) *shape {
	s := &shape{cfg: cfg}
	s.declareFields()
	s.declareOwn()
	s.declareProcess()
	s.declareRuntime()
	for i := range s.families {
		s.order = append(s.order, i)
	}
	slices.SortFunc(s.order, func(a, b int) int { return strings.Compare(s.families[a].name, s.families[b].name) })
	return s
}

// page is what one scrape is rendered into. Another takes it after that, so that scrapes leave little behind.
type page struct {
	shape *shape
	made  []*dto.MetricFamily // by number
	slots slab[slot]
	pairs slab[pair]
	lists []*dto.LabelPair // what the series' label lists are parts of
	out   []*dto.MetricFamily
	text  text

	at    map[place]int // in spots
	spots []spot
	shown []showing
	owned []ownDevice
	codes []codeCount
	pods  map[podName][]Label

	reading runtimeReading
}

// slot is a metric with all that hangs from it, so that it is one piece of memory.
type slot struct {
	metric  dto.Metric
	gauge   dto.Gauge
	counter dto.Counter
	value   float64
}

// pair is a label with all that hangs from it.
type pair struct {
	pair        dto.LabelPair
	name, value string
}

// slab hands out pieces of memory that are used again after a reset.
type slab[T any] struct {
	chunks [][]T
	used   int
}

const slabChunk = 64

func (s *slab[T]) next() *T {
	if s.used == len(s.chunks)*slabChunk {
		s.chunks = append(s.chunks, make([]T, slabChunk))
	}
	t := &s.chunks[s.used/slabChunk][s.used%slabChunk]
	s.used++
	return t
}

func newPage(s *shape) *page {
	p := &page{
		shape: s, at: make(map[place]int), pods: make(map[podName][]Label), reading: s.runtime.reading(), text: newText(),
	}
	for i := range s.families {
		f := &s.families[i]
		made := &dto.MetricFamily{Name: &f.name, Help: &f.help, Type: &f.kind}
		if f.unit != "" {
			made.Unit = &f.unit
		}
		p.made = append(p.made, made)
	}
	return p
}

// reset makes a page ready for another scrape, and lets go of what this one has shown.
func (p *page) reset() {
	for _, f := range p.made {
		f.Metric = f.Metric[:0]
	}
	p.slots.used, p.pairs.used, p.lists = 0, 0, p.lists[:0]
	clear(p.at)
	clear(p.pods)
	p.text.reset()
	p.spots, p.shown, p.owned = emptied(p.spots), emptied(p.shown), emptied(p.owned)
}

func emptied[T any](list []T) []T {
	clear(list)
	return list[:0]
}

// labels returns a list of these labels beside those of another list, by name, as all lists are. Of two with one
// name the first stays: two would make the whole page unreadable.
func (p *page) labels(base []*dto.LabelPair, more ...Label) []*dto.LabelPair {
	from := len(p.lists)
	p.lists = append(p.lists, base...)
	for _, l := range more {
		i, found := slices.BinarySearchFunc(p.lists[from:], l.Name, func(a *dto.LabelPair, name string) int { return strings.Compare(*a.Name, name) })
		if !found {
			p.lists = slices.Insert(p.lists, from+i, p.pair(l))
		}
	}
	return slices.Clip(p.lists[from:])
}

// pair makes a label. What comes from outside may be no UTF-8, which Prometheus would not take.
func (p *page) pair(l Label) *dto.LabelPair {
	x := p.pairs.next()
	x.name, x.value = l.Name, strings.ToValidUTF8(l.Value, "�")
	x.pair.Name, x.pair.Value = &x.name, &x.value
	return &x.pair
}

// add adds a series to a family. The list of labels may be shared with others.
func (p *page) add(number int, v float64, labels []*dto.LabelPair) {
	x := p.slots.next()
	x.value = v
	x.metric.Label, x.metric.Gauge, x.metric.Counter = labels, nil, nil
	if p.shape.families[number].kind == dto.MetricType_COUNTER {
		x.counter.Value, x.metric.Counter = &x.value, &x.counter
	} else {
		x.gauge.Value, x.metric.Gauge = &x.value, &x.gauge
	}
	p.made[number].Metric = append(p.made[number].Metric, &x.metric)
}

// addWith adds a series with more labels than those of a list.
func (p *page) addWith(number int, v float64, base []*dto.LabelPair, more ...Label) {
	p.add(number, v, p.labels(base, more...))
}

// finish puts the families that have series into out.
func (p *page) finish() {
	p.out = p.out[:0]
	for _, number := range p.shape.order {
		f := p.made[number]
		if len(f.Metric) == 0 {
			continue
		}
		f.Metric = tidy(f.Metric)
		p.out = append(p.out, f)
	}
}

// tidy puts series in the order that a registry would, and leaves out those with the labels of another, which
// would make Prometheus refuse some or all of the page. Most come in order, and then this is one look at each.
func tidy(m []*dto.Metric) []*dto.Metric {
	compare := func(a, b *dto.Metric) int { return compareLabels(a.Label, b.Label) }
	for i := 1; i < len(m); i++ {
		if compare(m[i-1], m[i]) >= 0 {
			slices.SortStableFunc(m, compare)
			return slices.CompactFunc(m, func(a, b *dto.Metric) bool { return compare(a, b) == 0 })
		}
	}
	return m
}

// compareLabels compares two lists: 0 is the same labels.
func compareLabels(a, b []*dto.LabelPair) int {
	if len(a) != len(b) {
		return cmp.Compare(len(a), len(b))
	}
	for i := range a {
		if a[i] == b[i] {
			continue // they share it
		}
		if c := strings.Compare(*a[i].Value, *b[i].Value); c != 0 {
			return c
		}
		if c := strings.Compare(*a[i].Name, *b[i].Name); c != 0 {
			return c
		}
	}
	return 0
}
