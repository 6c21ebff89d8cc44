package agent

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

func TestPlainHTTP(t *testing.T) {
	s := newSite(t, "")
	s.must(http.StatusOK, "/metrics", nil, "")
	s.must(http.StatusOK, "/livez", nil, "")
	mustHave(t, s.must(http.StatusServiceUnavailable, "/readyz", nil, ""), "plugin")
	mustHave(t, s.must(http.StatusOK, "/health", nil, ""), "OK")
}

func TestTLS(t *testing.T) {
	s := newSite(t, tlsText)
	s.must(http.StatusOK, "/metrics", s.ca.trust(), "")
	s.must(http.StatusOK, "/livez", s.ca.trust(), "")
	mustHave(t, s.must(http.StatusBadRequest, "/metrics", nil, ""), "HTTPS")
	if _, _, err := s.ask("/metrics", &tls.Config{}, ""); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("a client that knows no authority: %v", err)
	}
	old := s.ca.trust()
	old.MaxVersion = tls.VersionTLS11
	if _, _, err := s.ask("/metrics", old, ""); err == nil {
		t.Error("TLS 1.1 is taken")
	}
}

func TestClientCertificates(t *testing.T) {
	s := newSite(t, `tls_server_config:
  {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert}`)
	s.must(http.StatusOK, "/metrics", s.ca.as(t, "client"), "")
	if code, _, err := s.ask("/metrics", s.ca.trust(), ""); err == nil {
		t.Errorf("without a certificate: %d", code)
	}
	other := newAuthority(t, t.TempDir())
	other.issue(t, "client", "prometheus")
	stranger := other.as(t, "client")
	stranger.RootCAs = s.ca.trust().RootCAs
	if code, _, err := s.ask("/metrics", stranger, ""); err == nil {
		t.Errorf("with a certificate of another authority: %d", code)
	}
}

func TestPasswords(t *testing.T) {
	s := newSite(t, "basic_auth_users: {prometheus: "+hashed(t, "secret")+", ada: "+hashed(t, "1815")+"}\n"+
		"http_server_config: {headers: {X-Frame-Options: deny}}\n")
	for range 2 { // the second time the password is known
		mustHave(t, s.must(http.StatusOK, "/metrics", nil, "prometheus:secret"), "gpu_node_agent_device_state")
	}
	s.must(http.StatusOK, "/metrics", nil, "ada:1815")
	mustHave(t, s.must(http.StatusServiceUnavailable, "/readyz", nil, "ada:1815"), "plugin")
	for _, user := range []string{"", "ada:secret", "prometheus:1815", "prometheus:", ":", "nobody:secret", "Ada:1815"} {
		for _, path := range []string{"/", "/metrics", snapshotPath, "/favicon.ico", "//metrics"} {
			if text := s.must(http.StatusUnauthorized, path, nil, user); strings.Contains(text, "GPU-0") || !strings.Contains(text, "Unauthorized") {
				t.Errorf("%s as %q tells\n%s", path, user, text)
			}
		}
	}
	// A kubelet has no password. It is told whether, but not why.
	s.must(http.StatusOK, "/livez", nil, "")
	if text := s.must(http.StatusServiceUnavailable, "/readyz", nil, ""); text != "not ready\n" {
		t.Errorf("/readyz says to everybody: %q", text)
	}
	for _, path := range []string{"/livez/", "/livez/../metrics", "//livez", "/readyz?x", "/livez%2f..%2fmetrics"} {
		if code, text, err := s.ask(path, nil, ""); err != nil || code == http.StatusOK || strings.Contains(text, "gpu_node_agent") {
			t.Errorf("%s: %d %v\n%s", path, code, err, text)
		}
	}
	if got := s.raw("GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); got.header.Get("X-Frame-Options") != "deny" {
		t.Errorf("headers %v", got.header)
	}
}

func TestRateLimit(t *testing.T) {
	s := newSite(t, "rate_limit: {interval: 1h, burst: 2}\n")
	s.must(http.StatusOK, "/metrics", nil, "")
	s.must(http.StatusOK, "/metrics", nil, "")
	s.must(http.StatusTooManyRequests, "/metrics", nil, "")
	s.must(http.StatusOK, "/livez", nil, "")
	s.must(http.StatusTooManyRequests, "/livez", nil, "ann:guess") // or passwords could be tried there
}

func TestHTTP2(t *testing.T) {
	s := newSite(t, tlsText)
	proto := func() string {
		client := s.ca.trust()
		client.NextProtos = []string{"h2", "http/1.1"}
		conn, err := tls.Dial("tcp", s.address(), client)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().NegotiatedProtocol
	}
	if p := proto(); p != "h2" {
		t.Errorf("%q by default", p)
	}
	s.write("web.yaml", tlsText+"http_server_config: {http2: false}\n")
	s.eventually("HTTP/1.1 only", func() error {
		if p := proto(); p != "http/1.1" {
			return errors.New(p)
		}
		return nil
	})
	s.must(http.StatusOK, "/metrics", s.ca.trust(), "")
}

