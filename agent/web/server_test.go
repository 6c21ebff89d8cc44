package web_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
)

// serve starts a web server with a web configuration whose agent is not ready.
func serve(t *testing.T, config string) *agenttest.Server {
	t.Helper()
	notReady := func() []string { return []string{"plugin: no kubelet"} }
	mux := http.NewServeMux()
	web.HandleProbes(mux, notReady)
	for _, pattern := range []string{"GET /{$}", "GET /metrics"} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "GPU-0") })
	}
	return agenttest.Serve(t, config, mux, notReady)
}

func TestPlainHTTP(t *testing.T) {
	s := serve(t, "")
	s.MustGet(http.StatusOK, "/metrics", nil, "")
	s.MustGet(http.StatusOK, "/livez", nil, "")
	agenttest.MustContain(t, s.MustGet(http.StatusServiceUnavailable, "/readyz", nil, ""), "plugin")
}

func TestTLS(t *testing.T) {
	s := serve(t, agenttest.TLSConfig)
	s.MustGet(http.StatusOK, "/metrics", s.CA.Client(), "")
	s.MustGet(http.StatusOK, "/livez", s.CA.Client(), "")
	agenttest.MustContain(t, s.MustGet(http.StatusBadRequest, "/metrics", nil, ""), "HTTPS")
	if _, _, err := s.Get("/metrics", &tls.Config{}, ""); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("a client that knows no authority: %v", err)
	}
	old := s.CA.Client()
	old.MaxVersion = tls.VersionTLS11
	if _, _, err := s.Get("/metrics", old, ""); err == nil {
		t.Error("TLS 1.1 is taken")
	}
}

func TestClientCertificates(t *testing.T) {
	s := serve(t, `tls_server_config:
  {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert}`)
	s.MustGet(http.StatusOK, "/metrics", s.CA.ClientWith(t, "client"), "")
	if code, _, err := s.Get("/metrics", s.CA.Client(), ""); err == nil {
		t.Errorf("without a certificate: %d", code)
	}
	other := agenttest.NewAuthority(t, t.TempDir())
	other.Issue(t, "client", "prometheus")
	stranger := other.ClientWith(t, "client")
	stranger.RootCAs = s.CA.Client().RootCAs
	if code, _, err := s.Get("/metrics", stranger, ""); err == nil {
		t.Errorf("with a certificate of another authority: %d", code)
	}
}

func TestPasswords(t *testing.T) {
	s := serve(t, "basic_auth_users: {prometheus: "+agenttest.PasswordHash(t, "secret")+", ada: "+agenttest.PasswordHash(t, "1815")+"}\n"+
		"http_server_config: {headers: {X-Frame-Options: deny}}\n")
	for range 2 { // the second time the password is known
		agenttest.MustContain(t, s.MustGet(http.StatusOK, "/metrics", nil, "prometheus:secret"), "GPU-0")
	}
	s.MustGet(http.StatusOK, "/metrics", nil, "ada:1815")
	agenttest.MustContain(t, s.MustGet(http.StatusServiceUnavailable, "/readyz", nil, "ada:1815"), "plugin")
	for _, user := range []string{"", "ada:secret", "prometheus:1815", "prometheus:", ":", "nobody:secret", "Ada:1815"} {
		for _, path := range []string{"/", "/metrics", "/favicon.ico", "//metrics"} {
			if text := s.MustGet(http.StatusUnauthorized, path, nil, user); strings.Contains(text, "GPU-0") || !strings.Contains(text, "Unauthorized") {
				t.Errorf("%s as %q tells\n%s", path, user, text)
			}
		}
	}
	// A kubelet has no password. It is told whether, but not why.
	s.MustGet(http.StatusOK, "/livez", nil, "")
	if text := s.MustGet(http.StatusServiceUnavailable, "/readyz", nil, ""); text != "not ready\n" {
		t.Errorf("/readyz says to everybody: %q", text)
	}
	for _, path := range []string{"/livez/", "/livez/../metrics", "//livez", "/readyz?x", "/livez%2f..%2fmetrics"} {
		if code, text, err := s.Get(path, nil, ""); err != nil || code == http.StatusOK || strings.Contains(text, "GPU-0") {
			t.Errorf("%s: %d %v\n%s", path, code, err, text)
		}
	}
	if got := s.Send("GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); got.Header.Get("X-Frame-Options") != "deny" {
		t.Errorf("headers %v", got.Header)
	}
}

