package chaos

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
)

// disk is the directory of the state file. If mounting is permitted it is a file system that can be full; otherwise the
// directory is moved away.
type disk struct {
	dir     string
	mounted bool
}

func newDisk(dir string) (*disk, error) {
	if err := os.Mkdir(dir, 0o750); err != nil {
		return nil, err
	}
	err := syscall.Mount("chaos", dir, "tmpfs", 0, "size=1m")
	return &disk{dir: dir, mounted: err == nil}, nil
}

func (d *disk) description() string {
	if d.mounted {
		return "a tmpfs"
	}
	return "a directory, moved away when full: mounting is not permitted"
}

func (d *disk) fill() error {
	if !d.mounted {
		return errors.Join(os.Rename(d.dir, d.dir+".away"), os.WriteFile(d.dir, nil, 0o600))
	}
	f, err := os.Create(filepath.Join(d.dir, "filler"))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for _, size := range []int{64 << 10, 4 << 10, 1} { // fill to the last byte
		for block := make([]byte, size); err == nil; {
			_, err = f.Write(block)
		}
		if !errors.Is(err, syscall.ENOSPC) {
			return err
		}
		err = nil
	}
	return nil
}

func (d *disk) free() error {
	if !d.mounted {
		return errors.Join(os.Remove(d.dir), os.Rename(d.dir+".away", d.dir))
	}
	return os.Remove(filepath.Join(d.dir, "filler"))
}

func (d *disk) end() error {
	if !d.mounted {
		return nil
	}
	return syscall.Unmount(d.dir, syscall.MNT_DETACH)
}
