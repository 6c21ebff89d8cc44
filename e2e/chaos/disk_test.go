package chaos

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
)

// disk is where the state file is. It is a file system of its own where that can be mounted, so that it is really
// full; elsewhere the directory is taken away.
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

func (d *disk) how() string {
	if d.mounted {
		return "a tmpfs that is full"
	}
	return "a directory that is gone: no right to mount"
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
	for _, size := range []int{64 << 10, 4 << 10, 1} { // to the last byte
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
