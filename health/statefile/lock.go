package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// stateLock is the right to write a state file. The lock is on a file beside it, because a rename replaces the state file
// itself. The kernel releases it with the process.
type stateLock struct {
	path string // of the state file
	f    *os.File
}

// lockedError is that another agent has the lock.
type lockedError struct{ path, holder string }

func (e *lockedError) Error() string {
	return fmt.Sprintf("%s: locked by another agent (%s); this one reads it, and takes it over when that one ends", e.path, e.holder)
}

func lockState(path string) (*stateLock, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	switch {
	case errors.Is(err, syscall.EWOULDBLOCK):
		holder := make([]byte, 200)
		n, _ := f.ReadAt(holder, 0) // it only names somebody
		_ = f.Close()
		return nil, &lockedError{path, string(bytes.TrimSpace(holder[:n]))}
	case err != nil && !errors.Is(err, errors.ErrUnsupported): // where a file system has no locks, all is as without
		_ = f.Close()
		return nil, fmt.Errorf("%s: cannot be locked: %w", f.Name(), err)
	}
	host, _ := os.Hostname() // in a pod, the pod's name
	text := fmt.Sprintf("pid %d on %s\n", os.Getpid(), host)
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(text), 0) // a full disk costs the name only
	}
	return &stateLock{path, f}, nil
}

// is reports whether the lock is that of a path, and its file is still there for others to see.
func (l *stateLock) is(path string) bool {
	if l == nil || l.path != path {
		return false
	}
	ours, err := l.f.Stat()
	there, lerr := os.Stat(path + ".lock")
	return err == nil && lerr == nil && os.SameFile(ours, there)
}

func (l *stateLock) release() {
	if l != nil {
		_ = l.f.Close()
	}
}
