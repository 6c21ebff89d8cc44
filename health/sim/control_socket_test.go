package sim

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health"
	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

const (
	msgOpen   = "control socket is open"
	msgClosed = "control socket is not open; trying again"
)

// running is a Source whose Run has been started.
type running struct {
	*Source
	socket string
	logged chan string // msgOpen and msgClosed
	stop   func() error
}

// run starts a source with a control socket. Its end is awaited by the test's cleanup, or by stop.
func run(t *testing.T, socket string) *running {
	t.Helper()
	r := &running{socket: socket, logged: make(chan string, 100)}
	log := zaptest.NewLogger(t, zaptest.Level(zapcore.InfoLevel), zaptest.WrapOptions(zap.Hooks(func(e zapcore.Entry) error {
		if e.Message == msgOpen || e.Message == msgClosed {
			r.logged <- e.Message
		}
		return nil
	})))
	cfg := DefaultConfig()
	cfg.Control = socket
	src, err := New(cfg, log)
	if err != nil {
		t.Fatal(err)
	}
	r.Source = src
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- src.Run(ctx) }()
	r.stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	t.Cleanup(func() { _ = r.stop() })
	return r
}

// await waits until a message has been logged.
func (r *running) await(t *testing.T, message string) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case got := <-r.logged:
			if got == message {
				return
			}
		case <-deadline:
			t.Fatalf("%q was not logged", message)
		}
	}
}

func send(t *testing.T, r *running, s string) (string, error) {
	t.Helper()
	return Send(t.Context(), r.socket, ev(t, 0, s))
}

// talk sends lines and returns as many answers.
func talk(t *testing.T, conn io.ReadWriter, lines ...string) []string {
	t.Helper()
	var (
		out []string
		in  = bufio.NewReader(conn)
	)
	for _, line := range lines {
		if _, err := io.WriteString(conn, line+"\n"); err != nil {
			t.Fatalf("writing %q: %v", line, err)
		}
		answer, err := in.ReadString('\n')
		if err != nil {
			t.Fatalf("no answer to %q: %v", line, err)
		}
		out = append(out, strings.TrimSuffix(answer, "\n"))
	}
	return out
}

func dial(t *testing.T, socket string) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestControl(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "control.sock"))
	r.await(t, msgOpen)
	ses := open(t, r.Source)
	before := time.Now()
	if reply, err := send(t, r, `{gpu: 3, xid: 79, lost: true}`); reply != `{"ok":true}` || err != nil {
		t.Errorf("Send gave %s, %v", reply, err)
	}
	<-ses.Wake()
	s := sampleOf(t, poll(t, ses), 3)
	if s.Presence != health.Lost || len(s.XIDs) != 1 || s.XIDs[0].Code != 79 {
		t.Errorf("GPU 3 is %v with XIDs %v; want lost with XID 79", s.Presence, s.XIDs)
	} else if at := s.XIDs[0].At; at.Before(before) || at.After(time.Now()) {
		t.Errorf("the XID is of %v; want now", at)
	}

	// A refusal says the same to a person at the shell and to Send's caller.
	reply, err := send(t, r, `{gpu: 9, xid: 79}`)
	const want = `gpu: 9 is not a GPU of profile h100-8, which has 0 to 7`
	if reply != `{"ok":false,"error":"`+want+`"}` || err == nil || err.Error() != want {
		t.Errorf("Send gave %s, %v; want %s", reply, err, want)
	}
}

// Who runs the agent on a fresh machine has no directory for the socket yet.
func TestControlMakesItsDirectory(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "run", "control.sock"))
	if got := <-r.logged; got != msgOpen {
		t.Errorf("%q was logged first", got)
	}
}

