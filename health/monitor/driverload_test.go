package monitor

import (
	"os"
	"path/filepath"
	"testing"
)

func TestInodeOf(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "nvidia")
	if got := inodeOf(dir); got != "" {
		t.Errorf("a module that is not loaded has %q", got)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if a, b := inodeOf(dir), inodeOf(dir); a == "" || a != b {
		t.Errorf("one load is %q and %q", a, b)
	}
	other := filepath.Join(t.TempDir(), "nvidia")
	if err := os.Mkdir(other, 0o700); err != nil {
		t.Fatal(err)
	}
	if a, b := inodeOf(dir), inodeOf(other); a == b {
		t.Errorf("two directories are both %q", a)
	}
}
