package metrics

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"unicode/utf8"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/exposition"
)

// FuzzCollect: the page of any node can be parsed, is sorted and has no duplicate series. The collector is reused, as is
// its memory.
func FuzzCollect(f *testing.F) {
	for seed := range uint64(12) {
		f.Add(seed, "")
	}
	f.Add(uint64(1), "GPU-a::0")
	f.Add(uint64(2), "a\xffb")
	f.Fuzz(func(t *testing.T, seed uint64, text string) {
		g := generator{rand.New(rand.NewPCG(seed, 0)), text}
		src := g.sources()
		c := collectorOf(src)
		for range 3 {
			p, done := c.collect()
			checkPage(t, p)
			done()
			s := g.snapshot()
			src.Snapshot = s
			src.Totals.update(s)
			if g.IntN(3) == 0 {
				src.Config.Store(g.config())
			}
		}
	})
}

// checkPage checks Prometheus' rules for a page, and that its text is expfmt's and contains all series.
func checkPage(t *testing.T, p *exposition.Page) {
	t.Helper()
	var want bytes.Buffer
	families := p.Families()
	last := ""
	for _, f := range families {
		if f.GetName() <= last || !model.LegacyValidation.IsValidMetricName(f.GetName()) || len(f.Metric) == 0 {
			t.Errorf("family %q with %d series after %q", f.GetName(), len(f.Metric), last)
		}
		last = f.GetName()
		seen := make(map[string]bool)
		for _, m := range f.Metric {
			id := seriesID(t, last, m.Label)
			if seen[id] {
				t.Errorf("duplicate series %s", id)
			}
			seen[id] = true
		}
		if _, err := expfmt.MetricFamilyToText(&want, f); err != nil {
			t.Fatal(err)
		}
	}
	text, err := p.Text()
	if err != nil || !bytes.Equal(text, want.Bytes()) {
		t.Fatalf("%v: got:\n%s\nwant:\n%s", err, text, want.Bytes())
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	parsed, err := parser.TextToMetricFamilies(bytes.NewReader(text))
	if err != nil {
		t.Fatalf("%v:\n%s", err, text)
	}
	for _, f := range families {
		if got := parsed[f.GetName()]; len(got.GetMetric()) != len(f.Metric) {
			t.Errorf("%s: parsed %d of %d series", f.GetName(), len(got.GetMetric()), len(f.Metric))
		}
	}
}

// seriesID returns the identity of a series in Prometheus, which ignores empty labels.
func seriesID(t *testing.T, name string, labels []*dto.LabelPair) string {
	t.Helper()
	id, last := name, ""
	for _, l := range labels {
		if l.GetName() <= last || !model.LegacyValidation.IsValidLabelName(l.GetName()) || !utf8.ValidString(l.GetValue()) {
			t.Errorf("%s: label %q=%q after %q", name, l.GetName(), l.GetValue(), last)
		}
		last = l.GetName()
		if l.GetValue() != "" {
			id += fmt.Sprintf(",%s=%q", l.GetName(), l.GetValue())
		}
	}
	return id
}
