package unixsock

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
)

// bytesConn is a connection whose client has sent everything and then reads the responses.
type bytesConn struct {
	net.Conn
	in    *bytes.Reader
	out   bytes.Buffer
	close func()
}

func (c *bytesConn) Read(b []byte) (int, error)       { return c.in.Read(b) }
func (c *bytesConn) Write(b []byte) (int, error)      { return c.out.Write(b) }
func (c *bytesConn) Close() error                     { c.close(); return nil }
func (c *bytesConn) RemoteAddr() net.Addr             { return &net.UnixAddr{} }
func (c *bytesConn) LocalAddr() net.Addr              { return &net.UnixAddr{} }
func (c *bytesConn) SetDeadline(time.Time) error      { return nil }
func (c *bytesConn) SetReadDeadline(time.Time) error  { return nil }
func (c *bytesConn) SetWriteDeadline(time.Time) error { return nil }

// FuzzServe sends any bytes: the server has at most one request of them, and sends at most one response, which is whole.
func FuzzServe(f *testing.F) {
	for _, text := range []string{
		"", "\n", "GET /greeting HTTP/1.1\r\nHost: a\r\n\r\n", "POST /greeting HTTP/1.0\n\n{}", "\x00\xff\xfe\n",
		`{"clear":{"device":"GPU-1"}}` + "\n",
		"POST /greeting HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{\"name\":\"no\"}", "HEAD /greeting HTTP/1.1\r\nHost: a\r\n\r\n",
		"POST /greeting HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"POST /greeting HTTP/1.1\r\nHost: a\r\nContent-Length: " + strconv.Itoa(MaxBody+1) + "\r\n\r\n" + strings.Repeat(" ", MaxBody+1),
		"POST /greeting HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
		"GET /greeting HTTP/1.1\r\nHost: a\r\nOrigin: b\r\n\r\n",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		requests := 0
		routes := Routes{"GET /greeting": func(context.Context, []byte) (any, error) { requests++; return greeting{}, nil }}
		post := testRoutes()["POST /greeting"]
		routes["POST /greeting"] = func(ctx context.Context, body []byte) (any, error) {
			requests++
			if len(body) > MaxBody {
				t.Errorf("body of %d bytes", len(body))
			}
			return post(ctx, body)
		}
		closed := make(chan struct{})
		conn := &bytesConn{in: bytes.NewReader(text), close: sync.OnceFunc(func() { close(closed) })}
		s, p := newServer(t.Context(), zap.NewNop(), routes), make(pipe, 1)
		p <- conn
		close(p)
		_ = s.http.Serve(&limitedListener{p, nil, s.slots})
		<-closed
		s.close()
		if requests > 1 {
			t.Fatalf("%d requests", requests)
		}
		if bytes.HasPrefix(text, []byte("HEAD ")) {
			return // net/http sends no body, but for some of its own errors
		}
		out := bufio.NewReader(&conn.out)
		if _, err := out.Peek(1); err != nil {
			if requests > 0 {
				t.Error("no response")
			}
			return
		}
		for code := http.StatusContinue; code < http.StatusOK; {
			resp, err := http.ReadResponse(out, nil)
			if err != nil {
				t.Fatal(err)
			}
			code = resp.StatusCode
			if _, err = io.Copy(io.Discard, resp.Body); err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
		}
		if rest, _ := io.ReadAll(out); len(rest) > 0 {
			t.Errorf("after the response: %q", rest)
		}
	})
}
