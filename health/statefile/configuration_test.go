package statefile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// keep makes a harness save a configuration.
func (h *harness) keep(text string) {
	h.configuration.Store(new([]byte(text)))
	synctest.Wait()
}

// wantConfigurationLogged checks how often a failure to save the configuration was logged.
func (h *harness) wantConfigurationLogged(t *testing.T, want int) {
	t.Helper()
	n := 0
	for _, e := range h.logs.All() {
		if e.ContextMap()["file"] == ConfigurationPath(h.Dir.path) {
			n++
		}
	}
	if n != want {
		t.Errorf("%d failures logged, want %d: %v", n, want, h.logs.All())
	}
}

// The configuration is saved at once, before the first snapshot, and again only if the file differs.
func TestConfigurationSaved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "new")
		saved := ConfigurationPath(dir)
		h := loadAndStart(t, dir)
		h.keep("one")
		wantContent(t, saved, "one\n")
		before, err := os.Stat(saved)
		must(t, err)
		if before.Mode().Perm() != 0o600 {
			t.Errorf("mode %v", before.Mode())
		}
		h.keep("one")
		advance(3 * checkInterval)
		h.stop()
		h = loadAndStart(t, dir) // the next process
		h.keep("one")
		advance(3 * checkInterval)
		if after, err := os.Stat(saved); err != nil || !os.SameFile(before, after) {
			t.Errorf("an unchanged configuration was written again: %v", err)
		}
		h.keep("two")
		wantContent(t, saved, "two\n")
		for _, spoil := range []func() error{
			func() error { return os.Remove(saved) },
			func() error { return os.Truncate(saved, 1) },
			func() error { return os.RemoveAll(dir) },
		} {
			must(t, spoil())
			advance(checkInterval)
			wantContent(t, saved, "two\n")
		}
		h.configuration.Store(new([]byte("three")))
		h.stop() // saves it
		wantContent(t, saved, "three\n")
		h.wantConfigurationLogged(t, 0)
	})
}

// Without a configuration file the last one stays.
func TestConfigurationStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := loadAndStart(t, dir)
		h.keep("one")
		h.keep("")
		advance(3 * checkInterval)
		wantContent(t, ConfigurationPath(dir), "one\n")
		h.stop()
	})
}

// Only the holder of the lock saves its configuration.
func TestConfigurationOfTwoAgents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		saved := ConfigurationPath(dir)
		first, second := loadAndStart(t, dir), newHarness(dir)
		first.keep("first")
		_, err := second.Load()
		must(t, err)
		second.start(t)
		second.keep("second")
		advance(3 * checkInterval)
		wantContent(t, saved, "first\n")
		first.stop()
		advance(retryLockAfter)
		wantContent(t, saved, "second\n")
		second.stop()
	})
}

// A disk that hangs while the configuration is saved is a failure of the directory.
func TestConfigurationHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		h := loadAndStart(t, dir)
		synctest.Wait()
		answer := h.hang()
		h.keep("one")
		advance(time.Minute)
		if s := h.Status(); !strings.Contains(s.Err, "has not responded for 1m0s") {
			t.Errorf("status %+v", s)
		}
		answer()
		advance(checkInterval)
		if s := h.Status(); s.Err != "" {
			t.Errorf("status %+v", s)
		}
		wantContent(t, ConfigurationPath(dir), "one\n")
		h.stop()
	})
}

// A failure is logged once. It does not affect the state.
func TestConfigurationNotWritable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		saved := ConfigurationPath(dir)
		must(t, os.Mkdir(saved, 0o750))
		keepInPlace(t, saved)
		h := loadAndStart(t, dir)
		h.keep("one")
		h.store(snapshotOf(t, "dcgm"))
		advance(3 * checkInterval)
		h.wantConfigurationLogged(t, 1)
		h.wantFailuresLogged(t, 0)
		wantDevices(t, dir, map[string]int{"dcgm": 3})
		if s := h.Status(); s.Err != "" {
			t.Error(s.Err)
		}
		entries, err := os.ReadDir(dir)
		must(t, err)
		if len(entries) != 104 { // the lock, the state file, its spare file, the directory, and what keeps that in place
			t.Errorf("left %v", entries)
		}
		must(t, os.Remove(saved))
		advance(checkInterval)
		wantContent(t, saved, "one\n")
		must(t, errors.Join(os.Remove(saved), os.Mkdir(saved, 0o750)))
		advance(checkInterval)
		h.wantConfigurationLogged(t, 2)
		h.stop()
	})
}
