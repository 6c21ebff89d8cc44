package metrics

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strconv"
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
		s.Devices[1].Verdict.Findings[0].Action = health.Action(model)
		src := sources(s)
		src.Holders = func() plugin.Holders {
			return plugin.Holders{By: map[health.DeviceID][]plugin.Holder{"GPU-a": {{Pod: model, DeviceID: "GPU-a"}}}}
		}
		page := get(t, src, http.MethodGet, "", "").Body.String()
		if _, err := promlint.New(strings.NewReader(page)).Lint(); err != nil {
			t.Errorf("%q: the page cannot be parsed: %v", model, err)
		}
		escaped := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(strings.ToValidUTF8(model, "�"))
		pod := `,pod="` + escaped + `"`
		if model == "" {
			pod = "" // who has no name is nobody
		}
		if len(series(page, "DCGM_FI_DEV_GPU_TEMP", `modelName="`+escaped+`"`, pod)) != 1 || len(series(page, "DCGM_FI_DEV_GPU_TEMP", `pod=""`)) != 0 {
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
		page := exposition(t, NewGatherer(src))
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
		if page = exposition(t, NewGatherer(src)); strings.Contains(page, "GPU-a") || strings.Contains(page, "MIG-") {
			t.Errorf("a device that is gone:\n%s", page)
		}
	}
}

// Who takes gzip gets it, unless the plain page is liked better. Caches are told that it matters.
func TestCompression(t *testing.T) {
	for accept, want := range map[string]string{
		"": "", "gzip": "gzip", "gzip, deflate": "gzip", "deflate,gzip;q=0.5": "gzip", "gzip;q=0": "", "identity": "", "*": "", "zstd, br": "",
		"gzip;q=0.5, identity": "", "identity;q=0.5, gzip": "gzip", "gzipped": "", "gzip;q=x": "gzip", ";;,,gzip": "gzip",
	} {
		page := get(t, sources(node()), http.MethodGet, "", accept)
		if got := page.Header().Get("Content-Encoding"); got != want {
			t.Errorf("%q gets %q, want %q", accept, got, want)
		}
		if vary := strings.Join(page.Header().Values("Vary"), ","); !strings.Contains(vary, "Accept-Encoding") || !strings.Contains(vary, "Accept,") && !strings.HasSuffix(vary, "Accept") {
			t.Errorf("%q: Vary is %q", accept, vary)
		}
		var body io.Reader = page.Body
		if want == "gzip" {
			z, err := gzip.NewReader(page.Body)
			if err != nil {
				t.Fatal(err)
			}
			body = z
		}
		if text, err := io.ReadAll(body); err != nil || !bytes.HasPrefix(text[bytes.LastIndexByte(text[:len(text)-1], '\n')+1:], []byte("process_virtual_memory_max_bytes ")) {
			t.Errorf("%q: %v: the page ends in %q", accept, err, text[max(0, len(text)-80):])
		}
	}
}

// An error is told in plain text, also to who would take it packed, and what was written before is not in it.
func TestAnErrorIsPlain(t *testing.T) {
	page := httptest.NewRecorder()
	newPress().serve(t.Context(), page, true, func(w http.ResponseWriter) {
		_, _ = w.Write(bytes.Repeat([]byte("half a page"), 9999))
		http.Error(w, "no", http.StatusInternalServerError)
	})
	if page.Code != http.StatusInternalServerError || page.Body.String() != "no\n" || page.Header().Get("Content-Encoding") != "" {
		t.Errorf("%d %v %q", page.Code, page.Header(), page.Body)
	}
}

// A page can be asked for by the names of what is wanted.
func TestOnlySomeFamilies(t *testing.T) {
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics?name[]=gpu_node_agent_source_up&name[]=go_goroutines", nil)
	page := httptest.NewRecorder()
	Handler(sources(node()), log.New(io.Discard, "", 0)).ServeHTTP(page, r)
	if text := page.Body.String(); strings.Count(text, "# TYPE ") != 2 || !strings.Contains(text, "\ngpu_node_agent_source_up 1\n") {
		t.Errorf("%s", text)
	}
}

// slowClient does not read before it is let.
type slowClient struct {
	*httptest.ResponseRecorder
	reading, let chan struct{}
}

func (s slowClient) Write(b []byte) (int, error) {
	close(s.reading)
	<-s.let
	return s.ResponseRecorder.Write(b)
}

// Clients that do not read what they have asked for, or that do not wait, keep nobody else waiting.
func TestSlowClients(t *testing.T) {
	h := Handler(sources(node()), log.New(io.Discard, "", 0))
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
	let, done := make(chan struct{}), make(chan struct{})
	var slow []slowClient
	for range 3 * inParallel {
		c := slowClient{httptest.NewRecorder(), make(chan struct{}), let}
		slow = append(slow, c)
		go func() {
			h.ServeHTTP(c, r)
			done <- struct{}{}
		}()
	}
	for _, c := range slow {
		<-c.reading
	}
	want := get(t, sources(node()), http.MethodGet, "", "").Body.Len()
	page := httptest.NewRecorder()
	h.ServeHTTP(page, r)
	if n := page.Body.Len(); n < want*9/10 {
		t.Errorf("%d bytes, want about %d", n, want)
	}
	close(let)
	for range slow {
		<-done
	}
	for _, c := range slow {
		if n, said := c.Body.Len(), c.Header().Get("Content-Length"); strconv.Itoa(n) != said || !strings.Contains(c.Body.String(), "\ngpu_node_agent_source_up 1\n") {
			t.Errorf("%d bytes, %s said", n, said)
		}
	}

	p := newPress()
	for range inParallel {
		p.turns <- struct{}{} // all are busy
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	defer func() {
		if r := recover(); r != http.ErrAbortHandler { //nolint:errorlint // it is that very value
			t.Errorf("an answer for nobody: %v", r)
		}
	}()
	p.serve(gone, httptest.NewRecorder(), false, func(http.ResponseWriter) { t.Error("a page for nobody") })
}

// A source whose driver was let go of is not up, and is told from one that is down.
func TestDetachedSource(t *testing.T) {
	for status, want := range map[health.SourceStatus]string{health.SourceDetached: "1", health.SourceDown: "0"} {
		s := node()
		s.Source.Status = status
		page := exposition(t, NewGatherer(sources(s)))
		for _, line := range []string{"gpu_node_agent_source_detached " + want, "gpu_node_agent_source_up 0", "gpu_node_agent_source_stalled 0"} {
			if !strings.Contains(page, "\n"+line+"\n") {
				t.Errorf("%v: no %s", status, line)
			}
		}
	}
}
