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
	"github.com/gpu-node-agent/gpu-node-agent/metrics/fields"
	"github.com/gpu-node-agent/gpu-node-agent/metrics/response"
	"github.com/gpu-node-agent/gpu-node-agent/plugin/podresources"
)

// fleet returns a node with this number of GPUs, of MIG devices per GPU and of replicas per device, all allocated.
func fleet(gpus, migDevices, replicas int) (*health.Snapshot, func() podresources.Holders) {
	values := fieldValues(1000)
	s := &health.Snapshot{At: now, Source: health.Source{Status: health.SourceUp, Versions: health.Versions{Driver: "580.95.05"}}}
	h := podresources.Holders{At: now, By: map[health.DeviceID][]podresources.Holder{}}
	add := func(d health.Device) {
		s.Devices = append(s.Devices, health.DeviceState{
			Device: d, Sample: health.Sample{Values: values},
			Verdict: health.Verdict{State: health.Healthy},
		})
		allocate := func(id string) {
			h.By[d.ID] = append(h.By[d.ID], podresources.Holder{
				Namespace: "team-a", Pod: fmt.Sprintf("train-%d-%s", d.Index, id), Container: "main", Resource: "nvidia.com/gpu", DeviceID: id,
			})
		}
		if d.Kind == health.KindMIG || migDevices == 0 && replicas == 0 {
			allocate(string(d.ID))
		}
		for i := range replicas {
			allocate(fmt.Sprintf("%s::%d", d.ID, i))
		}
	}
	for i := range gpus {
		gpu := health.Device{
			ID: health.DeviceID(fmt.Sprintf("GPU-6f1a1b2c-0000-0000-0000-%012d", i)), Index: i, PCI: fmt.Sprintf("00000000:%02x:00.0", i),
			Model: "NVIDIA H100 80GB HBM3", NUMA: []int{i / 4}, Memory: 80 << 30, MIGMode: migDevices > 0,
		}
		add(gpu)
		for p := range migDevices {
			d := gpu
			d.ID, d.Parent, d.Kind, d.GI, d.Profile = health.DeviceID(fmt.Sprintf("MIG-%d-%d", i, p)), gpu.ID, health.KindMIG, p+1, "1g.10gb"
			add(d)
		}
	}
	return s, func() podresources.Holders { return h }
}

// BenchmarkScrape measures a response to Prometheus.
func BenchmarkScrape(b *testing.B) {
	perPod := *testConfig(fields.SetDefault)
	perPod.Attribution = AttributePerPod
	full := testConfig(fields.SetDefault, fields.SetProfiling, fields.SetOptional)
	for _, bench := range []struct {
		name                       string
		gpus, migDevices, replicas int
		cfg                        *Config
	}{
		{"8GPUs", 8, 0, 0, testConfig(fields.SetDefault)},
		{"8GPUs/full", 8, 0, 0, full},
		{"8x7MIG", 8, 7, 0, testConfig(fields.SetDefault)},
		{"8x7MIG/full", 8, 7, 0, full},
		{"8x10replicas", 8, 0, 10, testConfig(fields.SetDefault)},
		{"8x10replicas/full", 8, 0, 10, full},
		{"8x10replicas/perPod", 8, 0, 10, &perPod},
	} {
		for _, encoding := range []string{"", "gzip"} {
			b.Run(bench.name+"/"+cmp.Or(encoding, "plain"), func(b *testing.B) {
				s, holders := fleet(bench.gpus, bench.migDevices, bench.replicas)
				benchmarkScrape(b, s, holders, bench.cfg, encoding)
			})
		}
	}
}

// BenchmarkScrapeIsLinear measures the time per device for different numbers of devices.
func BenchmarkScrapeIsLinear(b *testing.B) {
	for _, gpus := range []int{1, 2, 4, 8, 16, 32} {
		b.Run(fmt.Sprintf("%dx7MIG", gpus), func(b *testing.B) {
			s, holders := fleet(gpus, 7, 0)
			benchmarkScrape(b, s, holders, testConfig(fields.SetDefault), "gzip")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(s.Devices)), "ns/device")
		})
	}
}

// BenchmarkScrapePods measures the cost of pod labels and UIDs.
func BenchmarkScrapePods(b *testing.B) {
	uid := label(podUIDLabel, "6f1a1b2c-0000-0000-0000-000000000000")
	labels := []Label{label("team", "vision"), label("app_kubernetes_io_name", "train"), label("app_kubernetes_io_version", "1.2.3")}
	for _, bench := range []struct {
		name   string
		labels []Label
	}{{"none", nil}, {"podUID", []Label{uid}}, {"3labels", labels}, {"both", append(labels[:3:3], uid)}} {
		b.Run(bench.name, func(b *testing.B) {
			s, holders := fleet(8, 0, 0)
			benchmarkScrape(b, s, holders, testConfig(fields.SetDefault), "gzip", func(src *testSource) {
				src.PodLabels = func(string, string) []Label { return bench.labels }
			})
		})
	}
}

// benchmarkScrape requests the page as Prometheus 3 does.
func benchmarkScrape(b *testing.B, s *health.Snapshot, holders func() podresources.Holders, cfg *Config, encoding string,
	change ...func(*testSource),
) {
	src := configuredSources(s, cfg)
	for _, f := range change {
		f(&src)
	}
	src.Holders = holders()
	src.Totals = NewTotals(TotalsInputs{Config: src.Config, Snapshots: new(health.Latest[health.Snapshot]), Holders: holders})
	src.Totals.update(s)
	h := Handler(src.Sources, response.NewRenderer(), log.New(io.Discard, "", 0))
	r := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/metrics", nil)
	r.Header.Set("Accept", "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"+
		"application/openmetrics-text;version=0.0.1;q=0.5,"+
		"text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2")
	r.Header.Set("Accept-Encoding", encoding)
	w := &countingWriter{header: make(http.Header)}
	b.ReportAllocs()
	for b.Loop() {
		clear(w.header)
		w.bytes = 0
		h.ServeHTTP(w, r)
	}
	b.ReportMetric(float64(w.bytes), "page-bytes")
}

// countingWriter discards a response.
type countingWriter struct {
	header http.Header
	bytes  int
}

func (c *countingWriter) Header() http.Header { return c.header }
func (c *countingWriter) WriteHeader(int)     {}
func (c *countingWriter) Write(b []byte) (int, error) {
	c.bytes += len(b)
	return len(b), nil
}

// BenchmarkUpdateTotals measures the work after each poll.
func BenchmarkUpdateTotals(b *testing.B) {
	s, holders := fleet(8, 7, 0)
	var a accumulator
	b.ReportAllocs()
	at := now
	for b.Loop() {
		at = at.Add(time.Second)
		next := *s
		next.At = at
		a.update(observation{at: at, snapshot: &next, holders: holders(), window: 5 * time.Minute, idleBelow: 5})
	}
}
