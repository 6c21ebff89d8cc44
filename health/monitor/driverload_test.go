package monitor

import (
	"os"
	"path/filepath"
	"testing"
)

func TestInode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "nvidia")
	if got := inode(dir); got != "" {
		t.Errorf("a module that is not loaded has %q", got)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if a, b := inode(dir), inode(dir); a == "" || a != b {
		t.Errorf("one load is %q and %q", a, b)
	}
	other := filepath.Join(t.TempDir(), "nvidia")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	if a, b := inode(dir), inode(other); a == b {
		t.Errorf("two directories are both %q", a)
	}
}
