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

func listing(t *testing.T, path string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*")) // hidden ones too
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// listenAt listens as another process does.
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

func dial(t *testing.T, path string) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestListen(t *testing.T) {
	for _, stale := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "control.sock")
		if stale {
			_ = listenAt(t, path).Close()
		}
		if names := listing(t, path); (len(names) == 1) != stale {
			t.Fatalf("files %v before; stale socket: %v", names, stale)
		}
		l, err := Listen(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Lstat(path)
		if err != nil || info.Mode() != fs.ModeSocket|0o600 {
			t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
		}
		if names := listing(t, path); len(names) != 1 {
			t.Errorf("files %v; want the socket only", names)
		}
		dial(t, path)
		for range 2 {
			if err := l.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
		if names := listing(t, path); len(names) != 0 {
			t.Errorf("files left: %v", names)
		}
	}
}

func TestListenKeepsServedSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	other := listenAt(t, path)
	if l, err := Listen(t.Context(), path); !errors.Is(err, ErrInUse) || l != nil || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, %v; want ErrInUse with the path", l, err)
	}
	_ = other.SetDeadline(time.Now().Add(20 * time.Second))
	for _, from := range []string{"Listen", "a client"} {
		if from == "a client" {
			dial(t, path)
		}
		conn, err := other.Accept()
		if err != nil {
			t.Fatalf("connection of %s: %v", from, err)
		}
		_ = conn.Close()
	}
}

func TestListenKeepsOtherFiles(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, link, dir} {
		if l, err := Listen(t.Context(), path); !errors.Is(err, ErrNotSocket) || l != nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, %v; want ErrNotSocket with the path", path, l, err)
		}
	}
	if text, err := os.ReadFile(link); err != nil || string(text) != "precious" {
		t.Errorf("the file has %q, %v", text, err)
	}
	if l, err := Listen(t.Context(), filepath.Join(dir, "no", "such")); !errors.Is(err, fs.ErrNotExist) || l != nil {
		t.Errorf("missing directory: got %v, %v", l, err)
	}
}

func TestCloseKeepsReplacedSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	listenAt(t, path)
	if err := l.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	dial(t, path)
}

func TestPathLen(t *testing.T) {
	dir := t.TempDir()
	// The maximum, once because of the directory's private socket and once because of the name itself.
	for _, base := range []string{"s", "a-name-longer-than-that-of-the-private-directory.sock"} {
		fill := MaxPath - PathLen(filepath.Join(dir, "d", base))
		path := filepath.Join(dir, "d"+strings.Repeat("d", fill), base)
		if got := PathLen(path); got != MaxPath {
			t.Fatalf("PathLen is %d; want %d", got, MaxPath)
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
