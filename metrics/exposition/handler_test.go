package exposition

import (
	"compress/gzip"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/gpu-node-agent/gpu-node-agent/metrics/response"
)

// The default Accept headers of scrapers.
const (
	acceptPrometheus3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6," +
		"application/openmetrics-text;version=0.0.1;q=0.5," +
		"text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
	acceptPrometheus2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75," +
		"text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
	acceptOpenMetrics      = "application/openmetrics-text;version=1.0.0,*/*;q=0.1" // scrape_protocols: [OpenMetricsText1.0.0]
	acceptNativeHistograms = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6," +
		"application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)

// Numbers of the families in collect's schema. They are not in the order of the names.
const (
	energy = iota
	temperature
	errorsTotal
)

// collect returns a page with two series of each family, the energy with this label value.
func collect(model string) CollectFunc {
	schema := NewSchema([]Family{
		energy:      {Name: "ENERGY", Help: "A counter whose name does not end in _total.", Type: dto.MetricType_COUNTER},
		temperature: {Name: "DEGREES", Help: "A gauge.", Type: dto.MetricType_GAUGE, Unit: "degrees"},
		errorsTotal: {Name: "errors_total", Help: "A counter.", Type: dto.MetricType_COUNTER},
	})
	return func() (*Page, func()) {
		p := NewPage(schema)
		for _, gpu := range []string{"1", "0"} {
			labels := p.Labels(nil, Label{"model", model}, Label{"gpu", gpu})
			p.Add(energy, 1, labels)
			p.Add(temperature, 2, labels)
			p.AddWith(errorsTotal, 3, labels, Label{"code", "7"})
		}
		return p, func() {}
	}
}

var discard = log.New(io.Discard, "", 0)

func get(t *testing.T, url, accept, encoding string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	for name, value := range map[string]string{"Accept": accept, "Accept-Encoding": encoding} {
		if value != "" {
			r.Header.Set(name, value)
		}
	}
	w := httptest.NewRecorder()
	Handler(collect("H100"), response.NewRenderer(), discard).ServeHTTP(w, r)
	if w.Code != http.StatusOK {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	return w
}

// In every format a counter of dcgm-exporter keeps its name, and in the text format its type.
func TestHandlerNegotiatesFormat(t *testing.T) {
	for accept, want := range map[string]struct{ mediaType, counterType string }{
		"":                         {"text/plain", "counter"},
		"*/*":                      {"text/plain", "counter"},
		"text/html,*/*;q=0.8":      {"text/plain", "counter"},
		"text/plain;version=0.0.4": {"text/plain", "counter"},
		acceptPrometheus2:          {"text/plain", "counter"},
		acceptPrometheus3:          {"text/plain", "counter"},
		acceptOpenMetrics:          {"application/openmetrics-text", "unknown"},
		"application/openmetrics-text;version=0.0.1": {"application/openmetrics-text", "unknown"},
	} {
		w := get(t, "/metrics", accept, "")
		text := w.Body.String()
		if mediaType := w.Header().Get("Content-Type"); !strings.HasPrefix(mediaType, want.mediaType) {
			t.Errorf("Accept %q: got %s", accept, mediaType)
		}
		for _, line := range []string{"# TYPE ENERGY " + want.counterType + "\n", "\nENERGY{", "\nerrors_total{"} {
			if !strings.Contains(text, line) {
				t.Errorf("Accept %q: missing %q", accept, line)
			}
		}
		if isOpenMetrics := want.counterType == "unknown"; isOpenMetrics != strings.HasSuffix(text, "# EOF\n") ||
			isOpenMetrics != strings.Contains(text, "# TYPE errors counter\n") {
			t.Errorf("Accept %q: the text does not match the Content-Type:\n%s", accept, text)
		}
	}
	w := get(t, "/metrics", acceptNativeHistograms, "")
	if mediaType := w.Header().Get("Content-Type"); !strings.HasPrefix(mediaType, "application/vnd.google.protobuf") ||
		!strings.Contains(w.Body.String(), "ENERGY") {
		t.Errorf("native histograms: got %s", mediaType)
	}
}

func TestHandlerFiltersByName(t *testing.T) {
	text := get(t, "/metrics?name[]=errors_total&name[]=DEGREES", "", "").Body.String()
	if strings.Count(text, "# TYPE ") != 2 || strings.Contains(text, "ENERGY") {
		t.Errorf("got:\n%s", text)
	}
}

func TestHandlerHead(t *testing.T) {
	server := httptest.NewServer(Handler(collect("H100"), response.NewRenderer(), discard))
	defer server.Close()
	res, err := http.Head(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(res.Body)
	if err := res.Body.Close(); err != nil {
		t.Error(err)
	}
	if err != nil || res.StatusCode != http.StatusOK || len(body) != 0 || !strings.HasPrefix(res.Header.Get("Content-Type"), "text/plain") {
		t.Errorf("status %d, error %v, body %q", res.StatusCode, err, body)
	}
}

func TestHandlerNegotiatesCompression(t *testing.T) {
	plain := get(t, "/metrics", "", "").Body.String()
	for acceptEncoding, want := range map[string]string{
		"": "", "gzip": "gzip", "gzip, deflate": "gzip", "deflate,gzip;q=0.5": "gzip", "gzip;q=0": "", "identity": "", "*": "", "zstd, br": "",
		"gzip;q=0.5, identity": "", "identity;q=0.5, gzip": "gzip", "gzipped": "", "gzip;q=x": "gzip", ";;,,gzip": "gzip",
	} {
		w := get(t, "/metrics", "", acceptEncoding)
		if got := w.Header().Get("Content-Encoding"); got != want {
			t.Errorf("Accept-Encoding %q: got %q, want %q", acceptEncoding, got, want)
		}
		if vary := strings.Join(w.Header().Values("Vary"), ","); vary != "Accept-Encoding,Accept" && vary != "Accept,Accept-Encoding" {
			t.Errorf("Accept-Encoding %q: Vary is %q", acceptEncoding, vary)
		}
		var body io.Reader = w.Body
		if want == "gzip" {
			z, err := gzip.NewReader(w.Body)
			if err != nil {
				t.Fatal(err)
			}
			body = z
		}
		if text, err := io.ReadAll(body); err != nil || string(text) != plain {
			t.Errorf("Accept-Encoding %q: %v, got:\n%s", acceptEncoding, err, text)
		}
	}
}

// A page with any label value can be parsed and contains the value.
func TestHandlerEscapesLabels(t *testing.T) {
	for _, model := range []string{`quote " backslash \ end`, "new\nline", "tab\tand ümlaut", "", "{a=\"b\"} 1\n", "bad \xff\xfe byte"} {
		w := httptest.NewRecorder()
		Handler(collect(model), response.NewRenderer(), discard).ServeHTTP(w,
			httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
		page := w.Body.String()
		if _, err := promlint.New(strings.NewReader(page)).Lint(); err != nil {
			t.Errorf("model %q: the page cannot be parsed: %v", model, err)
		}
		escaped := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(strings.ToValidUTF8(model, "�"))
		if line := `DEGREES{gpu="0",model="` + escaped + `"} 2` + "\n"; !strings.Contains(page, line) {
			t.Errorf("model %q: missing %q in:\n%s", model, line, page)
		}
	}
}

// slowClient does not read before resume is closed.
type slowClient struct {
	*httptest.ResponseRecorder
	writing chan struct{} // closed when the response is sent
	resume  chan struct{}
}

func (s slowClient) Write(b []byte) (int, error) {
	close(s.writing)
	<-s.resume
	return s.ResponseRecorder.Write(b)
}

func TestHandlerServesBesideSlowClients(t *testing.T) {
	h := Handler(collect("H100"), response.NewRenderer(), discard)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
	resume, done := make(chan struct{}), make(chan struct{})
	var slow []slowClient
	for range 20 {
		c := slowClient{httptest.NewRecorder(), make(chan struct{}), resume}
		slow = append(slow, c)
		go func() {
			h.ServeHTTP(c, r)
			done <- struct{}{}
		}()
	}
	for _, c := range slow {
		<-c.writing
	}
	want := get(t, "/metrics", "", "").Body.String()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Body.String() != want {
		t.Errorf("beside slow clients: got:\n%s", w.Body)
	}
	close(resume)
	for range slow {
		<-done
	}
	for _, c := range slow {
		if c.Body.String() != want || c.Header().Get("Content-Length") != strconv.Itoa(len(want)) {
			t.Errorf("slow client: Content-Length %s, body:\n%s", c.Header().Get("Content-Length"), c.Body)
		}
	}
}
