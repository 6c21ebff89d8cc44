package cdi

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// The files of killed writers are removed, however young, and no file of a writer that still runs or of another program.
func TestRemoveTemporaries(t *testing.T) {
	dir := t.TempDir()
	running, err := createTemporary(dir)
	if err != nil {
		t.Fatal(err)
	}
	killed, err := createTemporary(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := killed.Close(); err != nil { // so does the kernel
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "other.tmp"), "")
	remains := func() (names []string) {
		if err := RemoveTemporaries(dir); err != nil {
			t.Fatal(err)
		}
		entries, _ := os.ReadDir(dir)
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	if got, want := remains(), []string{filepath.Base(running.Name()), "other.tmp"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if err := running.Close(); err != nil {
		t.Fatal(err)
	}
	if got, want := remains(), []string{"other.tmp"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A process that starts while another one writes does not disturb it.
func TestRemoveTemporariesWhileWriting(t *testing.T) {
	dir := t.TempDir()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := RemoveTemporaries(dir); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for range 200 {
		if err := WriteClaimSpec(dir, "u", []ClaimDevice{{Name: "x", Env: map[string]string{"A": "1"}}}); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	<-stopped
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("left: %v", entries)
	}
}

// A spec that fits is not written again, and what a killed writer left is still removed.
func TestWriterRemovesTemporaries(t *testing.T) {
	in := testInput(t, hostDir(t, "/", driverVersion), 1)
	for range 2 {
		left := filepath.Join(in.Config.Dir, ".gpu-node-agent-1.tmp")
		writeFile(t, left, "{")
		w, _ := newTestWriter(t)
		if err := w.Ensure(in); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(left); err == nil {
			t.Error("a temporary file is left")
		}
	}
}
