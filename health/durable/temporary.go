package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/gpu-node-agent/gpu-node-agent/health/filelock"
)

// temporaryPattern is the pattern of the names of temporary files, whatever they will be: CDI ignores files that end in neither .json nor
// .yaml, and Node Feature Discovery ignores hidden files.
const temporaryPattern = ".gpu-node-agent-*.tmp"

// replaceByTemporary replaces a file by a temporary one, in the first directory that can have it.
func (d disk) replaceByTemporary(path string, text []byte, o Options) (info fs.FileInfo, err error) {
	dirs := o.TempDirs
	if dirs == nil {
		dirs = []string{filepath.Dir(path)}
	}
	_ = RemoveTemporaries(dirs...) // the next one may succeed; they do no harm
	for _, dir := range dirs {
		if info, err = d.replaceFrom(dir, path, text, o); err == nil {
			return info, d.syncDirectory(path)
		}
	}
	return nil, err
}

// replaceFrom replaces a file by way of a temporary one in dir.
func (d disk) replaceFrom(dir, path string, text []byte, o Options) (info fs.FileInfo, err error) {
	f, err := createTemporary(dir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
		err = errors.Join(err, f.Close()) // last, because it releases the lock
	}()
	if _, err = d.writeAt(f, text, 0); err != nil {
		return nil, err
	}
	if o.Mode != 0 {
		err = d.chmod(f, o.Mode)
	}
	if err = errors.Join(err, d.sync(f)); err != nil {
		return nil, err
	}
	if o.Check != nil {
		if err = o.Check(f.Name()); err != nil {
			return nil, err
		}
	}
	if info, err = f.Stat(); err != nil {
		return nil, err
	}
	return info, d.rename(f.Name(), path)
}

// createTemporary creates a file with a mode of 0600. It is locked until it is closed, also by the end of the process, so that
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

// RemoveTemporaries removes the temporary files of writers that were killed, however young, from directories. Replace does that too: this
// is for a start at which all files may be as they should.
func RemoveTemporaries(dirs ...string) (err error) {
	for _, dir := range dirs {
		entries, _ := os.ReadDir(dir) // Replace says why a directory cannot be used
		for _, e := range entries {
			if ok, _ := filepath.Match(temporaryPattern, e.Name()); !ok {
				continue
			}
			if rmErr := removeUnlocked(filepath.Join(dir, e.Name())); !errors.Is(rmErr, fs.ErrNotExist) {
				err = errors.Join(err, rmErr)
			}
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
