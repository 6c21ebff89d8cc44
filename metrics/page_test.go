package metrics

import (
	"compress/gzip"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/plugin"
)

// What scrapers send, as they are configured by default.
const (
	acceptPrometheus3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5," +
		"text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
	acceptPrometheus2  = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
	acceptOpenMetrics  = "application/openmetrics-text;version=1.0.0,*/*;q=0.1" // scrape_protocols: [OpenMetricsText1.0.0]
	acceptNativeHistos = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6," +
		"application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)

func get(t *testing.T, src Sources, method, accept, encoding string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, "/metrics", nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	if encoding != "" {
		r.Header.Set("Accept-Encoding", encoding)
	}
	page := httptest.NewRecorder()
	Handler(src, log.New(io.Discard, "", 0)).ServeHTTP(page, r)
	if page.Code != http.StatusOK {
		t.Fatalf("%d: %s", page.Code, page.Body)
	}
	return page
}

// Whatever is negotiated, a counter of dcgm-exporter's keeps its name, and where the format allows, its type.
func TestNegotiation(t *testing.T) {
	for accept, want := range map[string]struct{ kind, typ string }{
		"":                         {"text/plain", "counter"},
		"*/*":                      {"text/plain", "counter"},
		"text/html,*/*;q=0.8":      {"text/plain", "counter"},
		"text/plain;version=0.0.4": {"text/plain", "counter"},
		acceptPrometheus2:          {"text/plain", "counter"},
		acceptPrometheus3:          {"text/plain", "counter"},
		acceptOpenMetrics:          {"application/openmetrics-text", "unknown"},
		"application/openmetrics-text;version=0.0.1": {"application/openmetrics-text", "unknown"},
	} {
		page := get(t, sources(node()), http.MethodGet, accept, "")
		text := page.Body.String()
		if kind := page.Header().Get("Content-Type"); !strings.HasPrefix(kind, want.kind) {
			t.Errorf("%q gets %s", accept, kind)
		}
		for _, line := range []string{
			"# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION " + want.typ + "\n", "\nDCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{", "\nDCGM_FI_DEV_PCIE_REPLAY_COUNTER{",
			"\nDCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{", "\ngpu_node_agent_xid_errors_total{",
		} {
			if !strings.Contains(text, line) {
				t.Errorf("%q: no %q", accept, line)
			}
		}
		if open := want.typ == "unknown"; open != strings.HasSuffix(text, "# EOF\n") || open && !strings.Contains(text, "# TYPE gpu_node_agent_xid_errors counter\n") {
			t.Errorf("%q: not the format that is said", accept)
		}
	}
	page := get(t, sources(node()), http.MethodGet, acceptNativeHistos, "")
	if kind := page.Header().Get("Content-Type"); !strings.HasPrefix(kind, "application/vnd.google.protobuf") ||
		!strings.Contains(page.Body.String(), "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION") {
		t.Errorf("native histograms get %s", kind)
	}
}

func TestGzipAndHead(t *testing.T) {
	page := get(t, sources(node()), http.MethodGet, acceptPrometheus3, "gzip")
	if page.Header().Get("Content-Encoding") != "gzip" {
		t.Fatalf("%v", page.Header())
	}
	z, err := gzip.NewReader(page.Body)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(z)
	if err != nil || !strings.Contains(string(text), "DCGM_FI_DEV_GPU_TEMP{") {
		t.Errorf("%v: %s", err, text)
	}

	server := httptest.NewServer(Handler(sources(node()), log.New(io.Discard, "", 0)))
	defer server.Close()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodHead, server.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(res.Body)
	if err := res.Body.Close(); err != nil {
		t.Error(err)
	}
	if err != nil || res.StatusCode != http.StatusOK || len(body) != 0 || !strings.HasPrefix(res.Header.Get("Content-Type"), "text/plain") {
		t.Errorf("HEAD: %v %v %q", res.StatusCode, err, body)
	}
}

// Whatever is in a label, the page can be read back, and says the same.
func TestEscaping(t *testing.T) {
	for _, model := range []string{`quote " backslash \ end`, "new\nline", "tab\tand ümlaut", "", "{a=\"b\"} 1\n", "bad \xff\xfe byte"} {
		s := node()
		s.Devices[0].Device.Model = model
		s.Devices[1].Verdict.Findings[0].Action = model
		src := sources(s)
		src.Holders = func() plugin.Holders {
			return plugin.Holders{By: map[health.DeviceID][]plugin.Holder{"GPU-a": {{Pod: model, DeviceID: "GPU-a"}}}}
		}
		page := get(t, src, http.MethodGet, "", "").Body.String()
		if _, err := promlint.New(strings.NewReader(page)).Lint(); err != nil {
			t.Errorf("%q: the page cannot be parsed: %v", model, err)
		}
		escaped := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(strings.ToValidUTF8(model, "�"))
		if len(series(page, "DCGM_FI_DEV_GPU_TEMP", `modelName="`+escaped+`"`, `pod="`+escaped+`"`)) != 1 {
			t.Errorf("%q is not there:\n%s", model, page)
		}
	}
}

// No series is there twice, whoever holds what and however odd the inventory is, and none of a device that has
// left.
func TestNoDuplicatesNoStale(t *testing.T) {
	for _, attribution := range []string{AttributePerDevice, AttributePerPod} {
		c := *config(SetDefault, SetProfiling, SetOptional)
		c.Attribution = attribution
		s := everything()
		s.Devices = append(s.Devices, s.Devices[3]) // a partition under two UUIDs
		s.Devices[len(s.Devices)-1].Device.ID = "MIG-9"
		src := sourcesOf(s, &c)
		one := plugin.Holder{Namespace: "n", Pod: "p", Container: "c", Resource: "r", DeviceID: "GPU-a"}
		other, part := one, one
		other.Resource, part.DeviceID = "other", "GPU-a::0"
		src.Holders = func() plugin.Holders {
			return plugin.Holders{By: map[health.DeviceID][]plugin.Holder{
				"GPU-a": {one, other, part}, "MIG-2": {one}, "MIG-3": {one}, "GPU-nobody-knows": {one},
			}}
		}
		page := exposition(t, NewCollector(src))
		seen := make(map[string]bool)
		for line := range strings.Lines(page) {
			id := line[:strings.LastIndex(line, " ")]
			if seen[id] && !strings.HasPrefix(line, "#") {
				t.Errorf("twice: %s", id)
			}
			seen[id] = true
		}
		src.Snapshots.Store(&health.Snapshot{At: now, Devices: s.Devices[1:2]})
		src.Totals.fold(src.Snapshots.Load())
		if page = exposition(t, NewCollector(src)); strings.Contains(page, "GPU-a") || strings.Contains(page, "MIG-") {
			t.Errorf("a device that is gone:\n%s", page)
		}
	}
}
