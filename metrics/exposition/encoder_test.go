package exposition

import (
	"bytes"
	"math"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
)

// FuzzEncoder: for any family, the encoder writes the same text as expfmt.
func FuzzEncoder(f *testing.F) {
	f.Add("What it is.", "H100", "a", 1.0, false)
	for _, s := range []string{``, `"`, `\`, "\n", `a\"b\nc` + "\n\n", `\\`, "tab\tümlaut", "\xff", "{}"} {
		for _, v := range []float64{
			0, math.Copysign(0, -1), -1, 999999, 1e6, -999999, -1e6, 0.5, 1.7e9, 123456789, 1e21, 1e-5, 5e-324, math.MaxFloat64,
			math.MaxInt64, math.Inf(1), math.Inf(-1), math.NaN(),
		} {
			f.Add(s, s, s+"x", v, v > 1)
		}
	}
	f.Fuzz(func(t *testing.T, help, one, other string, v float64, isCounter bool) {
		name, model, pod := "x_total", "modelName", "pod"
		shared := []*dto.LabelPair{{Name: &model, Value: &one}, {Name: &pod, Value: &other}}
		kind := dto.MetricType_GAUGE
		if isCounter {
			kind = dto.MetricType_COUNTER
		}
		metric := func(v float64, labels []*dto.LabelPair) *dto.Metric {
			if isCounter {
				return &dto.Metric{Label: labels, Counter: &dto.Counter{Value: &v}}
			}
			return &dto.Metric{Label: labels, Gauge: &dto.Gauge{Value: &v}}
		}
		n, half := uint64(3), 0.5
		families := []*dto.MetricFamily{
			{Name: &name, Help: &help, Type: &kind, Metric: []*dto.Metric{
				metric(v, nil), metric(v, shared), metric(v/3, shared[:1:1]), metric(v+1, shared), metric(-v, shared[1:]),
			}},
			{Name: &name, Help: &help, Type: dto.MetricType_SUMMARY.Enum(), Metric: []*dto.Metric{
				{Label: shared, Summary: &dto.Summary{SampleCount: &n, SampleSum: &v, Quantile: []*dto.Quantile{{Quantile: &half, Value: &v}}}},
			}},
			{Name: &name, Help: &help, Type: &kind, Metric: []*dto.Metric{metric(v, shared)}},
		}
		var want bytes.Buffer
		for _, f := range families {
			if _, err := expfmt.MetricFamilyToText(&want, f); err != nil {
				t.Fatal(err)
			}
		}
		e := newEncoder()
		for _, memory := range []string{"new", "reused"} {
			for _, f := range families {
				if err := e.encode(f); err != nil {
					t.Fatal(err)
				}
			}
			if !bytes.Equal(e.buf, want.Bytes()) {
				t.Fatalf("%s memory: got:\n%s\nwant:\n%s", memory, e.buf, want.Bytes())
			}
			e.reset()
		}
	})
}
