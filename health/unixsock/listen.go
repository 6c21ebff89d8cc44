// Package unixsock opens unix sockets that only our user can connect to, and takes nobody's place.
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
)

// MaxPath is what a path to bind may have in bytes: a socket address holds 108 bytes on Linux, with a zero at the
// end (unix(7)).
const MaxPath = 107

// PathLen is the length of the longest path that Listen needs for path; it must not be over MaxPath.
func PathLen(path string) int {
	const private = len("/.gna-4294967295/s") // MkdirTemp appends a random uint32
	return max(len(path), len(filepath.Dir(path))+private)
}

const (
	// dialTimeout is for asking whether a socket that is there is alive.
	dialTimeout = time.Second

	// birth is how long another process may take from bind to listen.
	birth = 50 * time.Millisecond
)

// Socket is a listening socket of ours, and the file by which we know it again.
type Socket struct {
	net.Listener
	path string
	file fs.FileInfo

	once sync.Once
	err  error
}

// Listen opens a socket. What a dead process left is replaced; a socket that answers and a file that is no
// socket are errors, and stay.
//
// The mode has to be right before anybody can connect. Binding and then changing the mode would leave a
// gap, and the umask belongs to the whole process, with its other goroutines. So the socket is made in a
// directory that only we can enter and linked into place when it listens. A link, unlike a rename, never
// takes another file's place.
func Listen(ctx context.Context, path string) (*Socket, error) {
	if err := removeStale(ctx, path); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".gna-") // made with mode 0700
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
		u.SetUnlinkOnClose(false) // Close does it, by the name that counts
	}
	file, err := place(private, path)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return &Socket{Listener: l, path: path, file: file}, nil
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
		return fmt.Errorf("%s is not a socket (%s) and stays as it is; move it away or use another path", path, info.Mode())
	}
	// Only refused connections prove that nobody is there: a process that is slow to answer is alive, and
	// one that has just made its socket refuses until it listens.
	for try := range 2 {
		if try > 0 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(birth):
			}
		}
		conn, err := (&net.Dialer{Timeout: dialTimeout}).DialContext(ctx, "unix", path)
		if err == nil {
			_ = conn.Close()
			return fmt.Errorf("another process serves %s; is a second gpu-node-agent running on this node?", path)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return fmt.Errorf("the socket %s is not ours and may be in use: %w", path, err)
		}
	}
	if now, err := os.Lstat(path); err != nil || !SameSocket(info, now) {
		return fmt.Errorf("the socket %s is not ours and has just changed", path)
	}
	return os.Remove(path)
}

// InPlace reports whether the path still leads to this socket. Device and inode suffice: the inode cannot
// be given to another file while we listen.
func (s *Socket) InPlace() bool {
	info, err := os.Lstat(s.path)
	return err == nil && os.SameFile(info, s.file)
}

// Remove removes the socket from its directory if it is still ours. Who is connected stays so.
func (s *Socket) Remove() error {
	if !s.InPlace() {
		return nil
	}
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Close ends the listening and removes the socket. Only the first call does anything.
func (s *Socket) Close() error {
	s.once.Do(func() { s.err = errors.Join(s.Remove(), s.Listener.Close()) })
	return s.err
}

// SameSocket reports whether two looks at a path that is not ours saw the same socket, where nil is none. Inodes
// are used again, so the time at which the socket was made counts too.
func SameSocket(a, b fs.FileInfo) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime())
}
