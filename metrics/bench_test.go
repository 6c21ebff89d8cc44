package metrics

import (
	"cmp"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// fleet is so many GPUs, each with so many MIG devices, all held; each GPU by so many replicas.
func fleet(gpus, parts, replicas int) (*health.Snapshot, plugin.Holders) {
	values := make(map[health.Field]float64)
	for _, k := range fieldTable {
		values[k.id] = 1000 * float64(k.id)
	}
	s := &health.Snapshot{At: now, Source: health.Source{Status: health.SourceUp, Versions: health.Versions{Driver: "580.95.05"}}}
	h := plugin.Holders{At: now, By: map[health.DeviceID][]plugin.Holder{}}
	add := func(d health.Device) {
		s.Devices = append(s.Devices, health.DeviceState{Device: d, Sample: health.Sample{Values: values}, Verdict: health.Verdict{State: health.Healthy}})
		hold := func(id string) {
			h.By[d.ID] = append(h.By[d.ID], plugin.Holder{
				Namespace: "team-a", Pod: fmt.Sprintf("train-%d-%s", d.Index, id), Container: "main", Resource: "nvidia.com/gpu", DeviceID: id,
			})
		}
		if d.Kind == health.KindMIG || parts == 0 && replicas == 0 {
			hold(string(d.ID))
		}
		for i := range replicas {
			hold(fmt.Sprintf("%s::%d", d.ID, i))
		}
	}
	for i := range gpus {
		gpu := health.Device{
			ID: health.DeviceID(fmt.Sprintf("GPU-6f1a1b2c-0000-0000-0000-%012d", i)), Index: i, PCI: fmt.Sprintf("00000000:%02x:00.0", i),
			Model: "NVIDIA H100 80GB HBM3", NUMA: []int{i / 4}, Memory: 80 << 30, MIGMode: parts > 0,
		}
		add(gpu)
		for p := range parts {
			d := gpu
			d.ID, d.Parent, d.Kind, d.GI, d.Profile = health.DeviceID(fmt.Sprintf("MIG-%d-%d", i, p)), gpu.ID, health.KindMIG, p+1, "1g.10gb"
			add(d)
		}
	}
	return s, h
}

// BenchmarkScrape is a whole answer, page and all, as Prometheus asks for it.
func BenchmarkScrape(b *testing.B) {
	perPod := *config(SetDefault)
	perPod.Attribution = AttributePerPod
	full := config(SetDefault, SetProfiling, SetOptional)
	for _, bench := range []struct {
		name                  string
		gpus, parts, replicas int
		cfg                   *Config
	}{
		{"8GPUs", 8, 0, 0, config(SetDefault)},
		{"8GPUs/full", 8, 0, 0, full},
		{"8x7MIG", 8, 7, 0, config(SetDefault)},
		{"8x7MIG/full", 8, 7, 0, full},
		{"8x10replicas", 8, 0, 10, config(SetDefault)},
		{"8x10replicas/full", 8, 0, 10, full},
		{"8x10replicas/perPod", 8, 0, 10, &perPod},
	} {
		for _, encoding := range []string{"", "gzip"} {
			b.Run(bench.name+"/"+cmp.Or(encoding, "plain"), func(b *testing.B) {
				s, held := fleet(bench.gpus, bench.parts, bench.replicas)
				scrapes(b, s, held, bench.cfg, encoding)
			})
		}
	}
}

// BenchmarkScrapeIsLinear tells what a device costs, be there few or many.
func BenchmarkScrapeIsLinear(b *testing.B) {
	for _, gpus := range []int{1, 2, 4, 8, 16, 32} {
		b.Run(fmt.Sprintf("%dx7MIG", gpus), func(b *testing.B) {
			s, held := fleet(gpus, 7, 0)
			scrapes(b, s, held, config(SetDefault), "gzip")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(s.Devices)), "ns/device")
		})
	}
}

// BenchmarkScrapePods tells what the UIDs and labels of pods cost.
func BenchmarkScrapePods(b *testing.B) {
	uid := Label{podUIDLabel, "6f1a1b2c-0000-0000-0000-000000000000"}
	labels := []Label{{"team", "vision"}, {"app_kubernetes_io_name", "train"}, {"app_kubernetes_io_version", "1.2.3"}}
	for _, bench := range []struct {
		name   string
		labels []Label
	}{{"none", nil}, {"podUID", []Label{uid}}, {"3labels", labels}, {"both", append(labels[:3:3], uid)}} {
		b.Run(bench.name, func(b *testing.B) {
			s, held := fleet(8, 0, 0)
			scrapes(b, s, held, config(SetDefault), "gzip", func(src *Sources) {
				src.PodLabels = func(string, string) []Label { return bench.labels }
			})
		})
	}
}

// scrapes asks for the page as Prometheus does.
func scrapes(b *testing.B, s *health.Snapshot, held plugin.Holders, cfg *Config, encoding string, change ...func(*Sources)) {
	src := sourcesOf(s, cfg)
	for _, f := range change {
		f(&src)
	}
	src.Holders = func() plugin.Holders { return held }
	src.Totals = NewTotals(src.Config, src.Snapshots, src.Holders)
	src.Totals.fold(s)
	h := Handler(src, log.New(io.Discard, "", 0))
	r := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/metrics", nil)
	r.Header.Set("Accept", acceptPrometheus3)
	r.Header.Set("Accept-Encoding", encoding)
	page := &counter{header: make(http.Header)}
	b.ReportAllocs()
	for b.Loop() {
		clear(page.header)
		page.bytes = 0
		h.ServeHTTP(page, r)
	}
	b.ReportMetric(float64(page.bytes), "page-bytes")
}

// counter is a client that keeps nothing.
type counter struct {
	header http.Header
	bytes  int
}

func (c *counter) Header() http.Header { return c.header }
func (c *counter) WriteHeader(int)     {}
func (c *counter) Write(b []byte) (int, error) {
	c.bytes += len(b)
	return len(b), nil
}

// BenchmarkFold is what follows each poll.
func BenchmarkFold(b *testing.B) {
	s, holders := fleet(8, 7, 0)
	var l ledger
	b.ReportAllocs()
	at := now
	for b.Loop() {
		at = at.Add(time.Second)
		again := *s
		again.At = at
		l.fold(observation{at, &again, holders, 5 * time.Minute, 5})
	}
}