// The file, and what it names, may change at any time. What is bad changes nothing.
func TestWebConfigReload(t *testing.T) {
	t.Parallel()
	s := newSite(t, "{}\n")
	before := s.address()
	s.must(http.StatusOK, "/metrics", nil, "")
	kept := s.dial(nil)
	served := func(conn net.Conn) error {
		_, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
		if err == nil {
			var res *http.Response
			if res, err = http.ReadResponse(bufio.NewReader(conn), nil); err == nil {
				_, err = io.Copy(io.Discard, res.Body)
				_ = res.Body.Close()
			}
		}
		return err
	}
	if err := served(kept); err != nil {
		t.Fatal(err)
	}

	s.write("web.yaml", tlsText)
	s.eventually("TLS", func() error { _, _, err := s.ask("/metrics", s.ca.trust(), ""); return err })
	if now := s.address(); now != before {
		t.Errorf("it moved from %s to %s", before, now)
	}
	s.must(http.StatusBadRequest, "/metrics", nil, "")
	if err := served(kept); err == nil {
		t.Error("a connection of before TLS is served")
	}

	for name, text := range map[string]string{
		"no YAML": "{", "unknown key": "tls: {}", "no such certificate": "tls_server_config: {cert_file: none.crt, key_file: server.key}",
		"no bcrypt": "basic_auth_users: {a: b}", "no key": "tls_server_config: {cert_file: server.crt}",
	} {
		s.reloaded.Store(&metrics.Reload{OK: true})
		s.write("web.yaml", text)
		s.eventually("refused: "+name, func() error {
			if s.reloaded.Load().OK {
				return errors.New("no reload yet")
			}
			return nil
		})
		s.must(http.StatusOK, "/metrics", s.ca.trust(), "")
	}
	if said := s.said.FilterMessage("configuration is bad: the old one stays").All(); !strings.Contains(fmt.Sprint(said[0].ContextMap()["error"]), "metrics.webConfigFile: "+s.file("web.yaml")) {
		t.Errorf("the key is not named: %v", said[0].ContextMap())
	}

	// A new certificate, in two steps as some write it.
	s.write("web.yaml", tlsText)
	s.eventually("the good file is taken", func() error {
		if !s.reloaded.Load().OK {
			return errors.New("not yet")
		}
		return nil
	})
	serial := func() string {
		return s.dial(s.ca.trust()).(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	was := serial()
	s.ca.issue(t, "next", "localhost")
	s.move("next.crt", "server.crt")
	s.eventually("half a certificate is refused", func() error {
		if s.reloaded.Load().OK {
			return errors.New("no reload yet")
		}
		return nil
	})
	if now := serial(); now != was {
		t.Errorf("certificate %s, want still %s", now, was)
	}
	s.move("next.key", "server.key")
	s.eventually("the new certificate", func() error {
		if now := serial(); now == was {
			return errors.New("still " + was)
		}
		return nil
	})

	s.write("web.yaml", tlsText+"basic_auth_users: {ada: "+hashed(t, "1815")+"}\n")
	s.eventually("passwords", func() error {
		if code, _, err := s.ask("/metrics", s.ca.trust(), ""); code != http.StatusUnauthorized {
			return fmt.Errorf("%d %w", code, err)
		}
		return nil
	})
	s.must(http.StatusOK, "/metrics", s.ca.trust(), "ada:1815")
	s.write("config.yaml", "metrics: {listen: 127.0.0.1:0}\n")
	s.eventually("plain again", func() error {
		code, _, err := s.ask("/metrics", nil, "")
		if code != http.StatusOK {
			return fmt.Errorf("%d %w", code, err)
		}
		return nil
	})
}

func TestBadWebConfig(t *testing.T) {
	dir := t.TempDir()
	ca := newAuthority(t, dir)
	ca.issue(t, "server", "localhost")
	if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "web.yaml")
	for text, want := range map[string]string{
		"tls_server_config: {cert_file: none, key_file: server.key}":                                                                            "none",
		"tls_server_config: {cert_file: server.crt, key_file: server.crt}":                                                                      "private key",
		"tls_server_config: {cert_file: server.crt, key_file: server.key, min_version: SSL}":                                                    "unknown TLS version",
		"tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: ca.crt}":                                              "without a Client Auth Policy",
		"tls_server_config: {cert_file: server.crt, key_file: server.key, client_ca_file: empty, client_auth_type: RequireAndVerifyClientCert}": "client_ca_file: holds no certificate",
		"tls_server_config: {cert_file: server.crt, key_file: server.key, cipher_suites: [TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]}":              "HTTP/2 needs TLS_ECDHE",
		"basic_auth_users: {ada: plain}":              "bcrypt",
		"http_server_config: {headers: {X-Other: x}}": "X-Other",
		"tls_server: {}":                              "tls_server",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := load(t, "metrics: {webConfigFile: "+file+"}")
		if err == nil || !strings.Contains(err.Error(), "metrics.webConfigFile: "+file+": ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	if _, err := load(t, "metrics: {webConfigFile: "+file+".none}"); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("no file: %v", err)
	}
	if _, err := load(t, "metrics: {webConfigFile: web.yaml}"); err == nil || !strings.Contains(err.Error(), "absolute path") {
		t.Errorf("a relative path: %v", err)
	}
}

// While a configuration takes the place of another, connections wait and none is refused. Only a request that is
// being read at that very moment may be cut off, as http.Server.Shutdown does it.
func TestWebConfigReloadRefusesNobody(t *testing.T) {
	t.Parallel()
	s := newSite(t, tlsText)
	address, client := s.address(), s.ca.trust()
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan error, 1)
	go func() {
		c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: client}}
		for ctx.Err() == nil {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+livezPath, nil)
			if err != nil {
				asked <- err
				return
			}
			res, err := c.Do(req)
			if errors.Is(err, syscall.ECONNREFUSED) {
				asked <- err
				return
			}
			if err == nil {
				_ = res.Body.Close()
			}
		}
		asked <- nil
	}()
	for _, policy := range []string{"deny", "sameorigin", "deny"} {
		s.write("web.yaml", tlsText+"http_server_config: {headers: {X-Frame-Options: "+policy+"}}\n")
		s.eventually(policy, func() error {
			if w := s.web.Load(); w.rest.HTTPConfig.Header["X-Frame-Options"] != policy {
				return errors.New("not yet")
			}
			return nil
		})
	}
	cancel()
	if err := <-asked; err != nil {
		t.Error(err)
	}
}
