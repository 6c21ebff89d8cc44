package unixsock

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"
	"go.uber.org/zap/zaptest/observer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type greeting struct {
	Name string `json:"name"`
}

// testRoutes greet: GET /greeting greets nobody, POST /greeting greets a name, and refuses "no" and "busy".
func testRoutes() Routes {
	return Routes{
		"GET /greeting": func(context.Context, []byte) (any, error) { return greeting{"nobody"}, nil },
		"POST /greeting": JSON(func(_ context.Context, g greeting) (greeting, error) {
			switch g.Name {
			case "no":
				return g, errors.New("because\nof that")
			case "busy":
				return g, fmt.Errorf("greeting: %w", WithStatus(http.StatusConflict, errors.New("another one is greeted")))
			}
			return g, nil
		}),
		"POST /silence": func(context.Context, []byte) (any, error) { return nil, nil },
	}
}

// startServer runs Serve on path and returns a function that ends it, which the cleanup calls too.
func startServer(t *testing.T, path string, log *zap.Logger, routes Routes) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, path, log, routes) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

// awaitServer waits until a server answers.
func awaitServer(t *testing.T, path string) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if err := Call(t.Context(), path, "GET /", nil, nil); errors.As(err, new(*StatusError)) {
			return
		}
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("no server")
		}
	}
}

func code(err error) int {
	if e, ok := errors.AsType[*StatusError](err); ok {
		return e.Code
	}
	return 0
}

func TestCall(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.sock")
	stop := startServer(t, path, zap.NewNop(), testRoutes())
	awaitServer(t, path)
	expected := "expected GET /greeting, POST /greeting, POST /silence, got "
	const notObject = "request body: json: cannot unmarshal array into Go value of type unixsock.greeting"
	longest := greeting{strings.Repeat("x", MaxBody-len(`{"name":""}`))}
	for name, test := range map[string]struct {
		route string
		body  any
		want  string // the name in the response
		code  int    // of the error
		err   string
	}{
		"GET":            {"GET /greeting", nil, "nobody", 0, ""},
		"POST":           {"POST /greeting", greeting{"Ada"}, "Ada", 0, ""},
		"no body":        {"POST /greeting", nil, "", 0, ""},
		"no content":     {"POST /silence", nil, "before", 0, ""},
		"error":          {"POST /greeting", greeting{"no"}, "before", 500, "because; of that"},
		"refusal":        {"POST /greeting", greeting{"busy"}, "before", 409, "greeting: another one is greeted"},
		"unknown path":   {"GET /greetings", nil, "before", 404, expected + `"GET /greetings"`},
		"unknown method": {"DELETE /greeting", nil, "before", 404, expected + `"DELETE /greeting"`},
		"longest body":   {"POST /greeting", longest, longest.Name, 0, ""},
		"too long body":  {"POST /greeting", greeting{longest.Name + "x"}, "before", 413, "request body too long: limit is 4096 bytes"},
		"unknown field":  {"POST /greeting", map[string]int{"age": 3}, "before", 400, `request body: json: unknown field "age"`},
		"not an object":  {"POST /greeting", []int{}, "before", 400, notObject},
	} {
		g := greeting{"before"}
		err := Call(t.Context(), path, test.route, test.body, &g)
		if g.Name != test.want || code(err) != test.code || (err == nil) != (test.err == "") ||
			err != nil && err.Error() != test.err {
			t.Errorf("%s: %.40q, code %d, %v", name, g.Name, code(err), err)
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if names := listing(t, path); len(names) != 0 {
		t.Errorf("files left: %v", names)
	}
	if err := Call(t.Context(), path, "GET /greeting", nil, nil); !errors.Is(err, fs.ErrNotExist) || code(err) != 0 ||
		!strings.HasPrefix(err.Error(), "dial unix "+path+": ") {
		t.Errorf("without a server: %v", err)
	}
}

// The server at a path may be another one, or hang.
func TestCallOfAnotherServer(t *testing.T) {
	for name, test := range map[string]struct {
		response string
		err      string // part of the error
	}{
		"mail server":         {"220 mail\r\n", "malformed HTTP"},
		"another HTTP server": {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "200 OK"},
		"another result":      {"HTTP/1.1 200 OK\r\nServer: " + product + "\r\nContent-Length: 2\r\n\r\n[]", "cannot unmarshal array"},
		"part of a response":  {"HTTP/1.1 200 OK\r\nServer: " + product + "\r\nContent-Length: 2\r\n\r\n{", "EOF"},
		"nothing":             {"", "EOF"},
	} {
		l := listenAt(t, filepath.Join(t.TempDir(), "other"))
		path := l.Addr().String()
		go func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			defer func() { _ = conn.Close() }()
			_, _ = http.ReadRequest(bufio.NewReader(conn))
			_, _ = io.WriteString(conn, test.response)
		}()
		if err := Call(t.Context(), path, "GET /", nil, new(greeting)); !errors.Is(err, ErrNoResponse) ||
			!strings.HasPrefix(err.Error(), path+": ") || !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: %v, want %v: %s", name, err, ErrNoResponse, test.err)
		}
	}
	l := listenAt(t, filepath.Join(t.TempDir(), "silent"))
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	accepted := make(chan net.Conn)
	go func() {
		conn, _ := l.Accept()
		cancel(cause)
		accepted <- conn
	}()
	for _, when := range []string{"silent server", "ended context"} {
		if err := Call(ctx, l.Addr().String(), "GET /", nil, nil); !errors.Is(err, ErrNoResponse) || !errors.Is(err, cause) {
			t.Errorf("%s: %v", when, err)
		}
	}
	_ = (<-accepted).Close()
}

