package cdi

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
)

// temporaryPattern is that of the names of partial specs. CDI ignores files that end in neither .json nor .yaml.
const temporaryPattern = ".gpu-node-agent-*.tmp"

// createTemporary creates a file for a partial spec. It is locked until it is closed, also by the end of the process, so that
// RemoveTemporaries leaves it alone. On a file system without locks, RemoveTemporaries leaves all alone.
func createTemporary(dir string) (*os.File, error) {
	for {
		f, err := os.CreateTemp(dir, temporaryPattern)
		if err != nil {
			return nil, err
		}
		lockErr := filelock.Lock(f)
		_, err = os.Lstat(f.Name())
		if !errors.Is(lockErr, filelock.ErrLocked) && !errors.Is(err, fs.ErrNotExist) {
			return f, nil
		}
		_ = f.Close() // RemoveTemporaries was faster
	}
}

// RemoveTemporaries removes the temporary files of writers that were killed.
func RemoveTemporaries(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, temporaryPattern))
	for _, name := range left {
		if rmErr := removeUnlocked(name); !errors.Is(rmErr, fs.ErrNotExist) {
			err = errors.Join(err, rmErr)
		}
	}
	return err
}

// removeUnlocked removes a file unless a writer has locked it.
func removeUnlocked(name string) error {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if filelock.Lock(f) != nil {
		return nil
	}
	return os.Remove(name)
}
