package agent

import (
	"bufio"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/status"
)

// FuzzHandler sends the handler any request that net/http can read. Only /readyz may respond with 5xx, only GET and HEAD are
// accepted, and JSON responses are valid.
func FuzzHandler(f *testing.F) {
	for _, path := range []string{
		"/", "/metrics", "/livez", "/readyz", status.SnapshotPath, "/favicon.ico", "/metrics/", "//metrics", "/../metrics", "/%2e%2e/etc/passwd",
		"/..%2f..%2fetc%2fpasswd", "/metrics?name[]=x&name[]=", "/%00", "/%zz", "*", "http://other/metrics", "/debug/pprof/",
		"/?" + strings.Repeat("a=b&", 500),
		status.SnapshotPath + "?pretty=\xff", "/\r\nX: y",
	} {
		for _, method := range []string{"GET", "HEAD", "POST", "OPTIONS", "CONNECT", "TRACE", "get", "G\tET"} {
			f.Add(method + " " + path + " HTTP/1.1\r\nHost: node:9400\r\n\r\n")
		}
	}
	for _, headers := range []string{
		"Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4",
		"Accept: application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited",
		"Accept: text/plain;q=abc;;;=", "Accept: " + strings.Repeat("a/b,", 3000), "Accept-Encoding: gzip, zstd;q=0, *;q=x",
		"If-None-Match: *\r\nIf-Modified-Since: never",
		"Range: bytes=5-1", "X-Prometheus-Scrape-Timeout-Seconds: -1", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0",
		"Content-Length: 5\r\n\r\nhell", "Expect: 100-continue",
		"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings", "Host: \x00", "Cookie: " + strings.Repeat("a", 9000),
	} {
		for _, path := range []string{"/", "/metrics", status.SnapshotPath} {
			f.Add("GET " + path + " HTTP/1.1\r\nHost: node\r\n" + headers + "\r\n\r\n")
		}
	}
	agents := []*Agent{idleAgent(agenttest.Node()), idleAgent(nil)}
	f.Fuzz(func(t *testing.T, text string) {
		for _, a := range agents {
			req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(text)))
			if err != nil {
				return
			}
			begin := time.Now()
			w := httptest.NewRecorder()
			a.handler().ServeHTTP(w, req.WithContext(t.Context()))
			if took := time.Since(begin); took > 5*time.Second {
				t.Errorf("%q took %v", text, took)
			}
			checkResponse(t, req, w)
		}
	})
}

func checkResponse(t *testing.T, req *http.Request, w *httptest.ResponseRecorder) {
	t.Helper()
	unready := w.Code == http.StatusServiceUnavailable && strings.HasSuffix(req.URL.Path, "/readyz")
	if w.Code >= 500 && !unready {
		t.Errorf("%s %s: %d: %.200s", req.Method, req.URL, w.Code, w.Body)
	}
	if read := req.Method == http.MethodGet || req.Method == http.MethodHead; !read && w.Code == http.StatusOK {
		t.Errorf("%s %s: %d", req.Method, req.URL, w.Code)
	}
	if strings.Contains(w.Body.String(), "root:") {
		t.Errorf("%s returns a file: %.200s", req.URL, w.Body)
	}
	plain := w.Header().Get("Content-Encoding") == ""
	if strings.HasPrefix(w.Header().Get("Content-Type"), "application/json") && plain && req.Method == http.MethodGet &&
		!json.Valid(w.Body.Bytes()) {
		t.Errorf("%s: invalid JSON: %.200s", req.URL, w.Body)
	}
	if where := w.Header().Get("Location"); where != "" && !strings.HasPrefix(where, "/") || strings.HasPrefix(where, "//") {
		t.Errorf("%s redirects to %q, which may be another host", req.URL, where)
	}
}
