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

// inBoth runs a test with plain HTTP and with TLS: the limits are the same.
func inBoth(t *testing.T, test func(t *testing.T, s *agenttest.Server, client *tls.Config)) {
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

// cutOff waits until the server ends a connection.
func cutOff(t *testing.T, conn net.Conn, within time.Duration) {
	t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(within)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("not cut off within %v", within)
	}
}

// Who says nothing, or a little at a time, is cut off.
func TestSlowClients(t *testing.T) {
	const within = web.HeaderTimeout + 10*time.Second
	inBoth(t, func(t *testing.T, s *agenttest.Server, client *tls.Config) {
		silent, halfway, dripping := s.Dial(client), s.Dial(client), s.Dial(client)
		if _, err := io.WriteString(halfway, "GET /metrics HTTP/1.1\r\nHost: x\r\nX-Long"); err != nil {
			t.Fatal(err)
		}
		go func() { // one header line after another, until the server has enough
			_, err := io.WriteString(dripping, "GET /metrics HTTP/1.1\r\nHost: x\r\n")
			for i := 0; err == nil; i++ {
				<-time.After(200 * time.Millisecond)
				_, err = fmt.Fprintf(dripping, "X-%d: x\r\n", i)
			}
		}()
		for _, conn := range []net.Conn{silent, halfway, dripping} {
			cutOff(t, conn, within)
		}
		if client != nil { // and who never begins with TLS
			conn, err := net.Dial("tcp", s.Address())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			cutOff(t, conn, within)
		}
		s.MustGet(http.StatusOK, "/livez", client, "")
	})
}

func TestLargeHeaders(t *testing.T) {
	inBoth(t, func(t *testing.T, s *agenttest.Server, client *tls.Config) {
		for name, text := range map[string]string{
			"a long path":   "GET /" + strings.Repeat("x", 64<<10) + " HTTP/1.1\r\nHost: x\r\n\r\n",
			"a long header": "GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 64<<10) + "\r\n\r\n",
			"many headers":  "GET /metrics HTTP/1.1\r\nHost: x\r\n" + strings.Repeat("X: x\r\n", 16<<10) + "\r\n",
		} {
			conn := s.Dial(client)
			go func() { _, _ = io.WriteString(conn, text) }() // it may be cut off before it is all sent
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
		// HTTP/2 has frames of its own for headers.
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

// A path is looked up among a few, and never in a file system. What is odd is not found, or sent to where its
// clean form would be.
func TestPathTricks(t *testing.T) {
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
		got := s.Send("GET " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
		if got.StatusCode != want {
			t.Errorf("%s: %d, want %d", path, got.StatusCode, want)
		}
		if where := got.Header.Get("Location"); where != "" && (!strings.HasPrefix(where, "/") || strings.HasPrefix(where, "//")) {
			t.Errorf("%s is sent to %q", path, where)
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"} {
		if got := s.Send(method + " /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"); got.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, got.StatusCode)
		}
	}
	if errs := s.Logs.FilterLevelExact(zapcore.ErrorLevel).All(); len(errs) > 0 {
		t.Errorf("it has panicked: %v", errs)
	}
}

// Connections that are open and do nothing cost memory, and nobody else's turn.
func TestIdleConnections(t *testing.T) {
	const many = 150
	inBoth(t, func(t *testing.T, s *agenttest.Server, client *tls.Config) {
		for range many {
			s.Dial(client)
		}
		begin := time.Now()
		for _, path := range []string{web.LivezPath, "/metrics"} {
			s.MustGet(http.StatusOK, path, client, "")
		}
		if took := time.Since(begin); took > web.HeaderTimeout { // when the first of them are cut off
			t.Errorf("two pages took %v", took)
		}
	})
}