// send sends text on a new connection, and returns the response, which ends the connection.
func send(t *testing.T, path, text string) (code int, body string) {
	t.Helper()
	conn := dial(t, path)
	_, _ = io.WriteString(conn, text) // the server may respond before it has read all
	return response(t, conn)
}

func response(t *testing.T, conn net.Conn) (code int, body string) {
	t.Helper()
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Error(err)
		return 0, ""
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.ContentLength < 0 && resp.Header.Get("Server") == product {
		t.Errorf("response %d has no length; it may not be whole if Serve ends", resp.StatusCode)
	}
	text, err := io.ReadAll(resp.Body)
	if err == nil {
		var rest []byte
		if rest, err = io.ReadAll(in); len(rest) > 0 {
			t.Errorf("after the response: %q", rest)
		}
	}
	if err != nil && !errors.Is(err, syscall.ECONNRESET) { // as the server has not read all
		t.Errorf("response %d %q does not end: %v", resp.StatusCode, text, err)
	}
	return resp.StatusCode, string(text)
}

// Clients are more than Call: curl, and what speaks no HTTP.
func TestServeOtherClients(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.sock")
	startServer(t, path, zap.NewNop(), testRoutes())
	awaitServer(t, path)
	post := func(header, body string) string {
		return "POST /greeting HTTP/1.1\r\nHost: localhost\r\n" + header + "\r\n" + body
	}
	ada := `{"name":"Ada"}`
	chunk := "800\r\n" + strings.Repeat(" ", 0x800) + "\r\n"
	for name, test := range map[string]struct {
		text string
		code int
		body string // part of the response's
	}{
		"curl":            {post("Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 14\r\n", ada), 200, ada + "\n"},
		"chunks":          {post("Transfer-Encoding: chunked\r\n", "8\r\n"+`{"name":`+"\r\n6\r\n"+`"Ada"}`+"\r\n0\r\n\r\n"), 200, "Ada"},
		"many chunks":     {post("Transfer-Encoding: chunked\r\n", strings.Repeat(chunk, 3)+"0\r\n\r\n"), 413, "limit is 4096"},
		"two objects":     {post("Content-Length: 4\r\n", `{}{}`), 400, "expected one JSON object"},
		"web page":        {post("Origin: http://example.test\r\nContent-Length: 2\r\n", `{}`), 403, "Origin"},
		"file":            {post("Origin: null\r\nContent-Length: 2\r\n", `{}`), 403, "Origin"},
		"web page's GET":  {"GET /greeting HTTP/1.1\r\nHost: localhost\r\nOrigin:\r\n\r\n", 403, "Origin"},
		"web page's asks": {"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nOrigin: http://example.test\r\n\r\n", 403, "Origin"},
		"two requests":    {strings.Repeat(post("Connection: keep-alive\r\nContent-Length: 2\r\n", `{}`), 2), 200, `{"name":""}`},
		"no host":         {"GET /greeting HTTP/1.1\r\n\r\n", 400, ""},
		"no host, 1.0":    {"GET /greeting HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", 200, "nobody"},
		"HTTP/2":          {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404, ""},
		"long header":     {"GET /greeting HTTP/1.1\r\nHost: localhost\r\nX: " + strings.Repeat("x", 2*maxHeader+10), 431, ""},
		"line of JSON":    {`{"clear":{"device":"GPU-1"}}` + "\n", 400, ""},
		"noise":           {"\x16\x03\x01\x00\n\n", 400, ""},
	} {
		if code, body := send(t, path, test.text); code != test.code || !strings.Contains(body, test.body) {
			t.Errorf("%s: %d %q, want %d %q", name, code, body, test.code, test.body)
		}
	}
}