func TestControlConversation(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "control.sock"))
	r.await(t, msgOpen)
	got := talk(t, dial(t, r.socket),
		`{"gpu":3,"xid":79}`,
		`   `+"\n"+`{gpu: 3, lost: true}`, // an empty line is no event
		`{gpu: 3, xdi: 79}`,
		`{gpu: 8, xid: 1000}`,
		`{at: 5s, gpu: 3, xid: 79}`,
		`hello`,
		`{source: down}`,
	)
	want := []string{
		`{"ok":true}`,
		`{"ok":true}`,
		`{"ok":false,"error":"\"xdi\": is not known; use gpu with xid, lost, stale, recoveryAction, rowRemapPending, rowRemapFailed, doubleBitErrors, retiredPages, clocksSlowed, temperature, incident, severity, mig, times, source"}`,
		`{"ok":false,"error":"xid: 1000 is not an XID; use 1 to 999"}`,
		`{"ok":false,"error":"at: belongs into a scenario; an event that is sent happens at once"}`,
		`{"ok":false,"error":"\"hello\" is not an event; write it as {gpu: 3, xid: 79}"}`,
		`{"ok":true}`,
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("answer %d is %s; want %s", i, got[i], want[i])
		}
	}
	if _, err := r.Open(t.Context()); !errors.Is(err, errDown) {
		t.Errorf("Open: %v; want %v", err, errDown)
	}

	// `printf '{source: up}' | nc -U` sends no line's end.
	conn := dial(t, r.socket)
	_, _ = io.WriteString(conn, `{source: up}`)
	if c, ok := conn.(*net.UnixConn); !ok || c.CloseWrite() != nil {
		t.Fatal("cannot end the writing")
	}
	if answer, err := io.ReadAll(conn); string(answer) != "{\"ok\":true}\n" {
		t.Errorf("a line without an end gets %q, %v", answer, err)
	}
	open(t, r.Source)
}

func TestControlManyAtOnce(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "control.sock"))
	r.await(t, msgOpen)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 20 {
				if _, err := Send(t.Context(), r.socket, ev(t, 0, fmt.Sprintf(`{gpu: %d, xid: %d}`, i, n+1))); err != nil {
					t.Errorf("GPU %d, XID %d: %v", i, n+1, err)
				}
				// A refused connection (all 16 taken) would be an error too: eight can never be too many.
			}
		})
	}
	wg.Wait()
	reading := poll(t, open(t, r.Source))
	for i := range 8 {
		s := sampleOf(t, reading, i)
		if len(s.XIDs) != 20 {
			t.Errorf("GPU %d has %d XIDs; want 20", i, len(s.XIDs))
		}
		for n, x := range s.XIDs {
			if x.Code != n+1 {
				t.Errorf("GPU %d: XID %d is %d; want them in order", i, n, x.Code)
			}
		}
	}
}

// tryTalk sends an event and returns the answer, which may come without the event being read.

func TestControlBounds(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "control.sock"))
	r.await(t, msgOpen)

	long := dial(t, r.socket)
	if _, err := io.WriteString(long, strings.Repeat(" ", unixsock.MaxRequest+10)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(long)
	if want := fmt.Sprintf("{\"ok\":false,\"error\":\"the line is longer than %d bytes\"}\n", unixsock.MaxRequest); string(answer) != want {
		t.Errorf("a long line gets %q, %v; want %q and the end", answer, err, want)
	}
	_ = long.Close()

	var conns []net.Conn
	for len(conns) < unixsock.MaxConnections {
		conn := dial(t, r.socket)
		line, err := tryTalk(conn)
		switch {
		case err == nil && line == `{"ok":true}`: // it is being served
			conns = append(conns, conn)
		case len(conns) < unixsock.MaxConnections-1: // the last slot may still be the long line's
			t.Fatalf("connection %d gets %q, %v", len(conns), line, err)
		}
	}
	if line, err := tryTalk(dial(t, r.socket)); !strings.Contains(line, `16 connections are open already`) {
		t.Errorf("one connection too many gets %q, %v", line, err)
	}
	_ = conns[0].Close()
	for {
		if _, err := send(t, r, `{gpu: 0, xid: 13}`); err == nil {
			break // the place is free again
		} else if !strings.Contains(err.Error(), "are open already") {
			t.Fatal(err)
		}
	}
}

