// Package exposition renders series as a metrics page: it holds the series of one scrape, encodes them and serves them.
//
// It replaces the registry and the text encoder of client_golang for speed. A registry builds, checks and sorts every series on its own,
// which took more than half of a scrape. It also rejects the page if two series have the same labels; a Page drops the second one. Expfmt
// escapes the labels of a device again for each of its series, which took half of a scrape. The encoder here escapes a list of labels once,
// as kube-state-metrics does. Tests and a fuzz target check that its text equals expfmt's byte by byte.
package exposition

import (
	"cmp"
	"errors"
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
)

// Label is a label of a series.
type Label struct{ Name, Value string }

// Page holds the series of one scrape. Reset prepares it for the next one and keeps its memory, so that a scrape
// allocates little.
type Page struct {
	schema   *Schema
	families []*dto.MetricFamily // by number
	series   slab[series]
	pairs    slab[labelPair]
	lists    []*dto.LabelPair // backs the label lists of the series
	sorted   []*dto.MetricFamily
	encoder  encoder
}

// series is a metric in one piece of memory with everything that it points to.
type series struct {
	metric  dto.Metric
	gauge   dto.Gauge
	counter dto.Counter
	value   float64
}

// labelPair is a label in one piece of memory with everything that it points to.
type labelPair struct {
	pair        dto.LabelPair
	name, value string
}

// slab allocates values in chunks. Setting used to 0 reuses all of them.
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

// NewPage returns an empty page.
func NewPage(s *Schema) *Page {
	p := &Page{schema: s, encoder: newEncoder()}
	for i := range s.families {
		f := &s.families[i]
		family := &dto.MetricFamily{Name: &f.Name, Help: &f.Help, Type: &f.Type}
		if f.Unit != "" {
			family.Unit = &f.Unit
		}
		p.families = append(p.families, family)
	}
	return p
}

// Reset removes all series. What the page has returned before is invalid from then on.
func (p *Page) Reset() {
	for _, f := range p.families {
		f.Metric = f.Metric[:0]
	}
	p.series.used, p.pairs.used, p.lists = 0, 0, p.lists[:0]
}

// Labels returns a list of labels, sorted by name: the labels of base, which is such a list, and more. On a name collision the first label
// wins: two labels of one name would make the page invalid. Bytes that are not UTF-8 are replaced.
func (p *Page) Labels(base []*dto.LabelPair, more ...Label) []*dto.LabelPair {
	start := len(p.lists)
	p.lists = append(p.lists, base...)
	for _, l := range more {
		i, found := slices.BinarySearchFunc(p.lists[start:], l.Name,
			func(a *dto.LabelPair, name string) int { return strings.Compare(*a.Name, name) })
		if !found {
			x := p.pairs.next()
			x.name, x.value = l.Name, strings.ToValidUTF8(l.Value, "�")
			x.pair.Name, x.pair.Value = &x.name, &x.value
			p.lists = slices.Insert(p.lists, start+i, &x.pair)
		}
	}
	return slices.Clip(p.lists[start:])
}

// Add adds a series to a counter, or to a gauge. Labels has returned the labels; series may share them.
func (p *Page) Add(family int, v float64, labels []*dto.LabelPair) {
	x := p.series.next()
	x.value = v
	x.metric.Label, x.metric.Gauge, x.metric.Counter = labels, nil, nil
	if p.schema.families[family].Type == dto.MetricType_COUNTER {
		x.counter.Value, x.metric.Counter = &x.value, &x.counter
	} else {
		x.gauge.Value, x.metric.Gauge = &x.value, &x.gauge
	}
	p.AddMetric(family, &x.metric)
}

// AddWith adds a series with the labels of base and more.
func (p *Page) AddWith(family int, v float64, base []*dto.LabelPair, more ...Label) {
	p.Add(family, v, p.Labels(base, more...))
}

// AddMetric adds a histogram or a summary.
func (p *Page) AddMetric(family int, m *dto.Metric) {
	p.families[family].Metric = append(p.families[family].Metric, m)
}

// Families returns the families that have series, and their series, in the order of a registry. Of two series with the
// same labels it drops the second one: Prometheus would reject part or all of the page.
func (p *Page) Families() []*dto.MetricFamily {
	p.sorted = p.sorted[:0]
	for _, number := range p.schema.byName {
		if f := p.families[number]; len(f.Metric) > 0 {
			f.Metric = sortUnique(f.Metric)
			p.sorted = append(p.sorted, f)
		}
	}
	return p.sorted
}

// Text returns the page in the text format. The error describes families that cannot be encoded, which it omits.
func (p *Page) Text() ([]byte, error) {
	var errs []error
	p.encoder.reset()
	for _, f := range p.Families() {
		if err := p.encoder.encode(f); err != nil {
			errs = append(errs, err)
		}
	}
	return p.encoder.buf, errors.Join(errs...)
}

// sortUnique sorts series and drops duplicates. Most series arrive in order; then it only compares neighbors.
func sortUnique(m []*dto.Metric) []*dto.Metric {
	compare := func(a, b *dto.Metric) int { return CompareLabels(a.Label, b.Label) }
	for i := 1; i < len(m); i++ {
		if compare(m[i-1], m[i]) >= 0 {
			slices.SortStableFunc(m, compare)
			return slices.CompactFunc(m, func(a, b *dto.Metric) bool { return compare(a, b) == 0 })
		}
	}
	return m
}

// CompareLabels orders two lists of labels as the page orders its series. The result is 0 if they are equal.
func CompareLabels(a, b []*dto.LabelPair) int {
	if len(a) != len(b) {
		return cmp.Compare(len(a), len(b))
	}
	for i := range a {
		if a[i] == b[i] {
			continue // the lists share this label
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
