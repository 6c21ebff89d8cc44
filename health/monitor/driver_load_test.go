package monitor

import (
	"os"
	"path/filepath"
	"testing"
)

func TestInode(t *testing.T) {
	dir, other := filepath.Join(t.TempDir(), "nvidia"), t.TempDir()
	if got := inode(dir); got != "" {
		t.Errorf("no directory: %q", got)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if a, b := inode(dir), inode(dir); a == "" || a != b {
		t.Errorf("one directory: %q and %q", a, b)
	}
	if a, b := inode(dir), inode(other); a == b {
		t.Errorf("two directories: %q", a)
	}
}