// A body that does not end is refused when it is too long.
func TestServeRefusesEndlessBody(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.sock")
	startServer(t, path, zap.NewNop(), testRoutes())
	awaitServer(t, path)
	conn := dial(t, path)
	_, _ = io.WriteString(conn, "POST /greeting HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1001\r\n"+
		strings.Repeat(" ", MaxBody+1)+"\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _ = resp.Body.Close(); resp.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("%s", resp.Status)
	}
}

func TestServeLogsAnErrorOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		core, logs := observer.New(zap.InfoLevel)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		if err := Serve(ctx, path, zap.New(core), nil); err != nil || time.Since(start) != time.Hour {
			t.Errorf("Serve returned %v after %v; want nil after an hour", err, time.Since(start))
		}
		if logs.Len() != 1 || logs.All()[0].Level != zap.ErrorLevel || logs.All()[0].ContextMap()["socket"] != path {
			t.Errorf("logged %v; want one error with the path", logs.All())
		}
	})
}

func TestServeRetries(t *testing.T) {
	t.Parallel() // waits for the backoff
	path := filepath.Join(t.TempDir(), "c.sock")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	failed := make(chan struct{}, 100)
	startServer(t, path, zaptest.NewLogger(t, zaptest.WrapOptions(zap.Hooks(func(e zapcore.Entry) error {
		if e.Level == zap.ErrorLevel {
			failed <- struct{}{}
		}
		return nil
	}))), nil)
	<-failed
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	awaitServer(t, path)
}

// The pauses start anew once the server has listened.
func TestServeRetriesSoonAfterSuccess(t *testing.T) {
	t.Parallel() // waits for the backoff
	path := filepath.Join(t.TempDir(), "c.sock")
	block := func() {
		t.Helper()
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	unblock := func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	failed := make(chan struct{}, 100)
	block()
	startServer(t, path, zaptest.NewLogger(t, zaptest.WrapOptions(zap.Hooks(func(e zapcore.Entry) error {
		if e.Level == zap.ErrorLevel {
			failed <- struct{}{}
		}
		return nil
	}))), nil)
	<-failed
	<-time.After(minBackoff + 100*time.Millisecond) // the second attempt fails too
	unblock()
	awaitServer(t, path)
	unblock() // the socket
	block()
	<-failed
	begun := time.Now()
	unblock()
	awaitServer(t, path)
	if took := time.Since(begun); took >= 2*minBackoff { // the third pause would last at least as long
		t.Errorf("listened again after %v, want a short pause", took)
	}
}

// pipe is a listener that accepts one connection.
type pipe chan net.Conn

func (p pipe) Accept() (net.Conn, error) {
	if conn, ok := <-p; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}
func (p pipe) Close() error   { return nil }
func (p pipe) Addr() net.Addr { return &net.UnixAddr{} }

// A connection above the limit waits for another one to end. Each ends with its response.
func TestServeLimitsConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var answering atomic.Int32
		end := make(chan struct{})
		s, p := newServer(t.Context(), zap.NewNop(), Routes{"GET /": func(context.Context, []byte) (any, error) {
			answering.Add(1)
			<-end
			return nil, nil
		}}), make(pipe)
		go func() { _ = s.http.Serve(&limitedListener{p, nil, s.slots}) }()
		idle, conn := net.Pipe()
		p <- conn
		var clients sync.WaitGroup
		for range 2 * MaxConnections {
			clients.Go(func() {
				client, conn := net.Pipe()
				p <- conn
				_, _ = io.WriteString(client, "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n")
				if code, body := response(t, client); code != http.StatusNoContent {
					t.Errorf("%d, %q", code, body)
				}
				_ = client.Close()
			})
		}
		for _, want := range []int32{MaxConnections - 1, MaxConnections} {
			if synctest.Wait(); answering.Load() != want {
				t.Errorf("%d requests are answered, want %d", answering.Load(), want)
			}
			_ = idle.Close()
		}
		close(end)
		clients.Wait()
		close(p)
		s.close()
	})
}

