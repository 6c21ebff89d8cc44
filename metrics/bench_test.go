package metrics

import (
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

// fleet is eight GPUs, each with so many MIG devices, all held; each GPU by so many replicas.
func fleet(parts, replicas int) (*health.Snapshot, plugin.Holders) {
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
	for i := range 8 {
		gpu := health.Device{
			ID: health.DeviceID(fmt.Sprintf("GPU-6f1a1b2c-0000-0000-0000-00000000000%d", i)), Index: i, PCI: fmt.Sprintf("00000000:%02d:00.0", i),
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
		name            string
		parts, replicas int
		cfg             *Config
		encoding        string
	}{
		{"8GPUs", 0, 0, config(SetDefault), ""},
		{"8GPUs/gzip", 0, 0, config(SetDefault), "gzip"},
		{"8GPUs/full", 0, 0, full, ""},
		{"8x7MIG", 7, 0, config(SetDefault), ""},
		{"8x7MIG/full", 7, 0, full, ""},
		{"8x10replicas", 0, 10, config(SetDefault), ""},
		{"8x10replicas/perPod", 0, 10, &perPod, ""},
	} {
		b.Run(bench.name, func(b *testing.B) {
			s, holders := fleet(bench.parts, bench.replicas)
			src := sourcesOf(s, bench.cfg)
			src.Holders = func() plugin.Holders { return holders }
			src.Totals = NewTotals(src.Config, src.Snapshots, src.Holders)
			src.Totals.fold(s)
			h := Handler(src, log.New(io.Discard, "", 0))
			r := httptest.NewRequestWithContext(b.Context(), http.MethodGet, "/metrics", nil)
			r.Header.Set("Accept", acceptPrometheus3)
			r.Header.Set("Accept-Encoding", bench.encoding)
			size := 0
			b.ReportAllocs()
			for b.Loop() {
				page := httptest.NewRecorder()
				h.ServeHTTP(page, r)
				size = page.Body.Len()
			}
			b.ReportMetric(float64(size), "page-bytes")
		})
	}
}

// BenchmarkFold is what follows each poll.
func BenchmarkFold(b *testing.B) {
	s, holders := fleet(7, 0)
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
