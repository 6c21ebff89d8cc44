package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// lock is the right to write a state file. It locks a file beside the state file, because a rename replaces the state file
// itself. The kernel releases it with the process.
type lock struct {
	path string // of the state file
	f    *os.File
}

// lockedError reports that another agent holds the lock.
type lockedError struct{ path, holder string }

func (e *lockedError) Error() string {
	return fmt.Sprintf("%s: locked by another agent (%s); reading only until that agent ends", e.path, e.holder)
}

func acquireLock(path string) (*lock, error) {
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
		n, _ := f.ReadAt(holder, 0) // informative only
		_ = f.Close()
		return nil, &lockedError{path, string(bytes.TrimSpace(holder[:n]))}
	case err != nil && !errors.Is(err, errors.ErrUnsupported): // a file system without locks works as if unlocked
		_ = f.Close()
		return nil, fmt.Errorf("%s: cannot lock: %w", f.Name(), err)
	}
	host, _ := os.Hostname() // in a pod, the pod's name
	text := fmt.Sprintf("pid %d on %s\n", os.Getpid(), host)
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(text), 0) // informative only
	}
	return &lock{path, f}, nil
}

// holds reports whether the lock is that of path and its file still exists for other agents to see.
func (l *lock) holds(path string) bool {
	if l == nil || l.path != path {
		return false
	}
	held, err := l.f.Stat()
	current, statErr := os.Stat(path + ".lock")
	return err == nil && statErr == nil && os.SameFile(held, current)
}

func (l *lock) release() {
	if l != nil {
		_ = l.f.Close()
	}
}
