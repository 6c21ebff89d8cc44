package web_test

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zapcore"

	"github.com/gpu-node-agent/gpu-node-agent/agent/internal/agenttest"
	"github.com/gpu-node-agent/gpu-node-agent/agent/web"
)

// withAndWithoutTLS runs a test with plain HTTP and with TLS, which have the same limits.
func withAndWithoutTLS(t *testing.T, test func(t *testing.T, s *agenttest.Server, client *tls.Config)) {
	t.Run("plain", func(t *testing.T) {
		t.Parallel()
		test(t, serve(t, ""), nil)
	})
	t.Run("TLS", func(t *testing.T) {
		t.Parallel()
		s := serve(t, agenttest.TLSConfig)
		test(t, s, s.CA.Client())
	})
}

// awaitClose waits until the server closes a connection.
func awaitClose(t *testing.T, conn net.Conn) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(15 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("not closed")
	}
}

func TestServerClosesSlowConnections(t *testing.T) {
	withAndWithoutTLS(t, func(t *testing.T, s *agenttest.Server, client *tls.Config) {
		idle, incomplete, slow := s.Dial(client), s.Dial(client), s.Dial(client)
		conns := []net.Conn{idle, incomplete, slow}
		if client != nil {
			conns = append(conns, s.Dial(nil)) // without a TLS handshake
		}
		if _, err := io.WriteString(incomplete, "GET /metrics HTTP/1.1\r\nHost: x\r\nX-Long"); err != nil {
			t.Fatal(err)
		}
		go func() { // one header line after another
			_, err := io.WriteString(slow, "GET /metrics HTTP/1.1\r\nHost: x\r\n")
			for i := 0; err == nil; i++ {
				<-time.After(200 * time.Millisecond)
				_, err = fmt.Fprintf(slow, "X-%d: x\r\n", i)
			}
		}()
		for _, conn := range conns {
			awaitClose(t, conn)
		}
		s.MustGet(http.StatusOK, "/livez", client, "")
	})
}

func TestServerRejectsLargeHeaders(t *testing.T) {
	withAndWithoutTLS(t, func(t *testing.T, s *agenttest.Server, client *tls.Config) {
		for name, text := range map[string]string{
			"long path":    "GET /" + strings.Repeat("x", 64<<10) + " HTTP/1.1\r\nHost: x\r\n\r\n",
			"long header":  "GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 64<<10) + "\r\n\r\n",
			"many headers": "GET /metrics HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("X: x\r\n", 16<<10) + "\r\n",
		} {
			conn := s.Dial(client)
			go func() { _, _ = io.WriteString(conn, text) }() // the server may close the connection before all is sent
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			_ = res.Body.Close()
			if res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
				t.Errorf("%s: %s", name, res.Status)
			}
		}
		if client == nil {
			return
		}
		// HTTP/2 sends headers in frames of their own.
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+s.Address()+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X", strings.Repeat("x", 64<<10))
		res, err := (&http.Transport{TLSClientConfig: client, ForceAttemptHTTP2: true}).RoundTrip(req)
		if err == nil {
			_ = res.Body.Close()
			if res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
				t.Errorf("HTTP/2: %s", res.Status)
			}
		}
	})
}

// Paths never reach a file system. An unclean path is not found, or redirected to its clean form.
func TestServerPaths(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	for path, want := range map[string]int{
		"/metrics":               http.StatusOK,
		"//":                     http.StatusTemporaryRedirect,
		"//metrics":              http.StatusTemporaryRedirect,
		"///metrics":             http.StatusTemporaryRedirect,
		"/./metrics":             http.StatusTemporaryRedirect,
		"/x/../metrics":          http.StatusTemporaryRedirect,
		"/../metrics":            http.StatusTemporaryRedirect,
		"/../../../etc/passwd":   http.StatusTemporaryRedirect,
		"/metrics/":              http.StatusNotFound,
		"/metrics/x":             http.StatusNotFound,
		"/%2e%2e/metrics":        http.StatusNotFound,
		"/%2e%2e%2fetc%2fpasswd": http.StatusNotFound,
		"/%2fmetrics":            http.StatusNotFound,
		"/..%5c..%5cmetrics":     http.StatusNotFound,
		"/metrics%00":            http.StatusNotFound,
		"/metrics%0d%0aX:%20x":   http.StatusNotFound,
		"/Metrics":               http.StatusNotFound,
		"/debug/pprof/":          http.StatusNotFound,
		"/api/v1/":               http.StatusNotFound,
		"/%zz":                   http.StatusBadRequest,
		"metrics":                http.StatusBadRequest,
		"http://x/metrics":       http.StatusOK,
		"/metrics?x=/../y":       http.StatusOK,
		"/metrics#x":             http.StatusNotFound,
	} {
		code, header := s.Send("GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if code != want {
			t.Errorf("%s: %d, want %d", path, code, want)
		}
		if to := header.Get("Location"); to != "" && (!strings.HasPrefix(to, "/") || strings.HasPrefix(to, "//")) {
			t.Errorf("%s redirects to %q", path, to)
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"} {
		if code, _ := s.Send(method + " /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"); code != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, code)
		}
	}
	if errs := s.Logs.FilterLevelExact(zapcore.ErrorLevel).All(); len(errs) > 0 {
		t.Errorf("panic: %v", errs)
	}
}

