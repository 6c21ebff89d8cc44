package sim

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

func listing(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

// listenAt is what another process does.
func listenAt(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func TestListenControl(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := listenControl(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(path)
	if err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("the socket is %v, %v; want mode 0600", info.Mode(), err)
	}
	if names := listing(t, filepath.Dir(path)); len(names) != 1 {
		t.Errorf("beside the socket there is more: %v", names)
	}
	dial(t, path)
	for range 2 {
		if err := l.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	}
	if names := listing(t, filepath.Dir(path)); len(names) != 0 {
		t.Errorf("left behind: %v", names)
	}
}

func TestListenControlReplacesTheSocketOfTheDead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	_ = listenAt(t, path).Close()
	if _, err := os.Lstat(path); err != nil {
		t.Fatalf("there is no stale socket to replace: %v", err)
	}
	l, err := listenControl(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	dial(t, path)
	_ = l.Close()
}

func TestListenControlLeavesTheLivingAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	other := listenAt(t, path)
	if l, err := listenControl(t.Context(), path); err == nil || l != nil || !strings.Contains(err.Error(), "somebody listens on "+path) {
		t.Errorf("got %v, %v; want an error that names the socket", l, err)
	}
	_ = other.SetDeadline(time.Now().Add(20 * time.Second))
	if conn, err := other.Accept(); err != nil { // the one that asked
		t.Fatal(err)
	} else {
		_ = conn.Close()
	}
	dial(t, path)
	if conn, err := other.Accept(); err != nil {
		t.Errorf("the other process does not get connections any more: %v", err)
	} else {
		_ = conn.Close()
	}
}

func TestListenControlLeavesOtherFilesAlone(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, link, dir} {
		if l, err := listenControl(t.Context(), path); err == nil || l != nil || !strings.Contains(err.Error(), path+" is not a socket") {
			t.Errorf("%s: got %v, %v; want an error that names it", path, l, err)
		}
	}
	if text, err := os.ReadFile(link); err != nil || string(text) != "precious" {
		t.Errorf("the file has %q, %v", text, err)
	}
	if l, err := listenControl(t.Context(), filepath.Join(dir, "no", "such")); !errors.Is(err, fs.ErrNotExist) || l != nil {
		t.Errorf("no directory: got %v, %v", l, err)
	}
}

func TestControlListenerRemovesOnlyItsOwn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := listenControl(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	listenAt(t, path) // somebody else has taken the place
	if err := l.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	dial(t, path)
}

func TestAddressLen(t *testing.T) {
	dir := t.TempDir()
	// As long as it may be, with a short name and with a long one.
	for _, base := range []string{"s", "a-name-longer-than-that-of-the-private-directory.sock"} {
		fill := maxAddress - addressLen(filepath.Join(dir, "d", base))
		path := filepath.Join(dir, "d"+strings.Repeat("d", fill), base)
		if got := addressLen(path); got != maxAddress {
			t.Fatalf("the path needs %d bytes; want just %d", got, maxAddress)
		}
		if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		l, err := listenControl(t.Context(), path)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		dial(t, path)
		_ = l.Close()
	}
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
