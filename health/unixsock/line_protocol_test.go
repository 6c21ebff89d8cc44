package unixsock

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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

// echo responds with the line, and refuses "no".
func echo(_ context.Context, line string) (any, error) {
	if line == `"no"` {
		return "ignored", errors.New("because\nof that")
	}
	return map[string]string{"line": line}, nil
}

// startServer runs Serve on path and returns a function that ends it, which the cleanup calls too.
func startServer(t *testing.T, path string, log *zap.Logger) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Serve(ctx, path, log, echo) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

// awaitServer calls the server until it responds.
func awaitServer(t *testing.T, path string) string {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if text, err := Call(t.Context(), path, "yes"); err == nil {
			return text
		}
		select {
		case <-tick.C:
		case <-t.Context().Done():
			t.Fatal("no server")
		}
	}
}

func TestCall(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.sock")
	stop := startServer(t, path, zap.NewNop())
	if text, want := awaitServer(t, path), `{"ok":true,"result":{"line":"\"yes\""}}`; text != want {
		t.Errorf("got %s, want %s", text, want)
	}
	if text, err := Call(t.Context(), path, "no"); err == nil || err.Error() != "because; of that" ||
		text != `{"ok":false,"error":"because; of that"}` {
		t.Errorf("refused request: %s, %v", text, err)
	}
	conn := dial(t, path)
	if line, err := exchange(conn); line != `{"ok":true,"result":{"line":"yes"}}` || err != nil {
		t.Errorf("raw line: %s, %v", line, err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if names := listing(t, path); len(names) != 0 {
		t.Errorf("files left: %v", names)
	}
	if _, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection is still open")
	}
	if _, err := Call(t.Context(), path, "yes"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a server: %v", err)
	}
}

func TestCallOfAnotherServer(t *testing.T) {
	l := listenAt(t, filepath.Join(t.TempDir(), "other"))
	path, cause := l.Addr().String(), errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	accepted := make(chan net.Conn)
	go func() {
		conn, _ := l.Accept()
		cancel(cause)
		accepted <- conn
		conn, _ = l.Accept()
		_, _ = io.WriteString(conn, "220 mail\n")
		accepted <- conn
	}()
	if _, err := Call(ctx, path, "yes"); !errors.Is(err, ErrNoResponse) || !errors.Is(err, cause) {
		t.Errorf("silent server: %v", err)
	}
	_ = (<-accepted).Close()
	if text, err := Call(t.Context(), path, "yes"); text != "220 mail" || !errors.Is(err, ErrProtocol) {
		t.Errorf("mail server: %q, %v", text, err)
	}
	_ = (<-accepted).Close()
	if _, err := Call(ctx, path, "yes"); !errors.Is(err, ErrNoResponse) {
		t.Errorf("ended context: %v", err)
	}
}

// exchange sends a line and returns the response, which may arrive although the line was not read.
func exchange(conn net.Conn) (string, error) {
	_, _ = io.WriteString(conn, "yes\n")
	line, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSuffix(line, "\n"), err
}

func TestServeLimits(t *testing.T) {
	t.Parallel() // waits for a slot
	path := filepath.Join(t.TempDir(), "c.sock")
	startServer(t, path, zap.NewNop())
	awaitServer(t, path)

	long := dial(t, path)
	if _, err := io.WriteString(long, strings.Repeat(" ", MaxRequest+10)); err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(long); !strings.Contains(string(text), errTooLong.Error()) ||
		err != nil && !strings.Contains(err.Error(), "reset") {
		t.Errorf("long line: %q, %v; want one refusal and the end", text, err)
	}
	_ = long.Close()

	var conns []net.Conn
	for len(conns) < MaxConnections {
		conn := dial(t, path)
		line, err := exchange(conn)
		switch {
		case err == nil && strings.HasPrefix(line, `{"ok":true`):
			conns = append(conns, conn)
		case len(conns) < MaxConnections-1: // the connection of the long line may still hold the last slot
			t.Fatalf("connection %d: %q, %v", len(conns), line, err)
		}
	}
	if line, err := exchange(dial(t, path)); !strings.Contains(line, errConnections.Error()) {
		t.Errorf("connection above the limit: %q, %v", line, err)
	}
	_ = conns[0].Close()
	awaitServer(t, path) // a slot becomes free
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
		if err := Serve(ctx, path, zap.New(core), echo); err != nil || time.Since(start) != time.Hour {
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
	}))))
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
	}))))
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

func TestServeConnEndsIdleConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		ended := make(chan struct{})
		var lines []string
		go func() {
			defer close(ended)
			serveConn(t.Context(), server, func(_ context.Context, line string) (any, error) {
				lines = append(lines, line)
				return nil, nil
			})
		}()
		start := time.Now()
		<-time.After(IdleTimeout - time.Second)
		if _, err := io.WriteString(client, "whole\n"); err != nil {
			t.Fatal(err)
		}
		if got, err := bufio.NewReader(client).ReadString('\n'); err != nil || got != "{\"ok\":true}\n" {
			t.Errorf("line just before the timeout: %q, %v", got, err)
		}
		// A partial line neither resets the timeout nor is a request.
		if _, err := io.WriteString(client, "half"); err != nil {
			t.Error(err)
		}
		<-ended
		if took := time.Since(start); took != 2*IdleTimeout-time.Second {
			t.Errorf("ended after %v; want %v after the last line", took, IdleTimeout)
		}
		if !slices.Equal(lines, []string{"whole"}) {
			t.Errorf("handled %q, want the complete line only", lines)
		}
		_ = client.Close()
	})
}

// A socket that somebody removed is served again, and the connections that it accepted continue.
func TestServeAfterLoss(t *testing.T) {
	t.Parallel() // polls
	path := filepath.Join(t.TempDir(), "c.sock")
	startServer(t, path, zap.NewNop())
	awaitServer(t, path)
	conn := dial(t, path)
	if _, err := exchange(conn); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	awaitServer(t, path)
	if line, err := exchange(conn); err != nil {
		t.Errorf("the earlier connection: %q, %v", line, err)
	}
}