func TestServerServesBesideIdleConnections(t *testing.T) {
	withAndWithoutTLS(t, func(t *testing.T, s *agenttest.Server, client *tls.Config) {
		for range 150 {
			s.Dial(client)
		}
		start := time.Now()
		for _, path := range []string{web.LivezPath, "/metrics"} {
			s.MustGet(http.StatusOK, path, client, "")
		}
		if took := time.Since(start); took > 5*time.Second { // then the server closes the first of them
			t.Errorf("two requests took %v", took)
		}
	})
}

// A new connection takes the place of the one that is idle for the longest time, also before its TLS handshake or its
// header is complete.
func TestServerDropsLongestIdle(t *testing.T) {
	withAndWithoutTLS(t, func(t *testing.T, s *agenttest.Server, client *tls.Config) {
		incomplete, noHandshake := s.Dial(client), s.Dial(nil)
		if _, err := io.WriteString(incomplete, "GET /metrics HTTP/1.1\r\nHost: x\r\n"); err != nil {
			t.Fatal(err)
		}
		// A client of net/http may open another connection although the server has kept the first.
		scraper := s.Dial(client)
		responses := bufio.NewReader(scraper)
		scrape := func() error {
			if _, err := io.WriteString(scraper, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				return err
			}
			res, err := http.ReadResponse(responses, nil)
			if err != nil {
				return err
			}
			_, err = io.Copy(io.Discard, res.Body)
			return errors.Join(err, res.Body.Close())
		}
		if err := scrape(); err != nil {
			t.Fatal(err)
		}
		for range web.MaxConnections - 3 {
			s.Dial(nil)
		}
		if err := scrape(); err != nil {
			t.Error("a connection is dropped below the limit:", err)
		}
		for range 2 {
			s.Dial(nil)
		}
		s.Eventually("two connections are dropped", func() error {
			if n := s.Dropped.Load(); n != 2 {
				return fmt.Errorf("%d are", n)
			}
			return nil
		})
		awaitClose(t, incomplete)
		awaitClose(t, noHandshake)
		s.MustGet(http.StatusOK, web.LivezPath, client, "")
		if err := scrape(); err != nil {
			t.Errorf("the connection that was used last is dropped, as one of %d: %v", s.Dropped.Load(), err)
		}
	})
}

// An HTTP/2 connection has few concurrent requests, so that the limit of connections is one of requests too.
func TestServerLimitsStreams(t *testing.T) {
	arrived, finish := make(chan string), make(chan struct{})
	s := agenttest.Serve(t, agenttest.TLSConfig, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		arrived <- r.RemoteAddr
		<-finish
	}), func() bool { return true })
	defer close(finish)
	client := http.Client{Transport: &http.Transport{TLSClientConfig: s.CA.Client(), ForceAttemptHTTP2: true}}
	get := func() {
		res, err := client.Get("https://" + s.Address())
		if err == nil {
			_ = res.Body.Close()
		}
	}
	connections := make(map[string]int)
	for range 3 * web.MaxStreams {
		go get()
		connections[<-arrived]++
	}
	for address, n := range connections {
		if n > web.MaxStreams {
			t.Errorf("%d requests on the connection from %s", n, address)
		}
	}
}

// A client that opens connections without end takes them from itself, not from a client with another address.
func TestServerKeepsConnectionsOfOtherClients(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	other, err := dialer.DialContext(t.Context(), "tcp", s.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Close() }()
	for range web.MaxConnections + 20 {
		s.Dial(nil)
	}
	s.Eventually("connections are dropped", func() error {
		if n := s.Dropped.Load(); n < 21 {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
	if _, err := io.WriteString(other, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(other), nil)
	if err != nil {
		t.Fatal("the connection of another client is dropped: ", err)
	}
	_ = res.Body.Close()
}

// A connection that has ended does not count, however it ended.
func TestServerForgetsEndedConnections(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, config, scheme, path string
		http2, refuse              bool
	}{
		{name: "served", scheme: "http"},
		{name: "aborted", scheme: "http", path: "/abort"},
		{name: "HTTP/1 with TLS", config: agenttest.TLSConfig, scheme: "https"},
		{name: "HTTP/2", config: agenttest.TLSConfig, scheme: "https", http2: true},
		{name: "HTTP/2 aborted", config: agenttest.TLSConfig, scheme: "https", path: "/abort", http2: true},
		{name: "TLS refused by the client", config: agenttest.TLSConfig, scheme: "https", refuse: true},
		{name: "no TLS", config: agenttest.TLSConfig, scheme: "http"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := agenttest.Serve(t, test.config, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/abort" {
					panic(http.ErrAbortHandler)
				}
				_, _ = io.WriteString(w, r.Proto)
			}), func() bool { return true })
			transport := &http.Transport{TLSClientConfig: s.CA.Client(), ForceAttemptHTTP2: test.http2, DisableKeepAlives: true}
			if test.refuse {
				transport.TLSClientConfig = &tls.Config{}
			}
			served := 0
			for range web.MaxConnections + 20 {
				res, err := (&http.Client{Transport: transport}).Get(test.scheme + "://" + s.Address() + test.path)
				if err == nil {
					if (res.ProtoMajor == 2) != test.http2 {
						t.Fatalf("protocol %s", res.Proto)
					}
					_, _ = io.Copy(io.Discard, res.Body)
					_ = res.Body.Close()
					served++
				}
			}
			if failed := test.path != "" || test.refuse; failed != (served == 0) {
				t.Errorf("%d requests are served", served)
			}
			if n := s.Dropped.Load(); n > 0 {
				t.Errorf("%d connections are dropped, though each ends before the next one starts", n)
			}
		})
	}
}