// servePipe serves one connection.
func servePipe(t *testing.T, s *server) (client net.Conn) {
	client, conn := net.Pipe()
	p := make(pipe, 1)
	p <- conn
	close(p)
	_ = s.http.Serve(&limitedListener{p, nil, s.slots})
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// Serve ends although each connection is taken.
func TestServeEndsAtLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, p, ended := newServer(t.Context(), zap.NewNop(), nil), make(pipe), make(chan struct{})
		returned := make(chan error, 1)
		go func() { returned <- s.http.Serve(&limitedListener{p, ended, s.slots}) }()
		for range MaxConnections {
			client, conn := net.Pipe()
			defer func() { _ = client.Close() }()
			p <- conn
		}
		start := time.Now()
		close(ended)
		if err := <-returned; !errors.Is(err, net.ErrClosed) || time.Since(start) > 0 {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		s.close()
	})
}

// A client has a minute to send its request, however it does.
func TestServeRequestTimeout(t *testing.T) {
	const header = "POST /greeting HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
	for name, parts := range map[string][]string{
		"nothing": nil, "half a header": {header[:20]}, "header": {header}, "bytes": strings.SplitAfter(header, ""),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start, client := time.Now(), servePipe(t, newServer(t.Context(), zap.NewNop(), testRoutes()))
				var writer sync.WaitGroup
				writer.Go(func() {
					for _, part := range parts {
						if _, err := io.WriteString(client, part); err != nil {
							return
						}
						<-time.After(time.Second)
					}
				})
				text, _ := io.ReadAll(client)
				if took := time.Since(start); took != requestTimeout || strings.Contains(string(text), "200 OK") {
					t.Errorf("%q after %v, want the end after %v", text, took, requestTimeout)
				}
				_ = client.Close()
				writer.Wait()
			})
		})
	}
}

// The time to answer is not limited.
func TestServeLongAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := servePipe(t, newServer(t.Context(), zap.NewNop(), Routes{"GET /slow": func(ctx context.Context, _ []byte) (any, error) {
			select {
			case <-time.After(time.Hour):
			case <-ctx.Done():
			}
			return "done", ctx.Err()
		}}))
		_, _ = io.WriteString(client, "GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
		if code, body := response(t, client); code != http.StatusOK || body != "\"done\"\n" {
			t.Errorf("%d, %q", code, body)
		}
		_ = client.Close()
	})
}

// A client has ten seconds to read the response, for which Serve waits at its end.
func TestServeResponseNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t.Context(), zap.NewNop(), testRoutes())
		client := servePipe(t, s)
		_, _ = io.WriteString(client, "GET /greeting HTTP/1.1\r\nHost: localhost\r\n\r\n")
		synctest.Wait()
		if s.answering.TryLock() {
			t.Error("Serve could end before the response is sent")
		}
		<-time.After(writeTimeout)
		synctest.Wait()
		if text, err := io.ReadAll(client); len(text) > 0 || err != nil {
			t.Errorf("%q, %v; want the end", text, err)
		}
	})
}

