package web_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/view"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
)

// serve starts a web server with a web configuration whose agent is not ready.
func serve(t *testing.T, config string) *agenttest.Server {
	t.Helper()
	problems := func() view.Problems {
		return view.Problems{
			{Part: "plugin", Level: view.Unready, Text: "no kubelet"}, {Part: "config", Level: view.Warning, Text: "invalid"},
		}
	}
	mux := http.NewServeMux()
	web.HandleProbes(mux, problems)
	for _, pattern := range []string{"GET /{$}", "GET /metrics"} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "GPU-0") })
	}
	return agenttest.Serve(t, config, mux, func() bool { return false })
}

func TestServerTLS(t *testing.T) {
	t.Parallel()
	s := serve(t, agenttest.TLSConfig)
	s.MustGet(http.StatusOK, "/metrics", s.CA.Client(), "")
	s.MustGet(http.StatusOK, "/livez", s.CA.Client(), "")
	agenttest.MustContain(t, s.MustGet(http.StatusBadRequest, "/metrics", nil, ""), "HTTPS")
	if _, _, err := s.Get("/metrics", &tls.Config{}, ""); !errors.As(err, new(x509.UnknownAuthorityError)) {
		t.Errorf("client without the authority: %v", err)
	}
	old := s.CA.Client()
	old.MaxVersion = tls.VersionTLS11
	if _, _, err := s.Get("/metrics", old, ""); err == nil {
		t.Error("TLS 1.1 is accepted")
	}
}

func TestServerClientCertificates(t *testing.T) {
	t.Parallel()
	s := serve(t, `tls_server_config:
  {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert}`)
	s.MustGet(http.StatusOK, "/metrics", s.CA.ClientWith(t, "client"), "")
	if code, _, err := s.Get("/metrics", s.CA.Client(), ""); err == nil {
		t.Errorf("without a certificate: %d", code)
	}
	other := agenttest.NewAuthority(t, t.TempDir())
	other.Issue(t, "client", "prometheus")
	client := other.ClientWith(t, "client")
	client.RootCAs = s.CA.Client().RootCAs
	if code, _, err := s.Get("/metrics", client, ""); err == nil {
		t.Errorf("with a certificate of another authority: %d", code)
	}
}

func TestServerPasswords(t *testing.T) {
	t.Parallel()
	s := serve(t, agenttest.Users+"http_server_config: {headers: {X-Frame-Options: deny}}\n")
	for range 2 { // the second login is verified already
		agenttest.MustContain(t, s.MustGet(http.StatusOK, "/metrics", nil, "prometheus:secret"), "GPU-0")
	}
	s.MustGet(http.StatusOK, "/metrics", nil, "ada:1815")
	agenttest.MustContain(t, s.MustGet(http.StatusServiceUnavailable, "/readyz", nil, "ada:1815"), "plugin", "config: invalid")
	for _, user := range []string{"", "ada:secret", "prometheus:1815", "prometheus:", ":", "unknown:secret", "Ada:1815"} {
		for _, path := range []string{"/", "/metrics", "/favicon.ico", "//metrics"} {
			if text := s.MustGet(http.StatusUnauthorized, path, nil, user); strings.Contains(text, "GPU-0") {
				t.Errorf("%s as %q returns\n%s", path, user, text)
			}
		}
	}
	// Without a password /readyz does not disclose the reasons and warnings.
	s.MustGet(http.StatusOK, "/livez", nil, "")
	if text := s.MustGet(http.StatusServiceUnavailable, "/readyz", nil, ""); text != "not ready\n" {
		t.Errorf("/readyz without a password: %q", text)
	}
	for _, path := range []string{"/livez/", "/livez/../metrics", "//livez", "/readyz?x", "/livez%2f..%2fmetrics"} {
		if code, text, err := s.Get(path, nil, ""); err != nil || code == http.StatusOK || strings.Contains(text, "GPU-0") {
			t.Errorf("%s: %d %v\n%s", path, code, err, text)
		}
	}
	if _, header := s.Send("GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); header.Get("X-Frame-Options") != "deny" {
		t.Errorf("headers %v", header)
	}
}

func TestServerRateLimit(t *testing.T) {
	t.Parallel()
	s := serve(t, "rate_limit: {interval: 1h, burst: 2}\n")
	s.MustGet(http.StatusOK, "/metrics", nil, "")
	s.MustGet(http.StatusOK, "/metrics", nil, "")
	s.MustGet(http.StatusTooManyRequests, "/metrics", nil, "")
	s.MustGet(http.StatusOK, "/livez", nil, "")
	s.MustGet(http.StatusTooManyRequests, "/livez", nil, "ann:guess") // so that passwords cannot be tried there
}

