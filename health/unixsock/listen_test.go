package unixsock

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := Listen(t.Context(), path)
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

func TestListenReplacesTheSocketOfTheDead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	_ = listenAt(t, path).Close()
	if _, err := os.Lstat(path); err != nil {
		t.Fatalf("there is no stale socket to replace: %v", err)
	}
	l, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	dial(t, path)
	_ = l.Close()
}

func TestListenLeavesTheLivingAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	other := listenAt(t, path)
	if l, err := Listen(t.Context(), path); err == nil || l != nil || !strings.Contains(err.Error(), "another process serves "+path) {
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

func TestListenLeavesOtherFilesAlone(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, link, dir} {
		if l, err := Listen(t.Context(), path); err == nil || l != nil || !strings.Contains(err.Error(), path+" is not a socket") {
			t.Errorf("%s: got %v, %v; want an error that names it", path, l, err)
		}
	}
	if text, err := os.ReadFile(link); err != nil || string(text) != "precious" {
		t.Errorf("the file has %q, %v", text, err)
	}
	if l, err := Listen(t.Context(), filepath.Join(dir, "no", "such")); !errors.Is(err, fs.ErrNotExist) || l != nil {
		t.Errorf("no directory: got %v, %v", l, err)
	}
}

func TestControlListenerRemovesOnlyItsOwn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := Listen(t.Context(), path)
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
		fill := MaxPath - PathLen(filepath.Join(dir, "d", base))
		path := filepath.Join(dir, "d"+strings.Repeat("d", fill), base)
		if got := PathLen(path); got != MaxPath {
			t.Fatalf("the path needs %d bytes; want just %d", got, MaxPath)
		}
		if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		l, err := Listen(t.Context(), path)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		dial(t, path)
		_ = l.Close()
	}
}

func dial(t *testing.T, socket string) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}
