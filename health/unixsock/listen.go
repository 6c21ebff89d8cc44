// Package unixsock provides unix sockets that only their owner can connect to, and HTTP on them: a server of routes, and a client.
package unixsock

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

	"github.com/gpu-node-agent/gpu-node-agent/health/wait"
)

// MaxPath is the maximum length in bytes of a path to bind: a socket address holds 108 bytes on Linux, with a zero at
// the end (unix(7)).
const MaxPath = 107

// PathLen returns the length of the longest path that Listen binds for path; it must not exceed MaxPath.
func PathLen(path string) int {
	const private = len("/.gna-4294967295/s") // MkdirTemp appends a random uint32
	return max(len(path), len(filepath.Dir(path))+private)
}

const (
	dialTimeout = time.Second           // for checking whether a process serves an existing socket
	listenDelay = 50 * time.Millisecond // the longest time that another process may take from bind to listen
)

// Errors of Listen that callers tell apart.
var (
	ErrInUse     = errors.New("another process serves")
	ErrNotSocket = errors.New("not a socket")
)

// Socket is a listener on a path, and the identity of the file that it created there.
type Socket struct {
	net.Listener
	path string
	file fs.FileInfo

	once sync.Once
	err  error
}

// Listen listens on path with mode 0600. It replaces a socket that no process serves. If a process serves the socket,
// the error is ErrInUse; if the file is not a socket, ErrNotSocket; Listen leaves either in place.
//
// The mode must be right before the first client can connect. A chmod after bind would leave a gap, and the umask
// applies to all goroutines of the process. So Listen binds in a directory that only its owner can enter, and links
// the socket to path once it listens. A link, unlike a rename, never replaces another file.
func Listen(ctx context.Context, path string) (*Socket, error) {
	if err := RemoveStale(ctx, path); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".gna-") // with mode 0700
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
		u.SetUnlinkOnClose(false) // Close removes path instead
	}
	file, err := publish(private, path)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &Socket{Listener: l, path: path, file: file}, nil
}

// publish sets the socket's mode and links it to path.
func publish(private, path string) (fs.FileInfo, error) {
	if err := os.Chmod(private, 0o600); err != nil {
		return nil, err
	}
	info, err := os.Lstat(private)
	if err != nil {
		return nil, err
	}
	return info, os.Link(private, path)
}

// RemoveStale removes a socket at path that no process serves. It returns Listen's errors.
func RemoveStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s: %w (%s); move the file or use another path", path, ErrNotSocket, info.Mode())
	}
	// Only refused connections prove that no process serves the socket: a slow process accepts later, and one between
	// bind and listen refuses at first.
	for try := range 2 {
		if try > 0 {
			if !wait.Sleep(ctx, listenDelay) {
				return ctx.Err()
			}
		}
		conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "unix", path)
		if err == nil {
			_ = conn.Close()
			return fmt.Errorf("%w %s; does a second gpu-node-agent run on this node?", ErrInUse, path)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("%s: socket of another process, which may be in use: %w", path, err)
		}
	}
	if now, err := os.Lstat(path); err != nil || !SameSocket(info, now) {
		return fmt.Errorf("%s: socket of another process, which was just replaced", path)
	}
	return os.Remove(path)
}

// InPlace reports whether path still leads to this socket. Comparing device and inode suffices: the inode cannot be
// reused while the socket exists.
func (s *Socket) InPlace() bool {
	info, err := os.Lstat(s.path)
	return err == nil && os.SameFile(info, s.file)
}

// Path returns where the socket was created.
func (s *Socket) Path() string { return s.path }

// lossInterval is how often awaitLoss looks.
const lossInterval = time.Second

// awaitLoss waits until the socket is not in place; it returns false if ctx ends first.
func (s *Socket) awaitLoss(ctx context.Context) bool {
	tick := time.NewTicker(lossInterval)
	defer tick.Stop()
	for s.InPlace() {
		if !wait.For(ctx, tick.C) {
			return false
		}
	}
	return ctx.Err() == nil
}

// Remove removes the socket from its directory, unless another file has replaced it. Open connections continue.
func (s *Socket) Remove() error {
	if !s.InPlace() {
		return nil
	}
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Close stops listening and removes the socket. Later calls return the first result.
func (s *Socket) Close() error {
	s.once.Do(func() { s.err = errors.Join(s.Remove(), s.Listener.Close()) })
	return s.err
}

// SameSocket reports whether a and b describe the same socket of another process; nil describes a missing one. Inodes
// are reused, so it also compares the times of creation.
func SameSocket(a, b fs.FileInfo) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime())
}