func TestServerHTTP2(t *testing.T) {
	t.Parallel()
	s := serve(t, agenttest.TLSConfig)
	proto := func() string {
		client := s.CA.Client()
		client.NextProtos = []string{"h2", "http/1.1"}
		return s.Dial(client).(*tls.Conn).ConnectionState().NegotiatedProtocol
	}
	if p := proto(); p != "h2" {
		t.Errorf("default %q", p)
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

func TestLoadConfigErrors(t *testing.T) {
	dir := t.TempDir()
	ca := agenttest.NewAuthority(t, dir)
	ca.Issue(t, "server", "localhost")
	agenttest.WriteFile(t, dir, "empty", "")
	const pair = "cert_file: server.crt, key_file: server.key, "
	for text, want := range map[string]string{
		"tls_server_config: {cert_file: none, key_file: server.key}":                                           "none",
		"tls_server_config: {cert_file: server.crt, key_file: server.crt}":                                     "private key",
		"tls_server_config: {" + pair + "min_version: SSL}":                                                    "unknown TLS version",
		"tls_server_config: {" + pair + "client_ca_file: ca.crt}":                                              "without a Client Auth Policy",
		"tls_server_config: {" + pair + "cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]}":              "HTTP/2 needs TLS_ECDHE",
		"tls_server_config: {" + pair + "client_ca_file: empty, client_auth_type: RequireAndVerifyClientCert}": "client_ca_file: ",
		"basic_auth_users: {ada: plain}":                                                                       "bcrypt",
		"http_server_config: {headers: {X-Other: x}}":                                                          "X-Other",
		"tls_server: {}": "tls_server",
	} {
		file := agenttest.WriteFile(t, dir, "web.yaml", text)
		_, err := web.LoadConfig(file)
		if err == nil || !strings.Contains(err.Error(), "webConfigFile: "+file+": ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	if _, err := web.LoadConfig(dir + "/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// A text has the same configuration as its file, also after the file was removed. A text with an unknown key is refused: an
// older release would not protect the pages as intended.
func TestParseConfig(t *testing.T) {
	dir := t.TempDir()
	agenttest.NewAuthority(t, dir).Issue(t, "server", "localhost")
	const text = agenttest.TLSConfig + agenttest.Users
	file := agenttest.WriteFile(t, dir, "web.yaml", text)
	want, err := web.LoadConfig(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	got, err := web.ParseConfig(file, want.Text())
	if err != nil || !got.Equal(want) || got.Users() != 2 || !got.Certificate().Equal(want.Certificate()) || string(got.Text()) != text {
		t.Errorf("%+v, %v", got, err)
	}
	for _, text := range []string{text + "mfa: {}\n", "tls_server_config: {cert_file: none, key_file: server.key}", "- 1"} {
		if _, err := web.ParseConfig(file, []byte(text)); err == nil || !strings.Contains(err.Error(), "webConfigFile: "+file+": ") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// While a web configuration replaces another, connections wait and none is refused. http.Server.Shutdown may only interrupt
// a request that is being read at that moment.
func TestServerReloadRefusesNoConnection(t *testing.T) {
	t.Parallel()
	s := serve(t, agenttest.TLSConfig)
	s.Address()
	var stop atomic.Bool
	refused := make(chan error, 1)
	go func() {
		for !stop.Load() {
			if _, _, err := s.Get(web.LivezPath, s.CA.Client(), ""); errors.Is(err, syscall.ECONNREFUSED) {
				refused <- err
				return
			}
		}
		refused <- nil
	}()
	for i, users := range []string{agenttest.Users, "", agenttest.Users} {
		s.Configure(agenttest.TLSConfig + users)
		want := []int{http.StatusUnauthorized, http.StatusOK, http.StatusUnauthorized}[i]
		s.Eventually(http.StatusText(want), func() error {
			code, _, err := s.Get("/metrics", s.CA.Client(), "")
			if err == nil && code != want {
				err = errors.New("not yet")
			}
			return err
		})
	}
	stop.Store(true)
	if err := <-refused; err != nil {
		t.Error(err)
	}
}

// If the port is in use, the server logs it once, and listens when the port is free.
func TestServerWaitsForPort(t *testing.T) {
	t.Parallel()
	other, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, "")
	s.Address()
	s.Listen(other.Addr().String())
	failures := func() []observer.LoggedEntry { return s.Logs.FilterField(zap.String("key", "metrics.listen")).All() }
	s.Eventually("the port is in use", func() error {
		if len(failures()) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	s.Eventually("the port is free", func() error {
		if got := s.Address(); got != other.Addr().String() {
			return errors.New(got)
		}
		return nil
	})
	if all := failures(); len(all) != 1 || all[0].Level != zap.ErrorLevel {
		t.Errorf("logged: %v", all)
	}
}
