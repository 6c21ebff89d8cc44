package metrics

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// FuzzGather: whatever there is, the page can be read, in order, and has no series twice. The gatherer is used
// again for the next node, as its memory is.
func FuzzGather(f *testing.F) {
	for seed := range uint64(30) {
		f.Add(seed, "")
	}
	f.Add(uint64(1), "GPU-a::0")
	f.Add(uint64(2), "a\xffb")
	f.Fuzz(func(t *testing.T, seed uint64, text string) {
		o := odd{rand.New(rand.NewPCG(seed, 0)), text}
		src := o.sources()
		g := NewGatherer(src)
		for range 3 {
			families, done, err := g.Gather()
			if err != nil {
				t.Fatal(err)
			}
			lint(t, families)
			done()
			s := o.snapshot()
			src.Snapshots.Store(s)
			src.Totals.fold(s)
			if o.IntN(3) == 0 {
				src.Config.Store(o.config())
			}
		}
	})
}

// lint checks what Prometheus asks of a page, and that it reads the same from it.
func lint(t *testing.T, families []*dto.MetricFamily) {
	t.Helper()
	var page bytes.Buffer
	last := ""
	for _, f := range families {
		if f.GetName() <= last || !model.LegacyValidation.IsValidMetricName(f.GetName()) || len(f.Metric) == 0 {
			t.Errorf("family %q of %d series after %q", f.GetName(), len(f.Metric), last)
		}
		last = f.GetName()
		seen := make(map[string]bool)
		for _, m := range f.Metric {
			id := identity(t, last, m.Label)
			if seen[id] {
				t.Errorf("%s is there twice", id)
			}
			seen[id] = true
		}
		if _, err := expfmt.MetricFamilyToText(&page, f); err != nil {
			t.Fatal(err)
		}
	}
	ours := newText()
	compareText(t, &ours, families)
	parser := expfmt.NewTextParser(model.LegacyValidation)
	read, err := parser.TextToMetricFamilies(bytes.NewReader(page.Bytes()))
	if err != nil {
		t.Fatalf("%v:\n%s", err, page.String())
	}
	for _, f := range families {
		if got := read[f.GetName()]; len(got.GetMetric()) != len(f.Metric) {
			t.Errorf("%s: %d series are read from %d", f.GetName(), len(got.GetMetric()), len(f.Metric))
		}
	}
}

// identity is what a series is to Prometheus, which takes an empty label for none.
func identity(t *testing.T, name string, labels []*dto.LabelPair) string {
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

// A scrape's families are its own until it says that it is done, whoever else scrapes meanwhile.
func TestScrapesShareNothing(t *testing.T) {
	src := sources(node())
	g := NewGatherer(src)
	first, done, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	text := func(families []*dto.MetricFamily) string {
		var page strings.Builder
		for _, f := range families {
			if _, err := expfmt.MetricFamilyToText(&page, f); err != nil {
				t.Fatal(err)
			}
		}
		return page.String()
	}
	want := text(first)
	src.Snapshots.Store(everything())
	src.Config.Store(config(SetDefault, SetOptional))
	second, doneToo, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if got := text(first); got != want {
		t.Errorf("the second scrape has changed the first:\n%s", got)
	}
	if text(second) == want {
		t.Error("the second scrape shows the first one's node")
	}
	done()
	doneToo()
	src.Snapshots.Store(&health.Snapshot{At: now, Devices: node().Devices[:1]})
	third, done, err := g.Gather()
	defer done()
	if got := text(third); err != nil || strings.Contains(got, "GPU-b") || strings.Contains(got, "MIG-") {
		t.Errorf("%v: devices of another scrape:\n%s", err, got)
	}
}

// Scrapes, polls and reloads at once: the race detector looks on.
func TestScrapesInParallel(t *testing.T) {
	src := sources(everything())
	g := NewGatherer(src)
	ended := make(chan error, 9)
	for i := range 8 {
		go func() {
			var err error
			for range 20 {
				_, done, failed := g.Gather()
				if failed != nil {
					err = failed
				}
				done()
			}
			ended <- err
		}()
		if i == 4 {
			go func() {
				for _, fields := range [][]string{{SetDefault}, {SetOptional}, {SetDefault, SetOptional}} {
					src.Config.Store(config(fields...))
					again := *everything()
					again.At = again.At.Add(time.Second)
					src.Snapshots.Store(&again)
					src.Totals.fold(&again)
				}
				ended <- nil
			}()
		}
	}
	for range 9 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// A scrape does not leave more behind the more devices there are than what each one's labels take.
func TestScrapesLeaveLittle(t *testing.T) {
	s, held := fleet(8, 7, 0)
	src := sourcesOf(s, config(SetDefault))
	src.Holders = func() plugin.Holders { return held }
	g := NewGatherer(src)
	allocations := testing.AllocsPerRun(20, func() {
		_, done, err := g.Gather()
		if err != nil {
			t.Fatal(err)
		}
		done()
	})
	if most := 200 + 10*float64(len(s.Devices)); allocations > most {
		t.Errorf("%v allocations for %d devices, at most %v", allocations, len(s.Devices), most)
	}
}