func tryTalk(conn net.Conn) (string, error) {
	_, _ = io.WriteString(conn, "{gpu: 0, xid: 13}\n")
	line, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSuffix(line, "\n"), err
}

func TestRunLogsABadPathOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		core, logs := observer.New(zap.InfoLevel)
		cfg := DefaultConfig()
		cfg.Control = path
		src, err := New(cfg, zap.New(core))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		if err := src.Run(ctx); err != nil || time.Since(start) != time.Hour {
			t.Errorf("Run gave %v after %v; want nil after an hour", err, time.Since(start))
		}
		if logs.Len() != 1 || logs.FilterMessage(msgClosed).Len() != 1 || logs.All()[0].ContextMap()["socket"] != path {
			t.Errorf("logged %v; want one line with the path", logs.All())
		}
	})
}

// TestRunComesRight: the file that is in the way goes away.
func TestRunComesRight(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r := run(t, path)
	r.await(t, msgClosed)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	r.await(t, msgOpen)
	if _, err := send(t, r, `{gpu: 0, xid: 13}`); err != nil {
		t.Error(err)
	}
}

func TestRunEndsInOrder(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "control.sock"))
	r.await(t, msgOpen)
	conn := dial(t, r.socket)
	talk(t, conn, `{gpu: 0, xid: 13}`) // a connection is open
	if err := r.stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	if names := listing(t, filepath.Dir(r.socket)); len(names) != 0 {
		t.Errorf("left behind: %v", names)
	}
	if _, err := io.ReadAll(conn); err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
		t.Errorf("the connection is still open: %v", err)
	}
}

func TestRunWithoutControlWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newSource(t, DefaultConfig())
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		if err := src.Run(ctx); err != nil || time.Since(start) != time.Hour {
			t.Errorf("Run gave %v after %v; want nil after an hour", err, time.Since(start))
		}
	})
}

func TestSendFails(t *testing.T) {
	dir := t.TempDir()
	good := ev(t, 0, `{gpu: 3, xid: 79}`)

	if _, err := Send(t.Context(), filepath.Join(dir, "nobody"), good); err == nil || !strings.Contains(err.Error(), "source.sim.control") {
		t.Errorf("nobody listens: %v", err)
	}
	if _, err := Send(t.Context(), filepath.Join(dir, "nobody"), ev(t, time.Second, `{gpu: 3, xid: 79}`)); err == nil || !strings.HasPrefix(err.Error(), "at: ") {
		t.Errorf("with a time: %v", err)
	}
	if _, err := Send(t.Context(), filepath.Join(dir, "nobody"), Event{XID: good.XID}); err == nil || !strings.HasPrefix(err.Error(), "gpu: ") {
		t.Errorf("without a GPU: %v", err)
	}

	// Something else listens: one that says nothing, then one that talks of other things.
	l, err := net.Listen("unix", filepath.Join(dir, "other"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	ctx, cancel := context.WithCancelCause(t.Context())
	accepted := make(chan net.Conn)
	go func() {
		conn, _ := l.Accept()
		cancel(errors.New("enough"))
		accepted <- conn
		conn, _ = l.Accept()
		_, _ = io.WriteString(conn, "220 mail\n")
		accepted <- conn
	}()
	if _, err := Send(ctx, l.Addr().String(), good); err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("no answer: %v; want the context's cause", err)
	}
	_ = (<-accepted).Close()
	if reply, err := Send(t.Context(), l.Addr().String(), good); err == nil || reply != "220 mail" || !strings.Contains(err.Error(), "does not answer as an agent does") {
		t.Errorf("another answer: %q, %v", reply, err)
	}
	_ = (<-accepted).Close()
}
