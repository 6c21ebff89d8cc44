package agenttest

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
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/internal/kubelettest"
	"github.com/gpu-node-agent/gpu-node-agent/metrics"
)

// Users is a web configuration with the users prometheus (password secret) and ada (1815).
const Users = "basic_auth_users: {prometheus: $2a$04$q7cJDM2DbyuRNX8dQKwLxOLNpNpHoVosgeUrU7CdwNM7nRG0Efia2, " +
	"ada: $2a$04$YIXGRwBYsnDMTyt.TgJF5OwQ5LYFPO9vwVmZN4E2lQFWJTFM5JZY.}\n"

// TLSConfig is a web configuration with the server's certificate of a Site.
const TLSConfig = "tls_server_config: {cert_file: server.crt, key_file: server.key}\n"

// Site is a directory with an authority and the certificates server.crt and client.crt, a log, and a client of the web
// server that writes the log.
type Site struct {
	T    *testing.T
	Dir  string
	CA   *Authority
	Logs *observer.ObservedLogs
	Log  *zap.Logger
}

// NewSite returns a site without a server.
func NewSite(t *testing.T) *Site {
	t.Helper()
	s := &Site{T: t, Dir: t.TempDir()}
	s.CA = NewAuthority(t, s.Dir)
	s.CA.Issue(t, "server", "localhost")
	s.CA.Issue(t, "client", "prometheus")
	core, logs := observer.New(zap.DebugLevel)
	s.Log, s.Logs = zap.New(core), logs
	t.Cleanup(func() {
		if t.Failed() {
			for _, e := range logs.All() {
				t.Log(e.Message, e.ContextMap())
			}
		}
	})
	return s
}

// Server is a site with a web server.
type Server struct {
	*Site
	web.Server
}

// Serve starts a web server with a web configuration, or without if that is "".
func Serve(t *testing.T, config string, pages http.Handler, ready func() bool) *Server {
	t.Helper()
	site := NewSite(t)
	s := &Server{site, web.Server{
		Metrics: new(health.Latest[metrics.Config]), Config: new(health.Latest[web.Config]), Pages: pages, Ready: ready,
		Dropped: new(atomic.Uint64), Log: site.Log,
	}}
	s.Listen("127.0.0.1:0")
	s.Configure(config)
	s.Start(s.Run)
	return s
}

// Listen sets metrics.listen.
func (s *Server) Listen(address string) { s.Metrics.Store(&metrics.Config{Listen: address}) }

// Configure sets the web configuration.
func (s *Server) Configure(config string) {
	s.T.Helper()
	file := ""
	if config != "" {
		s.Write("web.yaml", config)
		file = s.File("web.yaml")
	}
	c, err := web.LoadConfig(file)
	if err != nil {
		s.T.Fatal(err)
	}
	s.Config.Store(c)
}

// Start runs a function until the test ends.
func (s *Site) Start(run func(context.Context) error) {
	ctx, cancel := context.WithCancel(s.T.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	s.T.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			s.T.Error(err)
		}
	})
}

// File returns the path of a file in the site's directory.
func (s *Site) File(name string) string { return filepath.Join(s.Dir, name) }

// Write writes a file in the site's directory.
func (s *Site) Write(name, text string) {
	s.T.Helper()
	WriteFile(s.T, s.Dir, name, text)
}

// WriteFile writes a file in a directory and returns its path. It is atomic, because a reload may read the file at any time,
// and an empty web configuration is valid.
func WriteFile(t *testing.T, dir, name, text string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := errors.Join(os.WriteFile(path+".new", []byte(text), 0o600), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
	return path
}

// Address waits until the server listens, and returns its address.
func (s *Site) Address() string {
	s.T.Helper()
	address := ""
	s.Eventually("the server listens", func() error {
		for _, e := range s.Logs.FilterMessage("web server listens").All() {
			address = fmt.Sprint(e.ContextMap()["address"])
		}
		if address == "" {
			return errors.New("not yet")
		}
		return nil
	})
	return address
}

// Eventually calls Eventually with the site's test.
func (s *Site) Eventually(what string, check func() error) {
	s.T.Helper()
	Eventually(s.T, what, check)
}

// Eventually repeats a check until it returns nil, and fails the test after 30 seconds.
func Eventually(t *testing.T, what string, check func() error) {
	t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-timeout:
			t.Fatalf("timed out: %s: %v", what, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Get requests a page on a new connection, over TLS if client is set. user is NAME:PASSWORD or "".
func (s *Site) Get(path string, client *tls.Config, user string) (int, string, error) {
	scheme := "http"
	if client != nil {
		scheme = "https"
	}
	req, err := http.NewRequestWithContext(s.T.Context(), http.MethodGet, scheme+"://"+s.Address()+path, nil)
	if err != nil {
		return 0, "", err
	}
	if name, password, ok := strings.Cut(user, ":"); ok {
		req.SetBasicAuth(name, password)
	}
	c := http.Client{
		Timeout:   20 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: client, ForceAttemptHTTP2: true},
	}
	res, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	return res.StatusCode, string(text), err
}

// MustGet requests a page and fails the test unless the response has a status.
func (s *Site) MustGet(want int, path string, client *tls.Config, user string) string {
	s.T.Helper()
	code, text, err := s.Get(path, client, user)
	if err != nil || code != want {
		s.T.Fatalf("%s as %q: %d %v, want %d\n%s", path, user, code, err, want, text)
	}
	return text
}

// Dial connects to the server, over TLS if client is set.
func (s *Site) Dial(client *tls.Config) net.Conn {
	s.T.Helper()
	dial := new(net.Dialer).DialContext
	if client != nil {
		dial = (&tls.Dialer{Config: client}).DialContext
	}
	conn, err := dial(s.T.Context(), "tcp", s.Address())
	if err != nil {
		s.T.Fatal(err)
	}
	s.T.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		s.T.Fatal(err)
	}
	return conn
}

// Send sends the text of a request and returns the status code and the headers of the response.
func (s *Site) Send(text string) (int, http.Header) {
	s.T.Helper()
	conn := s.Dial(nil)
	if _, err := io.WriteString(conn, text); err != nil {
		s.T.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		s.T.Fatalf("%.60q: %v", text, err)
	}
	_ = res.Body.Close()
	return res.StatusCode, res.Header
}

// MustContain fails the test unless a text contains all parts.
func MustContain(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q is not in\n%s", p, text)
		}
	}
}

// StartKubelet runs a kubelet in a directory until the test ends.
func StartKubelet(t *testing.T, dir string) *kubelettest.Kubelet {
	t.Helper()
	k, err := kubelettest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	return k
}

// SocketDir returns a temporary directory whose name is short enough for the path of a unix socket.
func SocketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gna")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
