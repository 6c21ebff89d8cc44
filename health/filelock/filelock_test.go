package filelock

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// The lock of a directory holds by any path, leaves no file, and ends with its release. A new directory at the path is another one.
func TestAcquireDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "device-plugins")
	link := filepath.Join(t.TempDir(), "link")
	if err := errors.Join(os.Mkdir(dir, 0o750), os.Symlink(dir, link)); err != nil {
		t.Fatal(err)
	}
	first, err := Acquire(dir, syscall.O_DIRECTORY)
	if err != nil || first.Unsupported() != nil || !first.Of(dir) || !first.Of(link) {
		t.Fatalf("%+v, %v", first, err)
	}
	for _, path := range []string{dir, link} {
		if _, err := Acquire(path, syscall.O_DIRECTORY); !errors.Is(err, ErrLocked) {
			t.Errorf("%s a second time: %v", path, err)
		}
	}
	if entries, _ := os.ReadDir(dir); len(entries) > 0 {
		t.Errorf("left: %v", entries)
	}
	if err := errors.Join(os.Rename(dir, dir+".old"), os.Mkdir(dir, 0o750)); err != nil {
		t.Fatal(err)
	}
	if first.Of(dir) {
		t.Error("the lock of a directory that was replaced counts for the new one")
	}
	if !first.Of(dir + ".old") {
		t.Error("the lock does not move with its directory")
	}
	second, err := Acquire(link, syscall.O_DIRECTORY)
	if err != nil || !second.Of(link) {
		t.Fatalf("the new directory: %+v, %v", second, err)
	}
	second.Release()
	third, err := Acquire(dir, syscall.O_DIRECTORY)
	if err != nil {
		t.Errorf("after the release: %v", err)
	}
	third.Release()
	if err := os.Remove(dir + ".old"); err != nil || first.Of(dir+".old") {
		t.Errorf("the lock of a directory that was removed counts: %v", err)
	}
	first.Release()
	(*Held)(nil).Release()
	if (*Held)(nil).Of(dir) {
		t.Error("no lock is of the directory")
	}
}

func TestAcquireErrors(t *testing.T) {
	dir := t.TempDir()
	if _, err := Acquire(filepath.Join(dir, "missing"), syscall.O_DIRECTORY); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	for name, c := range map[string]struct {
		flock                       error
		acquired, unsupported, lock bool
	}{
		"no locks":      {syscall.ENOSYS, true, true, false},
		"no NFS daemon": {syscall.ENOLCK, true, true, false},
		"locked":        {syscall.EWOULDBLOCK, false, false, true},
		"interrupted":   {syscall.EINTR, false, false, false},
	} {
		h, err := acquire(dir, syscall.O_DIRECTORY, func(int, int) error { return c.flock })
		if (err == nil) != c.acquired || errors.Is(err, ErrLocked) != c.lock ||
			h != nil && errors.Is(h.Unsupported(), ErrUnsupported) != c.unsupported {
			t.Errorf("%s: %+v, %v", name, h, err)
		}
		h.Release()
	}
}
