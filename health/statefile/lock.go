package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpu-node-agent/gpu-node-agent/health/durable"
	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
)

// lockPath returns the path of the lock of a state directory: a file in it, because a rename replaces the others.
func lockPath(dir string) string { return filepath.Join(dir, "lock") }

// lockedError reports that another agent holds the lock.
type lockedError struct{ dir, holder string }

func (e *lockedError) Error() string {
	return fmt.Sprintf("%s: locked by another agent (%s); reading only until that agent ends", e.dir, e.holder)
}

// acquireLock locks a state directory for writing, and creates it. A file system without locks works as if unlocked.
func acquireLock(dir string) (*filelock.Held, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	l, err := filelock.Acquire(lockPath(dir), os.O_RDWR|os.O_CREATE)
	switch {
	case errors.Is(err, filelock.ErrLocked):
		holder, _, _ := durable.Options{}.Read(lockPath(dir)) // informative only
		return nil, &lockedError{dir, string(bytes.TrimSpace(holder[:min(len(holder), 200)]))}
	case err != nil:
		return nil, err
	}
	host, _ := os.Hostname() // in a pod, the pod's name
	text := fmt.Sprintf("pid %d on %s\n", os.Getpid(), host)
	if err := l.File.Truncate(0); err == nil {
		_, _ = l.File.WriteAt([]byte(text), 0) // informative only
	}
	return l, nil
}
