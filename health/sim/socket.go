package sim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// maxAddress is what a path to bind may have: a socket address holds 108 bytes on Linux, with a zero at the
// end (unix(7)).
const maxAddress = 107

// addressLen is the length of the longest address that listenControl needs for path.
func addressLen(path string) int {
	const private = len("/.sim-4294967295/s") // MkdirTemp appends a random uint32
	return max(len(path), len(filepath.Dir(path))+private)
}

// dialTimeout is for asking whether a socket that is there is alive.
const dialTimeout = time.Second

// controlListener removes its socket when it is closed, unless it is another's by then.
type controlListener struct {
	net.Listener
	path string
	info fs.FileInfo // of our socket

	once sync.Once
	err  error
}

// listenControl opens a socket that only our user can connect to. What a dead process left is replaced; a
// socket that answers and a file that is no socket are errors, and stay.
//
// The mode has to be right before anybody can connect. Binding and then changing the mode would leave a
// gap, and the umask belongs to the whole process, with its other goroutines. So the socket is made in a
// directory that only we can enter and linked into place when it is finished. A link, unlike a rename, never
// takes another file's place.
func listenControl(ctx context.Context, path string) (net.Listener, error) {
	if err := removeStale(ctx, path); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".sim-") // made with mode 0700
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	private := filepath.Join(dir, "s")
	l, err := new(net.ListenConfig).Listen(ctx, "unix", private)
	if err != nil {
		return nil, err
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // controlListener does it, by the name that counts
	}
	info, err := place(private, path)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &controlListener{Listener: l, path: path, info: info}, nil
}

// place makes a socket known under its name.
func place(private, path string) (fs.FileInfo, error) {
	if err := os.Chmod(private, 0o600); err != nil {
		return nil, err
	}
	info, err := os.Lstat(private)
	if err != nil {
		return nil, err
	}
	return info, os.Link(private, path)
}

// removeStale removes a socket at path that nobody listens on.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s is not a socket and stays as it is; remove it or use another path", path)
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err == nil {
		_ = conn.Close()
		return fmt.Errorf("somebody listens on %s already; stop that or use another path", path)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%s may be in use: %w", path, err)
	}
	return os.Remove(path)
}

// Close ends the listening and removes the socket. Only the first call does anything.
func (l *controlListener) Close() error {
	l.once.Do(func() {
		// While we listen, no other file can have our inode.
		if now, err := os.Lstat(l.path); err == nil && os.SameFile(now, l.info) {
			l.err = os.Remove(l.path)
		}
		l.err = errors.Join(l.err, l.Listener.Close())
	})
	return l.err
}