// What a client has requested goes on when the client disconnects.
func TestServeGoesOnWithoutClient(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.sock")
	begun, gone, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	startServer(t, path, zap.NewNop(), Routes{"POST /work": func(ctx context.Context, _ []byte) (any, error) {
		close(begun)
		<-gone
		ended <- ctx.Err()
		return nil, nil
	}})
	awaitServer(t, path)
	conn := dial(t, path)
	_, _ = io.WriteString(conn, "POST /work HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
	<-begun
	_ = conn.Close()
	awaitServer(t, path) // it has had time to notice
	close(gone)
	if err := <-ended; err != nil {
		t.Errorf("the context of the request: %v", err)
	}
}

// When Serve ends, the request that is being answered gets its answer, and others do not delay the end.
func TestServeAnswersAtEnd(t *testing.T) {
	for name, test := range map[string]struct {
		result any
		err    error
		code   int
		body   string
	}{
		"result": {"done", nil, 200, "\"done\"\n"},
		"error":  {nil, errors.New("not done"), 503, "shutting down: not done\n"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "c.sock")
			begun, end := make(chan struct{}), make(chan struct{})
			stop := startServer(t, path, zap.NewNop(), Routes{"POST /work": func(ctx context.Context, _ []byte) (any, error) {
				close(begun)
				<-ctx.Done()
				<-end
				return test.result, test.err
			}})
			awaitServer(t, path)
			idle, slow, conn := dial(t, path), dial(t, path), dial(t, path)
			const request = "POST /work HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
			_, _ = io.WriteString(slow, request)
			_, _ = io.WriteString(conn, request+"{}")
			<-begun
			stopped := make(chan error)
			go func() { stopped <- stop() }()
			for len(listing(t, path)) > 0 {
				<-time.After(time.Millisecond)
			}
			select {
			case err := <-stopped:
				t.Errorf("Serve ended before its last answer: %v", err)
			default:
			}
			close(end)
			if code, body := response(t, conn); code != test.code || body != test.body {
				t.Errorf("%d %q, want %d %q", code, body, test.code, test.body)
			}
			if err := <-stopped; err != nil {
				t.Error(err)
			}
			for _, conn := range []net.Conn{idle, slow} {
				if text, err := io.ReadAll(conn); len(text) > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("connection without a request: %q, %v", text, err)
				}
			}
		})
	}
}

// A request that arrives during the end is refused.
func TestServeRefusesAtEnd(t *testing.T) {
	s := newServer(t.Context(), zap.NewNop(), testRoutes())
	s.answering.Lock()
	client := servePipe(t, s)
	_, _ = io.WriteString(client, "GET /greeting HTTP/1.1\r\nHost: localhost\r\n\r\n")
	if code, body := response(t, client); code != http.StatusServiceUnavailable || body != "shutting down\n" {
		t.Errorf("%d %q", code, body)
	}
}

// fullTable is a listener of a process that has no file descriptor left.
type fullTable struct{ pipe }

func (fullTable) Accept() (net.Conn, error) {
	return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
}

// Serve retries what net/http would retry for ever.
func TestServeReturnsTemporaryErrors(t *testing.T) {
	s := newServer(t.Context(), zap.NewNop(), nil)
	for range 2 * MaxConnections { // none keeps a slot
		if err := s.http.Serve(&limitedListener{fullTable{}, nil, s.slots}); !errors.Is(err, syscall.EMFILE) {
			t.Error(err)
		}
	}
}

// A panic of a route ends the process, as any other does.
func TestServePanics(t *testing.T) {
	const socket = "TEST_PANIC_SOCKET"
	if path := os.Getenv(socket); path != "" {
		startServer(t, path, zap.NewNop(), Routes{"GET /": func(context.Context, []byte) (any, error) { panic("planted") }})
		for Call(t.Context(), path, "GET /", nil, nil) != nil {
			<-time.After(time.Millisecond)
		}
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestServePanics$", "-test.timeout=20s")
	cmd.Env = append(os.Environ(), socket+"="+filepath.Join(t.TempDir(), "c.sock"))
	if out, err := cmd.CombinedOutput(); err == nil || !bytes.Contains(out, []byte("panic: planted")) {
		t.Errorf("%v: %s", err, out)
	}
}

// A socket that somebody removed is served again, and the connections that it accepted continue.
func TestServeAfterLoss(t *testing.T) {
	t.Parallel() // polls
	path := filepath.Join(t.TempDir(), "c.sock")
	startServer(t, path, zap.NewNop(), testRoutes())
	awaitServer(t, path)
	conn := dial(t, path)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	awaitServer(t, path)
	_, _ = io.WriteString(conn, "GET /greeting HTTP/1.1\r\nHost: localhost\r\n\r\n")
	if code, body := response(t, conn); code != http.StatusOK {
		t.Errorf("the earlier connection: %d %q", code, body)
	}
}