func TestRateLimit(t *testing.T) {
	s := serve(t, "rate_limit: {interval: 1h, burst: 2}\n")
	s.MustGet(http.StatusOK, "/metrics", nil, "")
	s.MustGet(http.StatusOK, "/metrics", nil, "")
	s.MustGet(http.StatusTooManyRequests, "/metrics", nil, "")
	s.MustGet(http.StatusOK, "/livez", nil, "")
	s.MustGet(http.StatusTooManyRequests, "/livez", nil, "ann:guess") // or passwords could be tried there
}

func TestHTTP2(t *testing.T) {
	s := serve(t, agenttest.TLSConfig)
	proto := func() string {
		client := s.CA.Client()
		client.NextProtos = []string{"h2", "http/1.1"}
		conn, err := tls.Dial("tcp", s.Address(), client)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().NegotiatedProtocol
	}
	if p := proto(); p != "h2" {
		t.Errorf("%q by default", p)
	}
	s.Configure(agenttest.TLSConfig + "http_server_config: {http2: false}\n")
	s.Eventually("HTTP/1.1 only", func() error {
		if p := proto(); p != "http/1.1" {
			return errors.New(p)
		}
		return nil
	})
	s.MustGet(http.StatusOK, "/metrics", s.CA.Client(), "")
}

func TestBadWebConfig(t *testing.T) {
	dir := t.TempDir()
	ca := agenttest.NewAuthority(t, dir)
	ca.Issue(t, "server", "localhost")
	if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "web.yaml")
	for text, want := range map[string]string{
		"tls_server_config: {cert_file: none, key_file: server.key}":                                                                            "none",
		"tls_server_config: {cert_file: server.crt, key_file: server.crt}":                                                                      "private key",
		"tls_server_config: {cert_file: server.crt, key_file: server.key, min_version: SSL}":                                                    "unknown TLS version",
		"tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt}":                                              "without a Client Auth Policy",
		"tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: empty, client_auth_type: RequireAndVerifyClientCert}": "client_ca_file: ",
		"tls_server_config: {cert_file: server.crt, key_file: server.key, cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]}":              "HTTP/2 needs TLS_ECDHE",
		"basic_auth_users: {ada: plain}":              "bcrypt",
		"http_server_config: {headers: {X-Other: x}}": "X-Other",
		"tls_server: {}":                              "tls_server",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := web.LoadConfig(file)
		if err == nil || !strings.Contains(err.Error(), "webConfigFile: "+file+": ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	if _, err := web.LoadConfig(file + ".none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// While a configuration takes the place of another, connections wait and none is refused. Only a request that is
// being read at that very moment may be cut off, as http.Server.Shutdown does it.
func TestWebConfigReloadRefusesNobody(t *testing.T) {
	t.Parallel()
	s := serve(t, agenttest.TLSConfig)
	address, client := s.Address(), s.CA.Client()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: client}}
	get := func(ctx context.Context) (*http.Response, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+web.LivezPath, nil)
		if err != nil {
			return nil, err
		}
		res, err := c.Do(req)
		if err == nil {
			_ = res.Body.Close()
		}
		return res, err
	}
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := get(ctx); errors.Is(err, syscall.ECONNREFUSED) { //nolint:bodyclose // get closes it
				asked <- err
				return
			}
		}
		asked <- nil
	}()
	for _, policy := range []string{"deny", "sameorigin", "deny"} {
		s.Configure(agenttest.TLSConfig + "http_server_config: {headers: {X-Frame-Options: " + policy + "}}\n")
		s.Eventually(policy, func() error {
			res, err := get(s.T.Context())
			if err == nil && res.Header.Get("X-Frame-Options") != policy {
				err = errors.New("not yet")
			}
			return err
		})
	}
	cancel()
	if err := <-asked; err != nil {
		t.Error(err)
	}
}
