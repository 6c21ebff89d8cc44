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

// lockPath returns the path of the lock of a state file: a file beside it, because a rename replaces the state file itself.
func lockPath(stateFile string) string { return stateFile + ".lock" }

// lockedError reports that another agent holds the lock.
type lockedError struct{ path, holder string }

func (e *lockedError) Error() string {
	return fmt.Sprintf("%s: locked by another agent (%s); reading only until that agent ends", e.path, e.holder)
}

// acquireLock locks a state file for writing. A file system without locks works as if unlocked.
func acquireLock(stateFile string) (*filelock.Held, error) {
	if err := os.MkdirAll(filepath.Dir(stateFile), 0o750); err != nil {
		return nil, err
	}
	l, err := filelock.Acquire(lockPath(stateFile), os.O_RDWR|os.O_CREATE)
	switch {
	case errors.Is(err, filelock.ErrLocked):
		holder, _, _ := durable.Options{}.Read(lockPath(stateFile)) // informative only
		return nil, &lockedError{stateFile, string(bytes.TrimSpace(holder[:min(len(holder), 200)]))}
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
