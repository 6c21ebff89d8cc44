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
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gpu-node-agent/gpu-node-agent/health/unixsock"
)

func TestControlBounds(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "control.sock"))
	r.await(t, msgOpen)

	long := dial(t, r.socket)
	if _, err := io.WriteString(long, strings.Repeat(" ", unixsock.MaxLine+10)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(long)
	if want := fmt.Sprintf("{\"ok\":false,\"error\":\"the line is longer than %d bytes\"}\n", unixsock.MaxLine); string(answer) != want {
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
