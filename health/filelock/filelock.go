// Package filelock locks files and directories for this process. A lock belongs to an inode: it holds across mount namespaces, paths and
// symbolic links, and the kernel releases it with the process (flock(2)).
package filelock

import (
	"errors"
	"fmt"
	"os"
	"syscall"
)

// Errors of Lock that callers tell apart.
var (
	ErrLocked      = errors.New("locked by another process")
	ErrUnsupported = errors.New("the file system has no locks")
)

// Lock locks an open file or directory until it is closed. It never waits.
func Lock(f *os.File) error { return lock(f, syscall.Flock) }

func lock(f *os.File, flock func(fd, how int) error) error {
	switch err := flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); { //nolint:gosec // a descriptor
	case err == nil:
		return nil
	case errors.Is(err, syscall.EWOULDBLOCK):
		return ErrLocked
	case errors.Is(err, errors.ErrUnsupported), errors.Is(err, syscall.ENOLCK): // ENOLCK: NFS without its lock daemon
		return fmt.Errorf("%s: %w: %w", f.Name(), ErrUnsupported, err)
	default:
		return fmt.Errorf("%s: cannot lock: %w", f.Name(), err)
	}
}

// Held is the lock of a path.
type Held struct {
	Path string
	File *os.File // open until Release

	unlocked error // ErrUnsupported; nil if the file is locked
}

// Acquire opens a file, or with syscall.O_DIRECTORY a directory, and locks it. It never waits: the error is ErrLocked if another process
// has the lock. On a file system without locks it succeeds, and Unsupported tells.
func Acquire(path string, flag int) (*Held, error) { return acquire(path, flag, syscall.Flock) }

func acquire(path string, flag int, flock func(fd, how int) error) (*Held, error) {
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		return nil, err
	}
	err = lock(f, flock)
	if err != nil && !errors.Is(err, ErrUnsupported) {
		_ = f.Close()
		return nil, err
	}
	return &Held{path, f, err}, nil
}

// AcquireUnlocked is Acquire as it is on a file system without locks, for tests.
func AcquireUnlocked(path string, flag int) (*Held, error) {
	return acquire(path, flag, func(int, int) error { return syscall.ENOSYS })
}

// Unsupported returns an ErrUnsupported if nothing keeps others from the path, otherwise nil.
func (h *Held) Unsupported() error { return h.unlocked }

// Of reports whether others that open a path find the locked file. A nil Held is of no path.
func (h *Held) Of(path string) bool {
	if h == nil {
		return false
	}
	held, err := h.File.Stat()
	current, statErr := os.Stat(path)
	return err == nil && statErr == nil && os.SameFile(held, current)
}

// Release ends the lock. It may be called for nil.
func (h *Held) Release() {
	if h != nil {
		_ = h.File.Close() // nothing was written that could be lost
	}
}
